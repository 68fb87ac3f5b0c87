"""Reads the lines of trace files of any name, plain, gzip or zstd, in bounded memory."""

import zlib
from collections.abc import Iterator
from pathlib import Path

from pagedcli.errors import TraceError, UsageError
from pagedcli.line_files import LineReader

_CHUNK_BYTES = 1 << 18
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class TraceLines(LineReader):
    """The lines of a trace. The compression is that of the content, not of the name; - is stdin.

    Raises: UsageError if the file cannot be read; TraceError if it is damaged, or decompresses to far more than a
            trace does.
    """

    def __init__(self, name: str) -> None:
        super().__init__(Path("/dev/stdin" if name == "-" else name), "trace")

    def _chunks(self) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read the trace {self.path}: {error.strerror}") from error
        with file:
            first = file.read(_CHUNK_BYTES)
            chunks = self._with_first(first, iter(lambda: file.read(_CHUNK_BYTES), b""))
            if first.startswith(_ZSTD):
                yield from self._decompressed(chunks)
            elif first.startswith(_GZIP):
                yield from self._gunzipped(chunks)
            else:
                yield from chunks

    @staticmethod
    def _with_first(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
        yield first
        yield from rest

    def _gunzipped(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        decompressor = zlib.decompressobj(wbits=31)
        num_read = num_made = 0
        try:
            for chunk in chunks:
                num_read += len(chunk)
                while chunk:
                    if decompressor.eof:  # another member follows
                        decompressor = zlib.decompressobj(wbits=31)
                    made = decompressor.decompress(chunk, _CHUNK_BYTES)
                    chunk = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
                    num_made += len(made)
                    self._check_ratio(num_read, num_made)
                    yield made
        except zlib.error as error:
            raise TraceError(f"{self.path}: damaged after line {self.line_number}: {error}") from error
        if not decompressor.eof:
            self.notes.append("the compressed stream has no end: the file was cut off")
