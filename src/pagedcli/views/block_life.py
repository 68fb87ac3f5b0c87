"""The life of one block: who held it and when, and what it contained. A view of PoolState.

Used by `trace RUN --block` and `explain --block`. With tokens recorded it also knows the tokens in the block.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.errors import UsageError
from pagedcli.records import hash_text
from pagedcli.trace.dispatch import Handler
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import TokenView
from pagedcli.views.rows import tokens_in_block
from pagedcli.views.words import seq_name


@dataclass(slots=True)
class Tenure:
    """One sequence's hold of the block."""

    seq_id: int
    label: Annotated[str, "request"]
    place: Annotated[int, "place in table"]  # place from 0 on
    group: int  # the group of layers whose K and V it held
    since: Annotated[int | None, "from step"]  # None: before the first
    until: Annotated[int | None, "to step"] = None  # the step that released it; None: still held
    how: Annotated[str, "how it got it"] = ""
    end: Annotated[str | None, "how it ended"] = None


@dataclass(slots=True, kw_only=True)
class HeldContent:
    """What the block held once it was full."""

    hash: Annotated[str | None, "content"]
    group: int  # the group of layers whose K and V it held
    since: Annotated[int | None, "from step"]
    until: Annotated[int | None, "to step"] = None  # the step that dropped it; None: still there
    seq_id: Annotated[int, "filled by seq"]
    label: Annotated[str, "request"]
    num_reuses: Annotated[int, "times found again"] = 0
    # the sequence that needed the room; empty in older traces; None: not evicted
    evicted_for: Annotated[str | None, "evicted for"] = None
    token_ids: tuple[int, ...] | None  # None: not recorded
    text: str | None = None  # text of the tokens, once it is decoded


class BlockLife(TokenView):
    """Watches one block."""

    def __init__(self, block_id: int) -> None:
        super().__init__()
        self.block_id = block_id
        self.tenures: list[Tenure] = []
        self.contents: list[HeldContent] = []
        self._holders: dict[int, Tenure] = {}  # the present ones by sequence

    def handlers(self, event_type: type[ev.Event]) -> list[Handler]:
        moves = [self._move] if event_type in (ev.BlockCopied, ev.BlocksReleased) else []
        return [*super().handlers(event_type), *moves]

    @property
    def owners(self) -> list[Tenure]:
        """The holds of this moment."""
        return list(self._holders.values())

    def token_ids(self, state: PoolState) -> tuple[int, ...] | None:
        """The tokens in the block now, as far as they are recorded; None: not at all, or it is empty."""
        if state.hashes[self.block_id] is not None:
            return self.contents[-1].token_ids
        written = []
        for each in self.owners:
            token_ids = self._slice(each.seq_id, each.place, state)
            if token_ids is not None:
                written.append(token_ids[: tokens_in_block(state.seqs[each.seq_id], each.place, state)])
        return max(written, key=len, default=None)

    def _slice(self, seq_id: int, place: int, state: PoolState) -> tuple[int, ...] | None:
        """The tokens of a sequence that belong in the block at a place of its table."""
        token_ids = self._token_ids.get(seq_id)
        first = place // state.num_groups * state.block_size
        return None if token_ids is None else tuple(token_ids[first : first + state.block_size])

    # ------------------------------------------------------------------ events

    def _move(self, event: ev.BlockCopied | ev.BlocksReleased, state: PoolState) -> None:
        """A copy took the place of the block that it copies, or blocks before this one left the table."""
        tenure = self._holders.get(event.seq_id)
        if tenure is not None:
            tenure.place = state.seqs[event.seq_id].block_table.index(self.block_id)
            tenure.group = state.block_groups[self.block_id]

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        super().on_engine_started(event, state)
        self._end_all(state, "the run was cut off")
        self._drop_content(state.step_number)

    def on_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        super().on_draft_checked(event, state)
        if self.block_id in event.block_ids:
            self._end(event.seq_id, "taken for rejected draft tokens", state)

    def on_blocks_allocated(self, event: ev.BlocksAllocated, state: PoolState) -> None:
        if self.block_id in event.block_ids:
            self._begin(event.seq_id, "allocated", state)

    def on_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        if self.block_id in event.block_ids:
            self._begin(event.seq_id, "found in the cache", state)
            self.contents[-1].num_reuses += 1

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        super().on_sequence_forked(event, state)
        if self.block_id in event.block_ids:
            self._begin(event.seq_id, f"forked from seq {event.parent_seq_id}", state)

    def on_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        seq = state.seqs[event.seq_id]
        for index, block_id, block_hash, _ in event.blocks:
            if block_id == self.block_id:
                self._hold(block_hash, seq, index, state)

    def on_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        if self.block_id not in event.block_ids:
            return
        seq = state.seqs[event.seq_id]
        block_hash = event.hashes[event.block_ids.index(self.block_id)]
        self._hold(block_hash, seq, seq.block_table.index(self.block_id), state)

    def on_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        if event.block_id == self.block_id:
            needed_by = "" if event.for_seq_id is UNSET else seq_name(state, event.for_seq_id)
            self.contents[-1].evicted_for = needed_by
            self._drop_content(state.step_number)

    def on_blocks_released(self, event: ev.BlocksReleased, state: PoolState) -> None:
        if self.block_id in event.block_ids:
            self._end(event.seq_id, "finished" if event.seq_id in state.finished else "released", state)

    def on_window_passed(self, event: ev.WindowPassed, state: PoolState) -> None:
        if self.block_id in event.block_ids:
            self._end(event.seq_id, "no later token sees it", state)

    def on_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        for each in self.tenures[::-1]:
            if each.seq_id == event.seq_id and each.until == state.step_number and each.end == "released":
                each.end = "preempted"
                return

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._end_all(state, "the step failed")
        if self.block_id not in event.cached_block_ids:
            self._drop_content(state.step_number)

    # ------------------------------------------------------------------ parts

    def _begin(self, seq_id: int, how: str, state: PoolState) -> None:
        seq = state.seqs[seq_id]
        place = len(seq.block_table) - 1 - seq.block_table[::-1].index(self.block_id)
        tenure = Tenure(seq_id, seq.label, place, state.block_groups[self.block_id], state.step_number, how=how)
        self.tenures.append(tenure)
        self._holders[seq_id] = tenure

    def _hold(self, block_hash: int, seq: SeqState, place: int, state: PoolState) -> None:
        """The block at a place of a sequence's table is full."""
        self.contents.append(
            HeldContent(
                hash=hash_text(block_hash), group=state.block_groups[self.block_id], since=state.step_number,
                seq_id=seq.seq_id, label=seq.label, token_ids=self._slice(seq.seq_id, place, state),
            )
        )  # fmt: skip

    def _end(self, seq_id: int, how: str, state: PoolState) -> None:
        tenure = self._holders.pop(seq_id)
        tenure.until, tenure.end = state.step_number, how

    def _end_all(self, state: PoolState, how: str) -> None:
        for seq_id in list(self._holders):
            self._end(seq_id, how, state)

    def _drop_content(self, step: int | None) -> None:
        if self.contents and self.contents[-1].until is None:
            self.contents[-1].until = step


def lived(reader: TraceReader, block_id: int, step: int | None) -> tuple[BlockLife, PoolState]:
    """The block's life up to a step; None: to the end. Raises: UsageError if there is no such block or step."""
    life = BlockLife(block_id)
    folding = pool_fold(life)
    for event in folding.steps(reader):
        state = folding.state
        if block_id >= state.num_blocks:
            raise UsageError(f"there is no block {block_id}: {reader.path} has blocks 0 to {state.num_blocks - 1}")
        if isinstance(event, ev.StepScheduled) and event.step == step:
            return life, state
    if step is not None:
        raise UsageError(f"{reader.path} has no step {step}: the last one is {folding.state.step_number}")
    return life, folding.state
