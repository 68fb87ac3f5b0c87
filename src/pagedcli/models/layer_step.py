"""One layer's part of a step: attention arguments, the batch of its group, its cache. Used by the decoders in torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.core.groups import cache_groups


@dataclass(slots=True)
class LayerStep:
    """One layer's part of a step."""

    layer: AttentionLayer
    batch: PagedBatch  # of its group
    k_cache: Tensor  # of the backend's kv_shape
    v_cache: Tensor

    def write(self, backend: AttentionBackend, k: Tensor, v: Tensor) -> None:
        """Store K and V [T, G, D] of the new tokens."""
        backend.write(k, v, self.k_cache, self.v_cache, self.batch.slots, self.layer)

    def attend(self, backend: AttentionBackend, q: Tensor) -> Tensor:
        """Attention of the new tokens: q [T, H, D] -> [T, H, D]."""
        return backend.attend(q, self.k_cache, self.v_cache, self.batch, self.layer)


def layer_steps(
    batch: PagedBatch, kv_cache: Tensor, backend: AttentionBackend, layers: Sequence[AttentionLayer]
) -> list[LayerStep]:
    """A step as each layer sees it, prepared for the backend. Layer i of a group has kv_cache[:, i]."""
    k_caches, v_caches = (caches.unbind(0) for caches in kv_cache.unbind(0))
    groups = cache_groups([layer.window for layer in layers])
    steps: dict[int, LayerStep] = {}
    for group, of_group in zip(groups, (batch, *batch.others), strict=True):
        prepared = replace(of_group, window=group.window)
        backend.prepare(prepared)
        for place, index in enumerate(group.layers):
            steps[index] = LayerStep(layers[index], prepared, k_caches[place], v_caches[place])
    return [steps[index] for index in range(len(layers))]
