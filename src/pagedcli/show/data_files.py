"""The tables of views.step_rows as files: `kv.parquet` names `kv.steps.parquet`, `kv.blocks.parquet` and so on.

Written row by row in bounded memory under temporary names; they appear when the run ends. Used by --dump-kv FILE.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagedcli.batch.delimited import csv_cell
from pagedcli.batch.parquet import require_pyarrow
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import FileKind, PendingFile
from pagedcli.later import parquet as pq
from pagedcli.later import pyarrow as pa
from pagedcli.records import Column
from pagedcli.show.terminal import say
from pagedcli.trace.fold import Fold, pool_fold
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.step_rows import TABLES, FileRow, StepRows, file_columns

_GROUP_ROWS = 1 << 16  # rows of a Parquet row group


def data_paths(path: Path) -> dict[str, Path]:
    """Table -> its file. Raises: UsageError for an extension other than .csv, .jsonl and .parquet."""
    if path.suffix not in _WRITERS:
        raise UsageError(f"--dump-kv cannot write {path}", hint="its name must end in .csv, .jsonl or .parquet")
    return {table: path.with_name(f"{path.stem}.{table}{path.suffix}") for table in TABLES}


class _ParquetTable(FileKind):
    """A Parquet file begins as any other one: its first columns tell."""

    def has(self, path: Path) -> bool:
        try:
            return not path.stat().st_size or ",".join(pq.read_schema(path).names).startswith(self.beginning.decode())
        except pa.ArrowException:
            return False


def table_kind(table: str, suffix: str) -> FileKind:
    """The kind of a table's file, by its first columns."""
    first, second = (column.key for column in file_columns(table)[:2])
    beginning = f'{{"{first}":' if suffix == ".jsonl" else f"{first},{second}"
    return (_ParquetTable if suffix == ".parquet" else FileKind)(f"the table of {table}", beginning.encode())


def next_part(path: Path) -> Path:
    """The first of `kv.csv`, `kv.part2.csv` ... without files: what a resumed run adds."""
    part, number = path, 1
    while any(each.exists() for each in data_paths(part).values()):
        number += 1
        part = path.with_name(f"{path.stem}.part{number}{path.suffix}")
    return part


# Each writes the rows of one table to an open file, which stays open, and raises OSError in every method.


class CsvRows:
    """CSV with a header. Lists are JSON, e.g. `[0, 1, null]`."""

    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        self._rows = csv.writer(self._text, lineterminator="\n")
        self._rows.writerow([column.key for column in columns])

    def write(self, rows: Iterable[FileRow]) -> None:
        self._rows.writerows([csv_cell(value) for value in row] for row in rows)

    def close(self) -> None:
        self._text.detach()  # flushes


class JsonRows:
    """One JSON object per line, with every column."""

    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        self._file = file
        self._names = [column.key for column in columns]
        self._encode = msgspec.json.Encoder().encode

    def write(self, rows: Iterable[FileRow]) -> None:
        self._file.writelines(self._encode(dict(zip(self._names, row, strict=True))) + b"\n" for row in rows)

    def close(self) -> None: ...


class ParquetData:
    """Parquet with typed columns, one row group per 65,536 rows."""

    def __init__(self, file: BinaryIO, columns: Sequence[Column]) -> None:
        types = {
            "int": pa.int64(), "float": pa.float64(), "text": pa.string(), "bool": pa.bool_(),
            "ints": pa.list_(pa.int64()), "texts": pa.list_(pa.string()),
        }  # fmt: skip
        self._schema = pa.schema([(column.key, types[column.kind]) for column in columns])
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[FileRow] = []

    def write(self, rows: Iterable[FileRow]) -> None:
        self._waiting.extend(rows)
        while len(self._waiting) >= _GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        group, self._waiting = self._waiting[:_GROUP_ROWS], self._waiting[_GROUP_ROWS:]
        cells = zip(*group, strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(cells, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))


_WRITERS: dict[str, Any] = {".csv": CsvRows, ".jsonl": JsonRows, ".parquet": ParquetData}


class DataFiles:
    """Takes rows by table; the first call opens its file, even without rows, and `close` lets all appear.

    A file that cannot be written ends the dump, not the run: `close` says so.
    Raises: UsageError for another extension, or Parquet without pyarrow.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.paths = data_paths(path)
        if path.suffix == ".parquet":
            require_pyarrow()
        self._path = path
        self._overwrite = overwrite
        self._files: dict[str, PendingFile] = {}
        self._rows: dict[str, CsvRows | JsonRows | ParquetData] = {}  # empty before the first rows, and after a problem
        self._problem: OSError | None = None

    @property
    def names(self) -> str:
        """All files, or those with rows so far, for messages: `kv.{steps,sequences,blocks,lookups}.csv`."""
        tables = ",".join(self._rows or self.paths)
        return str(self._path.with_name(f"{self._path.stem}.{{{tables}}}{self._path.suffix}"))

    def write(self, table: str, rows: Iterable[FileRow]) -> None:
        if self._problem is not None:
            return
        try:
            if table not in self._files:
                self._open(table)
            self._rows[table].write(rows)
        except OSError as error:
            self._problem = error

    def _open(self, table: str) -> None:
        path = self.paths[table]
        self._files[table] = PendingFile(path, overwrite=self._overwrite)
        self._rows[table] = _WRITERS[path.suffix](self._files[table].file, file_columns(table))

    def close(self) -> bool:
        """Give the files their names. Returns False if nothing was to be written. Raises: PagedcliError if they could
        not be written completely."""
        files, self._files = self._files, {}
        try:
            if self._problem is not None:
                raise self._problem
            for rows in self._rows.values():
                rows.close()
            for file in files.values():
                file.commit()
        except OSError as error:
            for file in files.values():
                file.discard()
            problem, self._problem = error, None
            raise PagedcliError(f"cannot write {self.names}: {problem.strerror or problem}") from error
        return bool(files)

    def discard(self) -> None:
        for file in self._files.values():
            file.discard()
        self._files = {}


class DumpFiles:
    """The data files of one run."""

    def __init__(self, files: DataFiles, chosen: StepChoice) -> None:
        self._files = files
        self._rows = StepRows(files.write, chosen)

    @property
    def paths(self) -> dict[str, Path]:
        """What each is in a message -> its path."""
        return {f"--dump-kv ({table})": path for table, path in self._files.paths.items()}

    @contextmanager
    def written(self) -> Iterator[Fold]:
        """A fold of a run's events; its rows are in the files once the block ends. Raises: PagedcliError."""
        try:
            yield pool_fold(self._rows, keep_finished=False)
        except BaseException:
            self._files.discard()
            raise
        if self._files.close():
            say(f"KV tables: {self._files.names}")
            if not self._rows.num_steps:
                say("note: the run has none of the chosen steps, so these tables are empty")
