"""Activations of the gated MLP. Source: Shazeer, GLU Variants Improve Transformer, 2020 (SwiGLU)."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor

from pagedcli.layers.fused import fused_layers


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Shapes: gate_up [T, 2I], gate first; returns [T, I]."""
    if gate_up.is_cuda and (fused := fused_layers()):
        return cast(Tensor, fused.silu_and_mul(gate_up.contiguous()))
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh approximation of gelu. Shapes: as silu_and_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


# by hidden_act of config.json
ACTIVATIONS = {"silu": silu_and_mul, "swish": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
