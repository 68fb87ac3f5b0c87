"""Trace files: one JSON object per event and line, `.jsonl` or `.jsonl.zst`. Line n is event n.

Written by the observer of an engine, read by everything in inspection. Reading streams and decodes line by line.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from pagedcli.errors import TraceError, UsageError
from pagedcli.events import SCHEMA_VERSION, AnyEvent, EngineStarted, Event, StepFinished

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_CHUNK_BYTES = 1 << 18
_ZSTD_LEVEL = 3
_COMPRESS_EVERY_NS = 50_000_000  # compressing step by step took 5 % of the throughput of a small model


class TraceWriter:
    """Writes each event it is called with. What a step wrote is on disk when the step is over; in a compressed file,
    when a step ends 50 ms or more after the last time.

    Raises: UsageError for a name that is not a trace's or a file that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_events = 0
        self.observer_ns = 0  # time spent here
        self._compressor = zstd.ZstdCompressor(level=_ZSTD_LEVEL) if is_compressed(path) else None
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._flushed_ns = 0
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise UsageError(f"cannot write the trace {path}: {error.strerror}") from error

    def __call__(self, event: Event) -> None:
        start_ns = time.perf_counter_ns()
        buffer = self._buffer
        self._encoder.encode_into(event, buffer, len(buffer))
        buffer += b"\n"
        self.num_events += 1
        due_ns = 0 if self._compressor is None else self._flushed_ns + _COMPRESS_EVERY_NS
        if type(event) is StepFinished and start_ns >= due_ns:
            self.flush()
        self.observer_ns += time.perf_counter_ns() - start_ns

    def flush(self) -> None:
        """Bring everything so far to the file, readable even if the process dies next."""
        data: bytes | bytearray = self._buffer
        if self._compressor is not None:
            data = self._compressor.compress(bytes(data), zstd.ZstdCompressor.FLUSH_BLOCK)
        self._file.write(data)
        self._file.flush()
        self._buffer.clear()
        self._flushed_ns = time.perf_counter_ns()

    def close(self) -> None:
        if self._file.closed:
            return
        self.flush()
        if self._compressor is not None:
            self._file.write(self._compressor.flush(zstd.ZstdCompressor.FLUSH_FRAME))
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class TraceReader:
    """Iterates over the events of a trace file. Afterwards `notes` says what was odd but harmless.

    Raises: UsageError if the file cannot be read; TraceError, naming file and line, if it is no trace, of another
    schema version, or damaged. A torn last line, which a killed run leaves, is dropped with a note.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line_number = 0  # of the event given last, from 1
        self.notes: list[str] = []
        self._decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

    @property
    def place(self) -> str:
        """File and line of the event given last."""
        return f"{self.path}:{self.line_number}"

    def __iter__(self) -> Iterator[Event]:
        for line in self._lines():
            try:
                yield self._decoder.decode(line)
            except msgspec.DecodeError as error:  # a ValidationError is one, too
                raise TraceError(f"{self.place}: {error}") from error

    def _lines(self) -> Iterator[bytes]:
        """The undecoded lines, the first one checked."""
        self.line_number = 0
        for line in self._split():
            self.line_number += 1
            if self.line_number == 1:
                self._check_first(line)
            yield line
        if self.line_number == 0:
            raise TraceError(f"{self.path}: the file is empty, not a trace")

    def _check_first(self, line: bytes) -> None:
        try:
            head = msgspec.json.decode(line, type=_Head)
        except msgspec.DecodeError as error:
            raise TraceError(f"{self.path}:1: not a trace of pagedcli ({error})") from error
        if head.event != EngineStarted.__struct_config__.tag or head.schema_version is None:
            raise TraceError(f"{self.path}:1: a trace begins with engine_started, this file with {head.event!r}")
        if head.schema_version != SCHEMA_VERSION:
            raise TraceError(
                f"{self.path}:1: schema version {head.schema_version}, this pagedcli reads version {SCHEMA_VERSION}",
                hint=f"read it with the version that wrote it: pagedcli {head.pagedcli_version}",
            )

    def _split(self) -> Iterator[bytes]:
        rest = b""
        for chunk in self._chunks():
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            yield from lines
        if rest:
            try:
                msgspec.json.decode(rest)
            except msgspec.DecodeError:
                self.notes.append(f"the last line is torn ({len(rest)} bytes dropped): the run was cut off")
            else:
                yield rest

    def _chunks(self) -> Iterator[bytes]:
        compressed = is_compressed(self.path)
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read the trace {self.path}: {error.strerror}") from error
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


class _Head(msgspec.Struct):
    event: str
    schema_version: int | None = None
    pagedcli_version: str = "?"


def is_compressed(path: Path) -> bool:
    """Whether the name is that of a compressed trace. Raises UsageError if it is not a trace's name at all."""
    if path.name.endswith(".jsonl.zst"):
        return True
    if path.name.endswith(".jsonl"):
        return False
    raise UsageError(f"{path} is not named like a trace", hint="a trace file ends in .jsonl or .jsonl.zst")
