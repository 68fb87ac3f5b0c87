"""Every law that a whole trace must keep: those of a pool (laws.py), and those of our scheduler and prefix cache.

Used by `pagedcli replay --check` and by the engine's tests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from pagedcli.errors import TraceError
from pagedcli.events import (
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    EngineStarted,
    Event,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestWaiting,
    StepFinished,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedcli.inspection.dispatch import Handler, View, handlers_of
from pagedcli.inspection.fold import EventList, EventSource, Fold
from pagedcli.inspection.laws import PoolLaws, refuse
from pagedcli.inspection.state import PoolState


@dataclass(frozen=True, slots=True)
class CheckedTrace:
    """A trace without a violation."""

    num_events: int
    num_steps: int
    state: PoolState  # at its end
    notes: tuple[str, ...]


def check_trace(source: EventSource) -> CheckedTrace:
    """Fold a trace and verify every law. Raises TraceError with the place of the first violation."""
    checker = TraceChecker()
    for _ in checker.fold.steps(source):
        pass
    return checker.result(source.notes)


def check_events(events: Iterable[Event]) -> CheckedTrace:
    """The same for events in memory; the message names the number of the event, from 1."""
    return check_trace(EventList(events))


class TraceChecker:
    """Folds events into `state` and raises TraceError at the first that breaks a law."""

    def __init__(self) -> None:
        laws = TraceLaws()
        self.fold = Fold(PoolState(), laws, laws=laws)
        self.state = self.fold.state

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        self.fold(event)

    def result(self, notes: Iterable[str]) -> CheckedTrace:
        """What was checked. A trace may end within a step: that of a killed run does."""
        state, notes = self.state, list(notes)
        if state.engine is None:
            raise TraceError("no events: not a trace")
        step = state.step
        if step is not None and step.end_ns is None:
            notes.append(f"ends within step {step.step}: the run was cut off")
        elif state.seqs:
            notes.append(f"ends with {len(state.seqs)} unfinished sequences: the run was cut off")
        return CheckedTrace(state.num_events, 0 if step is None else step.step + 1, state, tuple(notes))


class TraceLaws(View[PoolState]):
    """`check`, and its methods `before_...`, see the state before it has the event; `apply`, and `on_...`, after."""

    _before: ClassVar[dict[type[Event], Handler]]

    def __init__(self) -> None:
        self._pool = PoolLaws()
        self._last_ns = 0
        self._forget()

    def _forget(self) -> None:
        self._lookups: dict[int, PrefixLookedUp] = {}  # the last of each running sequence
        self._unreleased: set[int] = set()  # finished sequences that still hold blocks
        self._token_ids: dict[int, list[int]] = {}  # of live sequences, where recorded
        self._block_tokens: dict[int, tuple[int, ...]] = {}  # of full blocks, where recorded

    def check(self, event: Event, state: PoolState) -> None:
        """Raises TraceError if the event breaks a law in this state."""
        if type(event) is EngineStarted:
            self._forget()
        self._pool.check(event, state)
        before = self._before.get(type(event))
        if before is not None:
            before(self, event, state)

    # ------------------------------------------------------------------ requests

    def before_request_added(self, event: RequestAdded, state: PoolState) -> None:
        if event.num_prompt_tokens < 1 or event.max_new_tokens < 1:
            refuse(event, f"seq {event.seq_id} has no prompt tokens or may generate none")
        if event.token_ids is not None:
            if len(event.token_ids) != event.num_prompt_tokens:
                refuse(event, f"{len(event.token_ids)} token ids for {event.num_prompt_tokens} prompt tokens")
            self._token_ids[event.seq_id] = list(event.token_ids)

    def before_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        seq = state.seqs.get(event.seq_id)
        if seq is not None and event.reason == "length" and event.num_output_tokens != seq.max_new_tokens:
            refuse(event, f"seq {event.seq_id} ended by length, but not at its {seq.max_new_tokens} new tokens")

    def on_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        if state.finished[event.seq_id].block_table:
            self._unreleased.add(event.seq_id)
        self._lookups.pop(event.seq_id, None)
        self._token_ids.pop(event.seq_id, None)

    def on_blocks_released(self, event: BlocksReleased, state: PoolState) -> None:
        self._unreleased.discard(event.seq_id)

    def before_request_preempted(self, event: RequestPreempted, state: PoolState) -> None:
        if event.for_seq_id not in state.seqs or event.num_blocks_needed < 1:
            refuse(event, f"for {event.num_blocks_needed} blocks of seq {event.for_seq_id}, which is not running")

    def before_request_waiting(self, event: RequestWaiting, state: PoolState) -> None:
        engine = state.engine
        assert engine is not None
        waiting = state.waiting()
        if not waiting or waiting[0].seq_id != event.seq_id:
            refuse(event, f"seq {event.seq_id} is not the first of the waiting queue")
        if event.num_free_blocks != state.num_free_blocks:
            refuse(event, f"{state.num_free_blocks} blocks are free, not {event.num_free_blocks}")
        if event.reason == "free_blocks" and event.num_blocks_needed <= state.num_free_blocks:
            refuse(event, f"{event.num_blocks_needed} blocks needed, {state.num_free_blocks} free: they suffice")
        if event.reason == "max_num_seqs" and len(state.running()) < engine.max_num_seqs:
            refuse(event, f"{len(state.running())} sequences run, the limit is {engine.max_num_seqs}")

    # ------------------------------------------------------------------ the prefix cache

    def before_prefix_looked_up(self, event: PrefixLookedUp, state: PoolState) -> None:
        seq, engine = state.seqs.get(event.seq_id), state.engine
        assert engine is not None
        if seq is None:
            return  # the fold says so
        if event.num_tokens != seq.num_tokens:
            refuse(event, f"seq {seq.seq_id} has {seq.num_tokens} tokens, not {event.num_tokens}")
        if event.reason != "continued" and (event.reason == "resumed") != (seq.num_preemptions > 0):
            refuse(event, f"{event.reason}, but seq {seq.seq_id} was preempted {seq.num_preemptions} times")
        first = seq.num_computed_tokens // engine.block_size if event.reason == "continued" else 0
        if event.first_miss != (first + event.blocks_hit if event.blocks_hit < event.blocks_asked else None):
            refuse(
                event, f"hit {event.blocks_hit} of {event.blocks_asked} blocks, but first miss is {event.first_miss}"
            )
        if (event.miss_reason == "caching_off") == engine.enable_prefix_caching:
            refuse(event, f"prefix caching is {'on' if engine.enable_prefix_caching else 'off'}")
        if not engine.enable_prefix_caching and event.blocks_hit:
            refuse(event, "a hit without prefix caching")
        if (event.missing_hash is not None) != (event.miss_reason == "no_match"):
            refuse(event, f"miss reason {event.miss_reason} with missing hash {event.missing_hash}")
        if not 0 <= event.partial_tokens <= engine.block_size:
            refuse(event, f"{event.partial_tokens} partial tokens in a block of {engine.block_size}")
        self._lookups[event.seq_id] = event

    def before_blocks_reused(self, event: BlocksReused, state: PoolState) -> None:
        token_ids, size = self._token_ids.get(event.seq_id), state.block_size
        seq = state.seqs.get(event.seq_id)
        if token_ids is None or seq is None:
            return
        for index, block_id in enumerate(event.block_ids, len(seq.block_table)):
            held = self._block_tokens.get(block_id)
            if held is not None and held != tuple(token_ids[index * size : (index + 1) * size]):
                refuse(event, f"block {block_id} holds other tokens than seq {event.seq_id} at block {index}")

    def on_blocks_filled(self, event: BlocksFilled, state: PoolState) -> None:
        size = state.block_size
        assert state.engine is not None
        if not state.engine.enable_prefix_caching:
            refuse(event, "a block was hashed without prefix caching")
        if not event.block_ids:
            refuse(event, "no blocks")
        first = state.seqs[event.seq_id].block_table.index(event.block_ids[0])
        token_ids, lookup = self._token_ids.get(event.seq_id), self._lookups.get(event.seq_id)
        for index, block_id in enumerate(event.block_ids, first):
            if token_ids is not None:
                self._block_tokens[block_id] = tuple(token_ids[index * size : (index + 1) * size])
            if lookup is not None and index == lookup.first_miss and state.hashes[block_id] != lookup.missing_hash:
                refuse(event, f"block {block_id} was looked up under hash {lookup.missing_hash}")

    # ------------------------------------------------------------------ steps

    def before_step_started(self, event: StepStarted, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns

    def before_step_scheduled(self, event: StepScheduled, state: PoolState) -> None:
        engine, num_new = state.engine, sum(event.num_new_tokens)
        assert engine is not None
        for seq in state.running():
            if seq.num_computed_tokens == seq.num_tokens:
                refuse(event, f"seq {seq.seq_id} had all tokens computed, but got no new one")
        if num_new > engine.max_num_batched_tokens:
            refuse(event, f"{num_new} tokens in one step, the budget is {engine.max_num_batched_tokens}")
        if len(set(event.seq_ids)) != len(event.seq_ids):
            refuse(event, "a sequence twice in one step")
        chunk_size = engine.chunked_prefill_size
        if chunk_size is not None and max(event.num_new_tokens, default=0) > chunk_size:
            refuse(event, f"a chunk is larger than {chunk_size} tokens")

    def on_step_scheduled(self, event: StepScheduled, state: PoolState) -> None:
        engine, size = state.engine, state.block_size
        assert engine is not None
        num_running = len(state.running())
        if num_running > engine.max_num_seqs:
            refuse(event, f"{num_running} sequences run, the limit is {engine.max_num_seqs}")
        if event.num_waiting != len(state.seqs) - num_running:
            refuse(event, f"{len(state.seqs) - num_running} sequences wait, not {event.num_waiting}")
        if (event.num_waiting > 0) != (state.step is not None and state.step.waiting is not None):
            refuse(event, f"{event.num_waiting} sequences wait, and no reason is given, or one without need")
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            if -(-seq.num_computed_tokens // size) != len(seq.block_table):
                refuse(event, f"seq {seq_id}: {seq.num_computed_tokens} tokens in {len(seq.block_table)} blocks")
            num_full = seq.num_computed_tokens // size if engine.enable_prefix_caching else 0
            for index in (num_full - 1, num_full):  # the last full one and the one being filled
                if 0 <= index < len(seq.block_table):
                    block_id = seq.block_table[index]
                    if (state.hashes[block_id] is not None) != (index < num_full):
                        refuse(event, f"block {block_id} is not {'full' if index < num_full else 'partial'}")

    def before_tokens_sampled(self, event: TokensSampled, state: PoolState) -> None:
        if event.token_ids is not None:
            if len(event.token_ids) != len(event.seq_ids):
                refuse(event, f"{len(event.token_ids)} tokens for {len(event.seq_ids)} sequences")
            for seq_id, token_id in zip(event.seq_ids, event.token_ids, strict=True):
                if seq_id in self._token_ids:
                    self._token_ids[seq_id].append(token_id)

    def on_tokens_sampled(self, event: TokensSampled, state: PoolState) -> None:
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            if seq.num_output_tokens > seq.max_new_tokens:
                refuse(event, f"seq {seq_id} has {seq.num_output_tokens} new tokens of {seq.max_new_tokens}")

    def before_step_finished(self, event: StepFinished, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns
        if self._unreleased:
            refuse(event, f"finished sequences {sorted(self._unreleased)} still hold blocks")


TraceLaws._before = handlers_of(TraceLaws, "before_")
