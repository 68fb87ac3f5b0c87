"""The files of a model's folder: JSON, read, converted, and refused with the file and the field, and what the headers
of its safetensors files say. Free of torch."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pagedcli.errors import MissingModelError, ModelError

_T = TypeVar("_T")
EosIds = int | tuple[int, ...] | None
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
    eos_token_id: EosIds = None


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
    named = (str(config.get("model_type")), *architectures)
    if config.get("is_causal") is False or any("bidirec" in name.lower() for name in named):
        raise ModelError(f"{where}: each token of {named[-1]} attends to later ones, too, which is not supported")
    text_config = config.get("text_config")
    for fields in (config, text_config if isinstance(text_config, dict) else {}):
        for name in _LARGEST.keys() & fields.keys():
            if isinstance(fields[name], int) and fields[name] > _LARGEST[name]:
                raise ModelError(f"{where}: {name} is {fields[name]}, but must be at most {_LARGEST[name]:,}")


def stop_ids(path: Path, config_ids: EosIds, *, vocab_size: int) -> tuple[int, ...]:
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


def _as_list(ids: EosIds) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


# ---------------------------------------------------------------------- safetensors

# How names began before transformers 4.52 in models that see images, which their publishers still write
_RENAMED = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "visual.": "model.visual.",
}
_PARTS = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    **{f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
}  # OLMo; Kimi Linear as transformers saves it
_OF_TEXT = ("model.embed_tokens.", "model.layers.", "model.norm.")  # Qwen2.5-VL's names lack the part's
_HEAD = re.compile(r"(lm_head|embed_out)\.weight")
_TABLE = re.compile(r".*(emb|wte)[^.]*\.weight")
_PACKED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # tensors that no plain module has
_LARGEST_HEADER = 2**27  # bytes; safetensors allows 100 MB
_CHUNK = 2**22  # bytes compared at a time


def todays_name(name: str, body: str = "model") -> str:
    """The name that transformers has for a tensor now. `body`: of the language model."""
    for part, today in _PARTS.items():
        name = name.replace(part, today)
    if name.startswith(("embed_tokens.", "layers.", "norm.")):  # saved without an output layer
        return f"{body}.{name}"
    if name.startswith(_OF_TEXT):
        return body + name.removeprefix("model")
    begin = next((begin for begin in _RENAMED if name.startswith(begin)), "")
    return _RENAMED[begin] + name[len(begin) :] if begin else name


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies."""

    file: Path
    kind: tuple[Any, Any]  # dtype and shape
    first: int  # bytes from the start of the file
    end: int

    def equals(self, other: "_Stored") -> bool:
        if self.kind != other.kind or self.end - self.first != other.end - other.first:
            return False
        with self.file.open("rb") as ours, other.file.open("rb") as theirs:
            ours.seek(self.first)
            theirs.seek(other.first)
            for place in range(self.first, self.end, _CHUNK):
                num_bytes = min(_CHUNK, self.end - place)
                if ours.read(num_bytes) != theirs.read(num_bytes):
                    return False
        return True


def packed_modules(folder: Path, body: str) -> frozenset[str]:
    """The modules whose weights the files hold as codes with scales. `body`: see todays_name."""
    names = (todays_name(name, body).rpartition(".") for name in _stored_names(folder))
    return frozenset(module for module, _, part in names if part in _PACKED)


def _stored_names(folder: Path) -> list[str]:
    """By the index, where there is one and not all is in one file: files may be many, or not there yet."""
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        with suppress(ModelError):  # loading the weights is refused with the reason
            found = read_json(index).get("weight_map")
            return list(found) if isinstance(found, dict) else []
    return [name for file in _files(folder) for name, _ in _tensors(file)]


def _files(folder: Path) -> list[Path]:
    file = folder / "model.safetensors"
    return [file] if file.is_file() else sorted(each for each in folder.glob("*.safetensors") if each.is_file())


def stored_head(folder: Path) -> Literal["own", "equal", "absent"]:
    """Whether the output layer is stored with other numbers than the embedding table: transformers then ties neither,
    whatever config.json says. "equal" for files that cannot be read: loading them is refused with the reason."""
    stored = {todays_name(name): tensor for file in _files(folder) for name, tensor in _tensors(file)}
    heads = [tensor for name, tensor in stored.items() if _HEAD.fullmatch(name)]
    tables = [tensor for name, tensor in stored.items() if _TABLE.fullmatch(name) and not _HEAD.fullmatch(name)]
    if tables and not any(name.startswith(("lm_head.", "embed_out.")) for name in stored):
        return "absent"
    return "own" if tables and any(not any(map(head.equals, tables)) for head in heads) else "equal"


def _tensors(file: Path) -> Iterator[tuple[str, _Stored]]:
    try:
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(num_bytes)) if num_bytes <= _LARGEST_HEADER else {}
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            yield name, _Stored(file, (tensor["dtype"], tensor["shape"]), 8 + num_bytes + first, 8 + num_bytes + end)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return
