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
from pagedcli.attention.triton_launch import power_of_2

_HEADS_PER_PROGRAM = 8


def add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    norm_added: Tensor | None = None,
    added_eps: float | None = None,
    multiplier: float = 1.0,
    factor: float = 1.0,
) -> Tensor:
    """rms_norm of residual + x, or of residual alone; arguments and result of layers.basic.add_rms_norm.

    Shapes:  x, residual [T, E] contiguous; weight, norm_added [E], of their dtype or float32; returns [T, E].
    Changes: residual, which becomes the sum.
    """
    assert residual.is_contiguous(), "the kernel reads rows of E elements"
    assert x is None or x.is_contiguous(), "the kernel reads rows of E elements"
    out = residual if weight is None else torch.empty_like(residual)
    num_tokens, width = residual.shape
    if num_tokens:
        block = power_of_2(width)
        add_rms_norm_kernel[(num_tokens,)](
            residual if x is None else x,
            residual,
            residual if norm_added is None else norm_added,
            residual if weight is None else weight,
            out,
            eps,
            eps if added_eps is None else added_eps,
            float(multiplier),
            float(factor),
            E=width,
            BLOCK_E=block,
            ADD=x is not None,
            NORM_ADDED=x is not None and norm_added is not None,
            MULTIPLY=multiplier != 1,
            SCALE=factor != 1,
            NORM=weight is not None,
            num_warps=_warps(block),
        )
    return out


def activate_and_mul(gate_up: Tensor, activation: str, up: Tensor | None = None) -> Tensor:
    """activation(gate) * up, by one of layers.basic.ACTIVATIONS.

    Shapes:  gate_up [T, 2I] contiguous, gate first; or with `up` [T, I], whose rows may be strided, gate [T, I] alone;
             returns [T, I].
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // (2 if up is None else 1)
    out = gate_up.new_empty((num_tokens, width))
    if num_tokens:
        block = min(1024, power_of_2(width))
        strides = {"GATE_STRIDE": gate_up.shape[1], "UP_STRIDE": gate_up.shape[1] if up is None else up.stride(0)}
        gated_kernel[num_tokens, -(-width // block)](
            gate_up, gate_up if up is None else up, out, WIDTH=width, **strides, FIRST_UP=width if up is None else 0,
            ACTIVATION=activation, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    norm: tuple[Tensor, float] | None,
    norms_all: bool = False,
    norms_values: bool = False,
    table: Tensor | None,
    interleaved: bool = False,
    query_scales: Tensor | None = None,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Split, norm, rotary embedding, and K and V into the cache: what layers.basic.norm_all and split_heads and a
    backend's write do for a cache of the layout [N, G, S, D].

    Shapes:  qkv [T, (H + 2G) * D] contiguous, q heads first, or [T, (H + G) * D]: K, before it is normed and rotated,
             is V, too. G may be 0: nothing is stored. norm None or (weight [H + G, D], eps), of each head or with
             norms_all of all of q and all of k, with norms_values of each head of V, too, by no weights; table [P, R],
             see rotary_rows, or None: no rotation; positions [T] int64; query_scales [P], which multiply q after the
             rotation, or None; slots [T] int32; k_cache, v_cache [N, G, S, D], of equal strides, whose blocks may lie
             apart; kv_scales: scales of K and V in an fp8 cache; returns q [T, H, D].
    Changes: the cache at every slot that is not -1.
    """
    head_dim = k_cache.shape[3]
    q = qkv.new_empty((qkv.shape[0], num_heads, head_dim))
    if qkv.shape[0]:
        weight, eps = norm if norm is not None else (qkv, 0.0)
        num_groups = -(-(num_heads + 2 * num_kv_heads) // _HEADS_PER_PROGRAM)
        rotate_and_store_kernel[(qkv.shape[0], num_groups)](
            qkv,
            weight,
            qkv if table is None else table,
            qkv if query_scales is None else query_scales,
            positions,
            slots,
            q,
            k_cache,
            v_cache,
            eps,
            1 / kv_scales[0],
            1 / kv_scales[1],
            **rotate_constants(num_heads, num_kv_heads, k_cache),
            FIRST_V=qkv.shape[1] // head_dim - num_kv_heads,
            NORM=None if norm is None else "all" if norms_all else "heads",
            NORM_VALUES=norms_values,
            ROTATED=0 if table is None else table.shape[1],
            INTERLEAVED=interleaved,
            SCALED=query_scales is not None,
            FP8=k_cache.dtype == torch.float8_e4m3fn,
            num_warps=4,
        )
    return q


def rotate_constants(num_heads: int, num_kv_heads: int, cache: Tensor) -> dict[str, Any]:
    """Compile-time values of rotate_and_store_kernel for a cache of K or V."""
    block_size, head_dim = cache.shape[2:]
    heads = {"H": num_heads, "G": num_kv_heads, "S": block_size, "D": head_dim, "BLOCK_STRIDE": cache.stride(0)}
    whole = {"BLOCK_Q": power_of_2(num_heads * head_dim), "BLOCK_K": power_of_2(num_kv_heads * head_dim)}
    return {**heads, **whole, "HEADS": _HEADS_PER_PROGRAM, "BLOCK_HALF": power_of_2(head_dim // 2)}


def _warps(block: int) -> int:
    """Warps for a program of `num_elements`: 8 per thread, one 16-byte load of a 2-byte type."""
    return min(32, max(1, block // 256))


LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _weighted(normed, weight, dtype: tl.constexpr):
    """normed * weight, rounded to dtype: a weight of dtype multiplies what is rounded, a float32 weight what is not."""
    if weight.dtype == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    added_weight_ptr,
    weight_ptr,
    out_ptr,
    eps,
    added_eps,
    multiplier,
    factor,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ADD: tl.constexpr,
    NORM_ADDED: tl.constexpr,
    MULTIPLY: tl.constexpr,
    SCALE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program per token: residual += x (with ADD), out = residual / rms(residual) * weight (with NORM). With
    NORM_ADDED x / rms(x) * added_weight is added instead of x, with MULTIPLY multiplier times that. With SCALE the sum
    becomes factor times itself."""
    row = tl.program_id(0).to(tl.int64) * E
    column = tl.arange(0, BLOCK_E)
    inside = column < E
    dtype = out_ptr.dtype.element_ty
    wide = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        if NORM_ADDED:
            scale = 1.0 / tl.sqrt(tl.sum(added * added, 0) / E + added_eps)
            weight = tl.load(added_weight_ptr + column, mask=inside, other=0.0)
            added = _weighted(added * scale, weight, dtype).to(tl.float32)
        if MULTIPLY:
            added = (added * multiplier).to(dtype).to(tl.float32)
        rounded = (wide + added).to(dtype)
        if SCALE:
            rounded = (rounded.to(tl.float32) * factor).to(dtype)
        tl.store(residual_ptr + row + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / E + eps)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        tl.store(out_ptr + row + column, _weighted(wide * scale, weight, dtype), mask=inside)


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
def gated_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,  # elements from one token to the next
    UP_STRIDE: tl.constexpr,
    FIRST_UP: tl.constexpr,  # column
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (token, BLOCK columns): ACTIVATION(gate) * up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_ptr + token * GATE_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * UP_STRIDE + FIRST_UP + column, mask=inside, other=0.0).to(tl.float32)
    product = gated(gate, up, out_ptr.dtype.element_ty, ACTIVATION)
    tl.store(out_ptr + token * WIDTH + column, product, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a row of [groups, T]
def rotate_and_store_kernel(
    qkv_ptr,
    norm_ptr,  # [H + G, D], with NORM
    table_ptr,  # [P, R]: R/2 cosines, then R/2 sines
    scales_ptr,  # [P], with SCALED: of q
    positions_ptr,
    slots_ptr,
    q_out_ptr,  # [T, H, D]
    k_cache_ptr,  # [N, G, S, D], from one block to the next BLOCK_STRIDE elements
    v_cache_ptr,
    eps,
    k_inverse,  # 1 / scale of an fp8 cache
    v_inverse,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    FIRST_V: tl.constexpr,  # heads before those of V: H + G, or H where K is V
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,  # "heads": each is normed; "all": all of q and all of k; or None
    NORM_VALUES: tl.constexpr,  # needs NORM "heads"
    ROTATED: tl.constexpr,  # R, the first elements of each head; the others stay as they are
    INTERLEAVED: tl.constexpr,  # the pairs (2i, 2i + 1) are rotated, and become (i, i + R/2)
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per (token, HEADS heads): q, k normed and rotated; k and v to the token's slot, unless it is -1."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    at, partner = places_in_head(half, head < H + G, D, ROTATED, INTERLEAVED)
    inside = (head < H + 2 * G) & (half < D // 2)
    row = qkv_ptr + token * (FIRST_V + G) * D
    source = row + tl.where(head >= H + G, head - (H + G) + FIRST_V, head) * D
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    mean = 1.0
    if NORM == "heads":
        mean = ((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D)[:, None]
    elif NORM == "all":
        q_column, k_column = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
        q = tl.load(row + q_column, mask=q_column < H * D, other=0.0).to(tl.float32)
        k = tl.load(row + H * D + k_column, mask=k_column < G * D, other=0.0).to(tl.float32)
        mean = tl.where(head < H, tl.sum(q * q, 0) / (H * D), tl.sum(k * k, 0) / (G * D))
    store_heads(
        first, second, mean, token, token >= 0, head, half, inside, norm_ptr, table_ptr, scales_ptr, positions_ptr,
        slots_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, eps, k_inverse, v_inverse, H, G, S, D, BLOCK_STRIDE,
        NORM is not None, NORM_VALUES, ROTATED, INTERLEAVED, SCALED, FP8,
    )  # fmt: skip


@triton.jit
def places_in_head(half, turns, D: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Each element and its partner, where the projection has them; from ROTATED / 2 on any two that are not rotated.
    `turns`: whether they are of q or k."""
    TURNED: tl.constexpr = ROTATED // 2
    here, there = half, half + D // 2
    if TURNED < D // 2:
        here = tl.where(half < TURNED, half, half + TURNED)
        there = tl.where(half < TURNED, half + TURNED, half + D // 2)
    if INTERLEAVED:
        moves = (half < TURNED) & turns
        here, there = tl.where(moves, 2 * half, here), tl.where(moves, 2 * half + 1, there)
    return here, there


@triton.jit
def store_heads(
    first,  # float32, at places_in_head: heads of a token, or a head of tokens
    second,
    mean,  # of their squares, with NORM
    token,
    live,  # which tokens exist
    head,
    half,
    inside,
    norm_ptr,  # this and the rest: see rotate_and_store_kernel
    table_ptr,
    scales_ptr,
    positions_ptr,
    slots_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    k_inverse,
    v_inverse,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    """q, k normed and rotated; q to q_out, k and v to the tokens' slots, unless they are -1."""
    TURNED: tl.constexpr = ROTATED // 2
    dtype = q_out_ptr.dtype.element_ty
    is_v = head >= H + G
    at, partner = places_in_head(half, head < H + G, D, ROTATED, INTERLEAVED)
    here, there = places_in_head(half, True, D, ROTATED, False)  # in q_out and the cache
    rotated = inside & (head < H + G)
    x, y = first, second
    if NORM:
        scale = 1.0 / tl.sqrt(mean + eps)
        weight = norm_ptr + head * D
        x = _weighted(x * scale, tl.load(weight + at, mask=rotated, other=0.0), dtype).to(tl.float32)
        y = _weighted(y * scale, tl.load(weight + partner, mask=rotated, other=0.0), dtype).to(tl.float32)
        if NORM_VALUES:
            first, second = first * scale, second * scale
    if ROTATED:
        angle = table_ptr + tl.load(positions_ptr + token, mask=live, other=0) * ROTATED + half
        cos = tl.load(angle, mask=half < TURNED, other=1.0).to(tl.float32)
        sin = tl.load(angle + TURNED, mask=half < TURNED, other=0.0).to(tl.float32)
        new_x = (x * cos).to(dtype).to(tl.float32) - (y * sin).to(dtype).to(tl.float32)
        new_y = (y * cos).to(dtype).to(tl.float32) + (x * sin).to(dtype).to(tl.float32)
        x, y = new_x, new_y
    if SCALED:
        of_position = tl.load(scales_ptr + tl.load(positions_ptr + token, mask=live, other=0)).to(tl.float32)
        scale = tl.where(head < H, of_position, 1.0)
        x, y = x.to(dtype).to(tl.float32) * scale, y.to(dtype).to(tl.float32) * scale
    x, y = tl.where(is_v, first, x), tl.where(is_v, second, y)
    q_out = q_out_ptr + (token * H + head) * D
    tl.store(q_out + here, x.to(dtype), mask=inside & (head < H))
    tl.store(q_out + there, y.to(dtype), mask=inside & (head < H))
    if G > 0:
        slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
        inside &= slot >= 0
        kv_head = tl.where(is_v, head - H - G, head - H)
        place = slot // S * BLOCK_STRIDE + (kv_head * S + slot % S) * D
        # through the model's dtype, so that every way of filling the cache leaves the same in it
        kept_x, kept_y = x.to(dtype), y.to(dtype)
        if FP8:
            inverse = tl.where(is_v, v_inverse, k_inverse)
            kept_x, kept_y = to_fp8(kept_x, inverse), to_fp8(kept_y, inverse)
        is_k = inside & (head >= H) & (head < H + G)
        tl.store(k_cache_ptr + place + here, kept_x, mask=is_k)
        tl.store(k_cache_ptr + place + there, kept_y, mask=is_k)
        tl.store(v_cache_ptr + place + here, kept_x, mask=inside & is_v)
        tl.store(v_cache_ptr + place + there, kept_y, mask=inside & is_v)
