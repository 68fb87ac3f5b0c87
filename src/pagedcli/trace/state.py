"""The pool rebuilt from the engine's events: blocks, sequences, steps. The basis of every view of a trace.

No engine, no torch. It trusts the events: the laws (laws.py) check them first.
"""

import copy
from typing import ClassVar

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.trace.dispatch import Handler, handlers_of
from pagedcli.trace.ledgers import BlockLedger, SlotLedger
from pagedcli.trace.seq_state import SeqState, SharedCounts, Stage, StepRecord

_KEPT_REFUSALS = 1000


class PoolState(BlockLedger):
    """The engine's ledgers, rebuilt from its events. `apply` is the only way to change it.

    `keep_finished=False` forgets finished sequences when the next step begins, so that a long run needs no more memory.
    """

    _on: ClassVar[dict[type[ev.Event], Handler]]

    def __init__(self, *, keep_finished: bool = True) -> None:
        super().__init__()
        self._keep_finished = keep_finished
        self.engine: ev.EngineStarted | None = None
        self.seqs: dict[int, SeqState] = {}  # waiting and running, in order of arrival
        self.finished: dict[int, SeqState] = {}
        self.num_finished = 0  # sequences, forgotten ones included
        self.refused: list[ev.RequestRefused] = []  # the first ones
        self.num_refused = 0
        self.step: StepRecord | None = None  # the current one, or the last
        self.num_events = 0
        self.num_running = 0
        self._together: dict[int, SeqState] = {}  # sequences that decode one token per step and count in _shared
        self._shared = SharedCounts()
        self._num_entries = 0  # entries of all block tables
        self._num_computed = 0  # tokens of all unfinished sequences, guessed ones that are being computed included
        self.num_recomputed_tokens = 0  # computed, dropped by a preemption and computed again
        self.num_again_tokens = 0  # computed once more for a recurrent state, after guesses
        self.behind: dict[int, int] = {}  # seq_id -> tokens that its next step computes once more
        self.slots: SlotLedger | None = None  # recurrent state; None: the model has none
        self._hole = 0  # index in a block table that BlockCopied fills
        self._queue_head = 0  # place of the first waiting sequence

    # ------------------------------------------------------------------ questions

    @property
    def started(self) -> ev.EngineStarted:
        """The engine, once it has started."""
        assert self.engine is not None, "an engine has started"
        return self.engine

    @property
    def known_slots(self) -> SlotLedger:
        """The slots of a model with recurrent state."""
        assert self.slots is not None, "the engine has slots"
        return self.slots

    @property
    def block_size(self) -> int:
        """Tokens per block, 0 before the engine started."""
        return 0 if self.engine is None else self.engine.block_size

    @property
    def num_groups(self) -> int:
        """Groups of layers, each with a block per block_size tokens of a sequence."""
        return 1 if self.engine is None else len(self.engine.groups)

    @property
    def step_number(self) -> int | None:
        return None if self.step is None else self.step.step

    def seq(self, seq_id: int) -> SeqState | None:
        return self.seqs.get(seq_id) or self.finished.get(seq_id)

    def running(self) -> list[SeqState]:
        return [seq for seq in self.seqs.values() if seq.running]

    def status_of(self, seq: SeqState) -> Stage:
        """What a sequence does in the current step: `stalled` if it runs, but there is no room for its next token."""
        return seq.status if self.stalled_for(seq) is None else "stalled"

    def stalled_for(self, seq: SeqState) -> ev.WaitingReason | None:
        """What a running sequence lacks that the current step leaves out; None: nothing, or it does not stand still."""
        step = self.step
        if step is None or not step.seq_ids or seq.seq_id in step.seq_ids or seq.admitted_step == step.step:
            return None
        if not seq.running or seq.num_computed_tokens >= seq.num_tokens:
            return None
        if self.slots is not None and not self.slots.can_grow(seq.seq_id):
            return "state_slots"
        return "free_blocks" if self.num_used_blocks == self.num_blocks else None

    @property
    def num_stalled(self) -> int:
        """Running sequences that stand still in the current step."""
        return [self.status_of(seq) for seq in self.running()].count("stalled")

    def all_seqs(self) -> list[SeqState]:
        """All sequences that are known, the finished ones included, in the order of their numbers."""
        return sorted([*self.finished.values(), *self.seqs.values()], key=lambda seq: seq.seq_id)

    def waiting(self) -> list[SeqState]:
        """Waiting sequences in queue order."""
        return sorted((seq for seq in self.seqs.values() if not seq.running), key=lambda seq: seq.queue_place)

    def representatives(self, seq_ids: tuple[int, ...]) -> list[int]:
        """The sequences that a law has to look at: of those that decode together one stands for all, as each of them
        runs and has the same number of tokens left to compute. All, if one of those is missing from `seq_ids`."""
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
        """Count the slots without a token block by block, so that a block that several sequences fill counts once."""
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
                    num_tokens = seq.num_computed_tokens + seq.num_drafted_tokens
                    unfilled += size - min(size, max(0, num_tokens - index // num_groups * size))
        return unfilled

    def copy(self) -> "PoolState":
        """A snapshot that later events do not change."""
        other = copy.copy(self)
        self._copy_ledger(other)
        other.seqs = {seq_id: seq.copy() for seq_id, seq in self.seqs.items()}
        other._together, other._shared = {}, SharedCounts()
        other.finished = self.finished.copy()  # finished sequences no longer change
        other.refused = self.refused.copy()
        other.step = None if self.step is None else self.step.copy()
        other.slots = None if self.slots is None else self.slots.copy()
        other.behind = self.behind.copy()
        return other

    # ------------------------------------------------------------------ the fold

    def apply(self, event: ev.Event) -> None:
        """Apply the next event, which must be possible in this state."""
        self._on[type(event)](self, event)
        self.num_events += 1

    def on_engine_started(self, event: ev.EngineStarted) -> None:
        """The first event, and the first of each further part of a resumed run, which starts with an empty pool."""
        self.engine = event
        self.finds_copies = event.schema_version > 3
        self.slots = None
        self.behind.clear()
        self.reset_blocks(event.num_blocks)
        if self.step is not None and self.step.end_ns is None:  # the earlier run was killed in it
            self.step.end_ns = self.step.start_ns
        for seq in self.seqs.values():
            seq.admit(self.step_number)
            seq.count_with()
            seq.status, seq.block_table, seq.finished_step = "finished", [], self.step_number
        self.finished.update(self.seqs)
        self.num_finished += len(self.seqs)
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
            num_context_tokens=None if event.num_context_tokens is UNSET else event.num_context_tokens,
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
        first = seq.num_computed_tokens // self.block_size if continued else 0
        seq.num_found_tokens = (first + event.blocks_hit) * self.block_size
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
        table, num_groups = self.seqs[event.seq_id].block_table, self.num_groups
        for index, block_id in enumerate(event.block_ids, len(table)):
            self.hold(block_id)
            self.block_groups[block_id] = index % num_groups
        table.extend(event.block_ids)
        self._num_entries += len(event.block_ids)

    def on_block_evicted(self, event: ev.BlockEvicted) -> None:
        self.evict(event.block_id, event.hash)
        if self.step is not None:
            self.step.num_evicted += 1

    def on_blocks_restored(self, event: ev.BlocksRestored) -> None:
        for index, block_id, block_hash, parent_hash in event.blocks:
            self.hold(block_id)
            self.block_groups[block_id] = index % self.num_groups
            self.mark_full(block_id, block_hash, parent_hash, event.seq_id)
        for block_id in reversed(event.block_ids):
            self.let_go(block_id)

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
        self.block_groups[event.copy_block_id] = self.block_groups[event.source_block_id]

    def on_sequence_forked(self, event: ev.SequenceForked) -> None:
        for block_id in event.block_ids:
            if block_id is not None:
                self.hold(block_id)
        child = self.seqs[event.seq_id]
        self._leave(child)
        self._num_entries += len(event.block_ids) - len(child.block_table)
        child.block_table = list(event.block_ids)
        self._set_computed(child, event.num_computed_tokens)
        if self.slots is not None:
            self.slots.fork(event.parent_seq_id, event.seq_id)
        self.num_running += not child.running
        child.status = "decode" if child.num_context_tokens is None else "prefill"
        child.admit(self.step_number)
        if child.admitted_step is None:
            child.admitted_step = self.step_number

    def on_state_slots_made(self, event: ev.StateSlotsMade) -> None:
        self.slots = SlotLedger(event)

    def on_checkpoint_looked_up(self, event: ev.CheckpointLookedUp) -> None:
        self.known_slots.lookup = event
        if event.slot_id is not None:
            self.known_slots.hold(event.seq_id, event.slot_id)

    def on_checkpoint_made(self, event: ev.CheckpointMade) -> None:
        self.known_slots.keep(event, self.step_number)

    def _change_slots(self, event: ev.Event) -> None:
        _OF_SLOTS[type(event)](self.known_slots, event)

    def on_request_preempted(self, event: ev.RequestPreempted) -> None:
        self._preempt(self.seqs[event.seq_id])
        if self.step is not None:
            self.step.preemptions.append(event)

    def on_request_waiting(self, event: ev.RequestWaiting) -> None:
        if self.step is not None:
            self.step.waiting = event

    def on_step_started(self, event: ev.StepStarted) -> None:
        self.step = StepRecord(event.step, event.time_ns)
        if not self._keep_finished:
            self.finished.clear()

    def on_step_scheduled(self, event: ev.StepScheduled) -> None:
        """Each sequence has computed so many tokens more.

        Of sequences 1 to 4, which compute 1, 1, 7 and 1 tokens, those that decoded together before (say 1 and 2) are
        counted by one addition; 3 and 4 get their own. A sequence that got more than one token leaves the others.
        """
        self._num_computed += sum(event.num_new_tokens)
        if self.behind:
            self.num_again_tokens += sum(self.behind.pop(seq_id, 0) for seq_id in event.seq_ids)
        together = self._together
        if event.num_new_tokens.count(1) < len(event.seq_ids):
            pairs = zip(event.seq_ids, event.num_new_tokens, strict=True)
            self._separate_others({seq_id for seq_id, count in pairs if count == 1})
        else:
            self._separate_others(set(event.seq_ids))
        self._shared.num_computed += 1
        counts = zip(event.seq_ids, event.num_new_tokens, strict=True) if len(together) < len(event.seq_ids) else ()
        for seq_id, num_new_tokens in counts:
            if seq_id in together:
                continue
            seq = self.seqs[seq_id]
            num_computed = seq.num_computed_tokens + num_new_tokens - seq.num_drafted_tokens
            num_again = max(0, min(num_computed, seq.most_computed_tokens) - seq.num_computed_tokens)
            seq.num_recomputed_tokens += num_again
            self.num_recomputed_tokens += num_again
            seq.num_computed_tokens = num_computed
        step = self.step
        if step is not None:
            step.scheduled = True
            step.seq_ids, step.num_new_tokens, step.num_waiting = event.seq_ids, event.num_new_tokens, event.num_waiting

    def on_tokens_drafted(self, event: ev.TokensDrafted) -> None:
        for seq_id, num_drafted, source in zip(event.seq_ids, event.num_drafted, event.sources, strict=True):
            seq = self.seqs[seq_id]
            seq.num_drafted_tokens, seq.draft_source = num_drafted, source
        if self.step is not None:
            self.step.num_drafted += sum(event.num_drafted)

    def on_draft_checked(self, event: ev.DraftChecked) -> None:
        seq = self.seqs[event.seq_id]
        self._num_computed -= event.num_drafted - event.num_accepted
        seq.num_drafted_tokens = 0
        if event.num_again:
            self.behind[seq.seq_id] = event.num_again
        seq.num_guesses += event.num_drafted
        seq.num_right_guesses += event.num_accepted
        seq.num_computed_tokens += event.num_accepted
        seq.num_output_tokens += event.num_accepted
        if event.block_ids:
            del seq.block_table[-len(event.block_ids) :]
            self._num_entries -= len(event.block_ids)
        for block_id in event.block_ids:
            self.let_go(block_id)
        if self.step is not None:
            self.step.num_sampled += event.num_accepted

    def on_tokens_sampled(self, event: ev.TokensSampled) -> None:
        together, shared = self._together, self._shared
        self._separate_others(set(event.seq_ids))
        shared.num_output += 1
        for seq_id in event.seq_ids if len(together) < len(event.seq_ids) else ():
            if seq_id in together:
                continue
            seq = self.seqs[seq_id]
            seq.num_output_tokens += 1
            seq.status = "decode"
            if seq.first_token_step is None:
                seq.first_token_step = self.step_number
            if seq.num_computed_tokens >= seq.most_computed_tokens:  # nothing that it computes later is recomputed
                seq.count_with(shared)
                together[seq_id] = seq
        if self.step is not None:
            self.step.num_sampled += len(event.seq_ids)

    def on_request_finished(self, event: ev.RequestFinished) -> None:
        seq = self.seqs.pop(event.seq_id)
        self._leave(seq)
        self.num_running -= seq.running
        self._num_computed -= seq.num_computed_tokens + seq.num_drafted_tokens
        seq.admit(self.step_number)
        seq.status, seq.num_drafted_tokens = "finished", 0
        seq.finish_reason = event.reason
        seq.finished_step = self.step_number
        self.finished[seq.seq_id] = seq
        self.num_finished += 1
        if event.reason == "score" and seq.num_context_tokens == seq.num_tokens:
            for other in self.seqs.values():  # continuations that have not forked from it compute it again
                if other.request_id == seq.request_id and not other.running:
                    other.most_computed_tokens = max(other.most_computed_tokens, seq.num_tokens)

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
        self._num_computed -= seq.num_computed_tokens + seq.num_drafted_tokens
        seq.preempt(self._front_place(), self.step_number)

    def _set_computed(self, seq: SeqState, num_tokens: int) -> None:
        self._num_computed += num_tokens - seq.num_computed_tokens
        seq.num_computed_tokens = num_tokens

    def _separate_others(self, seq_ids: set[int]) -> None:
        """Give all but these sequences counts of their own."""
        for seq_id in self._together.keys() - seq_ids:
            self._together.pop(seq_id).count_with()

    def _leave(self, seq: SeqState) -> None:
        self.behind.pop(seq.seq_id, None)
        if self._together.pop(seq.seq_id, None) is not None:
            seq.count_with()

    def _front_place(self) -> int:
        """A place before all others in the waiting queue."""
        self._queue_head -= 1
        return self._queue_head


_OF_SLOTS = handlers_of(SlotLedger, "on_")
PoolState._on = handlers_of(PoolState, "on_") | dict.fromkeys(_OF_SLOTS, PoolState._change_slots)
