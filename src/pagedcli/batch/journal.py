"""What a run leaves next to its output OUT: OUT.partial, the journal of an unfinished run, from which a killed one is
resumed, and OUT.run.json, the record of a finished one, for `--resume` and `pagedcli merge`.

Used by batch.job, batch.sinks and batch.merge. The first line of a journal is the header with the run's fingerprint;
every further line is `{"line":"<xxh64 of the input line>","key":"<see repeats.request_key>","ok":true,"index":12,
"row":{...}}`, in the order of completion; earlier versions wrote no key. Memory: 8 bytes per row.
"""

import gzip
import hashlib
import os
import re
import stat
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
import xxhash

from pagedcli.batch.fingerprint import HINT_OTHER_RUN, check_same_run, settings_that_differ
from pagedcli.batch.lines import InputDigest, InputScan, LineSource
from pagedcli.batch.rows import NOT_A_ROW, reasons_of
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import JOURNAL, RUN_RECORD, check_new, lock, read_own, sync_folder, whole_file, writing
from pagedcli.printable import plural

SCHEMA_VERSION = 1
_SYNC_EVERY_S = 1.0  # a power cut loses at most the rows of this interval; a killed process loses none
_DIGEST = slice(len(b'{"line":"'), len(b'{"line":"') + 16)
_KEY = slice(_DIGEST.stop + len(b'","key":"'), _DIGEST.stop + len(b'","key":"') + 32)
_ROW = b',"row":'
NO_KEY = bytes(16)  # of a row that no later run may take over
_PAGE = 4096  # rows
_MOST_FAILURES = 3  # most failures kept in memory


class JournalHeader(msgspec.Struct, frozen=True):
    """First line of a journal."""

    pagedcli_journal: int  # schema version
    created_s: int  # Unix time of the run's first start
    fingerprint: dict[str, str]  # everything that determines the rows
    overwrite: bool = False  # whether the run may replace an existing output
    local_time: datetime | None = None  # the same moment, which chat templates see; None: of an older version

    @property
    def clock(self) -> datetime:
        return self.local_time or datetime.fromtimestamp(self.created_s)


class _Record(msgspec.Struct, frozen=True, gc=False):
    line: str
    ok: bool
    index: int
    row: msgspec.Raw
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] = NO_KEY.hex()


class Journal:
    """The finished rows of a run. Open it with `Journal.create` or `Journal.resume`."""

    def __init__(self, path: Path, file_descriptor: int, header: JournalHeader) -> None:
        self.path = path
        self.header = header
        self.num_rows = 0
        self.num_failed_rows = 0
        self.reasons: Counter[str] = Counter()  # answers that were resumed, by finish reason
        self.keys = bytearray()  # of the rows that `rows` has given
        self.failures: list[tuple[int, str]] = []  # line and reason of the first ones that were resumed
        self._fd = file_descriptor
        self._end = os.fstat(file_descriptor).st_size
        # offset of each row's record, 0 where there is none (yet); in pages, as a damaged index may be of any size
        self._pages: dict[int, array[int]] = {}
        self.end_index = 0  # one more than the largest index of a row: the input must have at least as many
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._synced_s = time.monotonic()

    @classmethod
    def create(cls, path: Path, fingerprint: dict[str, str], *, overwrite: bool = False) -> "Journal":
        """A new journal, replacing any old one. Raises: UsageError, PagedcliError."""
        header = JournalHeader(SCHEMA_VERSION, int(time.time()), fingerprint, overwrite, datetime.now())
        journal = cls(path, _open_locked(path), header)
        os.ftruncate(journal._fd, 0)
        journal._end = 0
        journal._append(msgspec.json.encode(header) + b"\n")
        try:
            journal.flush(sync=True)
        except PagedcliError:
            journal.close()
            raise
        sync_folder(path.parent)  # a power cut could lose the new name
        return journal

    @classmethod
    def resume(cls, path: Path, fingerprint: dict[str, str], *, overwrite: bool = False) -> "Journal":
        """The journal of a stopped run. Damaged or torn lines are dropped: their rows are generated again. `overwrite`
        is for a run that was killed before its first line, which says it, was complete.

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
            return cls.create(path, fingerprint, overwrite=overwrite)
        os.ftruncate(fd, journal._end)
        return journal

    def holds(self, index: int, line_digest: int) -> bool:
        """Whether the row is done. Raises: UsageError if it was made from another input line."""
        if (offset := self._offset(index)) == 0:
            return False
        written = os.pread(self._fd, 64, offset)[_DIGEST]
        if written and written != b"%016x" % line_digest:
            raise UsageError(
                f"row {index} of the input is not the one that {self.path} answered: the input has changed",
                hint=HINT_OTHER_RUN,
            )
        return True

    def append(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        """Add a row; `flush` writes it. `key`: see Sink.write."""
        self._remember(index, self._end + self._buffered_bytes, ok=key is not None)
        shown, ok = (key or NO_KEY).hex().encode(), b"false" if key is None else b"true"
        self._append(
            b'{"line":"%016x","key":"%s","ok":%s,"index":%d,"row":%s}\n' % (line_digest, shown, ok, index, row)
        )

    def flush(self, *, sync: bool = False) -> None:
        """Write all rows to the operating system, and about once a second (or with `sync`) to the disk itself.

        Raises: PagedcliError if the disk is full or fails, or if another program has changed the file.
        """
        data = b"".join(self._buffer)
        self._check_length()
        hint = "free some space, then run the same command with --resume"
        try:
            with writing(self.path, PagedcliError, hint=hint):
                while data:
                    num_written = os.write(self._fd, data)
                    self._end += num_written
                    data = data[num_written:]
                if sync or time.monotonic() - self._synced_s > _SYNC_EVERY_S:
                    os.fsync(self._fd)
                    self._synced_s = time.monotonic()
        finally:
            self._buffer, self._buffered_bytes = [], 0

    def rows(self, order: Literal["input", "completion"]) -> Iterator[tuple[int, bytes]]:
        """The rows, each with its index, in the order of the output file, even if the journal has been deleted.

        Raises: PagedcliError if another program has changed the file.
        """
        self.keys = bytearray()
        pages = ((number * _PAGE, page) for number, page in sorted(self._pages.items()))
        done = ((index, offset) for start, page in pages for index, offset in enumerate(page, start) if offset)
        with open(self._fd, "rb", closefd=False) as file:
            for index, offset in done if order == "input" else sorted(done, key=itemgetter(1)):
                file.seek(offset)
                record = file.readline()
                if not record.endswith(b"}\n") or _ROW not in record:
                    raise self._changed()
                has_key = record[_DIGEST.stop : _KEY.start] == b'","key":"'
                self.keys += bytes.fromhex(record[_KEY].decode()) if has_key else NO_KEY
                yield index, record[record.index(_ROW) + len(_ROW) : -2]

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
        number, place = divmod(index, _PAGE)
        if number not in self._pages:
            self._pages[number] = array("Q", bytes(8 * _PAGE))
        self._pages[number][place] = offset
        self.end_index = max(self.end_index, index + 1)
        self.num_rows += 1
        self.num_failed_rows += not ok

    def _offset(self, index: int) -> int:
        number, place = divmod(index, _PAGE)
        return self._pages[number][place] if number in self._pages else 0

    def _load(self, lines: Iterator[bytes], offset: int) -> int:
        """Index every complete record. Returns the offset after the last complete line."""
        decoder = msgspec.json.Decoder(_Record)
        for content in lines:
            if not content.endswith(b"\n"):
                break
            try:
                record = decoder.decode(content)
                row = msgspec.json.decode(record.row)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # a hole left by a power cut
            else:
                if record.index >= 0 and not self._offset(record.index):
                    self._remember(record.index, offset, ok=record.ok)
                    with suppress(*NOT_A_ROW):  # written by others
                        self.reasons.update(reasons_of(row))
                    match row:
                        case {"error": {"line": int(line), "message": str(reason)}} if (
                            len(self.failures) < _MOST_FAILURES
                        ):
                            self.failures.append((line, reason))
            offset += len(content)
        return offset


def journal_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def has_rows(path: Path) -> bool:
    """Whether the file contains more than a header."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(file.readline() and file.readline())


def _open_locked(path: Path) -> int:
    with writing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} is a pipe or a device, not the journal of a run", hint="move it away")
    if not lock(fd):
        os.close(fd)
        raise UsageError(f"another run is writing {path} right now")
    return fd


def read_header(path: Path) -> JournalHeader | None:
    """The header of a journal; None if there is no file, or only an incomplete header. Raises: UsageError."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return _decode_header(path, file.readline())


def _decode_header(path: Path, line: bytes) -> JournalHeader | None:
    """None if the header is incomplete."""
    if not line.endswith(b"\n"):
        return None
    try:
        header = msgspec.json.decode(line, type=JournalHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not the journal of a run", hint="move it away, or use --overwrite") from error
    if header.pagedcli_journal != SCHEMA_VERSION:
        raise UsageError(
            f"{path} is a journal of version {header.pagedcli_journal}, this pagedcli reads version {SCHEMA_VERSION}",
            hint="finish it with the version that began it, or use --overwrite",
        )
    return header


RECORD_VERSION = 1


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, or a finished shard of one."""

    pagedcli_run: int  # schema version
    order: str  # order of the rows: 'input' or 'completion'
    num_rows: int
    num_failed_rows: int
    digest: str  # xxh3-128 of the lines of the output, in hex
    input: InputScan  # the rows that were read; for a shard, including those of the others
    keys: bytes = b""  # the request_key of each row, NO_KEY of a failed one; empty: an earlier version wrote it
    fingerprint: dict[str, str]  # settings that determine the rows, apart from the input; see batch.fingerprint

    @property
    def shard(self) -> str:
        """'2/4' is the second of four; '1/1' a whole run."""
        return self.fingerprint.get("shard", "")

    @property
    def number(self) -> int:
        """1-based."""
        return int(self.shard.partition("/")[0])

    @property
    def num_shards(self) -> int:
        return int(self.shard.partition("/")[2])


def digest_of(file: BinaryIO) -> str:
    """The xxh3-128 of what is left of a file, in hex."""
    return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def check_unchanged(path: Path, record: RunRecord, digest: str | None) -> None:
    """Raises: PagedcliError if the rows of an output, of this digest, are not those that its run wrote."""
    if digest != record.digest:
        raise PagedcliError(
            f"{path} is not what its run wrote: {plural(record.num_rows, 'row')} with digest {record.digest}",
            hint="copy it again, as it was written",
        )


def record_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


def write_record(path: Path, record: RunRecord) -> None:
    """Raises: OSError."""
    with whole_file(record_path(path), overwrite=True) as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_record(path: Path) -> RunRecord:
    """The record of an output. Raises: UsageError if it or the output does not exist."""
    described = record_path(path)
    if not path.exists():
        hint = "finish its run with --resume" if journal_path(path).exists() else None
        raise UsageError(f"there is no {path}", hint=hint)
    try:
        record = msgspec.json.decode(read_own(described), type=RunRecord)
    except OSError as error:
        raise UsageError(
            f"{path} exists, but {described}, which says what run wrote it, cannot be read: {error.strerror}",
            hint=f"put {described.name} back next to {path.name}, move {path.name} away, or use generate --overwrite",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{described} does not describe a run: {error}", hint="run again with --overwrite") from error
    if record.pagedcli_run != RECORD_VERSION:
        raise UsageError(f"{described} has version {record.pagedcli_run}, this pagedcli reads version {RECORD_VERSION}")
    if re.fullmatch(r"[1-9]\d{0,8}/[1-9]\d{0,8}", record.shard) is None:
        raise UsageError(f"{described} does not describe a run: shard is {record.shard!r}")
    return record


def earlier_output(path: Path, read: InputScan, fingerprint: dict[str, str]) -> Path | None:
    """An output in the same folder, or the one that is to be replaced, whose run had the same prompts and model."""
    of_answers = frozenset(name for name in fingerprint if name.startswith(("sampling.", "seed", "input")))
    for each in path.parent.glob("*.run.json"):
        with suppress(UsageError):
            record = read_record(output := each.with_name(each.name.removesuffix(".run.json")))
            differ = settings_that_differ(record.fingerprint, fingerprint, apart_from=of_answers)
            if record.input == read and not differ:
                return output
    return None


def open_rows(path: Path) -> BinaryIO:
    """The lines of an output. Raises: OSError."""
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def output_files(path: Path) -> dict[str, Path]:
    """All files of a run that writes `path`, for files.check_distinct."""
    return {"the output": path, "the journal": journal_path(path), "the record of the run": record_path(path)}


def check_output(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the output path before anything expensive starts.

    Raises: UsageError if a file there would be lost.
    """
    partial = journal_path(path)
    check_new("the journal of the run", partial, kind=JOURNAL, overwrite=True)
    check_new("the record of the run", record_path(path), kind=RUN_RECORD, overwrite=True)
    if resume:
        return
    check_new("the output", path, overwrite=True)
    if overwrite:
        return
    if has_rows(partial):
        os.close(_open_locked(partial))  # another message while a run writes it
        raise UsageError(
            f"{partial} contains the rows of a stopped run",
            hint="continue it with --resume, or start over with --overwrite",
        )
    check_new("the output", path, hint="use --overwrite, another name, or --resume if this is an output of this run")


def is_to_be_replaced(path: Path) -> bool:
    """Whether there is no output, or one that the stopped run was allowed to replace."""
    if not path.exists():
        return True
    header = read_header(journal_path(path))
    return header is not None and header.overwrite


def check_finished(
    path: Path, fingerprint: dict[str, str], lines: LineSource, *, order: str, limit: int | None
) -> RunRecord:
    """The record of the run that wrote `path`, if it had the same settings and input.

    Changes: reads `lines`; removes the journal of a run that was killed just after it had finished.
    Raises: UsageError that says what differs, or that the output has no record.
    """
    record = read_record(path)
    check_same_run(path, {**record.fingerprint, "order": record.order}, {**fingerprint, "order": order})
    if output_digest(path) != record.digest:
        raise UsageError(
            f"{path} is not what its run wrote: another program has changed it", hint="use --overwrite, or another -o"
        )
    read = InputDigest()
    for line in lines:
        if limit is not None and line.index >= limit:
            break
        read.add(line)
    now, before = read.scan(), record.input
    if now != before:
        what = (
            f"{plural(before.num_rows, 'row')} -> {plural(now.num_rows, 'row')}"
            if now.num_rows != before.num_rows
            else "changed"
        )
        raise UsageError(f"{path} is of a run on another input; input: {what}", hint=HINT_OTHER_RUN)
    if read_header(journal_path(path)) is not None:
        journal_path(path).unlink()
    return record


def open_journal(path: Path, fingerprint: dict[str, str], *, resume: bool, overwrite: bool) -> Journal:
    """The journal of an output, a new one if there is nothing to resume. Raises: UsageError."""
    check_output(path, resume=resume, overwrite=overwrite)
    partial = journal_path(path)
    if resume and partial.exists():
        return Journal.resume(partial, fingerprint, overwrite=overwrite)
    if resume and path.exists() and not overwrite:  # since the caller looked for it
        raise UsageError(f"another run has just finished {path}", hint="run the same command again")
    return Journal.create(partial, fingerprint, overwrite=overwrite)


def output_digest(path: Path) -> str | None:
    """The digest of a file's rows; None if it is damaged."""
    with suppress(OSError, EOFError, zlib.error), open_rows(path) as file:
        return digest_of(file)
    return None
