"""Statistics of a run, each with its window and unit: hit rates, recomputed work, memory. Views of PoolState.

Used by the views and the report; draws nothing.
"""

from array import array
from collections import deque
from copy import copy
from dataclasses import dataclass, field, replace
from typing import get_args

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import group_uses

ROLLING_STEPS = 100


@dataclass(slots=True)
class HitCounts:
    """Totals of prefix lookups. Rates are None if there was nothing to hit."""

    num_lookups: int = 0
    tokens: int = 0  # tokens of the sequences that looked up
    tokens_hit: int = 0
    blocks_asked: int = 0  # full blocks
    blocks_hit: int = 0

    def add(self, event: ev.PrefixLookedUp, sign: int = 1) -> None:
        self.tokens_hit += sign * event.tokens_hit
        self.blocks_hit += sign * event.blocks_hit
        if event.reason != "continued":
            self.num_lookups += sign
            self.tokens += sign * event.num_tokens
            self.blocks_asked += sign * event.blocks_asked

    @property
    def token_rate(self) -> float | None:
        # more than 1 in a rolling window that has the later reuse, but not the lookup
        return min(1.0, self.tokens_hit / self.tokens) if self.tokens else None

    @property
    def block_rate(self) -> float | None:
        return min(1.0, self.blocks_hit / self.blocks_asked) if self.blocks_asked else None


@dataclass(slots=True)
class LookupHits:
    """A window's lookups, with requests' first and later lookups kept separate.

    A first lookup can only hit what other requests computed; one after a preemption, or of another sample, finds the
    request's own blocks, which is not sharing between requests. A continued lookup (blocks that a chunked prompt reuses
    later) adds hits but no tokens: these were counted at admission.
    """

    from_others: HitCounts = field(default_factory=HitCounts)
    own: HitCounts = field(default_factory=HitCounts)

    def add(self, event: ev.PrefixLookedUp, *, own: bool, sign: int = 1) -> None:
        """`own`: the sequence repeats its request (SeqState.repeats)."""
        (self.own if own else self.from_others).add(event, sign)

    def copy(self) -> "LookupHits":
        return LookupHits(copy(self.from_others), copy(self.own))


_Lookups = list[tuple[ev.PrefixLookedUp, bool]]  # each, and whether its sequence repeats its request
_COUNTED: dict[type[ev.Event], str] = {
    ev.RequestAdded: "num_sequences", ev.BlockEvicted: "num_evictions", ev.CheckpointMade: "num_snapshots",
    ev.CheckpointDropped: "num_dropped_snapshots", ev.RequestPreempted: "num_preemptions",
}  # fmt: skip


class RunStats(View):
    """Totals of the run and of its last ROLLING_STEPS steps."""

    def __init__(self) -> None:
        self.facts = RunFacts()
        self.run = LookupHits()
        self.rolling = LookupHits()
        self.num_dropped_tokens = 0
        self.num_duplicate_blocks = 0  # filled while a block with the same hash was already cached
        self.num_compared = 0  # first lookups whose shared tokens the engine has counted
        self.busy_ns = 0  # steps without the time of observers
        self._lookups: _Lookups = []  # those of the current step
        self._window: deque[tuple[int, int, _Lookups]] = deque()  # per step: busy ns, tokens, lookups

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        part = RunFacts.of(Limits.of(event))
        if self.facts.num_blocks:
            self.facts.add(part, same_pool=True)
        else:
            self.facts = part

    def handlers(self, event_type: type[ev.Event]) -> list[Handler]:
        count = [self._count] if event_type in _COUNTED else []
        return [*count, *super().handlers(event_type)]

    def _count(self, event: ev.Event, state: PoolState) -> None:
        name = _COUNTED[type(event)]
        setattr(self.facts, name, getattr(self.facts, name) + 1)

    def on_state_slots_made(self, event: ev.StateSlotsMade, state: PoolState) -> None:
        self.facts.num_state_slots = event.num_slots

    def on_checkpoint_looked_up(self, event: ev.CheckpointLookedUp, state: PoolState) -> None:
        self.facts.num_snapshot_hits += event.slot_id is not None

    def on_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        found = state.hash_to_block_id
        filled = zip(event.block_ids, event.hashes, strict=True)
        self.num_duplicate_blocks += sum(found[block_hash] != block_id for block_id, block_hash in filled)

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        own = state.seqs[event.seq_id].repeats
        if not own and event.disk_tokens is not UNSET:
            self.facts.num_disk_tokens += event.disk_tokens
        if not own and event.reason == "continued":
            self.facts.num_cached_tokens += event.tokens_hit
        elif not own:
            self.facts.count_lookup(event.num_tokens, event.blocks_asked, event.tokens_hit, event.shared_tokens)
            self.num_compared += event.shared_tokens is not None
            if (taken := event.blocks_taken) is not None:
                self.facts.admitted.update(taken)
        self.run.add(event, own=own)
        self.rolling.add(event, own=own)
        self._lookups.append((event, own))

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self.facts.num_recomputed_tokens = state.num_recomputed_tokens
        self.facts.count_again(state.num_again_tokens - self.facts.num_again_tokens)
        self.facts.count_scheduled(
            num_new_tokens=sum(event.num_new_tokens),
            num_used_blocks=state.num_used_blocks,
            num_unfilled_slots=state.num_unfilled_slots(),
            num_used_state_slots=0 if state.slots is None else state.slots.num_held,
            num_waiting=event.num_waiting,
        )

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        self.facts.num_generated_tokens += len(event.seq_ids)

    def on_tokens_drafted(self, event: ev.TokensDrafted, state: PoolState) -> None:
        for source, num_drafted in zip(event.sources, event.num_drafted, strict=True):
            self.facts.drafted[source] += num_drafted

    def on_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        self.facts.accepted[state.seqs[event.seq_id].draft_source] += event.num_accepted
        self.facts.num_generated_tokens += event.num_accepted

    def on_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        self.num_dropped_tokens += event.num_tokens_dropped

    def on_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        waiting = None if state.step is None else state.step.waiting
        self.facts.count_step(
            blocked=None if waiting is None else waiting.reason,
            num_used_blocks=state.num_used_blocks,
            schedule_ns=event.schedule_ns,
            forward_ns=event.forward_ns,
            sample_ns=event.sample_ns,
        )
        self._end_step(state)

    def _end_step(self, state: PoolState) -> None:
        step = state.step
        assert step is not None
        self.busy_ns += step.busy_ns
        self._window.append((step.busy_ns, step.num_sampled, self._lookups))
        self._lookups = []
        if len(self._window) > ROLLING_STEPS:
            for lookup, own in self._window.popleft()[2]:
                self.rolling.add(lookup, own=own, sign=-1)

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self.facts.count_failed_step()
        self._end_step(state)

    def copy(self) -> "RunStats":
        other = RunStats.__new__(RunStats)
        other.__dict__.update(self.__dict__)
        other.facts = replace(self.facts, waiting_ns=self.facts.waiting_ns.copy())
        other.run = self.run.copy()
        other.rolling = self.rolling.copy()
        other._window, other._lookups = self._window.copy(), self._lookups.copy()
        return other

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of the rolling window."""
        ns = sum(entry[0] for entry in self._window)
        return sum(entry[1] for entry in self._window) * 1e9 / ns if ns else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of the running sequences at one moment, in blocks and bytes."""

    used_blocks: int
    used_bytes: int
    unfilled_slots: int  # slots of blocks in use without a token
    unfilled_bytes: int
    unfilled_share: float | None  # share of the slots in use
    saved_blocks: int  # saved by sharing
    saved_bytes: int
    passed_blocks: int  # released or never taken because no later token sees them; without windows they would be held
    passed_bytes: int
    unused_bytes: int  # bytes of blocks in use that the layers of their group leave
    contiguous_bytes: int  # a cache that reserves max_model_len for each running sequence would take
    contiguous_times: float | None  # multiple of what is in use


def memory_use(state: PoolState) -> MemoryUse:
    """The current cost of partial blocks and gain of sharing."""
    engine = state.started
    used, unfilled = state.num_used_blocks, state.num_unfilled_slots()
    slot_bytes = engine.block_bytes / engine.block_size
    used_bytes = used * engine.block_bytes
    contiguous = round(state.num_running * engine.max_model_len * slot_bytes) * state.num_groups
    passed = sum(seq.num_passed_blocks for seq in state.running())
    return MemoryUse(
        used_blocks=used,
        used_bytes=used_bytes,
        unfilled_slots=unfilled,
        unfilled_bytes=round(unfilled * slot_bytes),
        unfilled_share=unfilled / (used * engine.block_size) if used else None,
        saved_blocks=state.num_blocks_saved,
        saved_bytes=state.num_blocks_saved * engine.block_bytes,
        passed_blocks=passed,
        passed_bytes=passed * engine.block_bytes,
        unused_bytes=sum(use.unused_bytes or 0 for use in group_uses(state)) if state.num_groups > 1 else 0,
        contiguous_bytes=contiguous,
        contiguous_times=contiguous / used_bytes if used_bytes else None,
    )


def pool_counts(state: PoolState) -> dict[str, int]:
    """Blocks in use, cached and free, and empty; they add up to the total."""
    return {
        "in_use": state.num_used_blocks,
        "shared": state.num_shared_blocks,
        "cached": state.num_cached_blocks,
        "empty": state.num_empty_blocks,
        "total": state.num_blocks,
    }


WAITING_REASONS = (None, *get_args(ev.WaitingReason))


class StepSeries(View):
    """One number per step and column, for charts. The pool is as the step's forward pass sees it."""

    COLUMNS = (
        "start_ns", "busy_ns", "used", "shared", "cached", "running", "waiting", "new_tokens", "sampled",
        "lookup_tokens", "hit_tokens", "self_hit_tokens", "unfilled_slots", "saved", "preempted", "evicted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.columns = {name: array("q") for name in self.COLUMNS}
        self.first_step = 0
        self.blocked = array("b")  # per step why the first in the queue was not scheduled, in WAITING_REASONS
        self._scheduled: tuple[int, ...] = ()  # the pool as the present step was scheduled; empty: none was
        self._hits = LookupHits()  # hits of the current step

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        self._hits.add(event, own=state.seqs[event.seq_id].repeats)

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self._see(state, sum(event.num_new_tokens))

    def _see(self, state: PoolState, num_new_tokens: int) -> None:
        running = state.num_running
        self._scheduled = (
            state.num_used_blocks, state.num_shared_blocks, state.num_cached_blocks, running,
            len(state.seqs) - running, num_new_tokens,
        )  # fmt: skip
        self._unfilled, self._saved = state.num_unfilled_slots(), state.num_blocks_saved

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        if not self._scheduled:  # it failed before: the empty pool stands for it
            self._see(state, 0)
        self._append(event, state)

    def _append(self, event: ev.EngineStarted | ev.StepFinished | ev.StepFailed, state: PoolState) -> None:
        """Append the scheduled step, once it has ended; one that a killed run left open, when the next part starts."""
        step = state.step
        if step is None or not self._scheduled:
            return
        hits, self._hits = self._hits, LookupHits()
        row = (
            step.start_ns, step.busy_ns, *self._scheduled, step.num_sampled,
            hits.from_others.tokens, hits.from_others.tokens_hit, hits.own.tokens_hit,
            self._unfilled, self._saved, len(step.preemptions), step.num_evicted,
        )  # fmt: skip
        self._scheduled = ()
        if not len(self):
            self.first_step = step.step
        self.blocked.append(WAITING_REASONS.index(None if step.waiting is None else step.waiting.reason))
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    on_engine_started = on_step_finished = _append
