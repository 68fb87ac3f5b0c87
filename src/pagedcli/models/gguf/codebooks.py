"""The vectors of GGUF's IQ1, IQ2 and IQ3 types: blocks of bytes -> whole numbers plus 128, a byte each.

Used by gguf.blocks. The codebooks are those of the gguf package.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

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
    """By eight bits, of which 1 is a minus: eight bytes as one number, 255 for a minus and 0 for none."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (255 * bits).to(torch.uint8).view(torch.int64).flatten()


@functools.cache
def _even_minuses() -> Tensor:
    """The eight bits that seven stand for: the number of minuses is even."""
    return torch.tensor([bits | bits.bit_count() % 2 << 7 for bits in range(128)])


def codebook_codes(raw: Tensor, kind: str) -> Tensor:
    """Shapes: raw [..., bytes of a block] uint8 -> [..., 256] uint8."""
    places, signs = _INDICES[kind](raw)
    vectors = _vectors(kind).to(raw.device)
    found = vectors[places.int()].view(torch.int64)
    if signs is not None:
        minus = _minuses().to(raw.device)[signs.int()]
        # 256 less a number is its opposite; none is 0, so that no byte reaches into the next
        found = ((found ^ minus) + (minus & _ONES)) ^ _HIGH_BITS
    return found.view(torch.uint8)


def _fields(words: Tensor, width: int, count: int, mask: int) -> Tensor:
    """Shapes: words [..., n] -> [..., n * count], from the lowest bits on."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & mask).flatten(-2)


def _words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype).int()


def _iq2_xxs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    parts = raw[..., 2:66].reshape(*raw.shape[:-1], 8, 8)
    signs = _fields(_words(parts[..., 4:], torch.int32).squeeze(-1), 7, 4, 127)
    return parts[..., :4].flatten(-2), _even_minuses().to(raw.device)[signs]


def _iq2_xs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    words = _words(raw[..., 2:66], torch.int16)
    return words & 511, _even_minuses().to(raw.device)[words >> 9 & 127]


def _iq2_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., 2:34].int() | _fields(raw[..., 66:74].int(), 2, 4, 3) << 8, raw[..., 34:66]


def _iq3_xxs(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    signs = _fields(_words(raw[..., 66:98], torch.int32), 7, 4, 127)
    return raw[..., 2:66], _even_minuses().to(raw.device)[signs]


def _iq3_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., 2:66].int() | _fields(raw[..., 66:74].int(), 1, 8, 1) << 8, raw[..., 74:106]


def _iq1_s(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    words = _words(raw[..., 34:50], torch.int16)
    less = (words >> 15 & 1).repeat_interleave(4, -1)
    return raw[..., 2:34].int() | _fields(words, 3, 4, 7) << 8 | less << 11, None


def _iq1_m(raw: Tensor) -> tuple[Tensor, Tensor | None]:
    return raw[..., :32].int() | _fields(raw[..., 32:48].int(), 4, 2, 15) << 8, None  # the fourth bit: less an eighth


# blocks -> places in the codebook, and the signs of each eight numbers, a bit each; None: the vectors have them
_INDICES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
