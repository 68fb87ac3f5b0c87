"""The live screen of `pagedcli attach`: the prefix tree and the figures of a server, in the style of the trace view."""

import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pagedcli.cli.kv_tables import Decode, branch_label
from pagedcli.inspection.keys import Keyboard
from pagedcli.kvevents.branches import Branch, Shape, largest_branches
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.summary import cache_rows, churn_rows, facts, limits, lora_rows
from pagedcli.printable import one_line

if TYPE_CHECKING:
    from pagedcli.kvevents.scrape import Scraper

_REDRAW_S = 0.25
_DRAW_SHARE = 0.1  # largest share of the time spent drawing
_KEYS = " q quit · space freeze the screen "
_PLAYER_KEYS = " q quit · ←→ message · ↑↓ 10 · page 100 · home end · space play "
_JUMPS = {"left": -1, "right": 1, "up": -10, "down": 10, "pageup": -100, "pagedown": 100, "home": -1, "end": 1}
_BARS = " ▁▂▃▄▅▆▇█"


class KVScreen:
    """A context manager that shows a state until `update` returns False: the user has quit."""

    def __init__(
        self,
        console: Console,
        state: KVState,
        decode: Decode | None,
        scraper: "Scraper | None",
        endpoints: list[str],
    ) -> None:
        self._console = console
        self._view = _View(state, decode, scraper, " ".join(endpoints))
        self._keyboard = Keyboard()
        self._open = ExitStack()
        self._live: Live | None = None
        self._next_draw = 0.0
        self._frozen = False

    def __enter__(self) -> "KVScreen":
        self._open.enter_context(self._keyboard)
        self._live = self._open.enter_context(
            Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def update(self, now_s: float) -> bool:
        """Draw if it is time. False if the user has quit."""
        assert self._live is not None, "the screen is open"
        while (key := self._keyboard.read()) is not None:
            if key == "q":
                return False
            if key == " ":
                self._frozen = not self._frozen
                self._next_draw = 0.0
        start = time.monotonic()
        if start >= self._next_draw and (not self._frozen or self._next_draw == 0.0):
            self._view.now_s, self._view.frozen = now_s, self._frozen
            self._live.update(self._view, refresh=True)
            end = time.monotonic()
            self._next_draw = end + max(_REDRAW_S, (end - start) / _DRAW_SHARE)
        return True


class _View:
    """The whole screen, sized to the terminal."""

    def __init__(self, state: KVState, decode: Decode | None, scraper: "Scraper | None", endpoints: str) -> None:
        self._state = state
        self._decode = decode
        self._scraper = scraper
        self._endpoints = endpoints
        self.now_s = 0.0
        self.frozen = False
        self.title, self.keys = "pagedcli attach", _KEYS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        root, body = Layout(), Layout()
        root.split_column(Layout(self._head(), size=1), body, Layout(Text(self.keys, "reverse", no_wrap=True), size=1))
        if width >= 140 and height >= 30:
            side = max(60, width * 2 // 5)
            left, gap, right = Layout(), Layout(Text(" "), size=2), Layout(size=side)
            body.split_row(left, gap, right)
            self._fill(left, [self._tree(width - side - 2, height - 2)])
            self._fill(right, [*self._sections(side), self._notes(side, 12)])
        else:
            sections = [self._figures(width), self._caches(), *self._server(width)]
            notes = self._notes(width, max(2, height // 6))
            num_tree = height - 2 - sum(num_lines + 1 for _, _, num_lines in [*sections, notes])
            self._fill(body, [*sections, self._tree(width, max(4, num_tree)), notes])
        yield from console.render(root, options.update(height=height))

    def _sections(self, width: int) -> "list[_Section]":
        return [self._figures(width), self._caches(), *self._loras(), *self._churn(), *self._server(width)]

    @staticmethod
    def _fill(layout: Layout, sections: "list[_Section]") -> None:
        parts = [
            Layout(Group(_rule(title), content), size=num_lines + 1 if place < len(sections) - 1 else None)
            for place, (title, content, num_lines) in enumerate(sections)
        ]
        layout.split_column(*parts)

    def _head(self) -> Text:
        state = self._state
        problems = sum(p.sequence.num_missed for p in state.publishers.values()) + state.num_malformed
        return Text.assemble(
            (f" {one_line(self.title)} ", "bold reverse"),
            (" FROZEN " if self.frozen else "", "bold yellow"),
            f" {one_line(self._endpoints)}  {self.now_s:,.0f} s  {state.num_batches:,} batches  ",
            (f"{problems:,} lost or malformed" if problems else "", "bold red"),
            ("" if state.num_batches else "waiting for the first event ...", "italic"),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _figures(self, width: int) -> "_Section":
        values = facts(self._state)
        again, stored = values["num_blocks_stored_again"], values["num_stored_blocks"]
        lines = [
            f"resident {values['num_resident_blocks']:,} blocks, {values['num_resident_tokens']:,} tokens, at most "
            f"{values['peak_resident_blocks']:,}; different blocks {values['num_unique_blocks']:,}",
            f"last 10 s: {values['stored_blocks_per_s']:,.1f} stored/s, {values['removed_blocks_per_s']:,.1f} removed/s"
            f"; a block stays {_seconds(values['median_lifetime_s'])} (median)",
            f"churn {again:,} of {stored:,} blocks stored"
            + (f" ({100 * again / stored:.1f} %)" if stored else "")
            + f": {values['num_tokens_computed_twice']:,} tokens twice; gone for {_seconds(values['median_pause_s'])}",
        ]
        text = Text("\n".join(lines))
        return "figures", text, _height(text, width)

    def _caches(self) -> "_Section":
        several = len(self._state.publishers) > 1
        names = ("group", "medium", "blocks", "tokens", "roots", "depth", "share")
        table = _table(*(("cache", *names) if several else names))
        rows = cache_rows(self._state)
        total = sum(row["num_blocks"] for row in rows) or 1
        for row in rows[:8]:
            share = row["num_blocks"] / (row["capacity_blocks"] or total)
            cells = [
                one_line(row["group"]), one_line(row["medium"]), f"{row['num_blocks']:,}", f"{row['num_tokens']:,}",
                f"{row['num_prompts']:,}", f"{row['max_depth_blocks']:,}", f"{100 * share:.0f} %",
            ]  # fmt: skip
            table.add_row(*([one_line(str(row["publisher"])), *cells] if several else cells))
        return "caches", table, min(len(rows), 8) + 1

    def _loras(self) -> "list[_Section]":
        rows = lora_rows(self._state)[:5]
        table = _table("LoRA adapter", "blocks", "tokens")
        for row in rows:
            table.add_row(one_line(row["lora"]), f"{row['num_blocks']:,}", f"{row['num_tokens']:,}")
        return [("adapters", table, len(rows) + 1)] if rows else []

    def _churn(self) -> "list[_Section]":
        table = _table("removed and stored again", "blocks")
        rows = [row for row in churn_rows(self._state) if row["num_blocks"]]
        for row in rows:
            table.add_row(f"{row['cause']}: {row['meaning']}", f"{row['num_blocks']:,}")
        return [("churn", table, len(rows) + 1)] if rows else []

    def _server(self, width: int) -> "list[_Section]":
        if self._scraper is None:
            return []
        figures = list(self._scraper.metrics.figures())
        if self._scraper.problem is not None or not figures:
            problem = self._scraper.problem or "no known figures on the metrics page"
            return [("server", Text(one_line(problem), "red", no_wrap=True, overflow="ellipsis"), 1)]
        lines: dict[str, list[str]] = {}
        for figure in figures:
            is_share = figure.key in ("usage", "hit_rate")
            value = f"{100 * figure.value:.1f} %" if is_share else f"{figure.value:,.0f}"
            meaning = "KV cache usage" if figure.key == "usage" else figure.meaning
            lines.setdefault(figure.window, []).append(f"{meaning} {value}")
        text = Text("\n".join(f"{window}: {', '.join(parts)}" for window, parts in lines.items()))
        return [("server, from its metrics", text, _height(text, width))]

    def _tree(self, width: int, height: int) -> "_Section":
        table = _table("prefix", "at", "run", "forks", "blocks", "tokens", "share")
        table.columns[0].overflow = "ellipsis"
        table.columns[0].ratio = 1
        table.columns[0].max_width = max(16, width - 46)
        rows = self._branches(max(1, height - 2))
        for branch, share in rows:
            label = "  " * min(branch.level, 6) + branch_label(branch, self._decode)
            table.add_row(
                one_line(label), f"{branch.depth:,}", f"{len(branch.nodes):,}", f"{branch.num_children:,}",
                f"{branch.num_blocks:,}", f"{branch.num_tokens:,}", f"{_BARS[round(share * 8)]} {100 * share:.0f} %",
            )  # fmt: skip
        return (
            "prefix tree: its largest subtrees",
            table,
            height - 1,
        )

    def _branches(self, most: int) -> list[tuple[Branch, float]]:
        trees = sorted(self._state.trees, key=lambda tree: -tree.num_resident)[:4]
        rows = []
        for tree in trees:
            shape = Shape(tree)
            total = sum(shape.num_tokens[node.hash] for node in shape.roots) or 1
            rows += [(branch, branch.num_tokens / total) for branch in largest_branches(shape, most // len(trees) or 1)]
        return rows[:most]

    def _notes(self, width: int, most: int) -> "_Section":
        lines = [one_line(line) for line in [*list(self._state.notes)[-most:], *limits(self._state)]][:most]
        text = Text("\n".join(lines), "dim")
        return "notes, and what KV events do not say", text, _height(text, width)


_Section = tuple[str, RenderableType, int]  # title, content, its lines


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    is_text = {"cache", "group", "medium", "prefix", "LoRA adapter", "removed and stored again"}
    for name in names:
        table.add_column(name, justify="left" if name in is_text else "right", no_wrap=True)
    return table


def _rule(title: str) -> Text:
    return Text(f"── {title} " + "─" * 400, "dim", no_wrap=True, overflow="crop")


def _height(text: Text, width: int) -> int:
    return len(text.wrap(Console(width=width), width))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"


class KVPlayer:
    """Shows a recording on a terminal, message by message, until `q`. Stepping back folds it again from the start."""

    def __init__(self, reader: CaptureReader, console: Console, *, title: str) -> None:
        self._messages = list(reader)
        self._sources = reader.sources
        self._console = console
        self._title = title
        self._state = KVState(self._sources)
        self._position = 0  # messages processed
        self._playing = False

    def run(self) -> None:
        """Return when the user quits."""
        with Keyboard() as keyboard, Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(self._view(), refresh=True)
                key = keyboard.read(_REDRAW_S if self._playing else 3600.0)
                if key == "q":
                    return
                if key == " ":
                    self._playing = not self._playing
                elif key is not None:
                    self._go(self._position + _JUMPS.get(key, 0) * len(self._messages) ** (key in ("home", "end")))
                elif self._playing:
                    self._go(self._position + 1)
                    self._playing = self._position < len(self._messages)

    def _go(self, position: int) -> None:
        position = max(0, min(position, len(self._messages)))
        if position < self._position:
            self._state, self._position = KVState(self._sources), 0
        for frames, time_s, source in self._messages[self._position : position]:
            self._state.take(frames, time_s, source)
        self._position = position

    def _view(self) -> _View:
        view = _View(self._state, None, None, f"message {self._position:,}/{len(self._messages):,}")
        view.title, view.keys = self._title, _PLAYER_KEYS
        view.now_s = self._state.time_s or 0.0
        return view
