"""Blocks of bytes -> numbers: one function per type of models.gguf.types, and what is common to all."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pagedcli.errors import ModelError
from pagedcli.layers.quantized import E2M1, E2M1_ZERO, IQ4, IQ4_ZERO, BlockCodes, CodedWeight, Plane, bit_fields
from pagedcli.native.system import one_thread

_LARGEST_SCALE = 256.0  # steps of half of it are stored times 2^120


def coded(raw: Tensor, name: str, bits: int, group_size: int, scale: Tensor | None = None) -> CodedWeight:
    """A quantized weight from the bytes of a type, by its name. `scale`: a factor of a whole NVFP4 weight.

    Shapes: raw [out, blocks, bytes of a block] uint8; scale [1, 1].
    Raises: ModelError for a scale that kernels cannot hold.
    """
    with one_thread():
        blocks = _READERS[name](raw)
        tensors: dict[str, Any] = {
            field.name: value.reshape(len(raw), -1)
            for field in dataclasses.fields(blocks)
            if isinstance(value := getattr(blocks, field.name), Tensor)
        }
    if scale is not None:
        if not bool((scale.abs() < _LARGEST_SCALE).all()):
            raise ModelError("a scale of NVFP4 weights is too large or not a number", hint="download the file again")
        tensors |= {name: tensors[name] * scale for name in ("scales", "steps")}
    return replace(blocks, bits=bits, group_size=group_size, **tensors)


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


def _codebook(kind: str, raw: Tensor) -> CodedWeight:
    """Vectors of a codebook, which the gguf package has: their numbers are whole multiples of the block's float16 times
    a unit and times a factor 2 n + 1 of their group."""
    unit, odds, indices = _CODEBOOKS[kind]
    factors = 2 * odds(raw).to(torch.int8) + 1
    factors = factors.repeat_interleave(16 // factors.shape[-1], -1)
    place = raw[..., :2]
    if kind == "IQ1_M":  # its float16 lies in the upper halves of four bytes
        shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=raw.device)
        bits = ((raw[..., 49::2].int() >> 4) << shifts).sum(-1, keepdim=True)
        place = bits.to(torch.int16).view(torch.uint8)
    steps = place.contiguous().view(torch.float16).float() * unit
    codes = _of_vectors(_vectors(kind).to(raw.device), *indices(raw))
    return CodedWeight(codes, 8, steps * factors, 128, 1, steps=steps, factors=factors)


# ---------------------------------------------------------------------- vectors of IQ1, IQ2 and IQ3

_ONES, _HIGH_BITS = 0x0101010101010101, -0x7F7F7F7F7F7F7F80  # 1 and 128 in each of eight bytes


@functools.cache
def _vectors(kind: str) -> Tensor:
    """A codebook: the bytes of a vector as one number."""
    import gguf  # description.quantization checks that it is there

    book = getattr(gguf.quants, kind)
    book.init_grid()
    whole = torch.from_numpy(book.grid.reshape(book.grid_shape).astype("int8"))
    if kind.startswith("IQ1"):  # an eighth is added to all of a vector, or taken from them
        return torch.cat([8 * whole + one + 128 for one in (1, -1)]).to(torch.uint8).view(torch.int64).flatten()
    return whole.view(torch.int64 if whole.shape[1] == 8 else torch.int32).flatten()


@functools.cache
def _minuses() -> Tensor:
    """Eight bytes as one number, 255 for a minus and 0 for none, by eight bits, of which 1 is a minus."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (255 * bits).to(torch.uint8).view(torch.int64).flatten()


@functools.cache
def _even_minuses() -> Tensor:
    """The eight bits that seven stand for: the number of minuses is even."""
    return torch.tensor([bits | bits.bit_count() % 2 << 7 for bits in range(128)])


def _of_vectors(vectors: Tensor, places: Tensor, signs: Tensor | None) -> Tensor:
    """Whole numbers plus 128, a byte each. Shapes: places [..., n] -> [..., 256] uint8."""
    found = vectors[places.int()].view(torch.int64)
    if signs is not None:
        minus = _minuses().to(signs.device)[signs.int()]
        # 256 less a number is its opposite; none is 0, so that no byte reaches into the next
        found = ((found ^ minus) + (minus & _ONES)) ^ _HIGH_BITS
    return found.view(torch.uint8)


def _fields(words: Tensor, width: int, count: int) -> Tensor:
    """Shapes: words [..., n] -> [..., n * count], numbers of `width` bits from the lowest ones on."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << width) - 1).flatten(-2)


def _words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype).int()


def _iq2_xxs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    parts = raw[..., 2:66].reshape(*raw.shape[:-1], 8, 8)
    signs = _fields(_words(parts[..., 4:], torch.int32).squeeze(-1), 7, 4)
    return parts[..., :4].flatten(-2), _even_minuses().to(raw.device)[signs]


def _iq2_xs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    words = _words(raw[..., 2:66], torch.int16)
    return words & 511, _even_minuses().to(raw.device)[words >> 9 & 127]


def _iq2_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., 2:34].int() | _fields(raw[..., 66:74].int(), 2, 4) << 8, raw[..., 34:66]


def _iq3_xxs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    signs = _fields(_words(raw[..., 66:98], torch.int32), 7, 4)
    return raw[..., 2:66], _even_minuses().to(raw.device)[signs]


def _iq3_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., 2:66].int() | _fields(raw[..., 66:74].int(), 1, 8) << 8, raw[..., 74:106]


def _iq1_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    words = _words(raw[..., 34:50], torch.int16)
    less = (words >> 15 & 1).repeat_interleave(4, -1)
    return raw[..., 2:34].int() | _fields(words, 3, 4) << 8 | less << 11, None


def _iq1_m(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., :32].int() | _fields(raw[..., 32:48].int(), 4, 2) << 8, None  # the fourth bit: less an eighth


# type -> unit of its numbers; blocks -> n of _codebook; blocks -> places in the codebook, and the signs of each eight
# numbers, a bit each; None: the vectors have them
_Indices: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]
_CODEBOOKS: dict[str, tuple[float, Callable[[Tensor], Tensor], _Indices]] = {
    "IQ2_XXS": (1 / 8, lambda raw: raw[..., 9::8] >> 4, _iq2_xxs),
    "IQ2_XS": (1 / 8, lambda raw: bit_fields(raw[..., 66:], 4, 1), _iq2_xs),
    "IQ2_S": (1 / 8, lambda raw: bit_fields(raw[..., 74:], 4, 1), _iq2_s),
    "IQ3_XXS": (1 / 4, lambda raw: raw[..., 69::4] >> 4, _iq3_xxs),
    "IQ3_S": (1.0, lambda raw: bit_fields(raw[..., 106:], 4, 1), _iq3_s),
    "IQ1_S": (1 / 8, lambda raw: raw[..., 35::2] >> 4 & 7, _iq1_s),
    "IQ1_M": (1 / 8, lambda raw: _fields(_words(raw[..., 48:], torch.int16), 3, 4), _iq1_m),
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
    **{kind: partial(_codebook, kind) for kind in _CODEBOOKS},
}
