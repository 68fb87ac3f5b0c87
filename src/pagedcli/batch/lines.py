"""Lines of a JSONL file, read one at a time: a file, a gzip file or stdin. Knows nothing of their meaning.

Used by batch.run. A line is never held beyond MAX_LINE_BYTES, so a file without line ends costs no memory.
"""

import gzip
import io
import os
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from pagedcli.errors import PagedcliError, UsageError

MAX_LINE_BYTES = 16 * 2**20  # several million tokens of text
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the input. Blank lines are no rows: they get no index, but they count as lines."""

    index: int  # 0-based, among the rows
    number: int  # 1-based, among all lines, as editors show it
    content: bytes | None  # without the line end; None if over MAX_LINE_BYTES
    digest: int  # xxh64 of the content (of its beginning, if too long)


@dataclass(frozen=True, slots=True)
class InputScan:
    """What one pass over a file told about it."""

    digest: str  # xxh3-128 of its rows, in hex
    num_rows: int


class LineSource:
    """The rows of an input file; '-' is stdin, a name that ends in .gz is decompressed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_stdin = name == "-"
        if not self.is_stdin:
            self._open().close()  # tells now what is wrong with the path, not after the model was loaded

    def __iter__(self) -> Iterator[Line]:
        """Raises: PagedcliError if the file cannot be read to its end."""
        number = 0
        try:
            with self._open() as file:
                index = 0
                for number, content in enumerate(_read_lines(file), 1):
                    if content is not None and not content.strip():
                        continue
                    yield Line(index, number, content, xxhash.xxh64_intdigest(content or b""))
                    index += 1
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PagedcliError(f"{self.name} is damaged after line {number}: {error}") from error

    def scan(self) -> InputScan | None:
        """Digest and number of rows, from one pass over the file; None for stdin, which can be read only once."""
        if self.is_stdin:
            return None
        digest, num_rows = xxhash.xxh3_128(), 0
        for line in self:
            digest.update(b"\n" if line.content is None else line.content + b"\n")
            num_rows += 1
        return InputScan(digest.hexdigest(), num_rows)

    def _open(self) -> BinaryIO:
        if self.is_stdin:
            return _stdin()
        path = Path(self.name)
        try:
            return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
        except OSError as error:
            raise UsageError(f"cannot read the prompts {self.name}: {error.strerror}") from error


def as_they_come(lines: Iterable[Line | None], wait_s: Callable[[], float]) -> Iterator[Line | None]:
    """Lines of a slow source, read in the background; None when none has come within `wait_s()` seconds.

    So a run goes on with the lines it has, and Ctrl-C is heard while nothing comes.
    """
    came: queue.Queue[Line | BaseException | None] = queue.Queue(maxsize=1024)  # None: the end

    def read() -> None:
        try:
            for line in lines:
                came.put(line)
        except BaseException as error:
            came.put(error)  # raised where the lines are used
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
    """Standard input through a reader of its own: at exit, Python closes sys.stdin's, which a thread may be using."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # something in memory stands for it
        return sys.stdin.buffer


def _read_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Lines without their ends; None for one over MAX_LINE_BYTES, the rest of which is skipped piece by piece."""
    first = True
    while line := file.readline(MAX_LINE_BYTES + 2):
        if first:
            line, first = line.removeprefix(_BOM), False
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (piece := file.readline(2**16)) and not piece.endswith(b"\n"):
                pass
            yield None
            continue
        yield line.rstrip(b"\r\n")
