"""Mamba-2 as data. Free of torch; recurrent_blocks.py computes it."""

from dataclasses import dataclass
from typing import ClassVar

from pagedcli.models.formats import VECTOR
from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mixers.state import StateTensor, conv_and_matrix
from pagedcli.models.tensors import Parameter, Tensors, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(RecurrentMixer):
    """A selective state space: a convolution over x, B and C, then a matrix per head that forgets."""

    name: ClassVar[str] = "Mamba-2"
    num_heads: int
    head_dim: int
    num_groups: int  # groups of heads that share B and C
    state_size: int
    kernel: int  # inputs that the convolution sees, the current one included
    conv_bias: bool
    proj_bias: bool
    step_limits: tuple[float, float]  # smallest and largest step
    norm_group: int | None  # elements that the gated norm norms together; None: the result is only gated
    # of the projected gate, x, B, C and steps, and of the result; weights are multiplied when they are read
    factors: tuple[float, ...] = (1.0,) * 5
    out_factor: float = 1.0

    @property
    def gate_group(self) -> int:
        """Elements that are gated, and normed if there is a norm, together."""
        return self.inner if self.norm_group is None else self.norm_group

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return conv_and_matrix(self.kernel, self.channels, (self.num_heads, self.state_size, self.head_dim))

    @property
    def grouping(self) -> tuple[int, int]:
        return self.num_heads, self.num_groups

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        heads, width, name = self.num_heads, make.width, f"{layer}.{make.names.recurrent}"
        inner, groups = {f"{name}.in_proj": self.inner + self.channels + heads}, self.num_groups * self.state_size
        sizes = (self.inner, self.inner, groups, groups, heads)
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
