"""The Triton kernels of matrix products: linear layers of quantized weights, and experts of any weights.

Used by triton_weights and triton_experts; imported only where triton is installed. Weights of 4 and 8 bits become
numbers of the activations' dtype in registers; sums are float32.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_product(
    sums,  # [BLOCK_T, BLOCK_N]
    x,  # [BLOCK_T, BLOCK_K], 0 from K on
    start,  # first of the BLOCK_K inputs
    n,  # [1, BLOCK_N], rows of the weight
    in_rows,  # [1, BLOCK_N], which of them exist
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """sums + x W^T over BLOCK_K inputs. The weights are those of triton_weights.KernelWeight, [N, K] of one expert."""
    k = start + tl.arange(0, BLOCK_K)[:, None]
    inside = in_rows & (k < K)
    if FORM == "floats":
        weights = tl.load(numbers_ptr + n.to(tl.int64) * K + k, mask=inside, other=0.0)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
    elif FORM == "float8":
        numbers = tl.load(numbers_ptr + n.to(tl.int64) * K + k, mask=inside, other=0.0)
        if numbers.dtype == tl.uint8:  # e4m3 in the bits of float16 is its value / 256
            bits = numbers.to(tl.int16)
            numbers = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
        if GROUP >= K:  # scaled after the last input
            sums = tl.dot(x, numbers.to(x.dtype), sums, input_precision="ieee")
        else:
            scales = tl.load(scales_ptr + start // GROUP * N + n, mask=in_rows, other=0.0)
            sums += tl.dot(x, numbers.to(x.dtype), input_precision="ieee") * scales
    else:
        BITS: tl.constexpr = 4 if FORM == "codes4" else 8
        PER_WORD: tl.constexpr = 32 // BITS
        row = start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)[:, None]
        words = tl.load(numbers_ptr + row * N + n, mask=in_rows & (row * PER_WORD < K), other=0)
        shifts = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
        codes = tl.reshape((words[:, None, :] >> shifts) & ((1 << BITS) - 1), (BLOCK_K, BLOCK_N))
        if GROUP % BLOCK_K == 0:  # all inputs of the block are in one group
            place, there = start // GROUP * N + n, in_rows
        else:
            place, there = k // GROUP * N + n, inside
        zeros = tl.load(zeros_ptr + place, mask=there, other=0).to(tl.int32)
        scales = tl.load(scales_ptr + place, mask=there, other=0.0).to(tl.float32)
        weights = ((codes - zeros).to(tl.float32) * scales).to(x.dtype)
        sums = tl.dot(x, weights, sums, input_precision="ieee")
    return sums


@triton.jit
def _scaled(sums, n, in_rows, scales_ptr, K: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr):
    """The sums of all inputs, times scales that are the same for all inputs."""
    if FORM == "float8" and GROUP >= K:
        sums *= tl.load(scales_ptr + n, mask=in_rows, other=0.0)
    return sums


@triton.jit(do_not_specialize=["num_tokens"])  # changes from step to step: each variant would be compiled in the run
def linear_kernel(
    x_ptr,  # [T, K]
    numbers_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per BLOCK_T tokens and BLOCK_N output features."""
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=(token < num_tokens) & (k < K), other=0.0)
        sums = _add_product(
            sums, x, start, n, n < N, numbers_ptr, scales_ptr, zeros_ptr, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )
    sums = _scaled(sums, n, n < N, scales_ptr, K, FORM, GROUP)
    if BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + n, sums, mask=(token < num_tokens) & (n < N))


@triton.jit
def experts_kernel(
    x_ptr,  # [*, K]
    numbers_ptr,  # those of each expert after another; with GATED gate, then up
    scales_ptr,
    zeros_ptr,
    order_ptr,  # [X, K]: with ORDERED, which column of x is each input
    rows_ptr,  # [R] int32, row of x for each result
    factor_ptr,  # [R], multiplies each result; not with GATED
    starts_ptr,  # [X + 1] int32, first result of each expert
    tiles_ptr,  # [X + 1] int32, first tile of each expert
    out_ptr,  # [R, N], or with GATED [R, N / 2]
    X: tl.constexpr,
    N: tl.constexpr,  # rows of an expert's weight
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    NUMBERS: tl.constexpr,  # elements of an expert
    GATED: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_X: tl.constexpr,  # at least X + 1
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of BLOCK_T results of one expert and BLOCK_N outputs; the results are sorted by expert."""
    OUT: tl.constexpr = N // 2 if GATED else N
    tile = tl.program_id(1)
    index = tl.arange(0, BLOCK_X)
    firsts = tl.load(tiles_ptr + index, mask=index <= X, other=2147483647)
    expert = tl.sum((firsts <= tile).to(tl.int32), 0) - 1  # the last one whose tiles have begun
    if expert >= X:
        return
    first = tl.load(starts_ptr + expert) + (tile - tl.load(tiles_ptr + expert)) * BLOCK_T
    end = tl.load(starts_ptr + expert + 1)
    result = first + tl.arange(0, BLOCK_T)[:, None]
    inside = result < end
    row = tl.load(rows_ptr + result, mask=inside, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_rows = n < OUT
    expert = expert.to(tl.int64)
    numbers = numbers_ptr + expert * NUMBERS
    groups_of_expert = expert * ((K + GROUP - 1) // GROUP * N)
    scales, zeros = scales_ptr + groups_of_expert, zeros_ptr + groups_of_expert
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    gate = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        column = tl.load(order_ptr + expert * K + k, mask=k < K, other=0) if ORDERED else k
        x = tl.load(x_ptr + row * K + column, mask=inside & (k < K), other=0.0)
        if GATED:
            gate = _add_product(gate, x, start, n, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K)
        total = _add_product(
            total, x, start, n + N - OUT, in_rows, numbers, scales, zeros, N, K, FORM, GROUP, BLOCK_N, BLOCK_K
        )
    dtype = out_ptr.dtype.element_ty
    total = _scaled(total, n + N - OUT, in_rows, scales, K, FORM, GROUP).to(dtype).to(tl.float32)
    if GATED:
        gate = _scaled(gate, n, in_rows, scales, K, FORM, GROUP).to(dtype).to(tl.float32)
        total *= (gate / (1.0 + tl.exp2(-gate * LOG2E))).to(dtype).to(tl.float32)
    else:
        total *= tl.load(factor_ptr + result, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + result.to(tl.int64) * OUT + n, total, mask=inside & in_rows)
