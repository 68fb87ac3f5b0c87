"""flash-attn without a GPU: functions with the published signatures and meaning, computed by the reference.

The stand-ins are written from the packages' documentation; they check that our arguments, taken as documented, give
exact attention. The kernels themselves are tested by the conformance test, on a GPU.
"""

import types
from dataclasses import replace

import pytest
import torch
from attention_cases import TOLERANCE, Case, run, worst_error

from pagedcli.attention import flash
from pagedcli.attention.base import AttentionSpec
from pagedcli.errors import BackendError

DTYPE = torch.bfloat16
RAGGED = [(1, 1), (300, 1), (520, 40), (256, 256), (17, 17)]
DECODE = [(1, 1), (300, 1), (520, 1)]


def paged_attention(q, k_cache, v_cache, *, starts, lengths, table, scale, causal, window_size=(-1, -1)):
    """What the packages document: ragged queries, paged keys, the causal mask aligned to the bottom right corner."""
    out = torch.full(q.shape, float("nan"), dtype=q.dtype)
    group = q.shape[1] // k_cache.shape[2]
    for b, total in enumerate(lengths.tolist()):
        start, end = starts[b : b + 2].tolist()
        size, positions = k_cache.shape[1], torch.arange(total - (end - start), total)[:, None]
        first = 0 if window_size[0] < 0 else max(0, int(positions[0]) - window_size[0]) // size
        pages, keys = table[b, first : -(-total // size)].long(), torch.arange(first * size, total)
        k, v = (x[pages].flatten(0, 1)[: len(keys)].double().repeat_interleave(group, 1) for x in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k) * scale
        if causal:
            scores = scores.masked_fill(keys > positions, float("-inf"))
        if window_size[0] >= 0:
            scores = scores.masked_fill(keys < positions - window_size[0], float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


def fake_flash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    lengths = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), lengths.max())
    assert cu_seqlens_k.dtype == block_table.dtype == torch.int32
    return paged_attention(
        q, k, v, starts=cu_seqlens_q, lengths=lengths, table=block_table, scale=softmax_scale, causal=causal,
        window_size=window_size,
    )  # fmt: skip


def fake_flash2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    batch, new = q.shape[:2]
    starts = torch.arange(batch + 1) * new
    out = paged_attention(
        q.flatten(0, 1), k_cache, v_cache, starts=starts, lengths=cache_seqlens, table=block_table,
        scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip
    return out.unflatten(0, (batch, new))


def fake_flash3_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    return paged_attention(
        q, k_cache, v_cache, starts=cu_seqlens_q, lengths=cache_seqlens, table=page_table,
        scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip


BACKENDS = {
    "flash2": lambda: flash.flash2_backend(
        types.SimpleNamespace(flash_attn_with_kvcache=fake_flash2_kvcache, flash_attn_varlen_func=fake_flash2_varlen)
    ),
    "flash3": lambda: flash.flash3_backend(types.SimpleNamespace(flash_attn_with_kvcache=fake_flash3_kvcache)),
}


@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["ragged", "decode"])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (2, 4)])
@pytest.mark.parametrize("name", BACKENDS)
def test_arguments_taken_as_documented_give_exact_attention(name, num_kv_heads, group, lengths):
    case = Case(lengths, 256, num_kv_heads * group, num_kv_heads, 64, DTYPE)
    assert worst_error(run(BACKENDS[name](), case), case.expected()) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("lengths", [RAGGED, DECODE], ids=["ragged", "decode"])
@pytest.mark.parametrize("name", ["flash2", "flash3"])
def test_flash_attends_within_the_window(name, lengths):
    case = Case(lengths, 256, 2, 2, 64, DTYPE)
    case.layer = replace(case.layer, window=100)
    assert worst_error(run(BACKENDS[name](), case), case.expected()) < TOLERANCE[DTYPE]


def test_old_signatures_are_refused_by_what_they_lack():
    def of_flash_attn_2_3(q, k_cache, v_cache, cache_seqlens=None, softmax_scale=None, causal=False, window_size=None):
        raise AssertionError("never called")

    old = types.SimpleNamespace(flash_attn_with_kvcache=of_flash_attn_2_3, flash_attn_varlen_func=fake_flash2_varlen)
    with pytest.raises(BackendError, match="does not take block_table"):
        flash.flash2_backend(old)


def test_flash_limits_are_named():
    spec = AttentionSpec(torch.device("cpu"), DTYPE, 256, 8, 2, 64)
    with pytest.raises(BackendError, match="CUDA"):
        flash.load(spec)
