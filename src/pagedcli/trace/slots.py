"""The slots of recurrent state, rebuilt from the engine's events: part of PoolState, and the laws of their changes."""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import pagedcli.events as ev
from pagedcli.core.states import CheckpointPolicy
from pagedcli.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that later sequences can continue from, according to the events."""

    slot_id: int
    hash: int  # chain hash of the blocks before it
    num_tokens: int  # tokens before it
    seq_id: int  # the sequence that computed it
    reason: ev.CheckpointReason
    step: int | None  # None: made before the first step


class SlotLedger:
    """Per slot: ref_counts, checkpoints. Per sequence: held, the slots that it holds, that of its latest state last.

    A slot is held, idle (a checkpoint that no sequence holds) or empty.
    """

    def __init__(self, event: ev.StateSlotsMade) -> None:
        self.slot_bytes = event.slot_bytes
        self.policy = event.checkpoints
        self.ref_counts = [0] * event.num_slots
        self.checkpoints: list[Checkpoint | None] = [None] * event.num_slots
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

    def is_readable(self, block_hash: int, step: int | None) -> bool:
        """Whether a step can continue from the state after this chain: there is one, not made by the step itself."""
        slot_id = self.index.get(block_hash)
        found = None if slot_id is None else self.checkpoints[slot_id]
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

    def release(self, seq_id: int, slot_ids: tuple[int, ...]) -> None:
        held = self.held[seq_id]
        for slot_id in slot_ids:
            held.remove(slot_id)
            self.ref_counts[slot_id] -= 1
            if not self.ref_counts[slot_id]:
                free = self.empty if self.checkpoints[slot_id] is None else self.idle
                free[slot_id] = None
        if not held:
            del self.held[seq_id]

    def keep(self, event: ev.CheckpointMade, step: int | None) -> None:
        """Make a checkpoint."""
        found = Checkpoint(event.slot_id, event.hash, event.num_tokens, event.seq_id, event.reason, step)
        self.checkpoints[event.slot_id] = found
        self.index[event.hash] = event.slot_id

    def drop(self, slot_id: int) -> None:
        """Drop a checkpoint."""
        found = self.checkpoints[slot_id]
        assert found is not None, "the laws have checked it"
        del self.index[found.hash]
        self.checkpoints[slot_id] = None
        if self.idle.pop(slot_id, 0) is None:
            self.empty[slot_id] = None

    def recover(self, idle_slot_ids: tuple[int, ...]) -> None:
        """Release all slots; only these keep their checkpoints."""
        kept = set(idle_slot_ids)
        for slot_id, found in enumerate(self.checkpoints):
            if found is not None and slot_id not in kept:
                del self.index[found.hash]
                self.checkpoints[slot_id] = None
        self.ref_counts = [0] * self.num_slots
        self.held = {}
        self.idle = OrderedDict.fromkeys(idle_slot_ids)
        self.empty = OrderedDict.fromkeys(slot_id for slot_id in range(self.num_slots) if slot_id not in kept)

    def copy(self) -> "SlotLedger":
        """A snapshot that later events do not change."""
        other = copy.copy(self)
        for name in ("ref_counts", "checkpoints", "empty", "idle", "index"):
            setattr(other, name, getattr(self, name).copy())
        other.held = {seq_id: slot_ids.copy() for seq_id, slot_ids in self.held.items()}
        return other


def is_policy(name: str) -> bool:
    """Whether a configuration could have this value."""
    try:
        CheckpointPolicy.named(name)
    except ConfigError:
        return False
    return True
