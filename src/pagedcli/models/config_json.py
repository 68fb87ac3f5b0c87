"""The JSON files of a model folder: read, converted, and refused with the file and the field. Free of torch."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pagedcli.errors import MissingModelError, ModelError

_T = TypeVar("_T")
Ids = int | tuple[int, ...] | None
Size = Annotated[int, msgspec.Meta(ge=1)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_BOUND = re.compile(r"Expected `(int|float)` [<>]=? \S+ - at `\$\.(\w+)(\[\d+\])?`")
# Larger than any model: a damaged or hostile file must not cause loops that run for hours.
MOST_LAYERS = 2**12
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), MOST_LAYERS),
}
_LARGEST_JSON = 2**26  # bytes; the weight index of a model of 100,000 tensors has 2**23


class _GenerationJson(msgspec.Struct):
    eos_token_id: Ids = None


class _AddedToken(msgspec.Struct):
    content: str
    id: int = -1


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _TokenizerConfigJson(msgspec.Struct):
    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. NaN and Infinity are accepted, as Hugging Face writes them.

    Raises: ModelError that names the file and, for broken JSON, the line and column.
    """
    if not path.parent.is_dir():
        raise MissingModelError(f"no model folder at {path.parent}", hint="check the path given with -m/--model")
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _LARGEST_JSON:
            raise ModelError(f"{path} has {num_bytes:,} bytes, allowed: {_LARGEST_JSON:,}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}", hint="use a Hugging Face model folder (config.json, *.safetensors)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, a number of 5,000 digits
        raise ModelError(f"cannot read {path}: {error}", hint="download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", hint="download the file again")
    return content


def check_supported(config: dict[str, Any], where: Path) -> None:
    """Refuse what neither a native decoder nor the fallback supports. Raises ModelError with the reason."""
    if config.get("is_encoder_decoder") is True:
        raise ModelError(f"{where.parent} is an encoder-decoder model; only decoder-only language models run here")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelError(f"{where}: architectures is {architectures!r}, not a list of names")
    text_config = config.get("text_config")
    for fields in (config, text_config if isinstance(text_config, dict) else {}):
        for name in _LARGEST.keys() & fields.keys():
            if isinstance(fields[name], int) and fields[name] > _LARGEST[name]:
                raise ModelError(f"{where}: {name} is {fields[name]}, but must be at most {_LARGEST[name]:,}")


def stop_ids(path: Path, config_ids: Ids, *, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: those of generation_config.json first, then those that only config.json has, then the
    tokenizer's."""
    generation_path = path / "generation_config.json"
    generation = _GenerationJson()
    if generation_path.is_file():
        generation = convert(read_json(generation_path), _GenerationJson, generation_path)
    ends = [token_id for token_id in _tokenizer_ends(path) if 0 <= token_id < vocab_size]
    return tuple(dict.fromkeys([*_as_list(generation.eos_token_id), *_as_list(config_ids), *ends]))


def _tokenizer_ends(path: Path) -> list[int]:
    """The id of the token that a folder's tokenizer calls the end of a text; empty if it cannot be read."""
    with suppress(ModelError, OSError, ValueError, RecursionError, msgspec.DecodeError):
        own = msgspec.convert(read_json(path / "tokenizer_config.json"), _TokenizerConfigJson, strict=False)
        end = own.eos_token if isinstance(own.eos_token, str | None) else own.eos_token.content
        for token_id, token in own.added_tokens_decoder.items():
            if token.content == end:
                return [token_id]
        if end is not None:
            tokenizer = msgspec.json.decode((path / "tokenizer.json").read_bytes(), type=_TokenizerJson)
            return [token.id for token in tokenizer.added_tokens if token.content == end]
    return []


def convert(content: dict[str, Any], kind: type[_T], where: Path) -> _T:
    """The fields of a struct from a JSON object. Raises: ModelError that names the file and the field."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        hint = "compare the file with the original on the Hub"
        if (found := _BOUND.fullmatch(str(error))) is not None:
            allowed = "at least 1" if found[1] == "int" else "positive and finite"
            raise ModelError(f"{where}: {found[2]} is {content[found[2]]}, but must be {allowed}", hint=hint) from error
        raise ModelError(f"{where}: {error}", hint=hint) from error


def _as_list(ids: Ids) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
