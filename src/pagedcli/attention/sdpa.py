"""Paged attention from torch's scaled_dot_product_attention: gather the pages, group equal shapes, one call per group.

Any device, nothing to compile. Each byte of the cache is copied once per step, which a paged kernel avoids.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedcli.attention.base import AttentionSpec, PagedBatch

# Gathered K of one call in elements: small enough to be read back from cache on a CPU, large enough to fill a GPU.
GATHER_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equal numbers of new tokens, attended in one call. n sequences, m new tokens, k padded length."""

    rows: Tensor  # [n * m] int64, rows of q
    blocks: Tensor  # [n, k / S] int64, valid ids only
    mask: Tensor  # [n, 1, m, k] bool, True where a query sees a key
    unowned: Tensor | None  # [n, 1, k, 1] bool, True for slots no token owns; None when there are none


class SdpaAttention:
    """Torch's scaled_dot_product_attention over gathered pages. K and V cache: [N, G, S, D]."""

    name = "sdpa"
    block_size_multiple = 1
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

    def __init__(self, spec: AttentionSpec) -> None:
        self._block_size = spec.block_size
        width = spec.num_kv_heads * spec.head_dim
        self._max_gathered = max(1, GATHER_ELEMENTS.get(spec.device.type, 1 << 24) // width)  # tokens in one call

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, batch: PagedBatch) -> None:
        batch.plan = [self._group(batch, m, members) for m, members in self._members(batch)]

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        rows = (slots >= 0).nonzero().flatten()
        target = slots[rows].long()
        block, offset = target // k_cache.shape[2], target % k_cache.shape[2]
        k_cache[block, :, offset] = k[rows]
        v_cache[block, :, offset] = v[rows]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
        if batch.plan is None:
            self.prepare(batch)
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = k_cache.shape[1]
        group_size = num_heads // num_kv_heads
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in batch.plan:
            n, k_len = group.mask.shape[0], group.mask.shape[3]
            keys, values = (self._gather(cache, group) for cache in (k_cache, v_cache))
            # The heads of a group become more queries of one head: K and V are never repeated.
            queries = q[group.rows].view(n, -1, num_kv_heads, group_size, head_dim)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
            mask = group.mask.expand(n, group_size, -1, k_len).reshape(n, 1, -1, k_len)
            result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            result = result.view(n, num_kv_heads, group_size, -1, head_dim).permute(0, 3, 1, 2, 4)
            out[group.rows] = result.reshape(-1, num_heads, head_dim)
        return out

    def _gather(self, cache: Tensor, group: _Group) -> Tensor:
        """[n, G, k, D] of the group's pages, zero where no token lives: a NaN there would survive a zero weight."""
        pages = cache[group.blocks]  # [n, k / S, G, S, D]
        n, num_pages, num_kv_heads, block_size, head_dim = pages.shape
        gathered = pages.transpose(1, 2).reshape(n, num_kv_heads, num_pages * block_size, head_dim)
        return gathered if group.unowned is None else gathered.masked_fill_(group.unowned, 0)

    def _members(self, batch: PagedBatch) -> list[tuple[int, list[int]]]:
        """Sequences that share a call: equal numbers of new tokens, similar lengths, a bounded sum of lengths."""
        starts = batch.cu_q_host or batch.cu_q.tolist()
        num_new = [end - start for start, end in itertools.pairwise(starts)]
        totals = batch.num_tokens_host or batch.num_tokens.tolist()
        order = sorted((b for b, m in enumerate(num_new) if m), key=lambda b: (num_new[b], totals[b]))
        calls: list[tuple[int, list[int]]] = []
        for b in order:
            if calls and calls[-1][0] == num_new[b]:
                members = calls[-1][1]
                near = totals[b] <= 1.25 * totals[members[0]] + 16
                if near and (len(members) + 1) * totals[b] <= self._max_gathered:
                    members.append(b)
                    continue
            calls.append((num_new[b], [b]))
        return calls

    def _group(self, batch: PagedBatch, m: int, members: list[int]) -> _Group:
        device = batch.block_table.device
        index = torch.tensor(members, device=device)
        num_pages = -(-int(batch.num_tokens[index].max()) // self._block_size)
        totals = batch.num_tokens[index].long()[:, None]  # [n, 1]
        keys = torch.arange(num_pages * self._block_size, device=device)
        unowned = keys >= totals  # [n, k]
        owned_pages = torch.arange(num_pages, device=device) * self._block_size < totals
        blocks = batch.block_table[index, :num_pages].long().where(owned_pages, 0)
        last_seen = totals - m + torch.arange(m, device=device)  # [n, m]
        rows = batch.cu_q[index].long()[:, None] + torch.arange(m, device=device)
        return _Group(
            rows=rows.flatten(),
            blocks=blocks,
            mask=(keys <= last_seen[:, :, None])[:, None],
            unowned=unowned[:, None, :, None] if bool(unowned.any()) else None,
        )


def load(spec: AttentionSpec) -> SdpaAttention:
    """Serves every spec that torch's scaled_dot_product_attention does."""
    return SdpaAttention(spec)
