"""The time line of the pool: blocks in use, cached and empty along the steps, with preemptions and evictions below.

A column is one step or several. Click or drag to go there, turn the wheel to zoom. Used by trace.
"""

from bisect import bisect_right
from itertools import groupby
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import MouseDown, MouseMove, MouseScrollDown, MouseScrollUp, MouseUp
from textual.message import Message

from pagedcli.app.rows import Painted, SegmentLine
from pagedcli.views.stats import StepSeries

_USED, _CACHED = "green", "cyan"
_CACHED_DARK = "#0e3a46"  # what is behind used blocks where cached ones begin within a cell
BARS = "▁▂▃▄▅▆▇█"
_LEVELS = 8  # heights that a cell can show
_MIN_STEPS = 8  # the fewest steps that a zoom shows
_CURSOR = Style(color="bright_white", bgcolor="#5c4a12", bold=True)
_MARKS = {"preempted": ("P", Style(color="red", bold=True)), "evicted": ("e", Style(color="yellow"))}
_BLANK = (" ", Style())
_FIGURES = ("used", "shared", "cached", "running", "waiting", "preempted", "evicted")  # the columns of a copied table
_LEGEND = "█ in use, ░ cached, P preempted, e evicted"
BarCell = tuple[str, Style]


class TimeLine(Painted):
    """Draws a series of steps. The column of the shown step has another background, so that it hides nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "zoom(0.5)", show=False),
        Binding("down", "zoom(2)", show=False),
        Binding("left", "move(-1)", show=False),
        Binding("right", "move(1)", show=False),
        Binding("pageup", "move(-20)", show=False),
        Binding("pagedown", "move(20)", show=False),
        Binding("escape", "whole", show=False),
    ]

    class StepChosen(Message):
        """A step to go to."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.can_focus = True
        self._series = StepSeries()
        self._num_blocks = 1
        self._at = 0  # place of the shown step
        self._range: tuple[int, int] | None = None  # places, while zoomed in
        self._columns: list[list[BarCell]] = []  # lines from the top, the marks last
        self._drawn: tuple[object, ...] = ()  # what `_columns` were made for
        self._is_dragged = False

    def show(self, series: StepSeries, num_blocks: int, step: int | None) -> None:
        """Show a series with the cursor on a step; None: before the first."""
        self._series, self._num_blocks = series, max(1, num_blocks)
        self._at = max(0, min((step or 0) - series.first_step, len(series) - 1))
        if self._range is not None and not self._range[0] <= self._at < self._range[1]:
            self._move_range(self._at)
        self._arrange()

    @property
    def shown_range(self) -> tuple[int, int]:
        """The first place that is drawn, and the one after the last."""
        return (0, max(1, len(self._series))) if self._range is None else self._range

    def as_text(self) -> str:
        columns = [self._series.columns[name] for name in _FIGURES]
        rows = ["\t".join(("step", *_FIGURES))]
        first, after = self.shown_range
        for place in range(first, min(after, len(self._series))):
            rows.append("\t".join(map(str, (self._series.first_step + place, *(column[place] for column in columns)))))
        return "\n".join(rows) + "\n"

    # ------------------------------------------------------------------ columns

    def _starts(self) -> list[int]:
        """Per column its first place, rising. A column of few steps is repeated."""
        (first, after), width = self.shown_range, max(1, self.size.width)
        return [first + x * (after - first) // width for x in range(width)]

    def _arrange(self) -> None:
        width, height = self.size
        if width and height:
            drawn = (len(self._series), self.shown_range, self._num_blocks, width, height, id(self._series))
            if drawn != self._drawn:
                self._drawn, self._columns = drawn, self._all_columns(height)
            self.show_title(self._which_steps())
            self.refresh_changed()

    def _all_columns(self, height: int) -> list[list[BarCell]]:
        starts, (_, after) = self._starts(), self.shown_range
        ends = [*starts[1:], after]
        columns: list[list[BarCell]] = []
        for start, end in zip(starts, ends, strict=True):
            if columns and start == starts[len(columns) - 1]:
                columns.append([*columns[-1][:-1], _BLANK])
            else:
                columns.append(self._column(start, max(start + 1, end), height))
        return columns

    def _column(self, start: int, end: int, height: int) -> list[BarCell]:
        """The pool where most blocks are in use, and what happened."""
        columns = self._series.columns
        used = columns["used"][start:end]
        if not used:
            return [_BLANK] * height
        most = max(used)
        cached = columns["cached"][start + used.index(most)]
        mark = next((glyph for name, glyph in _MARKS.items() if any(columns[name][start:end])), _BLANK)
        return [*_bar(most, cached, self._num_blocks, height - 1), mark]

    def _which_steps(self) -> str:
        first, after = self.shown_range
        per_column, first_step = -(-(after - first) // max(1, self.size.width)), self._series.first_step
        each = "" if per_column == 1 else f", {per_column:,} per column"
        steps = f"steps {first_step + first:,} to {first_step + after - 1:,}"
        if self._range is not None:
            return f"{steps} of {len(self._series):,}{each}; Esc: all"
        return f"{steps}{each}: {_LEGEND}"

    def on_resize(self) -> None:
        self._arrange()

    def line(self, y: int, width: int) -> SegmentLine:
        cells = [column[y] for column in self._columns if y < len(column)][:width]
        is_last = y == self.size.height - 1
        line = []
        first, after = self._cursor_columns()
        for x, (glyph, style) in enumerate(cells):
            is_shown = first <= x < after
            glyph = "▲" if is_last and x == first < after and glyph == _BLANK[0] else glyph
            line.append((glyph, _CURSOR if is_shown else style))
        groups = groupby(line, key=lambda cell: cell[1])
        return [Segment("".join(glyph for glyph, _ in same), style) for style, same in groups]

    def _cursor_columns(self) -> tuple[int, int]:
        starts = self._starts()
        last = bisect_right(starts, self._at) - 1
        if last < 0 or self._at >= self.shown_range[1]:
            return 0, 0
        return starts.index(starts[last]), last + 1

    # ------------------------------------------------------------------ keys and mouse

    def action_move(self, num_columns: int) -> None:
        first, after = self.shown_range
        per_column = max(1, (after - first) // max(1, self.size.width))
        self._choose(self._at + num_columns * per_column)

    def _choose(self, place: int) -> None:
        place = max(0, min(place, len(self._series) - 1))
        self.post_message(self.StepChosen(self._series.first_step + place))

    def action_zoom(self, factor: float) -> None:
        self._zoom(factor, self._at)

    def action_whole(self) -> None:
        self._range = None
        self._arrange()

    def _zoom(self, factor: float, place: int) -> None:
        """Show fewer or more steps; `place` stays where it is."""
        first, after = self.shown_range
        num_shown = max(_MIN_STEPS, round((after - first) * factor))
        if num_shown >= len(self._series):
            self._range = None
        else:
            share = (place - first) / (after - first)
            start = max(0, min(round(place - share * num_shown), len(self._series) - num_shown))
            self._range = start, start + num_shown
        self._arrange()

    def _move_range(self, place: int) -> None:
        """Bring a place into view."""
        assert self._range is not None, "the whole run has every place"
        num_shown = min(self._range[1] - self._range[0], len(self._series))
        start = max(0, min(place - num_shown // 2, len(self._series) - num_shown))
        self._range = start, start + num_shown

    def _place_at(self, x: int) -> int:
        starts = self._starts()
        return starts[max(0, min(x, len(starts) - 1))]

    def on_mouse_down(self, event: MouseDown) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and event.button == 1 and len(self._series):
            self._is_dragged = True
            self.capture_mouse()
            self._choose(self._place_at(offset.x))

    def on_mouse_move(self, event: MouseMove) -> None:
        if self._is_dragged:
            self._choose(self._place_at(event.x - self.gutter.left))

    def on_mouse_up(self, event: MouseUp) -> None:
        self._is_dragged = False
        self.release_mouse()

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self._zoom(0.5, self._place_at(event.x))
        event.stop()

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self._zoom(2, self._place_at(event.x))
        event.stop()


_STYLES = {name: Style(color=name) for name in (_USED, _CACHED)}
_USED_ON_CACHED = Style(color=_USED, bgcolor=_CACHED_DARK)


def _bar(num_used: int, num_cached: int, num_blocks: int, height: int) -> list[BarCell]:
    """A column from the top: used blocks at the bottom, cached ones above them, empty ones on top. What is there is
    seen, even if it is less than a level."""
    levels = height * _LEVELS
    used = min(levels, -(-num_used * levels // num_blocks))
    cached = min(levels, used + -(-num_cached * levels // num_blocks))
    cells: list[BarCell] = []
    for low in range(0, levels, _LEVELS):
        if used - low >= _LEVELS:
            cells.append(("█", _STYLES[_USED]))
        elif used > low:
            cells.append((BARS[used - low - 1], _USED_ON_CACHED if cached > used else _STYLES[_USED]))
        elif cached - low >= _LEVELS:
            cells.append(("░", _STYLES[_CACHED]))
        elif cached > low:
            cells.append((BARS[cached - low - 1], _STYLES[_CACHED]))
        else:
            cells.append(_BLANK)
    return cells[::-1]
