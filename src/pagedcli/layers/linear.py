"""Linear layers. Each owns its weight, in the layout that is fastest on its device.

On a CPU that is oneDNN's, packed once through torch; otherwise oneDNN repacks a weight on every call. The project's own
kernels (layers.native_linear) do not use this.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli.attention.base import dtype_name


class LinearLayer(Protocol):
    """y = x W^T + b, with any storage format of W."""

    @property
    def nbytes(self) -> int:
        """Size of W as stored in memory."""
        ...

    @property
    def gated(self) -> bool:
        """Whether it returns silu(y of the first half of W's rows) * (y of the second half)."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """Shapes: x [T, in] -> [T, out]."""


class Linear:
    """y = x W^T + b. Weight [out, in], bias [out] or None, as in checkpoints."""

    __slots__ = ("_packed", "bias", "nbytes", "weight")
    gated = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = _pack(weight)
        self.weight = weight if self._packed is None else None  # only one of the two forms is kept
        self.bias = bias
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [..., in] -> [..., out], in the weight's dtype."""
        if self._packed is None:
            assert self.weight is not None, "a weight is kept in one of two forms"
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


class OutputLinear:
    """y = x W^T + b of a 16-bit weight, not rounded to 16 bits, in which the two largest logits may be equal."""

    __slots__ = ("bias", "nbytes", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.float()
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, in] -> float32 [T, out]."""
        if x.is_cuda:
            out = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:  # torch has no such product on a CPU; a whole float32 copy of a weight would be the peak of memory
            wide = x.float()
            out = torch.cat([F.linear(wide, rows.float()) for rows in torch.split(self.weight, _ROWS_WIDENED)], 1)
        return out if self.bias is None else out.add_(self.bias)


_ROWS_WIDENED = 512  # 2 MiB of 1,024 inputs


def unpacked_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why linear layers on a CPU are not packed; None if they are, or on another device."""
    if device.type != "cpu":
        return None
    if not torch._C._has_mkldnn:
        return "this torch is built without oneDNN"
    if dtype == torch.float32:
        return None
    if dtype == torch.bfloat16:
        supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return None if supported else "oneDNN has no bfloat16 kernels for this processor"
    return f"oneDNN cannot pack {dtype_name(dtype)} weights"


def unpacked_note(device: torch.device, dtype: torch.dtype, kernels: str) -> tuple[str, ...]:
    """unpacked_reason as a note for the user, if there is one. `kernels`: "cpu" packs its weights itself."""
    reason = None if kernels == "cpu" else unpacked_reason(device, dtype)
    return () if reason is None else (f"linear layers are slow here: {reason}",)


def _pack(weight: Tensor) -> Tensor | None:
    if weight.device.type != "cpu" or not weight.numel() or unpacked_reason(weight.device, weight.dtype) is not None:
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed
