"""Blocks of bytes -> numbers: one function per type of models.gguf.types, and what is common to all."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedcli.layers.quantized import E2M1, E2M1_ZERO, IQ4, IQ4_ZERO, CodedWeight
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


def _blocks(codes: Tensor, scales: Tensor, zero: int = 0, **fields: Any) -> CodedWeight:
    """Shapes: codes [..., groups, inputs of a group]; scales, minima and factors [..., groups]; steps [..., 1]; ... are
    those of the blocks."""
    return CodedWeight(codes, 8, scales, zero, codes.shape[-1], **fields)


def _half(raw: Tensor, place: int) -> Tensor:
    """The float16 at a place of each block, [..., 1]."""
    return raw[..., place : place + 2].contiguous().view(torch.float16)


def _float(raw: Tensor, place: int) -> Tensor:
    return _half(raw, place).float()


def _bits(raw: Tensor, bits: int, width: int) -> Tensor:
    """Numbers of some bits, of which the lowest of `width` neighbouring bytes come first: [..., numbers]."""
    parts = raw.reshape(*raw.shape[:-1], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=raw.device).unsqueeze(-1)
    return ((parts >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _fifth_bits(raw: Tensor) -> Tensor:
    """A bit for each of 32 numbers, times 16."""
    return ((raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1).flatten(-2) << 4


def _q8_0(raw: Tensor) -> CodedWeight:
    return _blocks((raw[..., 2:] ^ 128).unsqueeze(-2), _half(raw, 0), zero=128)


def _q4_0(raw: Tensor) -> CodedWeight:
    return _blocks(_bits(raw[..., 2:], 4, 16).unsqueeze(-2), _half(raw, 0), zero=8)


def _q4_1(raw: Tensor) -> CodedWeight:
    return _blocks(_bits(raw[..., 4:], 4, 16).unsqueeze(-2), _float(raw, 0), minima=-_float(raw, 2))


def _q5_0(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., 6:], 4, 16) | _fifth_bits(raw[..., 2:6])
    return _blocks(codes.unsqueeze(-2), _half(raw, 0), zero=16)


def _q5_1(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., 8:], 4, 16) | _fifth_bits(raw[..., 4:8])
    return _blocks(codes.unsqueeze(-2), _float(raw, 0), minima=-_float(raw, 2))


def _iq4_nl(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., 2:], 4, 16)
    return _blocks(codes.unsqueeze(-2), _half(raw, 0), zero=IQ4_ZERO, levels=IQ4)


def _mxfp4(raw: Tensor) -> CodedWeight:
    exponents = raw[..., :1].to(torch.int32)  # exponents of half a power of two: the smallest two are subnormal
    scales = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    codes = _bits(raw[..., 1:], 4, 16)
    # bfloat16 holds every power of 2 exactly
    return _blocks(codes.unsqueeze(-2), scales.view(torch.float32).bfloat16(), zero=E2M1_ZERO, levels=E2M1)


def _with_steps(codes: Tensor, steps: Tensor, factors: Tensor, *, zero: int) -> CodedWeight:
    """Scales that are multiples of a step per block."""
    codes = codes.reshape(*factors.shape, -1)
    return _blocks(codes, steps * factors, zero=zero, steps=steps, factors=factors.to(torch.int8))


def _with_minima(
    codes: Tensor, steps: Tensor, factors: Tensor, minimum_steps: Tensor, minimum_factors: Tensor
) -> CodedWeight:
    return replace(
        _with_steps(codes, steps, factors, zero=0),
        minima=minimum_steps * minimum_factors,
        minimum_steps=minimum_steps,
        minimum_factors=minimum_factors,
    )


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minima of 6 bits that Q4_K and Q5_K keep in 12 bytes."""
    low, middle, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    return scales, torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)


def _q4_k(raw: Tensor) -> CodedWeight:
    scales, minima = _six_bits(raw[..., 4:16])
    return _with_minima(_bits(raw[..., 16:], 4, 32), _float(raw, 0), scales, _float(raw, 2), minima)


def _q5_k(raw: Tensor) -> CodedWeight:
    scales, minima = _six_bits(raw[..., 4:16])
    codes = _bits(raw[..., 48:], 4, 32) | (_bits(raw[..., 16:48], 1, 32) << 4)
    return _with_minima(codes, _float(raw, 0), scales, _float(raw, 2), minima)


def _q6_k(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., :128], 4, 64) | (_bits(raw[..., 128:192], 2, 32) << 4)
    return _with_steps(codes, _float(raw, 208), raw[..., 192:208].contiguous().view(torch.int8), zero=32)


def _q2_k(raw: Tensor) -> CodedWeight:
    both = raw[..., :16]
    return _with_minima(_bits(raw[..., 16:80], 2, 32), _float(raw, 80), both & 15, _float(raw, 82), both >> 4)


def _q3_k(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., 32:96], 2, 32) | (_bits(raw[..., :32], 1, 32) << 2)
    factors = _bits(raw[..., 96:104], 4, 8) | (_bits(raw[..., 104:108], 2, 4) << 4)
    return _with_steps(codes, _float(raw, 108), factors.to(torch.int8) - 32, zero=4)


def _iq4_xs(raw: Tensor) -> CodedWeight:
    codes = _bits(raw[..., 8:], 4, 16)
    factors = _bits(raw[..., 4:8], 4, 1) | (_bits(raw[..., 2:4], 2, 1) << 4)
    return replace(_with_steps(codes, _float(raw, 0), factors.to(torch.int8) - 32, zero=IQ4_ZERO), levels=IQ4)


_READERS: dict[str, Callable[[Tensor], CodedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
