"""Decodes batches of events in each engine's format; the event types are in wire.py.

Arrays are read by position, maps by name, with the same checks. Integer hashes have at most 64 bits, byte and text
hashes 256 characters: an event's memory is bounded by its message's.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from pagedcli.kvevents import wire


class Redacts(Protocol):
    """Digests what prompts could be recovered from (kvevents.redact)."""

    def fields(self, fields: dict[Any, Any]) -> dict[Any, Any]: ...
    def tokens_after(self, parent: Any, tokens: Sequence[Any]) -> list[int]: ...
    def number(self, value: Any) -> Any: ...
    def other(self, value: Any) -> Any: ...


_MAX_HASH_BYTES = 256
_MAX_BLOCK_TOKENS = 1 << 24
_MAX_NAMES = 64  # most distinct unknown fields and types per message
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
           "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership",
           "session_id")  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx", "locality", "ownership", "session_id")
_CLEARED = ("medium",)
_MOONCAKE_STORED = ("mooncake_key", "replicas", "model_name", "block_size", "block_hash", "parent_block_hash",
                    "token_ids")  # fmt: skip
_MOONCAKE_UPDATED = ("mooncake_key", "replicas")
_EXTRA = ("extra_keys", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id")
_TRT_EVENT = ("event_id", "data", "window_size", "attention_dp_rank", "layer_group_id", "hash_algo")
_TRT_LEVELS = ("GPU", "CPU")  # the first values of cache_level; further ones are storage

Fields = Mapping[str, Any]

# what a recording without tokens keeps of a field; of any other field only a digest
Redaction = Literal["kept", "hash", "tokens", "media", "each"]
FIELDS: dict[str, Redaction] = {
    **dict.fromkeys(("block_hashes", "parent_block_hash", "block_hash", "parent_hash", "mooncake_key"), "hash"),
    "token_ids": "tokens",
    "replicas": "media",  # the medium, without the address
    "extra_keys": "each",  # salts, adapters and media of each block
    **dict.fromkeys(("type", "block_size", "lora_id", "lora_name", "medium", "group_idx", "kv_cache_spec_kind",
                     "kv_cache_spec_sliding_window", "locality", "ownership", "model_name", "event_id", "window_size",
                     "attention_dp_rank", "layer_group_id", "hash_algo", "cache_level", "priority",
                     "num_blocks_per_cache_level"), "kept"),
}  # fmt: skip


class EventFormat(Protocol):
    """A format of messages: how it is recognised, read and redacted. A new one is a class and its entry in FORMATS."""

    def owns(self, plain: Any) -> bool:
        """Whether a decoded message is of this format; the first one in FORMATS that says so reads it."""

    def is_line(self, record: Fields) -> bool:
        """Whether a file may have such objects as its lines, without a header."""

    def read(self, plain: Any) -> wire.Batch:
        """Decode a message. Raises: WireError if it is none; single events that cannot be read are counted."""

    def redacted(self, plain: Any, redactor: Redacts) -> Any:
        """The message with the same shape, from which no prompt can be recovered."""


def decode_batch(payload: bytes) -> wire.Batch:
    """Decode a payload of any known format. Raises: WireError if it is not a batch; single events that cannot be read
    are counted in the batch."""
    plain = wire.decode_payload(payload)
    return format_of(plain).read(plain)


def format_of(plain: Any) -> "EventFormat":
    """The format of a decoded message. Raises: WireError."""
    found = next((each for each in FORMATS.values() if each.owns(plain)), None)
    if found is None:
        raise wire.WireError("a map without events" if isinstance(plain, dict) else "not a batch of events")
    return found


def _read_event(event: Any, batch: wire.Batch) -> wire.KVEvent | None:
    """The event; None for one of an unknown type, which is noted."""
    if type(event) is dict:
        tag = event.get("type")
        fields = event
    elif type(event) is list and event:
        tag = event[0]
    else:
        raise wire.WireError("neither a map nor an array")
    if type(tag) is not str:
        raise wire.WireError("an event without a type")
    known = _READERS.get(tag)
    if known is None:
        _keep_name(batch.unknown_types, tag)
        return None
    names, read = known
    if type(event) is list:
        fields = dict(zip(names, event[1:], strict=False))
        for place in range(len(names) + 1, min(len(event), len(names) + 8)):
            _keep_name(batch.unknown_fields, f"{tag}[{place}]")
    elif not event.keys() <= _KNOWN_NAMES[tag]:
        for name in event.keys() - _KNOWN_NAMES[tag]:
            _keep_name(batch.unknown_fields, f"{tag}.{name}")
    return read(fields)


def _keep_name(names: list[str], name: str) -> None:
    if len(names) < _MAX_NAMES:
        names.append(name[: wire.MAX_NAME_CHARS])


# ---------------------------------------------------------------------- vLLM and SGLang


def _stored(fields: Fields) -> wire.Stored:
    get = fields.get
    hashes = _hashes(get("block_hashes"))
    parent = get("parent_block_hash")
    if parent is not None:
        _check_hash(parent)
    block_size = get("block_size")
    if type(block_size) is not int or not 0 < block_size <= _MAX_BLOCK_TOKENS:
        raise wire.WireError("block_size")
    lora_name, lora_id = get("lora_name"), get("lora_id")
    lora = _name(lora_name) if lora_name is not None else None if lora_id is None else f"id {_small_int(lora_id)}"
    extra = {name: fields[name] for name in _EXTRA if get(name) is not None}
    tokens = _token_ids(get("token_ids"))
    medium, group = _medium(get("medium")) or "GPU", _group(get("group_idx"))
    return wire.Stored(hashes, parent, block_size, tokens, medium, group, lora, extra)


def _removed(fields: Fields) -> wire.Removed:
    get = fields.get
    extra = {name: fields[name] for name in ("locality", "ownership", "session_id") if get(name) is not None}
    return wire.Removed(_hashes(get("block_hashes")), _medium(get("medium")), _group(get("group_idx")), extra)


def _hashes(value: Any) -> list[wire.BlockHash]:
    if type(value) is not list:
        raise wire.WireError("block_hashes")
    for item in value:
        _check_hash(item)
    return value


def _check_hash(value: Any) -> None:
    kind = type(value)
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return
    elif (kind is bytes or kind is str) and 0 < len(value) <= _MAX_HASH_BYTES:
        return
    raise wire.WireError("a hash")


def _token_ids(value: Any) -> "array[int] | None":
    """Packed; None if absent or not integers, such as the pairs of speculative decoding."""
    if type(value) is not list or not value:
        return None
    try:
        return array("q", value)
    except (TypeError, OverflowError):
        return None


def _medium(value: Any) -> str | None:
    if value is None:
        return None
    return _name(value).upper()


def _group(value: Any) -> str | None:
    return None if value is None else str(_small_int(value))


def _name(value: Any) -> str:
    if type(value) is not str or not value:
        raise wire.WireError("a name")
    return value[: wire.MAX_NAME_CHARS]


def _small_int(value: Any) -> int:
    if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
        raise wire.WireError("a small integer")
    return value


# ---------------------------------------------------------------------- Mooncake Store


def _placed(fields: Fields) -> wire.Placed:
    """Both new objects and updates; empty fields count as absent."""
    get = fields.get
    block_hash, parent, model = get("block_hash") or None, get("parent_block_hash") or None, get("model_name") or None
    for value in (block_hash, parent):
        if value is not None:
            _check_hash(value)
    token_ids = _token_ids(get("token_ids"))
    return wire.Placed(
        _hash_text(get("mooncake_key")),
        _replica_media(get("replicas")),
        None if block_hash is None else str(block_hash),
        None if parent is None else str(parent),
        0 if token_ids is None else len(token_ids),  # block_size is in bytes in this format
        token_ids,
        None if model is None else _name(model),
    )


def _hash_text(value: Any) -> str:
    if type(value) is not str:
        raise wire.WireError("a key")
    _check_hash(value)
    return value


def _replica_media(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > 1024:
        raise wire.WireError("replicas")
    media = []
    for replica in value:
        if type(replica) is not list or not replica:
            raise wire.WireError("a replica")
        media.append(_name(replica[0]).upper())
    return tuple(media)


# ---------------------------------------------------------------------- TensorRT-LLM


def _note_event_id(batch: wire.Batch, event_id: Any) -> None:
    if event_id is None:
        return
    if type(event_id) is not int or not 0 <= event_id < 1 << 63:
        raise wire.WireError("event_id")
    batch.event_ids = (event_id if batch.event_ids is None else batch.event_ids[0], event_id)


def _trt_group(event: Fields) -> str | None:
    if event.get("layer_group_id") is not None:
        return _group(event["layer_group_id"])
    window = event.get("window_size")
    return None if window is None else f"window {_small_int(window)}"


def _trt_created(data: Fields, group: str | None) -> list[wire.KVEvent]:
    counts = data.get("num_blocks_per_cache_level")
    if type(counts) is not list or len(counts) > 64:
        raise wire.WireError("num_blocks_per_cache_level")
    levels: dict[str, int] = {}
    for level, count in enumerate(counts):
        levels[_level(level)] = levels.get(_level(level), 0) + _small_int(count)
    return [wire.Created(levels, group)]


def _trt_stored(data: Fields, group: str | None) -> list[wire.KVEvent]:
    parent, blocks = data.get("parent_hash"), data.get("blocks")
    if parent is not None:
        _check_hash(parent)
    if type(blocks) is not list:
        raise wire.WireError("blocks")
    events: list[wire.KVEvent] = []
    for block in blocks:
        if type(block) is not dict or type(block.get("tokens")) is not list:
            raise wire.WireError("a block")
        block_hash: Any = block.get("block_hash")
        _check_hash(block_hash)
        tokens = [token.get("token_id") if type(token) is dict else None for token in block["tokens"]]
        extra = {name: block[name] for name in ("priority", "mm_keys", "cache_salt") if block.get(name)}
        lora = None if block.get("lora_id") is None else f"id {_small_int(block['lora_id'])}"
        medium = _level(block.get("cache_level", 0))
        events.append(wire.Stored([block_hash], parent, len(tokens), _token_ids(tokens), medium, group, lora, extra))
        parent = block_hash
    return events


def _trt_updated(data: Fields, group: str | None) -> list[wire.KVEvent]:
    _check_hash(data.get("block_hash"))
    level = data.get("cache_level")
    if level is None:  # only the priority changed
        return []
    if type(level) is not dict:
        raise wire.WireError("cache_level")
    return [wire.Moved(data["block_hash"], group, _level(level.get("old_value")), _level(level.get("new_value")))]


def _level(value: Any) -> str:
    level = _small_int(value)
    return _TRT_LEVELS[level] if 0 <= level < len(_TRT_LEVELS) else "DISK"


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Fields], wire.KVEvent]]] = {
    "BlockStored": (_STORED, _stored),
    "BlockRemoved": (_REMOVED, _removed),
    "AllBlocksCleared": (_CLEARED, lambda fields: wire.Cleared(_medium(fields.get("medium")))),
    "BlockStoreEvent": (_MOONCAKE_STORED, _placed),
    "BlockUpdateEvent": (_MOONCAKE_UPDATED, _placed),
    "RemoveAllEvent": ((), lambda _fields: wire.Cleared(None)),
}
FIELD_NAMES = {tag: names for tag, (names, _) in _READERS.items()}  # fields in the order of the array form
_KNOWN_NAMES = {tag: frozenset({"type", *names}) for tag, names in FIELD_NAMES.items()}
_TRT_READERS: dict[str, Callable[[Fields, str | None], list[wire.KVEvent]]] = {
    "created": _trt_created,
    "stored": _trt_stored,
    "removed": lambda data, group: [wire.Removed(_hashes(data.get("block_hashes")), None, group, {})],
    "updated": _trt_updated,
}


class TaggedEvents:
    """vLLM, SGLang and Mooncake Store: [time, events, rank], or the same as a map; each event names its type."""

    def owns(self, plain: Any) -> bool:
        return isinstance(plain, list) or (isinstance(plain, dict) and "events" in plain)

    def is_line(self, record: Fields) -> bool:
        return False

    def read(self, plain: Any) -> wire.Batch:
        if isinstance(plain, dict):
            plain = [plain.get("ts"), plain["events"], plain.get("data_parallel_rank", plain.get("attn_dp_rank"))]
        if len(plain) < 2 or not isinstance(plain[1], list):
            raise wire.WireError("not a batch of events")
        batch = wire.Batch([], wire.checked_time(plain[0]), wire.checked_rank(plain[2] if len(plain) > 2 else None))
        for event in plain[1]:
            try:
                if (known := _read_event(event, batch)) is not None:
                    batch.events.append(known)
            except wire.WireError:
                batch.num_malformed += 1
        return batch

    def redacted(self, plain: Any, redactor: Redacts) -> Any:
        if isinstance(plain, dict):
            return {
                name: self._events(value, redactor) if name == "events" else redactor.number(value)
                for name, value in plain.items()
            }
        if len(plain) < 2:
            return []
        rest = [redactor.number(value) for value in plain[2:]]
        return [redactor.number(plain[0]), self._events(plain[1], redactor), *rest]

    def _events(self, events: Any, redactor: Redacts) -> list[Any]:
        return [self._event(event, redactor) for event in events] if isinstance(events, list) else []

    def _event(self, event: Any, redactor: Redacts) -> Any:
        if isinstance(event, dict):
            return redactor.fields(event)
        if not isinstance(event, list) or not event or not isinstance(event[0], str):
            return None
        names = ("type", *FIELD_NAMES.get(event[0], ()))
        named = dict(zip(names, event, strict=False))
        return [*redactor.fields(named).values(), *(redactor.other(value) for value in event[len(names) :])]


class TensorRTEvents:
    """TensorRT-LLM: one map per event, or a list of them."""

    def owns(self, plain: Any) -> bool:
        if isinstance(plain, dict):
            return "data" in plain
        return isinstance(plain, list) and all(isinstance(event, dict) for event in plain)

    def is_line(self, record: Fields) -> bool:
        return "data" in record

    def read(self, plain: Any) -> wire.Batch:
        batch, ranks = wire.Batch([]), set()
        for event in [plain] if isinstance(plain, dict) else plain:
            try:
                data = event.get("data")
                if type(data) is not dict or type(data.get("type")) is not str:
                    raise wire.WireError("an event without a type")
                read = _TRT_READERS.get(data["type"])
                if read is None:
                    _keep_name(batch.unknown_types, data["type"])
                    continue
                for name in event.keys() - set(_TRT_EVENT):
                    _keep_name(batch.unknown_fields, name)
                _note_event_id(batch, event.get("event_id"))
                ranks.add(wire.checked_rank(event.get("attention_dp_rank")))
                batch.events += read(data, _trt_group(event))
            except wire.WireError:
                batch.num_malformed += 1
        if len(ranks) == 1:
            (batch.rank,) = ranks
        elif ranks:  # each rank numbers its own events
            batch.event_ids = None
        return batch

    def redacted(self, plain: Any, redactor: Redacts) -> Any:
        if isinstance(plain, list):
            return [self.redacted(event, redactor) for event in plain]
        data = plain.get("data")
        redacted = self._data(data, redactor) if isinstance(data, dict) else None
        return {**redactor.fields(plain), "data": redacted}

    @staticmethod
    def _data(data: dict[Any, Any], redactor: Redacts) -> dict[Any, Any]:
        redacted = redactor.fields({name: value for name, value in data.items() if name != "blocks"})
        parent, blocks = data.get("parent_hash"), data.get("blocks")
        if isinstance(blocks, list):
            redacted["blocks"] = []
            for block in blocks:
                if not isinstance(block, dict):
                    continue
                kept = redactor.fields({name: value for name, value in block.items() if name != "tokens"})
                if isinstance(tokens := block.get("tokens"), list):
                    ids = [token.get("token_id") if isinstance(token, dict) else None for token in tokens]
                    digests = redactor.tokens_after(parent, ids)
                    kept["tokens"] = [{"token_id": digest} for digest in digests]
                redacted["blocks"].append(kept)
                parent = block.get("block_hash")
        return redacted


FORMATS: dict[str, EventFormat] = {"tensorrt-llm": TensorRTEvents(), "vllm": TaggedEvents()}
