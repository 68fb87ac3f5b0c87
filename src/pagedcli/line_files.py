"""JSON Lines files written during a run, `.jsonl` or `.jsonl.zst`: traces and recordings of KV events.

Used by inspection and kvevents. The file of a killed run is readable up to where it was cut off.
"""

import gzip
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pagedcli.errors import TraceError, UsageError

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec.json.decode raises
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 18
_MOST_LINE_BYTES = 1 << 26  # a prompt of a million token ids takes 7 MB
# traces compress 10 to 50 times; a far higher ratio is a decompression bomb
_MOST_RATIO = 1000
_FREE_BYTES = 1 << 28  # decompressed bytes before the ratio is checked
_ZSTD_LEVEL = 3
MOST_BLANK_LINES = 1_000_000  # one after another: a small compressed file may hold billions
_BLANK_BYTES = 64  # a longer line is not looked at
COPIES = "pagedcli-"  # begins the names of folders that hold a copy of a pipe, until the process ends


class LineWriter:
    """Collects lines in `buffer`, which callers append to; `flush` writes them to the file, which is opened here or
    passed in.

    Raises: UsageError for another file name extension, or a file that cannot be written.
    """

    def __init__(self, path: Path, what: str, file: BinaryIO | None = None) -> None:
        self.path = path
        self.buffer = bytearray()
        self._compressor = zstd.ZstdCompressor(level=_ZSTD_LEVEL) if has_compressed_name(path, what) else None
        try:
            self._file = path.open("wb") if file is None else file
        except OSError as error:
            raise UsageError(f"cannot write the {what} {path}: {error.strerror}") from error

    def flush(self) -> None:
        """Write everything so far; it is readable even if the process is killed now."""
        data: bytes | bytearray = self.buffer
        if self._compressor is not None:
            data = self._compressor.compress(bytes(data), zstd.ZstdCompressor.FLUSH_BLOCK)
        self._file.write(data)
        self._file.flush()
        self.buffer.clear()

    def finish(self) -> None:
        """Write everything and end the compressed stream. The file stays open."""
        self.flush()
        if self._compressor is not None:
            self._file.write(self._compressor.flush(zstd.ZstdCompressor.FLUSH_FRAME))

    def close(self) -> None:
        if self._file.closed:
            return
        self.finish()
        self._file.close()


class LineReader:
    """Iterates over the undecoded lines of a file, in bounded memory. `line_number` is the current one, from 1.

    Raises: UsageError if the file cannot be read; TraceError if it is damaged or its lines or compression ratio are
            too large. Afterwards `notes` lists harmless oddities: a torn last line of a killed run is dropped.
    """

    def __init__(self, path: Path, what: str, notes: list[str] | None = None) -> None:
        self.path = path
        self.line_number = 0
        self.notes: list[str] = [] if notes is None else notes
        self._what = what
        self._is_cut = False

    @property
    def why_empty(self) -> str:
        """Why there was no line, once the file has been read."""
        if self._is_cut:
            return f"{self.path}: the file was cut off in its first line, and nothing of the {self._what} is left"
        return f"{self.path}: the file is empty, not a {self._what}"

    def rescue_hint(self, num_lines: int) -> str | None:
        """How to keep the lines before damage; None: there are none, or what the user has is a pipe."""
        if not num_lines or is_copy(self.path):
            return None
        path, head = self.path, f"head -n {num_lines}"
        whole = path.with_name(path.name.removesuffix(".zst").removesuffix(".jsonl") + ".whole.jsonl")
        quoted = shlex.quote(str(path))
        command = f"zstdcat {quoted} | {head}" if has_compressed_name(path, self._what) else f"{head} {quoted}"
        return f"what precedes the damage is still a {self._what}: {command} > {shlex.quote(str(whole))}"

    def __iter__(self) -> Iterator[bytes]:
        self.line_number = num_blank = 0
        for line in self._split():
            self.line_number += 1
            if len(line) > _BLANK_BYTES or line.strip():
                num_blank = 0
            elif (num_blank := num_blank + 1) > MOST_BLANK_LINES:
                raise TraceError(f"{self.path} has over {MOST_BLANK_LINES:,} blank lines in a row: not a {self._what}")
            yield line

    def _split(self) -> Iterator[bytes]:
        rest = bytearray()
        for chunk in self._chunks():
            if b"\n" in chunk:
                first, *lines = chunk.split(b"\n")
                yield bytes(rest + first)
                yield from lines[:-1]
                rest = bytearray(lines[-1])
            else:
                rest += chunk
            if len(rest) > _MOST_LINE_BYTES:
                limit = f"{_MOST_LINE_BYTES >> 20} MiB"
                raise TraceError(
                    f"{self.path}:{self.line_number + 1}: the line is longer than {limit}: not a {self._what}"
                )
        if rest:
            try:
                msgspec.json.decode(rest)
            except NOT_JSON:
                self._is_cut = True
                self.notes.append(f"the last line is torn ({len(rest)} bytes dropped): the run was cut off")
            else:
                yield bytes(rest)

    def _opener(self, first: bytes) -> Callable[[Any], Any] | None:
        """What opens the compressed file that begins with `first`; None: it is not compressed."""
        return zstd.ZstdFile if has_compressed_name(self.path, self._what) else None

    def _chunks(self) -> Iterator[bytes]:
        try:
            stored = self.path.open("rb")
        except OSError as error:
            self._opener(b"")  # An error about the name says more.
            raise UsageError(f"cannot read the {self._what} {self.path}: {error.strerror}") from error
        with stored:
            if (opener := self._opener(stored.peek(len(ZSTD_MAGIC)))) is None:
                yield from iter(lambda: stored.read(_CHUNK_BYTES), b"")
                return
            counting = _CountingFile(stored)
            num_made = 0
            try:
                file = opener(counting)
                while made := file.read1(_CHUNK_BYTES):
                    num_made += len(made)
                    self._check_ratio(counting.num_read, num_made)
                    yield made
            except EOFError:
                if counting.num_read:
                    self._is_cut = True
                    self.notes.append("the compressed stream has no end: the run was cut off")
            except (zstd.ZstdError, zlib.error, gzip.BadGzipFile) as error:
                what = f"damaged after line {self.line_number}: {error}"
                raise TraceError(f"{self.path}: {what}", hint=self.rescue_hint(self.line_number)) from error

    def _check_ratio(self, num_read: int, num_made: int) -> None:
        if num_made > _FREE_BYTES + _MOST_RATIO * num_read:
            raise TraceError(
                f"{self.path}: {num_read:,} bytes decompress to more than {num_made:,}: no {self._what} is like that"
            )


class _CountingFile:
    """Counts what is read of a file, which may be a pipe."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_read = 0  # bytes

    def read(self, num_bytes: int = -1) -> bytes:
        content = self._file.read(num_bytes)
        self.num_read += len(content)
        return content


def first_decompressed(content: bytes, num_bytes: int) -> bytes:
    """What the beginning of a zstd file decompresses to; the same bytes if they are damaged."""
    try:
        return zstd.ZstdDecompressor().decompress(content, max_length=num_bytes)
    except zstd.ZstdError:
        return content


def is_copy(path: Path) -> bool:
    """Whether a file is the copy of a pipe."""
    return path.parent.name.startswith(COPIES)


def has_compressed_name(path: Path, what: str) -> bool:
    """Whether the name is that of a compressed file. Raises: UsageError if it has another extension."""
    if path.name.endswith(".jsonl.zst"):
        return True
    if path.name.endswith(".jsonl"):
        return False
    raise UsageError(f"{path} is not named like a {what}", hint=f"a {what} file ends in .jsonl or .jsonl.zst")
