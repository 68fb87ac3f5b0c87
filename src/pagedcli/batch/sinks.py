"""Sinks of rows: a stream (stdout, a pipe), or a file that appears, complete, at the end of the run.

Used by batch.run. Each row is written once, with the index of its input row.
"""

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, cast

from pagedcli.batch.fingerprint import HINT_OTHER_RUN
from pagedcli.batch.journal import RECORD_VERSION, Journal, LineDigest, RunRecord, write_record
from pagedcli.batch.lines import InputScan
from pagedcli.batch.row_format import JsonLines, RowFormat
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import whole_file
from pagedcli.printable import plural

Order = Literal["input", "completion"]
_MAX_HELD_ROWS = 10_000  # finished rows waiting in memory for an earlier one


class Sink(Protocol):
    """Takes rows in completion order."""

    resumed_rows: int
    resumed_failed_rows: int
    resumed_failures: Sequence[tuple[int, str]]  # line and reason of some of them

    @property
    def full(self) -> bool:
        """Whether to start no new requests until older rows are done."""

    def holds(self, index: int, line_digest: int) -> bool:
        """Whether the row was already written by the run that this one resumes."""

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None: ...

    def flush(self) -> None:
        """Write everything so far to the operating system."""

    def finish(self, read: InputScan) -> None:
        """The run is complete. `read`: the rows of its input."""

    def abandon(self) -> None:
        """The run stopped early: keep finished rows where possible."""


class StreamSink:
    """Writes rows to a pipe or terminal as soon as their order allows. Cannot be resumed."""

    resumed_rows = 0
    resumed_failed_rows = 0
    resumed_failures: Sequence[tuple[int, str]] = ()

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

    def finish(self, read: InputScan) -> None:
        assert not self._held, "a finished run has handed over every row"
        self.flush()

    def abandon(self) -> None:
        for index in sorted(self._held):
            self._stream.write(self._held[index] + b"\n")
        self._held.clear()
        self.flush()


class FileSink:
    """Writes rows to a journal, and the output from it once all are complete."""

    full = False

    def __init__(
        self,
        path: Path,
        journal: Journal,
        *,
        order: Order,
        rows_format: RowFormat | None = None,
    ) -> None:
        self.path = path
        self.journal = journal
        self.resumed_rows = journal.num_rows
        self.resumed_failed_rows = journal.num_failed_rows
        self.resumed_failures: Sequence[tuple[int, str]] = journal.failures
        self.rows_are_kept = True  # whether a later run can find them; known after `abandon`
        self._order = order
        self._format = rows_format or JsonLines()

    def holds(self, index: int, line_digest: int) -> bool:
        return self.journal.holds(index, line_digest)

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        self.journal.append(index, line_digest, row, ok=ok)

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
        digest, rows = LineDigest(), partial(self.journal.rows, self._order)
        with whole_rows(self.path, overwrite=self.journal.header.overwrite) as file:
            self._format.write(file, rows, digest)
            write_record(self.path, self._record(read, digest))

    def _record(self, read: InputScan, digest: LineDigest) -> RunRecord:
        journal = self.journal
        decisive = {name: value for name, value in journal.header.fingerprint.items() if not name.startswith("input")}
        return RunRecord(
            pagedcli_run=RECORD_VERSION,
            order=self._order,
            num_rows=journal.num_rows,
            num_failed_rows=journal.num_failed_rows,
            digest=digest.hexdigest(),
            input=read,
            fingerprint=decisive,
        )

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
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:  # mtime 0: equal rows, equal files
            yield cast(BinaryIO, file)
