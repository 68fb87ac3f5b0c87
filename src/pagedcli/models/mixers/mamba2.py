"""Mamba-2 as data. Free of torch; recurrent_blocks.py computes it."""

from dataclasses import dataclass
from typing import ClassVar

from pagedcli.models.formats import VECTOR
from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mixers.state import StateTensor
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

    @property
    def grouping(self) -> tuple[int, int]:
        return self.num_heads, self.num_groups

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        heads, width, name = self.num_heads, make.width, f"{layer}.{make.names.recurrent}"
        inner = {f"{name}.in_proj": self.inner + self.channels + heads}
        found = {
            **make.linear(f"{key}.inner", inner, width, bias=self.proj_bias),
            f"{key}.conv": exact({f"{name}.conv1d.weight": (self.channels, 1, self.kernel)}),
            f"{key}.decay": exact({f"{name}.A_log": (heads,)}, init=1.0),
            f"{key}.step_bias": exact({f"{name}.dt_bias": (heads,)}, init=1.0),
            f"{key}.skip": exact({f"{name}.D": (heads,)}, init=1.0),
            f"{key}.gated_norm": Parameter({f"{name}.norm.weight": (self.inner,)}, init=1.0, stored=VECTOR),
            **make.linear(f"{key}.out", {f"{name}.out_proj": width}, self.inner, bias=self.proj_bias),
        }
        if self.conv_bias:
            found[f"{key}.conv_bias"] = exact({f"{name}.conv1d.bias": (self.channels,)})
        return found
