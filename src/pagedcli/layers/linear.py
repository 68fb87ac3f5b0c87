"""Linear layers. The object owns its weight, so that a device can keep it in the layout its kernels like best."""

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b. Weight [out, in], bias [out] or None, as in checkpoints."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [..., in] -> [..., out], in the weight's dtype."""
        return F.linear(x, self.weight, self.bias)
