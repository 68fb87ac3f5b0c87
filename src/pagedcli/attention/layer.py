"""What one layer asks of an attention backend. Free of torch: a ModelSpec lists its layers for the planner, too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The arguments of a layer's attention that are the same for all tokens."""

    scale: float  # scores are scale * (q . k); 1/sqrt(D) for the usual softmax
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    soft_cap: float | None = None  # scores become soft_cap * tanh(score / soft_cap) before the mask
    k_scale: float = 1.0  # what one unit of K in an fp8 cache stands for; 1 in every other cache
    v_scale: float = 1.0  # the same of V
