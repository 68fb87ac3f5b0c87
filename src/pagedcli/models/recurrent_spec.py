"""Layers that keep a state of fixed size instead of K and V of every token: their mechanisms as data. Free of torch.

layers.recurrent computes them. A state is a few named tensors per layer; all of a sequence's states are one slot.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that a recurrent layer keeps per sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # None: that of the activations

    def num_bytes(self, itemsize: int) -> int:
        """Its size; itemsize is that of the activations."""
        size = 4 if self.dtype == "float32" else itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """A gated delta net: a convolution over q, k and v, then a matrix per value head that forgets and is corrected."""

    name: ClassVar[str] = "gated delta nets"
    num_key_heads: int  # of q and k; each serves neighbouring value heads, if not `tiled`
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # inputs that the convolution sees, the current one included
    interleaved: bool = False  # the projections list, key head by key head, what flat ones list tensor by tensor
    tiled: bool = False  # a key head serves every num_key_heads-th value head, as in llama.cpp's files

    @property
    def channels(self) -> int:
        """Of the convolution: all of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Width of v and of the result."""
        return self.num_value_heads * self.value_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        matrix = (self.num_value_heads, self.key_dim, self.value_dim)
        return (StateTensor("conv", (self.kernel - 1, self.channels)), StateTensor("matrix", matrix, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space: a convolution over x, B and C, then a matrix per head that forgets."""

    name: ClassVar[str] = "Mamba-2"
    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share B and C
    state_size: int
    kernel: int
    conv_bias: bool
    proj_bias: bool
    step_limits: tuple[float, float]  # smallest and largest step
    norm_group: int  # elements that the gated norm norms together

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[StateTensor, ...]:
        matrix = (self.num_heads, self.state_size, self.head_dim)
        return (StateTensor("conv", (self.kernel - 1, self.channels)), StateTensor("matrix", matrix, "float32"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A convolution between two gates."""

    name: ClassVar[str] = "short convolutions"
    channels: int
    kernel: int
    bias: bool

    @property
    def inner(self) -> int:
        return self.channels

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (self.kernel - 1, self.channels)),)


Recurrent = GatedDelta | Mamba2 | ShortConv
