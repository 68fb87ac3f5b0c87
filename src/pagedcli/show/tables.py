"""Rows as a readable table, JSON, CSV or Markdown, for every command with --format.

JSON and CSV carry plain keys and raw numbers; tables and Markdown carry headers with units and rounded numbers.
"""

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from shutil import get_terminal_size
from typing import Any

import msgspec
from rich.cells import cell_len

from pagedcli.printable import one_line, printable, printable_json, wrap_words
from pagedcli.records import Column, as_row, columns_of

TableRow = Mapping[str, Any]
ALL_HINT = "every table: --all"


class Format(StrEnum):
    """The values of --format."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. `key` names the table in JSON. Only in tables and Markdown: `notes`, lines below the table,
    and `max_shown`, the largest number of rows.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    notes: Sequence[str] = ()
    max_shown: int | None = None
    wrapped_at: int | None = None  # cells, for sentences in the last column, where the output itself has no width


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of a table of facts."""

    what: str
    value: str


def table(
    record: type,
    key: str,
    title: str,
    rows: Iterable[object],
    columns: str = "",
    *,
    headers: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    max_shown: int | None = None,
    wrapped_at: int | None = None,
) -> Table:
    """Records, or mappings with the same keys, as a table: `columns` names those to show, in order, by default all;
    `headers` replaces some of theirs. Fields that are UNSET in every row, or missing, have no column."""
    shown = [row if isinstance(row, Mapping) else as_row(row) for row in rows]
    by_name = columns_of(record)
    chosen = [by_name[name] for name in columns.split() or by_name]
    if shown:
        chosen = [each for each in chosen if any(each.key.removesuffix("_") in row for row in shown)]
    if headers:
        chosen = [replace(each, header=headers.get(each.key, each.header)) for each in chosen]
    return Table(key, title, chosen, shown, notes, max_shown, wrapped_at)


def print_sentences(sentences: Sequence[str]) -> None:
    """Write lines to stdout, broken between words where a terminal ends."""
    for part in _lines(sentences, _terminal_width()):
        print(part, flush=True)


def _terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is none."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def _lines(sentences: Sequence[str], width: int | None) -> list[str]:
    return [part for line in sentences for part in _wrapped(one_line(line), width)]


def print_tables(
    tables: Sequence[Table], format: Format, *, facts: Mapping[str, Any] | None = None, story: Sequence[str] = ()
) -> None:
    """Write tables to stdout, after their story, which JSON and CSV leave out. `facts` are added to the
    JSON object: {facts..., table key: [rows]}.

    In CSV, several tables follow each other, each after a line '# title', with an empty line between them.
    """
    if format is Format.JSON:
        document = {**(facts or {}), **{table.key: list(table.rows) for table in tables}}
        document_text = printable_json(msgspec.json.format(msgspec.json.encode(document), indent=2))
        sys.stdout.write(document_text.decode() + "\n")
        return
    width = _terminal_width()
    csv_text = str if width is None else printable  # raw for programs; control characters are escaped on a terminal
    render = {
        Format.TABLE: lambda table: as_text(table, width),
        Format.CSV: lambda table: csv_text(as_csv(table, with_title=len(tables) > 1)),
        Format.MD: as_markdown,
    }[format]
    said = [printable(line) for line in story]
    if format is not Format.CSV and said:
        sys.stdout.write("\n".join([*(_lines(said, width) if format is Format.TABLE else said), "", ""]))
    sys.stdout.write("\n".join(render(table) for table in tables))


def as_text(table: Table, width: int | None = None) -> str:
    """Aligned columns, numbers right, text left. Beyond `width` terminal columns text wraps in the last column; where
    that is a number, or has no room, the columns continue on further lines of each row."""
    width = table.wrapped_at if width is None else width
    if not table.rows:
        return "\n".join(_lines([table.title, *(table.notes or ("none",))], width)) + "\n"
    header, *rows = laid_out(table, width, least_room=16)
    lines = ["".join(text for text, _ in line).rstrip() for row in (header, *rows) for line in row]
    widths = column_widths(table)
    longest = max(map(cell_len, lines))
    if len(header) > 1:
        rule = "-" * longest
    else:
        before = sum(widths[:-1]) + 2 * (len(widths) - 1)
        last = min(widths[-1], max(longest, width or 0) - before)  # less where it wraps
        rule = "  ".join("-" * each for each in [*widths[:-1], last])
    lines.insert(len(header), rule)
    return "\n".join([*_lines([table.title], width), *lines, *_lines(table.notes, width)]) + "\n"


Piece = tuple[str, Column | None]  # a cell, or the space around it


def column_widths(table: Table) -> list[int]:
    """Cells that each column takes."""
    rows = [[column.header for column in table.columns], *shown_cells(table)]
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def laid_out(table: Table, width: int | None, *, least_room: int) -> list[list[list[Piece]]]:
    """The lines of each row, the header first. None: as wide as it is.

    If it is wider than `width`, the last column wraps, if it holds text and has `least_room`; otherwise the columns
    continue on further lines of each row, so that none is lost.
    """
    widths, last = column_widths(table), len(table.columns) - 1
    before_last = sum(widths[:-1]) + 2 * last
    layout = [list(range(len(widths)))]
    is_wider = width is not None and before_last + widths[-1] > width
    if width is not None and is_wider and (table.columns[last].is_number or width - before_last < least_room):
        layout = column_lines(widths, width)
    rows = [[column.header for column in table.columns], *shown_cells(table)]
    return [_row_lines(row, table, widths, layout, width) for row in rows]


def _row_lines(
    row: Sequence[str], table: Table, widths: Sequence[int], layout: Sequence[Sequence[int]], width: int | None
) -> list[list[Piece]]:
    lines: list[list[Piece]] = []
    for number, places in enumerate(layout):
        indent = continued_indent(widths) if number else 0
        line: list[Piece] = [(" " * indent, None)]
        for place in places[:-1]:
            cell, column = row[place], table.columns[place]
            space: Piece = (" " * (widths[place] - cell_len(cell)), None)
            line += [space, (cell, column)] if column.is_number else [(cell, column), space]
            line.append(("  ", None))
            indent += widths[place] + 2
        cell, column = row[places[-1]], table.columns[places[-1]]
        if column.is_number:
            lines.append([*line, (" " * (widths[places[-1]] - cell_len(cell)), None), (cell, column)])
            continue
        first, *further = _wrapped(cell, None if width is None else max(1, width - indent))
        lines.append([*line, (first, column)])
        lines += [[(" " * indent, None), (part, column)] for part in further]
    return lines


def column_lines(widths: Sequence[int], width: int) -> list[list[int]]:
    """The places of the columns by line of a row, where they do not fit into one."""
    lines, used = [[0]], widths[0]
    for place in range(1, len(widths)):
        if used + 2 + widths[place] <= width:
            lines[-1].append(place)
            used += 2 + widths[place]
        else:
            lines.append([place])
            used = continued_indent(widths) + widths[place]
    return lines


def continued_indent(widths: Sequence[int]) -> int:
    """The indent of all lines of a row but the first: the rest stands below its second column."""
    return widths[0] + 2


def as_csv(table: Table, *, with_title: bool = False) -> str:
    """RFC 4180 with plain keys and raw values."""
    out = io.StringIO()
    if with_title:
        out.write(f"# {table.title}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    writer.writerows([row.get(column.key) for column in table.columns] for row in table.rows)
    return out.getvalue()


def as_markdown(table: Table) -> str:
    """A GitHub table below a heading."""
    rules = ["---:" if column.is_number else "---" for column in table.columns]
    rows = [[column.header for column in table.columns], rules, *shown_cells(table)]
    lines = ["| " + " | ".join(markdown_text(cell) for cell in row) + " |" for row in rows]
    notes = [f"\n{markdown_text(one_line(note))}" for note in table.notes]
    return "\n".join([f"### {markdown_text(one_line(table.title))}", "", *lines, *notes]) + "\n"


def markdown_text(text: str) -> str:
    """Text escaped for a Markdown cell: no HTML, links or cell separators."""
    return re.sub(r"([\\|<\[`])", r"\\\1", text)


def shown_cells(table: Table) -> list[list[str]]:
    return [
        ["-" if (value := row.get(column.key)) is None else one_line(column.show(value)) for column in table.columns]
        for row in table.rows[: table.max_shown]
    ]


def _wrapped(line: str, width: int | None) -> list[str]:
    return [line] if width is None else wrap_words(line, width) or [""]
