"""Mixers that keep a state of fixed size instead of K and V of every token, as data. Free of torch; recurrent_blocks.py
computes them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from pagedcli.layers.kinds import StateHeads
from pagedcli.models.formats import VECTOR
from pagedcli.models.tensors import Parameter, Tensors, exact


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that a layer keeps per sequence; all of a sequence's states are one slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None  # None: that of the activations

    def num_bytes(self, itemsize: int) -> int:
        """Its size; itemsize is that of the activations."""
        size = 4 if self.dtype == "float32" else itemsize
        for length in self.shape:
            size *= length
        return size


class RecurrentMixer(ABC):
    """A mixer whose state starts with the last inputs of a convolution."""

    __slots__ = ()
    name: ClassVar[str]
    attends: ClassVar[bool] = False
    keeps: ClassVar[bool] = True  # a state of its own
    kernel: int

    @property
    @abstractmethod
    def inner(self) -> int:
        """Width of what it computes with."""

    @property
    @abstractmethod
    def state(self) -> tuple[StateTensor, ...]:
        """What a sequence keeps."""

    @property
    def shape(self) -> Self:
        """What decides the shapes of its weights."""
        return self

    def split(self, num_ranks: int) -> Self:
        raise AssertionError(f"unsplit_reason refuses {num_ranks} ranks")

    def unsplit_reason(self, tensors: tuple[str, ...]) -> str | None:
        return "keeps states of its sequences"

    @abstractmethod
    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """Its tensors. `key`: of the layer here, `layer`: in the checkpoint."""

    def unread(self, make: Tensors, layer: str) -> set[str]:
        return set()


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixMixer(StateHeads, RecurrentMixer):
    """A mixer with a matrix per head behind its convolution."""

    kernel: int  # inputs that the convolution sees, the current one included

    @property
    def state(self) -> tuple[StateTensor, ...]:
        matrix = (self.num_heads, self.key_dim, self.value_dim)
        return StateTensor("conv", (self.kernel - 1, self.channels)), StateTensor("matrix", matrix, "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(MatrixMixer):
    """A gated delta net: a convolution over q, k and v, then a matrix per value head that forgets and is corrected."""

    name: ClassVar[str] = "gated delta nets"
    corrects: ClassVar[bool] = True
    apart: bool = False  # q, k, v and their convolutions are tensors of their own, and names are OLMo's
    eps: float | None = None  # epsilon of its norm; None: the model's

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """Names and shapes in the three layouts of checkpoints: apart, interleaved by head, one after the other."""
        heads, width, name = self.num_heads, make.width, f"{layer}.{make.names.recurrent}"
        gate_names, norm, out = ("in_proj_b", "in_proj_a"), "norm", "out_proj"
        conv = {f"{name}.conv1d.weight": self.channels}
        if self.apart:
            keys, gate_names, norm, out = self.num_key_heads * self.key_dim, ("b_proj", "a_proj"), "o_norm", "o_proj"
            sizes = {"q": keys, "k": keys, "v": self.inner, "g": self.inner}
            inner = {f"{name}.{part}_proj": size for part, size in sizes.items()}
            conv = {f"{name}.{part}_conv1d.weight": sizes[part] for part in "qkv"}
            gates = {f"{name}.{each}.weight": (heads, width) for each in gate_names}
        elif self.interleaved:
            inner = {f"{name}.in_proj_qkvz": self.channels + self.inner}
            gates = {f"{name}.in_proj_ba.weight": (2 * heads, width)}
        else:
            inner = {f"{name}.in_proj_qkv": self.channels, f"{name}.in_proj_z": self.inner}
            gates = {f"{name}.{each}.weight": (heads, width) for each in gate_names}
        return {
            **make.linear(f"{key}.inner", inner, width),
            f"{key}.gates": Parameter(gates),  # of forgetting and correcting: never rounded, as a router
            f"{key}.conv": exact({each: (n, 1, self.kernel) for each, n in conv.items()}),
            f"{key}.decay": exact({f"{name}.A_log": (heads,)}, init=1.0),
            f"{key}.step_bias": exact({f"{name}.dt_bias": (heads,)}, init=1.0),
            f"{key}.gated_norm": Parameter({f"{name}.{norm}.weight": (self.value_dim,)}, init=1.0, stored=VECTOR),
            **make.linear(f"{key}.out", {f"{name}.{out}": width}, self.inner),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(MatrixMixer):
    """A gated delta net whose matrices forget each channel of the keys at a rate of its own. The rates and the gates of
    its results are products of two thin matrices, as wide between them as a head.

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025, section 3.
    """

    name: ClassVar[str] = "Kimi delta attention"
    corrects: ClassVar[bool] = True
    by_channel: ClassVar[bool] = True

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """What decides on forgetting and correcting is as exact as a router: it is never rounded."""
        heads, size, width, name = self.num_heads, self.key_dim, make.width, f"{layer}.{make.names.recurrent}"
        return {
            **make.linear(f"{key}.inner", {f"{name}.{part}_proj": self.inner for part in "qkv"}, width),
            f"{key}.conv": exact({f"{name}.{part}_conv1d.weight": (self.inner, 1, self.kernel) for part in "qkv"}),
            f"{key}.gates": Parameter({f"{name}.b_proj.weight": (heads, width)}),
            f"{key}.decay_down": Parameter({f"{name}.f_a_proj.weight": (size, width)}),
            f"{key}.decay_up": Parameter({f"{name}.f_b_proj.weight": (self.inner, size)}),
            f"{key}.decay": exact({f"{name}.A_log": (1, 1, heads, 1)}, init=1.0),
            f"{key}.step_bias": exact({f"{name}.dt_bias": (self.inner,)}, init=1.0),
            **make.linear(f"{key}.shares_down", {f"{name}.g_a_proj": size}, width),
            **make.linear(f"{key}.shares_up", {f"{name}.g_b_proj": self.inner}, size),
            f"{key}.gated_norm": Parameter({f"{name}.o_norm.weight": (size,)}, init=1.0, stored=VECTOR),
            **make.linear(f"{key}.out", {f"{name}.o_proj": width}, self.inner),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(MatrixMixer):
    """A selective state space: a convolution over x, B and C, then a matrix per head that forgets."""

    name: ClassVar[str] = "Mamba-2"
    corrects: ClassVar[bool] = False
    conv_bias: bool
    proj_bias: bool
    norm_group: int | None  # elements that the gated norm norms together; None: the result is only gated
    # factors of the projected gate, x, B, C and steps; weights are multiplied by them when they are read
    factors: tuple[float, ...] = (1.0,) * 5
    out_factor: float = 1.0  # factor of the result, likewise

    @property
    def gate_group(self) -> int:
        """Elements that are gated, and normed if there is a norm, together."""
        return self.inner if self.norm_group is None else self.norm_group

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        heads, width, name = self.num_heads, make.width, f"{layer}.{make.names.recurrent}"
        inner, groups = {f"{name}.in_proj": self.inner + self.channels + heads}, self.num_key_heads * self.key_dim
        sizes = (self.inner, self.inner, groups, groups, heads)  # outputs of in_proj: gate, x, B, C, time step
        factors, out_factors = tuple(zip(sizes, self.factors, strict=True)), ((width, self.out_factor),)
        out = {f"{name}.out_proj": width}
        found = {
            **make.linear(f"{key}.inner", inner, width, bias=self.proj_bias, factors=factors),
            f"{key}.conv": exact({f"{name}.conv1d.weight": (self.channels, 1, self.kernel)}),
            f"{key}.decay": exact({f"{name}.A_log": (heads,)}, init=1.0),
            f"{key}.step_bias": exact({f"{name}.dt_bias": (heads,)}, init=1.0),
            f"{key}.skip": exact({f"{name}.D": (heads,)}, init=1.0),
            **make.linear(f"{key}.out", out, self.inner, bias=self.proj_bias, factors=out_factors),
        }
        if self.norm_group is not None:
            found[f"{key}.gated_norm"] = Parameter({f"{name}.norm.weight": (self.inner,)}, init=1.0, stored=VECTOR)
        if self.conv_bias:
            found[f"{key}.conv_bias"] = exact({f"{name}.conv1d.bias": (self.channels,)})
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv(RecurrentMixer):
    """A convolution between two gates."""

    name: ClassVar[str] = "short convolutions"
    channels: int
    kernel: int  # inputs that the convolution sees, the current one included
    bias: bool

    @property
    def inner(self) -> int:
        return self.channels

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (self.kernel - 1, self.channels)),)

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        channels, name = self.channels, f"{layer}.{make.names.recurrent}"
        found = {
            **make.linear(f"{key}.inner", {f"{name}.in_proj": 3 * channels}, make.width, bias=self.bias),
            f"{key}.conv": exact({f"{name}.conv.weight": (channels, 1, self.kernel)}),
            **make.linear(f"{key}.out", {f"{name}.out_proj": make.width}, channels, bias=self.bias),
        }
        if self.bias:
            found[f"{key}.conv_bias"] = exact({f"{name}.conv.bias": (channels,)})
        return found
