"""What one layer requires of an attention backend. Free of torch: a ModelSpec also lists its layers for the planner."""

from dataclasses import dataclass
from typing import NamedTuple

KvHeads = tuple[int, int]  # G key/value heads of a layer, D elements each


class Heads(NamedTuple):
    """The heads of a layer."""

    num_heads: int  # H, of queries
    num_kv_heads: int  # G
    head_dim: int  # D

    @property
    def kept(self) -> KvHeads:
        """The heads that the cache has."""
        return self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The per-layer arguments of attention."""

    scale: float  # scores are scale * (q . k); 1/sqrt(D) for the usual softmax
    window: int | None = None  # tokens that a query sees, including itself; None: all up to it
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap) before the mask
    sinks: bool = False  # a learned logit per query head joins the softmax and adds nothing to its result
    k_scale: float = 1.0  # scale of K in an fp8 cache; 1 for every other cache
    v_scale: float = 1.0  # the same for V
    heads: Heads | None = None  # None: those of the AttentionSpec, as all layers have
    value_dim: int | None = None  # V is the first so many elements of K, which alone is kept; None: V is kept, too
    source: int | None = None  # the layer, counted among those that attend, whose K and V it reads; None: its own
