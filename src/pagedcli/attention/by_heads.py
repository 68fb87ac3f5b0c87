"""One backend for each kind of layer, in models whose layers differ in their key/value heads. Made by select.py.

The cache is [2, 1, N, U]: a block has U elements of K and as many of V, in which the layers of its group lie one after
another. To a layer's backend it looks like a cache of its own whose blocks lie apart.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer, Heads


class BackendsByHeads(AttentionBackend):
    """The same backend for several kinds of key/value heads."""

    def __init__(self, backends: Mapping[Heads, AttentionBackend], block_size: int) -> None:
        first = next(iter(backends.values()))
        self.name, self.capabilities = first.name, first.capabilities
        self._backends, self._block_size = dict(backends), block_size

    def of(self, layer: AttentionLayer) -> AttentionBackend:
        assert layer.heads is not None, "every layer says which heads it has"
        return self._backends[layer.heads]

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        heads = num_kv_heads, head_dim
        return self._backends[heads].kv_shape(num_blocks, block_size, *heads)

    def cache_shape(self, groups: Sequence[tuple[int, Heads]], num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (2, 1, num_blocks, max(count * math.prod(self._layer_shape(heads)) for count, heads in groups))

    def layer_caches(self, kv_cache: Tensor, num_layers: int, heads: Heads | None) -> list[tuple[Tensor, Tensor]]:
        assert heads is not None, "every layer says which heads it has"
        shape = self._layer_shape(heads)
        layers = kv_cache[:, 0, :, : num_layers * math.prod(shape)].view(2, -1, num_layers, *shape)
        return [(keys, values) for keys, values in layers.unbind(2)]

    def reserve(self, num_seqs: int, max_total: int) -> None:
        for backend in self._backends.values():
            backend.reserve(num_seqs, max_total)

    def write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, layer: AttentionLayer
    ) -> None:
        self.of(layer).write(k, v, k_cache, v_cache, slots, layer)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        layer: AttentionLayer,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.of(layer).attend(q, k_cache, v_cache, batch, layer, sinks)

    def _layer_shape(self, heads: Heads) -> tuple[int, ...]:
        """What a block holds of a layer's K."""
        return self.kv_shape(1, self._block_size, *heads)[1:]
