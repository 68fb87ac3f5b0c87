"""Weights as small numbers with scales, in one layout whatever checkpoint they come from; kernels pack them from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedcli.errors import ModelError

_HINT = "use the unquantized version of the model"


@dataclass(frozen=True, slots=True)
class Plane:
    """Some bits of each code of a block, in neighbouring bytes: of each `width` bytes the lowest bits come first."""

    first: int  # byte of the block
    end: int
    bits: int
    width: int
    shift: int = 0  # place of the bits in a code


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Codes as they lie in the blocks of a file, from which the CPU kernels pack them."""

    raw: Tensor  # uint8 [out, blocks, bytes of a block]
    planes: tuple[Plane, ...]
    flipped: int = 0  # bits of each code that are inverted

    @property
    def shape(self) -> tuple[int, int]:
        plane = self.planes[0]
        return len(self.raw), self.raw.shape[1] * (plane.end - plane.first) * 8 // plane.bits

    def rows(self, part: slice) -> "BlockCodes":
        """Those of some output features."""
        return replace(self, raw=self.raw[part])

    @property
    def codes(self) -> Tensor:
        """A byte each, uint8 [out, in]."""
        codes = torch.full(self.shape, self.flipped, dtype=torch.uint8, device=self.raw.device)
        for plane in self.planes:
            bits = bit_fields(self.raw[..., plane.first : plane.end], plane.bits, plane.width)
            codes ^= bits.flatten(1) << plane.shift
        return codes


def bit_fields(raw: Tensor, bits: int, width: int) -> Tensor:
    """Numbers of some bits, of which the lowest of each `width` neighbouring bytes come first: [..., numbers]."""
    parts = raw.reshape(*raw.shape[:-1], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    return ((parts >> shifts) & ((1 << bits) - 1)).flatten(-3)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """w[o, i] = scales[o, g] * (q[o, i] - zeros[o, g]), or with minima scales[o, g] * q[o, i] - minima[o, g]: g is the
    group of i, and q a code, or that code's level."""

    source: Tensor | BlockCodes  # uint8 [out, in], 0 ... 2**bits - 1, or the numbers themselves as float8_e4m3fn
    bits: int  # 4, 5, 6 or 8
    scales: Tensor  # floating point [out, groups]
    zeros: Tensor | int  # uint8 [out, groups], or one for all
    group_size: int  # inputs of a group; the last may have fewer
    groups: Tensor | None = None  # int64 [in]: the group of each input; None: neighbours
    levels: tuple[int, ...] = ()  # level of each code: E2M1 or IQ4 of native/packed_groups.h; empty: codes are numbers
    minima: Tensor | None = None  # float32 [out, groups]
    # scales as float32 [out, in / 256] times int8 or e4m3 [out, groups], and minima so, times uint8; None: none such
    steps: Tensor | None = None
    factors: Tensor | None = None
    minimum_steps: Tensor | None = None
    minimum_factors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.source.shape
        return num_out, num_in

    @property
    def codes(self) -> Tensor:
        """A byte each, [out, in]. Made anew each time from the blocks of a file."""
        return self.source if isinstance(self.source, Tensor) else self.source.codes

    @property
    def in_order(self) -> tuple["CodedWeight", Tensor | None]:
        """The weight with the inputs of each group as neighbours, and that order of inputs [in]; None: as they are.

        Raises: ModelError if a group does not have group_size inputs.
        """
        if self.groups is None:
            return self, None
        codes = self.codes
        neighbours = torch.arange(codes.shape[1], device=codes.device) // self.group_size
        if torch.equal(self.groups, neighbours):
            return replace(self, groups=None), None
        order = self.groups.argsort(stable=True)
        if not torch.equal(self.groups[order], neighbours):
            raise ModelError("the inputs of quantized weights are in groups of different sizes", hint=_HINT)
        return replace(self, source=codes[:, order], groups=None), order

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers [out, in], computed in float32 and rounded once."""
        device = self.scales.device
        levels = torch.tensor(self.levels, dtype=torch.float32, device=device) if self.levels else None
        out = torch.empty(self.shape, dtype=dtype, device=device)
        for start in range(0, len(out), 1024):  # float32 copies of a whole weight would be the peak of loading
            part = slice(start, start + 1024)
            codes = self.source[part] if isinstance(self.source, Tensor) else self.source.rows(part).codes
            whole = codes.float() if levels is None else levels[codes.long()]
            if self.minima is not None:
                whole = whole.mul_(self._of_inputs(self.scales[part])).sub_(self._of_inputs(self.minima[part]))
            else:
                zeros = self.zeros if isinstance(self.zeros, int) else self._of_inputs(self.zeros[part])
                whole = whole.sub_(zeros).mul_(self._of_inputs(self.scales[part]))
            out[part] = whole
        return out

    def _of_inputs(self, of_groups: Tensor) -> Tensor:
        """The numbers of groups for each of their inputs. Shapes: [rows, groups] -> float32 [rows, in]."""
        if self.groups is not None:
            return of_groups.float()[:, self.groups]
        spread = of_groups.float().unsqueeze(-1).expand(-1, -1, self.group_size)
        return spread.flatten(1)[:, : self.shape[1]]


# 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives by the four bits of e2m1, times 2 and plus E2M1_ZERO.
E2M1 = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
E2M1_ZERO = 12
# The levels of IQ4_NL and IQ4_XS plus IQ4_ZERO.
IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
IQ4_ZERO = 128

Weight = Tensor | CodedWeight  # [out, in], a linear layer's


def stacked(weights: Sequence[CodedWeight]) -> CodedWeight:
    """The output features of weights with the same format and inputs below each other.

    Raises: ModelError if the inputs are grouped differently.
    """
    first, *others = weights
    if not others:
        return first
    for other in others:
        a, b = first.groups, other.groups
        if (a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b)):
            raise ModelError("q, k and v, or gate and up, group their inputs differently", hint=_HINT)
    return replace(first, **{name: _joined([getattr(each, name) for each in weights]) for name in _BY_ROWS})


_BY_ROWS = ("source", "scales", "zeros", "minima", "steps", "factors", "minimum_steps", "minimum_factors")


def _joined(parts: list[Any]) -> Any:
    """What weights have for each of their output features, of all below each other; what they share stays."""
    first = parts[0]
    if isinstance(first, BlockCodes):
        return replace(first, raw=torch.cat([part.raw for part in parts]))
    if not isinstance(first, Tensor):
        return first
    as_bytes = torch.uint8 if first.dtype.itemsize == 1 else first.dtype  # torch does not concatenate float8
    return torch.cat([part.view(as_bytes) for part in parts]).view(first.dtype)


def chunk_columns(num_columns: int, group_size: int | None) -> int:
    """Inputs of a chunk as the C++ kernels pack groups (packed_groups.h): 1, 2, 4 or 8 blocks of 32 inputs that divide
    a group. `group_size` None: one group, whose last chunk is filled with zeros."""
    if group_size is None or group_size >= num_columns:
        return 32 * min(8, 1 << (-(-num_columns // 32) - 1).bit_length())
    return 32 * math.gcd(group_size // 32, 8)


def unpacked(words: Tensor, bits: int, dim: int, size: int) -> Tensor:
    """Whole numbers of `bits` bits from int32 words along `dim`, lowest bits first, as uint8.

    Shapes:  words [a, b] with ceil(size * bits / 32) along dim; returns [a, b] with `size` along dim.
    """
    word_bytes = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as safetensors
    numbers = bit_fields(word_bytes, bits, 1)  # [a, b, numbers of a word]
    spread = numbers.transpose(1, 2).flatten(0, 1) if dim == 0 else numbers.flatten(1)
    return spread.narrow(dim, 0, size)
