"""The map of the block pool: a cell per block, or per several blocks. Nothing depends on colour alone.

Used by the application of trace.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from string import ascii_lowercase, digits
from typing import ClassVar, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message

from pagedcli.app.rows import Painted, SegmentLine, line_of
from pagedcli.printable import id_ranges, plural
from pagedcli.show.panels import pool_line
from pagedcli.trace.state import PoolState
from pagedcli.views.cache_groups import alike, group_of, layers_words, window_words
from pagedcli.views.moment import Moment
from pagedcli.views.rows import block_kind, block_owners

# block state: glyph, style, meaning
_GLYPHS = {
    "empty": ("·", Style(color="bright_black"), "empty"),
    "cached": ("○", Style(color="cyan"), "cached"),
    "partial": ("▫", Style(color="green"), "filling"),
    "full": ("■", Style(color="green"), "in use"),
    "shared": ("S", Style(color="magenta", bold=True), "shared by 2-9, + more"),
}
_GROUP_GLYPHS = digits + ascii_lowercase  # one per group; `+` for the groups after them
_GROUP_COLOURS = ("green", "magenta", "cyan", "yellow", "blue", "red", "white")
_CACHED_OF_GROUP = Style(underline=True)
_STYLES = {
    **{kind: style for kind, (_, style, _) in _GLYPHS.items()},
    **{colour: Style(color=colour) for colour in _GROUP_COLOURS},
    **{f"{colour} cached": Style(color=colour) + _CACHED_OF_GROUP for colour in _GROUP_COLOURS},
    "mixed": Style(),
    "mixed cached": _CACHED_OF_GROUP,
}
ONE_GROUP = "all layers of this model are in one group"
_LINES_BELOW = 2  # the pool's figures and the legend
_MARKED = Style(reverse=True)  # blocks of the selected sequence keep their glyphs
_CURSOR = Style(color="black", bgcolor="yellow", bold=True, underline=True)
T = TypeVar("T")
Look = tuple[str, str]  # kind, glyph
BlockCell = tuple[str, str, bool]  # the same, and whether it is marked


class BlockMap(Painted):
    """The blocks in the order of their ids: all, only those in use, or those of one cell. Where they do not fit, each
    cell stands for several and shows their most common state, or `shared` if any of them is; by group, the most common
    group of layers of those that are not empty. Cells of marked blocks are drawn in reverse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", show=False),
        Binding("right", "move(1)", show=False),
        Binding("up", "move_line(-1)", show=False),
        Binding("down", "move_line(1)", show=False),
        Binding("home", "end(False)", show=False),
        Binding("end", "end(True)", show=False),
        Binding("enter", "choose", "details"),
        Binding("escape", "leave_cell", show=False),
    ]

    class BlockChosen(Message):
        """Enter or a double click on a block."""

        def __init__(self, block_id: int) -> None:
            super().__init__()
            self.block_id = block_id

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.can_focus = True
        self._moment: Moment | None = None
        self._marked: set[int] = set()
        self._only_used = False
        self._by_group = False
        self._within: range | None = None  # the blocks of one cell
        self._shown: Sequence[int] = ()
        self._cells: list[BlockCell] = []
        self._cursor = 0

    def show(self, moment: Moment, marked: set[int]) -> None:
        num_before = None if self._moment is None else self._moment.state.num_blocks
        self._moment, self._marked = moment, marked
        if num_before != moment.state.num_blocks:
            self._within = None
            self.refresh(layout=True)  # another height
        self._arrange()

    def zoom(self) -> None:
        """Switch between all blocks and those in use."""
        self._only_used, self._within = not self._only_used and self._within is None, None
        self._arrange()

    def switch_groups(self) -> str:
        """Switch between the states of the blocks and their groups of layers. Returns why it could not, or nothing."""
        if self._moment is None:
            return ""  # nothing is drawn yet
        if self._moment.state.num_groups == 1:
            return ONE_GROUP
        self._by_group = not self._by_group
        self._arrange()
        return ""

    def go_to(self, block_id: int) -> None:
        """Put the cursor on a block, which is then seen on its own."""
        self._only_used, self._within = False, None
        self._arrange()
        per_cell = self._per_cell
        if per_cell > 1:
            ids = self._ids_at(block_id // per_cell)
            self._within = range(ids[0], ids[-1] + 1)
            self._arrange()
        self._cursor = self._shown.index(block_id)
        self.focus()
        self.refresh()

    def as_text(self) -> str:
        """The blocks that are shown, one a line, with cells separated by tabs."""
        if self._moment is None:
            return ""
        state = self._moment.state
        owners, has_groups = block_owners(state), state.num_groups > 1
        rows = ["\t".join(["block", "state", "ref count", "content", *["group"] * has_groups, "held by seq"])]
        for block_id in self._shown:
            content = state.hashes[block_id]
            kind, group = block_kind(state, block_id), group_of(state, block_id)
            held = " ".join(str(seq.seq_id) for seq, _ in owners.get(block_id, ()))
            cells = [block_id, kind, state.ref_counts[block_id], "" if content is None else f"{content:016x}"]
            rows.append("\t".join(map(str, [*cells, *["" if group is None else group] * has_groups, held])))
        return "\n".join(rows) + "\n"

    def _which_blocks(self) -> str:
        per_cell = self._per_cell
        if self._within is not None:
            which = f"blocks {self._within[0]:,} to {self._within[-1]:,}"
        else:
            which = "blocks in use" if self._only_used else "block pool"
        if self._draws_groups:
            which += " by group of layers"
        return which if per_cell == 1 else f"{which}, 1 cell = {plural(per_cell, 'block')}"

    @property
    def _draws_groups(self) -> bool:
        """Parts of a resumed run may be of different models."""
        return self._by_group and self._moment is not None and self._moment.state.num_groups > 1

    # ------------------------------------------------------------------ cells

    @property
    def _per_cell(self) -> int:
        area = max(1, self.size.width * (self.size.height - _LINES_BELOW))
        return max(1, -(-len(self._shown) // area))

    def _arrange(self) -> None:
        if self._moment is None or not self.size.width:
            return
        state = self._moment.state
        if self._only_used:
            self._shown = [block_id for block_id, count in enumerate(state.ref_counts) if count]
        else:
            self._shown = self._within or range(state.num_blocks)
        self._cells = _cells(state, self._shown, self._per_cell, self._marked, by_group=self._draws_groups)
        self._cursor = max(0, min(self._cursor, len(self._cells) - 1))
        self.show_title(self._which_blocks())
        self.refresh_changed()

    def on_resize(self) -> None:
        self._arrange()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        num_blocks = 0 if self._moment is None else self._moment.state.num_blocks
        return max(1, -(-num_blocks // max(1, width))) + _LINES_BELOW

    def line(self, y: int, width: int) -> SegmentLine:
        if self._moment is None:
            return []
        below = self.size.height - _LINES_BELOW
        if y >= below:
            text = pool_line(self._moment.state) if y == below else self._text_below()
            return line_of(text, width, self.app.console)
        first, after = y * width, min((y + 1) * width, len(self._cells))
        if not self.has_focus or not first <= self._cursor < after:
            return _runs(self._cells[first:after])
        cursor = self._cursor
        at_cursor = Segment(self._cells[cursor][1], _CURSOR)
        return [*_runs(self._cells[first:cursor]), at_cursor, *_runs(self._cells[cursor + 1 : after])]

    def _text_below(self) -> Text:
        if self.has_focus:
            return self._under_cursor()
        return self._group_legend() if self._draws_groups else self._legend()

    def _legend(self) -> Text:
        text = Text()
        for kind, (glyph, style, meaning) in _GLYPHS.items():
            if kind == "shared":
                glyph, meaning = ("2", meaning) if self._per_cell == 1 else (glyph, "some shared")
            text.append(glyph, style).append(f" {meaning}  ")
        if self._marked:
            text.append("■", _STYLES["full"] + _MARKED).append(" selected")
        return text

    def _group_legend(self) -> Text:
        """`0 window 16, 2 layers  1 no window, 1 layer  cached  selected  · empty`, these in their styles."""
        assert self._moment is not None
        text, groups = Text(), self._moment.state.started.groups
        for numbers in alike(groups):
            for number in numbers:
                kind, glyph = _look_of_group(number)
                text.append(glyph, _STYLES[kind])
            text.append(f" {', '.join([window_words(groups[numbers[0]]), *layers_words(groups, numbers)])}  ")
        if self._per_cell > 1:
            text.append("* tied  ")
        text.append("cached", _CACHED_OF_GROUP)
        if self._marked:
            text.append("  ").append("selected", _MARKED)
        glyph, style, meaning = _GLYPHS["empty"]
        return text.append("  ").append(glyph, style).append(f" {meaning}")

    def _under_cursor(self) -> Text:
        assert self._moment is not None
        ids = self._ids_at(self._cursor)
        if not ids:
            return Text("no blocks")
        state, block_id = self._moment.state, ids[0]
        if len(ids) > 1:
            blocks, how = f"blocks {ids[0]:,} to {ids[-1]:,}", "Enter shows them one by one"
            if self._draws_groups:
                return Text(f"{blocks}: {_group_words(state, ids)}; {how}")
            return Text(f"{blocks}: {how}, z the blocks in use")
        holders = [seq.seq_id for seq in state.running() if block_id in seq.block_table]
        held = f"held by seq {', '.join(map(str, holders[:8]))}{' ...' if len(holders) > 8 else ''}"
        kind = held if holders else _GLYPHS[block_kind(state, block_id)][2]
        group = group_of(state, block_id) if state.num_groups > 1 else None
        of_group = "" if group is None else f", group {group} ({window_words(state.started.groups[group])})"
        return Text(f"block {block_id:,}{of_group}: {kind}; Enter shows what it held")

    # ------------------------------------------------------------------ keys and mouse

    def _ids_at(self, cell: int) -> Sequence[int]:
        return self._shown[cell * self._per_cell : (cell + 1) * self._per_cell]

    def action_move(self, count: int) -> None:
        self._cursor = max(0, min(self._cursor + count, len(self._cells) - 1))
        self.refresh()

    def action_move_line(self, count: int) -> None:
        self.action_move(count * self.size.width)

    def action_end(self, last: bool) -> None:
        self.action_move(len(self._cells) * (1 if last else -1))

    def action_choose(self) -> None:
        ids = self._ids_at(self._cursor)
        if len(ids) > 1:
            self._within, self._only_used, self._cursor = range(ids[0], ids[-1] + 1), False, 0
            self._arrange()
        elif ids:
            self.post_message(self.BlockChosen(ids[0]))

    def action_leave_cell(self) -> None:
        self._within = None
        self._arrange()

    def on_click(self, event: Click) -> None:
        place = event.get_content_offset(self)
        if place is None:
            return
        cell = place.y * self.size.width + place.x
        if place.y < self.size.height - _LINES_BELOW and cell < len(self._cells):
            self._cursor = cell
            self.refresh()
            if event.chain == 2:
                self.action_choose()


def _runs(cells: list[BlockCell]) -> SegmentLine:
    """Equal neighbours as one segment."""
    return [
        Segment(glyph * len(list(same)), _STYLES[kind] + _MARKED if is_marked else _STYLES[kind])
        for (kind, glyph, is_marked), same in groupby(cells)
    ]


def _cells(
    state: PoolState, shown: Sequence[int], per_cell: int, marked: set[int], *, by_group: bool
) -> list[BlockCell]:
    """Per cell its kind, its glyph (for one shared block its ref_count), and whether it has a marked block."""
    of_one, of_several = (_group_of_one, _group_of_several) if by_group else (_kind, _summary)
    if per_cell == 1:
        return [(*of_one(state, block_id), block_id in marked) for block_id in shown]
    if isinstance(shown, range):
        marked_cells = {(block_id - shown.start) // per_cell for block_id in marked if block_id in shown}
    else:
        marked_cells = {place // per_cell for place, block_id in enumerate(shown) if block_id in marked}
    return [
        (*of_several(state, shown[start : start + per_cell]), cell in marked_cells)
        for cell, start in enumerate(range(0, len(shown), per_cell))
    ]


def _values(of_blocks: list[T], ids: Sequence[int]) -> list[T]:
    return of_blocks[ids.start : ids.stop] if isinstance(ids, range) else [of_blocks[i] for i in ids]


def _kind(state: PoolState, block_id: int) -> Look:
    kind, count = block_kind(state, block_id), state.ref_counts[block_id]
    if kind == "shared":
        return kind, str(count) if count < 10 else "+"
    return kind, _GLYPHS[kind][0]


def _summary(state: PoolState, ids: Sequence[int]) -> Look:
    counts, hashes = _values(state.ref_counts, ids), _values(state.hashes, ids)
    num_free, num_exclusive, num_unhashed = counts.count(0), counts.count(1), hashes.count(None)
    if num_free + num_exclusive < len(counts):
        kind = "shared"
    elif 2 * num_free < len(counts):
        kind = "partial" if num_unhashed > num_free + num_exclusive // 2 else "full"
    else:
        kind = "empty" if 2 * num_unhashed > len(counts) else "cached"
    return kind, _GLYPHS[kind][0]


# ---------------------------------------------------------------------- by group of layers


def _look_of_group(group: int | None, *, is_cached: bool = False) -> Look:
    if group is None:
        return "empty", _GLYPHS["empty"][0]
    colour = _GROUP_COLOURS[group % len(_GROUP_COLOURS)]
    return f"{colour} cached" if is_cached else colour, _GROUP_GLYPHS[group : group + 1] or "+"


def _group_of_one(state: PoolState, block_id: int) -> Look:
    return _look_of_group(group_of(state, block_id), is_cached=not state.ref_counts[block_id])


def _group_of_several(state: PoolState, ids: Sequence[int]) -> Look:
    """The most common group of those that are not empty, if there is one, as cached if most of these are."""
    counts, num_used = _counts_by_group(state, ids)
    if not counts:
        return _look_of_group(None)
    most, is_cached = max(counts.values()), 2 * num_used < counts.total()
    most_common = [group for group, count in counts.items() if count == most]
    if len(most_common) > 1:
        return "mixed cached" if is_cached else "mixed", "*"
    return _look_of_group(most_common[0], is_cached=is_cached)


def _counts_by_group(state: PoolState, ids: Sequence[int]) -> tuple[Counter[int], int]:
    """How many blocks of each group are not empty, and how many of all are in use."""
    counts, hashes = _values(state.ref_counts, ids), _values(state.hashes, ids)
    num_free, num_unhashed = counts.count(0), hashes.count(None)
    if num_free == num_unhashed == len(counts):
        return Counter(), 0
    groups = _values(state.block_groups, ids)
    if num_free and num_unhashed:  # else none is empty
        groups = [group for group, count, held in zip(groups, counts, hashes, strict=True) if count or held is not None]
    return Counter(groups), len(counts) - num_free


def _group_words(state: PoolState, ids: Sequence[int]) -> str:
    """`5 of group 1, 3 each of groups 0 2`, the most common first."""
    counts, _ = _counts_by_group(state, ids)
    words = []
    for count in sorted(set(counts.values()), reverse=True):
        groups = sorted(group for group in counts if counts[group] == count)
        words.append(f"{count:,} {'each of groups' if len(groups) > 1 else 'of group'} {id_ranges(groups)}")
    return ", ".join(words) or "all empty"
