"""Removes prompts from recorded messages: equal values stay equal, and none can be recovered.

A token id becomes a digest of itself, everything before it in its block, and the block's parent: two blocks agree up
to their first different token, and a frequent token is not recognisable elsewhere. Hashes are digested too: with a
known hash function they would confirm a guessed prompt. So are topics, which a server may name after its users. The
key exists only in memory.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from pagedcli.kvevents.formats import FIELDS, format_of
from pagedcli.kvevents.wire import WireError, decode_payload, split_frames

_SEQUENCE_BYTES = 8


class Redactor:
    """Rewrites messages. Equal values give equal digests only within one Redactor, which has a key of its own."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def redacted(self, frames: Sequence[bytes]) -> list[bytes]:
        """The frames, with a redacted payload of the same shape. An unreadable payload is replaced by its digest."""
        try:
            payload = split_frames(frames).payload
            plain = decode_payload(payload)
            message_format = format_of(plain)
        except WireError:
            return [*self._envelope(frames[:6]), b"\xc1" + self._digest(b"".join(frames))]
        redacted = message_format.redacted(plain, self)
        as_json = payload[:1] in (b"{", b"[")
        encode = msgspec.json.encode if as_json else msgspec.msgpack.encode
        return [*self._envelope(frames), encode(redacted)]

    def _envelope(self, frames: Sequence[bytes]) -> list[bytes]:
        """All frames but the payload: the sequence number as it is, the topic and routing as digests."""
        is_number = len(frames) > 1 and len(frames[-2]) == _SEQUENCE_BYTES
        names = frames[: -2 if is_number else -1]
        return [self._digest(name).hex().encode() if name else name for name in names] + list(frames[len(names) : -1])

    def fields(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        """Each field as FIELDS says; those it does not name are digested."""
        redacted: dict[Any, Any] = {}
        for name, value in fields.items():
            match FIELDS.get(name):
                case "kept":
                    redacted[name] = value
                case "hash":
                    redacted[name] = self.hashes(value)
                case "tokens":
                    redacted[name] = self._token_ids(value, fields)
                case "media":
                    redacted[name] = [r[:1] for r in value if isinstance(r, list)] if isinstance(value, list) else []
                case "each":
                    redacted[name] = [self.other(item) for item in value] if isinstance(value, list) else None
                case None:
                    redacted[name] = self.other(value)
        return redacted

    def _token_ids(self, value: Any, fields: dict[Any, Any]) -> Any:
        hashes, block_size = fields.get("block_hashes"), fields.get("block_size")
        if not isinstance(value, list):
            return None
        if not isinstance(hashes, list) or not isinstance(block_size, int) or len(value) != len(hashes) * block_size:
            return self.tokens_after(fields.get("parent_block_hash"), value)
        redacted: list[int] = []
        parents = [fields.get("parent_block_hash"), *hashes[:-1]]
        for place, parent in enumerate(parents):
            redacted += self.tokens_after(parent, value[place * block_size : (place + 1) * block_size])
        return redacted

    def tokens_after(self, parent: Any, tokens: Sequence[Any]) -> list[int]:
        """Digests of tokens after the block `parent`."""
        state = blake2b(repr(parent).encode(), digest_size=16, key=self._key)
        digests = []
        for token in tokens:
            state.update(b"%d," % token if type(token) is int else repr(token).encode())
            digests.append(int.from_bytes(state.digest()[:4], "big"))
        return digests

    def hashes(self, value: Any) -> Any:
        """A digest of a hash, of the same type; or of each in a list."""
        if isinstance(value, list):
            return [self.hashes(item) for item in value]
        if value is None or value == "":
            return value
        digest = self._digest(repr(value).encode())
        if isinstance(value, bytes):
            return digest
        return digest.hex() if isinstance(value, str) else int.from_bytes(digest, "big")

    def other(self, value: Any) -> Any:
        """Digest fields of arbitrary content; absent ones stay absent."""
        return None if value is None or value == [] else self._digest(repr(value).encode()).hex()

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=8, key=self._key).digest()

    @staticmethod
    def number(value: Any) -> Any:
        """A number as it is, nothing else."""
        return value if isinstance(value, int | float) else None
