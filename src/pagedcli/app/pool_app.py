"""The application of trace and replay: the pool, the sequences, their stories."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import Footer

from pagedcli.app.base import Ask, DeckApp, StoryPage
from pagedcli.app.block_map import BlockMap
from pagedcli.app.pool_decks import LiveDeck, PoolDeck
from pagedcli.app.rows import Lines, Rows
from pagedcli.printable import one_line, plural
from pagedcli.show.panels import block_ids_text, hit_lines, percent, why_waiting, work_lines
from pagedcli.trace.state import SeqState
from pagedcli.views.moment import Moment
from pagedcli.views.words import Story, waiting_reason


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
    return Text("\n".join(lines))


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


_BARS = "▁▂▃▄▅▆▇█"
_LEGEND = """\
 block pool    · empty  ○ cached  ▫ filling  ■ in use  2-9 + shared by so many
               @ of the selected sequence
 state         +N: tokens computed in this step
 tokens        in the cache / of the sequence
 out           generated / at most
 waited        steps until admission and after preemptions
 prefix hits   from other requests; own: after a preemption, other samples
 pool, hits    blocks in use; hit rate in tokens over the last 100 steps
"""


class PoolApp(DeckApp):
    """Shows the moments of a pool deck."""

    CSS = (
        DeckApp.CSS
        + """
    #left { height: 1fr; }
    #right { height: auto; }
    #map { height: auto; max-height: 6; }
    Screen.-tall #map { max-height: 12; }
    #map:focus { max-height: 70%; }
    #sequences { height: 1fr; min-height: 4; }
    #selected { height: auto; max-height: 3; }
    #figures { height: auto; }
    #events { height: 3; }
    Screen.-tall #events { height: 7; }
    Screen.-wide #left { width: 3fr; height: 100%; }
    Screen.-wide #right { width: 2fr; height: 100%; margin-left: 1; }
    Screen.-wide #events { height: 1fr; }
    Screen.-wide #map { max-height: 50%; }
    #events:focus { height: 12; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter"),
        Binding("a", "show_all", show=False),
        Binding("z", "zoom", "zoom"),
        Binding("p", "jump('preemption', False)", "preemption", show=False),
        Binding("P", "jump('preemption', True)", show=False),
        Binding("e", "jump('eviction', False)", show=False),
        Binding("E", "jump('eviction', True)", show=False),
        Binding("m", "jump('miss', False)", show=False),
        Binding("M", "jump('miss', True)", show=False),
    ]
    MORE_KEYS = """\
 p  e  m       to the next preemption, eviction, prefix miss
 P  E  M       to the previous one
 s             sort: running first, waiting longest, most preempted,
               most blocks, id
 /             show sequences by id, number or state
 a             show finished sequences, too
 z             zoom to the blocks in use, and back"""

    def __init__(self, deck: PoolDeck, title: str) -> None:
        super().__init__(deck, title)
        self.pool_deck = deck
        self._list = SequenceList()
        self._map = BlockMap(id="map")
        self._sequences = Rows(id="sequences", empty="no sequences")
        self._selected = Lines(id="selected")
        self._figures = Lines(id="figures")
        self._events = Rows(id="events", empty="nothing yet")
        self._shown_events: tuple[int, int] | None = None  # how many there were, and the width
        self._has_followed = False
        self._has_shown_end = False

    def compose(self) -> ComposeResult:
        yield self.head_line
        with Container(id="body"):
            with Vertical(id="left"):
                yield self._map
                yield self._sequences
                yield self._selected
            with Vertical(id="right"):
                yield self._figures
                yield self._events
        yield Footer(compact=True)

    def on_mount(self) -> None:
        for panel in (self._map, self._sequences, self._figures, self._events):
            panel.add_class("panel")
        self._figures.border_title = "figures"
        self._events.border_title = "last events, newest first"
        self._sequences.focus()

    # ------------------------------------------------------------------ drawing

    @property
    def _moment(self) -> Moment:
        moment = self.pool_deck.moment
        assert moment is not None, "panels are filled once there is a moment"
        return moment

    def head(self) -> Text:
        moment = self._moment
        state, rate = moment.state, moment.stats.tokens_per_s
        return Text(
            f"step {'-' if state.step is None else state.step.step}  {state.num_running} running  "
            f"{len(state.waiting())} waiting  {len(state.finished):,} done"
            + (f"  {state.num_refused:,} refused" if state.num_refused else "")
            + ("" if rate is None else f"  {rate:,.0f} tok/s")
        )

    def legend(self) -> str:
        return _LEGEND

    def show_moment(self) -> None:
        moment = self._moment
        if moment.state.engine is None:
            return
        self._show_sequences(moment)
        self._show_selected(moment)
        self._show_figures(moment)
        self._show_events(moment)

    def _show_sequences(self, moment: Moment) -> None:
        seq_ids, cells = self._list.seq_ids(moment), SequenceRows(moment, self._list)
        at = None
        if not self._has_followed:  # the cursor begins on the followed request
            at = next((seq_id for seq_id in seq_ids if seq_id in moment.follow_seq_ids), None)
            self._has_followed = at is not None
        self._sequences.show(cells.heading, seq_ids, cells.row, at=at)
        step = moment.state.step
        title = self._list.title(len(seq_ids))
        if step is not None and step.waiting is not None and moment.state.engine is not None:
            title += f"; seq {step.waiting.seq_id}: {waiting_reason(step.waiting, moment.state.engine)}"
        self._sequences.show_title(title)

    def _show_selected(self, moment: Moment) -> None:
        """The map with the blocks of the selected sequence, and what its row has no room for."""
        seq = self._selected_seq(moment)
        self._map.show(moment, moment.followed_blocks().union([] if seq is None else seq.held_block_ids))
        width = max(1, self._selected.size.width)
        text = "" if seq is None else SequenceRows(moment, self._list).last_column(seq, 3 * width - 12)
        text = "" if seq is None else f"seq {seq.seq_id}: {text}"
        self._selected.show(Text(text, "dim"))

    def _selected_seq(self, moment: Moment) -> SeqState | None:
        seq_id = self._sequences.cursor_key
        return None if seq_id is None else moment.state.seq(seq_id)

    def _show_figures(self, moment: Moment) -> None:
        width = self._figures.size.width // 2 - 14
        trends = Text()
        for name, trend, style in (("pool", moment.pool_trend, "green"), ("hits", moment.hit_trend, "cyan")):
            trends.append(f"{name} ").append(spark(trend, width), style).append(
                f" {percent(trend[-1] if trend else None)}  "
            )
        self._figures.show(hit_lines(moment), trends, *([work_lines(moment)] if self.size.height >= 30 else []))

    def _show_events(self, moment: Moment) -> None:
        shown = moment.num_remembered, self._events.text_width
        if shown != self._shown_events:
            self._shown_events = shown
            self._events.show_lines(reversed(moment.last_words(100)))

    # ------------------------------------------------------------------ keys

    def on_rows_moved(self, message: Rows.Moved) -> None:
        if self.pool_deck.moment is not None:
            self._show_selected(self._moment)

    def on_rows_heading_clicked(self, message: Rows.HeadingClicked) -> None:
        self.action_sort()

    def action_sort(self) -> None:
        self._list.order = (self._list.order + 1) % len(ORDERS)
        self._go_to_top()

    def _go_to_top(self) -> None:
        self.refresh_all()
        self._sequences.action_end(False)

    def action_show_all(self) -> None:
        self._list.with_finished = not self._list.with_finished
        self.refresh_all()

    def action_filter(self) -> None:
        def apply(typed: str | None) -> None:
            if typed is not None:
                self._list.filter = typed.strip()
                self._go_to_top()

        self.push_screen(Ask("show sequences with", self._list.filter), apply)

    def action_zoom(self) -> None:
        self._map.zoom()

    def tick(self) -> None:
        if self.has_ended and not self._has_shown_end:  # nothing is left of what was listed until now
            self._has_shown_end = self._list.with_finished = True
        super().tick()

    # ------------------------------------------------------------------ stories

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        seq = self._selected_seq(self._moment)
        if message.rows is self._sequences and seq is not None:
            self._tell(
                f"seq {seq.seq_id}", sequence_facts(self._moment, seq), self.pool_deck.sequence_story(seq.seq_id)
            )

    def on_block_map_chosen(self, message: BlockMap.Chosen) -> None:
        block_id = message.block_id
        facts = block_facts(self._moment, block_id)
        self._tell(f"block {block_id}", facts, self.pool_deck.block_story(block_id))

    def _tell(self, title: str, facts: Text, story: Story) -> None:
        can_go = not isinstance(self.deck, LiveDeck)
        lines = [("before" if step is None else f"step {step}", words) for step, words in story]

        def go(place: int | None) -> None:
            step = None if place is None else story[place][0]
            if step is not None:
                self.after(self.deck.go_to(step))

        self.push_screen(StoryPage(title, facts, lines, hint="Enter goes to the step, " if can_go else ""), go)


def spark(values: Iterable[float], width: int) -> str:
    """The last shares between 0 and 1 as bars."""
    shown = list(values)[-width:]
    return "".join(_BARS[min(7, int(8 * value))] for value in shown)
