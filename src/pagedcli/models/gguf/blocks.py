"""Blocks of bytes -> numbers: one function per type of models.gguf.types, and what is common to all."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedcli.layers.quantized import E2M1, E2M1_ZERO, IQ4, IQ4_ZERO, BlockCodes, CodedWeight, Plane, bit_fields
from pagedcli.models.gguf.codebooks import codebook_codes
from pagedcli.models.gguf.types import GgmlType

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS_BYTES = 2**24  # bytes computed at a time: copies of a whole weight would be the peak of loading


def coded(raw: Tensor, kind: GgmlType) -> CodedWeight:
    """A quantized weight from its bytes. Shapes: raw [out, blocks, bytes of a block] uint8."""
    blocks = _READERS[kind.name](raw)
    tensors: dict[str, Any] = {
        field.name: value.reshape(len(raw), -1)
        for field in dataclasses.fields(blocks)
        if isinstance(value := getattr(blocks, field.name), Tensor)
    }
    return replace(blocks, bits=kind.bits, group_size=kind.group, **tensors)


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
        out[start : start + at_once] = coded(rows[start : start + at_once], kind).dequantized(torch.float32)
    return out.reshape(shape)


# ---------------------------------------------------------------------- their layouts


def _blocks(raw: Tensor, planes: tuple[Plane, ...], scales: Tensor, zero: int = 0, **fields: Any) -> CodedWeight:
    """Shapes: scales, minima and factors [..., groups]; steps [..., 1]; ... are those of the blocks."""
    return CodedWeight(BlockCodes(raw, planes, flipped=fields.pop("flipped", 0)), 8, scales, zero, 1, **fields)


def _half(raw: Tensor, place: int) -> Tensor:
    """The float16 at a place of each block, [..., 1]."""
    return raw[..., place : place + 2].contiguous().view(torch.float16)


def _float(raw: Tensor, place: int) -> Tensor:
    return _half(raw, place).float()


def _nibbles(first: int) -> Plane:
    """The codes of 32 numbers from a byte on."""
    return Plane(first, first + 16, 4, 16)


def _fifth_bits(first: int) -> Plane:
    return Plane(first, first + 4, 1, 1, shift=4)


def _mxfp4(raw: Tensor) -> CodedWeight:
    exponents = raw[..., :1].to(torch.int32)  # exponents of half a power of two: the smallest two are subnormal
    scales = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    # bfloat16 holds every power of 2 exactly
    scales = scales.view(torch.float32).bfloat16()
    return _blocks(raw, (_nibbles(1),), scales, zero=E2M1_ZERO, levels=E2M1)


def _nvfp4(raw: Tensor) -> CodedWeight:
    """Scales have no sign; ggml takes one that is no number for 0."""
    bits = raw[..., :4] & 127
    factors = bits.where(bits != 127, 0).view(torch.float8_e4m3fn)
    num_rows, num_blocks, _ = raw.shape
    # half a scale, as the levels are doubled; 4 blocks share a step
    steps = torch.full((num_rows, -(-num_blocks // 4)), 0.5, device=raw.device)
    scales = factors.float() / 2
    return _blocks(raw, (Plane(4, 36, 4, 8),), scales, zero=E2M1_ZERO, levels=E2M1, steps=steps, factors=factors)


def _with_steps(raw: Tensor, planes: tuple[Plane, ...], steps: Tensor, factors: Tensor, *, zero: int) -> CodedWeight:
    """Scales that are multiples of a step per block."""
    return _blocks(raw, planes, steps * factors, zero=zero, steps=steps, factors=factors.to(torch.int8))


def _with_minima(
    raw: Tensor, planes: tuple[Plane, ...], places: tuple[int, int], factors: Tensor, minimum_factors: Tensor
) -> CodedWeight:
    """`places` of the steps of scales and of minima."""
    steps, minimum_steps = (_float(raw, place) for place in places)
    return replace(
        _with_steps(raw, planes, steps, factors, zero=0),
        minima=minimum_steps * minimum_factors,
        minimum_steps=minimum_steps,
        minimum_factors=minimum_factors,
    )


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minima of 6 bits that Q4_K and Q5_K keep in 12 bytes."""
    low, middle, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    return scales, torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)


def _q5_k(raw: Tensor) -> CodedWeight:
    planes = Plane(48, 176, 4, 32), Plane(16, 48, 1, 32, shift=4)
    return _with_minima(raw, planes, (0, 2), *_six_bits(raw[..., 4:16]))


def _q6_k(raw: Tensor) -> CodedWeight:
    planes = Plane(0, 128, 4, 64), Plane(128, 192, 2, 32, shift=4)
    factors = raw[..., 192:208].contiguous().view(torch.int8)
    return _with_steps(raw, planes, _float(raw, 208), factors, zero=32)


def _q2_k(raw: Tensor) -> CodedWeight:
    both = raw[..., :16]
    return _with_minima(raw, (Plane(16, 80, 2, 32),), (80, 82), both & 15, both >> 4)


def _q3_k(raw: Tensor) -> CodedWeight:
    planes = Plane(32, 96, 2, 32), Plane(0, 32, 1, 32, shift=2)
    factors = bit_fields(raw[..., 96:104], 4, 8) | (bit_fields(raw[..., 104:108], 2, 4) << 4)
    return _with_steps(raw, planes, _float(raw, 108), factors.to(torch.int8) - 32, zero=4)


def _iq4_xs(raw: Tensor) -> CodedWeight:
    factors = bit_fields(raw[..., 4:8], 4, 1) | (bit_fields(raw[..., 2:4], 2, 1) << 4)
    steps, planes = _float(raw, 0), (Plane(8, 136, 4, 16),)
    return replace(_with_steps(raw, planes, steps, factors.to(torch.int8) - 32, zero=IQ4_ZERO), levels=IQ4)


def _ternary(raw: Tensor, source: BlockCodes | Tensor, place: int) -> CodedWeight:
    scales = _half(raw, place).expand(*raw.shape[:-1], 8)  # one for 256 numbers; kernels have one for 32
    return CodedWeight(source, 4, scales, 1, 1)


def _tq1_0(raw: Tensor) -> CodedWeight:
    """A byte is a fraction, whose digits of base 3 are neighbours in steps of `width`: 5, or 4 in the last bytes."""

    def digits(first: int, end: int, width: int, count: int) -> Tensor:
        powers = torch.tensor([[3**i] for i in range(count)], dtype=torch.uint8, device=raw.device)
        shifted = raw[..., first:end].reshape(*raw.shape[:-1], -1, 1, width) * powers  # without the digits before
        return (shifted.int() * 3 >> 8).to(torch.uint8).flatten(-3)

    codes = torch.cat((digits(0, 32, 32, 5), digits(32, 48, 16, 5), digits(48, 52, 4, 4)), -1)
    return _ternary(raw, codes, 52)


def _codebook(unit: float, odds: Callable[[Tensor], Tensor], kind: str, raw: Tensor) -> CodedWeight:
    """Vectors of a codebook, which the gguf package has: their numbers are whole multiples of the block's float16 times
    `unit` and times a factor 2 n + 1 of their group. `odds`: blocks -> n."""
    factors = 2 * odds(raw).to(torch.int8) + 1
    factors = factors.repeat_interleave(16 // factors.shape[-1], -1)
    place = raw[..., :2]
    if kind == "IQ1_M":  # its float16 lies in the upper halves of four bytes
        bits = ((raw[..., 49::2].int() >> 4) << _shifts(0, 4, 8, 12, like=raw)).sum(-1, keepdim=True)
        place = bits.to(torch.int16).view(torch.uint8)
    steps = place.contiguous().view(torch.float16).float() * unit
    codes = codebook_codes(raw, kind)
    return CodedWeight(codes, 8, steps * factors, 128, 1, steps=steps, factors=factors)


def _shifts(*numbers: int, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=like.device)


def _odds_of_iq1_m(raw: Tensor) -> Tensor:
    words = raw[..., 48::2].int() | raw[..., 49::2].int() << 8
    return (words.unsqueeze(-1) >> _shifts(0, 3, 6, 9, like=raw) & 7).flatten(-2)


_CODEBOOKS: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "IQ2_XXS": (1 / 8, lambda raw: raw[..., 9::8] >> 4),
    "IQ2_XS": (1 / 8, lambda raw: bit_fields(raw[..., 66:], 4, 1)),
    "IQ2_S": (1 / 8, lambda raw: bit_fields(raw[..., 74:], 4, 1)),
    "IQ3_XXS": (1 / 4, lambda raw: raw[..., 69::4] >> 4),
    "IQ3_S": (1.0, lambda raw: bit_fields(raw[..., 106:], 4, 1)),
    "IQ1_S": (1 / 8, lambda raw: raw[..., 35::2] >> 4 & 7),
    "IQ1_M": (1 / 8, _odds_of_iq1_m),
}
_READERS: dict[str, Callable[[Tensor], CodedWeight]] = {
    "Q8_0": lambda raw: _blocks(raw, (Plane(2, 34, 8, 32),), _half(raw, 0), zero=128, flipped=128),
    "Q4_0": lambda raw: _blocks(raw, (_nibbles(2),), _half(raw, 0), zero=8),
    "Q4_1": lambda raw: _blocks(raw, (_nibbles(4),), _float(raw, 0), minima=-_float(raw, 2)),
    "Q5_0": lambda raw: _blocks(raw, (_nibbles(6), _fifth_bits(2)), _half(raw, 0), zero=16),
    "Q5_1": lambda raw: _blocks(raw, (_nibbles(8), _fifth_bits(4)), _float(raw, 0), minima=-_float(raw, 2)),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda raw: _with_minima(raw, (Plane(16, 144, 4, 32),), (0, 2), *_six_bits(raw[..., 4:16])),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": lambda raw: _blocks(raw, (_nibbles(2),), _half(raw, 0), zero=IQ4_ZERO, levels=IQ4),
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda raw: _ternary(raw, BlockCodes(raw, (Plane(0, 64, 2, 32),)), 64),
    **{kind: partial(_codebook, *how, kind) for kind, how in _CODEBOOKS.items()},
}
