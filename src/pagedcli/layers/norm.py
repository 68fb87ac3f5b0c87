"""RMSNorm, alone and fused with the preceding residual addition.

The mean square is computed in float32 and cast before the weight is applied, as in transformers' Llama: in bfloat16 the
order matters. A float32 weight is applied before the cast, as in its Gemma and OLMo2.
Source: Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019.
"""

from typing import cast

import torch
from torch import Tensor

from pagedcli.layers.fused import fused_layers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x scaled to a root mean square of 1 over its last dimension, times weight.

    Shapes:  x [..., E]; weight [E] or anything that broadcasts against x; returns a new tensor like x.
    """
    if x.is_cuda and x.dim() == 2 and weight.dim() == 1 and weight.dtype == x.dtype and (fused := fused_layers()):
        return cast(Tensor, fused.add_rms_norm(None, x.contiguous(), weight, eps))
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    if weight.dtype != x.dtype:
        return (wide * scale).mul_(weight).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of residual + x.

    Shapes:  x, residual [T, E]; weight [E]; returns [T, E].
    Changes: residual, which becomes residual + x.
    """
    if residual.is_cuda and residual.is_contiguous() and weight.dtype == residual.dtype and (fused := fused_layers()):
        return cast(Tensor, fused.add_rms_norm(x.contiguous(), residual, weight, eps))
    return rms_norm(residual.add_(x), weight, eps)
