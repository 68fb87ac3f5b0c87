"""Recordings of KV event streams: raw frames with their times, as JSON lines, `.jsonl` or `.jsonl.zst`.

The first line is a header. Also reads files without one: lines of {"t", "frames"}, and TensorRT-LLM's events, one JSON
object or list per line. Unless token ids are requested, redact.py removes private data.
"""

import base64
import binascii
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pagedcli import __version__
from pagedcli.errors import TraceError
from pagedcli.kvevents.formats import FORMATS, decode_batch
from pagedcli.kvevents.redact import Redactor
from pagedcli.kvevents.wire import Stored, WireError, split_frames
from pagedcli.line_files import NOT_JSON, LineReader, LineWriter
from pagedcli.process import Closes

FORMAT_VERSION = 1
_FLUSH_S = 0.5


class RecordingHeader(msgspec.Struct, omit_defaults=True):
    """The first line."""

    kv_events: int  # format version
    pagedcli_version: str
    time_s: float  # Unix time at which the recording began
    sources: list[str]  # endpoints
    tokens: bool  # whether token ids and hashes are unredacted


class RecordedMessage(msgspec.Struct, omit_defaults=True):
    """One message."""

    t: float  # seconds since the recording began
    frames: list[str]  # base64
    source: int = 0  # index in the header's sources


class CaptureWriter(Closes):
    """Writes a recording. Flushes twice a second, and when closed.

    Raises: UsageError for a name that is not a recording's, or a file that cannot be written.
    """

    def __init__(self, path: Path, sources: Sequence[str], *, tokens: bool) -> None:
        self._lines = LineWriter(path, "recording")
        self._redactor = None if tokens else Redactor()
        self._encoder = msgspec.json.Encoder()
        self._flushed_s = 0.0
        self._line(RecordingHeader(FORMAT_VERSION, __version__, time.time(), list(sources), tokens))
        self._lines.flush()

    def write(self, frames: Sequence[bytes], time_s: float, source: int = 0) -> None:
        """Record a message; time_s is seconds since the recording began."""
        if self._redactor is not None:
            frames = self._redactor.redacted(frames)
        encoded = [base64.b64encode(frame).decode() for frame in frames]
        self._line(RecordedMessage(round(time_s, 6), encoded, source))
        if time_s >= self._flushed_s + _FLUSH_S:
            self._lines.flush()
            self._flushed_s = time_s

    def _line(self, record: msgspec.Struct) -> None:
        buffer = self._lines.buffer
        self._encoder.encode_into(record, buffer, len(buffer))
        buffer += b"\n"

    def close(self) -> None:
        self._lines.close()


class CaptureReader:
    """Iterates over (frames, seconds or None, source) of a recording. `notes` lists harmless oddities.

    Raises: UsageError if the file cannot be read; TraceError, naming file and line, if it is not a recording of KV
            events, of another format version, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineReader(path, "recording")
        self.notes = self._lines.notes
        self.header = self._read_header()

    @property
    def sources(self) -> list[str]:
        return [self.path.name] if self.header is None else self.header.sources

    @property
    def has_tokens(self) -> bool:
        """Whether token ids are unredacted."""
        return self.header is None or self.header.tokens

    @property
    def place(self) -> str:
        return f"{self.path}:{self._lines.line_number}"

    def __iter__(self) -> Iterator[tuple[list[bytes], float | None, int]]:
        for line in self._lines:
            if self._lines.line_number == 1 and self.header is not None:
                continue
            yield self._message(line)

    def _read_header(self) -> RecordingHeader | None:
        first = next(iter(LineReader(self.path, "recording")), None)
        if first is None:
            raise TraceError(f"{self.path}: the file is empty, not a recording")
        if not is_capture_line(first):
            raise TraceError(f"{self.path}:1: not a recording of KV events")
        if b'"kv_events"' not in first:
            return None
        try:
            header = msgspec.json.decode(first, type=RecordingHeader)
        except NOT_JSON as error:
            raise TraceError(f"{self.path}:1: not a recording of KV events ({error})") from error
        if header.kv_events != FORMAT_VERSION:
            raise TraceError(
                f"{self.path}:1: format version {header.kv_events}, this pagedcli reads version {FORMAT_VERSION}",
                hint=f"read it with the version that wrote it: pagedcli {header.pagedcli_version}",
            )
        return header

    def _message(self, line: bytes) -> tuple[list[bytes], float | None, int]:
        try:
            if b'"frames"' not in line:  # events of TensorRT-LLM
                msgspec.json.decode(line)
                return [line], None, 0
            row = msgspec.json.decode(line, type=RecordedMessage)
            if not math.isfinite(row.t) or row.source < 0:
                raise TraceError(f"{self.place}: a message without a time or a source")
            return [base64.b64decode(frame, validate=True) for frame in row.frames], row.t, row.source
        except (*NOT_JSON, binascii.Error) as error:
            what = f"the recording is damaged: this line is not a message ({error})"
            raise TraceError(
                f"{self.place}: {what}", hint=self._lines.rescue_hint(self._lines.line_number - 1)
            ) from error


def stored_runs(reader: CaptureReader) -> Iterator[tuple[Stored, float | None, int]]:
    """Everything that was stored, in order, with its seconds since the recording began or None, and its source: the
    blocks that were computed, as hits leave no event. Unreadable messages are skipped."""
    for frames, time_s, source in reader:
        try:
            events = decode_batch(split_frames(frames).payload).events
        except WireError:
            continue
        for event in events:
            if isinstance(event, Stored):
                yield event, time_s, source


def is_capture_line(line: bytes) -> bool:
    """Whether a file with this first line contains KV events rather than a trace of our engine."""
    try:
        first: Any = msgspec.json.decode(line)
    except NOT_JSON:
        return False
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, dict):
        return False
    return "kv_events" in first or "frames" in first or any(each.is_line(first) for each in FORMATS.values())


def is_capture(path: Path) -> bool:
    """Whether the file contains KV events. Raises: UsageError if it cannot be read."""
    line = next(iter(LineReader(path, "trace")), None)
    return line is not None and is_capture_line(line)
