"""The reference backend, simple enough to trust: gather K and V of a sequence, mask, softmax, in plain torch.

Every other backend is tested against it.
"""

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, AttentionSpec, Capabilities, LayerKV, PagedBatch, Sinks
from pagedcli.attention.layer import AttentionLayer


class ReferenceAttention(AttentionBackend):
    """Plain torch, one sequence at a time. K and V cache: [N, S, G, D]."""

    name = "reference"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        windows=True,
        soft_cap=True,
        sinks=True,
        latents=True,
        strided_blocks=True,
    )

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        rows = (slots >= 0).nonzero().flatten()
        target = slots[rows].long()
        for cache, new in zip(kv, (k, v), strict=True):
            cache[target // cache.shape[1], target % cache.shape[1]] = new[rows]

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        out = q.new_empty((*q.shape[:2], layer.value_dim or q.shape[2]))
        block_size, num_kv_heads = kv[0].shape[1:3]
        group = q.shape[1] // num_kv_heads
        for b, total in enumerate(batch.num_tokens.tolist()):
            start, end = batch.cu_q[b : b + 2].tolist()
            if start == end:
                continue
            first_block = 0 if layer.window is None else max(0, total - (end - start) + 1 - layer.window) // block_size
            blocks = batch.block_table[b, first_block : -(-total // block_size)].long()
            positions = torch.arange(first_block * block_size, total, device=q.device)
            seen = (cache[blocks].flatten(0, 1)[: len(positions)].float() for cache in kv)
            k, v = (each.repeat_interleave(group, dim=1) for each in seen)
            v = v[:, :, : layer.value_dim]
            scores = torch.einsum("thd,khd->htk", q[start:end].float(), k) * layer.scale
            if layer.soft_cap is not None:
                scores = (scores / layer.soft_cap).tanh() * layer.soft_cap
            last_seen = positions[start - end :, None]
            hidden = positions > last_seen
            if layer.window is not None:
                hidden |= positions <= last_seen - layer.window
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - start, 1)), dim=-1)
            weights = scores.softmax(-1)[:, :, : len(positions)]
            out[start:end] = torch.einsum("htk,khd->thd", weights, v).to(q.dtype)
        return out


def check(spec: AttentionSpec) -> type[ReferenceAttention]:
    """Refuses nothing."""
    return ReferenceAttention


def load(spec: AttentionSpec) -> ReferenceAttention:
    """The reference backend."""
    return ReferenceAttention()
