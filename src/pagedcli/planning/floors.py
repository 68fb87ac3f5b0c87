"""The shortest time that a machine's memory and arithmetic allow for a step: a bound, never a prediction. Used by
`simulate --gpu` and by `bench`.

Linear layers and attention each take the larger of bytes over bandwidth and operations over the peak. Every weight is
read once per step, each distinct token of K and V once, by layers with a window only those in it. Of a mixture of
experts those are read that the step's tokens go to, as many as a router without preferences picks.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from pagedcli.core.budget import head_bytes
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.steps import ScheduledStep
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline
from pagedcli.planning.step_time import AttendedLayers


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Times the steps of one model on one machine. Called with a scheduled step; gives nanoseconds. `layers` are those
    of each window with the bytes of a token's K and V, and the FLOPs of attention of one query to one token."""

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

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        pairs = list(zip(work.seqs, work.num_new_tokens, strict=True))
        num_sampled = sum(seq.num_logits(seq.num_computed_tokens + num_new) for seq, num_new in pairs)
        queries = [(seq.num_computed_tokens, num_new) for seq, num_new in pairs]
        num_repeated = max(0, sum(map(sum, queries)) - self._distinct_tokens(work, scheduler))
        return round(1e9 * self.seconds(queries, num_sampled, num_repeated=num_repeated))

    @staticmethod
    def _distinct_tokens(work: ScheduledStep, scheduler: Scheduler) -> int:
        """A lower bound on the different tokens that the step reads in layers without a window: all blocks of its
        sequences are full, except the last one of each."""
        manager, num_running = scheduler.block_manager, len(scheduler.running)
        num_full = manager.tables.windows.count(None)
        if not num_full:
            return 0
        num_blocks = manager.num_blocks - manager.num_free_blocks
        if manager.has_windows:
            num_blocks -= num_running * manager.tables.most_in_windows(scheduler.chunk_size)
        num_spans = num_blocks // num_full - num_running
        if len(work.seqs) < num_running:
            scheduled = {seq.seq_id for seq in work.seqs}
            others = (len(seq.block_table) for seq in scheduler.running if seq.seq_id not in scheduled)
            num_spans -= sum(others) // manager.num_groups
        return max(0, num_spans) * manager.block_size
