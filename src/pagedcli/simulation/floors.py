"""The shortest time that a card's memory and arithmetic allow for a step: a bound, never a prediction.

Linear layers and attention each take the larger of bytes over bandwidth and operations over the peak. Every weight is
read once per step, each distinct token of K and V once. Of a mixture of experts only as many as one token needs are
read. Layers with a sliding window count as if they had no attention.
"""

from dataclasses import dataclass

from pagedcli.core.budget import ITEMSIZE, ModelSizes, head_bytes
from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.planning.cards import Card


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Times the steps of one model on one card. Called with a scheduled step; gives nanoseconds."""

    card: Card
    layer_weights: int  # read for each step, over all layers
    head_weights: int  # of the output layer, used for sampled tokens
    itemsize: float  # bytes per weight
    kv_token_bytes: int  # K and V of one token, over the layers without a window
    pair_flops: int  # of attention, for one query token and one cached token, over these layers

    @classmethod
    def of(cls, sizes: ModelSizes, card: Card, *, dtype: str, kv_dtype: str, num_windowed: int = 0) -> "StepFloor":
        num_layers = sizes.num_layers - num_windowed
        return cls(
            card,
            active_weights(sizes),
            sizes.vocab_size * sizes.hidden_size,
            ITEMSIZE[dtype],
            2 * num_layers * sizes.num_kv_heads * head_bytes(sizes.head_dim, kv_dtype),
            4 * num_layers * sizes.num_heads * sizes.head_dim,
        )

    def __call__(self, work: ScheduledStep, scheduler: Scheduler) -> int:
        num_tokens = num_sampled = num_cached = num_pairs = 0
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            end = seq.num_computed_tokens + num_new
            num_tokens += num_new
            num_sampled += end == seq.num_tokens
            num_cached += end
            num_pairs += num_new * end - num_new * (num_new - 1) // 2
        distinct = min(num_cached, self._distinct_tokens(work, scheduler))
        linear = self._time_s(
            (self.layer_weights + (self.head_weights if num_sampled else 0)) * self.itemsize,
            2 * (self.layer_weights * num_tokens + self.head_weights * num_sampled),
        )
        return round(1e9 * (linear + self._time_s(distinct * self.kv_token_bytes, num_pairs * self.pair_flops)))

    def _time_s(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.card.read_bytes_per_s, num_flops / self.card.flop_per_s)

    @staticmethod
    def _distinct_tokens(work: ScheduledStep, scheduler: Scheduler) -> int:
        """At least so many different tokens are in the blocks of the step's sequences, in layers without a window:
        blocks are full but for the last one of a sequence."""
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


def active_weights(sizes: ModelSizes) -> int:
    """Elements of the linear layers that one token passes through, without the output layer."""
    width, experts = sizes.hidden_size, sizes.experts
    attention = width * 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim
    dense = 3 * width * sizes.intermediate_size
    if experts is None:
        return sizes.num_layers * (attention + dense)
    sparse = experts.num_experts * width + experts.num_per_token * 3 * width * experts.intermediate_size
    sparse += 3 * width * (experts.shared_intermediate_size or 0)
    num_dense = len(experts.dense_layers)
    return sizes.num_layers * attention + num_dense * dense + (sizes.num_layers - num_dense) * sparse
