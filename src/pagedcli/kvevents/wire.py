"""A few event types for the KV event messages of all engines.

vLLM and SGLang (map and array form), TensorRT-LLM and Mooncake Store; formats.py decodes single events. Network input
is untrusted: sizes and depth are bounded here, and anything beyond them raises WireError.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_PAYLOAD_BYTES = 16 << 20  # about twice a step that stores 200,000 tokens in blocks of one token
MAX_NAME_CHARS = 200
END_OF_REPLAY = 2**64 - 1  # the number of the message that ends a replay

BlockHash = int | bytes | str


class WireError(ValueError):
    """A message or an event in no known format. The error text contains none of its content."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one chain became resident: each is the parent of the next."""

    hashes: list[BlockHash]
    parent: BlockHash | None  # parent of the first block; None: it begins a prompt
    block_size: int  # tokens per block
    token_ids: "array[int] | None"  # int64, of all blocks; None if absent or not integers
    medium: str  # upper case: GPU, CPU, DISK ...
    group: str | None  # cache group
    lora: str | None
    extra: dict[str, Any]  # other fields that were present


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One copy of each of these blocks was removed."""

    hashes: list[BlockHash]
    medium: str | None  # None: the event does not say
    group: str | None
    extra: dict[str, Any]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Everything was removed, or everything on one medium."""

    medium: str | None


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A copy of a block moved to another medium."""

    hash: BlockHash
    group: str | None
    old_medium: str
    new_medium: str


class Created(msgspec.Struct, frozen=True, gc=False):
    """A cache was created, empty, with this many blocks per medium."""

    num_blocks: dict[str, int]
    group: str | None


class Placed(msgspec.Struct, frozen=True, gc=False):
    """An object of a store is now on exactly these media. Only its first event describes its content."""

    key: str
    media: tuple[str, ...]  # one entry per replica
    hash: str | None = None
    parent: str | None = None
    block_size: int = 0  # tokens
    token_ids: "array[int] | None" = None
    model: str | None = None


KVEvent = Stored | Removed | Cleared | Moved | Created | Placed


@dataclass(slots=True)
class Batch:
    """One message. Unreadable events are counted, the others kept in order."""

    events: list[KVEvent]
    time_s: float | None = None  # publisher's clock
    rank: int | None = None  # data-parallel rank
    event_ids: tuple[int, int] | None = None  # first and last, of a format that numbers events, not messages
    num_malformed: int = 0  # events
    unknown_types: list[str] = field(default_factory=list)
    unknown_fields: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frames:
    """The parsed frames of one message."""

    topic: bytes
    seq: int | None  # None: the transport does not number messages
    payload: bytes


def split_frames(frames: Sequence[bytes]) -> Frames:
    """Split a multipart message: [topic, seq, payload], a replay's [seq, payload] or [topic, seq, payload] after any
    routing frames, or the payload alone. Raises: WireError."""
    if not 1 <= len(frames) <= 6:
        raise WireError(f"a message of {len(frames)} frames")
    if len(frames[-1]) > MAX_PAYLOAD_BYTES:
        raise WireError(f"a payload of {len(frames[-1]):,} bytes; the limit is {MAX_PAYLOAD_BYTES:,}")
    if len(frames) == 1:
        return Frames(b"", None, frames[0])
    if len(frames[-2]) != 8:
        raise WireError("a sequence number that is not 8 bytes")
    topic = frames[-3] if len(frames) > 2 else b""
    if len(topic) > MAX_NAME_CHARS:
        raise WireError("a topic that is too long")
    return Frames(topic, int.from_bytes(frames[-2], "big"), frames[-1])


def decode_payload(payload: bytes) -> Any:
    """Decode a payload into plain objects. JSON and msgpack differ in the first byte. Raises: WireError."""
    try:
        if payload[:1] in (b"{", b"["):  # msgpack has the numbers 123 and 91 there, no batches
            return msgspec.json.decode(payload)
        return msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"not msgpack or JSON: {type(error).__name__}") from error


def checked_time(value: Any) -> float | None:
    """A time in seconds; None if absent. Raises: WireError."""
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e12:
        raise WireError("an invalid time")
    return float(value)


def checked_rank(value: Any) -> int | None:
    """A rank; None if absent. Raises: WireError."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << 20:
        raise WireError("an invalid rank")
    return value
