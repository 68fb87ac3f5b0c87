"""Writes a trace file: one JSON object per event and line, `.jsonl` or `.jsonl.zst`. Line n is event n.

Used as an engine's observer. Nothing is written before the engine has started, so a refused run leaves no file.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec

from pagedcli.errors import TraceError, UsageError
from pagedcli.events import Event, StepFinished
from pagedcli.files import PendingFile, is_in_use, is_stream
from pagedcli.line_files import LineWriter, has_compressed_name
from pagedcli.trace.parts import part_path, parts, recording_path

_COMPRESS_EVERY_NS = 50_000_000  # compressing step by step took 5 % of the throughput of a small model


class TraceWriter:
    """Writes each event it is called with. A step's events are on disk when it ends; in a compressed file, at the end
    of a step at least 50 ms after the last write.

    The file is `run.recording.jsonl` until `close`, then `run.jsonl`; a killed run leaves it under the first name,
    readable. `resume` writes the next part, `run.part2.jsonl`, next to what an earlier run has left. `overwrite`
    removes what is there when the engine has started. A file that cannot be written ends the recording, not the run:
    `close` says so.
    Raises: UsageError for a name that is not a trace's, a missing folder, or a trace that already exists.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.num_events = 0
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
        existing = [] if is_stream(path) or overwrite else parts(path)
        if existing and not resume:
            raise UsageError(
                f"--record: {existing[0]} already exists",
                hint="use --overwrite, another name, or --resume to continue that run in a new part",
            )
        self.path = part_path(path, len(existing) + 1)  # of the finished trace

    def __call__(self, event: Event) -> None:
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
            elif type(event) is StepFinished and start_ns >= self._flushed_ns + self._flush_every_ns:
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
            hint = f"what was recorded before is in {left}" if left.exists() else "the rows are not affected"
            raise TraceError(
                f"cannot write the trace {self.path}: {problem.strerror or problem}", hint=hint
            ) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
