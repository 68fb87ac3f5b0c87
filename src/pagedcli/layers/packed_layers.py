"""The packed linear layers of a model on a CPU: those of an earlier process, and what a later one needs of them.

Used by the native decoder, which takes and makes them, and by runner.weight_cache; knows nothing of files.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native import load_library


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A linear layer, and the bytes of its bias as stored."""

    linear: NativeLinear
    bias_bytes: int


@dataclass(slots=True)
class PackedLayers:
    """The layers of a model by key: `kept` in an earlier process, all or none, and `made` in this one."""

    kept: dict[str, PackedLayer] = field(default_factory=dict)
    made: dict[str, PackedLayer] = field(default_factory=dict)

    def get(self, key: str, make: Callable[[], PackedLayer], discard: Callable[[], None]) -> PackedLayer:
        """A layer that was kept, whose tensors are then discarded, or a new one. Changes: made."""
        if (layer := self.kept.get(key)) is not None:
            discard()
            return layer
        self.made[key] = layer = make()
        return layer


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A layer, or one of several side by side: what NativeLinear.of_packed needs."""

    numbers: dict[str, int]
    dtype: str  # dtype of the activations
    tensors: dict[str, tuple[str, int]]  # dtype, and the place among the buffers


class _Layer(msgspec.Struct, frozen=True, array_like=True):
    key: str
    bias_bytes: int
    parts: list[_Part]


def described(layers: dict[str, PackedLayer]) -> tuple[bytes, list[memoryview]]:
    """What the layers are, and the memory that they need."""
    buffers: list[memoryview] = []

    def placed(tensor: Tensor) -> tuple[str, int]:
        buffers.append(tensor.view(torch.uint8).numpy().data)
        return dtype_name(tensor.dtype), len(buffers) - 1

    records = [
        _Layer(
            key,
            layer.bias_bytes,
            [
                _Part(part.numbers, dtype_name(part.dtype), {name: placed(each) for name, each in part.tensors.items()})
                for part in layer.linear.parts
            ],
        )
        for key, layer in layers.items()
    ]
    return msgspec.msgpack.encode(records), buffers


def restored(description: bytes, buffers: Sequence[memoryview]) -> dict[str, PackedLayer]:
    """The layers, in this memory, which is only read. Raises: msgspec.DecodeError."""
    library = load_library()

    def linear(part: _Part) -> NativeLinear:
        tensors = {name: _tensor(buffers[place], dtype) for name, (dtype, place) in part.tensors.items()}
        return NativeLinear.of_packed(library, part.numbers, tensors, getattr(torch, part.dtype))

    return {
        each.key: PackedLayer(NativeLinear.side_by_side([linear(part) for part in each.parts]), each.bias_bytes)
        for each in msgspec.msgpack.decode(description, type=list[_Layer])
    }


def _tensor(buffer: memoryview, dtype: str) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # of memory that cannot be written
        return torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(getattr(torch, dtype))
