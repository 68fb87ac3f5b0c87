"""flash-attn without a GPU: functions with the published signatures and meaning, computed exactly in torch.

Written from the packages' documentation. They check what those say of their arguments, so that what we pass, taken as
documented, gives exact attention. The kernels themselves are tested by the conformance test, on a GPU.
"""

import functools
import inspect
import sys
import types
from importlib.machinery import ModuleSpec

import torch
from torch.utils._pytree import tree_map


def paged_attention(q, k_cache, v_cache, *, starts, lengths, table, scale, causal, window_size=(-1, -1)):
    """What the packages document: ragged queries, paged keys, the causal mask aligned to the bottom right corner."""
    check_arguments(q, k_cache, v_cache, lengths, table)
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


def check_arguments(q, k_cache, v_cache, lengths, table):
    """What both versions require."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k_cache.dtype == v_cache.dtype == q.dtype
    assert lengths.dtype == table.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache, table)), "the last dimension is contiguous"
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    assert q.shape[1] % k_cache.shape[2] == 0


def flash2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    lengths = cu_seqlens_k.diff()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), lengths.max())
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert k.shape[1] % 256 == 0
    return paged_attention(
        q, k, v, starts=cu_seqlens_q, lengths=lengths, table=block_table, scale=softmax_scale, causal=causal,
        window_size=window_size,
    )  # fmt: skip


def flash2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    batch, new = q.shape[:2]
    assert k_cache.shape[1] % 256 == 0
    starts = torch.arange(batch + 1) * new
    out = paged_attention(
        q.flatten(0, 1), k_cache, v_cache, starts=starts, lengths=cache_seqlens, table=block_table,
        scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip
    return out.unflatten(0, (batch, new))


def flash3_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert cu_seqlens_q.dtype == torch.int32
    return paged_attention(
        q, k_cache, v_cache, starts=cu_seqlens_q, lengths=cache_seqlens, table=page_table,
        scale=softmax_scale, causal=causal, window_size=window_size,
    )  # fmt: skip


# module -> its functions
MODULES = {
    "flash2": (
        "flash_attn", {"flash_attn_with_kvcache": flash2_kvcache, "flash_attn_varlen_func": flash2_varlen}
    ),
    "flash3": ("flash_attn_interface", {"flash_attn_with_kvcache": flash3_kvcache}),
}  # fmt: skip


def install(monkeypatch, version):
    """One version is installed for the test, on the pretended GPU."""
    for each in MODULES:
        name, functions = MODULES[each]
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update({key: _on_the_gpu(function) for key, function in functions.items()})
        monkeypatch.setitem(sys.modules, name, module if each == version else None)


def _on_the_gpu(function):
    from pretend_cuda import OnGpu, plain

    @functools.wraps(function)
    def call(*args, **kwargs):
        given = inspect.signature(function).bind(*args, **kwargs).arguments.values()
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        assert all(isinstance(tensor, OnGpu) for tensor in tensors), "a kernel got a pointer to host memory"
        with torch._C.DisableTorchFunction():
            return function(*tree_map(plain, args), **tree_map(plain, kwargs)).as_subclass(OnGpu)

    return call
