"""Slots of recurrent state: which sequences hold one, and which keep a checkpoint that prefixes can continue from.

Used by core.state_kind; needs neither torch nor the engine. A layer with recurrent state keeps no K and V of its
tokens but a state of fixed size, which each step replaces. A *slot* holds that of one sequence, over all such layers.

A step reads one slot of a sequence and writes one; usually they are the same. A slot that others may still read is
never written: one with a *checkpoint*, the state after a whole number of blocks, or one that a fork shares. The
sequence then takes a fresh slot, reads the old one and writes the new one in the same step, so nothing is copied:

    step                 1        2          3          4
    tokens of sequence a 0-63     64-127     128        129
    reads, writes        -, 0     0, 1       1, 1       1, 1      slot 0 keeps the state after 64 tokens
    tokens of sequence b                     64-99      100
    reads, writes                            0, 2       2, 2      it has the same first 64 tokens

Both slots are held until the step has been launched; what is written later cannot overtake it.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from pagedcli.core.prefixes import Prefix
from pagedcli.events import (
    CheckpointDropped,
    CheckpointMade,
    CheckpointReason,
    Emit,
    StateSlotsReleased,
    StateSlotTaken,
    StatesRecovered,
)


class StateUser(Protocol):
    """What the slots need of a sequence. It holds the two slots; None: none."""

    seq_id: int
    state_read: int | None  # slot that its last scheduled step starts from; None: from zero
    state_write: int | None  # slot with its state after that step; before its first step, the slot of its hit


class StateSlot:
    """A place for one state."""

    __slots__ = ("prefix", "ref_count", "slot_id")

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.ref_count = 0  # sequences that hold it
        self.prefix: Prefix | None = None  # tokens before a checkpoint; None: there is none


class StateSlots:
    """Owns all slots and the map from prefix to checkpoint.

    A slot is *empty* (held by no sequence, no checkpoint), *idle* (a checkpoint that no sequence holds) or held. A
    fresh slot is the empty one that was released first; without any, the idle checkpoint that was released first is
    dropped, those that no known request will read before the others (`is_expected`, by hash).
    """

    def __init__(self, num_slots: int, *, is_expected: Callable[[int], bool], emit: Emit | None = None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.slots = [StateSlot(slot_id) for slot_id in range(num_slots)]
        self.num_made = self.num_dropped = self.num_read = 0  # checkpoints
        self._empty = deque(range(num_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int] = {}  # hash of a checkpoint's prefix -> slot
        # checkpoints made in this step, which no sequence of it may read, and in unread steps: perhaps not written yet
        self._made_now: list[int] = []
        self._made_before: list[int] = []
        self._moved: list[StateUser] = []  # their last steps read another slot than they write
        self._is_expected = is_expected
        self._emit = emit

    # ------------------------------------------------------------------ questions

    @property
    def num_available(self) -> int:
        """Slots that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self.slots) - self.num_available

    def find(self, prefix: Prefix) -> int | None:
        """The slot with the state after these tokens, also where a step of now writes it."""
        slot_id = self._index.get(prefix.hash)
        if slot_id is None:
            return None
        found = self.slots[slot_id].prefix
        return slot_id if found is not None and found.same_as(prefix) else None

    def find_written(self, prefix: Prefix) -> int | None:
        """The slot with the state after these tokens, if a step that is scheduled now can read it."""
        slot_id = self.find(prefix)
        return None if slot_id in self._made_now else slot_id

    def writes_in_place(self, seq: StateUser) -> bool:
        """Whether the sequence's next step may write the slot that it reads: nobody else will read it."""
        if seq.state_write is None:
            return False
        slot = self.slots[seq.state_write]
        return slot.ref_count == 1 and slot.prefix is None

    def can_write(self, seq: StateUser) -> bool:
        """Whether advance would succeed."""
        if self.num_available or self.writes_in_place(seq):
            return True
        return seq.state_write is not None and self.slots[seq.state_write].ref_count == 1

    # ------------------------------------------------------------------ changes

    def read(self, seq: StateUser, slot_id: int) -> None:
        """Let a sequence without a slot continue from a checkpoint. The caller reports it."""
        assert seq.state_write is None, "a sequence starts from one state"
        self._hold(slot_id)
        self.num_read += 1
        seq.state_write = slot_id

    def advance(self, seq: StateUser) -> None:
        """Choose the slots that the sequence's next step reads and writes. can_write must be true.

        If no slot is left but the sequence is the only one that holds its checkpoint, it drops that and continues in
        place.
        """
        latest = seq.state_write
        if latest is not None and not self.num_available and self.slots[latest].prefix is not None:
            assert self.slots[latest].ref_count == 1, "ask can_write first"
            self._drop(self.slots[latest])
        if self.writes_in_place(seq):
            seq.state_read = latest
            return
        seq.state_read, seq.state_write = latest, self._take()
        self._moved.append(seq)
        if self._emit is not None:
            self._emit(StateSlotTaken(seq.seq_id, seq.state_write))

    def keep(self, seq: StateUser, prefix: Prefix, num_tokens: int, reason: CheckpointReason) -> bool:
        """Make a checkpoint of what the sequence's scheduled step writes, the state after its first num_tokens tokens,
        unless there is one. Returns whether it did."""
        assert seq.state_write is not None, "a scheduled sequence writes a slot"
        slot = self.slots[seq.state_write]
        if prefix.hash in self._index:
            return False
        slot.prefix = prefix
        self._index[prefix.hash] = slot.slot_id
        self._made_now.append(slot.slot_id)
        self.num_made += 1
        if self._emit is not None:
            self._emit(CheckpointMade(seq.seq_id, slot.slot_id, prefix.hash, num_tokens, reason))
        return True

    def fork(self, parent: StateUser, child: StateUser) -> None:
        """Share the parent's state with a sequence that has none."""
        assert child.state_write is None, "a forked sequence has no state yet"
        if parent.state_write is not None:
            self._hold(parent.state_write)
        child.state_write = parent.state_write

    def release(self, seq: StateUser) -> None:
        """Release the slots of a sequence."""
        held = tuple(dict.fromkeys(each for each in (seq.state_read, seq.state_write) if each is not None))
        seq.state_read = seq.state_write = None
        self._release(seq.seq_id, held)

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """The step before has been launched: what it read can be written, and what it wrote can be read."""
        moved, self._moved = self._moved, []
        for seq in moved:
            read, seq.state_read = seq.state_read, seq.state_write
            if read is not None and read != seq.state_write:
                self._release(seq.seq_id, (read,))
        self._made_before += self._made_now
        self._made_now = []

    def confirm(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too: their checkpoints are written."""
        self._made_before.clear()
        if latest:
            self._made_now.clear()

    def recover(self) -> None:
        """Release all slots after a step that raised, and drop the checkpoints that may be unwritten. The sequences
        forget their slots on their own."""
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
            self._emit(StatesRecovered(tuple(kept)))

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
            self._emit(StateSlotsReleased(seq_id, slot_ids))

    def _take(self) -> int:
        if not self._empty:
            oldest = next(iter(self._idle))
            unread = (slot_id for slot_id in self._idle if not self._is_expected(self._hash(slot_id)))
            self._drop(self.slots[next(unread, oldest)])
        slot_id = self._empty.popleft()
        self.slots[slot_id].ref_count = 1
        return slot_id

    def _drop(self, slot: StateSlot) -> None:
        """Drop a checkpoint, of an idle slot or of one that its only holder will write."""
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
            self._emit(CheckpointDropped(slot.slot_id, block_hash))

    def _hash(self, slot_id: int) -> int:
        prefix = self.slots[slot_id].prefix
        assert prefix is not None, "a checkpoint has a prefix"
        return prefix.hash

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: Iterable[StateUser] | None = None) -> None:
        """Verify every invariant; given the sequences, also that their slots explain every ref_count."""
        empty, idle = set(self._empty), set(self._idle)
        assert len(empty) == len(self._empty), "a slot is empty twice"
        assert not empty & idle, f"slots both empty and idle: {sorted(empty & idle)}"
        for slot in self.slots:
            name, has_checkpoint = f"slot {slot.slot_id}", slot.prefix is not None
            assert slot.ref_count >= 0, f"{name}: ref_count {slot.ref_count}"
            assert (slot.slot_id in idle) == (slot.ref_count == 0 and has_checkpoint), f"{name}: is it idle?"
            assert (slot.slot_id in empty) == (slot.ref_count == 0 and not has_checkpoint), f"{name}: is it empty?"
            found = self._index.get(slot.prefix.hash) if slot.prefix is not None else slot.slot_id
            assert found == slot.slot_id, f"{name}: its checkpoint is not found"
        assert len(self._index) == sum(slot.prefix is not None for slot in self.slots), (
            "the index has other checkpoints"
        )
        if seqs is not None:
            self._check_holders(list(seqs))

    def _check_holders(self, seqs: list[StateUser]) -> None:
        owners = [0] * len(self.slots)
        for seq in seqs:
            for slot_id in {seq.state_read, seq.state_write} - {None}:
                assert slot_id is not None
                owners[slot_id] += 1
        for slot, count in zip(self.slots, owners, strict=True):
            assert slot.ref_count == count, f"slot {slot.slot_id}: ref_count {slot.ref_count}, {count} owners"
