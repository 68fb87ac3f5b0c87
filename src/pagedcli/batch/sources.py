"""Opens the input of a run: stdin, a JSONL or Parquet file, or a folder of either."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagedcli.batch.columns import Columns, names_of
from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.parquet import ParquetSource, is_parquet
from pagedcli.errors import UsageError

_JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


def open_source(name: str, columns: Columns | None = None) -> LineSource:
    """The rows of an input, with the columns that its requests and rows need. Raises: UsageError if it cannot be
    read."""
    columns = columns or Columns()
    path = Path(name)
    if name == "-":
        return LineSource(name)
    if path.is_dir():
        return _open_folder(path, columns)
    return ParquetSource(name, columns=columns) if is_parquet(path) else LineSource(name)


def check_kept(source: LineSource, columns: Columns, *, in_rows: bool = True) -> None:
    """Check the columns to be copied; reads all lines of a file if there are any.

    `in_rows`: they become fields of the rows, and must not have the names of others.
    Raises: UsageError.
    """
    if not columns.copies:
        return
    names = set(columns.keep)  # all that is known of an input that can be read only once
    if isinstance(source, ParquetSource):
        names = set(source.schema.names)
    elif not source.is_live:
        names = names_of((line.content for line in source), wanted=columns.keep)
    columns.check_found(names)
    if in_rows:
        columns.check_free(names)


class FolderSource(LineSource):
    """The rows of all files in the order of their names, numbered continuously."""

    def __init__(self, name: str, paths: list[Path]) -> None:
        self.name = name
        self._sources = [LineSource(str(path)) for path in paths]

    def _lines(self) -> Iterator[Line]:
        index = number = 0
        for source in self._sources:
            line = None
            for line in source:
                yield replace(line, index=index + line.index, number=number + line.number)
            if line is not None:
                index, number = index + line.index + 1, number + line.number


def _open_folder(folder: Path, columns: Columns) -> LineSource:
    names = sorted(os.listdir(folder))
    tables = [folder / name for name in names if is_parquet(Path(name))]
    files = [folder / name for name in names if name.endswith(_JSONL_ENDINGS)]
    if tables and files:
        raise UsageError(f"{folder} contains both Parquet and JSONL files", hint="use a folder with files of one kind")
    if not tables and not files:
        raise UsageError(f"{folder} contains no Parquet or JSONL files", hint="known: *.parquet, *.jsonl, *.jsonl.gz")
    return ParquetSource(str(folder), tables, columns) if tables else FolderSource(str(folder), files)
