"""The application of `pagedcli trace` and `pagedcli replay`: block pool, sequences, figures, events."""

from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import Footer

from pagedcli.app.base import DeckApp
from pagedcli.app.block_map import BlockMap
from pagedcli.app.dialogs import Ask, StoryPage
from pagedcli.app.facts import block_facts, sequence_facts
from pagedcli.app.lines import Lines
from pagedcli.app.pool_decks import LiveDeck, PoolDeck
from pagedcli.app.rows import Rows
from pagedcli.app.sequences import ORDERS, SequenceList, SequenceRows
from pagedcli.show.panels import hit_lines, percent, work_lines
from pagedcli.trace.records import SeqState
from pagedcli.views.moment import Moment
from pagedcli.views.stories import Story
from pagedcli.views.words import waiting_reason

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
