"""Sampling on GPUs without a sort and without synchronizing: kernels that fit into a captured graph.

Each equals its twin in layers.sampling, up to float32 rounding of the cumulative sum. A row's token does not depend on
the other rows. Imported only where triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.attention.triton_launch import power_of_2

LimitTensors = tuple[Tensor, Tensor, Tensor]  # layers.sampling.SamplingLimits
CHUNK = 4096  # logits per program: a row of 152k is 38 programs
_BLOCK = 2048  # logits per round of a program that reads a whole row
_PIVOTS = 8  # pivots per round of the search for a limit
_CANDIDATES = 8192  # so few are copied out of the row
_EXACT_BITS = {torch.bfloat16: 16, torch.float16: 13}  # low bits of a float32 that are zero for values of these types


def choose_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor, limits: LimitTensors | None = None) -> Tensor:
    """See layers.sampling.choose_tokens; greedy, drawn and limited rows in any mixture."""
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_chunks = -(-vocab_size // CHUNK)
    top, mass = torch.empty((2, num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    token = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    if limits is None:
        floors = temperature.new_full((num_rows,), -torch.inf)
    else:
        floors = smallest_kept(logits, temperature, limits)
    sizes = {"V": vocab_size, "C": num_chunks, "CHUNK": CHUNK}
    sample_chunks_kernel[(num_rows, num_chunks)](
        logits, temperature, floors, top, token, mass, logits.stride(0), **sizes, num_warps=8
    )
    sample_rows_kernel[(num_rows,)](
        logits,
        temperature,
        uniform,
        floors,
        top,
        token,
        mass,
        out,
        logits.stride(0),
        **sizes,
        BLOCK_C=power_of_2(num_chunks),
        num_warps=8,
    )
    return out


def smallest_kept(logits: Tensor, temperature: Tensor, limits: LimitTensors) -> Tensor:
    """See layers.sampling.smallest_kept; -inf for greedy rows and for rows without limits, which cost nothing."""
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    sizes = {"V": vocab_size, "C": num_chunks, "CHUNK": CHUNK}
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    tops = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    candidates = torch.empty((num_rows, _CANDIDATES), dtype=torch.int32, device=logits.device)
    chunk_tops_kernel[(num_rows, num_chunks)](logits, *limits, tops, logits.stride(0), **sizes, num_warps=8)
    constants = sizes | limit_constants(logits.dtype) | {"BLOCK_C": power_of_2(num_chunks)}
    smallest_kept_kernel[(num_rows,)](
        logits, temperature, *limits, tops, candidates, floor, logits.stride(0), **constants, num_warps=16
    )
    return floor


def limit_constants(dtype: torch.dtype) -> dict[str, int]:
    """Compile-time values of smallest_kept_kernel."""
    return {"SHIFT": _EXACT_BITS.get(dtype, 0), "BLOCK": _BLOCK, "PIVOTS": _PIVOTS, "CANDIDATES": _CANDIDATES}


def penalize(scores: Tensor, table: Tensor, rows: Tensor, places: Tensor, first: Tensor, second: Tensor) -> None:
    """See layers.sampling.penalize_repeated (`table` of uint8) and penalize_counted (int32)."""
    grid = (rows.shape[0], -(-scores.shape[1] // CHUNK))
    penalize_kernel[grid](
        scores,
        table,
        rows,
        places,
        first,
        second,
        V=scores.shape[1],
        CHUNK=CHUNK,
        COUNTED=table.dtype == torch.int32,
        num_warps=8,
        enable_fp_fusion=False,  # products are rounded, as in torch
    )


def mask_tokens(scores: Tensor, rows: Tensor, words: Tensor) -> None:
    """See layers.sampling.mask_tokens."""
    grid = (rows.shape[0], -(-scores.shape[1] // CHUNK))
    mask_tokens_kernel[grid](scores, rows, words, V=scores.shape[1], W=words.shape[1], CHUNK=CHUNK, num_warps=8)


LOG2E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(float(2**40))  # the mass of the likeliest token; a row of 2^22 such tokens fits into 63 bits


# ---------------------------------------------------------------------- which tokens are kept


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """Integers in the order of float32 numbers. SHIFT drops low bits that are zero in all of them."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """The number of an ordered integer."""
    bits = key << SHIFT
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass(x, top, inverse):
    """exp(x - top) in fixed point: sums are the same in any order."""
    return (tl.exp2((x - top) * inverse) * ONE).to(tl.int64)


@triton.jit
def _row_block(logits_ptr, start, V: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(logits_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32), column


@triton.jit
def _two_blocks(logits_ptr, candidates_ptr, place, num_read, in_row, SHIFT: tl.constexpr, HALF: tl.constexpr):
    """Two blocks of the row or of its candidates as ordered integers. Both loads are under way together."""
    other = place + HALF
    if in_row:
        x = tl.load(logits_ptr + place, mask=place < num_read, other=float("-inf"))
        y = tl.load(logits_ptr + other, mask=other < num_read, other=float("-inf"))
        key, other_key = _ordered(x.to(tl.float32), SHIFT), _ordered(y.to(tl.float32), SHIFT)
    else:
        key = tl.load(candidates_ptr + place, mask=place < num_read, other=0)
        other_key = tl.load(candidates_ptr + other, mask=other < num_read, other=0)
    return key, other_key


@triton.jit
def _border(
    logits_ptr,
    tops_ptr,  # [C] float32
    candidates_ptr,  # [CANDIDATES] int32, overwritten
    lowest,
    top,
    scale,
    inverse,
    target,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The largest number, at least `lowest`, such that the tokens from it on are `target` (BY_MASS: have that mass), as
    an ordered integer; and how many (of which mass) are above it.

    Each round divides the range that holds the number, at first by differences to the top in units of `scale`, and
    reads the chunks that reach into it. Once it has few tokens, they are copied, and only the copy is read. Threads
    add what they read and wait for each other at the end of a round only, unless they copy.
    """
    HALF: tl.constexpr = BLOCK // 2
    lo = _ordered(lowest, SHIFT).to(tl.int64)  # The tokens from here on are enough,
    hi = _ordered(top, SHIFT).to(tl.int64) + 1  # those from here on are not:
    above = tl.full((), 0, tl.int64)  # just these
    step = tl.arange(0, PIVOTS)[:, None]
    pivots = _ordered(top - scale * tl.exp2(step.to(tl.float32) - 2.0), SHIFT).to(tl.int64)
    num_candidates = tl.full((), -1, tl.int32)  # -1: not copied
    num_inside = tl.full((), 2**31 - 1, tl.int32)  # tokens in the range before the last round
    while hi - lo > 1:
        pivots = tl.minimum(tl.maximum(pivots, lo + 1), hi - 1).to(tl.int32)
        wide = tl.broadcast_to(pivots, [PIVOTS, HALF])  # laid out once per round, not for each block
        low, high = lo.to(tl.int32), hi.to(tl.int32)
        reached_by = tl.zeros([PIVOTS, HALF], dtype=tl.int64)
        count, num_copied = tl.zeros([1, HALF], dtype=tl.int32), tl.full((), 0, tl.int32)
        least, most = tl.full([1, HALF], 2**31 - 1, tl.int32), tl.full([1, HALF], -(2**31), tl.int32)
        in_row = num_candidates < 0
        copies = in_row & (num_inside <= CANDIDATES)
        num_read = tl.where(in_row, V, num_candidates)
        for start in range(0, num_read, BLOCK):
            if _ordered(tl.load(tops_ptr + start // CHUNK, mask=in_row, other=float("inf")), SHIFT) >= low:
                place = start + tl.arange(0, HALF)[None, :]
                key, other_key = _two_blocks(logits_ptr, candidates_ptr, place, num_read, in_row, SHIFT, HALF)
                for part in tl.static_range(2):
                    if part == 1:
                        place, key = place + HALF, other_key
                    inside = (place < num_read) & (key >= low) & (key < high)
                    least = tl.minimum(least, tl.where(inside, key, least))
                    most = tl.maximum(most, tl.where(inside, key, most))
                    count += inside.to(tl.int32)
                    weight = _mass(_number(key, SHIFT), top, inverse) if BY_MASS else tl.full([1, HALF], 1, tl.int64)
                    reached_by += tl.where(inside & (key >= wide), weight, 0)
                    if copies:
                        free = candidates_ptr + num_copied - 1
                        tl.store(free + tl.cumsum(inside.to(tl.int32), 1), key, mask=inside)
                        num_copied += tl.sum(inside.to(tl.int32))
        if copies:
            num_candidates = num_copied
            tl.debug_barrier()  # all threads see the candidates
        num_inside = tl.sum(count)
        reached = tl.sum(reached_by, 1)[:, None]
        enough = above + reached >= target
        lo = tl.maximum(tl.max(tl.where(enough, pivots.to(tl.int64), lo)), tl.min(least).to(tl.int64))
        hi = tl.minimum(tl.min(tl.where(enough, hi, pivots.to(tl.int64))), tl.max(most).to(tl.int64) + 1)
        above += tl.max(tl.where(enough, 0, reached))
        pivots = lo + (hi - lo) * (step.to(tl.int64) + 1) // (PIVOTS + 1)
    return lo.to(tl.int32), above


@triton.jit(do_not_specialize_on_alignment=["tops_ptr"])  # Its alignment depends on the number of rows.
def chunk_tops_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tops_ptr,  # [R, C] float32
    row_stride,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per (row, chunk): the largest logit, of rows with limits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        x, _ = _row_block(logits_ptr + row * row_stride, chunk * CHUNK, V, CHUNK)
        tl.store(tops_ptr + row * C + chunk, tl.max(x, 0))


@triton.jit(do_not_specialize_on_alignment=["tops_ptr"])
def smallest_kept_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,  # [R] int32, 0: all
    top_p_ptr,  # [R] float32, 1: all
    min_p_ptr,  # [R] float32, 0: all
    tops_ptr,  # [R, C] float32: the largest logit of each chunk
    candidates_ptr,  # [R, CANDIDATES] int32, overwritten
    floor_ptr,  # [R] float32
    row_stride,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PIVOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """One program per row: the smallest logit that min-p, then top-k, then top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    tops_ptr += row * C
    candidates_ptr += row * CANDIDATES
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        chunk = tl.arange(0, BLOCK_C)
        top = tl.max(tl.load(tops_ptr + chunk, mask=chunk < C, other=float("-inf")), 0)
        if (top > float("-inf")) & (top < float("inf")):  # else the row gets no token
            if min_p > 0.0:
                floor = top + temperature * tl.log(min_p)
            inverse = LOG2E / temperature
            lowest = tl.full((), float("-inf"), tl.float32)
            border, above = _ordered(lowest, SHIFT), tl.full((), 0, tl.int64)
            if top_k > 0:
                wanted = tl.minimum(top_k, V).to(tl.int64)
                border, above = _border(
                    logits_ptr, tops_ptr, candidates_ptr, lowest, top, 1.0, inverse, wanted,
                    False, V, CHUNK, SHIFT, BLOCK, PIVOTS, CANDIDATES,
                )  # fmt: skip
            last = _number(border, SHIFT)  # the last one that top-k keeps
            if top_p < 1.0:
                lowest = tl.maximum(top - 41.0 / inverse, tl.maximum(last, floor))  # the mass of 2^-41 is 0
                mass = tl.zeros([BLOCK], dtype=tl.int64)
                for start in range(0, V, BLOCK):
                    if tl.load(tops_ptr + start // CHUNK) >= lowest:
                        x, column = _row_block(logits_ptr, start, V, BLOCK)
                        counted = (column < V) & (x >= floor) & (_ordered(x, SHIFT) > border)  # -0.0 is below 0.0
                        mass += tl.where(counted, _mass(x, top, inverse), 0)
                total = tl.sum(mass, 0)
                if (top_k > 0) & (last >= floor):  # Top-k counts only some of the tokens equal to the last one.
                    total += (tl.minimum(top_k, V).to(tl.int64) - above) * _mass(last, top, inverse)
                wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                border, above = _border(
                    logits_ptr, tops_ptr, candidates_ptr, lowest, top, temperature, inverse, tl.maximum(wanted, 1),
                    True, V, CHUNK, SHIFT, BLOCK, PIVOTS, CANDIDATES,
                )  # fmt: skip
            floor = tl.maximum(floor, _number(border, SHIFT))
    tl.store(floor_ptr + row, floor)


# ---------------------------------------------------------------------- which token is drawn


@triton.jit
def _weights(logits_ptr, column, inside, floor, inverse):
    """Kept logits in units of log2 after temperature."""
    x = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x < floor, float("-inf"), x) * inverse  # NaN stays


@triton.jit(do_not_specialize_on_alignment=["mass_ptr"])  # Its alignment depends on the number of rows.
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
):
    """One program per (row, chunk): the only pass over the logits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    inverse = tl.where(temperature > 0.0, LOG2E / temperature, 1.0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    floor = tl.load(floor_ptr + row)
    x = _weights(logits_ptr + row * row_stride, column, column < V, floor, inverse)
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
        floor = tl.load(floor_ptr + row)
        x = _weights(logits_ptr + row * row_stride, column, column < V, floor, inverse)
        weight = tl.exp2(x - top)
        passed = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        token = found * CHUNK + _likely_from(passed, place, weight, CHUNK)
    else:
        tokens = tl.load(token_ptr + row * C + chunk, mask=chunk < C, other=V)
        token = tl.min(tl.where(tops == top, tokens, V), 0)
    # NaN and +inf make the mass of their chunk NaN; without any weight it is 0
    total = tl.sum(tl.load(mass_ptr + row * C + chunk, mask=chunk < C, other=0.0), 0)
    tl.store(out_ptr + row, tl.where((total > 0.0) & (total < float("inf")), token, -1).to(tl.int64))


# ---------------------------------------------------------------------- changes of logits, in place


@triton.jit
def penalize_kernel(
    scores_ptr,  # [R, V] float32
    table_ptr,  # [places, V]: which tokens were seen, or with COUNTED how often they were generated
    rows_ptr,  # [P] int64
    places_ptr,  # [P] int64
    first_ptr,  # [P] float32: the repetition penalty, with COUNTED the frequency penalty
    second_ptr,  # [P] float32: with COUNTED the presence penalty
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One program per (penalized row, chunk)."""
    place = tl.program_id(0)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(table_ptr + tl.load(places_ptr + place) * V + column, mask=column < V, other=0)
    found = count != 0
    scores = scores_ptr + tl.load(rows_ptr + place) * V + column
    x = tl.load(scores, mask=found, other=0.0)
    first = tl.load(first_ptr + place)
    if COUNTED:
        x -= count.to(tl.float32) * first + tl.load(second_ptr + place)
    else:
        x = tl.where(x > 0.0, tl.div_rn(x, first), x * first)
    tl.store(scores, x, mask=found)


@triton.jit
def mask_tokens_kernel(scores_ptr, rows_ptr, words_ptr, V: tl.constexpr, W: tl.constexpr, CHUNK: tl.constexpr):
    """One program per (row with a grammar, chunk)."""
    place = tl.program_id(0)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(words_ptr + place * W + column // 32, mask=column < V, other=-1)
    scores = scores_ptr + tl.load(rows_ptr + place) * V + column
    tl.store(scores, float("-inf"), mask=(word >> (column % 32)) & 1 == 0)
