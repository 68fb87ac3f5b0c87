"""The Triton kernels of paged attention. Used by triton_paged.py only; imported only where triton is installed.

K and V cache: [N, G, S, D], with BLOCK_STRIDE elements from one block to the next. All softmax arithmetic is float32 in
units of log2, with scale * log2(e) folded into one factor. UPCAST makes tl.dot use float32: triton's interpreter
computes bfloat16 incorrectly. Arguments whose alignment changes from step to step are not specialized on, because each
kernel variant would be compiled during the run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a row of [groups, T]
def store_kvcache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride,  # elements from one token to the next
    v_stride,
    k_inverse,  # 1 / scale of an fp8 cache
    v_inverse,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per new token: stores its K and V of all heads in its slot, unless that is -1."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        heads = tl.arange(0, BLOCK_G)[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < G) & (dims < D)
        source = heads * D + dims
        target = slot // S * BLOCK_STRIDE + (heads * S + slot % S) * D + dims
        k = tl.load(k_ptr + token * k_stride + source, mask=mask)
        v = tl.load(v_ptr + token * v_stride + source, mask=mask)
        if FP8:
            k, v = to_fp8(k, k_inverse), to_fp8(v, v_inverse)
        tl.store(k_cache_ptr + target, k, mask=mask)
        tl.store(v_cache_ptr + target, v, mask=mask)


@triton.jit
def to_fp8(x, inverse):
    """Convert to e4m3, saturating instead of NaN."""
    return tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _softmax_step(scores, top, total):
    """Online softmax: weights of one tile, rescaling factor of earlier sums, and the new maximum and sum."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def _capped(scores, cap):
    """cap * tanh(scores / cap), all in units of log2."""
    return cap - 2 * cap / (tl.exp2(scores / cap * 2.8853900817779268) + 1)


@triton.jit
def _sink_weights(sinks_ptr, heads, top):
    """Weights of the rows' sinks, counted from the rows' maxima. One far above overflows to infinity, which makes the
    result 0, as it should be."""
    return tl.exp2(tl.load(sinks_ptr + heads) * 1.4426950408889634 - top)


@triton.jit
def _first_seen(position, window, WINDOWED: tl.constexpr):
    """The first token that a token at `position` sees."""
    return tl.maximum(position + 1 - window, 0) if WINDOWED else 0


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_rotary(q_ptr, rows, mask, DV: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr):
    """The part of queries after the first DV elements, whose keys are no values."""
    dims = tl.arange(0, BLOCK_R)
    return tl.load(q_ptr + rows[:, None] + DV + dims[None, :], mask=mask & (dims < D - DV)[None, :], other=0.0)


@triton.jit
def _rotary_scores(
    q, k_cache_ptr, offset, owned, DV: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, UPCAST: tl.constexpr
):
    """The products of that part with the keys of a tile."""
    dims = tl.arange(0, BLOCK_R)
    mask = owned[None, :] & (dims < D - DV)[:, None]
    k = tl.load(k_cache_ptr + offset[None, :] + DV + dims[:, None], mask=mask, other=0.0)
    return _dot(q, k.to(q.dtype), UPCAST)


@triton.jit(do_not_specialize=["first_part_ptr", "item_seq_ptr", "item_split_ptr", "table_ptr", "table_stride"])
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    partial_ptr,  # [parts * H, DV] float32: sums of weighted values; a part is one split of one new token
    partial_stat_ptr,  # [parts * H, 2] float32: maximum, sum of weights
    counters_ptr,  # [B * G] int32, with FOLDED: splits that are done; 0 between kernels
    sinks_ptr,  # [H] float32, if SINKS
    first_part_ptr,  # [B]
    item_seq_ptr,
    item_split_ptr,
    num_items_ptr,  # read here, so that one captured graph serves any lengths
    cu_q_ptr,
    num_tokens_ptr,
    table_ptr,
    q_stride,
    table_stride,
    factor,  # scale * log2(e), and the scale of K in an fp8 cache
    cap,  # soft cap * log2(e), if CAPPED
    window,  # tokens that a query sees, if WINDOWED
    v_scale,  # scale of an fp8 cache, else 1
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,  # V is the first DV elements of K, if they are fewer than D
    BLOCK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,  # power of two from D - DV on, if V is a part of K
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    FOLDED: tl.constexpr,
    DEPENDENT: tl.constexpr,  # see triton_launch.starts_early
):
    """Persistent programs over (sequence, split) x head: each reads SPLIT tokens of K and V once per group. With FOLDED
    the last one of a (sequence, head) does what combine_kernel does."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    GROUP: tl.constexpr = H // G
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_split = tl.arange(0, BLOCK_N)
    in_head = dims < DV
    num_work = tl.load(num_items_ptr) * G
    work = tl.program_id(0)
    while work < num_work:
        item, head = work // G, work % G
        seq = tl.load(item_seq_ptr + item)
        split = tl.load(item_split_ptr + item)
        split_start = split * SPLIT
        first_row = tl.load(cu_q_ptr + seq)
        num_new = tl.load(cu_q_ptr + seq + 1) - first_row
        total = tl.load(num_tokens_ptr + seq)
        first_seen = _first_seen(total - num_new, window, WINDOWED)
        first_split = first_seen // SPLIT
        # Look up the split's pages before the loop: inside it they would stall the loads of K and V.
        first_page = split_start // S
        page = first_page + tl.arange(0, PAGES)
        page_mask = page * S < total
        if WINDOWED:
            page_mask &= (page + 1) * S > first_seen
        page_ids = tl.load(table_ptr + seq.to(tl.int64) * table_stride + page, mask=page_mask, other=0)

        q_rows = (first_row + row // GROUP).to(tl.int64) * q_stride + (head * GROUP + row % GROUP) * D
        live = (row // GROUP < num_new)[:, None] & in_head[None, :]
        q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=live, other=0.0)
        if DV < D:
            q_rotary = _load_rotary(q_ptr, q_rows, (row // GROUP < num_new)[:, None], DV, D, BLOCK_R)
        position = total - num_new + row // GROUP

        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for tile in tl.range(0, SPLIT // BLOCK_N, num_stages=STAGES):
            token = split_start + tile * BLOCK_N + in_split
            if PAGES == 1:
                block = tl.broadcast_to(page_ids, [BLOCK_N])
            else:
                block = tl.gather(page_ids, token // S - first_page, 0)
            offset = block.to(tl.int64) * BLOCK_STRIDE + (head * S + token % S) * D
            owned = token < total
            if WINDOWED:
                owned &= token >= first_seen
            k = tl.load(
                k_cache_ptr + offset[None, :] + dims[:, None], mask=owned[None, :] & in_head[:, None], other=0.0
            )
            scores = _dot(q, k.to(q.dtype), UPCAST)
            if DV < D:
                scores += _rotary_scores(q_rotary, k_cache_ptr, offset, owned, DV, D, BLOCK_R, UPCAST)
            scores *= factor
            if CAPPED:
                scores = _capped(scores, cap)
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(token[None, :] > position[:, None] - window, scores, float("-inf"))
            weights, shrink, top, weight_sum = _softmax_step(scores, top, weight_sum)
            if DV < D:
                v = tl.trans(k)
            else:
                v = tl.load(
                    v_cache_ptr + offset[:, None] + dims[None, :], mask=owned[:, None] & in_head[None, :], other=0.0
                )
            acc = acc * shrink[:, None] + _dot(weights.to(q.dtype), v.to(q.dtype), UPCAST)
        acc *= v_scale

        heads = head * GROUP + row % GROUP
        if total <= (first_split + 1) * SPLIT:
            out_rows = ((first_row + row // GROUP).to(tl.int64) * H + heads) * DV
            if SINKS:
                weight_sum += _sink_weights(sinks_ptr, heads, top)
            result = (acc / weight_sum[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_rows[:, None] + dims[None, :], result, mask=live)
        else:
            place = ((split - first_split) * G + head) * num_new * GROUP
            part = tl.load(first_part_ptr + seq).to(tl.int64) * H + place + row
            tl.store(partial_ptr + part[:, None] * DV + dims[None, :], acc, mask=live)
            tl.store(partial_stat_ptr + part * 2, top, mask=row // GROUP < num_new)
            tl.store(partial_stat_ptr + part * 2 + 1, weight_sum, mask=row // GROUP < num_new)
            if FOLDED:
                tl.debug_barrier()  # all threads have stored before one of them says so
                counter = counters_ptr + seq * G + head
                if tl.atomic_add(counter, 1) == (total + SPLIT - 1) // SPLIT - first_split - 1:
                    combine(
                        seq, head, partial_ptr, partial_stat_ptr, out_ptr, sinks_ptr, first_part_ptr, cu_q_ptr,
                        num_tokens_ptr, window, H, G, DV, ROWS, SPLIT, BLOCK_D, WINDOWED, SINKS,
                    )  # fmt: skip
                    tl.store(counter, 0)
        work += tl.num_programs(0)


@triton.jit(do_not_specialize=["first_part_ptr"])
def combine_kernel(
    partial_ptr,
    partial_stat_ptr,
    out_ptr,
    sinks_ptr,
    first_part_ptr,  # [B], -1 for a sequence that the decode kernel does not serve
    cu_q_ptr,
    num_tokens_ptr,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per (sequence, head)."""
    combine(
        tl.program_id(0), tl.program_id(1), partial_ptr, partial_stat_ptr, out_ptr, sinks_ptr, first_part_ptr, cu_q_ptr,
        num_tokens_ptr, window, H, G, DV, ROWS, SPLIT, BLOCK_D, WINDOWED, SINKS,
    )  # fmt: skip


@triton.jit
def combine(
    seq,
    head,
    partial_ptr,
    partial_stat_ptr,
    out_ptr,
    sinks_ptr,
    first_part_ptr,  # [B], -1 for a sequence that the decode kernel does not serve
    cu_q_ptr,
    num_tokens_ptr,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine the splits of a sequence in order."""
    GROUP: tl.constexpr = H // G
    first_part = tl.load(first_part_ptr + seq).to(tl.int64)
    total = tl.load(num_tokens_ptr + seq)
    first_row = tl.load(cu_q_ptr + seq)
    num_new = tl.load(cu_q_ptr + seq + 1) - first_row
    first_split = _first_seen(total - num_new, window, WINDOWED) // SPLIT
    if (first_part >= 0) & (total > (first_split + 1) * SPLIT):
        row = tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_D)
        live_row = row // GROUP < num_new
        live = live_row[:, None] & (dims < DV)[None, :]
        top = tl.full([ROWS], float("-inf"), tl.float32)
        weight_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for split in tl.range(0, (total + SPLIT - 1) // SPLIT - first_split):
            part = first_part * H + (split * G + head) * num_new * GROUP + row
            part_top = tl.load(partial_stat_ptr + part * 2, mask=live_row, other=0.0)
            part_sum = tl.load(partial_stat_ptr + part * 2 + 1, mask=live_row, other=1.0)
            values = tl.load(partial_ptr + part[:, None] * DV + dims[None, :], mask=live, other=0.0)
            new_top = tl.maximum(top, part_top)
            base = new_top  # without a window finite from split 0 on: every row sees token 0
            if WINDOWED:
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
            old, new = tl.exp2(top - base), tl.exp2(part_top - base)
            acc = acc * old[:, None] + values * new[:, None]
            weight_sum = weight_sum * old + part_sum * new
            top = new_top
        heads = head * GROUP + row % GROUP
        out_rows = ((first_row + row // GROUP).to(tl.int64) * H + heads) * DV
        if SINKS:
            weight_sum += _sink_weights(sinks_ptr, heads, top)
        result = (acc / weight_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + dims[None, :], result, mask=live)


@triton.jit
def _page_ids(table_row, start, first_seen, total, S: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Blocks of the tile of keys from `start` on, 0 for tokens that no row sees: one id if one block holds the tile."""
    if S % BLOCK_N == 0:
        token = start
        seen = start < total
        if WINDOWED:
            seen &= start + BLOCK_N > first_seen
    else:
        token = start + tl.arange(0, BLOCK_N)
        seen = token < total
        if WINDOWED:
            seen &= token >= first_seen
    return tl.load(table_row + token // S, mask=seen, other=0)


@triton.jit
def _load_seen(at, in_head, IS_FULL: tl.constexpr):
    """K or V of tokens that every row sees, of heads that may fill their block."""
    return tl.load(at) if IS_FULL else tl.load(at, mask=in_head, other=0.0)


@triton.jit
def _prefill_tiles(
    q,
    q_rotary,
    k_cache_ptr,
    v_cache_ptr,
    table_row,
    begin,
    end,
    head,
    position,
    first_seen,
    total,
    factor,
    cap,
    window,
    top,
    weight_sum,
    acc,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    MASK: tl.constexpr,
    UPCAST: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """The keys from `begin` to `end`, by tiles, for one tile of queries. Without MASK every row sees all of them."""
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < DV
    # Looked up one tile ahead: as a load of the same round, the look-up would take the stages of the copies of K and V,
    # and the compiler would keep one tile of them in flight.
    block = _page_ids(table_row, begin, first_seen, total, S, BLOCK_N, WINDOWED)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        owned = token < total
        if WINDOWED:
            owned &= token >= first_seen
        offset = block.to(tl.int64) * BLOCK_STRIDE + (head * S + token % S) * D
        block = _page_ids(table_row, start + BLOCK_N, first_seen, total, S, BLOCK_N, WINDOWED)
        k_at, v_at = offset[None, :] + dims[:, None], offset[:, None] + dims[None, :]
        if MASK:
            k = tl.load(k_cache_ptr + k_at, mask=owned[None, :] & in_head[:, None], other=0.0)
        else:
            k = _load_seen(k_cache_ptr + k_at, in_head[:, None], DV == BLOCK_D)
        scores = _dot(q, k.to(q.dtype), UPCAST)
        if DV < D:
            scores += _rotary_scores(q_rotary, k_cache_ptr, offset, owned, DV, D, BLOCK_R, UPCAST)
        scores *= factor
        if CAPPED:
            scores = _capped(scores, cap)
        if MASK:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
            if WINDOWED:
                scores = tl.where(token[None, :] > position[:, None] - window, scores, float("-inf"))
        weights, shrink, top, weight_sum = _softmax_step(scores, top, weight_sum)
        if DV < D:
            v = tl.trans(k)
        elif MASK:
            v = tl.load(v_cache_ptr + v_at, mask=owned[:, None] & in_head[None, :], other=0.0)
        else:
            v = _load_seen(v_cache_ptr + v_at, in_head[None, :], DV == BLOCK_D)
        acc = acc * shrink[:, None] + _dot(weights.to(q.dtype), v.to(q.dtype), UPCAST)
    return top, weight_sum, acc


@triton.jit(do_not_specialize=["item_token_ptr", "table_ptr", "table_stride"])
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    sinks_ptr,
    item_seq_ptr,
    item_token_ptr,  # first new token of the item, counted within its sequence
    cu_q_ptr,
    num_tokens_ptr,
    table_ptr,
    q_stride,
    table_stride,
    factor,
    cap,
    window,
    v_scale,
    H: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,  # V is the first DV elements of K, if they are fewer than D
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,  # power of two from D - DV on, if V is a part of K
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program per (tile of TOKENS new tokens, key/value head); rows are tokens x the heads of the group."""
    GROUP: tl.constexpr = H // G
    item, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(item_seq_ptr + item)
    first_new = tl.load(item_token_ptr + item)
    first_row = tl.load(cu_q_ptr + seq)
    num_new = tl.load(cu_q_ptr + seq + 1) - first_row
    total = tl.load(num_tokens_ptr + seq)
    table_row = table_ptr + seq.to(tl.int64) * table_stride

    row = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    new_token = first_new + row // GROUP
    position = total - num_new + new_token
    live_row = ((row < TOKENS * GROUP) & (new_token < num_new))[:, None]
    live = live_row & (dims < DV)[None, :]
    q_rows = (first_row + new_token).to(tl.int64)
    heads = head * GROUP + row % GROUP
    q_at = q_rows * q_stride + heads * D
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=live, other=0.0)
    q_rotary = q
    if DV < D:
        q_rotary = _load_rotary(q_ptr, q_at, live_row, DV, D, BLOCK_R)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_position = total - num_new + first_new
    all_see = (first_position + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(first_position + TOKENS, total)
    first_seen = _first_seen(first_position, window, WINDOWED)
    in_all_windows = 0
    if WINDOWED:
        first_of_last = _first_seen(end - 1, window, WINDOWED)
        in_all_windows = tl.minimum((first_of_last + BLOCK_N - 1) // BLOCK_N * BLOCK_N, all_see)
        first_tile = first_seen // BLOCK_N * BLOCK_N
        top, weight_sum, acc = _prefill_tiles(
            q, q_rotary, k_cache_ptr, v_cache_ptr, table_row, first_tile, in_all_windows, head, position, first_seen,
            total, factor, cap, window, top, weight_sum, acc, G, S, D, DV, BLOCK_STRIDE, BLOCK_N, BLOCK_D, BLOCK_R,
            STAGES, True, UPCAST, CAPPED, WINDOWED,
        )  # fmt: skip
    top, weight_sum, acc = _prefill_tiles(
        q, q_rotary, k_cache_ptr, v_cache_ptr, table_row, in_all_windows, all_see, head, position, first_seen, total,
        factor, cap, window, top, weight_sum, acc, G, S, D, DV, BLOCK_STRIDE, BLOCK_N, BLOCK_D, BLOCK_R, STAGES,
        False, UPCAST, CAPPED, WINDOWED,
    )  # fmt: skip
    top, weight_sum, acc = _prefill_tiles(
        q, q_rotary, k_cache_ptr, v_cache_ptr, table_row, all_see, end, head, position, first_seen, total, factor,
        cap, window, top, weight_sum, acc, G, S, D, DV, BLOCK_STRIDE, BLOCK_N, BLOCK_D, BLOCK_R, STAGES, True, UPCAST,
        CAPPED, WINDOWED,
    )  # fmt: skip
    if SINKS:
        weight_sum += _sink_weights(sinks_ptr, heads, top)
    result = (acc * v_scale / weight_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((q_rows * H + heads) * DV)[:, None] + dims[None, :], result, mask=live)
