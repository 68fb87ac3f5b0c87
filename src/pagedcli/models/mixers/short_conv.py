"""Short convolutions as data. Free of torch; recurrent_blocks.py computes them."""

from dataclasses import dataclass
from typing import ClassVar

from pagedcli.models.mixers.recurrent import RecurrentMixer
from pagedcli.models.mixers.state import StateTensor
from pagedcli.models.tensors import Parameter, Tensors, exact


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
