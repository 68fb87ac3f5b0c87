"""The application of trace: the pool, the sequences, their stories."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import Footer

from pagedcli.app.base import LIST_BINDINGS, PlayerApp
from pagedcli.app.block_map import ONE_GROUP, BlockMap
from pagedcli.app.colours import MUTED
from pagedcli.app.commands import Command, number
from pagedcli.app.pages import LinePrompt, StoryPage, TablePage
from pagedcli.app.pool_players import LivePlayer, PoolPlayer
from pagedcli.app.rows import Lines, Rows
from pagedcli.app.sequences import ORDERS, SequenceList, SequenceRows, block_facts, sequence_facts
from pagedcli.app.timeline import BARS, TimeLine
from pagedcli.errors import UsageError
from pagedcli.printable import one_line, plural
from pagedcli.show.panels import hit_lines, percent, work_lines
from pagedcli.show.step_tables import group_table
from pagedcli.trace.seq_state import SeqState
from pagedcli.views.conditions import fields, grammar
from pagedcli.views.moment import Moment
from pagedcli.views.names import unknown_request
from pagedcli.views.search import Hit, find
from pagedcli.views.state_slots import slot_words, slots_line, state_slots
from pagedcli.views.words import Story, block_story, sequence_story, waiting_reason

_TITLE_SPACE = 4  # cells around a panel's title
_LEGEND = """\
 time line     each column a step or several: blocks in use, cached, empty;
               P preempted, e evicted, ▲ shown. With the focus: up, down
               zoom, left, right move; mouse: click, drag, wheel
 block pool    · empty  ○ cached  ▫ filling  ■ in use  2-9 + number of owners
               in reverse: of the selected sequence
 G             0-9 a-z + the group of layers whose K and V a block holds,
               underlined: cached; :groups has their windows and layers
 state         +N: tokens computed in this step
 tokens        in the cache / of the sequence
 out           generated / at most
 waited        steps until admission and after preemptions
 prefix hits   from other requests; own: after a preemption, other samples
 pool, hits    blocks in use; hit rate in tokens over the last 100 steps

 filter        waited>10 state=running | story: a space means and, | or, ! not;
               words without a sign are looked for in id, number and state
"""


class PoolApp(PlayerApp):
    """Shows the moments of a pool player."""

    CSS = (
        PlayerApp.CSS
        + """
    #verdict { height: auto; max-height: 3; display: none; }
    Screen.-tall #verdict { max-height: 6; }
    #verdict:focus { max-height: 12; }
    #time { height: 4; }
    Screen.-tall #time { height: 5; }
    #time:focus { height: 8; }
    #map { height: auto; max-height: 5; }
    Screen.-tall #map { max-height: 9; }
    #map:focus { max-height: 70%; }
    #sequences { height: 1fr; min-height: 4; }
    #selected { height: auto; max-height: 3; }
    #figures { height: auto; }
    #events { height: 3; }
    Screen.-tall #events { height: 5; }
    Screen.-wide #time { height: 8; }
    Screen.-wide #events { height: 1fr; }
    Screen.-wide #map { max-height: 50%; }
    #events:focus { height: 12; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        *LIST_BINDINGS,
        Binding("c", "columns", "columns", show=False),
        Binding("a", "show_all", show=False),
        Binding("z", "zoom", "zoom", show=False),
        Binding("G", "groups", show=False),
        Binding("p", "jump('preemption', False)", "preemption", show=False),
        Binding("P", "jump('preemption', True)", show=False),
    ]
    MORE_KEYS = """\
 p  e  m       to the next preemption, eviction, prefix miss
 P  E  M       to the previous one
 /             search sequences, blocks (number, content) and events
 n  N          to the next, previous one that was found
 f             filter the list of sequences: conditions, see below
 s             sort: running first, waiting longest, most preempted,
               most blocks, id, tokens, out; or click on a column
 c             block tables and reasons, not the figures; and back
 a             also show finished sequences
 z             zoom to the blocks in use, and back
 G             the block pool by groups of layers, and back"""

    def __init__(self, player: PoolPlayer, title: str, *, judge: Callable[[], Sequence[str]] = tuple) -> None:
        """`judge` tells what is found of the run, in words: of a recorded run at any time, of a running one at its end.
        It may take seconds."""
        super().__init__(player, title)
        self.pool_player = player
        self._judge = judge
        self._verdict = Lines(id="verdict", can_focus=True)
        self._list = SequenceList()
        self._time = TimeLine(id="time")
        self._map = BlockMap(id="map")
        self._sequences = self.main_panel = Rows(id="sequences", empty="no sequences")
        self._selected = Lines(id="selected")
        self._figures = Lines(id="figures", can_focus=True)
        self._events = Rows(id="events", empty="nothing yet")
        self._groups: TablePage | None = None  # while it is open
        self._shown_events: tuple[int, int] | None = None  # how many there were, and the width
        self._has_followed = False
        self._has_shown_end = False
        self._go_to_seq: int | None = None  # sequence that the cursor goes to next
        self._hits: list[Hit] = []
        self._hit = -1  # the last one that was gone to

    def compose(self) -> ComposeResult:
        yield self.head_line
        yield self._verdict
        yield self._time
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
        for panel in (self._verdict, self._time, self._map, self._sequences, self._figures, self._events):
            panel.add_class("panel")
        self._verdict.border_title = "verdict"
        self._figures.border_title = "figures (Tab: all)"
        self._events.border_title = "last events, newest first"
        self._sequences.focus()
        if not self._is_live:
            self.in_background(self._judge, self._show_verdict)

    # ------------------------------------------------------------------ drawing

    def _show_verdict(self, lines: Sequence[str]) -> None:
        self._verdict.display = bool(lines)
        self._verdict.show(*(Text(one_line(line)) for line in lines))

    @property
    def table_name(self) -> str:
        return f"{self.panel.id}-step-{self._moment.state.step_number}.tsv"

    @property
    def _moment(self) -> Moment:
        moment = self.pool_player.moment
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
        return _LEGEND + "".join(f"   {name:<11} {field.meaning}\n" for name, field in fields().items())

    def show_moment(self) -> None:
        moment = self._moment
        if moment.state.engine is None:
            return
        self._time.show(self.pool_player.series, moment.state.num_blocks, moment.state.step_number)
        self._show_sequences(moment)
        self._show_selected(moment)
        self._show_figures(moment)
        self._show_events(moment)
        if self._groups is not None:
            self._fill_groups(self._groups)

    def _show_sequences(self, moment: Moment) -> None:
        seqs, cells = self._list.seqs(moment), SequenceRows(moment, self._list)
        seq_ids = [seq.seq_id for seq in seqs]
        at, self._go_to_seq = self._go_to_seq, None
        if not self._has_followed:  # the cursor begins on the followed request
            at = next((seq_id for seq_id in seq_ids if seq_id in moment.follow_seq_ids), at)
            self._has_followed = at is not None
        self._sequences.show(cells.heading, seq_ids, cells.row, at=at, cells=cells.cells)
        step = moment.state.step
        title = self._list.title(len(seq_ids))
        if step is not None and step.waiting is not None and moment.state.engine is not None:
            title += f"; seq {step.waiting.seq_id}: {waiting_reason(step.waiting, moment.state.engine)}"
        with_units = title + self._list.units
        has_room = cell_len(with_units) <= self._sequences.size.width - _TITLE_SPACE
        self._sequences.show_title(with_units if has_room else title)

    def _show_selected(self, moment: Moment) -> None:
        """The map with the blocks of the selected sequence, and what its row has no room for."""
        seq = self._selected_seq(moment)
        self._map.show(moment, moment.followed_blocks().union([] if seq is None else seq.held_block_ids))
        width, text = max(1, self._selected.size.width), ""
        if seq is not None:
            name = f"seq {seq.seq_id} {one_line(seq.label)}: "
            lines = 2 if self.size.height < 30 else 3
            text = name + SequenceRows(moment, self._list).last_column(seq, lines * (width - 6) - len(name))
        self._selected.show(Text(text, MUTED))

    def _selected_seq(self, moment: Moment) -> SeqState | None:
        seq_id = self._sequences.cursor_key
        return None if seq_id is None else moment.state.seq(seq_id)

    def _show_figures(self, moment: Moment) -> None:
        if self.size.height < 30 and not self._figures.has_focus:
            run, rolling = moment.stats.run, moment.stats.rolling
            text = (
                f"prefix hits {percent(run.from_others.token_rate)} of tokens, last 100 steps "
                f"{percent(rolling.from_others.token_rate)}; own {percent(run.own.token_rate)}"
            )
            self._figures.show(Text(text, no_wrap=True, overflow="ellipsis"))
            return
        width = self._figures.size.width // 2 - 14
        trends = Text()
        for name, trend, style in (("pool", moment.pool_trend, "green"), ("hits", moment.hit_trend, "cyan")):
            trends.append(f"{name} ").append(spark(trend, width), style).append(
                f" {percent(trend[-1] if trend else None)}  "
            )
        self._figures.show(hit_lines(moment), trends, work_lines(moment))

    def _show_events(self, moment: Moment) -> None:
        shown = moment.num_remembered, self._events.text_width
        if shown != self._shown_events:
            self._shown_events = shown
            self._events.show_lines(reversed(moment.last_words(100)))

    # ------------------------------------------------------------------ keys

    def on_rows_cursor_moved(self, message: Rows.CursorMoved) -> None:
        if self.pool_player.moment is not None:
            self._show_selected(self._moment)

    def on_rows_heading_clicked(self, message: Rows.HeadingClicked) -> None:
        name = self._list.column_at(message.x, message.width)
        if name in ORDERS:
            self._list.order = name
            self._go_to_top()

    def on_time_line_step_chosen(self, message: TimeLine.StepChosen) -> None:
        self.scrub(message.step)

    def on_descendant_focus(self) -> None:
        self.call_after_refresh(self.refresh_all)  # the figures show more with the focus

    on_descendant_blur = on_descendant_focus

    def action_sort(self) -> None:
        self._list.order = ORDERS[(ORDERS.index(self._list.order) + 1) % len(ORDERS)]
        self._go_to_top()

    def action_columns(self) -> None:
        self._list.only_tables = not self._list.only_tables
        self.refresh_all()

    def _go_to_top(self) -> None:
        self.refresh_all()
        self._sequences.action_end(False)

    def action_show_all(self) -> None:
        self._list.with_finished = not self._list.with_finished
        self.refresh_all()

    def action_filter(self) -> None:
        def accept(typed: str) -> str:
            try:
                self._list.set_filter(typed)
            except UsageError as error:
                return f"{error.message}{'; ' + error.hint if error.hint else ''}"
            return ""

        def shown(typed: str | None) -> None:
            if typed is not None:
                self._go_to_top()

        self.push_screen(
            LinePrompt("show sequences with", self._list.filter, accept=accept, hint=lambda _: grammar()), shown
        )

    def action_zoom(self) -> None:
        self._map.zoom()

    def action_groups(self) -> None:
        self.say(self._map.switch_groups())

    def tick(self) -> None:
        if self.has_ended and not self._has_shown_end:  # nothing is left of what was listed until now
            self._has_shown_end = self._list.with_finished = True
            self.in_background(self._judge, self._show_verdict)
            if isinstance(self.pool_player, LivePlayer):
                self.pool_player.read_back()
        elif isinstance(self.pool_player, LivePlayer) and self.pool_player.past is not None and not self._is_leaving:
            self.player = self.pool_player = self.pool_player.past
        super().tick()

    # ------------------------------------------------------------------ jumps

    def commands(self) -> list[Command]:
        return [
            *super().commands(),
            Command("block", "N", "to a block of the pool", self._jump_to_block),
            Command("req", "ID", "to a request, by its id or number", self._jump_to_request, self._names),
            Command("seq", "N", "to a sequence, by its number", self._jump_to_number_of_seq),
            Command("groups", "", "the groups of layers", self._show_groups),
            Command("slots", "", "the slots of recurrent state", self._show_slots),
            self.landmark_command("preempt", "preemption", "preemption"),
            self.landmark_command("evict", "eviction", "eviction"),
            self.landmark_command("miss", "miss", "prefix miss"),
            self.landmark_command("fail", "failure", "step after one that failed"),
        ]

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(seq.label for seq in self.pool_player.all_seqs())

    def _jump_to_block(self, argument: str) -> str:
        block_id, num_blocks = number(argument), self._moment.state.num_blocks
        if block_id is None or block_id >= num_blocks:
            return f"there is no block {argument!r}: they are numbered from 0 to {num_blocks - 1:,}"
        self._map.go_to(block_id)
        return ""

    def _show_groups(self, argument: str) -> str:
        if self._moment.state.num_groups == 1:
            return ONE_GROUP
        self._groups = page = TablePage()
        self._fill_groups(page)
        self.call_after_refresh(self.push_screen, page, self._forget_groups)  # once the line that was typed is closed
        return ""

    def _forget_groups(self, _: int | None) -> None:
        self._groups = None

    def _fill_groups(self, page: TablePage) -> None:
        state = self._moment.state
        page.show(f"groups of layers, step {state.step_number}", group_table(state))

    def _show_slots(self, argument: str) -> str:
        state = self._moment.state
        line = slots_line(state)
        if line is None:
            return "this model has no recurrent state: it has no slots"
        page = StoryPage(f"slots of recurrent state, step {state.step_number}", Text(line))
        page.fill([(f"slot {slot.slot_id}", slot_words(slot)) for slot in state_slots(state)], empty="all are empty")
        self.call_after_refresh(self.push_screen, page)  # once the line that was typed is closed
        return ""

    def _jump_to_request(self, argument: str) -> str:
        seqs = self.pool_player.all_seqs()
        named = [seq for seq in seqs if argument == seq.label] or [seq for seq in seqs if argument == seq.request_id]
        if named:
            return self._jump_to_seq(named[0])
        error = unknown_request(argument, self._names(), "this run")
        return f"{error.message}; {error.hint}"

    def _jump_to_number_of_seq(self, argument: str) -> str:
        seq = next((seq for seq in self.pool_player.all_seqs() if seq.seq_id == number(argument)), None)
        return f"there is no sequence {argument!r} in this run" if seq is None else self._jump_to_seq(seq)

    def _jump_to_seq(self, seq: SeqState) -> str:
        """Put the cursor on a sequence: where it is not known yet, at the step that brings it."""
        state = self._moment.state
        refusal = ""
        if state.seq(seq.seq_id) is None:
            refusal = self.player.go_to(0 if seq.added_step is None else seq.added_step + 1)
        self._list.with_finished = self._list.with_finished or seq.seq_id in state.finished
        self._list.set_filter("")
        self._go_to_seq = seq.seq_id
        self._sequences.focus()
        self.call_after_refresh(self.refresh_all)
        return refusal

    # ------------------------------------------------------------------ search

    def action_search(self) -> None:
        self.push_screen(
            LinePrompt("search", "", hint=lambda _: "id, seq 31, block 37, content, or words of an event"), self._search
        )

    def _search(self, text: str | None) -> None:
        if not text or not text.strip() or self.pool_player.moment is None:
            return
        player, state = self.pool_player, self._moment.state
        page = StoryPage(f"search: {one_line(text)}", Text(""), hint="Enter goes there, ")

        def show(hits: list[Hit]) -> None:
            self._hits, self._hit = hits, -1
            now = state.step_number or 0
            later = (place for place, hit in enumerate(hits) if hit.kind != "event" or (hit.step or 0) >= now)
            page.fill([(_hit_name(hit), hit.words) for hit in hits], at=next(later, 0), empty="nothing was found")
            self.say(f"{plural(len(hits), 'place')} found; n and N go to the next and previous")

        self.push_screen(page, self._go_to_hit)
        self.in_background(lambda: find(text, player.events(), state, player.all_seqs()), show)

    def action_next_hit(self, by: int) -> None:
        if not self._hits:
            self.say("nothing was searched: / does")
        else:
            self._go_to_hit((self._hit + by) % len(self._hits) if self._hit >= 0 or by > 0 else len(self._hits) - 1)

    def _go_to_hit(self, place: int | None) -> None:
        if place is None:
            return
        self._hit, hit = place, self._hits[place]
        if hit.kind == "block":
            refusal = self._jump_to_block(str(hit.key))
        elif hit.kind == "seq":
            refusal = self._jump_to_number_of_seq(str(hit.key))
        else:
            refusal = self.player.go_to(hit.step or 0)
        self.after(refusal or f"{place + 1:,} of {len(self._hits):,}: {_hit_name(hit)} {hit.words}")

    # ------------------------------------------------------------------ stories

    def on_rows_row_chosen(self, message: Rows.RowChosen) -> None:
        state, seq = self._moment.state, self._selected_seq(self._moment)
        if message.rows is self._sequences and seq is not None:
            tell = partial(sequence_story, seq.seq_id, self.pool_player.events(), state)
            self._tell(f"seq {seq.seq_id}", sequence_facts(self._moment, seq), tell)

    def on_block_map_block_chosen(self, message: BlockMap.BlockChosen) -> None:
        block_id = message.block_id
        tell = partial(block_story, block_id, self.pool_player.events())
        self._tell(f"block {block_id}", block_facts(self._moment, block_id), tell)

    def _tell(self, title: str, facts: Text, story_of: Callable[[], Story]) -> None:
        can_go = not isinstance(self.player, LivePlayer)
        page = StoryPage(title, facts, hint="Enter goes to the step, " if can_go else "")
        told: Story = []

        def show(story: Story) -> None:
            told.extend(story)
            page.fill([("before" if step is None else f"step {step}", words) for step, words in story])

        def go(place: int | None) -> None:
            step = None if place is None else told[place][0]
            if step is not None:
                self.after(self.player.go_to(step))

        self.push_screen(page, go)
        self.in_background(story_of, show)


def _hit_name(hit: Hit) -> str:
    if hit.kind != "event":
        return f"{hit.kind} {hit.key}"
    return "before" if hit.step is None else f"step {hit.step}"


def spark(values: Iterable[float], width: int) -> str:
    """The last shares between 0 and 1 as bars."""
    shown = list(values)[-width:]
    return "".join(BARS[min(7, int(8 * value))] for value in shown)
