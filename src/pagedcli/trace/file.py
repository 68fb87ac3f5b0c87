"""Reads trace files: an EventSource. Streams and decodes line by line.

Used by everything that reads a recorded run. File names are in trace_parts.py.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pagedcli.errors import TraceError
from pagedcli.events import SCHEMA_VERSION, AnyEvent, EngineStarted, Event, StepFinished, StepScheduled, StepStarted
from pagedcli.line_files import LineReader, has_compressed_name
from pagedcli.printable import plural
from pagedcli.trace.parts import parts


class TraceReader:
    """Iterates over the events of a trace. Afterwards, `notes` lists harmless anomalies.

    The parts of a resumed run (`run.part2.jsonl` ...) follow the first one, with steps, sequences and times renumbered
    continuously; a part given by its own name is read alone. The trace of a killed run is read under the name it had
    while it was written. A torn last line, which a killed run leaves, is dropped with a note.
    Raises: UsageError if the file cannot be read; TraceError, naming file and line, if it is not a trace, has another
    schema version, is damaged, or is implausibly large.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self._lines = LineReader(path, "trace", self.notes)  # of the current part
        self._decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

    @property
    def line_number(self) -> int:
        """Line of the last event in its file, from 1."""
        return self._lines.line_number

    @property
    def place(self) -> str:
        return f"{self._lines.path}:{self.line_number}"

    def __iter__(self) -> Iterator[Event]:
        has_compressed_name(self.path, "trace")  # refuses an invalid name first
        first, *others = parts(self.path) or [self.path]
        if first != self.path:
            self.notes.append(f"{self.path} was never finished: this is {first.name}, as the killed run left it")
        shift = _Shift()
        for event in self._events(first):
            shift.observe(event)
            yield event
        for number, path in enumerate(others, 2):
            shift = shift.for_part(number)
            try:
                for event in self._events(path):
                    if isinstance(event, EngineStarted) and not shift.fits(event):
                        pool = f"{plural(event.num_blocks, 'block')} of {event.block_size}"
                        self.notes.append(
                            f"{path.name} was skipped, it has another pool ({pool}): read it by its own name"
                        )
                        return
                    yield shift.observe(shift.shifted(event))
            except _EmptyFile:
                self.notes.append(f"{path.name} is empty: the run was killed as it began")

    def _events(self, path: Path) -> Iterator[Event]:
        self._lines = LineReader(path, "trace", self.notes)
        for line in self._lines:
            if self.line_number == 1:
                self._check_first(line)
            elif not line.strip():
                raise TraceError(f"{self.place}: an empty line, where each has an event")
            try:
                event = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceError(f"{self.place}: {error}") from error
            if self.line_number > 1 and isinstance(event, EngineStarted):
                raise TraceError(f"{self.place}: engine_started: a second start in one trace file")
            yield event
        if self.line_number == 0:
            raise _EmptyFile(f"{path}: the file is empty, not a trace")

    def _check_first(self, line: bytes) -> None:
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{self.place}: not a trace of pagedcli ({error})") from error
        if head.event != EngineStarted.__struct_config__.tag or head.schema_version is None:
            raise TraceError(f"{self.place}: a trace begins with engine_started, this file with {head.event!r}")
        if head.schema_version != SCHEMA_VERSION:
            raise TraceError(
                f"{self.place}: schema version {head.schema_version}, this pagedcli reads version {SCHEMA_VERSION}",
                hint=f"read it with the version that wrote it: pagedcli {head.pagedcli_version}",
            )


class _EmptyFile(TraceError):
    """An empty file, left by a run that was killed as it began."""


class _Head(msgspec.Struct):
    event: str
    schema_version: int | None = None
    pagedcli_version: str = "?"


class _Shift:
    """Renumbers the events of another part to continue those before it."""

    def __init__(self, number: int = 1, step: int = 0, seq_id: int = 0, last_ns: int | None = None) -> None:
        self._number = number
        self._step = step  # what is added to each
        self._seq_id = seq_id
        self._begin_ns = last_ns  # what the first time of the part becomes
        self._time_ns: int | None = None if last_ns is not None else 0
        self._next_step, self._next_seq_id, self._last_ns = step, seq_id, last_ns or 0
        self._engine: EngineStarted | None = None

    def for_part(self, number: int) -> "_Shift":
        """The shift of the next part."""
        after = _Shift(number, self._next_step, self._next_seq_id, self._last_ns)
        after._engine = self._engine
        return after

    def fits(self, event: EngineStarted) -> bool:
        """Whether a part continues in a pool of the same size."""
        engine = self._engine
        return engine is None or (engine.num_blocks, engine.block_size) == (event.num_blocks, event.block_size)

    def observe(self, event: Event) -> Event:
        """Record the numbers that an event uses."""
        if isinstance(event, EngineStarted):
            self._engine = event
        elif isinstance(event, StepStarted | StepFinished):
            self._last_ns = event.time_ns
        elif isinstance(event, StepScheduled):
            self._next_step = event.step + 1  # the number of a step that was never scheduled is reused
        else:
            self._next_seq_id = max(self._next_seq_id, getattr(event, "seq_id", -1) + 1)
        return event

    def shifted(self, event: Event) -> Event:
        """The event, numbered within the whole run."""
        if isinstance(event, EngineStarted):
            return msgspec.structs.replace(event, part=self._number)
        changes: dict[str, object] = {}
        for name in event.__struct_fields__:
            value = getattr(event, name)
            if name == "step":
                changes[name] = value + self._step
            elif name == "seq_ids":
                changes[name] = tuple(seq_id + self._seq_id for seq_id in value)
            elif name in ("seq_id", "for_seq_id", "parent_seq_id"):
                changes[name] = value + self._seq_id
            elif name == "time_ns":
                if self._time_ns is None:
                    self._time_ns = (self._begin_ns or 0) - value
                changes[name] = value + self._time_ns
        return msgspec.structs.replace(event, **changes)
