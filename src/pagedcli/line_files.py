"""Files of JSON lines that grow while something runs, `.jsonl` or `.jsonl.zst`: traces and recordings of KV events.

Used by inspection and kvevents. A run that is killed leaves a file that can be read up to where it was cut off.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from pagedcli.errors import TraceError, UsageError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 28
_ZSTD_LEVEL = 3


class LineWriter:
    """Collects lines in `buffer`, to which callers add them; `flush` brings them to the file.

    Raises: UsageError for a name that is not that of such a file, or a file that cannot be written.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.buffer = bytearray()
        self._compressor = zstd.ZstdCompressor(level=_ZSTD_LEVEL) if has_compressed_name(path, what) else None
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise UsageError(f"cannot write the {what} {path}: {error.strerror}") from error

    @property
    def is_compressed(self) -> bool:
        return self._compressor is not None

    def flush(self) -> None:
        """Bring everything so far to the file, readable even if the process dies next."""
        data: bytes | bytearray = self.buffer
        if self._compressor is not None:
            data = self._compressor.compress(bytes(data), zstd.ZstdCompressor.FLUSH_BLOCK)
        self._file.write(data)
        self._file.flush()
        self.buffer.clear()

    def close(self) -> None:
        if self._file.closed:
            return
        self.flush()
        if self._compressor is not None:
            self._file.write(self._compressor.flush(zstd.ZstdCompressor.FLUSH_FRAME))
        self._file.close()


class LineReader:
    """Iterates over the undecoded lines of a file. `line_number` follows, from 1.

    Raises: UsageError if the file cannot be read; TraceError if it is damaged. Afterwards `notes` says what was odd
            but harmless: a torn last line, which a killed run leaves, is dropped with a note.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.line_number = 0
        self.notes: list[str] = []
        self._what = what

    def __iter__(self) -> Iterator[bytes]:
        self.line_number = 0
        for line in self._split():
            self.line_number += 1
            yield line

    def _split(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks():
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > _MAX_LINE_BYTES:
                raise TraceError(f"{self.path}:{self.line_number + len(lines) + 1}: a line of over 256 MiB")
            yield from lines
        if rest:
            try:
                msgspec.json.decode(rest)
            except msgspec.DecodeError:
                self.notes.append(f"the last line is torn ({len(rest)} bytes dropped): the run was cut off")
            else:
                yield rest

    def _chunks(self) -> Iterator[bytes]:
        compressed = has_compressed_name(self.path, self._what)
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read the {self._what} {self.path}: {error.strerror}") from error
        with file:
            chunks = iter(lambda: file.read(_CHUNK_BYTES), b"")
            yield from self._decompressed(chunks) if compressed else chunks

    def _decompressed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        decompressor = zstd.ZstdDecompressor()
        started = False
        try:
            for chunk in chunks:
                while chunk:
                    if decompressor.eof:
                        decompressor = zstd.ZstdDecompressor()
                    started = True
                    yield decompressor.decompress(chunk)
                    chunk = decompressor.unused_data if decompressor.eof else b""
        except zstd.ZstdError as error:
            raise TraceError(f"{self.path}: damaged after line {self.line_number}: {error}") from error
        if started and not decompressor.eof:
            self.notes.append("the compressed stream has no end: the run was cut off")


def has_compressed_name(path: Path, what: str) -> bool:
    """Whether the name is that of a compressed file. Raises: UsageError if it is not such a file's name at all."""
    if path.name.endswith(".jsonl.zst"):
        return True
    if path.name.endswith(".jsonl"):
        return False
    raise UsageError(f"{path} is not named like a {what}", hint=f"a {what} file ends in .jsonl or .jsonl.zst")
