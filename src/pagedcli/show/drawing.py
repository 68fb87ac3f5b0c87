"""Pictures for slides, papers and notebooks: vector drawings with a title and a caption, in the palette of all pages.

An element's class names its colours, see _LOOKS. They are written as attributes, which every program understands; a
style sheet replaces them where the viewer is in dark mode. Used by the pictures of show, drawn on as SVG.
"""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from html import escape

from pagedcli.printable import one_line
from pagedcli.show.pages import NUM_COLOURS, palette

# class -> its properties; values that are names of the palette are replaced by its colours
_LOOKS: dict[str, dict[str, str]] = {
    "sheet": {"fill": "card"},
    "title": {"fill": "text", "font-weight": "bold"},
    "ink": {"fill": "text"},
    "strong": {"fill": "text", "font-weight": "bold"},
    "muted": {"fill": "muted"},
    "halo": {
        "fill": "text",
        "stroke": "card",
        "stroke-width": "3",
        "paint-order": "stroke",
        "stroke-linejoin": "round",
    },
    "on": {"fill": "card", "font-weight": "bold"},
    "empty": {"fill": "empty", "stroke": "empty-edge"},
    "cached": {"fill": "cached", "stroke": "empty-edge"},
    "partial": {"fill": "partial"},
    "full": {"fill": "used"},
    "shared": {"fill": "shared"},
    "held": {"fill": "accent", "fill-opacity": "0.7"},
    "hole": {"fill": "card", "fill-opacity": "0.72"},
    "dot": {"fill": "card"},
    "written": {"fill": "none", "stroke": "text", "stroke-width": "3"},
    "grid": {"stroke": "line"},
    "edge": {"fill": "none", "stroke": "muted"},
    "curve": {"fill": "none", "stroke": "accent", "stroke-width": "3"},
    "best": {"fill": "none", "stroke": "muted", "stroke-width": "2", "stroke-dasharray": "6 4"},
    **{phase: {"fill": phase} for phase in ("waiting", "prefill", "decode", "preempted")},
    **{f"series{i}": {"fill": f"series{i}", "stroke": f"series{i}"} for i in range(NUM_COLOURS)},
    **{f"prefix{place}": {"fill": f"series{i}"} for place, i in enumerate((0, 2, 1, 5, 3))},
}
NUM_PREFIX_COLOURS = 5
_CLASS = re.compile(r'class="(\w+)"')
_CHAR = 0.56  # width of a character in font sizes, the mean of common fonts and a little more


class Theme(StrEnum):
    """The values of --theme."""

    AUTO = "auto"  # as the viewer
    LIGHT = "light"
    DARK = "dark"


class Shape(StrEnum):
    """The values of --shape."""

    SLIDE = "slide"  # 16:9
    COLUMN = "column"  # a paper's column, as high as its content


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a sheet. Lengths are in units of the drawing."""

    x: float
    y: float
    width: float
    height: float | None  # None: as high as what is drawn
    font: float  # size of ordinary text


_SHEETS = {Shape.SLIDE: Area(36, 26, 1208, 668, 18), Shape.COLUMN: Area(14, 12, 472, None, 13)}
Drawn = tuple[list[str], float]  # elements, and the height that they take
Swatch = Callable[[float, float, float], str]  # draws at x, y and of a size


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished drawing. In a notebook it shows itself."""

    title: str
    caption: str
    width: float
    height: float
    parts: Sequence[str] = field(repr=False)

    def svg(self, theme: Theme = Theme.AUTO) -> str:
        """The drawing as a file of its own, without scripts, links and fonts."""
        light, dark = _colours()
        chosen = dark if theme is Theme.DARK else light
        body = _CLASS.sub(lambda found: f"{found[0]} {_attributes(found[1], chosen)}", "".join(self.parts))
        style = f"<style>@media (prefers-color-scheme: dark) {{ {' '.join(_dark_rules(body, dark))} }}</style>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="pagedcli-{theme}" viewBox="0 0 {self.width:g}'
            f' {self.height:.0f}" role="img" font-family="system-ui, \'Helvetica Neue\', Arial, sans-serif">'
            f"<title>{words(self.title)}</title><desc>{words(self.caption)}</desc>"
            f"{style if theme is Theme.AUTO else ''}{body}</svg>\n"
        )

    def _repr_svg_(self) -> str:
        return self.svg()


def draw(title: str, caption: str, body: Callable[[Area], Drawn], shape: Shape) -> Picture:
    """A sheet with a title, what `body` draws in the area between, and a caption."""
    sheet = _SHEETS[shape]
    font, title_font = sheet.font, sheet.font * 1.5
    top = sheet.y + title_font * 1.5
    lines = wrapped(caption, sheet.width, font)
    below = len(lines) * font * 1.35
    room = None if sheet.height is None else sheet.y + sheet.height - below - font - top
    parts, used = body(Area(sheet.x, top, sheet.width, room, font))
    end = top + (used if room is None else room) + font
    width = sheet.width + 2 * sheet.x
    height = end + below + sheet.y * 0.6 if sheet.height is None else sheet.height + 2 * sheet.y
    drawn = [
        f'<rect class="sheet" width="{width:g}" height="{height:.0f}"/>',
        text(sheet.x, sheet.y + title_font * 0.85, title, "title", title_font),
        *parts,
        *(text(sheet.x, end + font * (1 + 1.35 * place), line, "ink", font) for place, line in enumerate(lines)),
    ]
    return Picture(title, caption, width, height, drawn)


def all_colours() -> Picture:
    """Every colour next to every colour of text on it, to choose the palette of a film."""
    parts = ['<rect class="sheet" width="1280" height="720"/>']
    for place, css_class in enumerate(_LOOKS):
        x, y = place % 8 * 150, place // 8 * 130
        parts.append(box(x, y, 140, 120, css_class))
        parts += [text(x + 8, y + 50 * i, "0 s12 ×3", ink, 24) for i, ink in enumerate(("on", "halo", "muted"))]
    return Picture("", "", 1280, 720, parts)


def colours_of(theme: Theme) -> list[str]:
    """The colours of the palette as #rrggbb."""
    return sorted(set(_colours()[theme is Theme.DARK].values()))


def words(value: object) -> str:
    """Text that is safe in SVG, whatever it contains."""
    return escape(one_line(str(value)))


def text(x: float, y: float, value: object, css_class: str, size: float, anchor: str = "start") -> str:
    """Text on a base line; `anchor`: start, middle or end."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}"{at}>{words(value)}</text>'


def box(x: float, y: float, width: float, height: float, css_class: str, *, title: str = "", **data: object) -> str:
    """A rectangle, with a text for the mouse and `data-` attributes."""
    values = "".join(f' data-{name.replace("_", "-")}="{words(value)}"' for name, value in data.items())
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}"'
    tip = f"><title>{words(title)}</title></rect>" if title else "/>"
    return f'<rect class="{css_class}" {place} rx="{min(3.0, height / 8):.1f}"{values}{tip}'


def line(x1: float, y1: float, x2: float, y2: float, css_class: str = "grid") -> str:
    return f'<line class="{css_class}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text_width(value: str, size: float) -> float:
    """About how wide a text is."""
    return len(value) * size * _CHAR


def cut(value: str, width: float, size: float) -> str:
    """The text, shortened to a width."""
    most = max(1, int(width / (size * _CHAR)))
    return value if len(value) <= most else value[: most - 1] + "…"


def wrapped(value: str, width: float, size: float) -> list[str]:
    return textwrap.wrap(value, max(20, int(width / (size * _CHAR))))


def legend(area: Area, items: Iterable[tuple[Swatch, str]]) -> Drawn:
    """Swatches with their meanings, in as many lines as they need."""
    size, parts = area.font * 1.1, []
    x, y = area.x, area.y
    for swatch, meaning in items:
        width = size * 1.4 + text_width(meaning, area.font * 0.8) + area.font
        if x > area.x and x + width > area.x + area.width + area.font:
            x, y = area.x, y + size * 1.5
        parts += [swatch(x, y, size), text(x + size * 1.4, y + size * 0.8, meaning, "muted", area.font * 0.82)]
        x += width
    return parts, y + size - area.y


def swatch(css_class: str) -> Swatch:
    return lambda x, y, size: box(x, y, size, size, css_class)


@cache
def _colours() -> tuple[dict[str, str], dict[str, str]]:
    """The palette in light and in dark."""
    light, _, dark = palette().partition("@media")
    found = [dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in (light, dark)]
    return found[0], found[0] | found[1]


def _attributes(css_class: str, colours: dict[str, str]) -> str:
    return " ".join(f'{name}="{colours.get(value, value)}"' for name, value in _LOOKS[css_class].items())


def _dark_rules(body: str, dark: dict[str, str]) -> Iterator[str]:
    for css_class in sorted(set(_CLASS.findall(body))):
        coloured = [f"{name}: {dark[value]}" for name, value in _LOOKS[css_class].items() if value in dark]
        yield f".pagedcli-auto .{css_class} {{ {'; '.join(coloured)} }}"
