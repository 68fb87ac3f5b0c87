"""The application of `pagedcli attach`, and of `replay` for its recordings: prefix tree, caches, churn, the server."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import Footer, Static

from pagedcli.app.base import DeckApp
from pagedcli.app.deck import Deck
from pagedcli.app.dialogs import Ask, StoryPage
from pagedcli.app.kv_decks import Picture
from pagedcli.app.rows import Rows
from pagedcli.kvevents.branches import Branch, Decode, branch_label, hash_text, token_ids
from pagedcli.printable import one_line, plural

if TYPE_CHECKING:
    from pagedcli.kvevents.scrape import Scraper

_MOST_CACHES = 8
_NUMBERS_WIDTH = 44  # of the tree's columns after the prefix
_SORTS = ("tree", "tokens", "run", "forks")
_LEGEND = """\
 prefix        text (with -m) or hash at the beginning of a run of blocks
 at            depth of its first block; run: blocks until the next fork
 blocks        of the whole subtree, with tokens and their share of the tree
 churn         blocks that had left the cache and were stored again
 KV events have no block ids, no reference counts and no requests.
"""


class KVApp(DeckApp):
    """Shows the pictures of a server's caches."""

    CSS = (
        DeckApp.CSS
        + """
    #left { height: 1fr; }
    #right { height: auto; }
    #tree { height: 1fr; min-height: 4; }
    #figures { height: auto; }
    #notes { height: 3; }
    Screen.-tall #notes { height: 7; }
    #notes:focus { height: 10; }
    Screen.-wide #left { width: 3fr; height: 100%; }
    Screen.-wide #right { width: 2fr; height: 100%; margin-left: 1; }
    Screen.-wide #notes { height: 1fr; }
    """
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter"),
        Binding("e", "jump('eviction', False)", show=False),
        Binding("E", "jump('eviction', True)", show=False),
        Binding("m", "jump('miss', False)", show=False),
        Binding("M", "jump('miss', True)", show=False),
    ]
    MORE_KEYS = """\
 e  m          to the next eviction, block stored again (recordings)
 E  M          to the previous one
 s             sort: as a tree, most tokens, longest run, most forks
 /             show prefixes with some text"""

    def __init__(
        self, deck: Deck[Picture], title: str, *, decode: Decode | None = None, scraper: "Scraper | None" = None
    ) -> None:
        super().__init__(deck, title)
        self._decode = decode
        self._scraper = scraper
        self._sort = 0
        self._filter = ""
        self._tree = Rows(id="tree", empty="no blocks")
        self._shown: dict[int, Branch] = {}  # by row
        self._figures = Static(id="figures")
        self._notes = Rows(id="notes")

    def compose(self) -> ComposeResult:
        yield self.head_line
        with Container(id="body"):
            with Vertical(id="left"):
                yield self._tree
            with Vertical(id="right"):
                yield self._figures
                yield self._notes
        yield Footer(compact=True)

    def on_mount(self) -> None:
        for panel in (self._tree, self._figures, self._notes):
            panel.add_class("panel")
        self._figures.border_title = "figures"
        self._notes.border_title = "notes, and what KV events do not say"
        self._tree.focus()

    # ------------------------------------------------------------------ drawing

    @property
    def _picture(self) -> Picture:
        picture: Picture | None = self.deck.moment
        assert picture is not None, "panels are filled once there is a picture"
        return picture

    def head(self) -> Text:
        facts = self._picture.facts
        problems = facts["num_missed_messages"] + facts["num_malformed"]
        return Text.assemble(
            f"{plural(facts['num_batches'], 'batch')}  {plural(facts['num_resident_blocks'], 'block')} resident  ",
            (f"{problems:,} lost or malformed" if problems else "", "bold red"),
            ("" if facts["num_batches"] else "waiting for the first event ...", "italic"),
        )

    def legend(self) -> str:
        return _LEGEND

    def show_moment(self) -> None:
        self._show_tree()
        self._figures.update(Group(*self._all_figures()))
        self._notes.show_lines(map(one_line, self._picture.notes), "dim")

    def _show_tree(self) -> None:
        rows = [(branch, share, branch_label(branch, self._decode)) for branch, share in self._picture.branches]
        rows = [row for row in rows if self._filter.lower() in row[2].lower()]
        if self._sort:
            keys = (lambda b: b.num_tokens, lambda b: len(b.nodes), lambda b: b.num_children)
            rows.sort(key=lambda row: -keys[self._sort - 1](row[0]))
        cells = {id(branch.nodes[0]): (branch, share, label) for branch, share, label in rows}
        self._shown = {key: branch for key, (branch, _, _) in cells.items()}

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
        picture = self._picture
        parts: list[RenderableType] = [_figures(picture), _caches(picture)]
        if picture.adapters:
            rows = [(one_line(row["lora"]), row["num_blocks"], row["num_tokens"]) for row in picture.adapters[:5]]
            cells = [(name, f"{blocks:,}", f"{tokens:,}") for name, blocks, tokens in rows]
            parts.append(_table(("LoRA adapter", "blocks", "tokens"), cells))
        parts += [Text(f"{plural(row['num_blocks'], 'block')} stored again: {row['meaning']}") for row in picture.churn]
        if self._scraper is not None:
            parts.append(_server(self._scraper))
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

        self.push_screen(Ask("show prefixes with", self._filter), apply)

    def on_rows_chosen(self, message: Rows.Chosen) -> None:
        branch = self._shown.get(message.key) if message.rows is self._tree else None
        if branch is not None:
            lines = [_block_line(branch, place) for place in range(len(branch.nodes))]
            self.push_screen(StoryPage(branch_label(branch, None), _branch_facts(branch, self._decode), lines))


def _figures(picture: Picture) -> Text:
    facts = picture.facts
    again, stored = facts["num_blocks_stored_again"], facts["num_stored_blocks"]
    share = f" ({100 * again / stored:.1f} %)" if stored else ""
    lines = [
        f"resident {plural(facts['num_resident_blocks'], 'block')}, "
        f"{plural(facts['num_resident_tokens'], 'token')}, at most "
        f"{facts['peak_resident_blocks']:,}; different blocks {facts['num_unique_blocks']:,}",
        f"last 10 s: {facts['stored_blocks_per_s']:,.1f} stored/s, {facts['removed_blocks_per_s']:,.1f} removed/s; a "
        f"block stays {_seconds(facts['median_lifetime_s'])} (median)",
        f"churn {again:,} of {plural(stored, 'block')} stored{share}: "
        f"{plural(facts['num_tokens_computed_twice'], 'token')} twice; "
        f"gone for {_seconds(facts['median_pause_s'])}",
    ]
    return Text("\n".join(lines))


def _caches(picture: Picture) -> Table:
    several = len({row["publisher"] for row in picture.caches}) > 1
    total = sum(row["num_blocks"] for row in picture.caches) or 1
    rows = [
        (
            *([one_line(str(row["publisher"]))] if several else []),
            one_line(row["group"]), one_line(row["medium"]), f"{row['num_blocks']:,}", f"{row['num_tokens']:,}",
            f"{row['num_prompts']:,}", f"{row['max_depth_blocks']:,}",
            f"{100 * row['num_blocks'] / (row['capacity_blocks'] or total):.0f} %",
        )
        for row in picture.caches[:_MOST_CACHES]
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


def _server(scraper: "Scraper") -> Text:
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


def _branch_facts(branch: Branch, decode: Decode | None) -> Text:
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


def _block_line(branch: Branch, place: int) -> tuple[str, str]:
    node = branch.nodes[place]
    state = f"{node.num_copies} resident" if node.cause is None else node.cause
    return f"at {branch.depth + place:,}", f"block {hash_text(node.hash)}: {plural(node.num_tokens, 'token')}, {state}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"
