"""The requests that a recording of KV events shows: chains of blocks, of which the beginning was found in the cache.

Events contain no hits, but a run of blocks stored after a parent shows one: whatever comes before was there. A request
that was found in whole leaves no event. Used for the verdicts on a recording.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import xxhash

from pagedcli.kvevents import wire
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import SequenceCheck
from pagedcli.kvevents.formats import decode_batch
from pagedcli.kvevents.tree import MAX_TOKEN_BYTES
from pagedcli.records import Share

Content = int | str


@dataclass(slots=True)
class SeenRequest:
    """A request that stored at least one block."""

    num_hit: int  # blocks that were there
    end: int  # node of its last block
    num_prompt: int = 0  # blocks, found ones included; those after them were generated
    salt: str | None = None  # cache_salt, adapter or media of its first block; None: it has none
    lora: str | None = None  # adapter


@dataclass(slots=True)
class Lookups:
    """What a recording shows of requests and caches. Nodes are blocks after the same earlier blocks; node -1 is the
    root."""

    requests: list[SeenRequest] = field(default_factory=list)
    block_size: int | None = None
    keeps_tokens: bool = False  # whether prompts() has them, up to MAX_TOKEN_BYTES
    _nodes: dict[tuple[int, Content], int] = field(default_factory=dict)
    _parents: list[int] = field(default_factory=list)
    _tokens: "dict[int, array[int]]" = field(default_factory=dict)  # node -> token ids of the block
    _num_kept: int = 0  # tokens

    def _up(self, node: int) -> Iterator[int]:
        """A node and those before it."""
        while node >= 0:
            yield node
            node = self._parents[node]

    def add(self, parent: int, content: Content) -> int:
        """The node of a block after another one."""
        node = self._nodes.setdefault((parent, content), len(self._parents))
        if node == len(self._parents):
            self._parents.append(parent)
        return node

    def keep_tokens(self, node: int, token_ids: "array[int]") -> None:
        """Keep the tokens of a block, unless the limit is reached or they are no token ids."""
        num_kept = self._num_kept + len(token_ids)
        if node not in self._tokens and num_kept <= MAX_TOKEN_BYTES // token_ids.itemsize and _are_ids(token_ids):
            self._tokens[node], self._num_kept = token_ids, num_kept

    def prompts(self) -> "Iterator[tuple[array[int], str | None]]":
        """The full blocks of each prompt as token ids, with its salt, where all are known; of several adapters, whose
        requests never share blocks, only those of the one with the most requests."""
        most = Counter(request.lora for request in self.requests).most_common(1)
        for request in self.requests:
            if request.lora == most[0][0] and (token_ids := self._prompt(request)) is not None:
                yield token_ids, request.salt

    def _prompt(self, request: SeenRequest) -> "array[int] | None":
        nodes, found = list(self._up(request.end))[::-1], array("q")
        if not self._tokens.keys() >= set(nodes):
            return None
        for node in nodes[: request.num_prompt]:
            found.extend(self._tokens[node])
        return found

    def depth(self, node: int) -> int:
        """Blocks up to this one."""
        return sum(1 for _ in self._up(node))


def _are_ids(values: "array[int]") -> bool:
    """Whether these can be ids of tokens, as far as numbers from a network go."""
    return min(values, default=0) >= 0 and max(values, default=0) <= sys.maxunicode


def read_lookups(reader: CaptureReader, *, keep_tokens: bool = False) -> Lookups:
    """The requests of a recording, in the order in which they began to store blocks."""
    found = Lookups(keeps_tokens=keep_tokens)
    publishers: dict[tuple[int, bytes], _Publisher] = {}
    for frames, _, source in reader:
        try:
            message = wire.split_frames(frames)
            batch = decode_batch(message.payload)
        except wire.WireError:
            continue
        key = (source, message.topic)
        if key not in publishers:
            publishers[key] = _Publisher(found)
        publishers[key].take(message, batch)
    return found


@dataclass(frozen=True, slots=True)
class SaltRow:
    """The requests seen of one salt. Salts are numbered as they appear."""

    salt: Annotated[str, "cache_salt or adapter"]
    num_requests: Annotated[int, "requests seen"]
    num_tokens: Annotated[int, "tokens looked up"]
    tokens_hit: Annotated[int, "tokens found"]
    hit_rate: Share


def hits_by_salt(found: Lookups) -> list[SaltRow]:
    """The hit rate of each salt, that of the most tokens first; empty if no request has one."""
    of_salt: dict[str | None, list[SeenRequest]] = {}
    for request in found.requests:
        of_salt.setdefault(request.salt, []).append(request)
    rows, size = [], found.block_size or 0
    named = [salt for salt in of_salt if salt is not None]
    for salt, requests in of_salt.items():
        num_blocks, num_hit = (
            sum(counts) for counts in zip(*((r.num_prompt, r.num_hit) for r in requests), strict=True)
        )
        name = "none" if salt is None else str(named.index(salt) + 1)
        rows.append(SaltRow(name, len(requests), num_blocks * size, num_hit * size, num_hit / num_blocks))
    return sorted(rows, key=lambda row: -row.num_tokens) if named else []


class _Publisher:
    """Follows the cache of one publisher."""

    def __init__(self, found: Lookups) -> None:
        self._found = found
        self._check = SequenceCheck()
        self._place: tuple[str | None, str] | None = None  # cache group and medium that are followed
        self._node_of: dict[wire.BlockHash, int] = {}
        self._salts: dict[wire.BlockHash, str] = {}  # salt of each block of a request with one
        self._open: dict[wire.BlockHash, SeenRequest] = {}  # requests by the last block that they stored
        self._just_stored: set[wire.BlockHash] = set()  # blocks of the message before

    def take(self, message: wire.Message, batch: wire.Batch) -> None:
        if message.seq is not None:
            verdict = self._check.take(message.seq, message.seq, batch.time_s)
            if verdict == "repeated":
                return
            if verdict == "restarted":
                self._open.clear()
        before, self._just_stored = self._just_stored, set()
        for event in batch.events:
            match event:
                case wire.Stored():
                    self._store(event, before)
                case wire.Cleared():
                    self._open.clear()

    def _store(self, event: wire.Stored, before: set[wire.BlockHash]) -> None:
        found = self._found
        self._place = self._place or (event.group, event.medium)
        found.block_size = found.block_size or event.block_size
        if (event.group, event.medium) != self._place or event.block_size != found.block_size or not event.hashes:
            return
        node = self._node_before(event)
        request = None if event.parent is None else self._open.pop(event.parent, None)
        # A block alone is generated text; several ones are the next chunk of a prompt only right after the last one.
        is_chunk = event.parent in self._just_stored or (len(event.hashes) > 1 and event.parent in before)
        if request is None or not (is_chunk or len(event.hashes) == 1):
            num_hit = found.depth(node)
            salt = _salt_of(event) if event.parent is None else self._salts.get(event.parent)
            request = SeenRequest(num_hit, node, num_hit + len(event.hashes), salt, event.lora)
            found.requests.append(request)
        elif is_chunk:
            request.num_prompt += len(event.hashes)
        tokens = _tokens_of(event) if found.keeps_tokens else None
        for place, (block_hash, content) in enumerate(zip(event.hashes, _contents(event), strict=True)):
            if node == -1 and request.salt is not None:
                content = f"{request.salt} {content}"
            node = self._node_of[block_hash] = found.add(node, content)
            if tokens is not None:
                found.keep_tokens(node, tokens[place * event.block_size : (place + 1) * event.block_size])
        if request.salt is not None:
            self._salts |= dict.fromkeys(event.hashes, request.salt)
        request.end = node
        self._open[event.hashes[-1]] = request
        self._just_stored.update(event.hashes)

    def _node_before(self, event: wire.Stored) -> int:
        if event.parent is None:
            return -1
        if event.parent not in self._node_of:  # stored before the recording began
            self._node_of[event.parent] = self._found.add(-1, f"unknown {event.parent!r}")
        return self._node_of[event.parent]


def _salt_of(event: wire.Stored) -> str | None:
    """What keeps blocks of equal tokens apart: requests of another one share none."""
    keys = event.extra.get("extra_keys")
    first = keys[0] if isinstance(keys, list) and keys else None
    parts = (first, event.extra.get("cache_salt"), event.lora)
    return None if parts == (None, None, None) else repr(parts)


def _tokens_of(event: wire.Stored) -> "array[int] | None":
    """The tokens of its blocks; None if it does not say all of them."""
    ids = event.token_ids
    return ids if ids is not None and len(ids) == event.block_size * len(event.hashes) else None


def _contents(event: wire.Stored) -> Iterator[Content]:
    """What each block holds: a digest of its tokens, or its hash where there are none."""
    ids, size = _tokens_of(event), event.block_size
    if ids is None:
        yield from (str(each) for each in event.hashes)
        return
    for start in range(0, len(ids), size):
        yield xxhash.xxh64_intdigest(ids[start : start + size].tobytes())
