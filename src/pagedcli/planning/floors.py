"""The shortest time that a machine's memory and arithmetic allow for a step: a bound, never a prediction. Used by
`bench` and `doctor -m`.

Linear layers and attention each take the larger of bytes over bandwidth and operations over the peak. Every weight is
read once per step, each distinct token of K and V once, by layers with a window only those in it. Of a mixture of
experts those are read that the step's tokens go to, as many as a router without preferences picks.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from pagedcli.core.budget import head_bytes
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline
from pagedcli.planning.step_time import AttendedLayers


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Times the steps of one model on one machine. `layers` are those of each window with the bytes of a token's K and
    V, and the FLOPs of attention of one query to one token."""

    roofline: Roofline
    weights: Footprint
    layers: tuple[tuple[AttendedLayers, int, int], ...]

    @classmethod
    def of(cls, spec: ModelSpec, weights: Footprint, roofline: Roofline, *, kv_dtype: str) -> "StepFloor":
        """`spec`: the sizes of the rank whose `weights` these are."""
        own = spec.attentions[0].heads
        totals: dict[int | None, tuple[int, int]] = {}
        for layer in spec.attention_layers:
            num_heads, num_kv_heads, size = layer.heads or own
            num_bytes, num_flops = totals.get(layer.window, (0, 0))
            num_kept = 0 if layer.source is not None else 2 if layer.value_dim is None else 1
            num_bytes += num_kept * num_kv_heads * head_bytes(size, kv_dtype)
            totals[layer.window] = num_bytes, num_flops + 2 * num_heads * (size + (layer.value_dim or size))
        return cls(roofline, weights, tuple((AttendedLayers(window, 1.0), *each) for window, each in totals.items()))

    def seconds(self, queries: Items[tuple[int, int]], num_sampled: int, *, num_repeated: int = 0) -> float:
        """The floor of a step. `queries`: (tokens before, new tokens) of each sequence; `num_repeated`: at most so many
        tokens are read for several of them, and count once."""
        num_tokens = sum(num_new for _, num_new in queries)
        layers, head = self.weights.active_parameters, self.weights.head
        linear_s = self.roofline.seconds(
            self.weights.active_bytes(num_tokens) + (head.num_bytes if num_sampled else 0),
            2 * (layers * num_tokens + head.parameters * num_sampled),
        )
        num_bytes = num_flops = 0.0
        for attended, token_bytes, pair_flops in self.layers:
            read = [attended.read(*query) for query in queries]
            num_bytes += max(*read, sum(read) - num_repeated, 0.0) * token_bytes
            num_flops += sum(attended.attended(*query) for query in queries) * pair_flops
        return linear_s + self.roofline.seconds(num_bytes, num_flops)
