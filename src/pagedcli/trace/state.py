"""The pool rebuilt from the engine's events. The basis of every view of a trace.

Used by all of inspection; no engine, no torch. It trusts the events: the laws (laws.py) check them first.
"""

import copy
from typing import ClassVar

import pagedcli.events as ev
from pagedcli.trace.dispatch import Handler, handlers_of
from pagedcli.trace.ledger import BlockLedger
from pagedcli.trace.records import Pace, SeqState, StepRecord

_KEPT_REFUSALS = 1000


class PoolState(BlockLedger):
    """The engine's ledgers, rebuilt from its events. `apply` is the only way to change it."""

    _on: ClassVar[dict[type[ev.Event], Handler]]

    def __init__(self) -> None:
        super().__init__()
        self.engine: ev.EngineStarted | None = None
        self.seqs: dict[int, SeqState] = {}  # waiting and running, in order of arrival
        self.finished: dict[int, SeqState] = {}
        self.refused: list[ev.RequestRefused] = []  # the first ones
        self.num_refused = 0
        self.step: StepRecord | None = None  # the current one, or the last
        self.num_events = 0
        self.num_running = 0
        self._together: dict[int, SeqState] = {}  # sequences that decode one token per step and count in _pace
        self._pace = Pace()
        self._num_entries = 0  # of all block tables
        self._num_computed = 0  # tokens of all unfinished sequences
        self.num_recomputed_tokens = 0  # computed, dropped by a preemption and computed again
        self._hole = 0  # index in a block table that BlockCopied fills
        self._queue_head = 0  # place of the first waiting sequence

    # ------------------------------------------------------------------ questions

    @property
    def started(self) -> ev.EngineStarted:
        """The engine, once it has started."""
        assert self.engine is not None, "an engine has started"
        return self.engine

    @property
    def block_size(self) -> int:
        """Tokens per block, 0 before the engine started."""
        return 0 if self.engine is None else self.engine.block_size

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with a block per block_size tokens of a sequence."""
        return 1 if self.engine is None else len(self.engine.windows)

    @property
    def step_number(self) -> int | None:
        return None if self.step is None else self.step.step

    def seq(self, seq_id: int) -> SeqState | None:
        return self.seqs.get(seq_id) or self.finished.get(seq_id)

    def running(self) -> list[SeqState]:
        return [seq for seq in self.seqs.values() if seq.running]

    def waiting(self) -> list[SeqState]:
        """Waiting sequences in queue order."""
        return sorted((seq for seq in self.seqs.values() if not seq.running), key=lambda seq: seq.queue_place)

    def not_alike(self, seq_ids: tuple[int, ...]) -> list[int]:
        """These ids, with a single one for all sequences that decode together: they are running, and as many tokens
        of each are left to compute."""
        together = self._together
        if together.keys() - set(seq_ids):
            return list(seq_ids)
        apart = [seq_id for seq_id in seq_ids if seq_id not in together] if len(together) < len(seq_ids) else []
        return [*apart, next(iter(together))] if together else apart

    def num_unfilled_slots(self) -> int:
        """Slots of blocks in use without a token: internal fragmentation."""
        if self.num_shared_partial_blocks:
            return self.count_unfilled_slots()
        return self._num_entries * self.block_size - self._num_computed * self.num_groups

    def count_unfilled_slots(self) -> int:
        """The same, block by block: a block that several sequences fill counts once."""
        size, num_groups = self.block_size, self.num_groups
        seen: set[int] = set()
        unfilled = 0
        for seq in self.seqs.values():
            if not seq.block_table:
                continue
            first = seq.num_computed_tokens // size * num_groups
            for index in range(first, len(seq.block_table)):
                block_id = seq.block_table[index]
                if block_id is not None and block_id not in seen and self.hashes[block_id] is None:
                    seen.add(block_id)
                    unfilled += size - max(0, seq.num_computed_tokens - index // num_groups * size)
        return unfilled

    def copy(self) -> "PoolState":
        """A snapshot that later events do not change."""
        other = copy.copy(self)
        self._copy_ledger(other)
        other.seqs = {seq_id: seq.copy() for seq_id, seq in self.seqs.items()}
        other._together, other._pace = {}, Pace()
        other.finished = self.finished.copy()  # finished sequences no longer change
        other.refused = self.refused.copy()
        other.step = None if self.step is None else self.step.copy()
        return other

    # ------------------------------------------------------------------ the fold

    def apply(self, event: ev.Event) -> None:
        """Apply the next event, which must be possible in this state."""
        self._on[type(event)](self, event)
        self.num_events += 1

    def on_engine_started(self, event: ev.EngineStarted) -> None:
        """The first event, and the first of each further part of a resumed run, which starts with an empty pool."""
        self.engine = event
        self.reset_blocks(event.num_blocks)
        if self.step is not None and self.step.end_ns is None:  # the earlier run was killed in it
            self.step.end_ns = self.step.start_ns
        for seq in self.seqs.values():
            seq.admit(self.step_number)
            seq.keep_pace()
            seq.status, seq.block_table, seq.finished_step = "finished", [], self.step_number
        self.finished.update(self.seqs)
        self.seqs, self._together = {}, {}
        self.num_running = self._num_entries = self._num_computed = 0

    def on_request_added(self, event: ev.RequestAdded) -> None:
        self.seqs[event.seq_id] = SeqState(
            seq_id=event.seq_id,
            request_id=event.request_id,
            sample_index=event.sample_index,
            num_prompt_tokens=event.num_prompt_tokens,
            max_new_tokens=event.max_new_tokens,
            salted=event.salted,
            added_step=self.step_number,
            row_id=event.row_id,
            waiting_since_step=0 if self.step is None else self.step.step + (self.step.end_ns is not None),
            queue_place=event.seq_id if event.sample_index == 0 else self._front_place(),
            beam_width=event.beam_width,
        )

    def on_request_refused(self, event: ev.RequestRefused) -> None:
        self.num_refused += 1
        if self.num_refused <= _KEPT_REFUSALS:
            self.refused.append(event)

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp) -> None:
        seq, continued = self.seqs[event.seq_id], event.reason == "continued"
        self._leave(seq)
        self.num_running += not seq.running
        seq.status = "prefill"
        self._set_computed(seq, event.tokens_hit + (seq.num_computed_tokens if continued else 0))
        seq.num_cached_tokens = event.tokens_hit + (seq.num_cached_tokens if continued else 0)
        seq.admit(self.step_number)
        if seq.admitted_step is None:
            seq.admitted_step = self.step_number
        if self.step is not None:
            self.step.lookups.append(event)

    def on_blocks_reused(self, event: ev.BlocksReused) -> None:
        for block_id in event.block_ids:
            if block_id is not None:
                self.hold(block_id)
        self.seqs[event.seq_id].block_table.extend(event.block_ids)
        self._num_entries += len(event.block_ids)

    def on_blocks_allocated(self, event: ev.BlocksAllocated) -> None:
        for block_id in event.block_ids:
            self.hold(block_id)
        self.seqs[event.seq_id].block_table.extend(event.block_ids)
        self._num_entries += len(event.block_ids)

    def on_block_evicted(self, event: ev.BlockEvicted) -> None:
        self.evict(event.block_id, event.hash)
        if self.step is not None:
            self.step.num_evicted += 1

    def on_blocks_filled(self, event: ev.BlocksFilled) -> None:
        seq = self.seqs[event.seq_id]
        table, index = seq.block_table, seq.place_of(event.block_ids)
        before = table[index - 1] if index else None
        parent_hash = None if before is None else self.hashes[before]
        for block_id, block_hash in zip(event.block_ids, event.hashes, strict=True):
            self.mark_full(block_id, block_hash, parent_hash, event.seq_id)
            parent_hash = block_hash

    def on_blocks_released(self, event: ev.BlocksReleased) -> None:
        seq = self.seqs.get(event.seq_id) or self.finished[event.seq_id]
        num_before = len(seq.block_table)
        if len(event.block_ids) == len(seq.block_table) - seq.num_passed_blocks:
            seq.block_table = []
        else:  # replaced by copies, or by the hits of a continued lookup
            self._hole = seq.block_table.index(event.block_ids[0])
            del seq.block_table[self._hole : self._hole + len(event.block_ids)]
        self._num_entries += len(seq.block_table) - num_before
        for block_id in event.block_ids:
            self.let_go(block_id)

    def on_window_passed(self, event: ev.WindowPassed) -> None:
        table = self.seqs[event.seq_id].block_table
        for block_id in event.block_ids:
            table[table.index(block_id)] = None
            self.let_go(block_id)

    def on_block_copied(self, event: ev.BlockCopied) -> None:
        table = self.seqs[event.seq_id].block_table
        table.insert(self._hole, table.pop())

    def on_sequence_forked(self, event: ev.SequenceForked) -> None:
        for block_id in event.block_ids:
            if block_id is not None:
                self.hold(block_id)
        child = self.seqs[event.seq_id]
        self._leave(child)
        self._num_entries += len(event.block_ids) - len(child.block_table)
        child.block_table = list(event.block_ids)
        self._set_computed(child, event.num_computed_tokens)
        child.parent_seq_id = event.parent_seq_id
        self.num_running += not child.running
        child.status = "decode"
        child.admit(self.step_number)
        if child.admitted_step is None:
            child.admitted_step = self.step_number

    def on_request_preempted(self, event: ev.RequestPreempted) -> None:
        self._preempt(self.seqs[event.seq_id])
        if self.step is not None:
            self.step.preemptions.append(event)

    def on_request_waiting(self, event: ev.RequestWaiting) -> None:
        if self.step is not None:
            self.step.waiting = event

    def on_step_started(self, event: ev.StepStarted) -> None:
        self.step = StepRecord(event.step, event.time_ns)

    def on_step_scheduled(self, event: ev.StepScheduled) -> None:
        self._num_computed += sum(event.num_new_tokens)
        together = self._together
        if event.num_new_tokens.count(1) < len(event.seq_ids):
            pairs = zip(event.seq_ids, event.num_new_tokens, strict=True)
            self._keep_together({seq_id for seq_id, count in pairs if count == 1})
        else:
            self._keep_together(set(event.seq_ids))
        self._pace.num_computed += 1
        counts = zip(event.seq_ids, event.num_new_tokens, strict=True) if len(together) < len(event.seq_ids) else ()
        for seq_id, num_new_tokens in counts:
            if seq_id in together:
                continue
            seq = self.seqs[seq_id]
            num_computed = seq.num_computed_tokens + num_new_tokens
            num_again = max(0, min(num_computed, seq.most_computed_tokens) - seq.num_computed_tokens)
            seq.num_recomputed_tokens += num_again
            self.num_recomputed_tokens += num_again
            seq.num_computed_tokens = num_computed
        step = self.step
        if step is not None:
            step.scheduled = True
            step.seq_ids, step.num_new_tokens, step.num_waiting = event.seq_ids, event.num_new_tokens, event.num_waiting

    def on_tokens_sampled(self, event: ev.TokensSampled) -> None:
        together, pace = self._together, self._pace
        self._keep_together(set(event.seq_ids))
        pace.num_output += 1
        for seq_id in event.seq_ids if len(together) < len(event.seq_ids) else ():
            if seq_id in together:
                continue
            seq = self.seqs[seq_id]
            seq.num_output_tokens += 1
            seq.status = "decode"
            if seq.first_token_step is None:
                seq.first_token_step = self.step_number
            if seq.num_computed_tokens >= seq.most_computed_tokens:  # nothing that it computes later is recomputed
                seq.keep_pace(pace)
                together[seq_id] = seq
        if self.step is not None:
            self.step.num_sampled += len(event.seq_ids)

    def on_request_finished(self, event: ev.RequestFinished) -> None:
        seq = self.seqs.pop(event.seq_id)
        self._leave(seq)
        self.num_running -= seq.running
        self._num_computed -= seq.num_computed_tokens
        seq.admit(self.step_number)
        seq.status = "finished"
        seq.finish_reason = event.reason
        seq.finished_step = self.step_number
        self.finished[seq.seq_id] = seq
        if self.step is not None:
            self.step.num_finished += 1

    def on_step_finished(self, event: ev.StepFinished) -> None:
        step = self.step
        if step is not None:
            step.end_ns = event.time_ns
            step.schedule_ns, step.forward_ns = event.schedule_ns, event.forward_ns
            step.sample_ns, step.observer_ns = event.sample_ns, event.observer_ns

    def on_step_failed(self, event: ev.StepFailed) -> None:
        for seq_id in reversed(event.seq_ids):
            seq = self.seqs[seq_id]
            self._num_entries -= len(seq.block_table)
            seq.block_table = []
            self._preempt(seq)
        self.free_all(event.cached_block_ids)
        if self.step is not None:
            self.step.end_ns = event.time_ns

    def _preempt(self, seq: SeqState) -> None:
        self._leave(seq)
        self.num_running -= seq.running
        self._num_computed -= seq.num_computed_tokens
        seq.preempt(self._front_place(), self.step_number)

    def _set_computed(self, seq: SeqState, num_tokens: int) -> None:
        self._num_computed += num_tokens - seq.num_computed_tokens
        seq.num_computed_tokens = num_tokens

    def _keep_together(self, seq_ids: set[int]) -> None:
        """Let all but these sequences count alone."""
        for seq_id in self._together.keys() - seq_ids:
            self._together.pop(seq_id).keep_pace()

    def _leave(self, seq: SeqState) -> None:
        if self._together.pop(seq.seq_id, None) is not None:
            seq.keep_pace()

    def _front_place(self) -> int:
        """A place before all others in the waiting queue."""
        self._queue_head -= 1
        return self._queue_head


PoolState._on = handlers_of(PoolState, "on_")
