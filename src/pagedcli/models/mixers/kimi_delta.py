"""Kimi delta attention as data. Free of torch; recurrent_blocks.py computes it."""

from dataclasses import dataclass
from typing import ClassVar

from pagedcli.models.formats import VECTOR
from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mixers.state import StateTensor, conv_and_matrix
from pagedcli.models.tensors import Parameter, Tensors, exact


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(RecurrentMixer):
    """A gated delta net whose matrices forget each channel of the keys at a rate of its own. The rates and the gates of
    its results are products of two thin matrices.

    Source: Kimi Team, Kimi Linear: An Expressive, Efficient Attention Architecture, 2025, section 3.
    """

    name: ClassVar[str] = "Kimi delta attention"
    num_heads: int
    head_dim: int  # size of the heads of q, k and v; width between the thin matrices
    kernel: int  # inputs that the convolution sees, the current one included

    @property
    def channels(self) -> int:
        """Channels of the convolution: all of q, k and v."""
        return 3 * self.inner

    @property
    def inner(self) -> int:
        """Width of v and of the result."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return conv_and_matrix(self.kernel, self.channels, (self.num_heads, self.head_dim, self.head_dim))

    def parameters(self, make: Tensors, key: str, layer: str) -> dict[str, Parameter]:
        """What decides on forgetting and correcting is as exact as a router: it is never rounded."""
        heads, size, width, name = self.num_heads, self.head_dim, make.width, f"{layer}.{make.names.recurrent}"
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
