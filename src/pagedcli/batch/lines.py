"""Reads JSONL lines one at a time, without parsing them, from a file, compressed or not, stdin or a named pipe.

Used by batch.run. At most MAX_LINE_BYTES of a line are kept, so memory is bounded even without line ends.
"""

import gzip
import io
import os
import queue
import re
import shlex
import shutil
import sys
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import msgspec
import xxhash

from pagedcli.buckets import is_url, open_url
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import is_stream, writing
from pagedcli.line_files import COPIES, MOST_BLANK_LINES, NOT_JSON, ZSTD_MAGIC, first_decompressed, zstd
from pagedcli.printable import byte_text, plural
from pagedcli.process import at_end

MAX_LINE_BYTES = 16 * 2**20  # several million tokens of text
PACKED_ENDINGS = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, ZSTD_MAGIC: zstd.open}  # by what a file begins with
_HEADER = re.compile(r'"?(prompt|messages|\w[\w .-]*"?([,;\t] ?"?\w[\w .-]*"?)+)"?')  # of a table, as it may be
_PEEKED = 2**16  # bytes
# What other files begin with -> what they are, and how their rows can be read. %s stands for the file.
_OTHER_KINDS = {
    b"PAR1": ("a Parquet file", "give it as a file whose name ends in .parquet"),
    b"PK\3\4": ("a zip archive", "unzip -p %s | pagedcli generate -"),
    b"GGUF": ("a GGUF model file", "pass the model with -m %s, and the prompts as another file"),
    b"\xff\xfe": ("UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8 %s > utf8.jsonl"),
    b"\xfe\xff": ("UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8 %s > utf8.jsonl"),
    b"\0\0\0\0": ("not text: it begins with zeros", "a power cut may have truncated it; pass the intended file"),
}


class Line(msgspec.Struct, frozen=True, gc=False):
    """One row of the input. Blank lines are not rows: they get no index, but count as lines."""

    index: int  # 0-based, among the rows
    number: int  # 1-based, among all lines, as editors show it
    content: bytes | None  # bytes without the line end; None: over MAX_LINE_BYTES
    digest: int  # xxh64 of the content; of b"" if too long


class InputScan(msgspec.Struct, frozen=True):
    """Digest and size of an input."""

    digest: str  # xxh3-128 of its rows, in hex
    num_rows: int


class InputDigest:
    """Digests rows as they are read."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._num_rows = 0

    def add(self, line: Line) -> None:
        self._digest.update((line.content or b"") + b"\n")
        self._num_rows += 1

    def scan(self) -> InputScan:
        return InputScan(self._digest.hexdigest(), self._num_rows)


def is_live(name: str) -> bool:
    """Whether an input can be read only once, and its lines may arrive slowly: stdin, a named pipe, <(command)."""
    return name == "-" or is_stream(Path(name))


_opened: dict[str, BinaryIO] = {}  # live inputs whose beginning was looked at, by name, until they are read


def live_beginning(name: str) -> bytes:
    """What a live input begins with, decompressed. Whoever opens it next reads that, too. Raises: UsageError."""
    _opened[name] = _peekable(open_input(name))
    begins = _peeked(_opened[name])
    return first_decompressed(begins, _PEEKED) if begins.startswith(ZSTD_MAGIC) else begins


def open_input(name: str) -> BinaryIO:
    """An input as it is stored; '-' is stdin. Raises: UsageError."""
    if name in _opened:
        return _opened.pop(name)
    if name == "-":
        return _stdin()
    if is_url(name):
        return open_url(name)
    try:
        return open(name, "rb")
    except OSError as error:
        hint = f"""to ask for a single word: echo '{{"prompt": "{name}"}}' | pagedcli generate -"""
        raise UsageError(
            f"cannot read the prompts {name}: {error.strerror}", hint=hint if name.isalpha() else None
        ) from error


def copied(path: Path) -> Path:
    """A file that can be read several times: the same one, or a copy of what a pipe or stdin ('-') has, kept until the
    process ends. Raises: UsageError."""
    if not is_live(name := str(path)):
        return path
    if name == "-" and sys.stdin.isatty():
        raise UsageError("cannot read a recorded run from a terminal", hint="pass a file, or pipe one")
    folder = TemporaryDirectory(prefix=COPIES)
    at_end(folder.cleanup)
    with _peekable(open_input(name)) as file:
        ending = ".jsonl.zst" if _peeked(file).startswith(ZSTD_MAGIC) else ".jsonl"
        copy = Path(folder.name, ("stdin" if name == "-" else "pipe") + ending)
        with writing(copy), copy.open("wb") as to:
            shutil.copyfileobj(file, to)
    return copy


def file_of_prompt(text: str) -> str:
    """The name of an input with this prompt alone, kept until the process ends."""
    folder = TemporaryDirectory(prefix=COPIES)
    at_end(folder.cleanup)
    path = Path(folder.name, "prompt.jsonl")
    path.write_bytes(msgspec.json.encode({"prompt": text}) + b"\n")
    return str(path)


class LineSource:
    """The rows of an input file; '-' is stdin. What is compressed with gzip or zstd is decompressed, whatever its name.

    A scanned file gives exactly the rows of the scan, or an error if it has changed.
    """

    is_live = False
    has_grown = False  # whether rows were added after the scan; these are not read
    names: list[str] | None = None  # columns, if it is a table
    _row_digests: "array[int] | None" = None  # digests by the scan
    _opened: BinaryIO | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_live = is_live(name)
        if self.is_live:
            self._opened = self._open()
        else:
            self._unpacked(self._open()).close()  # a wrong file is reported now, not after the model was loaded

    @property
    def is_plain(self) -> bool:
        """Whether it is a file whose lines can be read from anywhere."""
        if type(self) is not LineSource or self.is_live:
            return False
        with self._unpacked(self._open()) as file:
            return not isinstance(file, _PACKED)

    def __iter__(self) -> Iterator[Line]:
        """Raises: PagedcliError if the file cannot be read to its end, or has changed since the scan."""
        scanned = self._row_digests
        num_rows = 0
        for line in self._lines():
            if scanned is not None and line.index == len(scanned):
                self.has_grown = True
                return
            if scanned is not None and line.digest != scanned[line.index]:
                raise self._changed(f"line {line.number} (row {line.index}) is not the one read at the start")
            num_rows += 1
            yield line
        if scanned is not None and num_rows < len(scanned):
            raise self._changed(f"it had {plural(len(scanned), 'row')} and now ends after {num_rows:,}")

    def scan(
        self, limit: int | None = None, *, observe: Callable[[bytes | None], None] = lambda content: None
    ) -> tuple[InputScan, InputScan] | None:
        """Digest and number of all rows, and of those up to a limit, from one pass over the file in which each line's
        content is shown to `observe`. None for an input that can be read only once."""
        if self.is_live:
            return None
        digest, row_digests, up_to_limit = InputDigest(), array("Q"), None
        for line in self._lines():
            if line.index == limit:
                up_to_limit = digest.scan()
            digest.add(line)
            row_digests.append(line.digest)
            observe(line.content)
        self._row_digests = row_digests
        scan = digest.scan()
        return scan, up_to_limit or scan

    def _changed(self, what: str) -> PagedcliError:
        return PagedcliError(
            f"{self.name} changed during the run: {what}",
            hint="no row was generated from a changed line; restore the file and use --resume, or start over",
        )

    def _lines(self) -> Iterator[Line]:
        """The rows as they are in the file now."""
        number = 0
        try:
            file, self._opened = self._unpacked(self._opened or self._open()), None
            with file:
                index = 0
                num_blank = 0
                for number, content in self._contents(file):
                    if content is not None and not content.strip():
                        num_blank += 1
                        if num_blank > MOST_BLANK_LINES:
                            raise PagedcliError(f"{self.name} has over {MOST_BLANK_LINES:,} consecutive blank lines")
                        continue
                    num_blank = 0
                    yield Line(index, number, content, xxhash.xxh64_intdigest(content or b""))
                    index += 1
        except (gzip.BadGzipFile, zstd.ZstdError, EOFError, zlib.error) as error:
            raise PagedcliError(f"{self.name} is damaged after line {number}: {error}") from error
        except OSError as error:
            name = "standard input" if self.name == "-" else self.name
            raise PagedcliError(f"cannot read {name} after line {number}: {error.strerror}") from error

    def _contents(self, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
        """Each line with its number, from 1; None for one that is too long."""
        return enumerate(_read_lines(file), 1)

    def _open(self) -> BinaryIO:
        return open_input(self.name)

    def _unpacked(self, file: BinaryIO) -> BinaryIO:
        """The decompressed content of a file. Raises: UsageError if it is of a kind that has no rows for us."""
        if isinstance(file, _PACKED):
            return file
        file = _peekable(file)
        opener = next((each for begin, each in _OPENERS.items() if _peeked(file).startswith(begin)), None)
        file = file if opener is None else cast(BinaryIO, opener(file))
        name, head = "standard input" if self.name == "-" else self.name, _peeked(file)
        path = "FILE" if self.name == "-" else shlex.quote(self.name)
        for begin, (what, hint) in _OTHER_KINDS.items():
            if head.startswith(begin):
                raise UsageError(f"{name} is {what}", hint=hint.replace("%s", path))
        self._check_text(name, path, head)
        return file

    def _check_text(self, name: str, path: str, head: bytes) -> None:
        """Raises: UsageError if the beginning of the file shows that it has no lines of JSON."""
        lines = head.removeprefix(BOM).split(b"\n")[:-1] or [head]  # the last one may be cut
        first, *others = [line.strip() for line in lines if line.strip()] or [b""]
        if first == b"[" or (first.startswith(b"[") and not any(map(_is_object, others))):
            raise UsageError(f"{name} is one JSON array, not lines of JSON", hint=f"jq -c '.[]' {path} > lines.jsonl")
        if first == b"{":
            what = "JSON of several lines per object, not one object per line"
            raise UsageError(f"{name} is {what}", hint=f"jq -c . {path} > lines.jsonl")
        text, kind = first.decode(errors="replace"), "tsv" if b"\t" in first else "csv"
        if _HEADER.fullmatch(text) and not any(map(_is_object, others)):
            hint = f"--input-format {kind} reads it as a table"
            raise UsageError(f"{name} has no lines of JSON; its first line is {text[:60]!r}", hint=hint)


_PACKED = (gzip.GzipFile, zstd.ZstdFile)


def _peekable(file: BinaryIO) -> BinaryIO:
    return file if hasattr(file, "peek") else cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, file)))


def _peeked(file: BinaryIO) -> bytes:
    """What a file begins with, which stays to be read; less than there is of what is damaged."""
    with suppress(OSError, EOFError, zlib.error, zstd.ZstdError):  # reading the lines reports them
        return cast(io.BufferedReader, file).peek(_PEEKED)[:_PEEKED]
    return b""


def _is_object(line: bytes) -> bool:
    with suppress(*NOT_JSON):
        return isinstance(msgspec.json.decode(line), dict)
    return False


def as_they_come(lines: Iterable[Line | None], wait_s: Callable[[], float]) -> Iterator[Line | None]:
    """Lines of a slow source, read in the background; None when none arrives within `wait_s()` seconds.

    The engine keeps working on the lines it has, and Ctrl-C still works while none arrive.
    """
    came: queue.Queue[Line | BaseException | None] = queue.Queue(maxsize=1024)  # None: the end

    def read() -> None:
        try:
            for line in lines:
                came.put(line)
        except BaseException as error:
            came.put(error)  # raised in the thread that uses the lines
        else:
            came.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            item = came.get(timeout=max(wait_s(), 1e-6))
        except queue.Empty:
            yield None
            continue
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        yield item


def _stdin() -> BinaryIO:
    """Standard input with a separate reader: at exit Python closes sys.stdin's, which a thread may be using."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # replaced by something in memory
        return sys.stdin.buffer


def _read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines without their ends; None for one over MAX_LINE_BYTES, the rest of which is skipped in chunks."""
    first = True
    while line := file.readline(MAX_LINE_BYTES + 2):
        if first:
            line, first = line.removeprefix(BOM), False
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            skip_line(file)
            yield None
            continue
        yield line.rstrip(b"\r\n")


def skip_line(file: BinaryIO, *, most_bytes: int = 2**32) -> None:
    """Read to the end of a line. Raises: PagedcliError if it has none in `most_bytes`, as in a device."""
    num_left = most_bytes
    while (piece := file.readline(2**16)) and not piece.endswith(b"\n"):
        if (num_left := num_left - len(piece)) < 0:
            raise PagedcliError(
                f"the prompts have no line end in {byte_text(most_bytes)}", hint="name a file of JSON lines"
            )
