"""Self-contained HTML pages: the shell, one palette for light and dark, tables and line charts.

Used by pages and by the picture of `simulate`. Series are told apart by a colour and a marker, both chosen by index.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from pagedcli.printable import one_line
from pagedcli.show.tables import Table, shown_cells

NUM_COLOURS = 6  # --series0 ... of the palette
_MARKERS = (
    '<circle r="6"/>', '<rect x="-5.5" y="-5.5" width="11" height="11"/>', '<path d="M0-7L7 6H-7z"/>',
    '<path d="M0-8L8 0L0 8L-8 0z"/>', '<path d="M-6-6L6 6M-6 6L6-6" style="stroke-width:3.5"/>',
)  # fmt: skip


def palette() -> str:
    """The colours of all pages, as CSS variables, light and dark."""
    return files("pagedcli.show").joinpath("report_page", "palette.css").read_text(encoding="utf-8")


def html_page(title: str, body: str) -> bytes:
    """A page, in UTF-8, that runs no scripts. The title is text, `body` is HTML."""
    series = " ".join(f".series{i} {{ fill: var(--series{i}); stroke: var(--series{i}); }}" for i in range(NUM_COLOURS))
    style = files("pagedcli.show").joinpath("report_page", "plain.css").read_text(encoding="utf-8")
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
{palette()}{style}{series}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
""".encode()


def section(title: str, *parts: str) -> str:
    """A box with a heading."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def as_html(table: Table) -> str:
    """A section with a table and its notes."""

    def cell(tag: str, text: str, is_number: bool) -> str:
        return f"<{tag}{' class=n' if is_number else ''}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column.header, column.is_number) for column in table.columns)
    rows = [
        "".join(cell("td", text, column.is_number) for text, column in zip(row, table.columns, strict=True))
        for row in shown_cells(table)
    ]
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    notes = "".join(f"<p>{escape(one_line(note))}</p>" for note in table.notes)
    return section(table.title, f"<div><table><tr>{head}</tr>{lines}</table></div>{notes}")


def marker(series: int) -> str:
    """The marker of a series: with more series than markers, markers repeat in other colours."""
    return f'<g class="series{series % NUM_COLOURS}">{_MARKERS[series % len(_MARKERS)]}</g>'


@dataclass(frozen=True, slots=True)
class LineChart:
    """Axes from x_range and 0 ... y_top to an SVG. With `log_x` the horizontal axis is logarithmic."""

    x_range: tuple[float, float]
    y_top: float
    log_x: bool = False
    width: int = 1000
    height: int = 380
    left: int = 60
    right: int = 20
    top: int = 14
    bottom: int = 44

    def x(self, value: float) -> float:
        first, last = self.x_range
        if self.log_x:
            share = math.log(value / first) / math.log(last / first)
        else:
            share = (value - first) / ((last - first) or 1)
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        return self.height - self.bottom - value / self.y_top * (self.height - self.top - self.bottom)

    def axes(
        self, x_ticks: Iterable[tuple[float, Sequence[str]]], y_ticks: Iterable[tuple[float, str]]
    ) -> Iterator[str]:
        """A grid line and its labels for each tick, below the horizontal axis in several lines."""
        bottom = self.height - self.bottom
        for value, label in y_ticks:
            y = self.y(value)
            yield f'<line class="grid" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        for value, labels in x_ticks:
            x = self.x(value)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom}"/>'
            for place, label in enumerate(labels):
                yield f'<text x="{x:.1f}" y="{bottom + 18 + 16 * place}" text-anchor="middle">{escape(label)}</text>'

    def x_label(self, text: str) -> str:
        x = (self.left + self.width - self.right) / 2
        return f'<text x="{x}" y="{self.height - self.bottom + 36}" text-anchor="middle">{escape(text)}</text>'

    def line(self, points: Iterable[tuple[float, float]], css_class: str = "curve") -> str:
        """A line through these points: `curve`, or dashed as `best`."""
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{css_class}" points="{places}"/>'

    def level(self, value: float, label: str) -> str:
        """A dashed line at one height, with its label."""
        return (
            self.line([(self.x_range[0], value), (self.x_range[1], value)], "best")
            + f'<text x="{self.left + 6}" y="{self.y(value) - 6:.1f}">{escape(label)}</text>'
        )

    def point(self, x: float, y: float, series: int, title: str) -> str:
        """The marker of a series, with a text for the mouse."""
        place = f"translate({self.x(x):.1f} {self.y(y):.1f})"
        return f'<g transform="{place}"><title>{escape(title)}</title>{marker(series)}</g>'

    def svg(self, parts: Iterable[str], label: str) -> str:
        """The drawing of these parts. `label` is for readers who do not see it."""
        box = f"0 0 {self.width} {self.height}"
        return f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """(drawing, words): a line of each. Drawings are those of the functions below."""
    spans = "".join(f'<span><svg viewBox="0 0 22 16">{drawing}</svg>{escape(text)}</span>' for drawing, text in items)
    return f'<div class="legend">{spans}</div>'


def legend_line(css_class: str) -> str:
    return f'<line class="{css_class}" x1="0" x2="22" y1="8" y2="8"/>'


def legend_marker(series: int) -> str:
    return f'<g transform="translate(11 8)">{marker(series)}</g>'


def log_ticks(first: float, last: float) -> list[int]:
    """1, 2 and 5 times powers of ten in the range; only the powers if there are many."""
    powers = range(int(math.log10(first)), int(math.log10(last)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [tick for power in powers for factor in factors if first <= (tick := factor * 10**power) <= last]
