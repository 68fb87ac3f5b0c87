"""Gated delta nets as data. Free of torch; recurrent_blocks.py computes them."""

from dataclasses import dataclass
from typing import ClassVar

from pagedcli.models.formats import VECTOR
from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mixers.state import StateTensor, conv_and_matrix
from pagedcli.models.tensors import Parameter, Tensors, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(RecurrentMixer):
    """A gated delta net: a convolution over q, k and v, then a matrix per value head that forgets and is corrected."""

    name: ClassVar[str] = "gated delta nets"
    num_key_heads: int  # heads of q and k; each serves neighbouring value heads, if not `tiled`
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # inputs that the convolution sees, the current one included
    interleaved: bool = False  # the projections list, key head by key head, what flat ones list tensor by tensor
    tiled: bool = False  # a key head serves every num_key_heads-th value head, as in llama.cpp's files
    apart: bool = False  # q, k, v and their convolutions are tensors of their own, and names are OLMo's
    correction: float = 1.0  # factor of how much a head corrects; 2: a state may also turn around
    eps: float | None = None  # epsilon of its norm; None: the model's

    @property
    def channels(self) -> int:
        """Channels of the convolution: all of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Width of v and of the result."""
        return self.num_value_heads * self.value_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return conv_and_matrix(self.kernel, self.channels, (self.num_value_heads, self.key_dim, self.value_dim))

    @property
    def grouping(self) -> tuple[int, int]:
        return self.num_value_heads, self.num_key_heads

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """The gates of forgetting and correcting are as exact as a router: they are never rounded."""
        heads, width, name = self.num_value_heads, make.width, f"{layer}.{make.names.recurrent}"
        gate_names, norm, out = ("in_proj_b", "in_proj_a"), "norm", "out_proj"
        conv = {f"{name}.conv1d.weight": self.channels}
        if self.apart:
            keys, gate_names, norm, out = self.num_key_heads * self.key_dim, ("b_proj", "a_proj"), "o_norm", "o_proj"
            inner = {
                f"{name}.{part}_proj": n for part, n in zip("qkvg", (keys, keys, self.inner, self.inner), strict=True)
            }
            conv = {f"{name}.{part}_conv1d.weight": n for part, n in zip("qkv", (keys, keys, self.inner), strict=True)}
            gates = {f"{name}.{each}.weight": (heads, width) for each in gate_names}
        elif self.interleaved:
            inner = {f"{name}.in_proj_qkvz": self.channels + self.inner}
            gates = {f"{name}.in_proj_ba.weight": (2 * heads, width)}
        else:
            inner = {f"{name}.in_proj_qkv": self.channels, f"{name}.in_proj_z": self.inner}
            gates = {f"{name}.{each}.weight": (heads, width) for each in gate_names}
        return {
            **make.linear(f"{key}.inner", inner, width),
            f"{key}.gates": Parameter(gates),
            f"{key}.conv": exact({each: (n, 1, self.kernel) for each, n in conv.items()}),
            f"{key}.decay": exact({f"{name}.A_log": (heads,)}, init=1.0),
            f"{key}.step_bias": exact({f"{name}.dt_bias": (heads,)}, init=1.0),
            f"{key}.gated_norm": Parameter({f"{name}.{norm}.weight": (self.value_dim,)}, init=1.0, stored=VECTOR),
            **make.linear(f"{key}.out", {f"{name}.{out}": width}, self.inner),
        }
