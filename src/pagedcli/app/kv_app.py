"""The application of `pagedcli attach`, and of `trace` for its recordings: prefix tree, caches, churn, the server.

Its players show snapshots of a server's prefix trees, live or recorded.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, ClassVar, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Vertical
from textual.widgets import Footer, Static

from pagedcli import kvevents
from pagedcli.answers.why import REASON_WORDS, why_of_server
from pagedcli.app.base import LIST_BINDINGS, PlayerApp
from pagedcli.app.commands import Command
from pagedcli.app.pages import LinePrompt, StoryPage
from pagedcli.app.player import Player, Recording, RunningPlayer
from pagedcli.app.rows import Lines, Rows
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import Cause, TreeBranch, TreeShape, branch_label, hash_text, largest_branches, token_ids
from pagedcli.printable import one_line, plural, seconds_text
from pagedcli.show.kv_tables import CacheRow, LoraRow, cache_rows, facts, limits, lora_rows
from pagedcli.trace.tokens import Decode

_MOST_BRANCHES = 200
_MOST_TREES = 4
_INTERVAL_S = 0.25  # least time between two snapshots
_DRAW_SHARE = 0.1  # largest share of the fold's time spent on snapshots
_COUNTS = {"eviction": "num_removed", "miss": "num_tokens_again"}  # a message that raises it is such a place
CapturedMessage = tuple[list[bytes], float | None, int]  # frames, seconds, source


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the screen shows of a state. Later messages do not change it, but for the blocks of its branches."""

    seconds: float  # watched so far
    facts: dict[str, Any]
    caches: list[CacheRow]
    adapters: list[LoraRow]
    branches: list[tuple[TreeBranch, float]]  # branch and its share of the tokens of its tree
    verdict: str
    notes: list[str]

    @classmethod
    def of(cls, state: KVState, seconds: float) -> "Snapshot":
        trees = sorted(state.trees, key=lambda tree: -tree.num_resident)[:_MOST_TREES]
        shape_of = cache(TreeShape)
        branches = [
            (branch, branch.num_tokens / (shape_of(tree).total_tokens or 1))
            for tree in trees
            for branch in largest_branches(shape_of(tree), _MOST_BRANCHES // len(trees))
        ]
        notes = [*reversed(state.notes), *limits(state)]
        caches, adapters = cache_rows(state, shape_of), lora_rows(state)
        return cls(seconds, facts(state), caches, adapters, branches, why_of_server(state), notes)


class AttachPlayer(RunningPlayer[Snapshot]):
    """A running server. `offer` belongs to the thread that folds its messages, all else to the screen's."""

    unit = "snapshot"
    closes_at_end = True

    def __init__(self) -> None:
        super().__init__(paused=False, speed=None)
        self.has_started.set()
        self._snapshot: Snapshot | None = None
        self._next_s = 0.0
        self._num_allowed = 0  # snapshots while paused

    def offer(self, state: KVState, seconds: float) -> None:
        """Draw a snapshot if it is time."""
        start_s = time.monotonic()
        if start_s < self._next_s or self._snapshot is not self.moment:
            return
        self._snapshot = Snapshot.of(state, seconds)
        end_s = time.monotonic()
        self._next_s = end_s + max(_INTERVAL_S, (end_s - start_s) / _DRAW_SHARE)

    @property
    def place(self) -> str:
        return "" if self.moment is None else f"{self.moment.seconds:,.0f} s"

    def poll(self) -> bool:
        if self._snapshot is self.moment or (self.paused and not self._num_allowed):
            return False
        self._num_allowed = max(0, self._num_allowed - 1)
        self.moment = self._snapshot
        return True

    def step(self, count: int) -> str:
        if count < 0:
            return self.no_way_back
        self.paused = True
        self._num_allowed += count
        return ""

    def go_to(self, number: int) -> str:
        return self.no_way_back

    def go_to_end(self, *, last: bool) -> str:
        self.paused = self.paused and not last
        return "" if last else self.no_way_back

    def jump(self, name: str, *, backward: bool) -> str:
        return "only a recording has places to jump to: see --record"


class CapturePlayer(Recording[Snapshot]):
    """A recording, message by message. Stepping back folds it again from the start."""

    unit = "message"
    position = 0  # messages folded

    def __init__(self, messages: Iterable[CapturedMessage], sources: list[str]) -> None:
        super().__init__()
        self._messages = list(messages)
        self._sources = sources
        self._state = KVState(sources, keep_tokens=True)
        self._snapshot: Snapshot | None = None
        self._places: dict[str, list[int]] = {}  # places by kind, found at the first jump

    @property
    def last(self) -> int:
        return len(self._messages)

    @property
    def moment(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = Snapshot.of(self._state, self._state.time_s or 0.0)
        return self._snapshot

    @property
    def place(self) -> str:
        return f"message {self.position:,} of {self.last:,}"

    def go(self, position: int) -> None:
        if position < self.position:
            self._state, self.position = KVState(self._sources, keep_tokens=True), 0
        for frames, time_s, source in self._messages[self.position : position]:
            self._state.take(frames, time_s, source)
        self.position, self._snapshot = position, None

    def go_to(self, number: int) -> str:
        return f"there is no message {number:,}" if number > self.last else self.move_to(number)

    def landmarks(self, name: str) -> list[int]:
        """The places right after a message with an eviction, or with blocks that were stored again."""
        if not self._places:
            state, before = KVState(self._sources), dict.fromkeys(_COUNTS, 0)
            self._places = {kind: [] for kind in _COUNTS}
            for position, (frames, time_s, source) in zip(count(1), self._messages, strict=False):
                state.take(frames, time_s, source)
                for kind, total in _COUNTS.items():
                    if (now := state.total(total)) > before[kind]:
                        self._places[kind].append(position)
                        before[kind] = now
        return self._places.get(name, [])


_MOST_CACHES = 8
_NUMBERS_WIDTH = 44  # cells of the tree's columns after the prefix
_SORTS = ("tree", "tokens", "run", "forks")
_LEGEND = """\
 prefix        text (with -m) or hash at the beginning of a run of blocks
 at            depth of its first block; run: blocks until the next fork
 blocks        of the whole subtree, with tokens and their share of the tree
 churn         blocks that had left the cache and were stored again
 KV events have no block ids, no reference counts and no requests.
"""


class KVApp(PlayerApp):
    """Shows the snapshots of a server's caches."""

    CSS = (
        PlayerApp.CSS
        + """
    #tree { height: 1fr; min-height: 4; }
    #figures { height: auto; }
    #verdict { height: auto; max-height: 3; }
    Screen.-tall #verdict { max-height: 10; }
    #notes { height: 3; }
    Screen.-tall #notes { height: 7; }
    #notes:focus { height: 10; }
    Screen.-wide #notes { height: 1fr; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [*LIST_BINDINGS]
    MORE_KEYS = """\
 e  m          to the next eviction, block stored again (recordings)
 E  M          to the previous one
 s             sort: as a tree, most tokens, longest run, most forks
 /             search the tree: to the next prefix with some text
 n  N          to the next, previous one
 f             show only prefixes with some text"""

    def __init__(
        self,
        player: Player[Snapshot],
        title: str,
        *,
        decode: Decode | None = None,
        scraper: "kvevents.Scraper | None" = None,
    ) -> None:
        super().__init__(player, title)
        self._decode = decode
        self._scraper = scraper
        self._sort = 0
        self._filter = ""
        self._searched = ""
        self._tree = self.main_panel = Rows(id="tree", empty="no blocks")
        self._shown: dict[int, TreeBranch] = {}  # row -> its branch
        self._labels: dict[int, str] = {}
        self._figures = Static(id="figures")
        self._verdict = Lines(id="verdict")
        self._notes = Rows(id="notes")

    def compose(self) -> ComposeResult:
        yield self.head_line
        with Container(id="body"):
            with Vertical(id="left"):
                yield self._tree
            with Vertical(id="right"):
                yield self._figures
                yield self._verdict
                yield self._notes
        yield Footer(compact=True)

    def on_mount(self) -> None:
        for panel in (self._tree, self._figures, self._verdict, self._notes):
            panel.add_class("panel")
        self._figures.border_title = "figures"
        self._verdict.border_title = "verdict"
        self._notes.border_title = "notes, and what KV events do not say"
        self._tree.focus()

    # ------------------------------------------------------------------ drawing

    @property
    def _snapshot(self) -> Snapshot:
        snapshot: Snapshot | None = self.player.moment
        assert snapshot is not None, "panels are filled once there is a snapshot"
        return snapshot

    def head(self) -> Text:
        facts = self._snapshot.facts
        problems = facts["num_missed_messages"] + facts["num_malformed"]
        return Text.assemble(
            f"{plural(facts['num_batches'], 'batch')}  {plural(facts['num_resident_blocks'], 'block')} resident  ",
            (f"{problems:,} lost or malformed" if problems else "", "bold red"),
            ("" if facts["num_batches"] else "waiting for the first event ...", "italic"),
        )

    def legend(self) -> str:
        return _LEGEND

    def commands(self) -> list[Command]:
        return [
            *super().commands(),
            self.landmark_command("evict", "eviction", "eviction"),
            self.landmark_command("again", "miss", "block stored again"),
        ]

    def show_moment(self) -> None:
        self._show_tree()
        self._figures.update(Group(*self._all_figures()))
        self._verdict.show(Text(one_line(self._snapshot.verdict)))
        self._notes.show_lines(map(one_line, self._snapshot.notes), "dim")

    def _show_tree(self) -> None:
        rows = [(branch, share, branch_label(branch, self._decode)) for branch, share in self._snapshot.branches]
        rows = [row for row in rows if self._filter.lower() in row[2].lower()]
        if self._sort:
            keys = (lambda b: b.num_tokens, lambda b: len(b.nodes), lambda b: b.num_children)
            rows.sort(key=lambda row: -keys[self._sort - 1](row[0]))
        cells = {id(branch.nodes[0]): (branch, share, label) for branch, share, label in rows}
        self._shown = {key: branch for key, (branch, _, _) in cells.items()}
        self._labels = {key: label for key, (_, _, label) in cells.items()}

        def row(key: int, width: int) -> Text:
            branch, share, label = cells[key]
            indent = "" if self._sort else "  " * min(branch.level, 6)
            text = Text(one_line(indent + label))
            text.truncate(max(8, width - _NUMBERS_WIDTH), overflow="ellipsis", pad=True)
            return text.append(
                f" {branch.depth:5,} {len(branch.nodes):6,} {branch.num_children:5,} {branch.num_blocks:8,} "
                f"{branch.num_tokens:9,} {100 * share:3.0f} %"
            )

        self._tree.show(self._heading, list(cells), row)
        matching = f" with {one_line(self._filter)!r}" if self._filter else ""
        self._tree.show_title(f"prefix tree: its largest subtrees{matching}")

    def _heading(self, width: int) -> Text:
        sorted_by = _SORTS[self._sort]
        names = (("prefix", 0), ("at", 5), ("run", 6), ("forks", 5), ("blocks", 8), ("tokens", 9), ("share", 5))
        cells = [("▾" + name if name == sorted_by else name).rjust(size) for name, size in names[1:]]
        return Text("prefix".ljust(max(8, width - _NUMBERS_WIDTH)) + " " + " ".join(cells))

    def _all_figures(self) -> list[RenderableType]:
        snapshot = self._snapshot
        parts: list[RenderableType] = [_figures(snapshot), _caches(snapshot)]
        if snapshot.adapters:
            cells = [
                (one_line(row.lora), f"{row.num_blocks:,}", f"{row.num_tokens:,}") for row in snapshot.adapters[:5]
            ]
            parts.append(_table(("LoRA adapter", "blocks", "tokens"), cells))
        for cause in get_args(Cause):
            if num_blocks := snapshot.facts[f"num_blocks_stored_again_{cause}"]:
                parts.append(Text(f"{plural(num_blocks, 'block')} stored again: {REASON_WORDS[cause]}"))
        if self._scraper is not None:
            parts.append(_server(self._scraper))
            if not snapshot.facts["num_messages"]:
                parts.append(Text(self._scraper.metrics.silence, "bold red"))
        return parts

    # ------------------------------------------------------------------ keys

    def on_rows_heading_clicked(self, message: Rows.HeadingClicked) -> None:
        self.action_sort()

    def action_sort(self) -> None:
        self._sort = (self._sort + 1) % len(_SORTS)
        self.refresh_all()
        self._tree.action_end(False)

    def action_filter(self) -> None:
        def apply(typed: str | None) -> None:
            if typed is not None:
                self._filter = typed.strip()
                self.refresh_all()

        self.push_screen(LinePrompt("show prefixes with", self._filter), apply)

    def action_search(self) -> None:
        def go(typed: str | None) -> None:
            if typed:
                self._searched = typed.strip().lower()
                self.action_next_hit(1)

        self.push_screen(LinePrompt("search the tree", self._searched), go)

    def action_next_hit(self, by: int) -> None:
        keys = list(self._shown)
        found = [key for key in keys if self._searched in self._labels[key].lower()] if self._searched else []
        if not found:
            self.say(f"no prefix with {one_line(self._searched)!r} is shown" if self._searched else "/ searches")
            return
        here = -1 if self._tree.cursor_key is None else keys.index(self._tree.cursor_key)
        places = [keys.index(key) for key in found]
        later = [place for place in places if place > here] if by > 0 else [place for place in places if place < here]
        place = (later or places)[0 if by > 0 else -1]
        self._tree.move_to(place)
        self.say(f"{places.index(place) + 1:,} of {plural(len(found), 'prefix')} with {one_line(self._searched)!r}")

    def on_rows_row_chosen(self, message: Rows.RowChosen) -> None:
        branch = self._shown.get(message.key) if message.rows is self._tree else None
        if branch is not None:
            lines = []
            for depth, node in enumerate(branch.nodes, branch.depth):
                state = f"{node.num_copies} resident" if node.cause is None else node.cause
                block = f"block {hash_text(node.hash)}: {plural(node.num_tokens, 'token')}, {state}"
                lines.append((f"at {depth:,}", block))
            page = StoryPage(branch_label(branch, None), _branch_facts(branch, self._decode))
            page.fill(lines)
            self.push_screen(page)


def _figures(snapshot: Snapshot) -> Text:
    facts = snapshot.facts
    again, stored = facts["num_blocks_stored_again"], facts["num_stored_blocks"]
    share = f" ({100 * again / stored:.1f} %)" if stored else ""
    lines = [
        f"resident {plural(facts['num_resident_blocks'], 'block')}, "
        f"{plural(facts['num_resident_tokens'], 'token')}, at most "
        f"{facts['peak_resident_blocks']:,}; different blocks {facts['num_unique_blocks']:,}",
        f"last 10 s: {facts['stored_blocks_per_s']:,.1f} stored/s, {facts['removed_blocks_per_s']:,.1f} removed/s; a "
        f"block stays {_known(facts['median_lifetime_s'])} (median)",
        f"churn {again:,} of {plural(stored, 'block')} stored{share}: "
        f"{plural(facts['num_tokens_computed_twice'], 'token')} twice; "
        f"gone for {_known(facts['median_pause_s'])}",
    ]
    return Text("\n".join(lines))


def _caches(snapshot: Snapshot) -> Table:
    several = len({row.publisher for row in snapshot.caches}) > 1
    total = sum(row.num_blocks for row in snapshot.caches) or 1
    rows = [
        (
            *([one_line(row.publisher)] if several else []),
            one_line(row.group), one_line(row.medium), f"{row.num_blocks:,}", f"{row.num_tokens:,}",
            f"{row.num_prompts:,}", f"{row.max_depth_blocks:,}",
            f"{100 * row.num_blocks / (row.capacity_blocks or total):.0f} %",
        )
        for row in snapshot.caches[:_MOST_CACHES]
    ]  # fmt: skip
    names = ("group", "medium", "blocks", "tokens", "roots", "depth", "share")
    return _table(("cache", *names) if several else names, rows)


def _table(names: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        is_text = name in ("cache", "group", "medium", "LoRA adapter")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _server(scraper: "kvevents.Scraper") -> Text:
    """The server's own figures by window, or why there are none."""
    figures = list(scraper.metrics.figures())
    if scraper.problem is not None or not figures:
        return Text(one_line(scraper.problem or "no known figures on the metrics page"), "red")
    lines: dict[str, list[str]] = {}
    for figure in figures:
        is_share = figure.key in ("usage", "hit_rate")
        value = f"{100 * figure.value:.1f} %" if is_share else f"{figure.value:,.0f}"
        meaning = "KV cache usage" if figure.key == "usage" else figure.meaning
        lines.setdefault(figure.window, []).append(f"{meaning} {value}")
    return Text("\n".join(f"server, {window}: {', '.join(parts)}" for window, parts in lines.items()))


def _branch_facts(branch: TreeBranch, decode: Decode | None) -> Text:
    first = branch.nodes[0]
    before = "nothing: it begins a prompt" if first.parent is None else f"block {hash_text(first.parent)}"
    lines = [
        f"run        {plural(len(branch.nodes), 'block')} without a fork, the first at depth {branch.depth:,}",
        f"before     {before}",
        f"below      {plural(branch.num_blocks, 'block')}, {plural(branch.num_tokens, 'token')}; forks "
        f"{plural(branch.num_children, 'time')}",
        f"adapter    {one_line(first.lora or 'none')}",
    ]
    ids = token_ids(branch.nodes)
    if ids:
        shown = " ".join(map(str, ids[:200])) if decode is None else decode(tuple(ids[:400]))
        lines.append(f"{'tokens' if decode is None else 'text':10} {one_line(shown)}")
    return Text("\n".join(lines))


def _known(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)
