"""The blocks of a pool and the slots of recurrent state, rebuilt from the engine's events: parts of PoolState."""

import copy
from collections import Counter, OrderedDict
from dataclasses import dataclass

import pagedcli.events as ev


class BlockLedger:
    """Per block: ref_counts, hashes, parent_hashes (of the chain before a full block), filler_seq_ids, and the group of
    layers that block_groups names: the one that wrote it last.

    A block is in use (ref_count > 0), cached (free and full) or empty (free, no content).
    """

    finds_copies = True  # whether lookups find a copy of evicted content; not in traces of schema 3

    def __init__(self) -> None:
        self.reset_blocks(0)

    def reset_blocks(self, num_blocks: int) -> None:
        """Make all blocks empty."""
        self.ref_counts = [0] * num_blocks
        self.hashes: list[int | None] = [None] * num_blocks
        self.parent_hashes: list[int | None] = [None] * num_blocks
        self.filler_seq_ids: list[int | None] = [None] * num_blocks
        self.block_groups = [0] * num_blocks
        self.hash_to_block_id: dict[int, int] = {}
        self.copies: dict[int, dict[int, None]] = {}  # hash -> full blocks that lookups do not find, first filled first
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self.num_cached_blocks = 0  # free and full
        self.num_full_blocks = 0  # sum of those in use and the cached ones
        self.num_shared_blocks = 0  # ref_count 2 or more
        self.num_shared_partial_blocks = 0
        self.num_references = 0  # sum of the ref_counts

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    @property
    def num_used_blocks(self) -> int:
        return len(self.ref_counts) - len(self.free_block_ids)

    @property
    def num_empty_blocks(self) -> int:
        return len(self.free_block_ids) - self.num_cached_blocks

    @property
    def num_blocks_saved(self) -> int:
        """How many more blocks would be in use without sharing."""
        return self.num_references - self.num_used_blocks

    def ref_count_histogram(self) -> dict[int, int]:
        """ref_count -> number of blocks in use, ascending."""
        histogram = Counter(self.ref_counts)
        del histogram[0]
        return dict(sorted(histogram.items()))

    # ------------------------------------------------------------------ changes

    def hold(self, block_id: int) -> None:
        """Add an owner."""
        count = self.ref_counts[block_id]
        if count == 0:
            del self.free_block_ids[block_id]
            self.num_cached_blocks -= self.hashes[block_id] is not None
        if count == 1:
            self.num_shared_blocks += 1
            self.num_shared_partial_blocks += self.hashes[block_id] is None
        self.ref_counts[block_id] = count + 1
        self.num_references += 1

    def let_go(self, block_id: int) -> bool:
        """Remove an owner. A block without owners joins the free list: at its back if cached, else at its front.
        Returns whether it did."""
        count = self.ref_counts[block_id] - 1
        self.ref_counts[block_id] = count
        self.num_references -= 1
        if count:
            if count == 1:
                self.num_shared_blocks -= 1
                self.num_shared_partial_blocks -= self.hashes[block_id] is None
            return False
        self.free_block_ids[block_id] = None
        if self.hashes[block_id] is None:
            self.free_block_ids.move_to_end(block_id, last=False)
        else:
            self.num_cached_blocks += 1
        return True

    def mark_full(self, block_id: int, block_hash: int, parent_hash: int | None, seq_id: int) -> None:
        """Mark a block in use as full: lookups find it by its hash, unless they already find another."""
        self.hashes[block_id] = block_hash
        self.parent_hashes[block_id] = parent_hash
        self.filler_seq_ids[block_id] = seq_id
        self._index(block_id, block_hash)
        self.num_full_blocks += 1

    def _index(self, block_id: int, block_hash: int) -> None:
        if self.hash_to_block_id.setdefault(block_hash, block_id) != block_id:
            self.copies.setdefault(block_hash, {})[block_id] = None

    def evict(self, block_id: int, block_hash: int) -> None:
        """Drop a cached block's content. If lookups found it, they find the first of its copies from now on."""
        copies = self.copies.get(block_hash, {})
        if self.hash_to_block_id.get(block_hash) != block_id:
            copies.pop(block_id, None)
        elif copies and self.finds_copies:
            self.hash_to_block_id[block_hash] = next(iter(copies))
            del copies[self.hash_to_block_id[block_hash]]
        else:
            del self.hash_to_block_id[block_hash]
        if block_hash in self.copies and not copies:
            del self.copies[block_hash]
        self.hashes[block_id] = self.parent_hashes[block_id] = self.filler_seq_ids[block_id] = None
        self.num_cached_blocks -= 1
        self.num_full_blocks -= 1

    def free_all(self, cached_block_ids: tuple[int, ...]) -> None:
        """Free all blocks; only these keep their content. They are free in this order, after the empty ones."""
        cached = set(cached_block_ids)
        empty = [block_id for block_id in range(self.num_blocks) if block_id not in cached]
        for block_id in empty:
            self.hashes[block_id] = self.parent_hashes[block_id] = self.filler_seq_ids[block_id] = None
        self.ref_counts = [0] * self.num_blocks
        self.free_block_ids = OrderedDict.fromkeys([*empty, *cached_block_ids])
        self.num_cached_blocks = self.num_full_blocks = len(cached_block_ids)
        self.num_shared_blocks = self.num_shared_partial_blocks = self.num_references = 0
        found = self.hash_to_block_id.items()
        self.hash_to_block_id, self.copies = {each: block_id for each, block_id in found if block_id in cached}, {}
        for block_id in cached_block_ids:
            block_hash = self.hashes[block_id]
            if block_hash is not None and (self.finds_copies or block_hash in self.hash_to_block_id):
                self._index(block_id, block_hash)

    def _copy_ledger(self, other: "BlockLedger") -> None:
        other.copies = {block_hash: copies.copy() for block_hash, copies in self.copies.items()}
        per_block = "ref_counts", "hashes", "parent_hashes", "filler_seq_ids", "block_groups"
        for name in (*per_block, "hash_to_block_id", "free_block_ids"):
            setattr(other, name, getattr(self, name).copy())


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """A state that later sequences can continue from, according to the events."""

    hash: int  # chain hash of the blocks before it
    num_tokens: int  # tokens before it
    seq_id: int  # the sequence that computed it
    reason: ev.SnapshotReason
    step: int | None  # None: made before the first step, or by an earlier run


class SlotLedger:
    """Per slot: ref_counts, snapshots. Per sequence: held, the slots that it holds, that of its latest state last.

    A slot is held, idle (a snapshot that no sequence holds) or empty.
    """

    def __init__(self, event: ev.StateSlotsMade) -> None:
        self.slot_bytes = event.slot_bytes
        self.policy = event.checkpoints
        self.ref_counts = [0] * event.num_slots
        self.snapshots: list[StateSnapshot | None] = [None] * event.num_slots
        self.held: dict[int, list[int]] = {}
        self.empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(event.num_slots))  # first released first
        self.idle: OrderedDict[int, None] = OrderedDict()  # first released first
        self.index: dict[int, int] = {}  # hash -> slot
        self.lookup: ev.CheckpointLookedUp | None = None  # the last one: of the PrefixLookedUp that follows

    @property
    def num_slots(self) -> int:
        return len(self.ref_counts)

    @property
    def num_held(self) -> int:
        return self.num_slots - len(self.empty) - len(self.idle)

    def can_grow(self, seq_id: int) -> bool:
        """Whether there is a slot for the state after a sequence's next step: one that nobody holds, or its own."""
        held = self.held.get(seq_id)
        return bool(self.empty or self.idle or (held and self.ref_counts[held[-1]] == 1))

    def is_readable(self, block_hash: int, step: int | None) -> bool:
        """Whether a step can continue from the state after this chain: there is one, not made by the step itself."""
        slot_id = self.index.get(block_hash)
        found = None if slot_id is None else self.snapshots[slot_id]
        return found is not None and (found.step is None or found.step != step)

    def hold(self, seq_id: int, slot_id: int) -> None:
        """Let a sequence hold a slot, as its latest state."""
        if not self.ref_counts[slot_id]:
            self.empty.pop(slot_id, None)
            self.idle.pop(slot_id, None)
        self.ref_counts[slot_id] += 1
        self.held.setdefault(seq_id, []).append(slot_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Share the latest state of a sequence."""
        if parent_id in self.held:
            self.hold(child_id, self.held[parent_id][-1])

    def on_state_slot_taken(self, event: ev.StateSlotTaken) -> None:
        self.hold(event.seq_id, event.slot_id)

    def on_state_slots_released(self, event: ev.StateSlotsReleased) -> None:
        held = self.held[event.seq_id]
        for slot_id in event.slot_ids:
            held.remove(slot_id)
            self.ref_counts[slot_id] -= 1
            if not self.ref_counts[slot_id]:
                free = self.empty if self.snapshots[slot_id] is None else self.idle
                free[slot_id] = None
        if not held:
            del self.held[event.seq_id]

    def keep(self, event: ev.CheckpointMade | ev.CheckpointRestored, step: int | None) -> None:
        """Make a snapshot. `step`: None: any step can read it."""
        found = StateSnapshot(event.hash, event.num_tokens, event.seq_id, event.reason, step)
        self.snapshots[event.slot_id] = found
        self.index[event.hash] = event.slot_id

    def on_checkpoint_restored(self, event: ev.CheckpointRestored) -> None:
        """A snapshot of an earlier run fills an empty slot, and any step can read it."""
        del self.empty[event.slot_id]
        self.idle[event.slot_id] = None
        self.keep(event, None)

    def on_checkpoint_dropped(self, event: ev.CheckpointDropped) -> None:
        del self.index[event.hash]
        self.snapshots[event.slot_id] = None
        if self.idle.pop(event.slot_id, 0) is None:
            self.empty[event.slot_id] = None

    def on_states_recovered(self, event: ev.StatesRecovered) -> None:
        """All slots are released; only these keep their snapshots."""
        kept = set(event.idle_slot_ids)
        for slot_id, found in enumerate(self.snapshots):
            if found is not None and slot_id not in kept:
                del self.index[found.hash]
                self.snapshots[slot_id] = None
        self.ref_counts = [0] * self.num_slots
        self.held = {}
        self.idle = OrderedDict.fromkeys(event.idle_slot_ids)
        self.empty = OrderedDict.fromkeys(slot_id for slot_id in range(self.num_slots) if slot_id not in kept)

    def copy(self) -> "SlotLedger":
        other = copy.copy(self)
        for name in ("ref_counts", "snapshots", "empty", "idle", "index"):
            setattr(other, name, getattr(self, name).copy())
        other.held = {seq_id: slot_ids.copy() for seq_id, slot_ids in self.held.items()}
        return other
