"""Measures attention speed. Pure functions that return rows.

Used by `pagedcli bench kernels`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from pagedcli.attention.base import AttentionBackend, PagedBatch, dtype_name
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import select_backend
from pagedcli.bench.rates import timed_seconds
from pagedcli.bench.spread import Spread
from pagedcli.core.budget import block_bytes
from pagedcli.native.system import ask_for_huge_pages

STREAM_BYTES = 1 << 27  # weights, or K and V, of several layers: more than any CPU cache


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One measurement: equal sequences of `context` tokens, the last `new` of which are new."""

    num_sequences: int
    context: int  # tokens in the cache after the step
    new: int  # tokens of the step, 1 for decode
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    shared: int = 0  # leading tokens in blocks that all sequences have in common, a multiple of block_size
    window: int | None = None  # tokens that a query sees; only with one new token and none shared

    @property
    def num_seen_tokens(self) -> int:
        """Distinct tokens in the cache that a call must read."""
        if self.window is not None:
            return self.num_sequences * min(self.window, self.context)
        return self.shared + self.num_sequences * (self.context - self.shared)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        return block_bytes(
            num_layers=1,
            block_size=self.num_seen_tokens,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_dtype=dtype_name(self.kv_dtype or self.dtype),
        )

    @property
    def flops(self) -> int:
        """Operations of both products under the causal mask; a multiply-add counts as two."""
        seen = self.new * (2 * self.context - self.new + 1) // 2
        if self.window is not None:
            seen = min(self.window, self.context)
        return 4 * self.num_sequences * seen * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """The time of one shape on one backend."""

    backend: str
    shape: AttentionShape
    seconds: Spread


def attention_rows(
    shapes: Iterable[AttentionShape], backend: str = "auto", device: str = "cpu"
) -> Iterator[AttentionRow]:
    """Measure each shape. Blocks are in random order, as after long use of a cache.

    Raises: BackendError if the named backend cannot run a shape.
    """
    for shape in shapes:
        layer = AttentionLayer(scale=shape.head_dim**-0.5, window=shape.window)
        chosen = select_backend(
            backend,
            device=torch.device(device),
            dtype=shape.dtype,
            block_size=shape.block_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=shape.kv_dtype,
            layers=(layer,),
        ).backend
        yield AttentionRow(chosen.name, shape, _attend_seconds(chosen, shape, layer, torch.device(device)))


def _attend_seconds(
    backend: AttentionBackend, shape: AttentionShape, layer: AttentionLayer, device: torch.device
) -> Spread:
    batch, num_blocks = _batch(shape, device)
    cache_shape = backend.kv_shape(num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    whole_bytes = replace(shape, window=None).kv_bytes
    num_layers = max(1, -(-STREAM_BYTES // whole_bytes))
    cache = torch.empty((num_layers, 2, *cache_shape), dtype=shape.kv_dtype or shape.dtype, device=device)
    ask_for_huge_pages(cache)  # as the engine does
    caches = [tuple(pair) for pair in cache]
    num_slots = num_blocks * shape.block_size
    filling = torch.randn(num_slots, shape.num_kv_heads, shape.head_dim, device=device).to(shape.dtype)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)
    for k_cache, v_cache in caches:
        backend.write(filling, filling, k_cache, v_cache, slots, layer)
    tokens = shape.num_sequences * shape.new
    q = torch.randn(tokens, shape.num_heads, shape.head_dim, device=device).to(shape.dtype)
    backend.prepare(batch)

    def step() -> None:
        for k_cache, v_cache in caches:
            backend.attend(q, k_cache, v_cache, batch, layer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return timed_seconds(step) * (1 / num_layers)


def _batch(shape: AttentionShape, device: torch.device) -> tuple[PagedBatch, int]:
    width = -(-shape.context // shape.block_size)
    common = shape.shared // shape.block_size
    num_blocks = common + shape.num_sequences * (width - common)
    order = torch.randperm(num_blocks).to(device, torch.int32)
    own = order[common:].view(shape.num_sequences, width - common)
    table = torch.cat([order[:common].expand(shape.num_sequences, -1), own], dim=1)
    starts = [b * shape.new for b in range(shape.num_sequences + 1)]
    totals = [shape.context] * shape.num_sequences
    batch = PagedBatch(
        cu_q=torch.tensor(starts, dtype=torch.int32, device=device),
        num_tokens=torch.tensor(totals, dtype=torch.int32, device=device),
        block_table=table,
        slots=torch.full((starts[-1],), -1, dtype=torch.int32, device=device),
        max_new=shape.new,
        max_total=shape.context,
        cu_q_host=starts,
        num_tokens_host=totals,
        window=shape.window,
    )
    return batch, num_blocks
