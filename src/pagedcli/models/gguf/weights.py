"""The weights of a GGUF file: a WeightSource."""

import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagedcli.models.gguf.description import Orders
from pagedcli.models.gguf.header import Header, TensorInfo
from pagedcli.models.gguf.names import TensorPlace, stored_tensor
from pagedcli.models.gguf.types import GgmlType
from pagedcli.models.stacking import UnreadTensors, and_others, kept_dtype, not_read, stacked
from pagedcli.models.tensors import Parameter

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS_BYTES = 2**24  # bytes computed at a time: copies of a whole weight would be the peak of loading

# used by the rotary embedding, or by nothing
_UNUSED = (
    ".input_scale",
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "attn_rot_embd.weight"),
)


def _layer(name: str) -> int:
    number = name.split(".")[1]
    return int(number) if number.isdecimal() else -1


def _part(name: str) -> str:
    """The module's name within its layer."""
    return name.rpartition(".")[0].rpartition(".")[2]


class GgufWeights:
    """Tensors of a GGUF file or of all parts of a split one, which are memory-mapped."""

    notes: tuple[str, ...]  # what is not read, known after load

    def __init__(self, header: Header) -> None:
        self._header, self._orders, self.notes = header, Orders.of(header), ()
        self._maps: dict[Path, Tensor] = {}

    def load(
        self, parameters: Mapping[str, Parameter], *, ignored: frozenset[str], dtype: torch.dtype, device: torch.device
    ) -> UnreadTensors:
        """See WeightSource. Quantized linear layers stay views of the file.

        Raises: ModelError naming the tensor: missing, unexpected, or of another shape.
        """
        names = [name for parameter in parameters.values() for name in parameter.shapes]
        places = {name: stored_tensor(name, self._header.tensors) for name in names}
        self._check_names(
            {place.name for place in places.values() if place.layer is None},
            allowed={stored_tensor(name, self._header.tensors).name for name in ignored},
        )

        def read(parameter: Parameter) -> Tensor:
            own_dtype = kept_dtype(parameter, dtype)
            parts = (
                parameter.kept(name, self._read(name, places[name], parameter, own_dtype or torch.float32))
                for name in parameter.shapes
            )
            return stacked(parts, parameter, own_dtype, device)

        return UnreadTensors({key: partial(read, parameter) for key, parameter in parameters.items()})

    def _check_names(self, expected: set[str], allowed: set[str]) -> None:
        """Layers after the last one only predict further tokens, and are not read.

        Changes: notes, which say what is skipped."""
        layers, tensors = self._orders.num_layers, self._header.tensors
        skipped = {name for name in tensors if name.startswith("blk.") and _layer(name) >= layers}
        if skipped:
            blocks = " and ".join(f"blk.{i}.*" for i in sorted({_layer(name) for name in skipped}))
            self.notes = (not_read(len(skipped), "file", f"as they predict further tokens: {blocks}"),)
        found = tensors.keys() - skipped
        if missing := sorted(expected - found):
            raise self._header.error(
                f"tensor {missing[0]!r} is missing{and_others(missing)}", "download the file again"
            )
        extra = sorted(name for name in found - expected - allowed if not name.endswith(_UNUSED))
        if extra:
            raise self._header.error(f"tensor {extra[0]!r:.80} is not part of this architecture{and_others(extra)}")

    def _read(self, name: str, place: TensorPlace, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        """The numbers of a tensor, or its blocks if the parameter keeps them."""
        shape = parameter.shapes[name]
        if place.layer is not None:
            return torch.full(shape, self._listed(place.name, place.layer))
        stored = self._header.tensors[place.name]
        if parameter.stored.suffix == "scale":
            return self._scale(place)
        keeps_blocks = parameter.stored.dtype == "uint8"
        blocks = self._blocks(stored)
        if place.expert is not None and blocks.dim() == len(shape) + 2 and place.expert < len(blocks):
            blocks = blocks[place.expert]
        if place.half is not None:
            blocks = self._half(place, blocks)
        found = (*blocks.shape[:-2], blocks.shape[-2] if keeps_blocks else blocks.shape[-2] * stored.type.block)
        if len(shape) == 1:  # a norm of groups is a matrix there
            found = (math.prod(found),)
        if [size for size in found if size != 1] != [size for size in shape if size != 1]:
            raise self._header.error(
                f"tensor {place.name!r} has shape {list(stored.shape)}, which its metadata do not lead to"
            )
        blocks = blocks.reshape(*shape[:-1], -1, blocks.shape[-1])
        if (heads := self._orders.reordered.get(_part(place.name))) is not None and not len(blocks) % (2 * heads):
            blocks = blocks.reshape(heads, -1, 2, *blocks.shape[1:]).transpose(1, 2).flatten(0, 2)
        if keeps_blocks:
            return blocks
        values = numbers(blocks, stored.type, dtype).reshape(shape)
        return self._logarithms(place, values) if place.name.endswith(".ssm_a") else values

    def _listed(self, name: str, layer: int) -> float:
        """A layer's number in the metadata, which have one of each layer or one of all."""
        said = self._header.metadata.get(name)
        number = said[layer] if isinstance(said, list) and layer < len(said) else said
        if not isinstance(number, float) or not math.isfinite(number):
            raise self._header.error(f"{name} is {said!r:.40}, not a finite number for each layer")
        return number

    def _scale(self, place: TensorPlace) -> Tensor:
        """The number that multiplies a whole weight, one of each expert if they are stacked."""
        stored, expert = self._header.tensors[place.name], place.expert or 0
        if not stored.type.is_float or expert >= math.prod(stored.shape):
            raise self._header.error(f"tensor {place.name!r} has shape {list(stored.shape)}")
        values = numbers(self._blocks(stored), stored.type, torch.float32).flatten()
        return values[expert].reshape(1, 1).clone()

    def _logarithms(self, place: TensorPlace, values: Tensor) -> Tensor:
        """The file has -exp(A_log)."""
        if not bool((values < 0).all()):
            raise self._header.error(f"tensor {place.name!r} has numbers that are not below 0")
        return values.neg().double().log().to(values.dtype)

    def _half(self, place: TensorPlace, blocks: Tensor) -> Tensor:
        """The rows of one of two modules that the file keeps as one."""
        groups = self._orders.halves.get(_part(place.name), 1)
        if groups < 1 or len(blocks) % (2 * groups):
            raise self._header.error(f"tensor {place.name!r} has {len(blocks)} rows, which its metadata do not lead to")
        return blocks.reshape(groups, 2, -1, *blocks.shape[1:])[:, place.half].flatten(0, 1)

    def _blocks(self, stored: TensorInfo) -> Tensor:
        """The bytes of a tensor: [..., blocks of a row, bytes of a block] uint8."""
        if stored.file not in self._maps:
            with warnings.catch_warnings(action="ignore"):  # read-only, as memory for a writable map is reserved
                self._maps[stored.file] = torch.from_numpy(np.memmap(stored.file, mode="r"))
        content = self._maps[stored.file][stored.offset : stored.offset + stored.num_bytes]
        blocks = stored.shape[-1] // stored.type.block
        return content.reshape(*stored.shape[:-1], blocks, stored.type.num_bytes)


def numbers(raw: Tensor, kind: GgmlType, dtype: torch.dtype) -> Tensor:
    """Numbers from their bytes, rounded to dtype once; floating-point ones as they are stored.

    Shapes: raw [..., blocks, bytes of a block] uint8 -> [..., in].
    """
    shape = (*raw.shape[:-2], raw.shape[-2] * kind.block)
    if kind.is_float:
        return raw.contiguous().view(_FLOATS[kind.name]).reshape(shape)
    rows = raw.reshape(-1, *raw.shape[-2:])
    out = torch.empty((len(rows), shape[-1]), dtype=dtype, device=raw.device)
    at_once = max(1, _ROWS_BYTES // (4 * shape[-1]))
    for start in range(0, len(rows), at_once):
        read = kind.read({"weight": rows[start : start + at_once]})
        out[start : start + at_once] = read.dequantized(torch.float32)
    return out.reshape(shape)
