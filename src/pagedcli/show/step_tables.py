"""A step as tables: sequences with block tables and ref counts, shared prefixes, lookups, hit rates.

Used by --dump-kv, --step and --steps. The same cells at every width: what does not fit continues on a further line.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from rich.console import Console
from rich.text import Text

from pagedcli.events import SNAPSHOT_WORDS, Event, StepScheduled
from pagedcli.printable import id_ranges, one_line, printable_json
from pagedcli.records import Column, computed
from pagedcli.show.panels import block_ids_text, hit_table, pool_line, ref_counts_line, why_waiting
from pagedcli.show.tables import Format, Piece, Table, TableRow, as_markdown, laid_out, markdown_text, table
from pagedcli.show.terminal import HeldClock
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import GroupUse, group_uses
from pagedcli.views.moment import Moment
from pagedcli.views.names import NamedRequest
from pagedcli.views.rows import LookupRow, Now, SequenceRow, ShownRow, chosen, values_of
from pagedcli.views.state_slots import slots_line, state_slots
from pagedcli.views.step_choice import StepChoice

_STYLES = {
    "prefill": "cyan", "decode": "green", "stalled": "bold yellow", "waiting": "yellow",
    "preempted": "bold red",
}  # fmt: skip
_SHARED = "magenta"  # what several sequences hold, as in the application
_LEAST_ROOM = 30  # cells for wrapped text; with less it gets a line of its own
_LEAST_BLOCKS = 2  # a single block is as short as a name
Blocks = Sequence[int | None]

# ---------------------------------------------------------------------- shared prefixes


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """The first `num_blocks` blocks of some block tables, from `start` on told by this name."""

    name: str
    parent: str | None  # the name of what comes before `start`
    start: int
    block_ids: tuple[int, ...]  # the blocks from `start` on
    seq_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.block_ids)


def shared_prefixes(tables: Mapping[int, Blocks]) -> tuple[list[NamedPrefix], dict[int, NamedPrefix]]:
    """The shared beginnings of block tables (by sequence), parents first, and for each sequence its longest one.

    Tables 0 1 2 3 8, 0 1 2 3 9 and 0 1 5 share P1 = 0 1, the first two also P2 = P1 2 3. A block that a window has
    released ends a beginning.
    """
    found: list[NamedPrefix] = []
    longest: dict[int, NamedPrefix] = {}
    # sequences with equal blocks up to `at`, told by `parent` up to its end
    groups: deque[tuple[list[int], int, NamedPrefix | None]] = deque([(list(tables), 0, None)])
    while groups:
        seq_ids, start, parent = groups.popleft()
        for same in _by_block(seq_ids, start, tables):
            end = start + 1
            while (further := _by_block(same, end, tables)) and len(further[0]) == len(same):
                end += 1
            begin = 0 if parent is None else parent.end
            block_ids = tuple(block_id for block_id in tables[same[0]][begin:end] if block_id is not None)
            inner = parent
            if len(block_ids) >= _LEAST_BLOCKS:
                name = f"P{len(found) + 1}"
                inner = NamedPrefix(name, None if parent is None else parent.name, begin, block_ids, tuple(same))
                found.append(inner)
                longest.update(dict.fromkeys(same, inner))
            groups.append((same, end, inner))
    return found, longest


def _by_block(seq_ids: Iterable[int], place: int, tables: Mapping[int, Blocks]) -> list[list[int]]:
    """The sequences grouped by the block at a place, without those that are alone."""
    by_block: dict[int, list[int]] = defaultdict(list)
    for seq_id in seq_ids:
        table = tables[seq_id]
        if place < len(table) and (block_id := table[place]) is not None:
            by_block[block_id].append(seq_id)
    return [same for same in by_block.values() if len(same) > 1]


# ---------------------------------------------------------------------- tables of a step


def step_tables(moment: Moment) -> list[Table]:
    """The tables of a moment; those without rows are left out."""
    state = moment.state
    tables_of = {seq.seq_id: seq.block_table for seq in state.running()}
    prefixes, longest = shared_prefixes(tables_of)
    slots = table(_Slot, "state_slots", "Slots of recurrent state", map(_Slot, state_slots(state)))
    of_pool = [_prefixes(prefixes), group_table(state), slots]
    tables = [_sequences(moment, longest), *of_pool, _lookups(moment), hit_table(moment)]
    return [table for table in tables if table.rows]


def _sequences(moment: Moment, longest: Mapping[int, NamedPrefix]) -> Table:
    """Every sequence, or the followed ones: those that run before those that wait."""
    state, now = moment.state, Now(moment.state)
    rows: list[TableRow] = []
    for seq in _shown(moment, state.running()):
        blocks = _table_text(seq, longest.get(seq.seq_id), state)
        row = SequenceRow(seq, now)
        rows.append(values_of(row, "table") | values_of(row, "followed") | {"blocks": blocks})
    for place, seq in enumerate(state.waiting()):
        if _shown(moment, [seq]):
            held = {"num_blocks": 0, "share": 0.0, "blocks": why_waiting(state, seq, place)}
            rows.append(values_of(SequenceRow(seq, now), "table") | held)
    last = Column("blocks", "block table (×: ref count), or why it waits", words=True)
    written = [] if moment.follow is None else chosen(SequenceRow, "followed")
    columns = [*chosen(SequenceRow, "table"), *written, last]
    return Table("sequences", "Sequences (new, cached, tokens and out: in tokens)", columns, rows)


def _shown(moment: Moment, seqs: Sequence[SeqState]) -> list[SeqState]:
    return [seq for seq in seqs if moment.follow is None or seq.seq_id in moment.follow_seq_ids]


def _table_text(seq: SeqState, prefix: NamedPrefix | None, state: PoolState) -> str:
    """Its block table, whose shared beginning is told by its name."""
    if prefix is None:
        return block_ids_text(state, seq.block_table) or "-"
    return f"{prefix.name} {block_ids_text(state, seq.block_table[prefix.end :])}".rstrip()


def group_table(state: PoolState) -> Table:
    """What each group takes of a block, and its blocks; no rows if there is one, as all blocks are alike."""
    uses = group_uses(state)
    columns = "group window num_kv_heads head_dim used_bytes used_blocks cached_blocks unused_bytes layers"
    return table(GroupUse, "groups", "Groups of layers", uses if len(uses) > 1 else [], columns)


@dataclass(frozen=True, slots=True)
class _Prefix:
    name: Annotated[str, "prefix"]
    num_seqs: Annotated[int, "sequences"]
    num_blocks: int
    blocks: Annotated[str, "its part of a block table"]


def _prefixes(prefixes: Sequence[NamedPrefix]) -> Table:
    """The ref count of each of its blocks is the number of sequences that share it."""
    rows = [
        _Prefix(each.name, len(each.seq_ids), each.end, f"{each.parent or ''} {id_ranges(each.block_ids)}".strip())
        for each in prefixes
    ]
    return table(_Prefix, "prefixes", "Shared prefixes", rows)


class _Slot(ShownRow):
    """A slot that is not empty."""

    slot_id: int
    kind: Annotated[str, "holds"] = computed(lambda row: row.sources[0].kind if row.ref_count else "idle snapshot")
    num_tokens: Annotated[int, "after tokens"]
    ref_count: Annotated[int, "held by sequences"]
    seq_ids: Annotated[tuple[int, ...], "sequences", lambda seq_ids: ", ".join(map(str, seq_ids))]
    made: Annotated[str, "made in"] = computed(
        lambda row: f"step {row.made_step} by seq {row.made_by}: {SNAPSHOT_WORDS[row.reason]}" if row.reason else ""
    )


def _lookups(moment: Moment) -> Table:
    state, step = moment.state, moment.state.step
    rows = [
        values_of(LookupRow(each, state.seq(each.seq_id)), "table")
        for each in ([] if step is None else step.lookups)
        if moment.follow is None or each.seq_id in moment.follow_seq_ids
    ]
    return Table("lookups", "Prefix lookups of this step", chosen(LookupRow, "table"), rows)


# ---------------------------------------------------------------------- layout


def table_lines(table: Table, width: int | None) -> list[Text]:
    """A table's lines for a screen: title, header, rule, rows."""
    header, *rows = ([_line(pieces) for pieces in row] for row in laid_out(table, width, least_room=_LEAST_ROOM))
    for line in header:
        line.stylize("bold")
    longest = max(line.cell_len for lines in (header, *rows) for line in lines)
    rule = Text("─" * longest, "dim")
    return [Text(one_line(table.title), "bold"), *header, rule, *(line for lines in rows for line in lines)]


def _line(pieces: Sequence[Piece]) -> Text:
    line = Text(no_wrap=True)
    for text, column in pieces:
        line.append(text) if column is None else line.append_text(_styled(text, column))
    line.rstrip()
    return line


def _styled(cell: str, column: Column) -> Text:
    text = Text(cell)
    if column.key == "status" and cell in _STYLES:
        text.stylize(_STYLES[cell])
    elif column.key in ("blocks", "name"):
        for match in re.finditer(r"\S+×\d+|(?<!\S)P\d+(?!\S)", cell):
            text.stylize(_SHARED, *match.span())
    return text


# ---------------------------------------------------------------------- printing


def print_step_tables(moment: Moment, console: Console, width: int | None) -> None:
    """Print a moment in full, at a width or (None) without limit."""
    state = moment.state
    title = "before the first step" if state.step is None else f"step {state.step.step}"
    console.print(Text(f"── {title}, as its forward pass sees the cache", "bold"), soft_wrap=True)
    for line in _pool_lines(state):
        for part in [line] if width is None else line.wrap(console, width):
            console.print(part, soft_wrap=True)
    for each in step_tables(moment):
        console.print()
        for line in table_lines(each, width):
            console.print(line, soft_wrap=True)
    events = moment.last_words(50, of_step=state.step_number, with_lookups=False)
    if events:
        console.print()
    for words in events:
        line = Text(words, "dim")
        for part in [line] if width is None else line.wrap(console, width):
            console.print(part, soft_wrap=True)
    console.print()


def _pool_lines(state: PoolState) -> list[Text]:
    slots = slots_line(state)
    return [pool_line(state), Text(ref_counts_line(state)), *([] if slots is None else [Text(slots)])]


def step_markdown(moment: Moment) -> str:
    """A moment in Markdown: a heading, the pool, tables, events."""
    state = moment.state
    title = "Before the first step" if state.step is None else f"Step {state.step.step}"
    events = moment.last_words(50, of_step=state.step_number, with_lookups=False)
    parts = [
        f"## {title}, as its forward pass sees the cache\n",
        "  \n".join(line.plain for line in _pool_lines(state)) + "\n",
        *(as_markdown(table) for table in step_tables(moment)),
        *(["\n".join(f"- {markdown_text(words)}" for words in events) + "\n"] if events else []),
    ]
    return "\n".join(parts) + "\n"


class StepConsole(Console):
    """The console of a StepPrinter."""

    def on_broken_pipe(self) -> None:
        """The command ends as after other output; rich would end it with exit code 1."""
        raise BrokenPipeError


class StepPrinter:
    """Prints the chosen steps as their forward pass sees the cache: as tables, Markdown, or one JSON object per line.

    `views` fold the same events. `width`: of the tables, None: without limit. An engine that runs by `clock_ns` does
    not count the time in which a pager or a full pipe holds up the output.
    """

    def __init__(
        self,
        console: Console,
        *views: View,
        follow: NamedRequest | None = None,
        chosen: StepChoice | None = None,
        format: Format = Format.TABLE,
        width: int | None = None,
    ) -> None:
        self.moment = Moment(follow=follow)
        self.fold = pool_fold(self.moment, *views)
        self.num_printed = 0
        self.clock_ns = HeldClock()
        self.chosen = chosen or StepChoice()
        self._console = console
        self._format = format
        self._width = width

    def on_event(self, event: Event) -> None:
        """Handle an event of the engine. Raises TraceError if it contradicts earlier ones."""
        self.fold(event)
        self.show(event)

    def settled(self) -> PoolState:
        return self.moment.state

    def show(self, event: Event) -> None:
        """Print the step once this event completes what its forward pass sees."""
        if isinstance(event, StepScheduled) and self.chosen.shows(event.step):
            self.num_printed += 1
            with self.clock_ns.held():
                self._print()

    def _print(self) -> None:
        if self._format is Format.JSON:
            self._console.file.write(printable_json(msgspec.json.encode(self.moment.summary())).decode() + "\n")
        elif self._format is Format.MD:
            self._console.file.write(step_markdown(self.moment))
        else:
            print_step_tables(self.moment, self._console, self._width)
