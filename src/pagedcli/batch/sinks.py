"""Where rows go: a stream (stdout, a pipe), or a file that appears whole at the end of the run.

Used by batch.run. A row is handed over once, with the index of its input row.
"""

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from pagedcli.batch.csv_rows import csv_lines
from pagedcli.batch.journal import Journal, has_rows
from pagedcli.batch.parquet import ParquetRows
from pagedcli.batch.shards import ShardWriter
from pagedcli.errors import PagedcliError, UsageError

Order = Literal["input", "completion"]
_MAX_HELD_ROWS = 10_000  # finished rows that wait in memory for a slower one before them


class Sink(Protocol):
    """Takes rows in completion order."""

    resumed_rows: int
    resumed_failed_rows: int

    @property
    def full(self) -> bool:
        """Whether no new requests should start until older rows are done."""

    def holds(self, index: int, line_digest: int) -> bool:
        """Whether the row was made before, by a run that this one resumes."""

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None: ...

    def flush(self) -> None:
        """Hand over everything written so far to the operating system."""

    def finish(self) -> None:
        """The run is complete."""

    def abandon(self) -> None:
        """The run stopped early; keep what can be kept."""


class StreamSink:
    """Rows to a pipe or terminal, as soon as their turn comes. Nothing can be resumed."""

    resumed_rows = 0
    resumed_failed_rows = 0

    def __init__(self, stream: BinaryIO, *, order: Order, step: int = 1, first_index: int = 0) -> None:
        self._stream = stream
        self._order = order
        self._step = step
        self._next_index = first_index
        self._held: dict[int, bytes] = {}

    @property
    def full(self) -> bool:
        return len(self._held) >= _MAX_HELD_ROWS

    def holds(self, index: int, line_digest: int) -> bool:
        return False

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        if self._order == "completion":
            self._stream.write(row + b"\n")
            return
        self._held[index] = row
        while (held := self._held.pop(self._next_index, None)) is not None:
            self._stream.write(held + b"\n")
            self._next_index += self._step

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        assert not self._held, "a finished run has handed over every row"
        self.flush()

    def abandon(self) -> None:
        for index in sorted(self._held):
            self._stream.write(self._held[index] + b"\n")
        self._held.clear()
        self.flush()


class FileSink:
    """Rows to a journal beside the output, which is renamed into place when it is complete."""

    full = False

    def __init__(self, path: Path, journal: Journal, *, order: Order, table: ParquetRows | None = None) -> None:
        self.path = path
        self.journal = journal
        self.resumed_rows = journal.num_rows
        self.resumed_failed_rows = journal.num_failed_rows
        self._order = order
        self._table = table

    def holds(self, index: int, line_digest: int) -> bool:
        return self.journal.holds(index, line_digest)

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        self.journal.append(index, line_digest, row, ok=ok)

    def flush(self) -> None:
        self.journal.flush()

    def finish(self) -> None:
        """Write the output beside its place, rename it, and only then drop the journal. Raises: PagedcliError."""
        self.journal.flush(sync=True)
        shard = ShardWriter(self.path, self.journal.header.fingerprint, self._order)
        try:
            with whole_file(self.path) as file:
                if self._table is not None:
                    self._table.write(file, self.journal.rows(self._order))
                elif is_csv(self.path):
                    file.writelines(csv_lines(self.journal.rows(self._order)))
                else:
                    file.writelines(shard.counted(row + b"\n" for row in self.journal.rows(self._order)))
                shard.write()
        except OSError as error:
            self.journal.close()
            raise PagedcliError(
                f"cannot write {self.path}: {error.strerror}",
                hint=f"all rows are safe in {self.journal.path}: make room, then run the same command with --resume",
            ) from error
        self.journal.path.unlink()
        self.journal.close()

    def abandon(self) -> None:
        with suppress(PagedcliError):  # a full disk: the rows that did not get there are made again
            self.journal.flush(sync=True)
        self.journal.close()
        if not self.journal.num_rows:
            self.journal.path.unlink()  # nothing to resume


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is complete and on the disk, or not at all. Raises: OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as raw, _compressed(raw, path) as file:
            yield file
            file.flush()
            if file is not raw:
                file.close()
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def open_rows(path: Path) -> BinaryIO:
    """What whole_file wrote. Raises: OSError."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def is_csv(path: Path) -> bool:
    """Whether rows become lines of a table: out.csv, out.csv.gz."""
    return path.name.removesuffix(".gz").endswith(".csv")


def journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Look at the output's place before anything expensive starts.

    Raises: UsageError if a file there would be lost, or if nothing can be written.
    """
    partial = journal_path(path)
    if path.is_dir():
        raise UsageError(f"the output {path} is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the output", hint=f"mkdir -p {path.parent}")
    if overwrite:
        return
    if not resume and has_rows(partial):
        raise UsageError(
            f"{partial} holds the rows of a run that was stopped",
            hint="go on with --resume, or start anew with --overwrite",
        )
    if path.exists() and not partial.exists():
        raise UsageError(f"the output {path} exists already", hint="use --overwrite, or another -o")


def is_complete(path: Path) -> bool:
    """Whether a run has finished its output, so that nothing is left to resume."""
    return path.exists() and not journal_path(path).exists()


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/null, which no rename can fill."""
    return path.exists() and not path.is_file() and not path.is_dir()


def open_file_sink(
    path: Path,
    fingerprint: dict[str, str],
    *,
    resume: bool,
    overwrite: bool,
    order: Order,
    table: ParquetRows | None = None,
) -> FileSink:
    """A sink for a regular file, which `table` writes as Parquet. Raises: UsageError as check_output and resume."""
    check_output(path, resume=resume, overwrite=overwrite)
    partial = journal_path(path)
    if resume and partial.exists():
        return FileSink(path, Journal.resume(partial, fingerprint), order=order, table=table)
    return FileSink(path, Journal.create(partial, fingerprint), order=order, table=table)


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk before the journal goes. Not every system can open a folder."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _compressed(raw: BinaryIO, path: Path) -> BinaryIO:
    # mtime 0: equal rows give equal files
    return gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw  # type: ignore[return-value]
