"""All invariants of a whole trace: those of a pool (laws.py), and those of our scheduler and prefix cache.

Used by `pagedcli replay --check` and by the engine's tests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

import pagedcli.events as ev
from pagedcli.core.eviction import sees_queue
from pagedcli.errors import TraceError
from pagedcli.trace.check_eviction import UNCHECKED, EvictionLaws
from pagedcli.trace.check_prefix import PrefixLaws
from pagedcli.trace.dispatch import Handler, handlers_of
from pagedcli.trace.fold import EventSource, Fold
from pagedcli.trace.laws import PoolLaws, refuse, tables_of
from pagedcli.trace.state import PoolState

_CLOCK_SLACK_NS = 1_000_000_000  # a process may be suspended between reading the clocks of a step and of its parts


@dataclass(frozen=True, slots=True)
class CheckedTrace:
    """The result for a trace without a violation."""

    num_events: int
    num_steps: int
    state: PoolState  # at its end
    notes: tuple[str, ...]


def check_trace(source: EventSource) -> CheckedTrace:
    """Fold a trace and verify every law. Raises TraceError with the location of the first violation."""
    checker = TraceChecker()
    for _ in checker.fold.steps(source):
        pass
    return checker.result(source.notes)


class TraceChecker:
    """Folds events into `state` and raises TraceError at the first that breaks a law."""

    def __init__(self) -> None:
        laws = TraceLaws()
        self.fold = Fold(PoolState(), laws, EvictionLaws(), laws=laws)
        self.state = self.fold.state

    def apply(self, event: ev.Event) -> None:
        """Check and apply the next event."""
        self.fold(event)

    def result(self, notes: Iterable[str]) -> CheckedTrace:
        """The result. A trace may end within a step, as that of a killed run does."""
        state, notes = self.state, list(notes)
        if state.engine is None:
            raise TraceError("no events: not a trace")
        step = state.step
        if step is not None and step.end_ns is None:
            notes.append(f"ends within step {step.step}: the run was cut off")
        elif state.seqs:
            notes.append(f"ends with {len(state.seqs)} unfinished sequences: the run was cut off")
        if sees_queue(state.engine.eviction):
            notes.append(UNCHECKED.format(state.engine.eviction))
        return CheckedTrace(state.num_events, 0 if step is None else step.step + 1, state, tuple(notes))


class TraceLaws(PrefixLaws):
    """`check` (methods `before_...`) runs before the event is applied to the state, `apply` (`on_...`) after it."""

    _before: ClassVar[dict[type[ev.Event], Handler]]

    def __init__(self) -> None:
        self._pool = PoolLaws()
        self._last_ns = 0
        self._forget()

    def _forget(self) -> None:
        self._forget_prefixes()
        self._just_sampled: set[int] = set()  # sequences, in this step
        self._released: tuple[int, ...] = ()  # by the last BlocksReleased
        self._unreleased: set[int] = set()  # finished sequences that still hold blocks

    def check(self, event: ev.Event, state: PoolState) -> None:
        """Raises TraceError if the event breaks a law in this state."""
        if isinstance(event, ev.EngineStarted):
            self._forget()
        self._pool.check(event, state)
        before = self._before.get(type(event))
        if before is not None:
            before(self, event, state)

    # ------------------------------------------------------------------ requests

    def before_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        if event.token_ids is not None:
            if len(event.token_ids) != event.num_prompt_tokens:
                refuse(event, f"{len(event.token_ids)} token ids for {event.num_prompt_tokens} prompt tokens")
            self._check_ids(event, event.token_ids)
            self._token_ids[event.seq_id] = list(event.token_ids)

    def _check_ids(self, event: ev.Event, token_ids: tuple[int, ...]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < 1 << 63:
            refuse(event, "a token id outside any vocabulary")

    def before_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq = state.seqs[event.seq_id]
        if event.reason == "length" and event.num_output_tokens != seq.max_new_tokens:
            refuse(event, f"seq {event.seq_id} ended by length, but not at its {seq.max_new_tokens} new tokens")
        if (event.reason == "abort") == (event.seq_id in self._just_sampled):
            refuse(event, f"seq {event.seq_id} ended by {event.reason}, but {_got(event.reason != 'abort')}")

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq, token_ids = state.finished[event.seq_id], self._token_ids.get(event.seq_id)
        if event.reason == "error" or token_ids is None:
            self._seen = None  # a sequence whose callback failed is not remembered
        elif self._seen is not None and event.reason != "abort" and not seq.salted:
            self._seen.add(token_ids[:-1])
        if state.finished[event.seq_id].block_table:
            self._unreleased.add(event.seq_id)
        self._lookups.pop(event.seq_id, None)
        self._token_ids.pop(event.seq_id, None)
        self._chains.pop(event.seq_id, None)

    def before_blocks_released(self, event: ev.BlocksReleased, state: PoolState) -> None:
        self._released = event.block_ids

    def on_blocks_released(self, event: ev.BlocksReleased, state: PoolState) -> None:
        self._unreleased.discard(event.seq_id)

    def before_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        if event.for_seq_id not in state.seqs or event.num_blocks_needed < 1:
            refuse(event, f"for {event.num_blocks_needed} blocks of seq {event.for_seq_id}, which is not running")
        for_seq, size = state.seqs[event.for_seq_id], state.block_size
        table, num_groups = for_seq.block_table, state.num_groups
        index = for_seq.num_computed_tokens // size * num_groups
        current = table[index] if index < len(table) else None
        shared = current is not None and state.hashes[current] is None
        shared = shared and current is not None and state.ref_counts[current] + (current in self._released) > 1
        needed = (-(-(for_seq.num_computed_tokens + 1) // size) + shared) * num_groups - len(table)
        if event.num_blocks_needed != needed:
            refuse(event, f"seq {for_seq.seq_id} needed {needed} blocks for its next token")

    def before_request_waiting(self, event: ev.RequestWaiting, state: PoolState) -> None:
        engine = state.started
        waiting, seq = state.waiting(), state.seqs[event.seq_id]
        running, step = state.running(), state.step
        completes = seq.beam_width is not None and any(each.request_id == seq.request_id for each in running)
        if not waiting or (waiting[0] is not seq and not completes):
            refuse(event, f"seq {event.seq_id} is not the first of the waiting queue")
        if event.num_free_blocks != state.num_free_blocks:
            refuse(event, f"{state.num_free_blocks} blocks are free, not {event.num_free_blocks}")
        if event.reason == "free_blocks" and event.num_blocks_needed <= state.num_free_blocks:
            refuse(event, f"{event.num_blocks_needed} blocks needed, {state.num_free_blocks} free: they suffice")
        num_rows = sum(each.num_rows for each in running) + seq.num_rows
        if step is not None and step.preemptions:
            expected = event.reason == "preemption"
        elif event.reason == "preemption":  # async scheduling: preemption waits until the tokens in flight are known
            widest = max((each.beam_width or 1 for each in running), default=1)
            expected = state.num_free_blocks <= widest * state.num_groups
        else:
            expected = (event.reason == "max_num_seqs") == (num_rows > engine.max_num_seqs)
        if not expected:
            refuse(event, f"{event.reason}, with {len(running)} sequences running, at most {engine.max_num_seqs}")
        self._check_needed(event, state)

    def _check_needed(self, event: ev.RequestWaiting, state: PoolState) -> None:
        """Check the number of blocks needed: the sequence's, minus its prefix blocks in use. Exact with tokens."""
        seq, size = state.seqs[event.seq_id], state.block_size
        tables = tables_of(state)
        if tables.has_windows:
            most = tables.most_blocks(
                seq.num_tokens, state.started.chunked_prefill_size or state.started.max_num_batched_tokens
            )
            if event.num_blocks_needed != most:
                refuse(event, f"needs {most} blocks, not {event.num_blocks_needed}")
            return
        total = -(-seq.num_tokens // size)
        in_use = min(seq.num_tokens // size, state.num_used_blocks) if state.started.enable_prefix_caching else 0
        least, most = total - in_use, total
        chain = self._chain(seq, state)
        if chain is not None and state.started.enable_prefix_caching:
            found = takewhile(lambda block_id: block_id is not None, map(state.hash_to_block_id.get, chain))
            least = most = total - sum(block_id is not None and state.ref_counts[block_id] > 0 for block_id in found)
        if not least <= event.num_blocks_needed <= most:
            refuse(event, f"needs {least} to {most} blocks, not {event.num_blocks_needed}")

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._lookups.pop(event.seq_id, None)
        self._chains.pop(event.seq_id, None)
        if event.parent_seq_id in self._token_ids and event.seq_id in self._token_ids:
            self._token_ids[event.seq_id] = self._token_ids[event.parent_seq_id].copy()

    # ------------------------------------------------------------------ steps

    def before_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns
        self._just_sampled.clear()

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        engine, num_new = state.started, sum(event.num_new_tokens)
        for seq in state.running():
            if seq.num_computed_tokens == seq.num_tokens:
                refuse(event, f"seq {seq.seq_id} had all tokens computed, but got no new one")
        if num_new > engine.max_num_batched_tokens:
            refuse(event, f"{num_new} tokens in one step, the budget is {engine.max_num_batched_tokens}")
        chunk_size = engine.chunked_prefill_size
        if chunk_size is not None and max(event.num_new_tokens, default=0) > chunk_size:
            refuse(event, f"a chunk is larger than {chunk_size} tokens")

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        engine, size, tables = state.started, state.block_size, tables_of(state)
        chunk_size = engine.chunked_prefill_size or engine.max_num_batched_tokens
        num_running = state.num_running
        if num_running > engine.max_num_seqs:
            refuse(event, f"{num_running} sequences run, the limit is {engine.max_num_seqs}")
        if event.num_waiting != len(state.seqs) - num_running:
            refuse(event, f"{len(state.seqs) - num_running} sequences wait, not {event.num_waiting}")
        if (event.num_waiting > 0) != (state.step is not None and state.step.waiting is not None):
            refuse(event, f"{event.num_waiting} sequences wait, and no reason is given, or one without need")
        self._check_budget(event, state)
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            if tables.num_entries(seq.num_computed_tokens) != len(seq.block_table):
                refuse(event, f"seq {seq_id}: {seq.num_computed_tokens} tokens in {len(seq.block_table)} blocks")
            if len(seq.held_block_ids) > tables.most_blocks(seq.num_computed_tokens, chunk_size):
                refuse(event, f"seq {seq_id} holds {len(seq.held_block_ids)} blocks, some that no later token sees")
            num_full = seq.num_computed_tokens // size if engine.enable_prefix_caching else 0
            for index in (num_full - 1, num_full):  # the last full one and the one being filled
                block_ids = (
                    seq.block_table[index * tables.num_groups : (index + 1) * tables.num_groups] if index >= 0 else []
                )
                for block_id in block_ids:
                    if block_id is not None and (state.hashes[block_id] is not None) != (index < num_full):
                        refuse(event, f"block {block_id} is not {'full' if index < num_full else 'partial'}")

    def _check_budget(self, event: ev.StepScheduled, state: PoolState) -> None:
        """Check that the token budget is used up if, and only if, that is why a sequence waits."""
        step, engine = state.step, state.started
        assert step is not None, "a step is scheduled"
        reason, num_new = None if step.waiting is None else step.waiting.reason, sum(event.num_new_tokens)
        num_most = num_new + step.num_finished  # includes those that finished while the step was launched
        if reason == "token_budget" and num_most < engine.max_num_batched_tokens:
            refuse(event, f"one waits for the budget, but only {num_new} of {engine.max_num_batched_tokens} are used")
        all_run = all(seq.seq_id in event.seq_ids for seq in state.running())
        if reason == "preemption" and not step.preemptions and all_run and not step.num_finished:
            refuse(event, "one waits for a preemption, but every running sequence got its tokens")
        if reason == "free_blocks" and num_new >= engine.max_num_batched_tokens:
            refuse(event, "one waits for blocks where the budget is used up")

    def before_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        if event.token_ids is not None:
            if len(event.token_ids) != len(event.seq_ids):
                refuse(event, f"{len(event.token_ids)} tokens for {len(event.seq_ids)} sequences")
            self._check_ids(event, event.token_ids)
            for seq_id, token_id in zip(event.seq_ids, event.token_ids, strict=True):
                if seq_id in self._token_ids:
                    self._token_ids[seq_id].append(token_id)

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        self._just_sampled.update(event.seq_ids)
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            if seq.num_output_tokens > seq.max_new_tokens:
                refuse(event, f"seq {seq_id} has {seq.num_output_tokens} new tokens of {seq.max_new_tokens}")

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns
        self._just_sampled.clear()
        step = state.step
        assert step is not None, "a step is running"
        parts_ns = event.schedule_ns + event.forward_ns + event.sample_ns + event.observer_ns
        if parts_ns > event.time_ns - step.start_ns + _CLOCK_SLACK_NS:
            refuse(event, f"its parts last {parts_ns:,} ns, the step {event.time_ns - step.start_ns:,} ns")
        if self._unreleased:
            refuse(event, f"finished sequences {sorted(self._unreleased)} still hold blocks")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns
        self._lookups.clear()
        self._just_sampled.clear()
        self._unreleased.clear()
        cached = set(event.cached_block_ids)
        for followers in self._followers.values():
            for block_id in followers.keys() - cached:
                del followers[block_id]


def _got(no: bool) -> str:
    return f"got {'no' if no else 'a'} token in this step"


TraceLaws._before = handlers_of(TraceLaws, "before_")
