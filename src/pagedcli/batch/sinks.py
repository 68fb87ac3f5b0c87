"""Sinks of rows: a stream (stdout, a pipe), or a file that appears, complete, at the end of the run.

Used by batch.run. Each row is written once, with the index of its input row.
"""

import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import xxhash

from pagedcli.batch.fingerprint import HINT_OTHER_RUN
from pagedcli.batch.journal import RECORD_VERSION, Journal, RunRecord, write_record
from pagedcli.batch.lines import InputScan
from pagedcli.batch.rows import NumberedRows
from pagedcli.config import Order
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import whole_file
from pagedcli.printable import plural


class Sink(ABC):
    """Takes rows in completion order."""

    journal: Journal | None = None  # journal with the rows of the run that this one resumes

    @property
    def full(self) -> bool:
        """Whether to start no new requests until older rows are done."""
        return False

    def holds(self, index: int, line_digest: int) -> bool:
        """Whether the row was already written by the run that this one resumes."""
        return self.journal is not None and self.journal.holds(index, line_digest)

    @abstractmethod
    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        """Take a row. `key`: its request_key; None: it has failed."""

    @abstractmethod
    def flush(self) -> None:
        """Write everything so far to the operating system."""

    @abstractmethod
    def finish(self, read: InputScan) -> None:
        """The run is complete. `read`: the rows of its input."""

    @abstractmethod
    def abandon(self) -> None:
        """The run stopped early: keep finished rows where possible."""


class StreamSink(Sink):
    """Writes rows to a pipe or terminal as soon as their order allows. Cannot be resumed."""

    def __init__(
        self, stream: BinaryIO, *, order: Order, step: int = 1, first_index: int = 0, most_held: int = 10_000
    ) -> None:
        self._stream = stream
        self._most_held = most_held  # finished rows that wait in memory for an earlier one
        self._order = order
        self._step = step
        self._next_index = first_index
        self._held: dict[int, bytes] = {}

    @property
    def full(self) -> bool:
        return len(self._held) >= self._most_held

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        if self._order == "completion":
            self._stream.write(row + b"\n")
            return
        self._held[index] = row
        while (held := self._held.pop(self._next_index, None)) is not None:
            self._stream.write(held + b"\n")
            self._next_index += self._step

    def flush(self) -> None:
        self._stream.flush()

    def finish(self, read: InputScan) -> None:
        assert not self._held, "a finished run has handed over every row"
        self.flush()

    def abandon(self) -> None:
        for index in sorted(self._held):
            self._stream.write(self._held[index] + b"\n")
        self._held.clear()
        self.flush()


class RowFormat(Protocol):
    """Writes all rows of a run into a file."""

    def write(self, file: BinaryIO, rows: NumberedRows) -> str:
        """Returns the digest of what was written: its xxh3-128, in hex. Raises: OSError."""


class JsonLines:
    """Rows as they are."""

    def write(self, file: BinaryIO, rows: NumberedRows) -> str:
        return write_lines(file, (row + b"\n" for _, row in rows()))


def write_lines(file: BinaryIO, lines: Iterable[bytes]) -> str:
    """Write lines; see RowFormat."""
    digest = xxhash.xxh3_128()
    for line in lines:
        file.write(line)
        digest.update(line)
    return digest.hexdigest()


class FileSink(Sink):
    """Writes rows to a journal, and the output from it once all are complete."""

    journal: Journal

    def __init__(self, path: Path, journal: Journal, *, order: Order, rows_format: RowFormat | None = None) -> None:
        self.path = path
        self.journal = journal
        self.rows_are_kept = True  # whether a later run can find them; known after `abandon`
        self._order = order
        self._format = rows_format or JsonLines()

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        self.journal.append(index, line_digest, row, key=key)

    def flush(self) -> None:
        self.journal.flush()

    def finish(self, read: InputScan) -> None:
        """Write the record and the output, then delete the journal.

        Raises: UsageError if the journal has rows beyond the end of the input, and is kept; PagedcliError.
        """
        journal = self.journal
        if read.num_rows < journal.end_index:
            self.abandon()
            raise UsageError(
                f"the input ends after {plural(read.num_rows, 'row')}, but {journal.path} has the answer to row"
                f" {journal.end_index - 1:,}: this is not the input of that run",
                hint=HINT_OTHER_RUN,
            )
        try:
            journal.flush(sync=True)
            self._write_output(read)
            journal.remove()
        except OSError as error:
            action = f"move {self.path} away" if isinstance(error, FileExistsError) else "free some space"
            safe = f"all rows are safe in {journal.path}: {action}, then run the same command with --resume"
            hint = self.loss if journal.is_lost else safe
            raise PagedcliError(f"cannot write {self.path}: {error.strerror}", hint=hint) from error
        finally:
            journal.close()

    def _write_output(self, read: InputScan) -> None:
        journal = self.journal
        with whole_rows(self.path, overwrite=journal.header.overwrite) as file:
            digest = self._format.write(file, partial(journal.rows, self._order))
            decisive = {name: each for name, each in journal.header.fingerprint.items() if not name.startswith("input")}
            record = RunRecord(
                pagedcli_run=RECORD_VERSION,
                order=self._order,
                num_rows=journal.num_rows,
                num_failed_rows=journal.num_failed_rows,
                digest=digest,
                input=read,
                fingerprint=decisive,
                keys=bytes(journal.keys),
            )
            write_record(self.path, record)

    def abandon(self) -> None:
        with suppress(PagedcliError):  # a full disk: missing rows are generated again
            self.journal.flush(sync=True)
        self.rows_are_kept = not self.journal.is_lost
        if self.rows_are_kept and not self.journal.num_rows:
            self.journal.remove()  # nothing to resume
        self.journal.close()

    @property
    def loss(self) -> str:
        """Raised when the rows cannot be resumed."""
        return f"{self.journal.path} was deleted or replaced during the run, so its rows are lost"


@contextmanager
def whole_rows(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A file of rows, compressed if its name ends in .gz, that appears once complete. Raises: OSError."""
    with whole_file(path, overwrite=overwrite) as raw:
        if path.suffix.lower() != ".gz":
            yield raw
            return
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:  # mtime 0: equal rows, equal files
            yield cast(BinaryIO, file)
