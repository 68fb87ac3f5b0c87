"""Widgets made of lines, of which only those that have changed are painted again. Used by every screen."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

Line = list[Segment]


def line_of(text: Text, width: int, console: Console, style: Style | None = None) -> Line:
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
    """A widget whose content is `line(y, width)` for each of its lines (a Widget cannot be an ABC)."""

    def __init__(self, *children: Widget, **options: Any) -> None:
        super().__init__(*children, **options)
        self._painted: dict[int, Line] = {}
        self._base = Style()  # of the widget, looked up once per paint

    def line(self, y: int, width: int) -> Line:
        """The line at y, in the styles of its parts."""
        raise NotImplementedError

    def refresh_changed(self) -> None:
        """Paint the lines again that have changed."""
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

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Text] = ()
        self._wrapped: tuple[int, list[Text]] = 0, []  # for a width

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
                yield from line.wrap(self.app.console, width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._wrap(width))

    def line(self, y: int, width: int) -> Line:
        lines = self._wrap(width)
        return line_of(lines[y].copy(), width, self.app.console) if y < len(lines) else []
