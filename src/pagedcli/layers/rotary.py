"""Splits the fused projection into q, k and v, with per-head norm and rotary embedding.

Each multiplication is rounded to the model's dtype, as in transformers.
"""

import torch
from torch import Tensor

from pagedcli.layers.norm import rms_norm


def rotary_rows(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the step's tokens, as rotate expects them. Once per step, for all layers.

    Shapes:  table [P, D], D/2 cosines then D/2 sines; positions [T] int64, < P; returns cos, sin, both [T, 1, D], the
             sines of the first half negated.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the token's angles.

    Shapes:  x [T, heads, D]; cos, sin of rotary_rows; returns a new tensor like x.
    Source:  Su et al., RoFormer, 2021, in the half-split form of GPT-NeoX and Llama.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1); with the negated sines this is rotate_half
    return (x * cos).add_(swapped.mul_(sin))


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    norm: tuple[Tensor, float] | None,
    angles: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the step's tokens, q and k normed and rotated.

    Shapes:  qkv [T, (H + 2G) * D], q heads first; norm None or (weight [H + G, D], eps); angles of rotary_rows, or
             None: no rotation;
             returns q [T, H, D] contiguous, k and v [T, G, D] with strided rows.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norm is not None:
        qk = rms_norm(qk, *norm)  # q and k in one pass
    if angles is not None:
        qk = _rotate_first(qk, *angles)
    return qk[:, :num_heads].contiguous(), qk[:, num_heads:], v


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate of the first R elements of each head. Shapes: x [T, heads, D]; cos, sin [T, 1, R]."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return rotate(x, cos, sin)
    return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
