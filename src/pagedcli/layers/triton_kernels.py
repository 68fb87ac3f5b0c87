"""The Triton kernels of a decoder layer between its matrix products, and of sampling. Each has a twin in plain torch.

Used by the other triton_*.py of this folder; imported only where triton is installed. Arithmetic is float32; it is
rounded to the tensors' dtype wherever the twin rounds.
"""

import triton
import triton.language as tl

from pagedcli.attention.triton_kernels import to_fp8

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
def silu_and_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per (token, BLOCK columns): silu(gate) * up."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up_ptr + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp2(-gate * LOG2E))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, silu * up, mask=inside)


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


@triton.jit
def _weights(logits_ptr, column, inside, floor, inverse, FLOOR: tl.constexpr):
    """Kept logits in units of log2 after temperature."""
    x = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    if FLOOR:
        x = tl.where(x < floor, float("-inf"), x)  # NaN stays
    return x * inverse


@triton.jit(do_not_specialize_on_alignment=["mass_ptr"])  # that depends on the number of rows
def sample_chunks_kernel(
    logits_ptr,
    temperature_ptr,
    floor_ptr,
    top_ptr,  # [R, C] float32: the largest scaled logit of each chunk
    token_ptr,  # [R, C] int32: its first place in the row
    mass_ptr,  # [R, C] float32: sum of exp2(scaled logit - top)
    row_stride,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """One program per (row, chunk): the only pass over the logits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    inverse = tl.where(temperature > 0.0, LOG2E / temperature, 1.0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    floor = tl.load(floor_ptr + row) if FLOOR else 0.0
    x = _weights(logits_ptr + row * row_stride, column, column < V, floor, inverse, FLOOR)
    top = tl.max(x, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(top_ptr + row * C + chunk, top)
    tl.store(token_ptr + row * C + chunk, tl.min(tl.where(x == top, column, V), 0))
    tl.store(mass_ptr + row * C + chunk, tl.sum(tl.exp2(x - base), 0))


@triton.jit
def _likely_from(first, index, weight, N: tl.constexpr):
    """The first index from `first` on with a weight, else the last one with a weight. Rounding may lift the target past
    every weight, and sums that a scan adds up in a tree may fall: a token of probability 0 is never to be chosen."""
    after = tl.min(tl.where((index >= first) & (weight > 0.0), index, N), 0)
    return tl.where(after < N, after, tl.max(tl.where(weight > 0.0, index, 0), 0))


@triton.jit(do_not_specialize_on_alignment=["mass_ptr"])
def sample_rows_kernel(
    logits_ptr,
    temperature_ptr,
    uniform_ptr,
    floor_ptr,
    top_ptr,
    token_ptr,
    mass_ptr,
    out_ptr,  # [R] int64, -1 where the logits are not numbers
    row_stride,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """One program per row: finds the chunk in which the cumulative mass passes the target, and looks only in there."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    chunk = tl.arange(0, BLOCK_C)
    tops = tl.load(top_ptr + row * C + chunk, mask=chunk < C, other=float("-inf"))
    top = tl.max(tops, 0)
    if temperature > 0.0:
        inverse = LOG2E / temperature
        mass = tl.load(mass_ptr + row * C + chunk, mask=chunk < C, other=0.0) * tl.exp2(tops - top)
        cumulative = tl.cumsum(mass, 0)
        target = tl.load(uniform_ptr + row) * tl.max(cumulative, 0)
        passed = tl.sum((cumulative <= target).to(tl.int32), 0)
        found = _likely_from(passed, chunk, mass, BLOCK_C)
        target -= tl.max(tl.where(chunk < found, cumulative, 0.0), 0)
        place = tl.arange(0, CHUNK)
        column = found * CHUNK + place
        floor = tl.load(floor_ptr + row) if FLOOR else 0.0
        x = _weights(logits_ptr + row * row_stride, column, column < V, floor, inverse, FLOOR)
        weight = tl.exp2(x - top)
        passed = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        token = found * CHUNK + _likely_from(passed, place, weight, CHUNK)
    else:
        tokens = tl.load(token_ptr + row * C + chunk, mask=chunk < C, other=V)
        token = tl.min(tl.where(tops == top, tokens, V), 0)
    # NaN and +inf make the mass of their chunk NaN; without any weight it is 0
    total = tl.sum(tl.load(mass_ptr + row * C + chunk, mask=chunk < C, other=0.0), 0)
    tl.store(out_ptr + row, tl.where((total > 0.0) & (total < float("inf")), token, -1).to(tl.int64))
