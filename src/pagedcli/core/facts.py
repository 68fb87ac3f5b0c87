"""What a run did, in counts: one record for the engine, which counts while it runs, and for views of its events.

Used by EngineCore and views.whole_run, which call the same methods, and by all that prints the figures of a run.
"""

from collections import Counter
from dataclasses import dataclass, field, fields

from pagedcli.core.limits import Limits
from pagedcli.events import DraftSource

_LIMITS = ("block_size", "max_num_seqs", "prefix_caching")
_POOL = ("num_blocks", "peak_used_blocks", "num_state_slots", "peak_used_state_slots")
_LAST = ("num_used_blocks", "_num_waiting")
_LARGEST = ("longest_shared", "peak_waste", "ideal_of")


@dataclass(slots=True)
class RunFacts:
    """Counts of a run so far: tokens, unless another unit is named."""

    block_size: int = 16
    num_blocks: int = 0  # blocks of the pool
    max_num_seqs: int = 0  # sequences
    prefix_caching: bool = True
    num_steps: int = 0  # steps, failed ones included
    num_failed_steps: int = 0  # steps
    num_sequences: int = 0  # sequences that were added: all samples and beams
    # the first prefix lookup of each request
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # tokens found in the cache then, or while the prompt was computed in chunks
    num_disk_tokens: int = 0  # the part read from the prefix store
    longest_shared: int = 0  # longest beginning of a prompt that an earlier sequence has, too
    num_ideal: int = 0  # hits if each block is computed only once
    num_partial_tokens: int = 0  # shared, but less than a block
    admitted: Counter[str] = field(default_factory=Counter)  # shared, revived and fresh blocks; empty: an older trace
    ideal_of: int | None = None  # num_ideal counts at least this many of the newest tokens; None: all
    # work
    num_computed_tokens: int = 0  # tokens that the model computed, recomputed ones included
    num_generated_tokens: int = 0  # tokens of dropped beams included
    num_recomputed_tokens: int = 0  # computed, dropped by a preemption and computed again
    drafted: Counter[DraftSource] = field(default_factory=Counter)  # source -> guessed tokens, computed to check them
    accepted: Counter[DraftSource] = field(default_factory=Counter)  # source -> of these, the right ones
    num_again_tokens: int = 0  # computed once more, as a recurrent state had not seen them when they were guessed
    num_undrafted: int = 0  # sequences with beam search, in a run with guesses; not in events
    num_preemptions: int = 0  # sequences
    num_evictions: int = 0  # blocks
    # the pool, as the forward pass of a step sees it
    num_used_blocks: int = 0  # blocks, in the last step
    peak_used_blocks: int = 0  # blocks
    waste_sum: float = 0.0  # sum over the steps of the share of slots in use that hold no token
    num_waste_steps: int = 0  # steps in which blocks were in use
    peak_waste: float | None = None
    # slots of recurrent state, and snapshots in them
    num_state_slots: int = 0
    peak_used_state_slots: int = 0  # held by sequences, as the forward pass of a step sees them
    num_snapshots: int = 0  # made
    num_dropped_snapshots: int = 0  # dropped because no slot was empty
    num_snapshot_hits: int = 0  # sequences that continued from one
    # time, without that of observers; summed over sequences where they run or wait
    schedule_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    waiting_ns: Counter[str] = field(default_factory=Counter)  # reason -> time
    _num_waiting: int = 0  # sequences, in the last step

    @classmethod
    def of(cls, limits: Limits) -> "RunFacts":
        """The facts of an engine with these limits before its first step."""
        made = cls(limits.block_size, limits.num_blocks or 0, limits.max_num_seqs, limits.enable_prefix_caching)
        made.num_state_slots = limits.num_state_slots or 0
        return made

    @property
    def num_ideal_tokens(self) -> int:
        """Hits if each block is computed only once, with what was read from a prefix store."""
        return max(self.num_ideal, self.num_cached_tokens)

    @property
    def num_drafted_tokens(self) -> int:
        """Guessed, and computed to check them."""
        return sum(self.drafted.values())

    @property
    def num_accepted_tokens(self) -> int:
        """The right ones among them."""
        return sum(self.accepted.values())

    @property
    def mean_waste(self) -> float | None:
        """The mean of the steps: share of the slots in use that held no token."""
        return self.waste_sum / self.num_waste_steps if self.num_waste_steps else None

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Time of the model per computed token."""
        return self.forward_ns * 1e-9 / max(1, self.num_computed_tokens)

    @property
    def steps_ns(self) -> int:
        """Time in steps."""
        return self.schedule_ns + self.forward_ns + self.sample_ns

    @property
    def num_computed_given(self) -> int:
        """Computed tokens that were given: of prompts and continuations, recomputed ones included."""
        num_wrong = self.num_drafted_tokens - self.num_accepted_tokens  # guesses
        return self.num_computed_tokens - self.num_generated_tokens - num_wrong - self.num_again_tokens

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds by reason, summed over sequences."""
        return {reason: ns * 1e-9 for reason, ns in self.waiting_ns.items()}

    # ------------------------------------------------------------------ counting

    def count_lookup(self, num_tokens: int, num_asked: int, num_cached: int, num_shared: int | None) -> None:
        """Count the first lookup of a request. `num_asked`: full blocks that it asks for. `num_shared`: how much of its
        beginning an earlier sequence has, cached or not; None: unknown."""
        self.num_prompt_tokens += num_tokens
        self.num_cached_tokens += num_cached
        if num_shared is not None:
            self.longest_shared = max(self.longest_shared, num_shared)
            self.num_partial_tokens += num_shared % self.block_size
            num_ideal = min(min(num_shared // self.block_size, num_asked) * self.block_size, num_tokens - 1)
            self.num_ideal += max(num_ideal, num_cached)

    def count_scheduled(
        self,
        *,
        num_new_tokens: int,
        num_used_blocks: int,
        num_unfilled_slots: int,
        num_waiting: int,
        num_used_state_slots: int = 0,
    ) -> None:
        """Count what a step computes, with the pool and the sequences as its forward pass sees them."""
        self.num_computed_tokens += num_new_tokens
        self.num_used_blocks = num_used_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)
        if num_used_blocks:
            waste = num_unfilled_slots / (num_used_blocks * self.block_size)
            self.waste_sum += waste
            self.num_waste_steps += 1
            self.peak_waste = waste if self.peak_waste is None else max(self.peak_waste, waste)
        self.peak_used_state_slots = max(self.peak_used_state_slots, num_used_state_slots)
        self._num_waiting = num_waiting

    def count_again(self, num_tokens: int) -> None:
        """Count tokens that a step computes once more for a recurrent state."""
        self.num_again_tokens += num_tokens
        self.num_computed_tokens += num_tokens

    def count_step(
        self, *, blocked: str | None, num_used_blocks: int, schedule_ns: int, forward_ns: int, sample_ns: int
    ) -> None:
        """Count a step that has ended. `blocked`: why the first in the queue was not started in it."""
        self.num_steps += 1
        self.num_used_blocks = num_used_blocks
        self.schedule_ns += schedule_ns
        self.forward_ns += forward_ns
        self.sample_ns += sample_ns
        if blocked is not None:
            self.waiting_ns[blocked] += self._num_waiting * (schedule_ns + forward_ns + sample_ns)

    def count_failed_step(self) -> None:
        """Count a step that raised: its time is unknown, and every block is free."""
        self.num_steps += 1
        self.num_failed_steps += 1
        self.num_used_blocks = 0

    def add(self, other: "RunFacts", *, same_pool: bool) -> None:
        """Add the counts of a later part of this run, or without `same_pool` those of another engine next to it."""
        for name in (each.name for each in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            if name in _LIMITS:
                value = others if other.num_blocks else mine
            elif name in _LAST and same_pool:
                value = others
            elif name in _LARGEST or (same_pool and name in _POOL):
                value = max((each for each in (mine, others) if each is not None), default=None)
            elif isinstance(mine, dict):
                value = type(mine)({key: mine.get(key, 0) + others.get(key, 0) for key in {**mine, **others}})
            else:
                value = mine + others
            setattr(self, name, value)
