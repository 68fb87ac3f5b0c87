"""Trace formats of others: one decoder per format, found by the keys of the first line.

A line that is not a request of the format is counted, with its place and the reason; it never ends the run.
"""

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec

from pagedcli.errors import TraceError, UsageError
from pagedcli.line_files import ZSTD_MAGIC, LineReader, zstd
from pagedcli.printable import plural
from pagedcli.simulation.requests import MAX_TOKENS, Chains, Request, Requests

_GZIP = b"\x1f\x8b"


class TraceLines(LineReader):
    """The lines of a trace, or of `what` else. The compression is that of the content, not of the name; - is stdin.

    Raises: UsageError if the file cannot be read; TraceError if it is damaged, or decompresses to far more than a
            trace does.
    """

    def __init__(self, name: str, what: str = "trace") -> None:
        super().__init__(Path("/dev/stdin" if name == "-" else name), what)

    def _opener(self, first: bytes) -> Callable[[Any], Any] | None:
        if first.startswith(_GZIP):
            return lambda file: gzip.GzipFile(fileobj=file)
        return zstd.ZstdFile if first.startswith(ZSTD_MAGIC) else None

    def rescue_hint(self, num_lines: int) -> str | None:
        """None: the file is not ours, and may have any name."""
        return None


Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
PromptLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
HashSize = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
HashIds = list[int | str]
TraceSeconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]

MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16  # tokens per hash, which the lines do not name


class TraceRow(msgspec.Struct, kw_only=True):
    """A decoded line of one format. The fields are Mooncake's; a new format is a struct that declares those again which
    its lines call otherwise, with `rename`, and its entry in FORMATS."""

    keys: ClassVar[frozenset[str]]  # a line with these is of this format
    default_hash_size: ClassVar[int | None] = None  # tokens per hash; None: the lines say
    ticks_per_s: ClassVar[int] = 1000
    input_length: PromptLength
    hash_ids: HashIds
    output_length: Length | None = None
    block_size: HashSize | None = None  # tokens per hash
    timestamp: TraceSeconds | None = None

    @classmethod
    def record(cls, document: dict[str, Any]) -> dict[str, Any]:
        """The record in a line, which may be wrapped."""
        return document

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self | None:
        """The row of a record; None: it is no request, and is skipped."""
        return msgspec.convert(record, cls)


class Mooncake(TraceRow):
    """{"timestamp": ms, "input_length", "output_length", "hash_ids"}; also Dynamo's and AIPerf's files of this kind."""

    keys = frozenset(("input_length", "hash_ids", "output_length"))
    default_hash_size = MOONCAKE_TOKENS


class Bailian(TraceRow):
    """Mooncake's keys and {"chat_id", "parent_chat_id", "turn"}; times are in seconds."""

    keys = frozenset(("input_length", "hash_ids", "chat_id"))
    default_hash_size = BAILIAN_TOKENS
    ticks_per_s = 1


class KVCacheSimulator(TraceRow):
    """{"block_size", "hash_ids", "input_length"}, the format of kvcache-simulator."""

    keys = frozenset(("input_length", "hash_ids"))


class _Replay(msgspec.Struct):
    trace_block_size: HashSize
    input_length: PromptLength
    input_sequence_hashes: HashIds


class _DynamoRequest(msgspec.Struct):
    replay: _Replay
    output_tokens: Length | None = None
    request_received_ms: TraceSeconds | None = None


class _DynamoRecord(msgspec.Struct):
    request: _DynamoRequest


class Dynamo(TraceRow):
    """A request_end record of dynamo.request.trace.v1; other records of the stream are skipped."""

    keys = frozenset(("schema", "event_type"))

    @classmethod
    def record(cls, document: dict[str, Any]) -> dict[str, Any]:
        inner = document.get("event")
        return inner if isinstance(inner, dict) and "schema" in inner else document

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self | None:
        if record.get("event_type") != "request_end":
            return None
        request = msgspec.convert(record, _DynamoRecord).request
        return cls(
            input_length=request.replay.input_length,
            hash_ids=request.replay.input_sequence_hashes,
            output_length=request.output_tokens,
            block_size=request.replay.trace_block_size,
            timestamp=request.request_received_ms,
        )


class LMCache(
    TraceRow, rename={"input_length": "seq_len", "hash_ids": "chunk_hashes", "block_size": "chunk_size"}, kw_only=True
):
    """A lookup of LMCache's lookup_hashes_*.jsonl: {"chunk_hashes", "chunk_size", "seq_len", "timestamp"}; only full
    chunks have a hash."""

    keys = frozenset(("chunk_hashes", "seq_len"))
    ticks_per_s = 1
    input_length: PromptLength
    hash_ids: HashIds
    block_size: HashSize


# the first whose keys a line has
FORMATS: dict[str, type[TraceRow]] = {
    "dynamo": Dynamo,
    "lmcache": LMCache,
    "bailian": Bailian,
    "mooncake": Mooncake,
    "kvcache-simulator": KVCacheSimulator,
}


def find_format(document: object) -> str | None:
    """The format of a line, by its keys; None: unknown."""
    if not isinstance(document, dict):
        return None
    return next((name for name, row in FORMATS.items() if row.keys <= row.record(document).keys()), None)


def format_names() -> tuple[str, ...]:
    """All values of --trace-format."""
    return (*FORMATS, "prompts", "pagedcli", "kv-events")


def read_traces(names: Iterable[str], format_name: str | None = None, hash_size: int | None = None) -> Requests:
    """The requests of trace files of one format. `hash_size` (tokens per hash) overrides what the lines say.

    Raises: UsageError or TraceError if a file cannot be read, or holds no request.
    """
    reader = _Reader(format_name, hash_size)
    for name in names:
        reader.read(TraceLines(name))
    return reader.finish()


class _Reader:
    def __init__(self, format_name: str | None, given_hash_size: int | None) -> None:
        self.format_name = format_name
        self.given_hash_size = given_hash_size
        self.workload = Requests()
        self._chains = Chains()

    def read(self, lines: TraceLines) -> None:
        place = ""
        for line in lines:
            place = f"{lines.path}:{lines.line_number}"
            line = line.strip().removeprefix(b"\xef\xbb\xbf")
            if not line:
                continue
            try:
                request = self._request(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, _BadRow) as error:
                self.workload.add_bad(place, str(error))
                continue
            if request is not None:
                self.workload.requests.append(request)
        if not place:
            raise TraceError(lines.why_empty)
        self.workload.notes += [f"{lines.path}: {note}" for note in lines.notes]

    def _request(self, line: bytes) -> Request | None:
        """The request of a line; None for a record of another kind."""
        document = msgspec.json.decode(line)
        if self.format_name is None:
            self.format_name = find_format(document)
        if self.format_name is None:
            raise _BadRow("none of the known formats has these keys")
        if not isinstance(document, dict):
            raise _BadRow(f"expected an object, got {type(document).__name__}")
        kind = FORMATS[self.format_name]
        row = kind.of(kind.record(document))
        return None if row is None else self._made(row)

    def _made(self, row: TraceRow) -> Request:
        num_prompt, hashes = row.input_length, row.hash_ids
        size = self.given_hash_size or row.block_size or row.default_hash_size
        if size is None:
            raise _BadRow("the line does not say how many tokens a hash covers (see --hash-size)")
        if self.workload.hash_size not in (None, size):
            raise _BadRow(f"{plural(size, 'token')} per hash, earlier lines have {self.workload.hash_size}")
        if not num_prompt // size <= len(hashes) <= -(-num_prompt // size):
            covered = len(hashes) * size
            raise _BadRow(
                f"{plural(len(hashes), 'hash')} of {plural(size, 'token')} cover {covered:,} tokens, the prompt "
                f"has {num_prompt:,}"
            )
        self.workload.hash_size = size
        index = str(len(self.workload.requests))
        time_s = None if row.timestamp is None else row.timestamp / row.ticks_per_s
        return Request(index, time_s, num_prompt, row.output_length, self._chains.numbers(hashes))

    def finish(self) -> Requests:
        workload = self.workload
        if not workload.requests:
            raise UsageError(
                f"no line is a request of a known trace format{workload.first_bad}",
                hint=f"formats: {', '.join(FORMATS)}, prompt files, and traces and recordings of pagedcli",
            )
        workload.format = self.format_name or ""
        workload.finish()
        return workload


class _BadRow(Exception):
    """A line that decodes, but is not a request."""
