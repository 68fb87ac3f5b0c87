"""Trace files, their names, writer and reader: one JSON object per event, `.jsonl` or `.jsonl.zst`; line n is event n.

A run is recorded as `run.recording.jsonl`, which becomes `run.jsonl` at its end; what a resumed run adds is
`run.part2.jsonl`. Used by everything that records a run or reads one.
"""

import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

import pagedcli.events as ev
from pagedcli.errors import TraceError, UsageError
from pagedcli.files import TRACE, PendingFile, check_new, is_in_use, is_stream, what_is
from pagedcli.line_files import LineReader, LineWriter, has_compressed_name, is_copy
from pagedcli.printable import plural

_log = logging.getLogger("pagedcli")


def part_path(path: Path, number: int) -> Path:
    """Path of the n-th part, from 1: `run.jsonl`, `run.part2.jsonl` ..."""
    name, suffix = _split(path)
    return path if number == 1 else path.with_name(f"{name}.part{number}{suffix}")


def recording_path(path: Path) -> Path:
    """The name of a part while it is written; a killed run leaves its incomplete trace under it."""
    name, suffix = _split(path)
    return path.with_name(f"{name}.recording{suffix}")


def parts(path: Path) -> list[Path]:
    """The existing parts, in order; an unfinished one under the name it had while it was written."""
    found: list[Path] = []
    while True:
        part = part_path(path, len(found) + 1)
        existing = [name for name in (part, recording_path(part)) if name.exists()]
        if not existing:
            return found
        found.append(existing[0])


def _split(path: Path) -> tuple[str, str]:
    suffix = ".jsonl.zst" if has_compressed_name(path, "trace") else ".jsonl"
    return path.name.removesuffix(suffix), suffix


_COMPRESS_EVERY_NS = 50_000_000  # compressing step by step took 5 % of the throughput of a small model


class TraceWriter:
    """Writes each event it is called with. A step's events are on disk when it ends; in a compressed file, at the end
    of a step at least 50 ms after the last write.

    The file is `run.recording.jsonl` until `close`, then `run.jsonl`; a killed run leaves it under the first name,
    readable. `resume` writes the next part, `run.part2.jsonl`, next to what an earlier run has left. `overwrite`
    removes what is there when the engine has started. A file that cannot be written ends the recording, not the run:
    `close` says so, with `unwritten_hint` if nothing was recorded.
    Raises: UsageError for a name that is not a trace's, a missing folder, or a trace that already exists.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        resume: bool = False,
        unwritten_hint: str = "the rows are not affected",
    ) -> None:
        self.num_events = 0
        self._unwritten_hint = unwritten_hint
        self.observer_ns = 0  # time spent here
        self._flush_every_ns = _COMPRESS_EVERY_NS if has_compressed_name(path, "trace") else 0
        self._encoder = msgspec.json.Encoder()
        self._file: PendingFile | None = None
        self._lines: LineWriter | None = None  # None: before the first event, and after the end
        self._flushed_ns = 0
        self._problem: OSError | None = None
        self._replaced = parts(path) if overwrite and not is_stream(path) else []
        if not path.parent.is_dir():
            raise UsageError(f"cannot write the trace {path}: there is no folder {path.parent}")
        for part in self._replaced:
            check_new("--record", part, kind=TRACE, overwrite=True)
        existing = [] if is_stream(path) or overwrite else parts(path)
        if existing and not resume:
            raise UsageError(
                f"--record: {existing[0]} already exists",
                hint="use --overwrite, another name, or --resume to continue that run in a new part",
            )
        self.path = part_path(path, len(existing) + 1)  # path of the finished trace

    def __call__(self, event: ev.Event) -> None:
        start_ns = time.perf_counter_ns()
        if self.num_events == 0:
            self._open()
        self.num_events += 1
        if self._lines is not None:
            buffer = self._lines.buffer
            self._encoder.encode_into(event, buffer, len(buffer))
            buffer += b"\n"
            if self.num_events == 1:
                self.flush()
            elif type(event) is ev.StepFinished and start_ns >= self._flushed_ns + self._flush_every_ns:
                self.flush()
                self._flushed_ns = time.perf_counter_ns()
        self.observer_ns += time.perf_counter_ns() - start_ns

    def _open(self) -> None:
        """Raises: UsageError if another run is recording under this name."""
        recording = recording_path(self.path)
        if is_in_use(recording):
            raise UsageError(f"--record: another run is writing {recording} right now", hint="use another name")
        with self._noting_problems():
            for part in self._replaced:
                part.unlink(missing_ok=True)
            self._file = PendingFile(self.path, overwrite=False, temporary=recording_path(self.path))
            self._lines = LineWriter(self.path, "trace", self._file.file)

    def flush(self) -> None:
        """Flush everything so far, readable even if the process then dies."""
        if self._lines is not None:
            with self._noting_problems():
                self._lines.flush()

    @contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problem, self._lines = error, None

    def close(self) -> None:
        """Give the trace its final name. Raises: TraceError if it could not be written completely."""
        if self._lines is not None:
            with self._noting_problems():
                self._lines.finish()
                assert self._file is not None, "lines go to a file"
                self._file.commit()
        self._lines, problem, self._problem = None, self._problem, None
        if problem is not None:
            left = recording_path(self.path)
            hint = f"what was recorded before is in {left}" if left.exists() else self._unwritten_hint
            raise TraceError(
                f"cannot write the trace {self.path}: {problem.strerror or problem}", hint=hint
            ) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except TraceError as error:
            if error_type is None:
                raise
            _log.warning("%s", error.message)  # what ended the run matters more, such as rows on the same full disk


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
        self._lines = LineReader(path, "trace", self.notes)  # lines of the current part
        self._decoder: msgspec.json.Decoder[ev.AnyEvent] = msgspec.json.Decoder(ev.AnyEvent)

    @property
    def line_number(self) -> int:
        """Line of the last event in its file, from 1."""
        return self._lines.line_number

    @property
    def place(self) -> str:
        return f"{self._lines.path}:{self.line_number}"

    def __iter__(self) -> Iterator[ev.Event]:
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
                    if isinstance(event, ev.EngineStarted) and not shift.fits(event):
                        pool = f"{plural(event.num_blocks, 'block')} of {event.block_size}"
                        self.notes.append(
                            f"{path.name} was skipped, it has another pool ({pool}): read it by its own name"
                        )
                        return
                    yield shift.observe(shift.shifted(event))
            except _EmptyFile:
                self.notes.append(f"{path.name} is empty: the run was killed as it began")

    def _events(self, path: Path) -> Iterator[ev.Event]:
        self._lines = LineReader(path, "trace", self.notes)
        for line in self._lines:
            if self.line_number == 1:
                self._check_first(line)
            elif not line.strip():
                raise TraceError(f"{self.place}: an empty line, where each has an event")
            try:
                event = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise self._damage(error) from error
            if self.line_number > 1 and isinstance(event, ev.EngineStarted):
                raise TraceError(f"{self.place}: engine_started: a second start in one trace file")
            yield event
        if self.line_number == 0:
            raise _EmptyFile(self._lines.why_empty)

    def _check_first(self, line: bytes) -> None:
        try:
            head = msgspec.json.decode(line, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            found = what_is(self._lines.path)
            damage = f"not a trace of pagedcli, or its first line is damaged ({error})"
            what = damage if found in (None, TRACE.name) else f"not a trace, but {found}"
            raise TraceError(f"{self.place}: {what}", hint=self._record_again()) from error
        starts = head.event == ev.EngineStarted.__struct_config__.tag
        if not starts or head.schema_version is None:
            other = "one without schema_version" if starts else repr(head.event)
            what = f"a trace begins with engine_started, this file with {other}"
            raise TraceError(f"{self.place}: {what}", hint=self._record_again())
        if not ev.OLDEST_SCHEMA <= head.schema_version <= ev.SCHEMA_VERSION:
            is_older = head.schema_version < ev.OLDEST_SCHEMA
            age, writer = "older" if is_older else "newer", f"pagedcli {head.pagedcli_version}"
            raise TraceError(
                f"{self.place}: the trace's format (schema {head.schema_version}) is {age} than the one that this "
                f"version reads ({ev.SCHEMA_VERSION})",
                hint=self._record_again() if is_older else f"read it with {writer}, which wrote it, or a later version",
            )

    def _damage(self, error: Exception) -> TraceError:
        """The error for a line that cannot be decoded."""
        what = f"the trace is damaged: this line is no event ({error})"
        return TraceError(f"{self.place}: {what}", hint=self._lines.rescue_hint(self.line_number - 1))

    def _record_again(self) -> str:
        """What to do about the file, which is replaced only if it is a trace."""
        if not TRACE.has(self._lines.path) or is_copy(self.path):
            return "a trace is recorded by: pagedcli generate PROMPTS.jsonl --record run.jsonl.zst"
        return f"record it again: pagedcli generate PROMPTS.jsonl --record {shlex.quote(str(self.path))} --overwrite"


class _EmptyFile(TraceError):
    """A file without a whole line, left by a run that was killed as it began."""


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
        self._engine: ev.EngineStarted | None = None

    def for_part(self, number: int) -> "_Shift":
        """The shift of the next part."""
        after = _Shift(number, self._next_step, self._next_seq_id, self._last_ns)
        after._engine = self._engine
        return after

    def fits(self, event: ev.EngineStarted) -> bool:
        """Whether a part continues in a pool of the same size, for as many groups of layers."""
        first, other = ((each.num_blocks, each.block_size, len(each.groups)) for each in (self._engine or event, event))
        return first == other

    def observe(self, event: ev.Event) -> ev.Event:
        """Record the numbers that an event uses."""
        if isinstance(event, ev.EngineStarted):
            self._engine = event
        elif isinstance(event, ev.StepStarted | ev.StepFinished):
            self._last_ns = event.time_ns
        elif isinstance(event, ev.StepScheduled):
            self._next_step = event.step + 1  # the number of a step that was never scheduled is reused
        else:
            self._next_seq_id = max(self._next_seq_id, getattr(event, "seq_id", -1) + 1)
        return event

    def shifted(self, event: ev.Event) -> ev.Event:
        """The event, numbered within the whole run."""
        if isinstance(event, ev.EngineStarted):
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
