"""The pool and the block tables at every step, as changes since the step before: what the report's slider shows."""

from array import array

import pagedcli.events as ev
from pagedcli.core.prefixes import num_equal
from pagedcli.trace.dispatch import View
from pagedcli.trace.state import PoolState

_MOST_SHARED = 11  # largest number of owners distinguished on the map
_Taken = ev.BlocksReused | ev.BlocksAllocated | ev.BlocksReleased | ev.SequenceForked | ev.WindowPassed


class BlockFrames(View[PoolState]):
    """The pool at every step as changes since the previous step: block_id * 16 + code.

    0 empty, 1 cached and reusable, 2 being filled, 3 in use and full, 4 ... 13 shared by 2 ... 11 and more.
    """

    def __init__(self) -> None:
        self.deltas: list[array[int]] = []
        self.first_step = 0
        self._codes = bytearray()
        self._touched: set[int] = set()

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        self._touched.update(range(len(self._codes)))  # another part begins with an empty pool

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self._add_step(event.step, state)

    def _add_step(self, step: int, state: PoolState) -> None:
        if not self.deltas:
            self.first_step = step
        self.add(state)

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._touched.update(range(state.num_blocks))
        if state.step is not None and not state.step.scheduled:
            self._add_step(event.step, state)

    def on_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        self._touched.add(event.block_id)

    def _touch(self, event: _Taken | ev.BlocksFilled, state: PoolState) -> None:
        self._touched.update(block_id for block_id in event.block_ids if block_id is not None)

    on_blocks_reused = on_blocks_allocated = on_blocks_filled = on_blocks_released = on_sequence_forked = _touch
    on_window_passed = _touch

    def add(self, state: PoolState) -> None:
        """Append a frame of the current pool."""
        codes = self._codes
        if not codes:
            codes.extend(bytes(state.num_blocks))
        delta = array("q")
        for block_id in sorted(self._touched):
            ref_count, full = state.ref_counts[block_id], state.hashes[block_id] is not None
            code = 2 + min(ref_count, _MOST_SHARED) if ref_count > 1 else 2 * ref_count + full
            if code != codes[block_id]:
                codes[block_id] = code
                delta.append(block_id * 16 + code)
        self._touched.clear()
        self.deltas.append(delta)

    def grouped(self, group: int) -> list[list[int]]:
        """One frame per group of steps, with all their changes, and one for the end of the run."""
        if group == 1:
            return [delta.tolist() for delta in self.deltas]
        *steps, end = self.deltas
        groups = [steps[start : start + group] for start in range(0, len(steps), group)]
        frames = [{packed >> 4: packed for delta in deltas for packed in delta} for deltas in groups]
        return [*(list(last.values()) for last in frames), end.tolist()]


class TableFrames(View[PoolState]):
    """The block tables at every step as changes since the previous step, one `[seq_id, kept, *block_ids]` per changed
    table: its first `kept` blocks stay, the others are replaced by these. Frames are those of BlockFrames."""

    def __init__(self) -> None:
        self.deltas: list[list[array[int]]] = []
        self._tables: dict[int, list[int]] = {}  # as of the last frame
        self._touched: dict[int, None] = {}

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        self._touched.update(dict.fromkeys(self._tables))

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self.add(state)

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._touched.update(dict.fromkeys(self._tables))
        if state.step is not None and not state.step.scheduled:
            self.add(state)

    def _touch(
        self,
        event: ev.BlocksReused
        | ev.BlocksAllocated
        | ev.BlocksReleased
        | ev.SequenceForked
        | ev.BlockCopied
        | ev.WindowPassed,
        state: PoolState,
    ) -> None:
        self._touched[event.seq_id] = None

    on_blocks_reused = on_blocks_allocated = on_blocks_released = on_sequence_forked = on_block_copied = _touch
    on_window_passed = _touch

    def add(self, state: PoolState) -> None:
        """Append a frame of the current tables."""
        frame = []
        for seq_id in self._touched:
            seq = state.seqs.get(seq_id)
            table = [] if seq is None else seq.held_block_ids
            before = self._tables.get(seq_id, [])
            kept = num_equal(before, table)
            if kept < max(len(before), len(table)):
                frame.append(array("q", (seq_id, kept, *table[kept:])))
                self._tables[seq_id] = table.copy()
                if not table:
                    del self._tables[seq_id]
        self._touched.clear()
        self.deltas.append(frame)

    def grouped(self, group: int) -> list[list[list[int]]]:
        """As BlockFrames.grouped: the changes of a group's steps, in order."""
        *steps, end = self.deltas
        groups = [steps[start : start + group] for start in range(0, len(steps), group)]
        return [[change.tolist() for frame in frames for change in frame] for frames in [*groups, [end]]]
