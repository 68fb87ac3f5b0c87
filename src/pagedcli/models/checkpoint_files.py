"""What the safetensors files of a folder hold, by their headers: whether a model's output layer is its embedding table.
Free of torch."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.errors import ModelError
from pagedcli.models.config_json import read_json

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


def has_own_head(folder: Path) -> bool:
    """Whether the output layer is stored with other numbers than the embedding table: transformers then ties neither,
    whatever config.json says. False for files that cannot be read: loading them is refused with the reason."""
    stored = {todays_name(name): tensor for file in _files(folder) for name, tensor in _tensors(file)}
    heads = [tensor for name, tensor in stored.items() if _HEAD.fullmatch(name)]
    tables = [tensor for name, tensor in stored.items() if _TABLE.fullmatch(name) and not _HEAD.fullmatch(name)]
    return bool(tables) and any(not any(map(head.equals, tables)) for head in heads)


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
