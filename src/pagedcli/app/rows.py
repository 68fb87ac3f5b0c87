"""Panels made of lines: only what changed is drawn again, and of a list only the visible rows are built."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from pagedcli.app.colours import MUTED
from pagedcli.printable import HARD_SPACE, with_hard_spaces

SegmentLine = list[Segment]


def line_of(text: Text, width: int, console: Console, style: Style | None = None) -> SegmentLine:
    """A text as a line, cut to a width. `style` is applied to all of the line, padding included."""
    if cell_len(text.plain) > width:
        text.truncate(width, overflow=text.overflow or "ellipsis")
    if text.spans:
        line = list(text.render(console, end=""))
    else:
        line = [Segment(text.plain, text.style if isinstance(text.style, Style) else console.get_style(text.style))]
    if style is not None:
        line.append(Segment(" " * (width - text.cell_len)))
        line = list(Segment.apply_style(line, style))
    return line


class Painted(Widget):
    """A widget whose content is `line(y, width)` for each of its lines."""

    def __init__(self, *children: Widget, **options: Any) -> None:
        super().__init__(*children, **options)
        self._painted: dict[int, SegmentLine] = {}
        self._base = Style()  # the widget's style, looked up once per paint
        self._title = ""

    @abstractmethod
    def line(self, y: int, width: int) -> SegmentLine:
        """The line at y, in the styles of its parts."""

    @abstractmethod
    def as_text(self) -> str:
        """The whole panel as lines of text, cells separated by tabs, to copy."""

    def show_title(self, title: str) -> None:
        """A title that may contain anything: brackets are no markup."""
        if title != self._title:
            self._title, self.border_title = title, Content(title)

    def refresh_changed(self) -> None:
        width, height = self.scrollable_content_region.size
        for y in range(height):
            if self.line(y, width) != self._painted.get(y):
                self.refresh(Region(0, y, width, 1))

    def render_lines(self, crop: Region) -> list[Strip]:
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        line = self._painted[y] = self.line(y, width)
        return Strip(Segment.apply_style(line, self._base)).adjust_cell_length(width, self._base)


class Lines(Painted):
    """Texts below each other; long lines are wrapped."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str, can_focus: bool = False) -> None:
        super().__init__(id=id)
        self.can_focus = can_focus
        self._lines: Sequence[Text] = ()
        self._wrapped: tuple[int, list[Text]] = 0, []  # a width and the lines for it

    def show(self, *texts: Text) -> None:
        """Show these texts. The screen is laid out again only if the number of lines changes."""
        lines = [line for text in texts for line in text.split("\n", allow_blank=True)]
        if lines == self._lines and [line.style for line in lines] == [line.style for line in self._lines]:
            return
        width, before = self._wrapped
        self._lines, self._wrapped = lines, (0, [])
        if len(self._wrap(width)) != len(before):
            self.refresh(layout=True)
        else:
            self.refresh_changed()

    def _wrap(self, width: int) -> list[Text]:
        if self._wrapped[0] != width:
            self._wrapped = width, list(self._wrap_each(self._lines, width))
        return self._wrapped[1]

    def _wrap_each(self, lines: Iterable[Text], width: int) -> Iterable[Text]:
        for line in lines:
            if line.no_wrap or line.cell_len <= width:
                yield line
            else:
                held = line.copy()
                held.plain = with_hard_spaces(line.plain)
                for part in held.wrap(self.app.console, width):
                    part.plain = part.plain.replace(HARD_SPACE, " ")
                    yield part

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._wrap(width))

    def line(self, y: int, width: int) -> SegmentLine:
        lines = self._wrap(width)
        return line_of(lines[y].copy(), width, self.app.console) if y < len(lines) else []

    def as_text(self) -> str:
        return "".join(f"{line.plain}\n" for line in self._lines)


_HEADING = Style(bold=True)
_CURSOR = Style(reverse=True)
_CURSOR_ELSEWHERE = Style(bold=True)


class Rows(ScrollView, Painted):
    """A list of which only the visible rows are built, so that long lists cost nothing. Shows `row(key, width)`
    for each key. The cursor stays on its key while the rows around it change."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "end(False)", show=False),
        Binding("end", "end(True)", show=False),
        Binding("enter", "choose", "details"),
    ]
    DEFAULT_CSS = "Rows { scrollbar-size-vertical: 1; overflow-x: hidden; }"

    class RowChosen(Message):
        """Enter or a double click on a row."""

        def __init__(self, rows: "Rows", key: int) -> None:
            super().__init__()
            self.rows, self.key = rows, key

    class CursorMoved(Message):
        """The cursor is on another row."""

    class HeadingClicked(Message):
        """A click on the heading, on a cell from the left."""

        def __init__(self, x: int, width: int) -> None:
            super().__init__()
            self.x, self.width = x, width

    def __init__(self, *, id: str, empty: str = "none") -> None:
        super().__init__(id=id)
        self.empty = empty  # shown instead of rows
        self._keys: Sequence[int] = ()
        self._row: Callable[[int, int], Text] = lambda key, width: Text()
        self._heading: Callable[[int], Text] | None = None
        self._cells: Callable[[int | None], Sequence[str]] | None = None
        self._cursor = 0

    @property
    def cursor_key(self) -> int | None:
        return self._keys[self._cursor] if self._keys else None

    @property
    def text_width(self) -> int:
        """Room for a row, next to a scrollbar that may not be there yet."""
        return self.outer_size.width - self.styles.scrollbar_size_vertical

    @property
    def _num_headings(self) -> int:
        return self._heading is not None

    def show(
        self,
        heading: Callable[[int], Text] | None,
        keys: Sequence[int],
        row: Callable[[int, int], Text],
        *,
        at: int | None = None,
        cells: Callable[[int | None], Sequence[str]] | None = None,
    ) -> None:
        """Show these rows. The cursor goes to the key `at`, or stays on its key if it is still there. `cells` are what
        a copy has of a key (None: of the heading), where a row is more than its text."""
        key = self.cursor_key if at is None else at
        self._heading, self._keys, self._row, self._cells = heading, keys, row, cells
        with suppress(ValueError):  # it has left the list
            self._cursor = keys.index(key) if key is not None else self._cursor
        self._cursor = max(0, min(self._cursor, len(keys) - 1))
        self.virtual_size = Size(0, len(keys) + self._num_headings)
        if at is not None:
            self._follow_cursor()
        self.refresh_changed()

    def show_lines(self, lines: Iterable[str], style: str = "") -> None:
        """Show lines of text, the long ones wrapped."""
        width = max(20, self.text_width)
        rows = [row for line in lines for row in (wrap(line, width, subsequent_indent="    ") or [""])]
        self.show(None, range(len(rows)), lambda key, width: Text(rows[key], style))

    def as_text(self) -> str:
        if self._cells is not None:
            return "".join("\t".join(self._cells(key)) + "\n" for key in (None, *self._keys))
        width = self.text_width
        heading = [] if self._heading is None else [self._heading(width).plain]
        return "".join(line.rstrip() + "\n" for line in [*heading, *(self._row(k, width).plain for k in self._keys)])

    def line(self, y: int, width: int) -> SegmentLine:
        console = self.app.console
        if y == 0 and self._heading is not None:
            return line_of(self._heading(width), width, console, _HEADING)
        place = self.scroll_offset.y + y - self._num_headings
        if place >= len(self._keys):
            return line_of(Text(self.empty, MUTED) if place == 0 else Text(), width, console)
        text = self._row(self._keys[place], width)
        if place != self._cursor:
            return line_of(text, width, console)
        return line_of(text, width, console, _CURSOR if self.has_focus else _CURSOR_ELSEWHERE)

    # ------------------------------------------------------------------ keys and mouse

    def move_to(self, place: int) -> None:
        """Put the cursor on a row, by its place from the top."""
        self._cursor = max(0, min(place, len(self._keys) - 1))
        self._follow_cursor()
        self.refresh()
        self.post_message(self.CursorMoved())

    def _follow_cursor(self) -> None:
        top, height = self.scroll_offset.y, max(1, self.size.height - self._num_headings)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False)

    def action_move(self, count: int) -> None:
        self.move_to(self._cursor + count)

    def action_page(self, count: int) -> None:
        self.move_to(self._cursor + count * max(1, self.size.height - self._num_headings))

    def action_end(self, last: bool) -> None:
        self.move_to(len(self._keys) - 1 if last else 0)

    def action_choose(self) -> None:
        if self.cursor_key is not None:
            self.post_message(self.RowChosen(self, self.cursor_key))

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        place = self.scroll_offset.y + offset.y - self._num_headings
        if offset.y < self._num_headings:
            self.post_message(self.HeadingClicked(offset.x, self.scrollable_content_region.width))
        elif place < len(self._keys):
            self.move_to(place)
            if event.chain == 2:
                self.action_choose()
