"""Trace files: one JSON object per event and line, `.jsonl` or `.jsonl.zst`. Line n is event n.

Written by the observer of an engine, read by everything in inspection. Reading streams and decodes line by line.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from pagedcli.errors import TraceError
from pagedcli.events import SCHEMA_VERSION, AnyEvent, EngineStarted, Event, StepFinished
from pagedcli.line_files import LineReader, LineWriter

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
        self._lines = LineWriter(path, "trace")
        self._encoder = msgspec.json.Encoder()
        self._flushed_ns = 0

    def __call__(self, event: Event) -> None:
        start_ns = time.perf_counter_ns()
        buffer = self._lines.buffer
        self._encoder.encode_into(event, buffer, len(buffer))
        buffer += b"\n"
        self.num_events += 1
        due_ns = self._flushed_ns + _COMPRESS_EVERY_NS if self._lines.is_compressed else 0
        if type(event) is StepFinished and start_ns >= due_ns:
            self.flush()
        self.observer_ns += time.perf_counter_ns() - start_ns

    def flush(self) -> None:
        """Bring everything so far to the file, readable even if the process dies next."""
        self._lines.flush()
        self._flushed_ns = time.perf_counter_ns()

    def close(self) -> None:
        self._lines.close()

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
        self._lines = LineReader(path, "trace")
        self.notes = self._lines.notes
        self._decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

    @property
    def line_number(self) -> int:
        """Of the event given last, from 1."""
        return self._lines.line_number

    @property
    def place(self) -> str:
        """File and line of the event given last."""
        return f"{self.path}:{self.line_number}"

    def __iter__(self) -> Iterator[Event]:
        for line in self._checked_lines():
            try:
                yield self._decoder.decode(line)
            except msgspec.DecodeError as error:  # a ValidationError is one, too
                raise TraceError(f"{self.place}: {error}") from error

    def _checked_lines(self) -> Iterator[bytes]:
        """The undecoded lines, the first one checked."""
        for line in self._lines:
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


class _Head(msgspec.Struct):
    event: str
    schema_version: int | None = None
    pagedcli_version: str = "?"
