"""Layers with a state on GPUs: what stands between their matrix products, in two kernels where every sequence has one
new token (three for Mamba-2, one for short convolutions).

Formulas and roundings are those of layers.recurrent. A sequence's result does not depend on the rest of the batch: one
with a single new token advances by it, one with several by chunks, cut at positions that are multiples of CHUNK. The
state is read from one slot and written to another or the same. Imported only where triton is installed.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcli.attention.triton_launch import power_of_2
from pagedcli.layers.kinds import StateHeads
from pagedcli.layers.recurrent import StateStep

CHUNK = 16  # tokens whose recurrence is one set of matrix products; divides the block sizes that CUDA takes
_BLOCK_CHANNELS = 128
_BLOCK_TOKENS = 8
_BLOCK_VALUES = 16  # columns of a state that a program carries from chunk to chunk: more would spill


@dataclass(slots=True)
class _Prompts:
    """A step in which some sequence has several new tokens. Made once for all layers."""

    sequence: Tensor  # [T] int32, of each new token
    item_seq: Tensor  # [chunks] int32, of the sequences with several new tokens, in their order
    item_chunk: Tensor  # [chunks] int32: the chunk's position / CHUNK
    first_item: Tensor  # [B] int32
    has_single: bool  # some sequence has one new token

    @classmethod
    def of(cls, step: StateStep) -> "_Prompts | None":
        """None: every sequence has one new token."""
        if step.max_new == 1:
            return None
        if not isinstance(step.work, cls):
            step.work = cls._made(step)
        return step.work

    @classmethod
    def _made(cls, step: StateStep) -> "_Prompts":
        starts, totals = step.cu_q_host, step.num_tokens_host
        counts = [end - start for start, end in itertools.pairwise(starts)]
        pairs = zip(totals, counts, strict=True)
        num_items = sum((total - 1) // CHUNK - (total - count) // CHUNK + 1 for total, count in pairs if count > 1)
        places = torch.arange(len(counts), dtype=torch.int32, device=step.cu_q.device)
        new = step.cu_q.diff()
        first = (step.num_tokens - new) // CHUNK
        items = torch.where(new > 1, (step.num_tokens - 1) // CHUNK - first + 1, 0)
        first_item = items.cumsum(0, dtype=torch.int32) - items
        item_seq = torch.repeat_interleave(places, items, output_size=num_items)
        item = torch.arange(num_items, dtype=torch.int32, device=places.device)
        return cls(
            sequence=torch.repeat_interleave(places, new, output_size=starts[-1]),
            item_seq=item_seq,
            item_chunk=item + (first - first_item)[item_seq],
            first_item=first_item,
            has_single=1 in counts,
        )

    @property
    def num_items(self) -> int:
        return self.item_seq.shape[0]


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: StateStep, *, heads: StateHeads | None = None
) -> Tensor:
    """layers.recurrent.causal_conv with a SiLU; without heads between two gates: c * conv(b * x), without a SiLU.

    Shapes:  x [T, C or more], its first columns ordered as `heads` says; without heads [T, 3C], b, c and x. The others
             and the result as in layers.recurrent.
    Changes: pool.
    """
    prompts, (num_tokens, (kernel, channels)) = _Prompts.of(step), (x.shape[0], weight.shape)
    out = x.new_empty((num_tokens, channels))
    grid_columns, slots = -(-channels // _BLOCK_CHANNELS), (step.reads, step.writes, step.cu_q)
    sizes = {"x_stride": x.stride(0), "spare": pool.shape[0] - 1, "C": channels, "K": kernel, "HEADS": heads}
    conv_kernel[(-(-num_tokens // _BLOCK_TOKENS), grid_columns)](
        x,
        weight,
        weight if bias is None else bias,  # not read without BIAS
        pool,
        out,
        *slots,
        step.cu_q if prompts is None else prompts.sequence,  # not read if SINGLE
        num_tokens,
        **sizes,
        BLOCK_T=_BLOCK_TOKENS,
        BLOCK_C=_BLOCK_CHANNELS,
        BIAS=bias is not None,
        SINGLE=prompts is None,
        num_warps=4,
    )
    if prompts is not None:
        grid = step.reads.shape[0], grid_columns
        conv_state_kernel[grid](x, pool, *slots, **sizes, BLOCK_C=_BLOCK_CHANNELS, num_warps=4)
    return out


def recurrence(
    mixed: Tensor,
    gates: Tensor,
    decay: Tensor,
    step_bias: Tensor,
    pool: Tensor,
    step: StateStep,
    heads: StateHeads,
    *,
    z: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    skip: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """The gated delta rule over q, k and v, then norm_then_gate (with `norm` and `z`); or with `steps` of each channel
    norm_then_share; or Mamba-2's scan over x, B and C, plus skip * x.

    Shapes:  mixed [T, C] after the convolution; gates [T, 2H], b and a, or [T, H], the steps, or b with `steps`; decay,
             step_bias [H] float32; pool [Z, H, N, P] float32; z [T, C + I] as projected, ordered as `heads` says; norm:
             weight [P] and eps; skip [H] float32. With steps [T, H * N] step_bias is [H * N] and z the shares [T, I].
             Returns [T, I], of Mamba-2 in float32.
    Changes: pool.
    """
    assert heads.corrects == (z is not None) == (norm is not None) == (skip is None)
    assert heads.by_channel == (steps is not None)
    weight, eps = norm if norm is not None else (skip, 0.0)
    z = mixed if z is None else z  # not read of Mamba-2
    prompts, num_seqs, exact = _Prompts.of(step), step.reads.shape[0], mixed.dtype == torch.float32
    dtype = mixed.dtype if heads.corrects else torch.float32
    out = mixed.new_empty((mixed.shape[0], heads.num_heads * heads.value_dim), dtype=dtype)
    tensors: dict[str, Any] = {"mixed_ptr": mixed, "gates_ptr": gates, "decay_ptr": decay, "bias_ptr": step_bias}
    tensors |= {"gates_stride": gates.stride(0), "cu_q_ptr": step.cu_q, "HEADS": heads}
    tensors["steps_ptr"] = decay if steps is None else steps  # not read without a rate of each channel
    states = {"pool_ptr": pool, "reads_ptr": step.reads, "writes_ptr": step.writes, "spare": pool.shape[0] - 1}
    if prompts is None or prompts.has_single:
        step_kernel[(num_seqs, heads.num_heads)](
            **tensors, **states, last_ptr=weight, z_ptr=z, out_ptr=out, z_stride=z.stride(0), eps=eps,
            BLOCK_N=power_of_2(heads.key_dim), BLOCK_P=power_of_2(heads.value_dim), SINGLE=prompts is None, num_warps=8,
        )  # fmt: skip
    if prompts is None or not prompts.num_items:
        return out
    tensors |= {"num_tokens_ptr": step.num_tokens, "CHUNK": CHUNK, "BLOCK_N": max(16, power_of_2(heads.key_dim))}
    inverses = pool  # not read of Mamba-2
    if heads.corrects:
        inverses = pool.new_empty((prompts.num_items, heads.num_heads, 1 + heads.by_channel, CHUNK, CHUNK))
        inverse_kernel[(prompts.num_items, heads.num_heads)](
            **tensors, inverses_ptr=inverses, item_seq_ptr=prompts.item_seq, item_chunk_ptr=prompts.item_chunk,
            LEVELS=CHUNK.bit_length() - 2, PRECISION="ieee" if exact else "tf32x3", num_warps=4,
        )  # fmt: skip
    block = min(_BLOCK_VALUES, max(16, power_of_2(heads.value_dim)))
    chunk_kernel[(-(-heads.value_dim // block), heads.num_heads, num_seqs)](
        **tensors, **states, inverses_ptr=inverses, last_ptr=weight, out_ptr=out, first_item_ptr=prompts.first_item,
        BLOCK_P=block, PRECISION="ieee" if exact else "tf32", num_warps=4,
    )  # fmt: skip
    if heads.corrects:
        norm_then_gate_kernel[(out.shape[0], heads.num_heads)](
            out_ptr=out, weight_ptr=weight, z_ptr=z, cu_q_ptr=step.cu_q, sequence_ptr=prompts.sequence,
            z_stride=z.stride(0), eps=eps, HEADS=heads, BLOCK_P=power_of_2(heads.value_dim), num_warps=1,
        )  # fmt: skip
    return out


def gate_then_norm(x: Tensor, weight: Tensor | None, gate: Tensor, group: int, eps: float) -> Tensor:
    """See layers.recurrent; `gate` may be the first columns of wider rows."""
    out = gate.new_empty(x.shape)
    block = power_of_2(group)
    gate_then_norm_kernel[(x.shape[0], x.shape[1] // group)](
        x, x if weight is None else weight, gate, out, gate.stride(0), eps, WIDTH=x.shape[1], SIZE=group, BLOCK=block,
        NORM=weight is not None,
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------- convolution


@triton.jit
def _input(x_row, channel, mask, C: tl.constexpr, HEADS: tl.constexpr):
    """What the convolution takes in of a channel, in the dtype of the activations."""
    if HEADS is None:
        b = tl.load(x_row + channel, mask=mask, other=0.0)
        x = tl.load(x_row + 2 * C + channel, mask=mask, other=0.0)
        value = (b.to(tl.float32) * x.to(tl.float32)).to(x.dtype)
    elif HEADS.interleaved:  # per key head: q, k, its values, their z
        G: tl.constexpr = HEADS.num_key_heads
        N: tl.constexpr = HEADS.key_dim
        VALUES: tl.constexpr = HEADS.values_per_key
        ROW: tl.constexpr = 2 * N + 2 * VALUES
        place = channel - 2 * G * N
        of_key = channel // N % G * ROW + channel // N // G * N + channel % N
        column = tl.where(place < 0, of_key, place // VALUES * ROW + 2 * N + place % VALUES)
        value = tl.load(x_row + column, mask=mask, other=0.0)
    else:
        value = tl.load(x_row + channel, mask=mask, other=0.0)
    return value


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_tokens"])
def conv_kernel(
    x_ptr,
    weight_ptr,  # [K, C] float32
    bias_ptr,  # [C] float32
    pool_ptr,  # [slots, K - 1, C]
    out_ptr,  # [T, C]
    reads_ptr,
    writes_ptr,
    cu_q_ptr,
    sequence_ptr,
    num_tokens,
    x_stride,
    spare,  # the slot that padding writes: nobody reads it
    C: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,  # StateHeads; None: between two gates
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BIAS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """One program per (BLOCK_T tokens, BLOCK_C channels). SINGLE: each token is a sequence, whose state moves on."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    is_token, inside = token < num_tokens, channel < C
    if SINGLE:
        seq = token
        place = tl.zeros([BLOCK_T], tl.int32)
    else:
        seq = tl.load(sequence_ptr + token, mask=is_token, other=0)
        place = token - tl.load(cu_q_ptr + seq, mask=is_token, other=0)
    read = tl.load(reads_ptr + seq, mask=is_token, other=-1).to(tl.int64)
    if SINGLE:
        write = tl.load(writes_ptr + seq, mask=is_token, other=0).to(tl.int64)
        stored = (is_token & (write != spare))[:, None] & inside
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0)
    row = x_ptr + token.to(tl.int64)[:, None] * x_stride
    for j in tl.static_range(K):
        is_new = is_token & (place + j >= K - 1)
        source = row - (K - 1 - j) * x_stride
        value = _input(source, channel, is_new[:, None] & inside, C, HEADS)
        if j < K - 1:
            is_old = is_token & (place + j < K - 1) & (read >= 0)
            old = pool_ptr + (read * (K - 1) + place + j)[:, None] * C + channel
            value += tl.load(old, mask=is_old[:, None] & inside, other=0.0)  # one of the two is 0
        if SINGLE and j > 0:
            tl.debug_barrier()  # every thread has read the row that is overwritten
            tl.store(pool_ptr + (write * (K - 1) + j - 1)[:, None] * C + channel, value, mask=stored)
        total += value.to(tl.float32) * tl.load(weight_ptr + j * C + channel, mask=inside, other=0.0)
    y = total.to(dtype)
    live = is_token[:, None] & inside
    if HEADS is None:
        y = y.to(tl.float32) * tl.load(row + C + channel, mask=live, other=0.0).to(tl.float32)
    else:
        y = _silu(y.to(tl.float32))
    tl.store(out_ptr + token.to(tl.int64)[:, None] * C + channel, y.to(dtype), mask=live)


@triton.jit
def conv_state_kernel(
    x_ptr, pool_ptr, reads_ptr, writes_ptr, cu_q_ptr, x_stride, spare,
    C: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, BLOCK_C channels): the last K - 1 inputs, after all tokens have read the old ones."""
    seq = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    start, end = tl.load(cu_q_ptr + seq), tl.load(cu_q_ptr + seq + 1)
    read, write = tl.load(reads_ptr + seq).to(tl.int64), tl.load(writes_ptr + seq).to(tl.int64)
    if write != spare:
        for j in tl.static_range(K - 1):
            token = end - (K - 1) + j
            row = x_ptr + token.to(tl.int64) * x_stride
            value = _input(row, channel, inside & (token >= start), C, HEADS)
            old = pool_ptr + (read * (K - 1) + end - start + j) * C + channel
            value += tl.load(old, mask=inside & (token < start) & (read >= 0), other=0.0)  # one of the two is 0
            tl.debug_barrier()  # every thread has read the row that is overwritten
            tl.store(pool_ptr + (write * (K - 1) + j) * C + channel, value, mask=inside)


# ---------------------------------------------------------------------- recurrence


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact for small values, too. Source: Kahan's log1p."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + grown
    lost = one_more == 1.0
    log1p = tl.where(lost, grown, tl.log(one_more) * (grown / tl.where(lost, 1.0, one_more - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _beta(place, mask, HEADS: tl.constexpr):
    """How much a head corrects, 0 where masked."""
    b = tl.load(place, mask=mask, other=0.0)
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32) * HEADS.correction
    return tl.where(mask, beta, 0.0)


@triton.jit
def _channel_decays(steps_ptr, decay_ptr, bias_ptr, token, key, mask, head, HEADS: tl.constexpr):
    """For some tokens and channels of a head's keys: the logarithm of how much is kept, 0 where masked."""
    N: tl.constexpr = HEADS.key_dim
    column = head * N + key
    raw = tl.load(steps_ptr + token.to(tl.int64) * (HEADS.num_heads * N) + column, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + column, mask=key < N, other=0.0)
    return tl.where(mask, tl.load(decay_ptr + head) * _softplus(raw.to(tl.float32) + bias), 0.0)


@triton.jit
def _gates(gates_ptr, decay_ptr, bias_ptr, gates_stride, token, mask, head, HEADS: tl.constexpr):
    """For some tokens: the logarithm of how much a head keeps, 0 where masked; and beta, or the size of the step."""
    row = gates_ptr + token.to(tl.int64) * gates_stride
    decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
    if HEADS.corrects:
        R: tl.constexpr = HEADS.num_heads // HEADS.num_key_heads
        b_column, a_column = head, HEADS.num_heads + head
        if HEADS.interleaved:
            b_column, a_column = head // R * 2 * R + head % R, head // R * 2 * R + R + head % R
        a = tl.load(row + a_column, mask=mask, other=0.0).to(tl.float32)
        return tl.where(mask, decay * _softplus(a + bias), 0.0), _beta(row + b_column, mask, HEADS)
    raw = tl.load(row + head, mask=mask, other=0.0).to(tl.float32)
    size = tl.minimum(tl.maximum(_softplus(raw + bias), HEADS.limits[0]), HEADS.limits[1])
    return tl.where(mask, decay * size, 0.0), tl.where(mask, size, 0.0)


@triton.jit
def _columns(head, HEADS: tl.constexpr):
    """Where a head's q, k and v lie in a row after the convolution; of Mamba-2 its C, B and x."""
    G: tl.constexpr = HEADS.num_key_heads
    N: tl.constexpr = HEADS.key_dim
    P: tl.constexpr = HEADS.value_dim
    of_key = (head % G if HEADS.tiled else head // (HEADS.num_heads // G)) * N
    if HEADS.corrects:
        return of_key, G * N + of_key, 2 * G * N + head * P
    return HEADS.num_heads * P + G * N + of_key, HEADS.num_heads * P + of_key, head * P


@triton.jit
def _l2_scale(squares):
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit
def _norm_then_gate(o, weight_ptr, z_row, value, inside, head, eps, dtype: tl.constexpr, HEADS: tl.constexpr):
    """layers.recurrent.norm_then_gate of one head's result, or norm_then_share."""
    R: tl.constexpr = HEADS.num_heads // HEADS.num_key_heads
    N: tl.constexpr = HEADS.key_dim
    P: tl.constexpr = HEADS.value_dim
    z_column = 2 * HEADS.num_key_heads * N + HEADS.num_heads * P + head * P
    if HEADS.interleaved:
        z_column = head // R * (2 * N + 2 * R * P) + 2 * N + R * P + head % R * P
    if HEADS.by_channel:
        z_column = head * P
    wide = o.to(dtype).to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, 0) / P + eps))
    weight = tl.load(weight_ptr + value, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_row + z_column + value, mask=inside, other=0.0).to(tl.float32)
    if HEADS.by_channel:
        return normed * weight * (1.0 / (1.0 + tl.exp(-z)))
    return (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32) * _silu(z)


@triton.jit(do_not_specialize_on_alignment=["gates_ptr"])  # Mamba-2's gates are the last columns of a wider tensor.
def step_kernel(
    mixed_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    steps_ptr,
    last_ptr,  # the norm's weight [P], or skip [H]
    z_ptr,
    out_ptr,
    pool_ptr,
    reads_ptr,
    writes_ptr,
    cu_q_ptr,
    gates_stride,
    z_stride,
    spare,
    eps,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """One program per (sequence, head): one token of the recurrence, unless the sequence has several new ones."""
    seq, head = tl.program_id(0), tl.program_id(1)
    token = seq
    count = 1
    if not SINGLE:
        token = tl.load(cu_q_ptr + seq)
        count = tl.load(cu_q_ptr + seq + 1) - token
    if count == 1:
        H: tl.constexpr = HEADS.num_heads
        N: tl.constexpr = HEADS.key_dim
        P: tl.constexpr = HEADS.value_dim
        key, value = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
        in_key, in_value = key < N, value < P
        q_column, k_column, v_column = _columns(head, HEADS)
        row = mixed_ptr + token.to(tl.int64) * HEADS.channels
        q = tl.load(row + q_column + key, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(row + k_column + key, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(row + v_column + value, mask=in_value, other=0.0).to(tl.float32)
        if HEADS.by_channel:
            weight = _beta(gates_ptr + token.to(tl.int64) * gates_stride + head, True, HEADS)
            log_decay = _channel_decays(steps_ptr, decay_ptr, bias_ptr, token, key, in_key, head, HEADS)[:, None]
        else:
            log_decay, weight = _gates(gates_ptr, decay_ptr, bias_ptr, gates_stride, token, True, head, HEADS)
        read, write = tl.load(reads_ptr + seq).to(tl.int64), tl.load(writes_ptr + seq).to(tl.int64)
        place = key[:, None] * P + value[None, :]
        inside = in_key[:, None] & in_value[None, :]
        state = tl.load(pool_ptr + (read * H + head) * N * P + place, mask=inside & (read >= 0), other=0.0)
        state *= tl.exp(log_decay)
        if HEADS.corrects:
            q *= _l2_scale(tl.sum(q * q, 0)) * (1.0 / tl.sqrt(N + 0.0))
            k *= _l2_scale(tl.sum(k * k, 0))
            added = (v - tl.sum(state * k[:, None], 0)) * weight
        else:
            added = v * weight
        state += k[:, None] * added[None, :]
        tl.store(pool_ptr + (write * H + head) * N * P + place, state, mask=inside & (write != spare))
        o = tl.sum(state * q[:, None], 0)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if HEADS.corrects:
            z_row = z_ptr + token.to(tl.int64) * z_stride
            o = _norm_then_gate(o, last_ptr, z_row, value, in_value, head, eps, dtype, HEADS)
        else:
            o += tl.load(last_ptr + head) * v
        tl.store(out_ptr + (token.to(tl.int64) * H + head) * P + value, o.to(dtype), mask=in_value)


@triton.jit
def _decays(log_decay, CHUNK: tl.constexpr):
    """How much is kept from after token i to after token t of a chunk [t, i], 0 before i; and from before the chunk."""
    place = tl.arange(0, CHUNK)
    since = tl.cumsum(log_decay, 0)
    between = tl.where(place[:, None] >= place[None, :], since[:, None] - since[None, :], float("-inf"))
    return tl.exp(between), since


@triton.jit
def _keys(row, column, mask, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """q or k of a chunk's tokens [CHUNK, BLOCK_N], normed for a delta rule; zeros where masked."""
    key = tl.arange(0, BLOCK_N)[None, :]
    x = tl.load(row[:, None] + column + key, mask=mask[:, None] & (key < HEADS.key_dim), other=0.0).to(tl.float32)
    if HEADS.corrects:
        x *= _l2_scale(tl.sum(x * x, 1))[:, None]
    return x


@triton.jit
def _products(
    steps_ptr, decay_ptr, bias_ptr, row, token, mask, head,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(q_t, k_i) and (k_t, k_i) of a chunk's tokens [t, i], each channel times what is kept of it from i to t.

    Channel by channel, as the factors of a product of matrices, exp(-decay), would overflow.
    """
    CHANNELS: tl.constexpr = 16  # channels at a time
    N: tl.constexpr = HEADS.key_dim
    q_column, k_column, _ = _columns(head, HEADS)
    of_q, of_k = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    q_squares, k_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, BLOCK_N, CHANNELS, num_stages=1):
        key = (first + tl.arange(0, CHANNELS))[None, :]
        live = mask[:, None] & (key < N)
        q = tl.load(row[:, None] + q_column + key, mask=live, other=0.0).to(tl.float32)
        k = tl.load(row[:, None] + k_column + key, mask=live, other=0.0).to(tl.float32)
        log_decay = _channel_decays(steps_ptr, decay_ptr, bias_ptr, token[:, None], key, live, head, HEADS)
        since = tl.cumsum(log_decay, 0)
        between = tl.exp(tl.minimum(since[:, None, :] - since[None, :, :], 0.0)) * k[None, :, :]
        of_q += tl.sum(q[:, None, :] * between, 2)
        of_k += tl.sum(k[:, None, :] * between, 2)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
    q_scale, k_scale = _l2_scale(q_squares) * (1.0 / tl.sqrt(N + 0.0)), _l2_scale(k_squares)
    return of_q * q_scale[:, None] * k_scale[None, :], of_k * k_scale[:, None] * k_scale[None, :]


@triton.jit(do_not_specialize_on_alignment=["gates_ptr"])
def inverse_kernel(
    mixed_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    steps_ptr,
    inverses_ptr,  # [chunks, H, 1, CHUNK, CHUNK] float32; with a rate of each channel [.., 2, ..]: scores are second
    item_seq_ptr,
    item_chunk_ptr,
    cu_q_ptr,
    num_tokens_ptr,
    gates_stride,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEVELS: tl.constexpr,  # log2(CHUNK) - 1
    PRECISION: tl.constexpr,
):
    """One program per (chunk, head): the inverse of I + A, A[t, i] = beta_t decay(i to t) (k_t, k_i) before t.

    By blocks of 1, 2, 4 ... tokens: [[X, 0], [L, Y]]^-1 = [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]], whose parts stay as small
    as the result's, where powers of A may not.
    """
    H: tl.constexpr = HEADS.num_heads
    item, head = tl.program_id(0), tl.program_id(1)
    seq, chunk = tl.load(item_seq_ptr + item), tl.load(item_chunk_ptr + item)
    start, total = tl.load(cu_q_ptr + seq), tl.load(num_tokens_ptr + seq)
    before = total - (tl.load(cu_q_ptr + seq + 1) - start)
    place = tl.arange(0, CHUNK)
    position = chunk * CHUNK + place
    mask = (position >= before) & (position < total)
    token = start + position - before
    row = mixed_ptr + token.to(tl.int64) * HEADS.channels
    t, i = place[:, None], place[None, :]
    square = inverses_ptr + ((item.to(tl.int64) * H + head) * (2 if HEADS.by_channel else 1) * CHUNK + t) * CHUNK + i
    if HEADS.by_channel:
        beta = _beta(gates_ptr + token.to(tl.int64) * gates_stride + head, mask, HEADS)
        of_q, of_k = _products(steps_ptr, decay_ptr, bias_ptr, row, token, mask, head, HEADS, CHUNK, BLOCK_N)
        tl.store(square + CHUNK * CHUNK, tl.where(t >= i, of_q, 0.0))
        a = tl.where(t > i, beta[:, None] * of_k, 0.0)
    else:
        log_decay, beta = _gates(gates_ptr, decay_ptr, bias_ptr, gates_stride, token, mask, head, HEADS)
        kept, _ = _decays(log_decay, CHUNK)
        _, k_column, _ = _columns(head, HEADS)
        k = _keys(row, k_column, mask, HEADS, BLOCK_N)
        a = tl.where(t > i, beta[:, None] * kept * tl.dot(k, tl.trans(k), input_precision=PRECISION), 0.0)
    inverse = tl.where(t == i, 1.0, 0.0) - tl.where(t // 2 == i // 2, a, 0.0)
    for level in tl.static_range(LEVELS):
        corner = (t // (4 << level) == i // (4 << level)) & (t // (2 << level) > i // (2 << level))
        part = tl.dot(inverse, tl.where(corner, a, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(part, inverse, input_precision=PRECISION)
    tl.store(square, inverse)


@triton.jit(do_not_specialize_on_alignment=["gates_ptr"])
def chunk_kernel(
    mixed_ptr,
    gates_ptr,
    decay_ptr,
    bias_ptr,
    steps_ptr,
    last_ptr,  # skip [H] of Mamba-2
    inverses_ptr,
    out_ptr,
    pool_ptr,
    reads_ptr,
    writes_ptr,
    cu_q_ptr,
    num_tokens_ptr,
    first_item_ptr,
    gates_stride,
    spare,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (BLOCK_P columns of the state, head, sequence with several new tokens): chunk after chunk.

    From the state S before a chunk, with d_t = decay(before the chunk to t): U = inverse (beta V - beta d K S), or dt V
    of Mamba-2; O = d Q S + (decay Q K^T) U; S becomes d_last S + (decay(to last) K)^T U. With a rate of each channel
    decays multiply the columns of K, Q and S, and inverse_kernel has left decay Q K^T.
    """
    H: tl.constexpr = HEADS.num_heads
    N: tl.constexpr = HEADS.key_dim
    P: tl.constexpr = HEADS.value_dim
    head, seq = tl.program_id(1), tl.program_id(2)
    start, total = tl.load(cu_q_ptr + seq), tl.load(num_tokens_ptr + seq)
    count = tl.load(cu_q_ptr + seq + 1) - start
    if count > 1:
        before = total - count
        place = tl.arange(0, CHUNK)
        key = tl.arange(0, BLOCK_N)[None, :]
        value = (tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
        in_value = value < P
        q_column, k_column, v_column = _columns(head, HEADS)
        read, write = tl.load(reads_ptr + seq).to(tl.int64), tl.load(writes_ptr + seq).to(tl.int64)
        inside = (key < N) & in_value
        state_place = head * N * P + key * P + value
        state = tl.load(pool_ptr + read * H * N * P + state_place, mask=inside & (read >= 0), other=0.0)
        first = before // CHUNK
        item = tl.load(first_item_ptr + seq).to(tl.int64)
        for chunk in tl.range(first, (total - 1) // CHUNK + 1, num_stages=1):
            position = chunk * CHUNK + place
            mask = (position >= before) & (position < total)
            token = start + position - before
            if HEADS.by_channel:
                weight = _beta(gates_ptr + token.to(tl.int64) * gates_stride + head, mask, HEADS)
                columns = mask[:, None] & (key < N)
                log_decay = _channel_decays(steps_ptr, decay_ptr, bias_ptr, token[:, None], key, columns, head, HEADS)
                since = tl.cumsum(log_decay, 0)
                from_before = tl.trans(tl.exp(since))
            else:
                log_decay, weight = _gates(gates_ptr, decay_ptr, bias_ptr, gates_stride, token, mask, head, HEADS)
                kept, since = _decays(log_decay, CHUNK)
                from_before = tl.exp(since)[None, :]
            row = mixed_ptr + token.to(tl.int64) * HEADS.channels
            live = in_value & mask[None, :]
            k = tl.trans(_keys(row, k_column, mask, HEADS, BLOCK_N))
            v = tl.load(row[None, :] + v_column + value, mask=live, other=0.0).to(tl.float32)
            added = v * weight[None, :]
            if HEADS.corrects:
                if HEADS.by_channel:
                    added -= tl.dot(state, k * from_before, input_precision=PRECISION) * weight[None, :]
                else:
                    seen = tl.dot(state, k, input_precision=PRECISION)
                    added -= seen * (weight * tl.exp(since))[None, :]
                square = ((item + chunk - first) * H + head) * (2 if HEADS.by_channel else 1) * CHUNK * CHUNK
                square += place[None, :] * CHUNK + place[:, None]
                inverse = tl.load(inverses_ptr + square)
                added = tl.dot(added, inverse, input_precision=PRECISION)
            q = tl.trans(_keys(row, q_column, mask, HEADS, BLOCK_N))
            if HEADS.corrects:
                q *= 1.0 / tl.sqrt(N + 0.0)
            if HEADS.by_channel:
                o = tl.dot(state, q * from_before, input_precision=PRECISION)
                scores = tl.load(inverses_ptr + square + CHUNK * CHUNK)
            else:
                o = tl.dot(state, q, input_precision=PRECISION) * from_before
                scores = tl.dot(tl.trans(k), q, input_precision=PRECISION) * tl.trans(kept)
            o += tl.dot(added, scores, input_precision=PRECISION)
            if not HEADS.corrects:
                o += tl.load(last_ptr + head) * v
            out = out_ptr + (token.to(tl.int64)[None, :] * H + head) * P + value
            tl.store(out, o.to(out_ptr.dtype.element_ty), mask=live)
            of_all = tl.sum(log_decay, 0)
            if HEADS.by_channel:
                of_all = of_all[None, :]
                to_last = tl.trans(k) * tl.exp(of_all - since)
            else:
                to_last = tl.trans(k * tl.exp(of_all - since)[None, :])
            state = state * tl.exp(of_all) + tl.dot(added, to_last, input_precision=PRECISION)
        tl.store(pool_ptr + write * H * N * P + state_place, state, mask=inside & (write != spare))


@triton.jit
def norm_then_gate_kernel(
    out_ptr, weight_ptr, z_ptr, cu_q_ptr, sequence_ptr, z_stride, eps, HEADS: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Norms and gates the recurrence's results [T, H, P] in place. One program per (token, head), of sequences with
    several new tokens: step_kernel does the others."""
    token, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(sequence_ptr + token)
    if tl.load(cu_q_ptr + seq + 1) - tl.load(cu_q_ptr + seq) > 1:
        P: tl.constexpr = HEADS.value_dim
        value = tl.arange(0, BLOCK_P)
        place = out_ptr + (token.to(tl.int64) * HEADS.num_heads + head) * P + value
        o = tl.load(place, mask=value < P, other=0.0)
        z_row = z_ptr + token.to(tl.int64) * z_stride
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        o = _norm_then_gate(o, weight_ptr, z_row, value, value < P, head, eps, dtype, HEADS)
        tl.store(place, o.to(dtype), mask=value < P)


@triton.jit
def gate_then_norm_kernel(
    x_ptr, weight_ptr, gate_ptr, out_ptr, gate_stride, eps,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program per (token, group): rms_norm(x * silu(gate)) * weight, or without NORM x * silu(gate)."""
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    column, inside = tl.program_id(1) * SIZE + place, place < SIZE
    x = tl.load(x_ptr + token * WIDTH + column, mask=inside, other=0.0)
    x *= _silu(tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32))
    if NORM:
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
        x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, x.to(out_ptr.dtype.element_ty), mask=inside)
