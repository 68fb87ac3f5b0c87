"""Paged attention by torch's scaled_dot_product_attention: gather the pages, group equal shapes, one call per group.

Any device, nothing to compile. Copies each byte of the cache once per step, which a paged kernel avoids.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedcli.attention.base import AttentionBackend, AttentionSpec, Capabilities, LayerKV, PagedBatch, Sinks
from pagedcli.attention.layer import AttentionLayer

# Elements of gathered K per call: small enough for a CPU's cache, large enough to fill a GPU.
GATHER_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 28}
CHUNK = 128  # new tokens per call: each chunk of a prompt gathers only the keys it can see


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks with equal numbers of new tokens, attended in one call: n chunks, m new tokens, k padded length."""

    rows: Tensor  # [n * m] int64, rows of q
    pages: Tensor  # [n * G * k / S] int64, which [S, D] pieces of the cache, seen as [N * G, S * D], valid ones only
    mask: Tensor  # [n, 1, m, k] bool, True where a query sees a key
    shortest: int  # slots from this key on may be unowned
    unowned: Tensor  # [n, 1, k - shortest, 1] bool, True there


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive new tokens of one sequence."""

    seq: int
    first_row: int  # index of the first token's row in q
    num_new: int
    total: int  # tokens up to the last new one
    first_page: int  # index of the first visible page
    num_gathered: int  # tokens from that page on


class SdpaAttention(AttentionBackend):
    """Torch's scaled_dot_product_attention over gathered pages. K and V cache: [N, G, S, D]."""

    name = "sdpa"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        windows=True,
        sinks=True,
        latents=True,
        strided_blocks=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        self._block_size = spec.block_size
        self._num_kv_heads = spec.num_kv_heads
        width = spec.num_kv_heads * spec.head_dim
        self._max_gathered = max(1, GATHER_ELEMENTS.get(spec.device.type, 1 << 24) // width)  # tokens in one call

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, batch: PagedBatch) -> None:
        batch.work = [self._group(batch, chunks) for chunks in self._calls(batch)]

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        rows = (slots >= 0).nonzero().flatten()
        target = slots[rows].long()
        for cache, new in zip(kv, (k, v), strict=True):
            cache[target // cache.shape[2], :, target % cache.shape[2]] = new[rows]

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        if batch.work is None:
            self.prepare(batch)
        num_heads, head_dim = q.shape[1:]
        value_dim = layer.value_dim or head_dim
        num_kv_heads = kv[0].shape[1]
        group_size = num_heads // num_kv_heads
        out = q.new_empty((len(q), num_heads, value_dim))
        for group in batch.work:
            n, k_len = group.mask.shape[0], group.mask.shape[3]
            keys = _gather(kv[0], group)
            values = _gather(kv[1], group) if layer.value_dim is None else keys[..., :value_dim]
            # The heads of a group become additional queries of one head, so K and V are not repeated.
            queries = q[group.rows].view(n, -1, num_kv_heads, group_size, head_dim)
            queries = queries.permute(0, 2, 3, 1, 4).reshape(n, num_kv_heads, -1, head_dim)
            mask = group.mask.expand(n, group_size, -1, k_len).reshape(n, 1, -1, k_len)
            if sinks is not None:
                keys, values, mask = _with_sinks(keys, values, mask, sinks.view(num_kv_heads, group_size))
            result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
            result = result.view(n, num_kv_heads, group_size, -1, value_dim).permute(0, 3, 1, 2, 4)
            out[group.rows] = result.reshape(-1, num_heads, value_dim)
        return out

    def _calls(self, batch: PagedBatch) -> list[list[_Chunk]]:
        """Group chunks into calls: equal numbers of new tokens, similar lengths, a bounded sum of lengths."""
        starts = batch.cu_q_host or batch.cu_q.tolist()
        totals = batch.num_tokens_host or batch.num_tokens.tolist()
        chunks = [
            self._chunk(seq, row, min(CHUNK, end - row), total - max(0, end - row - CHUNK), batch.window)
            for seq, ((start, end), total) in enumerate(zip(itertools.pairwise(starts), totals, strict=True))
            for row in range(start, end, CHUNK)
        ]
        calls: list[list[_Chunk]] = []
        for chunk in sorted(chunks, key=lambda chunk: (chunk.num_new, chunk.num_gathered)):
            if calls:
                call, first = calls[-1], calls[-1][0]
                similar = first.num_new == chunk.num_new and chunk.num_gathered <= 1.25 * first.num_gathered + 16
                if similar and (len(call) + 1) * chunk.num_gathered <= self._max_gathered:
                    call.append(chunk)
                    continue
            calls.append([chunk])
        return calls

    def _chunk(self, seq: int, first_row: int, num_new: int, total: int, window: int | None) -> _Chunk:
        first_page = 0 if window is None else max(0, total - num_new + 1 - window) // self._block_size
        return _Chunk(seq, first_row, num_new, total, first_page, total - first_page * self._block_size)

    def _group(self, batch: PagedBatch, chunks: list[_Chunk]) -> _Group:
        device, size, m = batch.block_table.device, self._block_size, chunks[0].num_new
        num_pages, shortest = -(-chunks[-1].num_gathered // size), chunks[0].num_gathered
        seqs, first_rows, first_pages, lengths = (
            torch.tensor([getattr(chunk, name) for chunk in chunks], device=device)
            for name in ("seq", "first_row", "first_page", "num_gathered")
        )
        totals = lengths[:, None]  # [n, 1]; this and the positions below count from the first gathered token
        keys = torch.arange(num_pages * size, device=device)
        pages = torch.arange(num_pages, device=device)
        owned_pages = pages * size < totals
        blocks = batch.block_table[seqs[:, None], (first_pages[:, None] + pages).where(owned_pages, 0)]
        blocks = blocks.long().where(owned_pages, 0)
        heads = torch.arange(self._num_kv_heads, device=device)[:, None]
        last_seen = (totals - m + torch.arange(m, device=device))[:, :, None]  # [n, m, 1]
        mask = keys <= last_seen
        if batch.window is not None:
            mask &= keys > last_seen - batch.window
        return _Group(
            rows=(first_rows[:, None] + torch.arange(m, device=device)).flatten(),
            pages=(blocks[:, None] * self._num_kv_heads + heads).flatten(),
            mask=mask[:, None],
            shortest=shortest,
            unowned=(keys[shortest:] >= totals)[:, None, :, None],
        )


def _with_sinks(keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more key, which is zero as its value is, and the sinks [G, H / G] as what the mask adds to its scores."""
    n, num_kv_heads, _, head_dim = keys.shape
    zero = keys.new_zeros(n, num_kv_heads, 1, head_dim)
    num_rows = mask.shape[2]
    added = torch.zeros_like(mask, dtype=keys.dtype).masked_fill_(~mask, float("-inf"))
    of_rows = sinks.to(keys.dtype).repeat_interleave(num_rows // sinks.shape[1], dim=1)[None, :, :, None]
    added = torch.cat((added.expand(-1, num_kv_heads, -1, -1), of_rows.expand(n, -1, -1, -1)), dim=-1)
    return torch.cat((keys, zero), dim=2), torch.cat((values, zero), dim=2), added


def _gather(cache: Tensor, group: _Group) -> Tensor:
    """[n, G, k, D] of the group's pages, zero in unowned slots: a NaN there would survive a zero weight."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    if cache.is_contiguous():
        pieces = cache.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, group.pages)
    else:
        pieces = cache[group.pages // num_kv_heads, group.pages % num_kv_heads]
    gathered = pieces.view(group.mask.shape[0], num_kv_heads, -1, head_dim)
    gathered[:, :, group.shortest :].masked_fill_(group.unowned, 0)
    return gathered


def check(spec: AttentionSpec) -> type[SdpaAttention]:
    """Accepts every spec."""
    return SdpaAttention


def load(spec: AttentionSpec) -> SdpaAttention:
    """The SDPA backend."""
    return SdpaAttention(spec)
