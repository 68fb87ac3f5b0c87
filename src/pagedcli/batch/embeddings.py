"""Vectors of texts: how a checkpoint makes them, what a line wants, and what a row has.

Used by batch.requests, batch.prompts and batch.rows; the engine's side is core.scoring.
"""

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig, RunConfig
from pagedcli.core.scoring import Pooling
from pagedcli.errors import ModelError, RequestError
from pagedcli.models.checkpoint_files import convert, read_json
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.models.reading import read_spec

EMBEDDING = "embedding"  # field of a row, and its finish reason
FIELDS = ("instruction", "dimensions", "encoding_format")  # of a line with a text to embed
FILES = (_MODULES, _PROMPTS, _POOLING) = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")
# names in folders of sentence-transformers, numbers in GGUF files
_POOLINGS: dict[Any, Pooling] = {"lasttoken": "last", 3: "last", "mean_tokens": "mean", "mean": "mean", 1: "mean"}


class Embedding(msgspec.Struct, frozen=True):
    """A vector that a line wants."""

    instruction: str | None = None  # text before the line's, or its name in the checkpoint
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None  # the first ones; None: all
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling = "last"

    @classmethod
    def of(cls, body: dict[str, Any], run: RunConfig, text: str | None) -> Self:
        """The vector of the field `text`, or of the prompt. Changes: body, in which the text becomes the prompt.
        Raises: RequestError."""
        given = {"instruction": run.instruction, "dimensions": run.dimensions}
        if "messages" in body or (text is not None and (text not in body or "prompt" in body)):
            what = f"a line to embed has its text in {text or 'prompt'!r} alone, and no messages"
            raise RequestError("invalid_request", what)
        if text is not None:
            body["prompt"] = body.pop(text)
            given |= {name: body.pop(name) for name in FIELDS if name in body}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise RequestError("invalid_parameter", str(error)) from error

    def encoded(self, states: list[Any]) -> list[float] | str:
        """The mean of states [E] as a row has it: float32, in the shortest form that reads back the same. They are
        added one by one in float64: neither chunks nor the length change its bits."""
        values = sum(each[: self.dimensions].astype(np.float64) for each in states) / len(states)
        length = math.sqrt(math.fsum((values * values).tolist()))  # exact: no order of the terms changes it
        vector = (values / max(length, 1e-12)).astype("<f4")
        if self.encoding_format == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        short = vector.astype(str).astype(np.float64)
        numbers: list[float] = np.where(short.astype(np.float32) == vector, short, vector).tolist()
        return numbers


def decoded(vector: Any) -> Any:
    """The float32 numbers of a vector in a row."""
    return (np.frombuffer(base64.b64decode(vector), "<f4") if isinstance(vector, str) else np.float32(vector)).tolist()


class _Prompts(msgspec.Struct):
    prompts: dict[str | None, str | None] = {}
    default_prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a checkpoint makes vectors."""

    size: int  # elements of a vector
    pooling: Pooling
    prompts: Mapping[str | None, str | None]  # instructions by name; None: of rows without one

    @classmethod
    def of(cls, engine: EngineConfig, tokenizer: Tokenizer) -> Self:
        """By the files of sentence-transformers in the model's folder, a GGUF file's pooling type, or a tokenizer that
        ends each text with a special token, as that of Qwen3-Embedding does. Raises: ModelError."""
        folder, ends = tokenizer.folder, tokenizer.encode("a")[-1:]
        found = _stored_pooling(folder) or ("last" if ends and ends[0] in tokenizer.special_token_ids else None)
        pooling = found if engine.pooling == "auto" else engine.pooling
        if pooling is None:
            what = f"{folder} does not say how the states of a text become its vector"
            raise ModelError(what, hint="name it in a file for -C: pooling: last, or mean, under engine:")
        path, size = folder / _PROMPTS, read_spec(folder, trust_remote_code=engine.trust_remote_code).hidden_size
        said = convert(read_json(path) if path.is_file() else {}, _Prompts, path)
        return cls(size, pooling, said.prompts | {None: said.prompts.get(said.default_prompt_name or "")})

    def complete(self, wanted: Embedding) -> Embedding:
        """The vector with the text of its instruction. Raises: RequestError."""
        given = wanted.instruction
        if given is not None and given.isidentifier() and given not in self.prompts:
            known = ", ".join(map(repr, filter(None, self.prompts))) or "none"
            raise RequestError("invalid_parameter", f"instruction {given!r} is no name in the checkpoint: {known}")
        if (wanted.dimensions or 0) > self.size:
            raise RequestError("invalid_parameter", f"dimensions is {wanted.dimensions:,}, vectors have {self.size:,}")
        return msgspec.structs.replace(wanted, instruction=self.prompts.get(given, given), pooling=self.pooling)


def _stored_pooling(folder: Path) -> Pooling | None:
    """How a checkpoint pools, if it says so. Raises: ModelError for what else sentence-transformers does with it."""
    if is_gguf(folder):
        header = read_header(folder).metadata
        return _POOLINGS.get(header.get(f"{header.get('general.architecture')}.pooling_type"))
    if not (folder / _MODULES).is_file():
        return None
    for kind in re.findall(r'"type"\s*:\s*"([^"]*)"', (folder / _MODULES).read_text("utf-8", "replace")):
        if not re.fullmatch(r"sentence_transformers\..*\b(Transformer|Pooling|Normalize)", kind):
            raise ModelError(f"{folder / _MODULES}: a module {kind} is not supported")
    said, begin = read_json(folder / _POOLING), "pooling_mode_"  # of older names
    modes = said.get("pooling_mode") or [name for name in said if name.startswith(begin) and said[name]] or "mean"
    mode = modes if isinstance(modes, str) else " and ".join(name.removeprefix(begin) for name in modes)
    mode += "" if said.get("include_prompt", True) else " without the instruction"
    if mode not in _POOLINGS:
        raise ModelError(f"{folder / _POOLING}: pooling by {mode} is not supported", hint="lasttoken and mean are")
    return _POOLINGS[mode]
