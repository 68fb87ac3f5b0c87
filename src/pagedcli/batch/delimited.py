"""CSV and TSV tables: read as JSONL lines of the columns that a line may have, written with one line per sample.

Used by batch.prompts and batch.job. Rows are read one at a time; a row of at most MAX_LINE_BYTES is in memory.
"""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagedcli.batch.columns import DISK, INVALID_ROW, METRICS, SCORES, Columns
from pagedcli.batch.decisions import ANSWERS, cells_of
from pagedcli.batch.embeddings import EMBEDDING
from pagedcli.batch.lines import BOM, MAX_LINE_BYTES, LineSource
from pagedcli.batch.requests import LINE_FIELDS, NUMBERS, line_of, used_columns
from pagedcli.batch.rows import NumberedRows, WrittenRow, decided_of
from pagedcli.batch.sinks import write_lines
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.printable import plural

_DELIMITERS = {"csv": ",", "tsv": "\t"}


def delimited_format(name: str) -> str | None:
    """`csv` or `tsv`, if a file is named so, compressed or not."""
    suffix = Path(name.lower().removesuffix(".gz").removesuffix(".zst")).suffix.removeprefix(".")
    return suffix if suffix in _DELIMITERS else None


class DelimitedSource(LineSource):
    """The rows of a table with a header. Cells are text; those of sampling parameters are numbers, and empty ones of
    the request's own fields are absent. Quoted cells may have line breaks.

    Raises: UsageError for a file without a header; PagedcliError, here or while it is read, for a quote that is never
            closed.
    """

    def __init__(self, name: str, columns: Columns, kind: str) -> None:
        super().__init__(name)
        self._columns = columns
        self._delimiter = _DELIMITERS[kind]
        self._optional = (LINE_FIELDS | {*columns.ids}) - columns.sources  # an empty cell is none
        file = self._unpacked(self._opened or self._open())
        self._opened = file if self.is_live else None
        self._header_lines = _PhysicalLines(file, name)
        self._header = self._read_header(self._rows(self._header_lines))
        self.names = [column for column in self._header if column]
        if not self.is_live:
            file.close()
        try:
            self._used = used_columns(name, self.names, columns)
        except UsageError as error:
            hint = f"its first line must be a header; {error.hint}"
            if self._header[0].startswith("{"):
                hint = "--input-format jsonl reads JSON lines from a file of any name"
            raise UsageError(error.message, hint=hint) from error

    def _check_text(self, name: str, path: str, head: bytes) -> None:
        """A table may begin with any text."""

    def _contents(self, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        lines = self._header_lines
        if not self.is_live:
            lines = _PhysicalLines(file, self.name)
            self._read_header(self._rows(lines))
        for number, cells in self._rows(lines):
            if isinstance(cells, str):
                yield number, _encoded({INVALID_ROW: cells})
            else:
                yield number, _encoded(self._line(cells)) if cells else b""

    def _read_header(self, rows: Iterator[tuple[int, list[str] | str]]) -> list[str]:
        cells = next((cells for _, cells in rows if cells), [])
        names = [cell.strip() for cell in cells] if isinstance(cells, list) else []
        if not any(names):
            raise UsageError(f"{self.name} has no header", hint="its first line must have the names of the columns")
        return names

    def _rows(self, lines: "_PhysicalLines") -> Iterator[tuple[int, list[str] | str]]:
        """The first line and the cells of each row, or what is wrong with it."""
        csv.field_size_limit(MAX_LINE_BYTES)
        reader = csv.reader(lines, delimiter=self._delimiter)
        while True:
            first = lines.start_row()
            try:
                cells: list[str] | str = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                cells = f"line {first} is not a row: {error}"
            if lines.is_at_end:
                raise PagedcliError(
                    f"{self.name}: the row that begins in line {first} has a quote that is never closed",
                    hint='close it, or write a quote that is part of the text as ""',
                )
            yield first, cells

    def _line(self, cells: list[str]) -> dict[str, Any]:
        row = {
            name: cell if name in self._columns.filled_in else _value(name, cell)
            for name, cell in zip(self._header, cells, strict=False)
            if name in self._used and (cell or name not in self._optional)
        }
        line = line_of(row, self._columns)
        if len(cells) > len(self._header):
            counts = f"{plural(len(cells), 'cell')}, but the header {plural(len(self._header), 'column')}"
            line[INVALID_ROW] = f"the row has {counts}: a cell with the separator needs quotes"
        return line


class _PhysicalLines:
    """Decoded lines for csv.reader, which asks for more than one where a quoted cell has line breaks."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._number = 0  # last line, 1-based
        self._first = 1  # line of the row
        self._num_bytes = 0  # bytes of the row so far
        self.is_at_end = False  # whether the last row needed more lines than there are

    def start_row(self) -> int:
        self._first, self._num_bytes = self._number + 1, 0
        return self._first

    def __iter__(self) -> "_PhysicalLines":
        return self

    def __next__(self) -> str:
        line = self._file.readline(MAX_LINE_BYTES + 2)
        if not line:
            self.is_at_end = bool(self._num_bytes)
            raise StopIteration
        if not self._number:
            line = line.removeprefix(BOM)
        self._number += 1
        self._num_bytes += len(line)
        if self._num_bytes > MAX_LINE_BYTES:
            raise PagedcliError(
                f"{self._name}: the row that begins in line {self._first} is over {MAX_LINE_BYTES >> 20} MiB",
                hint="is a quote never closed?",
            )
        return line.decode("utf-8", "surrogateescape")


def _value(name: str, cell: str) -> Any:
    if name not in NUMBERS:
        return cell
    try:
        value = msgspec.json.decode(cell.strip().lower())
    except msgspec.DecodeError:
        return cell  # the request parser reports the error
    return value if isinstance(value, bool | int | float) else cell


def _encoded(line: dict[str, Any]) -> bytes:
    """JSON, with bytes that are not UTF-8 as they are: whoever decodes the line reports them."""
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError:
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class CsvLines:
    """Rows as lines of a CSV table, one per sample.

    Token counts and metrics of a row are on its first sample's line only: the sum of a column is the total of the run.
    """

    columns: Columns

    def write(self, file: BinaryIO, rows: NumberedRows) -> str:
        """See sinks.RowFormat."""
        return write_lines(file, self._lines(rows))

    def _lines(self, rows: NumberedRows) -> Iterator[bytes]:
        """The header and the lines, with line ends."""
        text = io.StringIO()
        header = self._header(rows)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        for index, content in rows():
            writer.writerows([csv_cell(line.get(name)) for name in header] for line in self._cells(index, content))
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
        yield text.getvalue().encode()  # the header of a table without rows

    def _header(self, rows: NumberedRows) -> list[str]:
        """The columns in which some row has a value, and the index, the answer and those to copy. `sample` is 0 to
        n - 1, and empty for an error."""
        lines = (line for row in rows() for line in self._cells(*row))
        used = dict.fromkeys(name for line in lines for name, value in line.items() if value not in (None, "", []))
        tail = sorted(self.columns.marked | SCORES | DISK | {EMBEDDING})
        decided = decided_of(rows, self.columns)
        kept = [*self.columns.kept_names(()).values()]
        if self.columns.keep_all:
            own = self.columns.reserved.union(tail, decided, [ANSWERS] if decided else ())
            kept = [name for name in used if name not in own]
        counts = ["prompt_tokens", "cached_tokens", "completion_tokens", *METRICS]
        answer = ["sample", self.columns.answer, "finish_reason", "stop_reason", "beam_score", *counts]
        lists = ["logprobs", "prompt_logprobs", "token_ids"]
        names = ["index", "id", *kept, *answer, *lists, "error_code", "error_message", *tail, *decided]
        always = {"index", self.columns.answer, *kept}
        return [name for name in dict.fromkeys(names) if name in used or name in always]

    def _cells(self, index: int, content: bytes) -> list[dict[str, Any]]:
        """Values by column, for each sample."""
        row = WrittenRow.of(content, self.columns.answer, index)
        cells = row.fields | cells_of(row.answers) | {"index": row.index, "id": row.id}
        if row.error is not None:
            return [cells | {"error_code": row.error["code"], "error_message": row.error["message"]}]
        assert row.usage is not None, "a good row has counts"
        counts = {
            "prompt_tokens": row.usage["prompt_tokens"],
            **row.usage["prompt_tokens_details"],
            "completion_tokens": row.usage["completion_tokens"],
            **row.usage.get("completion_tokens_details", {}),
            **(row.metrics or {}),
        }
        return [
            sample.cells(self.columns.answer) | cells | (counts if place == 0 else {}) | {"sample": place}
            for place, sample in enumerate(row.samples)
        ]


def csv_cell(value: Any) -> Any:
    """Text and numbers unchanged, everything else as JSON."""
    is_plain = value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))
    return value if is_plain else msgspec.json.encode(value).decode()
