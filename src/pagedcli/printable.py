"""Makes text from a file, a prompt or a model safe to print: no terminal control characters, no broken table rows.

Used by everything that prints. The only place that knows which characters are dangerous.
"""

import math
import re
import textwrap
from collections.abc import Iterable

# C0 except tab and line feed, DEL and C1; bidirectional and invisible marks; line separators; lone surrogates
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# the same in UTF-8, except those that JSON escapes anyway
_STEERING_BYTES = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]|\xef\xbb\xbf|\xef\xbf[\xb9-\xbb]"
    rb"|\xf3\xa0[\x80\x81][\x80-\xbf]"
)


_shown: dict[str, str] = {}


def show_as(path: str, name: str) -> None:
    """From now on print `name` for this path, and for the beginning of what lies below it."""
    _shown[path] = name


def printable(text: str) -> str:
    """The text with terminal control characters escaped. Tabs and line ends stay."""
    for path, name in _shown.items():
        text = text.replace(path, name)
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def one_line(text: str) -> str:
    """The text made printable on one line, e.g. for a table cell: line ends and tabs become spaces."""
    return printable(" ".join(text.splitlines()).replace("\t", " "))


def capitalized(words: str) -> str:
    """The words with a capital first letter."""
    return f"{words[:1].upper()}{words[1:]}"


def printable_json(document: bytes) -> bytes:
    """Encoded JSON with the same characters as JSON escapes: an equal document."""
    return _STEERING_BYTES.sub(_json_escape, document)


def _json_escape(match: re.Match[bytes]) -> bytes:
    units = match[0].decode().encode("utf-16-be")
    return b"".join(b"\\u" + units[i : i + 2].hex().encode() for i in range(0, len(units), 2))


_UNIT = re.compile(r"(?<=\d) (?=(?:%|µs|ms|s|min|h|B|[KMGT]iB)(?!\w))")
# A noncharacter of one cell, between a number and its unit, or a label and its text: no line ends there.
HARD_SPACE = "\ufdd0"


def with_hard_spaces(line: str) -> str:
    """The line with hard spaces between numbers and their units."""
    return _UNIT.sub(HARD_SPACE, line)


def wrap_words(line: str, width: int, *, indent: str = "", first: str = "", break_long_words: bool = True) -> list[str]:
    """The line in parts of a width, broken between words, but not between a number and its unit or within several
    spaces. `first`, `indent`: what the first and the further parts begin with."""
    kept = re.sub(r"(?<=\S) {2,}", lambda spaces: HARD_SPACE * len(spaces[0]), with_hard_spaces(line))
    parts = textwrap.wrap(
        kept,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=break_long_words,
        break_on_hyphens=False,
    )
    return [part.replace(HARD_SPACE, " ") for part in parts]


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,000 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"


def byte_text(num_bytes: float, digits: int = 1) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point: `28.0 MiB`. Half a last digit rounds up, as
    in the page of `explain -o`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(0, int(abs(num_bytes)).bit_length() - 1) // 10, len(units) - 1)
    scale = 10 ** (digits if power else 0)
    return f"{math.floor(num_bytes / 1024**power * scale + 0.5) / scale:,.{digits if power else 0}f} {units[power]}"


def percent_text(share: float) -> str:
    """0.213 -> `21.3 %`."""
    return f"{100 * share:.1f} %"


def seconds_text(seconds: float) -> str:
    """`1,234 s`, `1.23 s`, `12.3 ms` or `120 µs`."""
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def duration_text(seconds: float) -> str:
    """How long people wait: `40 ms`, `4.1 s`, `41 s`, `12 min 5 s` or `3 h 12 min`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole // 60 % 60} min"


_MOST_REASON = 300  # characters of why a row failed, which may have a number of thousands of digits; the row has all


def cut_reason(reason: str) -> str:
    """Why a row failed, not longer than one reads."""
    return reason if len(reason) <= _MOST_REASON else reason[:_MOST_REASON] + "…"


def refused_text(num_refused: int, num_rows: int, line: int, reason: str, *, has_run: bool) -> str:
    """How many rows failed, or would fail, with the first one: its line and why."""
    verb = "failed" if has_run else "would fail"
    return f"{num_refused:,} of {plural(num_rows, 'row')} {verb}, the first in line {line:,}: {cut_reason(reason)}."


def expected_text(seconds: float, low: float, high: float) -> str:
    """An expected time with its range: `about 5.8 s (4.4 s to 7.6 s)`; one bound of a second or less, `under 0.2 s`,
    and of a range wider than threefold, `at most 43 s`."""
    if high <= 1:
        return f"under {max(1, math.ceil(10 * high)) / 10:g} s"
    text, least, most = (f"{each:.1f} s" if each < 0.95 else duration_text(each) for each in (seconds, low, high))
    return f"at most {most}" if high > 3 * low else f"about {text} ({least} to {most})"


def id_ranges(ids: Iterable[int]) -> str:
    """`0-3 7 9`: ids in order, adjacent ones as a range."""
    runs: list[list[int]] = []
    for each in ids:
        if runs and runs[-1][1] + 1 == each:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    return " ".join(id_range(first, last) for first, last in runs)


def id_range(first: int, last: int) -> str:
    """`7`, `7 8` or `7-9`."""
    return str(first) if first == last else f"{first}{' ' if first + 1 == last else '-'}{last}"
