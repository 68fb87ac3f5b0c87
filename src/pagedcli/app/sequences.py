"""The list of sequences: columns, orders, filters, and what is known of one sequence or block. Used by the application
of trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rich.text import Text

from pagedcli.app.colours import MUTED
from pagedcli.events import WAITING_WORDS
from pagedcli.printable import one_line, plural
from pagedcli.records import text as as_text
from pagedcli.show.panels import block_ids_text, why_waiting
from pagedcli.trace.seq_state import SeqState
from pagedcli.views.cache_groups import group_of, group_words
from pagedcli.views.conditions import Condition, fields, parse
from pagedcli.views.moment import Moment
from pagedcli.views.rows import Now, SequenceRow, block_owners, block_slots, chosen, num_tokens_of
from pagedcli.views.state_slots import slots_of


def sequence_facts(moment: Moment, seq: SeqState) -> Text:
    """Tokens, waiting and blocks of a sequence, and with whom it shares them."""
    state, blocks = moment.state, set(seq.held_block_ids)
    shared = [
        other.seq_id for other in state.running() if other is not seq and not blocks.isdisjoint(other.block_table)
    ]
    lacks = state.stalled_for(seq)
    ended = f" ({seq.finish_reason})" if seq.finish_reason else f" (no {WAITING_WORDS[lacks]})" if lacks else ""
    lines = [
        f"request    {one_line(seq.label)}, sample {seq.sample_index}: {state.status_of(seq)}{ended}",
        f"prompt     {plural(seq.num_prompt_tokens, 'token')}; the last lookup found {seq.num_cached_tokens:,} cached",
        f"generated  {seq.num_output_tokens:,} of at most {plural(seq.max_new_tokens, 'token')}",
        f"waited     {plural(seq.num_steps_waited(state.step_number), 'step')}",
        f"preempted  {plural(seq.num_preemptions, 'time')}, {plural(seq.num_recomputed_tokens, 'token')} recomputed",
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
    held = block_owners(state).get(block_id, [])
    holders = [
        f"seq {seq.seq_id} (request {one_line(seq.label)}) as its block {place // state.num_groups}"
        for seq, place in held
    ]
    slots = block_slots(block_id, num_tokens_of(block_id, held, state), state)
    lines = [f"held by    {', '.join(holders) or 'nobody'}", f"slots      {slots or 'none with a token'}"]
    if content is None:
        lines.append("content    none that a lookup could find")
    else:
        lines.append(f"content    {content:016x}, filled by seq {filler}")
        found = state.hash_to_block_id.get(content)
        if found != block_id:
            lines.append(f"           block {found} has the same content, and lookups find that one")
    if state.num_groups > 1 and (group := group_of(state, block_id)) is not None:
        lines.append(f"layers     {group_words(state.started, group)}")
    return Text("\n".join(lines))


_LAST_NAME = "blocks (×: ref count) / waits for"
_MIN_LAST = 24  # least width of the last column
_TABLE_NAME_WIDTH = 16  # cells for the request's id next to the last column alone
_TABLE_NAMES = ("seq", "request", "state", "blocks")


# cells; to the left where negative
_WIDTHS = {
    "seq": 5, "request": -24, "state": -13, "tokens": 11, "out": 9, "blocks": 7, "waited": 7, "preempted": 10,
}  # fmt: skip
ORDERS = ("state", "waited", "preempted", "blocks", "seq", "tokens", "out")  # the largest first, of `seq` the smallest


def _widths() -> dict[str, int]:
    """The columns before the last one, with their usual widths."""
    return {each.header: _WIDTHS.get(each.header, len(each.header) + 1) for each in chosen(SequenceRow, "list")}


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
        state, condition, now = moment.state, self._condition, Now(moment.state)
        seqs = state.running() + state.waiting() + (list(state.finished.values()) if self.with_finished else [])
        rows = [row for row in (SequenceRow(seq, now) for seq in seqs) if condition is None or condition(row)]
        key = "running" if self.order == "state" else fields()[self.order].key
        rows.sort(key=attrgetter(key), reverse=self.order != "seq")
        return [row.seq for row in rows]

    def title(self, num_shown: int) -> str:
        matching = f" with {one_line(self.filter)!r}" if self.filter else ""
        return f"{'all' if self.with_finished else 'unfinished'} sequences{matching}: {num_shown:,}"

    @property
    def units(self) -> str:
        """The units of the columns whose names do not say them."""
        shown = chosen(SequenceRow, "list")
        named = [] if self.only_tables else [f"{each.header}: {each.unit}" for each in shown if each.unit]
        return f" ({', '.join(named)})" if named else ""

    def columns(self, width: int) -> dict[str, int]:
        """The columns before the last one, with their widths."""
        widths = _widths()
        if self.only_tables:
            widths = {name: widths[name] for name in _TABLE_NAMES}
        return widths | {"request": -(_TABLE_NAME_WIDTH if self.only_tables else _name_width(width))}

    def column_at(self, x: int, width: int) -> str | None:
        """The name of the column at a place of the heading; None: the last one."""
        for name, cells in self.columns(width).items():
            x -= abs(cells) + 1
            if x < 0:
                return name
        return None


class SequenceRows:
    """The cells of a moment's sequences. Built once per moment."""

    def __init__(self, moment: Moment, shown: SequenceList) -> None:
        self._list = shown
        self._state = state = moment.state
        self._now = Now(state)
        self._places = {seq.seq_id: place for place, seq in enumerate(state.waiting())}
        self._followed = moment.follow_seq_ids

    def heading(self, width: int) -> Text:
        names = (
            ("▾" + name if name == self._list.order else name, cells)
            for name, cells in self._list.columns(width).items()
        )
        cells = " ".join(name.rjust(size) if size > 0 else name.ljust(-size) for name, size in names)
        return Text(f"{cells}  {_LAST_NAME}" if width - len(cells) > _MIN_LAST else cells)

    def row(self, seq_id: int, width: int) -> Text:
        seq = self._state.seq(seq_id)
        if seq is None:  # it has left since
            return Text()
        text, values = Text(), self._values(seq)
        for place, (name, size) in enumerate(self._list.columns(width).items()):
            cell = Text(values[name].rjust(size) if size > 0 else values[name])
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
        row = SequenceRow(seq, self._now)
        return {each.header: one_line(as_text(getattr(row, each.key))) for each in chosen(SequenceRow, "list")}

    def cells(self, seq_id: int | None) -> Sequence[str]:
        """All columns of a sequence in full, or their names."""
        if seq_id is None:
            return (*_widths(), _LAST_NAME)
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
        return min(24, max(8, width - sum(abs(cells) + 1 for name, cells in _widths().items() if name != "request")))
    return 14 if width < 140 else 24
