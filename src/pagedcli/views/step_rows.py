"""The pool of each step as rows of tables: steps, sequences, blocks, lookups; for models with several groups of layers,
groups; for those with recurrent state, slots. A view; writes no files.

Used by --dump-kv FILE and the docs, whose columns are the fields of the records.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pagedcli.events as ev
from pagedcli.records import Column, count, hash_text
from pagedcli.trace.dispatch import View
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import GroupUse, group_uses
from pagedcli.views.rows import BlockRow, LookupRow, Now, SequenceRow, StepRow, block_rows, chosen, step_row
from pagedcli.views.state_slots import SlotRow, state_slots
from pagedcli.views.stats import RunStats
from pagedcli.views.step_choice import StepChoice

FileRow = tuple[Any, ...]
Write = Callable[[str, Iterable[FileRow]], None]  # the name of a table, and rows of it


TABLES: dict[str, type] = {
    "steps": StepRow, "sequences": SequenceRow, "blocks": BlockRow, "lookups": LookupRow, "groups": GroupUse,
    "slots": SlotRow,
}  # fmt: skip
_STEP = Column("step", "step", count, kind="int", meaning="number of the step, from 0")


def file_columns(table: str) -> list[Column]:
    """The columns of a table: the step, and the fields of its records that files have."""
    columns = [_STEP, *chosen(TABLES[table], "file")]
    return [replace(each, kind="text") if each.show is hash_text else each for each in columns]


def file_row(table: str) -> Callable[[int, object], FileRow]:
    """What makes the row of a file from a step and a record; hashes are text."""
    columns = file_columns(table)[1:]
    read = attrgetter(*(column.key for column in columns))
    hashes = [1 + place for place, column in enumerate(columns) if column.show is hash_text]

    def row(step: int, record: object) -> FileRow:
        values = [step, *read(record)]
        for place in hashes:
            values[place] = hash_text(values[place])
        return tuple(values)

    return row


class StepRows(View):
    """Writes the chosen steps, each as its forward pass sees the pool. Of `lookups`, every one in the range of steps is
    written, whatever `every` says: they are events, not states."""

    def __init__(self, write: Write, chosen: StepChoice) -> None:
        self._write = write
        self._chosen = chosen
        self._row = {table: file_row(table) for table in TABLES}
        self._stats = RunStats()
        self._first_ns: int | None = None
        self.num_steps = 0  # written

    def handlers(self, event_type: type[ev.Event]) -> list[Any]:
        return [*self._stats.handlers(event_type), *super().handlers(event_type)]

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        for table in TABLES:  # each exists even if nothing follows
            if table != "slots" and (table != "groups" or state.num_groups > 1):
                self._write(table, ())

    def on_state_slots_made(self, event: ev.StateSlotsMade, state: PoolState) -> None:
        self._write("slots", ())

    def on_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        if self._first_ns is None:
            self._first_ns = event.time_ns

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        step = state.step_number
        if step is not None and self._chosen.has(step):
            self._add("lookups", step, [LookupRow(event, state.seqs[event.seq_id])])

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        if not self._chosen.shows(event.step):
            return
        assert self._first_ns is not None, "a step has started"
        self.num_steps += 1
        now = Now(state)
        self._add("steps", event.step, [step_row(state, self._stats, self._first_ns)])
        self._add("sequences", event.step, (SequenceRow(seq, now) for seq in state.seqs.values()))
        self._add("blocks", event.step, block_rows(state))
        if state.num_groups > 1:
            self._add("groups", event.step, group_uses(state))
        if state.slots is not None:
            self._add("slots", event.step, state_slots(state))

    def _add(self, table: str, step: int, records: Iterable[object]) -> None:
        row = self._row[table]
        self._write(table, (row(step, record) for record in records))
