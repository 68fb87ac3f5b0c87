"""The slots of recurrent state of a moment: what each holds, for whom, and where its snapshot was made."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pagedcli.events import SNAPSHOT_WORDS, SnapshotReason
from pagedcli.printable import byte_text, plural
from pagedcli.records import Means, hash_text
from pagedcli.trace.state import PoolState, SeqState


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot that is not empty."""

    slot_id: Annotated[int, Means("number of the slot of recurrent state, from 0")]
    kind: Annotated[
        Literal["state", "snapshot"], Means("state (of sequences alone) or snapshot (lookups also find it)")
    ]
    ref_count: Annotated[int, Means("sequences that hold it; 0: an idle snapshot")]
    seq_ids: Annotated[tuple[int, ...], Means("the sequences that hold it")]
    num_tokens: Annotated[int, Means("tokens before the state, after this step")]
    made_by: Annotated[int | None, Means("of a snapshot: the sequence that computed it")]
    reason: Annotated[SnapshotReason | None, Means("of a snapshot, why there: branch, interval or end")]
    made_step: Annotated[int | None, Means("of a snapshot: the step that computed it")]
    hash: Annotated[int | None, hash_text, Means("of a snapshot: the blocks before it, 16 hexadecimal digits")]


def state_slots(state: PoolState) -> Iterator[SlotRow]:
    """The slots that are not empty, in order; none for a model without recurrent state."""
    ledger = state.slots
    if ledger is None:
        return
    holders: dict[int, list[int]] = {}
    for seq_id, slot_ids in ledger.held.items():
        for slot_id in slot_ids:
            holders.setdefault(slot_id, []).append(seq_id)
    for slot_id, ref_count in enumerate(ledger.ref_counts):
        found, seq_ids = ledger.snapshots[slot_id], tuple(holders.get(slot_id, ()))
        if found is not None:
            made = (found.num_tokens, found.seq_id, found.reason, found.step, found.hash)
            yield SlotRow(slot_id, "snapshot", ref_count, seq_ids, *made)
        elif ref_count:
            yield SlotRow(slot_id, "state", ref_count, seq_ids, _tokens_before(state, slot_id), None, None, None, None)


def _tokens_before(state: PoolState, slot_id: int) -> int:
    """The tokens before a state: of a sequence that reads this slot and writes another, those before its new ones."""
    assert state.slots is not None
    new_tokens = {} if state.step is None else state.step.new_tokens
    before = 0
    for seq in state.running():
        held = state.slots.held.get(seq.seq_id, [])
        if slot_id in held:
            is_read = held[-1] != slot_id
            before = max(before, seq.num_computed_tokens - (new_tokens.get(seq.seq_id, 0) if is_read else 0))
    return before


def slot_counts(state: PoolState) -> dict[str, int] | None:
    """Slots by what they hold; None for a model without recurrent state."""
    ledger = state.slots
    if ledger is None:
        return None
    num_kept = sum(found is not None for found in ledger.snapshots)
    return {
        "total": ledger.num_slots, "in_use": ledger.num_held, "idle": len(ledger.idle), "empty": len(ledger.empty),
        "snapshots": num_kept,
    }  # fmt: skip


def slots_line(state: PoolState) -> str | None:
    """`in use 5 + idle snapshots 4 + empty 3 = 12 state slots of 144.0 MiB (1.7 GiB); 6 snapshots`."""
    counts = slot_counts(state)
    if counts is None or state.slots is None:
        return None
    slot_bytes = state.slots.slot_bytes
    return (
        f"in use {counts['in_use']:,} + idle snapshots {counts['idle']:,} + empty {counts['empty']:,} = "
        f"{plural(counts['total'], 'state slot')} of {byte_text(slot_bytes)} "
        f"({byte_text(counts['total'] * slot_bytes)}); {plural(counts['snapshots'], 'snapshot')}"
    )


def slot_words(slot: SlotRow) -> str:
    """What a slot holds, and for whom."""
    held = f"held by seq {', '.join(map(str, slot.seq_ids))}" if slot.seq_ids else "held by nobody"
    after = f"the state after {plural(slot.num_tokens, 'token')}"
    if slot.reason is None:
        return f"{after}, {held}"
    made = f"made in step {slot.made_step} by seq {slot.made_by}: {SNAPSHOT_WORDS[slot.reason]}"
    return f"snapshot, {after}, {held}; {made}"


def slots_of(state: PoolState, seq: SeqState) -> str | None:
    """The slots that a sequence holds, in words; None: none."""
    held = [] if state.slots is None else state.slots.held.get(seq.seq_id, [])
    if not held or state.slots is None:
        return None
    parts = [f"slot {held[-1]}"]
    for slot_id in held[:-1]:
        found = state.slots.snapshots[slot_id]
        what = "a state it shares" if found is None else f"the snapshot at {plural(found.num_tokens, 'token')}"
        parts.append(f"continues from {what} in slot {slot_id}")
    return ", ".join(parts)
