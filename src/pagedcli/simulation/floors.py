"""The shortest time that a card's memory and arithmetic allow for a step: a bound, never a prediction.

Linear layers and attention each take the larger of bytes over bandwidth and operations over the peak. Every weight is
read once per step, each distinct token of K and V once. Of a mixture of experts only as many as one token needs are
read. Layers with a sliding window count as if they had no attention.
"""

from dataclasses import dataclass

from pagedcli.core.budget import head_bytes
from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.models.footprint import Footprint
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import Roofline


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Times the steps of one model on one card. Called with a scheduled step; gives nanoseconds."""

    roofline: Roofline
    weights: Footprint
    kv_token_bytes: int  # K and V of one token, over the layers without a window
    pair_flops: int  # FLOPs of attention for one query token and one cached token, over these layers

    @classmethod
    def of(cls, spec: ModelSpec, weights: Footprint, roofline: Roofline, *, kv_dtype: str) -> "StepFloor":
        """`spec`: the sizes of the rank whose `weights` these are."""
        own = spec.num_kv_heads, spec.head_dim
        layers = [layer for layer in spec.attention_layers if layer.window is None]
        heads = [(layer.heads or own, layer.source is None) for layer in layers]
        token_bytes = sum(2 * count * head_bytes(size, kv_dtype) for (count, size), keeps in heads if keeps)
        return cls(roofline, weights, token_bytes, sum(4 * spec.num_heads * size for (_, size), _ in heads))

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        num_tokens = num_sampled = num_cached = num_pairs = 0
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            end = seq.num_computed_tokens + num_new
            num_tokens += num_new
            num_sampled += end == seq.num_tokens
            num_cached += end
            num_pairs += num_new * end - num_new * (num_new - 1) // 2
        distinct = min(num_cached, self._distinct_tokens(work, scheduler))
        layers, head = self.weights.active_parameters, self.weights.head
        linear = self.roofline.seconds(
            self.weights.active_bytes(1) + (head.num_bytes if num_sampled else 0),
            2 * (layers * num_tokens + head.parameters * num_sampled),
        )
        attention = self.roofline.seconds(distinct * self.kv_token_bytes, num_pairs * self.pair_flops)
        return round(1e9 * (linear + attention))

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
