"""Opens the input of a run: stdin, a JSONL or Parquet file, or a folder of either."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.parquet import ParquetSource, is_parquet
from pagedcli.errors import UsageError

_JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


def open_source(name: str) -> LineSource:
    """The rows of an input. Raises: UsageError if it cannot be read."""
    path = Path(name)
    if name == "-":
        return LineSource(name)
    if path.is_dir():
        return _open_folder(path)
    return ParquetSource(name) if is_parquet(path) else LineSource(name)


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


def _open_folder(folder: Path) -> LineSource:
    names = sorted(os.listdir(folder))
    tables = [folder / name for name in names if is_parquet(Path(name))]
    files = [folder / name for name in names if name.endswith(_JSONL_ENDINGS)]
    if tables and files:
        raise UsageError(f"{folder} contains both Parquet and JSONL files", hint="use a folder with files of one kind")
    if not tables and not files:
        raise UsageError(f"{folder} contains no Parquet or JSONL files", hint="known: *.parquet, *.jsonl, *.jsonl.gz")
    return ParquetSource(str(folder), tables) if tables else FolderSource(str(folder), files)
