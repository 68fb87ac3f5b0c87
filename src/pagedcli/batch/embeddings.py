"""Vectors of texts: how a checkpoint makes them, what a line wants, and what a row has.

Used by batch.requests, batch.prompts and batch.rows; the engine's side is core.scoring.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig, RunConfig, in_words
from pagedcli.core.scoring import Pooling
from pagedcli.errors import ModelError, RequestError
from pagedcli.models.checkpoint_files import read_json
from pagedcli.models.gguf.header import is_gguf, read_header
from pagedcli.models.reading import read_spec

EMBEDDING = "embedding"  # field of a row, and its finish reason
FIELDS = ("instruction", "dimensions", "encoding_format")  # of a line with a text to embed
FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json")
_POOLINGS: dict[Any, Pooling] = {"lasttoken": "last", "mean": "mean", 3: "last", 1: "mean"}  # in folders, in GGUF files
_OLD = {"lasttoken": "lasttoken", "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}


class Embedding(msgspec.Struct, frozen=True):
    """A vector that a line wants."""

    instruction: str | None = None  # text before the line's, or its name in the checkpoint
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None  # the first ones; None: all
    encoding_format: str = "float"  # or base64
    pooling: Pooling = "last"
    normalizes: bool = True

    @classmethod
    def of(cls, body: dict[str, Any], run: RunConfig, text: str | None) -> Self:
        """The vector of the field `text`, or of the prompt. Changes: body, in which the text becomes the prompt.
        Raises: RequestError."""
        given = {"instruction": run.instruction, "dimensions": run.dimensions}
        if text is not None:
            if text not in body or "prompt" in body or "messages" in body:
                raise RequestError(
                    "invalid_request", f"a line to embed needs {text!r}, and neither prompt nor messages"
                )
            body["prompt"] = body.pop(text)
            given |= {name: body.pop(name) for name in FIELDS if name in body}
        try:
            found = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise RequestError("invalid_parameter", in_words(str(error))) from error
        if found.encoding_format not in ("float", "base64"):
            raise RequestError(
                "invalid_parameter", f"encoding_format is {found.encoding_format!r:.40}, not float, base64"
            )
        return found

    def encoded(self, state: Any) -> list[float] | str:
        """The vector [E] float64 as a row has it: its numbers as float32, in the shortest form that gives them back."""
        values = state[: self.dimensions]
        if self.normalizes:  # by a sum that no order of its terms changes
            values = values / max(math.sqrt(math.fsum((values * values).tolist())), 1e-12)
        vector = values.astype("<f4")
        if self.encoding_format == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        short = vector.astype(str).astype(np.float64)
        exact: list[float] = np.where(short.astype(np.float32) == vector, short, vector).tolist()
        return exact


def decoded(vector: Any) -> Any:
    """The numbers of a vector in a row."""
    return np.frombuffer(base64.b64decode(vector), "<f4").tolist() if isinstance(vector, str) else vector


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a checkpoint makes vectors."""

    size: int  # elements of a vector
    pooling: Pooling
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)  # instructions by name
    default: str | None = None  # instruction of rows without one

    @classmethod
    def of(cls, engine: EngineConfig, tokenizer: Tokenizer) -> Self:
        """By the files of sentence-transformers in the model's folder, a GGUF file's pooling type, or a tokenizer that
        ends each text with a special token, as that of Qwen3-Embedding does. Raises: ModelError."""
        folder = tokenizer.folder
        size = read_spec(folder, trust_remote_code=engine.trust_remote_code).hidden_size
        pooling, normalizes = _of_modules(folder) if (folder / FILES[0]).is_file() else (None, True)
        if pooling is None and is_gguf(folder):
            header = read_header(folder).metadata
            pooling = _POOLINGS.get(header.get(f"{header.get('general.architecture')}.pooling_type"))
        if pooling is None and tokenizer.encode("a")[-1] in tokenizer.special_token_ids:
            pooling = "last"
        pooling = pooling if engine.pooling == "auto" else engine.pooling
        if pooling is None:
            raise ModelError(
                f"{folder} does not say how it pools a text's states into a vector",
                hint="name it: --pooling last or --pooling mean",
            )
        said = read_json(folder / FILES[2]) if (folder / FILES[2]).is_file() else {}
        prompts = {name: text for name, text in (said.get("prompts") or {}).items() if isinstance(text, str)}
        return cls(size, pooling, normalizes, prompts, said.get("default_prompt_name"))

    def complete(self, wanted: Embedding) -> Embedding:
        """The vector with the text of its instruction. Raises: RequestError."""
        given = self.default if wanted.instruction is None else wanted.instruction
        if given is not None and given not in self.prompts and given.isidentifier():
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError("invalid_parameter", f"instruction {given!r} is no name in the checkpoint: {known}")
        if wanted.dimensions is not None and wanted.dimensions > self.size:
            raise RequestError("invalid_parameter", f"dimensions is {wanted.dimensions:,}, vectors have {self.size:,}")
        text = None if given is None else self.prompts.get(given, given)
        return msgspec.structs.replace(wanted, instruction=text, pooling=self.pooling, normalizes=self.normalizes)


def _of_modules(folder: Path) -> tuple[Pooling | None, bool]:
    """How a folder of sentence-transformers pools, and whether it normalizes. Raises: ModelError for what else it
    does."""
    try:
        modules = msgspec.json.decode((folder / FILES[0]).read_bytes(), type=list[dict[str, Any]])
        kinds = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in modules}
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise ModelError(f"cannot read {folder / FILES[0]}: {error}", hint="download the file again") from error
    if others := sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise ModelError(f"{folder / FILES[0]} has a module {others[0]}, which is not supported")
    if "Pooling" not in kinds:
        return None, "Normalize" in kinds
    place = folder / kinds["Pooling"] / "config.json"
    said = read_json(place)
    old = [name for name in said if name.startswith("pooling_mode_") and said[name]]
    given = [_OLD.get(name.removeprefix("pooling_mode_"), name) for name in old] or ["mean"]
    modes = said.get("pooling_mode", given)
    mode = modes if isinstance(modes, str) else " and ".join(modes)
    if mode not in _POOLINGS or not said.get("include_prompt", True):
        what = f"pooling {mode}" if mode not in _POOLINGS else "pooling without the instruction's tokens"
        raise ModelError(f"{place}: {what} is not supported", hint="supported: lasttoken and mean")
    return _POOLINGS[mode], "Normalize" in kinds
