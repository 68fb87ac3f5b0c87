"""The metadata of a GGUF file, checked: numbers, lists and factors by name. Free of torch."""

import math
import struct
from typing import Any

from pagedcli.models.config_json import MOST_LAYERS
from pagedcli.models.gguf.header import Header

_LARGEST_FACTORS = 2**16


class Metadata:
    """Metadata with checked kinds, under the architecture's name."""

    def __init__(self, header: Header) -> None:
        self.header, self.prefix = header, ""
        self.prefix = self.text("general.architecture")

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def layers(self) -> int:
        found = self.number("block_count") - self.number("nextn_predict_layers", 0)
        if not 1 <= found <= MOST_LAYERS:
            raise self.header.error(f"{self.prefix}.block_count: {found:,} layers, allowed: 1 to {MOST_LAYERS:,}")
        return found

    def with_tensor(self, name: str) -> list[bool]:
        """Whether each layer has a tensor."""
        return [self.has(f"blk.{i}.{name}") for i in range(self.layers())]

    def get(self, name: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{name}")

    def text(self, name: str) -> str:
        value = self.header.metadata.get(name)
        if not isinstance(value, str):
            raise self.header.error(f"{name} is {value!r:.40}, not a text")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; a list of one for each layer must have equal ones."""
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and len(set(map(repr, value))) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            what = "missing" if value is None else f"{value!r:.40}, not one whole number"
            raise self.header.error(f"{self.prefix}.{name} is {what}")
        return value

    def of_layers(self, name: str, kinds: list[str] | None = None, kind: str | None = None) -> list[int]:
        """Whole numbers of the layers, or those of one kind of them."""
        value, layers = self.get(name), self.layers()
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or any(type(each) is not int or each < 1 for each in values):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a whole number for each layer")
        return [each for i, each in enumerate(values[:layers]) if kinds is None or kinds[i] == kind]

    def kv_heads(self, default: int) -> int:
        """The heads of K and V in layers that attend; other layers of the list have none."""
        value = self.get("attention.head_count_kv")
        attending = [each for each in value if each != 0] if isinstance(value, list) else None
        if not attending or len(set(map(repr, attending))) > 1 or not isinstance(attending[0], int):
            return self.number("attention.head_count_kv", default)
        return attending[0]

    def head_dim(self) -> int:
        width = self.number("embedding_length")
        return self.number("attention.key_length", width // max(1, self.number("attention.head_count")))

    def rotated(self) -> float:
        """The part of each head that is rotated."""
        head_dim = self.head_dim()
        return self.number("rope.dimension_count", head_dim) / max(1, head_dim)

    def real(self, name: str, default: float | None = None) -> float | None:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.header.error(f"{self.prefix}.{name} is {value!r:.40}, not a finite number")
        return _shortest(value)

    def factors(self, name: str) -> list[float]:
        """The numbers of a small tensor; empty if the file lacks it."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            return []
        if tensor.type.name != "F32" or math.prod(tensor.shape) > _LARGEST_FACTORS:
            raise self.header.error(f"tensor {name!r} has no plain numbers")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            found = list(struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.num_bytes)))
        if not all(0 < factor < math.inf for factor in found):
            raise self.header.error(f"tensor {name!r} has factors that are not positive and finite")
        return found


def _shortest(value: float) -> float:
    """The decimal number that a float32 was: 1e-06 instead of 9.999999974752427e-07."""
    shown = f"{value:.7g}"
    return float(shown) if struct.pack("f", float(shown)) == struct.pack("f", value) else float(value)
