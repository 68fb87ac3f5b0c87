"""Rows drawn by position from a long plain file, in spans spread over it: what a file is, without reading it.

Each row of the file is as likely to be drawn as any other, whatever its length, so a total of the file is the total of
the sample times size by size, and the differences between spans say how far off that may be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from pathlib import Path
from typing import BinaryIO

import xxhash

from pagedcli.batch.lines import BOM, MAX_LINE_BYTES, Line, LineSource, skip_line

MOST_ROWS = 2000  # about
MOST_BYTES = 2**20  # bytes of the sampled rows: about a second to tokenize
_SPANS = 64
_TYPICAL_BYTES = 2**15  # first bytes of a file, by which the length of its rows is guessed
_LEAST_TIMES = 4  # a file with fewer times the bytes of its sample is read at once


@dataclass(frozen=True, slots=True)
class About:
    """A total of a whole file as a sample lets expect it, and the interval that holds it in 19 of 20 samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LineSample:
    """Rows of a file. Their numbers are those of the sample."""

    spans: Sequence[Sequence[Line]]
    share: float  # share of the file's bytes

    def __iter__(self) -> Iterator[Line]:
        return (line for span in self.spans for line in span)

    def about(self, of_rows: Sequence[float]) -> About:
        """The file's total of what each row of the sample has."""
        ends = [*accumulate(len(span) for span in self.spans)]
        totals = [sum(of_rows[end - len(span) : end]) for span, end in zip(self.spans, ends, strict=True)]
        num, total = len(totals), sum(totals)
        spread = sum((each - total / num) ** 2 for each in totals) / (num - 1)
        error = 2 * sqrt(num * spread * (1 - self.share)) / self.share
        value = total / self.share
        return About(value, max(total, value - error), value + error)


def sample_lines(source: LineSource) -> LineSample | None:
    """Rows of a plain file that are spread over it; None if the source is another, or so short that it is soon read."""
    if not source.is_plain:
        return None
    path = Path(source.name)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_TYPICAL_BYTES)
        typical = len(start) / max(1, start.count(b"\n"))
        span_bytes = round(min(MOST_ROWS * typical, MOST_BYTES) / _SPANS)
        if size < _LEAST_TIMES * _SPANS * max(span_bytes, 1):
            return None
        spans: list[list[Line]] = []
        index = 0
        for place in range(_SPANS):
            room = size // _SPANS - span_bytes
            start_at = place * size // _SPANS + xxhash.xxh64_intdigest(b"%d %d" % (size, place)) % room
            contents = _rows_from(file, start_at, span_bytes)
            spans.append([_line(index + number, content) for number, content in enumerate(contents)])
            index += len(contents)
    return LineSample(spans, _SPANS * span_bytes / size)


def _rows_from(file: BinaryIO, start: int, num_bytes: int) -> list[bytes | None]:
    """The rows that begin in these bytes of a file."""
    rows: list[bytes | None] = []
    file.seek(max(0, start - 1))
    if start:
        skip_line(file)  # Only its end is there, which is that of the row before if a row begins at `start`.
    while (at := file.tell()) < start + num_bytes and (line := file.readline(MAX_LINE_BYTES + 2)):
        is_whole = len(line) <= MAX_LINE_BYTES or line.endswith(b"\n")
        if not is_whole:
            skip_line(file)
        if line.strip():
            rows.append((line.removeprefix(BOM) if not at else line).rstrip(b"\r\n") if is_whole else None)
    return rows


def _line(index: int, content: bytes | None) -> Line:
    return Line(index, index + 1, content, xxhash.xxh64_intdigest(content or b""))
