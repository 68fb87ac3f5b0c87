"""Fused layers for GPUs: fewer, longer kernels between the matrix products.

Each equals its counterpart in norm, mlp and rotary, including rounding. Imported only if triton is installed.
"""

from typing import Any

import torch
from torch import Tensor

from pagedcli.layers import triton_kernels as kernels

_HEADS_PER_PROGRAM = 8


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of residual + x, or of residual alone.

    Shapes:  x, residual [T, E] contiguous; weight [E]; returns [T, E].
    Changes: residual, which becomes residual + x.
    """
    out = torch.empty_like(residual)
    num_tokens, width = residual.shape
    if num_tokens:
        block = _power_of_2(width)
        kernels.add_rms_norm_kernel[(num_tokens,)](
            residual if x is None else x,
            residual,
            weight,
            out,
            eps,
            E=width,
            BLOCK_E=block,
            ADD=x is not None,
            num_warps=_warps(block),
        )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. Shapes: gate_up [T, 2I] contiguous, gate first; returns [T, I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        block = min(1024, _power_of_2(width))
        grid = (num_tokens, -(-width // block))
        kernels.silu_and_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=block, num_warps=_warps(block))
    return out


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    norm: tuple[Tensor, float] | None,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Split, per-head norm, rotary embedding, and K and V into the cache: what rotary.split_heads and a backend's write
    do for a cache of the layout [N, G, S, D].

    Shapes:  qkv [T, (H + 2G) * D] contiguous, q heads first; norm None or (weight [H + G, D], eps); table [P, D], see
             rotary_rows; positions [T] int64; slots [T] int32; k_cache, v_cache [N, G, S, D]; kv_scales: scales
             of K and V in an fp8 cache; returns q [T, H, D].
    Changes: the cache at every slot that is not -1.
    """
    head_dim, block_size = k_cache.shape[3], k_cache.shape[2]
    q = qkv.new_empty((qkv.shape[0], num_heads, head_dim))
    if qkv.shape[0]:
        weight, eps = norm if norm is not None else (table, 0.0)
        num_groups = -(-(num_heads + 2 * num_kv_heads) // _HEADS_PER_PROGRAM)
        kernels.rotate_and_store_kernel[(qkv.shape[0], num_groups)](
            qkv,
            weight,
            table,
            positions,
            slots,
            q,
            k_cache,
            v_cache,
            eps,
            1 / kv_scales[0],
            1 / kv_scales[1],
            **rotate_constants(num_heads, num_kv_heads, block_size, head_dim),
            NORM=norm is not None,
            FP8=k_cache.dtype == torch.float8_e4m3fn,
            num_warps=4,
        )
    return q


def rotate_constants(num_heads: int, num_kv_heads: int, block_size: int, head_dim: int) -> dict[str, Any]:
    """Compile-time values of rotate_and_store_kernel."""
    half = _power_of_2(head_dim // 2)
    heads = {"H": num_heads, "G": num_kv_heads, "S": block_size, "D": head_dim}
    return {**heads, "HEADS": _HEADS_PER_PROGRAM, "BLOCK_HALF": half}


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _warps(block: int) -> int:
    """Warps for a program of `num_elements`: 8 per thread, one 16-byte load of a 2-byte type."""
    return min(32, max(1, block // 256))
