"""The laws of slots of recurrent state, and those of drafts."""

from typing import get_args

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.core.snapshots import SnapshotPolicy
from pagedcli.errors import ConfigError
from pagedcli.trace.laws import MOST_TOKENS, LawBook, live, live_seq, refuse, tables_of
from pagedcli.trace.ledgers import SlotLedger
from pagedcli.trace.state import PoolState

MOST_SLOTS = 1 << 20


class SlotLaws(LawBook):
    """What the state needs to apply an event about slots, and that no step writes a slot that others read."""

    def start(self) -> None:
        self._lookup: ev.CheckpointLookedUp | None = None  # its PrefixLookedUp comes next
        self._drafted: tuple[int, ...] = ()  # sequences with guesses, until the step is scheduled
        self._taken: dict[int, int] = {}  # sequences whose state sees their guesses: the slot taken for them

    def check_order(self, event: ev.Event) -> None:
        failed = (ev.StatesRecovered, ev.StepFailed)
        if self._lookup is not None and type(event) not in (ev.PrefixLookedUp, *failed):
            refuse(event, f"comes where seq {self._lookup.seq_id} looks its prefix up")

    def before_state_slots_made(self, event: ev.StateSlotsMade, state: PoolState) -> None:
        if state.slots is not None or state.seqs or (state.step is not None and state.step.end_ns is None):
            refuse(event, "the engine has slots already, or runs")
        if not 1 <= event.num_slots <= MOST_SLOTS or not 0 <= event.slot_bytes <= MOST_TOKENS:
            refuse(event, f"{event.num_slots:,} slots of {event.slot_bytes:,} bytes")
        try:
            SnapshotPolicy.named(event.checkpoints)
        except ConfigError:
            refuse(event, f"checkpoints {event.checkpoints!r} are unknown")

    def before_checkpoint_looked_up(self, event: ev.CheckpointLookedUp, state: PoolState) -> None:
        seq, slots = live(event, state), self._slots(event, state)
        if event.seq_id in slots.held:
            refuse(event, f"seq {event.seq_id} holds slots {slots.held[event.seq_id]} already")
        if not 0 <= event.checkpoint_tokens <= event.cached_tokens or event.cached_tokens > seq.num_tokens:
            refuse(event, f"a hit of {event.checkpoint_tokens} of {event.cached_tokens} cached tokens")
        if event.slot_id is None:
            if event.checkpoint_tokens:
                refuse(event, f"a hit of {event.checkpoint_tokens} tokens without a snapshot")
        else:
            found = slots.snapshots[self._slot(event, event.slot_id, slots)]
            if found is None or found.num_tokens != event.checkpoint_tokens:
                refuse(event, f"slot {event.slot_id} has no snapshot of {event.checkpoint_tokens} tokens")
            if found.step == state.step_number and state.step is not None:
                refuse(event, f"the snapshot of slot {event.slot_id} is written by this step")
        self._lookup = event

    def before_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        lookup, self._lookup = self._lookup, None
        if state.slots is None:
            return
        if lookup is None or lookup.seq_id != event.seq_id:
            refuse(event, f"no lookup of the snapshot of seq {event.seq_id} comes before")
        if event.tokens_hit != lookup.checkpoint_tokens:
            refuse(event, f"{event.tokens_hit} tokens hit, but the snapshot is at {lookup.checkpoint_tokens}")
        is_vetoed = lookup.checkpoint_tokens < lookup.cached_tokens
        if state.finds_copies and is_vetoed != (event.vetoed_by is not UNSET):
            refuse(event, f"vetoed by {event.vetoed_by}, but {lookup.cached_tokens} tokens are cached")

    def before_state_slot_taken(self, event: ev.StateSlotTaken, state: PoolState) -> None:
        seq, slots = live(event, state), self._slots(event, state)
        first = next(iter(slots.empty), None)
        if event.slot_id != first:
            refuse(event, f"slot {event.slot_id} was taken, but the first empty one is {first}")
        if not seq.running or len(slots.held.get(seq.seq_id, ())) > 1:
            refuse(event, f"seq {seq.seq_id} ({seq.status}) holds slots {slots.held.get(seq.seq_id)}")
        if event.seq_id in self._drafted:
            self._taken[event.seq_id] = event.slot_id

    def before_tokens_drafted(self, event: ev.TokensDrafted, state: PoolState) -> None:
        self._drafted = event.seq_ids
        self._taken = {}

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self._drafted = ()

    def before_state_slots_released(self, event: ev.StateSlotsReleased, state: PoolState) -> None:
        held = self._slots(event, state).held.get(event.seq_id, [])
        if not event.slot_ids or any(event.slot_ids.count(each) > held.count(each) for each in event.slot_ids):
            refuse(event, f"seq {event.seq_id} holds slots {held}")

    def before_checkpoint_made(self, event: ev.CheckpointMade, state: PoolState) -> None:
        seq, slots = live(event, state), self._slots(event, state)
        held = slots.held.get(event.seq_id, [])
        if not held or held[-1] != event.slot_id or slots.ref_counts[event.slot_id] != 1:
            refuse(event, f"seq {event.seq_id}, which holds slots {held}, does not write slot {event.slot_id}")
        if slots.snapshots[event.slot_id] is not None or event.hash in slots.index:
            refuse(event, "there is such a snapshot already")
        span, rest = divmod(event.num_tokens, state.block_size)
        index = span * state.num_groups - 1
        if rest or not span >= 1 or index >= len(seq.block_table) or event.num_tokens > seq.num_tokens:
            refuse(event, f"after {event.num_tokens} tokens of seq {seq.seq_id}: not the end of one of its blocks")
        block_id = seq.block_table[index]
        if block_id is None or state.hashes[block_id] != event.hash:
            refuse(event, f"the block before it, {block_id}, has another hash")

    def before_checkpoint_restored(self, event: ev.CheckpointRestored, state: PoolState) -> None:
        seq, slots = live(event, state), self._slots(event, state)
        if seq.running or seq.block_table or not state.started.enable_prefix_caching:
            refuse(event, f"seq {seq.seq_id} ({seq.status}) looks up no prefix")
        if event.slot_id != (first := next(iter(slots.empty), None)):
            refuse(event, f"slot {event.slot_id} was taken, but the first empty one is {first}")
        if event.hash in slots.index:
            refuse(event, "there is such a snapshot already")
        if event.num_tokens % state.block_size or not 0 < event.num_tokens < seq.num_tokens:
            refuse(event, f"after {event.num_tokens} tokens of seq {seq.seq_id}: not the end of one of its blocks")
        if event.hash not in state.hash_to_block_id:
            refuse(event, "the block before it is not in the pool")

    def before_checkpoint_dropped(self, event: ev.CheckpointDropped, state: PoolState) -> None:
        slots = self._slots(event, state)
        found = slots.snapshots[self._slot(event, event.slot_id, slots)]
        if found is None or found.hash != event.hash:
            refuse(event, f"slot {event.slot_id} has no snapshot of hash {event.hash}")
        if slots.empty or slots.ref_counts[event.slot_id] > (not slots.idle):
            refuse(event, f"slot {event.slot_id} is read by others, or a slot is empty")

    def before_states_recovered(self, event: ev.StatesRecovered, state: PoolState) -> None:
        slots, ids = self._slots(event, state), event.idle_slot_ids
        if len(set(ids)) != len(ids) or any(slots.snapshots[self._slot(event, each, slots)] is None for each in ids):
            refuse(event, f"slots {list(ids)} do not all have snapshots")
        self._lookup = None

    def before_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        taken, are_right = self._taken.pop(event.seq_id, None), event.num_accepted == event.num_drafted
        expected = 0 if state.slots is None else event.num_accepted
        if taken is not None:  # the slot before the guesses is kept, or the one after them
            expected = 0 if are_right else event.num_accepted + 1
            held = self._slots(event, state).held.get(event.seq_id, [])
            if (taken in held) != are_right:
                refuse(
                    event, f"{event.num_accepted} of {event.num_drafted} guesses were right, and slots {held} are kept"
                )
        if event.num_again != expected:
            refuse(event, f"{event.num_again} tokens are computed once more, but the state has not seen {expected}")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        if state.slots is not None and state.slots.held:
            refuse(event, f"sequences {sorted(state.slots.held)} still hold slots")

    def after_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        slots = state.slots
        if slots is None:
            return
        for seq_id in event.seq_ids:
            held = slots.held.get(seq_id)
            if not held:
                refuse(event, f"seq {seq_id} has no slot for its state")
            if slots.ref_counts[held[-1]] != 1:
                refuse(event, f"seq {seq_id} writes slot {held[-1]}, which others read")

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        if state.slots is not None and (gone := state.slots.held.keys() - state.seqs.keys()):
            refuse(event, f"finished sequences {sorted(gone)} still hold slots")

    # ------------------------------------------------------------------ parts

    def _slots(self, event: ev.Event, state: PoolState) -> SlotLedger:
        if state.slots is None:
            refuse(event, "the engine has no slots")
        return state.slots

    def _slot(self, event: ev.Event, slot_id: int, slots: SlotLedger) -> int:
        if not 0 <= slot_id < slots.num_slots:
            refuse(event, f"there is no slot {slot_id} of {slots.num_slots}")
        return slot_id


class DraftLaws(LawBook):
    """Tokens are guessed only where they can be checked in one step and taken back."""

    def start(self) -> None:
        self._drafted: set[int] = set()  # sequences whose guesses this step checks
        self._evicted: set[int] = set()  # blocks, in this step

    def before_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        if event.speculation not in (*get_args(ev.Speculation), "mtp", "auto"):  # the last two are of earlier versions
            refuse(event, f"speculation {event.speculation!r} is unknown")

    def before_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        self._evicted.clear()

    def before_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        self._evicted.add(event.block_id)

    def before_tokens_drafted(self, event: ev.TokensDrafted, state: PoolState) -> None:
        counts, step = dict(zip(event.seq_ids, event.num_drafted, strict=False)), state.step
        if not counts or not len(counts) == len(event.seq_ids) == len(event.num_drafted) == len(event.sources):
            refuse(event, "a sequence twice or none, or other numbers of counts, sources and sequences")
        if unknown := set(event.sources).difference(get_args(ev.DraftSource)):
            refuse(event, f"the sources {sorted(unknown)} are unknown")
        if state.started.speculation == "off" or step is None or step.scheduled or self._drafted:
            refuse(event, "no guess is due")
        for seq_id, num_drafted in counts.items():
            seq = live_seq(event, seq_id, state)
            decodes = seq.num_output_tokens > 0 and seq.num_computed_tokens == seq.num_tokens - 1
            if not seq.running or not decodes or seq.beam_width is not None:
                refuse(event, f"seq {seq_id} ({seq.status}) is not one that computes its last token, or has no guesses")
            num_needed = tables_of(state).num_entries(seq.num_tokens)
            if evicted := self._evicted.intersection(seq.block_table[num_needed:]):
                refuse(event, f"blocks {sorted(evicted)} were evicted for guesses")
            if not 1 <= num_drafted <= min(MOST_DRAFTED, seq.max_new_tokens - seq.num_output_tokens - 1):
                refuse(event, f"{num_drafted} guesses after {seq.num_output_tokens} of {seq.max_new_tokens} new tokens")
        self._drafted = set(event.seq_ids)

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        if not_computed := self._drafted.difference(event.seq_ids):
            refuse(event, f"guesses of sequences {sorted(not_computed)} are not computed")

    def before_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        if state.step is None or not state.step.scheduled:
            refuse(event, "comes before what the step computes")
        self._drafted.discard(event.seq_id)

    def before_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        if event.seq_id in self._drafted and event.reason != "abort":
            refuse(event, f"seq {event.seq_id} ended by {event.reason}, and its guesses have not been checked")
        self._drafted.discard(event.seq_id)

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        if self._drafted:
            refuse(event, f"guesses of sequences {sorted(self._drafted)} have not been checked")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._drafted.clear()
