"""OUT.partial: the journal of finished rows in completion order, from which a killed run can be resumed.

Used by batch.sinks. Its first line is the header with the run's fingerprint; every further line is
`{"line":"<xxh64 of the input line>","ok":true,"index":12,"row":{...}}`. Memory: 8 bytes per row.
"""

import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pagedcli.batch.fingerprint import HINT_OTHER_RUN, check_same_run
from pagedcli.errors import PagedcliError, UsageError

SCHEMA_VERSION = 1
_SYNC_EVERY_S = 1.0  # a power cut loses at most the rows of this interval; a killed process loses none
_DIGEST = slice(len(b'{"line":"'), len(b'{"line":"') + 16)
_ROW = b',"row":'
JOURNAL_BEGINNING = b'{"pagedcli_journal":'


class Header(msgspec.Struct, frozen=True):
    """First line of a journal."""

    pagedcli_journal: int  # schema version
    created_s: int  # Unix time of the run's first start
    fingerprint: dict[str, str]  # everything that determines the rows
    overwrite: bool = False  # whether the run may replace an existing output


class _Record(msgspec.Struct, frozen=True, gc=False):
    line: str
    ok: bool
    index: int
    row: msgspec.Raw


class Journal:
    """The finished rows of a run. Open it with `Journal.create` or `Journal.resume`."""

    def __init__(self, path: Path, file_descriptor: int, header: Header) -> None:
        self.path = path
        self.header = header
        self.num_rows = 0
        self.num_failed_rows = 0
        self._fd = file_descriptor
        self._end = os.fstat(file_descriptor).st_size
        self._offsets = array("Q")  # offset of each row's record; 0 where there is none (yet)
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._synced_s = time.monotonic()

    @classmethod
    def create(cls, path: Path, fingerprint: dict[str, str], *, overwrite: bool = False) -> "Journal":
        """A new journal, replacing any old one. Raises: UsageError, PagedcliError."""
        header = Header(SCHEMA_VERSION, int(time.time()), fingerprint, overwrite)
        journal = cls(path, _open_locked(path), header)
        os.ftruncate(journal._fd, 0)
        journal._end = 0
        journal._append(msgspec.json.encode(header) + b"\n")
        try:
            journal.flush(sync=True)
        except PagedcliError:
            journal.close()
            raise
        return journal

    @classmethod
    def resume(cls, path: Path, fingerprint: dict[str, str]) -> "Journal":
        """The journal of a stopped run. Damaged or torn lines are dropped: their rows are generated again.

        Raises: UsageError naming each field of the fingerprint that differs.
        """
        fd = _open_locked(path)
        try:
            with open(fd, "rb", closefd=False) as file:
                header = _decode_header(path, file.readline())
                if header is not None:
                    check_same_run(path, header.fingerprint, fingerprint)
                    journal = cls(path, fd, header)
                    journal._end = journal._load(file, file.tell())
        except PagedcliError:
            os.close(fd)
            raise
        if header is None:  # killed before the first line was complete
            os.close(fd)
            return cls.create(path, fingerprint)
        os.ftruncate(fd, journal._end)
        return journal

    def holds(self, index: int, line_digest: int) -> bool:
        """Whether the row is done. Raises: UsageError if it was made from another input line."""
        if index >= len(self._offsets) or self._offsets[index] == 0:
            return False
        written = os.pread(self._fd, 64, self._offsets[index])[_DIGEST]
        if written and written != b"%016x" % line_digest:
            raise UsageError(
                f"row {index} of the input is not the one that {self.path} answered: the input has changed",
                hint=HINT_OTHER_RUN,
            )
        return True

    @property
    def end_index(self) -> int:
        """One more than the largest index of a row: the input must have at least as many."""
        return len(self._offsets)

    def append(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        """Add a row; `flush` writes it."""
        self._remember(index, self._end + self._buffered_bytes, ok=ok)
        self._append(
            b'{"line":"%016x","ok":%s,"index":%d,"row":%s}\n' % (line_digest, b"true" if ok else b"false", index, row)
        )

    def flush(self, *, sync: bool = False) -> None:
        """Write all rows to the operating system, and about once a second (or with `sync`) to the disk itself.

        Raises: PagedcliError if the disk is full or fails, or if another program has changed the file.
        """
        data = b"".join(self._buffer)
        self._check_length()
        try:
            while data:
                num_written = os.write(self._fd, data)
                self._end += num_written
                data = data[num_written:]
            if sync or time.monotonic() - self._synced_s > _SYNC_EVERY_S:
                os.fsync(self._fd)
                self._synced_s = time.monotonic()
        except OSError as error:
            raise PagedcliError(
                f"cannot write {self.path}: {error.strerror}",
                hint="free some space, then run the same command with --resume",
            ) from error
        finally:
            self._buffer, self._buffered_bytes = [], 0

    def rows(self, order: Literal["input", "completion"]) -> Iterator[bytes]:
        """The rows in the order of the output file, even if the journal has been deleted meanwhile.

        Raises: PagedcliError if another program has changed the file.
        """
        offsets = (offset for offset in self._offsets if offset)
        with open(self._fd, "rb", closefd=False) as file:
            for offset in offsets if order == "input" else sorted(offsets):
                file.seek(offset)
                record = file.readline()
                if not record.endswith(b"}\n") or _ROW not in record:
                    raise self._changed()
                yield record[record.index(_ROW) + len(_ROW) : -2]

    @property
    def is_lost(self) -> bool:
        """Whether the file is no longer under its name: a later run could not find it."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except OSError:
            return True

    def remove(self) -> None:
        """Delete the file, but not one that has replaced it."""
        if not self.is_lost:
            self.path.unlink()

    def close(self) -> None:
        os.close(self._fd)

    def _check_length(self) -> None:
        if os.fstat(self._fd).st_size != self._end:
            raise self._changed()

    def _changed(self) -> PagedcliError:
        return PagedcliError(
            f"another program has changed {self.path}: it has {os.fstat(self._fd).st_size:,} bytes,"
            f" of which this run wrote {self._end:,}",
            hint="use --resume: intact rows are kept, the others are generated again",
        )

    def _append(self, record: bytes) -> None:
        self._buffer.append(record)
        self._buffered_bytes += len(record)

    def _remember(self, index: int, offset: int, *, ok: bool) -> None:
        while len(self._offsets) <= index:
            self._offsets.append(0)
        self._offsets[index] = offset
        self.num_rows += 1
        self.num_failed_rows += not ok

    def _load(self, lines: Iterator[bytes], offset: int) -> int:
        """Index every complete record. Returns the offset after the last complete line."""
        decoder = msgspec.json.Decoder(_Record)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                record = decoder.decode(line)
                msgspec.json.decode(record.row)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # a hole left by a power cut
            else:
                known = record.index < len(self._offsets) and self._offsets[record.index] != 0
                if record.index >= 0 and not known:
                    self._remember(record.index, offset, ok=record.ok)
            offset += len(line)
        return offset


def journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def has_rows(path: Path) -> bool:
    """Whether the file contains more than a header."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return bool(file.readline() and file.readline())


def _open_locked(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks
        return fd
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise UsageError(f"another run is writing {path} right now") from error
    except OSError:  # a file system without locks
        pass
    return fd


def read_header(path: Path) -> Header | None:
    """The header of a journal; None if there is no file, or only an incomplete header. Raises: UsageError."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        return _decode_header(path, file.readline())


def _decode_header(path: Path, line: bytes) -> Header | None:
    """None if the header is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not the journal of a run", hint="move it away, or use --overwrite") from error
    if header.pagedcli_journal != SCHEMA_VERSION:
        raise UsageError(
            f"{path} is a journal of version {header.pagedcli_journal}, this pagedcli reads version {SCHEMA_VERSION}",
            hint="finish it with the version that began it, or use --overwrite",
        )
    return header
