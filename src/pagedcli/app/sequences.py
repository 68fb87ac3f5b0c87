"""The list of sequences: columns, orders, filters, and what is known of one sequence or block. Used by the application
of trace and replay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from pagedcli.app.colours import MUTED
from pagedcli.printable import one_line, plural
from pagedcli.show.group_words import block_group_words
from pagedcli.show.panels import block_ids_text, why_waiting
from pagedcli.trace.state import SeqState
from pagedcli.views.conditions import Condition, parse
from pagedcli.views.moment import Moment
from pagedcli.views.state_slots import slots_of


def sequence_facts(moment: Moment, seq: SeqState) -> Text:
    """Tokens, waiting and blocks of a sequence, and with whom it shares them."""
    state, blocks = moment.state, set(seq.held_block_ids)
    shared = [
        other.seq_id for other in state.running() if other is not seq and not blocks.isdisjoint(other.block_table)
    ]
    ended = f" ({seq.finish_reason})" if seq.finish_reason else ""
    lines = [
        f"request    {one_line(seq.label)}, sample {seq.sample_index}: {seq.status}{ended}",
        f"prompt     {plural(seq.num_prompt_tokens, 'token')}; the last lookup found {seq.num_cached_tokens:,} cached",
        f"generated  {seq.num_output_tokens:,} of at most {plural(seq.max_new_tokens, 'token')}",
        f"waited     {plural(seq.num_steps_waited(state.step_number), 'step')}",
        f"preempted  {plural(seq.num_preemptions, 'time')}, "
        f"{plural(seq.num_recomputed_tokens, 'token')} computed again",
        f"blocks     {len(seq.held_block_ids):,}: {block_ids_text(state, seq.block_table) or 'none'}",
    ]
    if state.engine is not None and any(state.engine.windows):
        passed = f"{plural(seq.num_passed_blocks, 'block')} that no later token sees"
        lines.append(
            f"window     {passed}; one table for all layers would hold {plural(len(seq.block_table), 'block')}"
        )
    slots = slots_of(state, seq)
    if slots is not None:
        lines.append(f"state      {slots}")
    if shared:
        lines.append(f"shared     with seq {', '.join(map(str, shared))}")
    return Text("\n".join(lines))


def block_facts(moment: Moment, block_id: int) -> Text:
    """Who holds a block, and its content."""
    state = moment.state
    content, filler = state.hashes[block_id], state.filler_seq_ids[block_id]
    holders = []
    for seq in state.running():
        if block_id in seq.block_table:
            place = seq.block_table.index(block_id) // state.num_groups
            holders.append(f"seq {seq.seq_id} (request {one_line(seq.label)}) as its block {place}")
    lines = [f"held by    {', '.join(holders) or 'nobody'}"]
    if content is None:
        lines.append("content    none that a lookup could find")
    else:
        lines.append(f"content    {content:016x}, filled by seq {filler}")
        found = state.hash_to_block_id.get(content)
        if found != block_id:
            lines.append(f"           block {found} has the same content, and lookups find that one")
    if state.num_groups > 1 and (group := block_group_words(state, block_id)) is not None:
        lines.append(f"layers     {group}")
    return Text("\n".join(lines))


_LAST_NAME = "blocks (×: ref count) / waits for"
_MIN_LAST = 24  # least width of the last column
_TABLE_NAME_WIDTH = 16  # of the request's id next to the last column alone
_TABLE_NAMES = ("seq", "request", "state", "blocks")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list; a negative width: aligned to the left."""

    name: str
    width: int
    order: Callable[[SeqState, int | None], int] | None = None  # the largest comes first


COLUMNS = (
    Column("seq", 5, lambda seq, _: -seq.seq_id),
    Column("request", -24),
    Column("state", -13, lambda seq, _: seq.running),
    Column("tokens", 11, lambda seq, _: seq.num_tokens),
    Column("out", 9, lambda seq, _: seq.num_output_tokens),
    Column("blocks", 7, lambda seq, _: len(seq.held_block_ids)),
    Column("waited", 7, lambda seq, step: seq.num_steps_waited(step)),
    Column("preempted", 10, lambda seq, _: seq.num_preemptions),
)
_BY_NAME = {column.name: column for column in COLUMNS}
_FIXED_WIDTH = sum(abs(column.width) + 1 for column in COLUMNS if column.name != "request")
ORDERS = ("state", "waited", "preempted", "blocks", "seq", "tokens", "out")  # in which `s` goes through them


@dataclass(slots=True)
class SequenceList:
    """What the list shows of a moment: unfinished sequences or all, those of which a condition holds, in an order."""

    order: str = "state"
    filter: str = ""
    with_finished: bool = False
    only_tables: bool = False  # instead of the figures: the last column has their room
    _condition: Condition | None = None

    def set_filter(self, text: str) -> None:
        """Raises: UsageError for a condition that says nothing."""
        self._condition = parse(text) if text.strip() else None
        self.filter = text.strip()

    def seqs(self, moment: Moment) -> list[SeqState]:
        """The rows, in order. Ties are in queue order: running, then waiting, then finished."""
        state, condition = moment.state, self._condition
        seqs = state.running() + state.waiting() + (list(state.finished.values()) if self.with_finished else [])
        if condition is not None:
            seqs = [seq for seq in seqs if condition(seq, state.step_number)]
        key = _BY_NAME[self.order].order
        assert key is not None, "a column of ORDERS has an order"
        seqs.sort(key=lambda seq: -key(seq, state.step_number))
        return seqs

    def title(self, num_shown: int) -> str:
        """What the list shows, in words."""
        matching = f" with {one_line(self.filter)!r}" if self.filter else ""
        return f"{'all' if self.with_finished else 'unfinished'} sequences{matching}: {num_shown:,}"

    def columns(self, width: int) -> list[tuple[Column, int]]:
        """The columns before the last one, with their widths."""
        names = _TABLE_NAMES if self.only_tables else tuple(_BY_NAME)
        name_width = _TABLE_NAME_WIDTH if self.only_tables else _name_width(width)
        return [(_BY_NAME[name], -name_width if name == "request" else _BY_NAME[name].width) for name in names]

    def column_at(self, x: int, width: int) -> str | None:
        """The name of the column at a place of the heading; None: the last one."""
        for column, cells in self.columns(width):
            x -= abs(cells) + 1
            if x < 0:
                return column.name
        return None


class SequenceRows:
    """The cells of a moment's sequences. Built once per moment."""

    def __init__(self, moment: Moment, shown: SequenceList) -> None:
        self._list = shown
        self._state = state = moment.state
        step = state.step
        self._new_tokens = {} if step is None else step.new_tokens
        self._places = {seq.seq_id: place for place, seq in enumerate(state.waiting())}
        self._followed = moment.follow_seq_ids

    def heading(self, width: int) -> Text:
        names = (
            ("▾" + column.name if column.name == self._list.order else column.name, cells)
            for column, cells in self._list.columns(width)
        )
        cells = " ".join(name.rjust(size) if size > 0 else name.ljust(-size) for name, size in names)
        return Text(f"{cells}  {_LAST_NAME}" if width - len(cells) > _MIN_LAST else cells)

    def row(self, seq_id: int, width: int) -> Text:
        """One sequence. `waited` and `preempted` are in steps and times."""
        seq = self._state.seq(seq_id)
        if seq is None:  # it has left since
            return Text()
        text, values = Text(), self._values(seq)
        for place, (column, size) in enumerate(self._list.columns(width)):
            cell = Text(values[column.name].rjust(size) if size > 0 else values[column.name])
            if size < 0:
                cell.truncate(-size, overflow="ellipsis", pad=True)
            text.append(" " if place else "").append_text(cell)
        if (room := width - text.cell_len - 2) > _MIN_LAST - 2:
            text.append("  " + self.last_column(seq, room))
        if seq_id in self._followed:
            text.stylize("bold yellow")
        elif not seq.running:
            text.stylize(MUTED if seq.status == "finished" else "italic")
        return text

    def _values(self, seq: SeqState) -> dict[str, str]:
        return {
            "seq": str(seq.seq_id),
            "request": one_line(seq.label),
            "state": seq.status + (f" +{self._new_tokens[seq.seq_id]}" if seq.seq_id in self._new_tokens else ""),
            "tokens": f"{seq.num_computed_tokens}/{seq.num_tokens}",
            "out": f"{seq.num_output_tokens}/{seq.max_new_tokens}",
            "blocks": str(len(seq.held_block_ids)),
            "waited": str(seq.num_steps_waited(self._state.step_number)),
            "preempted": str(seq.num_preemptions),
        }

    def cells(self, seq_id: int | None) -> Sequence[str]:
        """All columns of a sequence in full, or their names."""
        if seq_id is None:
            return (*_BY_NAME, _LAST_NAME)
        seq = self._state.seq(seq_id)
        return () if seq is None else (*self._values(seq).values(), self.last_column(seq))

    def last_column(self, seq: SeqState, width: int | None = None) -> str:
        """The block table of a running sequence, why a waiting one waits, how a finished one ended."""
        if seq.running:
            return block_ids_text(self._state, seq.block_table, width)
        if seq.status == "finished":
            return f"{seq.finish_reason or 'cut off'} in step {seq.finished_step}"
        return why_waiting(self._state, seq, self._places[seq.seq_id])


def _name_width(width: int) -> int:
    """Room for the request's id: what the other columns leave, where there is no last column."""
    if width < 110:
        return min(24, max(8, width - _FIXED_WIDTH))
    return 14 if width < 140 else 24
