"""Removes prompts from recorded messages: equal values stay equal, and none can be recovered.

A token id becomes a digest of itself, everything before it in its block, and the block's parent: two blocks agree up
to their first different token, and a frequent token is not recognisable elsewhere. Hashes are digested too: with a
known hash function they would confirm a guessed prompt. The key exists only in memory.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from pagedcli.kvevents.formats import FIELD_NAMES
from pagedcli.kvevents.wire import WireError, decode_payload, split_frames

_HASHES = {"block_hashes", "parent_block_hash", "block_hash", "parent_hash", "mooncake_key"}
_KEPT = {"type", "block_size", "lora_id", "lora_name", "medium", "group_idx", "kv_cache_spec_kind",
         "kv_cache_spec_sliding_window", "locality", "ownership", "model_name", "event_id", "window_size",
         "attention_dp_rank", "layer_group_id", "hash_algo", "cache_level", "priority",
         "num_blocks_per_cache_level"}  # fmt: skip


class Redactor:
    """Rewrites messages. Equal values give equal digests only within one Redactor."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def redacted(self, frames: Sequence[bytes]) -> list[bytes]:
        """The frames, with a redacted payload of the same shape. An unreadable payload is replaced by its digest."""
        try:
            payload = split_frames(frames).payload
            plain = decode_payload(payload)
        except WireError:
            return [*(frame[:64] for frame in frames[:-1][:5]), b"\xc1" + self._digest(b"".join(frames))]
        redacted = self._batch(plain)
        as_json = payload[:1] in (b"{", b"[")
        encode = msgspec.json.encode if as_json else msgspec.msgpack.encode
        return [*frames[:-1], encode(redacted)]

    def _batch(self, plain: Any) -> Any:
        if isinstance(plain, dict) and "events" in plain:
            return {name: self._events(value) if name == "events" else _number(value) for name, value in plain.items()}
        if isinstance(plain, dict):
            return self._trt(plain)
        if isinstance(plain, list) and plain and all(isinstance(event, dict) for event in plain):
            return [self._trt(event) for event in plain]
        if isinstance(plain, list) and len(plain) > 1:
            return [_number(plain[0]), self._events(plain[1]), *(_number(value) for value in plain[2:])]
        return []

    def _events(self, events: Any) -> list[Any]:
        return [self._event(event) for event in events] if isinstance(events, list) else []

    def _event(self, event: Any) -> Any:
        if isinstance(event, dict):
            return self._fields(event)
        if not isinstance(event, list) or not event or not isinstance(event[0], str):
            return None
        names = ("type", *FIELD_NAMES.get(event[0], ()))
        named = dict(zip(names, event, strict=False))
        return [*self._fields(named).values(), *(self._other(value) for value in event[len(names) :])]

    def _fields(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        for name, value in fields.items():
            if name == "token_ids":
                redacted[name] = self._token_ids(value, fields)
            elif name in _HASHES:
                redacted[name] = self._hashes(value)
            elif name == "replicas":  # the medium, without the address
                redacted[name] = [r[:1] for r in value if isinstance(r, list)] if isinstance(value, list) else []
            else:
                redacted[name] = value if name in _KEPT else self._other(value)
        return redacted

    def _token_ids(self, value: Any, fields: dict[Any, Any]) -> Any:
        hashes, block_size = fields.get("block_hashes"), fields.get("block_size")
        if not isinstance(value, list):
            return None
        if not isinstance(hashes, list) or not isinstance(block_size, int) or len(value) != len(hashes) * block_size:
            return self._tokens_after(fields.get("parent_block_hash"), value)
        redacted: list[int] = []
        for place, parent in enumerate([fields.get("parent_block_hash"), *hashes[:-1]]):
            redacted += self._tokens_after(parent, value[place * block_size : (place + 1) * block_size])
        return redacted

    def _tokens_after(self, parent: Any, tokens: Sequence[Any]) -> list[int]:
        state = blake2b(repr(parent).encode(), digest_size=4, key=self._key)
        digests = []
        for token in tokens:
            state.update(b"%d," % token if type(token) is int else repr(token).encode())
            digests.append(int.from_bytes(state.digest(), "big"))
        return digests

    def _hashes(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._hashes(item) for item in value]
        if value is None or value == "":
            return value
        digest = self._digest(repr(value).encode())
        if isinstance(value, bytes):
            return digest
        return digest.hex() if isinstance(value, str) else int.from_bytes(digest, "big")

    def _trt(self, event: dict[Any, Any]) -> dict[Any, Any]:
        data = event.get("data")
        return {**self._fields(event), "data": self._trt_data(data) if isinstance(data, dict) else None}

    def _trt_data(self, data: dict[Any, Any]) -> dict[Any, Any]:
        redacted = self._fields({name: value for name, value in data.items() if name != "blocks"})
        parent, blocks = data.get("parent_hash"), data.get("blocks")
        if isinstance(blocks, list):
            redacted["blocks"] = []
            for block in blocks:
                if isinstance(block, dict):
                    redacted["blocks"].append(self._trt_block(block, parent))
                    parent = block.get("block_hash")
        return redacted

    def _trt_block(self, block: dict[Any, Any], parent: Any) -> dict[Any, Any]:
        tokens = block.get("tokens")
        redacted = self._fields({name: value for name, value in block.items() if name != "tokens"})
        if isinstance(tokens, list):
            ids = [token.get("token_id") if isinstance(token, dict) else None for token in tokens]
            redacted["tokens"] = [{"token_id": digest} for digest in self._tokens_after(parent, ids)]
        return redacted

    def _other(self, value: Any) -> Any:
        """Digest fields of arbitrary content; absent ones stay absent."""
        return None if value is None or value == [] else self._digest(repr(value).encode()).hex()

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=8, key=self._key).digest()


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else None
