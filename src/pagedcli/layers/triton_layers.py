"""Fused layers for GPUs: fewer, longer kernels between the matrix products.

Each equals its twin in layers.basic, including rounding: arithmetic is float32, rounded to the tensors' dtype wherever
the twin rounds. Imported only where triton is installed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.attention.triton_kernels import to_fp8

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
        add_rms_norm_kernel[(num_tokens,)](
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


def activate_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, by one of layers.basic.ACTIVATIONS. Shapes: gate_up [T, 2I] contiguous, gate first;
    returns [T, I]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        block = min(1024, _power_of_2(width))
        grid = (num_tokens, -(-width // block))
        gated_kernel[grid](gate_up, out, WIDTH=width, ACTIVATION=activation, BLOCK=block, num_warps=_warps(block))
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
        rotate_and_store_kernel[(qkv.shape[0], num_groups)](
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


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program per token: residual += x (with ADD), out = residual / rms(residual) * weight."""
    row = tl.program_id(0).to(tl.int64) * E
    column = tl.arange(0, BLOCK_E)
    inside = column < E
    dtype = out_ptr.dtype.element_ty
    wide = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(residual_ptr + row + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / E + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, (wide * scale).to(dtype).to(tl.float32) * weight, mask=inside)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """ACTIVATION(gate) * up of float32 values that dtype holds; the product itself is not rounded to it."""
    if ACTIVATION == "clamped_silu":
        gate = tl.where(gate > 7.0, 7.0, gate)  # comparisons that keep a NaN
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        steep = (gate * 1.702).to(dtype).to(tl.float32)
        active = gate * (1.0 / (1.0 + tl.exp2(-steep * LOG2E))).to(dtype).to(tl.float32)
        up = (up + 1.0).to(dtype).to(tl.float32)
    elif ACTIVATION == "gelu_pytorch_tanh":  # (1 + tanh(y)) / 2 is the sigmoid of 2y
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp2(-slope * LOG2E))
    else:
        active = gate / (1.0 + tl.exp2(-gate * LOG2E))
    return active.to(dtype).to(tl.float32) * up


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """One program per (token, BLOCK columns): ACTIVATION(gate) * up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    product = gated(gate, up, out_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + token * WIDTH + column, product, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a row of [groups, T]
def rotate_and_store_kernel(
    qkv_ptr,
    norm_ptr,  # [H + G, D]
    table_ptr,  # [P, D]: D/2 cosines, then D/2 sines
    positions_ptr,
    slots_ptr,
    q_out_ptr,  # [T, H, D]
    k_cache_ptr,  # [N, G, S, D]
    v_cache_ptr,
    eps,
    k_inverse,  # 1 / scale of an fp8 cache
    v_inverse,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per (token, HEADS heads): q, k normed and rotated; k and v to the token's slot, unless it is -1."""
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < H + 2 * G) & (half < HALF)
    dtype = q_out_ptr.dtype.element_ty
    source = qkv_ptr + (token * (H + 2 * G) + head) * D + half
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_v = head >= H + G
    rotated = inside & (head < H + G)
    x, y = first, second
    if NORM:
        mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        weight = norm_ptr + head * D + half
        x = (x * scale).to(dtype).to(tl.float32) * tl.load(weight, mask=rotated, other=0.0).to(tl.float32)
        y = (y * scale).to(dtype).to(tl.float32) * tl.load(weight + HALF, mask=rotated, other=0.0).to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    angle = table_ptr + tl.load(positions_ptr + token) * D + half
    cos = tl.load(angle, mask=half < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=half < HALF, other=0.0).to(tl.float32)
    new_x = (x * cos).to(dtype).to(tl.float32) - (y * sin).to(dtype).to(tl.float32)
    new_y = (y * cos).to(dtype).to(tl.float32) + (x * sin).to(dtype).to(tl.float32)
    x, y = tl.where(is_v, first, new_x), tl.where(is_v, second, new_y)
    q_out = q_out_ptr + (token * H + head) * D + half
    tl.store(q_out, x.to(dtype), mask=inside & (head < H))
    tl.store(q_out + HALF, y.to(dtype), mask=inside & (head < H))
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        kv_head = tl.where(is_v, head - H - G, head - H)
        place = ((slot // S * G + kv_head) * S + slot % S) * D + half
        # through the model's dtype, so that every way of filling the cache leaves the same in it
        kept_x, kept_y = x.to(dtype), y.to(dtype)
        if FP8:
            inverse = tl.where(is_v, v_inverse, k_inverse)
            kept_x, kept_y = to_fp8(kept_x, inverse), to_fp8(kept_y, inverse)
        is_k = inside & (head >= H) & (head < H + G)
        tl.store(k_cache_ptr + place, kept_x, mask=is_k)
        tl.store(k_cache_ptr + place + HALF, kept_y, mask=is_k)
        tl.store(v_cache_ptr + place, kept_x, mask=inside & is_v)
        tl.store(v_cache_ptr + place + HALF, kept_y, mask=inside & is_v)
