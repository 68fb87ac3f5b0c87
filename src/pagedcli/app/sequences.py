"""The list of sequences: columns, orders and the filter. Draws what a Moment holds.

Used by the application of trace and replay.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from pagedcli.printable import one_line
from pagedcli.show.panels import block_ids_text, why_waiting
from pagedcli.trace.records import SeqState
from pagedcli.views.moment import Moment

_LAST_COLUMN = "blocks (×: ref count) / why it waits"
_MIN_LAST = 24
_FIXED_WIDTH = 67  # of the columns but the request's id and the last


# the column by which the list is sorted, and its value; the largest comes first
ORDERS: tuple[tuple[str, Callable[[SeqState, int | None], int]], ...] = (
    ("state", lambda seq, step: seq.running),
    ("waited", lambda seq, step: seq.num_steps_waited(step)),
    ("preempted", lambda seq, step: seq.num_preemptions),
    ("blocks", lambda seq, step: len(seq.held_block_ids)),
    ("seq", lambda seq, step: -seq.seq_id),
)


@dataclass(slots=True)
class SequenceList:
    """What the list shows of a moment: unfinished sequences or all, those that match a filter, in an order."""

    order: int = 0  # of ORDERS
    filter: str = ""
    with_finished: bool = False

    def seq_ids(self, moment: Moment) -> list[int]:
        """The rows, in order. Ties are in queue order: running, then waiting, then finished."""
        state = moment.state
        seqs = state.running() + state.waiting() + (list(state.finished.values()) if self.with_finished else [])
        if self.filter:
            seqs = [seq for seq in seqs if self.filter.lower() in f"{seq.seq_id} {seq.label} {seq.status}".lower()]
        _, key = ORDERS[self.order]
        seqs.sort(key=lambda seq: -key(seq, state.step_number))
        return [seq.seq_id for seq in seqs]

    def title(self, num_shown: int) -> str:
        """What the list shows, in words."""
        matching = f" with {one_line(self.filter)!r}" if self.filter else ""
        return f"{'all' if self.with_finished else 'unfinished'} sequences{matching}: {num_shown:,}"


class SequenceRows:
    """The cells of a moment's sequences. Built once per moment."""

    def __init__(self, moment: Moment, shown: SequenceList) -> None:
        self._sorted_by, _ = ORDERS[shown.order]
        self._state = state = moment.state
        step = state.step
        self._new_tokens = dict(zip(step.seq_ids, step.num_new_tokens, strict=True)) if step is not None else {}
        self._places = {seq.seq_id: place for place, seq in enumerate(state.waiting())}
        self._followed = moment.follow_seq_ids

    def heading(self, width: int) -> Text:
        name_width = _name_width(width)
        widths = {"seq": 5, "request": -name_width, "state": -11, "tokens": 11, "out": 9, "blocks": 7, "waited": 7,
                  "preempted": 10}  # fmt: skip
        names = (("▾" + name if name == self._sorted_by else name, cells) for name, cells in widths.items())
        cells = " ".join(name.rjust(cells) if cells > 0 else name.ljust(-cells) for name, cells in names)
        return Text(f"{cells}  {_LAST_COLUMN}" if width - len(cells) > _MIN_LAST else cells)

    def row(self, seq_id: int, width: int) -> Text:
        """One sequence. `waited` and `preempted` are in steps and times."""
        seq = self._state.seq(seq_id)
        if seq is None:  # it has left since
            return Text()
        state = seq.status + (f" +{self._new_tokens[seq_id]}" if seq_id in self._new_tokens else "")
        name_width = _name_width(width)
        name = Text(one_line(seq.label))
        name.truncate(name_width, overflow="ellipsis", pad=True)
        tokens, out = f"{seq.num_computed_tokens}/{seq.num_tokens}", f"{seq.num_output_tokens}/{seq.max_new_tokens}"
        text = (
            Text(f"{seq_id:5} ")
            .append_text(name)
            .append(
                f" {state:11.11} {tokens:>11} {out:>9} {len(seq.held_block_ids):7} "
                f"{seq.num_steps_waited(self._state.step_number):7} {seq.num_preemptions:10}"
            )
        )
        if (room := width - text.cell_len - 2) > _MIN_LAST - 2:
            text.append("  " + self.last_column(seq, room))
        if seq_id in self._followed:
            text.stylize("bold yellow")
        elif not seq.running:
            text.stylize("dim" if seq.status == "finished" else "italic")
        return text

    def last_column(self, seq: SeqState, width: int) -> str:
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
