"""Recurrent state: slots for the states of sequences, and which prefixes continue from one of them.

Used by core.cache; needs neither torch nor the engine. A layer with recurrent state keeps no K and V of its tokens but
a state of fixed size, which each step replaces. A *slot* holds that of one sequence, over all such layers.

A step reads one slot of a sequence and writes one; usually they are the same. A slot that others may still read is
never written: one with a *snapshot*, the state after a whole number of blocks, or one that a fork shares. The
sequence then takes a fresh slot, reads the old one and writes the new one in the same step, so nothing is copied:

    step                 1        2          3          4
    tokens of sequence a 0-63     64-127     128        129
    reads, writes        -, 0     0, 1       1, 1       1, 1      slot 0 keeps the state after 64 tokens
    tokens of sequence b                     64-99      100
    reads, writes                            0, 2       2, 2      it has the same first 64 tokens

Both slots are held until the step has been launched; what is written later cannot overtake it.

A step that checks guesses takes a fresh slot, too, if one is empty. If all were right, the sequence continues from it;
otherwise it keeps the old one, and its next step computes the tokens since then once more, before any guess:

    step                  5              6               7
    tokens of sequence a  130, 131-133?  134, 135-137?   134-135 again, 136    of 135-137 only 135 was right
    reads, writes         1, 3           3, 1            3, 3
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pagedcli.events as ev
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.prefix_lookup import PrefixHit
from pagedcli.core.prefixes import Prefix
from pagedcli.core.snapshots import HeldSlots, SnapshotPlan, SnapshotPolicy, StateUser

if TYPE_CHECKING:
    from pagedcli.core.store import PrefixStore


@dataclass(slots=True, eq=False)
class StateSlot:
    """A place for one state."""

    slot_id: int
    ref_count: int = 0  # sequences that hold it
    prefix: Prefix | None = None  # tokens before a snapshot; None: there is none


class StatePool:
    """Owns all slots and the map from prefix to snapshot.

    A slot is *empty* (held by no sequence, no snapshot), *idle* (a snapshot that no sequence holds) or held. A
    fresh slot is the empty one that was released first; without any, the idle snapshot that was released first is
    dropped, those that no known request will read before the others. A step asks can_grow before it calls grow.
    """

    def __init__(self, limits: Limits, num_groups: int, emit: ev.Emit | None) -> None:
        assert limits.num_state_slots, "a model with recurrent state has slots"
        policy = SnapshotPolicy.named(limits.checkpoints if limits.enable_prefix_caching else "none")
        self.plan = SnapshotPlan(policy, limits.block_size, num_groups)
        self.slots = [StateSlot(slot_id) for slot_id in range(limits.num_state_slots)]
        self.num_made = self.num_dropped = self.num_read = 0  # snapshots
        self._empty = deque(range(limits.num_state_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int] = {}  # hash of a snapshot's prefix -> slot
        # snapshots made in this step, which no sequence of it may read, and in unread steps: perhaps not written yet
        self._made_now: list[int] = []
        self._made_before: list[int] = []
        self._kept: list[tuple[StateUser, int]] = []  # sequences whose step of now makes a snapshot, after which span
        self._moved: list[StateUser] = []  # their last steps read another slot than they write
        self._block_size = limits.block_size
        self._emit = emit

    # ------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Slots that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self.slots) - self.num_available

    def boundaries(self, seq: StateUser, most: int) -> list[int]:
        """After how many full spans, at most `most`, a new sequence with these tokens can continue; 0 always may."""
        spans = range(1, min(most, self.plan.last_readable(seq)) + 1)
        return [span for span in spans if self._find_written(seq, span) is not None]

    def why_wait(self, seq: StateUser, hit: PrefixHit) -> ev.WaitingReason | None:
        """Why a sequence that has room for its blocks should not start now."""
        if self.plan.is_coming(seq, hit.num_spans):
            return "checkpoint"
        return None if self.num_available else "state_slots"

    def can_grow(self, seqs: Sequence[StateUser]) -> bool:
        """Whether there is room for the next step of all these sequences."""
        if len(seqs) > 1:
            return sum(not self._is_own(_held(seq).write) for seq in seqs) <= self.num_available
        latest = _held(seqs[0]).write
        return self.num_available > 0 or (latest is not None and self.slots[latest].ref_count == 1)

    def can_fork(self, parent: StateUser, *, is_last: bool) -> bool:
        """Whether there is room for the next step of a fork. `is_last`: the parent ends then."""
        return self.num_available > 0 or (is_last and self.can_grow([parent]))

    def next_stop(self, seq: StateUser, num_computed: int, num_new_tokens: int) -> int:
        """How many of the next tokens to compute in one step: all, or those up to the first snapshot to make."""
        size = self._block_size
        if self.plan.policy.kind == "none":
            return num_new_tokens
        stops = self.plan.stops(seq, num_computed // size)
        spans = [span for span in stops if self._find(self.plan.prefix(seq, span)) is None]
        self.plan.announce(seq, spans)
        return min(num_new_tokens, spans[0] * size - num_computed) if spans else num_new_tokens

    def _find(self, prefix: Prefix) -> int | None:
        """The slot with the state after these tokens, also where a step of now writes it."""
        slot_id = self._index.get(prefix.hash)
        if slot_id is None:
            return None
        found = self.slots[slot_id].prefix
        return slot_id if found is not None and found.same_as(prefix) else None

    def _find_written(self, seq: StateUser, span: int) -> int | None:
        """The slot with the state after this number of spans, if a step that is scheduled now can read it."""
        slot_id = self._find(self.plan.prefix(seq, span))
        return None if slot_id in self._made_now else slot_id

    def _is_own(self, latest: int | None) -> bool:
        """Whether the next step of a sequence may write the slot that it reads: nobody else will read it."""
        return latest is not None and self.slots[latest].ref_count == 1 and self.slots[latest].prefix is None

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: StateUser) -> None:
        """A sequence joined the waiting queue; its prefixes are hashed."""
        if self.plan.policy.kind != "none":
            self.plan.expect(seq)

    def forget(self, seq: StateUser) -> None:
        """A sequence left the waiting queue."""
        self.plan.forget(seq)

    # ------------------------------------------------------------------ the store

    def stored(self, seq: StateUser, most: int, store: "PrefixStore") -> list[int]:
        """After how many full spans, at most `most`, the store has the state of a sequence with these tokens."""
        spans = range(1, min(most, self.plan.last_readable(seq)) + 1)
        found = store.found_states(seq, {span: self.plan.prefix(seq, span) for span in spans})
        return [span for span in found if self._find(self.plan.prefix(seq, span)) is None]

    def restore(self, seq: StateUser, num_spans: int, store: "PrefixStore") -> bool:
        """Bring the state after so many spans from the store, unless it is here. Returns False if it could not be read;
        then the store has it no longer."""
        prefix = self.plan.prefix(seq, num_spans)
        if self._find(prefix) is not None:
            return True
        content = store.read_state(prefix)
        if content is None:
            return False
        assert self.num_available, "ask why_wait first"
        slot = self.slots[self._take()]
        slot.ref_count, slot.prefix = 0, prefix
        self._idle[slot.slot_id] = None
        self._index[prefix.hash] = slot.slot_id
        store.place_state(slot.slot_id, content)
        if self._emit is not None:
            num_tokens = num_spans * self._block_size
            self._emit(ev.CheckpointRestored(seq.seq_id, slot.slot_id, prefix.hash, num_tokens))
        return True

    def offer(self, seq: StateUser, hit: PrefixHit, store: "PrefixStore") -> None:
        """A sequence has started after its hit: the snapshot that it found is for the store, too."""
        slot_id = self._find(self.plan.prefix(seq, hit.num_spans)) if hit.num_spans else None
        if slot_id is not None:
            prefix = self.slots[slot_id].prefix
            assert prefix is not None, "it was found by its prefix"
            store.offer_state(seq, hit.num_spans, prefix, slot_id, self._is_written)

    def _is_written(self, slot_id: int, prefix: Prefix) -> bool:
        """Whether a slot has the state after these tokens, and the step that computed it has run."""
        is_pending = slot_id in self._made_now or slot_id in self._made_before
        return self.slots[slot_id].prefix is prefix and not is_pending

    # ------------------------------------------------------------------ changes

    def allocate(self, seq: StateUser, hit: PrefixHit) -> None:
        """A sequence starts after its hit. Its blocks come next."""
        assert seq.state is None, "a sequence starts from one state"
        seq.state = HeldSlots()
        slot_id = self._find_written(seq, hit.num_spans) if hit.num_spans else None
        if slot_id is not None:
            self._hold(slot_id)
            self.num_read += 1
            seq.state.write = slot_id
        if self._emit is not None:
            cached, computed = hit.num_cached_spans * self._block_size, hit.num_spans * self._block_size
            self._emit(ev.CheckpointLookedUp(seq.seq_id, cached, computed, slot_id))

    def grow(self, seq: StateUser, num_new_tokens: int) -> None:
        """A step computes the next tokens of a sequence, which has its blocks."""
        self._advance(seq)
        num_tokens = seq.num_computed_tokens + num_new_tokens
        span, rest = divmod(num_tokens, self._block_size)
        if not rest and self.plan.is_stop(seq, span):
            self._keep(seq, self.plan.prefix(seq, span), num_tokens)
            self._kept.append((seq, span))

    def _advance(self, seq: StateUser) -> None:
        """Choose the slots that the sequence's next step reads and writes.

        If no slot is left but the sequence is the only one that holds its snapshot, it drops that and continues in
        place.
        """
        held = _held(seq)
        latest = held.write
        if latest is not None and not self.num_available and self.slots[latest].prefix is not None:
            assert self.slots[latest].ref_count == 1, "ask can_grow first"
            self._drop(self.slots[latest])
        if self._is_own(latest):
            held.read = latest
            return
        held.read, held.write = latest, self._take()
        self._moved.append(seq)
        if self._emit is not None:
            self._emit(ev.StateSlotTaken(seq.seq_id, held.write))

    def _keep(self, seq: StateUser, prefix: Prefix, num_tokens: int) -> None:
        """Make a snapshot of what the sequence's scheduled step writes, the state after its first num_tokens tokens,
        unless there is one."""
        slot_id = _held(seq).write
        assert slot_id is not None, "a scheduled sequence writes a slot"
        if prefix.hash in self._index:
            return
        slot = self.slots[slot_id]
        slot.prefix = prefix
        self._index[prefix.hash] = slot.slot_id
        self._made_now.append(slot.slot_id)
        self.num_made += 1
        if self._emit is not None:
            reason = self.plan.policy.reason
            self._emit(ev.CheckpointMade(seq.seq_id, slot.slot_id, prefix.hash, num_tokens, reason))

    def fork(self, parent: StateUser, child: StateUser) -> None:
        """A new sequence of equal tokens shares the state of its parent."""
        assert child.state is None, "a forked sequence has no state yet"
        child.state = HeldSlots(write=_held(parent).write)
        if child.state.write is not None:
            self._hold(child.state.write)

    def add_draft(self, seq: StateUser) -> None:
        """The scheduled step of a sequence checks a draft, too: keep the state before it, if there is a slot."""
        held = _held(seq)
        if held.read != held.write or held.num_behind or not self._empty:
            return  # the state that it writes sees no guess, so that it is the next one in any case
        held.write, held.sees_draft = self._take(), True
        self._moved.append(seq)
        if self._emit is not None:
            self._emit(ev.StateSlotTaken(seq.seq_id, held.write))

    def take_draft(self, seq: StateUser, num_drafted: int, num_accepted: int) -> int:
        """So many tokens of a draft were right. Returns how many of the last ones the next step computes once more."""
        held = _held(seq)
        held.num_behind = num_accepted
        if held.sees_draft:
            held.sees_draft, held.num_behind = False, 0
            if num_accepted < num_drafted:
                assert held.write is not None, "it was taken for the draft"
                taken, held.write, held.num_behind = held.write, held.read, num_accepted + 1
                self._release(seq.seq_id, (taken,))
        return held.num_behind

    def release(self, seq: StateUser) -> None:
        """A sequence ends or is preempted. Its blocks go next."""
        self.plan.withdraw(seq)
        held, seq.state = seq.state, None
        if held is not None:
            slot_ids = dict.fromkeys(each for each in (held.read, held.write) if each is not None)
            self._release(seq.seq_id, tuple(slot_ids))

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """What the step before read can be written, and what it wrote can be read."""
        moved, self._moved = self._moved, []
        for seq in moved:
            if (held := seq.state) is not None:
                read, held.read = held.read, held.write
                if read is not None and read != held.write:
                    self._release(seq.seq_id, (read,))
        self._made_before += self._made_now
        self._made_now = []
        kept, self._kept = self._kept, []
        for seq, span in kept:
            self.plan.passed(seq, span)

    def confirm(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too."""
        self._made_before.clear()
        if latest:
            self._made_now.clear()

    def recover(self) -> None:
        """A step raised: release everything, drop what may be unwritten, and forget the queue. The sequences forget
        their slots on their own."""
        self.plan.clear()
        self._kept = []
        for slot_id in (*self._made_before, *self._made_now):
            self.slots[slot_id].prefix = None
        order = dict.fromkeys([*self._idle, *range(len(self.slots))])
        kept = [slot_id for slot_id in order if self.slots[slot_id].prefix is not None]
        for slot in self.slots:
            slot.ref_count = 0
        self._made_before, self._made_now, self._moved = [], [], []
        self._idle = OrderedDict.fromkeys(kept)
        self._empty = deque(slot.slot_id for slot in self.slots if slot.prefix is None)
        self._index = {prefix.hash: slot_id for slot_id in kept if (prefix := self.slots[slot_id].prefix) is not None}
        if self._emit is not None:
            self._emit(ev.StatesRecovered(tuple(kept)))

    def count(self, facts: RunFacts) -> None:
        """Write the counts of slots and snapshots into the facts of the run."""
        facts.peak_used_state_slots = max(facts.peak_used_state_slots, self.num_held)
        facts.num_snapshots, facts.num_dropped_snapshots = self.num_made, self.num_dropped
        facts.num_snapshot_hits = self.num_read

    # ------------------------------------------------------------------ one slot

    def _hold(self, slot_id: int) -> None:
        slot = self.slots[slot_id]
        if not slot.ref_count:
            del self._idle[slot_id]
        slot.ref_count += 1

    def _release(self, seq_id: int, slot_ids: tuple[int, ...]) -> None:
        for slot_id in slot_ids:
            slot = self.slots[slot_id]
            slot.ref_count -= 1
            if not slot.ref_count and slot.prefix is None:
                self._empty.append(slot_id)
            elif not slot.ref_count:
                self._idle[slot_id] = None
        if self._emit is not None and slot_ids:
            self._emit(ev.StateSlotsReleased(seq_id, slot_ids))

    def _take(self) -> int:
        if not self._empty:
            oldest = next(iter(self._idle))
            unread = (slot_id for slot_id in self._idle if not self.plan.is_expected(self._hash(slot_id)))
            self._drop(self.slots[next(unread, oldest)])
        slot_id = self._empty.popleft()
        self.slots[slot_id].ref_count = 1
        return slot_id

    def _drop(self, slot: StateSlot) -> None:
        """Drop a snapshot, of an idle slot or of one that its only holder will write."""
        block_hash = self._hash(slot.slot_id)
        del self._index[block_hash]
        slot.prefix = None
        self.num_dropped += 1
        if not slot.ref_count:
            del self._idle[slot.slot_id]
            self._empty.append(slot.slot_id)
        for made in (self._made_now, self._made_before):
            if slot.slot_id in made:
                made.remove(slot.slot_id)
        if self._emit is not None:
            self._emit(ev.CheckpointDropped(slot.slot_id, block_hash))

    def _hash(self, slot_id: int) -> int:
        prefix = self.slots[slot_id].prefix
        assert prefix is not None, "a snapshot has a prefix"
        return prefix.hash

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: list[StateUser] | None) -> None:
        """Verify every invariant; given the sequences, also that they explain what is held."""
        empty, idle = set(self._empty), set(self._idle)
        assert len(empty) == len(self._empty), "a slot is empty twice"
        assert not empty & idle, f"slots both empty and idle: {sorted(empty & idle)}"
        for slot in self.slots:
            name, has_snapshot = f"slot {slot.slot_id}", slot.prefix is not None
            assert slot.ref_count >= 0, f"{name}: ref_count {slot.ref_count}"
            assert (slot.slot_id in idle) == (slot.ref_count == 0 and has_snapshot), f"{name}: is it idle?"
            assert (slot.slot_id in empty) == (slot.ref_count == 0 and not has_snapshot), f"{name}: is it empty?"
            found = self._index.get(slot.prefix.hash) if slot.prefix is not None else slot.slot_id
            assert found == slot.slot_id, f"{name}: its snapshot is not found"
        assert len(self._index) == sum(slot.prefix is not None for slot in self.slots), "the index has other snapshots"
        if seqs is not None:
            self._check_holders(seqs)

    def _check_holders(self, seqs: list[StateUser]) -> None:
        owners = [0] * len(self.slots)
        for seq in seqs:
            held = () if seq.state is None else {seq.state.read, seq.state.write}
            for slot_id in held:
                if slot_id is not None:
                    owners[slot_id] += 1
        for slot, count in zip(self.slots, owners, strict=True):
            assert slot.ref_count == count, f"slot {slot.slot_id}: ref_count {slot.ref_count}, {count} owners"


def _held(seq: StateUser) -> HeldSlots:
    """The slots of a sequence that runs."""
    assert seq.state is not None, "a running sequence has slots"
    return seq.state
