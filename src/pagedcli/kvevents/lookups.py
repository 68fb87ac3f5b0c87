"""The requests that a recording of KV events shows: chains of blocks, of which the beginning was found in the cache, as
lookups with a reason each, like those of our own runs.

Events contain no hits, but a run of blocks stored after a parent shows one: whatever comes before was there. A request
that was found in whole leaves no event. Used for the verdicts on a recording.
"""

import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import xxhash

from pagedcli.core.prefixes import num_equal
from pagedcli.events import PrefixLookedUp
from pagedcli.kvevents import wire
from pagedcli.kvevents.fold import Applied, Publisher
from pagedcli.kvevents.tree import MAX_TOKEN_BYTES
from pagedcli.views.explain import EarlierSequences, Ghosts, Lookup, Reason

BlockContent = int | str
_MOST_COMPARED = 256  # blocks after the same ones, the newest


@dataclass(slots=True)
class SeenRequest:
    """A request that stored at least one block."""

    num_hit: int  # blocks that were there
    end: int  # node of its last block
    message: int  # the first one that stores its blocks
    num_prompt: int = 0  # blocks, found ones included; those after them were generated
    salt: str | None = None  # cache_salt, adapter or media of its first block; None: it has none
    lora: str | None = None  # adapter
    reason: Reason | None = None  # why its first stored block was not there; None: it is new
    gone_message: int | None = None  # the one that removed that block
    num_more_blocks: int | None = None  # the least growth of an LRU cache that keeps it
    num_evicted: int = 0  # blocks of the prompt that were cached before
    num_in_flight: int = 0  # blocks of the prompt that were stored although they were there
    num_partial_tokens: int = 0  # tokens of its first stored block with which a cached one after the same blocks begins


@dataclass(slots=True)
class Lookups:
    """What a recording shows of requests and caches. Nodes are blocks after the same earlier blocks; node -1 is the
    root."""

    requests: list[SeenRequest] = field(default_factory=list)
    block_size: int | None = None
    has_ids: bool = True  # whether tokens are ids; else digests, which only tell where prompts differ
    _nodes: dict[tuple[int, BlockContent], int] = field(default_factory=dict)
    _parents: list[int] = field(default_factory=list)
    _tokens: "dict[int, array[int]]" = field(default_factory=dict)  # node -> token ids of the block
    _num_kept: int = 0  # tokens
    _followed: "dict[tuple[int, str], _Publisher]" = field(default_factory=dict)

    def take(self, publisher: Publisher, message: Applied) -> None:
        """Follow a message. For KVState(observe=...)."""
        self._followed.setdefault((publisher.source, publisher.name), _Publisher(self)).take(message)

    def _up(self, node: int) -> Iterator[int]:
        """A node and those before it."""
        while node >= 0:
            yield node
            node = self._parents[node]

    def add(self, parent: int, content: BlockContent) -> int:
        """The node of a block after another one."""
        node = self._nodes.setdefault((parent, content), len(self._parents))
        if node == len(self._parents):
            self._parents.append(parent)
        return node

    def keep_tokens(self, node: int, token_ids: "array[int]") -> None:
        """Keep the tokens of a block, unless the limit is reached."""
        num_kept = self._num_kept + len(token_ids)
        if node not in self._tokens and num_kept <= MAX_TOKEN_BYTES // token_ids.itemsize:
            self._tokens[node], self._num_kept = token_ids, num_kept

    def tokens_of(self, node: int) -> "Sequence[int]":
        """The tokens of a block; empty if they are not known."""
        return self._tokens.get(node, ())

    def lookups(self) -> list[Lookup]:
        """The requests as lookups. Of their tokens only full blocks are known."""
        found, earlier, salts, size = list[Lookup](), EarlierSequences(), dict[str, str](), self.block_size or 0
        for number, each in enumerate(self.requests):
            tokens, split = self._chain(each.end), None
            if tokens is not None:
                split = earlier.diverge(tokens[: each.num_prompt * size].tobytes(), has_ids=self.has_ids)
                earlier.add(number, tokens.tobytes(), str(number), salted=each.salt is not None)
            num_hit = each.num_hit * size
            is_other_salt = split is not None and (each.salt is not None or split.other_salted)
            event = PrefixLookedUp(
                number, "new", each.num_prompt * size, each.num_prompt, each.num_hit, num_hit, each.num_hit, None,
                "no_match", each.num_partial_tokens,
            )  # fmt: skip
            lookup = Lookup(each.message, number, str(number), None, each.salt is not None, False, event, size)
            lookup.unit, lookup.divergence = "message", split
            lookup.salt = None if each.salt is None else salts.setdefault(each.salt, str(len(salts) + 1))
            lookup.evicted_step, lookup.num_more_blocks = each.gone_message, each.num_more_blocks
            lookup.num_evicted, lookup.num_in_flight = each.num_evicted, each.num_in_flight
            lookup.num_first = each.num_prompt - each.num_hit - each.num_evicted - each.num_in_flight
            if each.reason is not None:
                lookup.reason = each.reason
            elif split is not None and is_other_salt and split.num_shared_tokens >= num_hit + size:
                lookup.reason = "different_salt"
            elif num_hit:
                lookup.reason = "not_seen_before"
            else:
                lookup.reason = "shorter_than_block" if event.partial_tokens else "no_shared_prefix"
            found.append(lookup)
        return found

    def prompts(self) -> "Iterator[tuple[array[int], str | None]]":
        """The full blocks of each prompt as token ids, with its salt, where all are known; of several adapters, whose
        requests never share blocks, only those of the one with the most requests."""
        most = Counter(request.lora for request in self.requests).most_common(1)
        for request in self.requests if self.has_ids else ():
            token_ids = self._chain(request.end) if request.lora == most[0][0] else None
            if token_ids is not None and _are_ids(token_ids):
                yield token_ids[: request.num_prompt * (self.block_size or 0)], request.salt

    def _chain(self, end: int) -> "array[int] | None":
        """The tokens up to a node; None if some are not known."""
        nodes, found = list(self._up(end))[::-1], array("q")
        if not self._tokens.keys() >= set(nodes):
            return None
        for node in nodes:
            found.extend(self._tokens[node])
        return found

    def depth(self, node: int) -> int:
        """Blocks up to this one."""
        return sum(1 for _ in self._up(node))


def _are_ids(values: "array[int]") -> bool:
    """Whether these can be ids of tokens, as far as numbers from a network go."""
    return min(values, default=0) >= 0 and max(values, default=0) <= sys.maxunicode


class _Publisher:
    """Follows the cache of one publisher."""

    def __init__(self, found: Lookups) -> None:
        self._found = found
        self._place: tuple[str | None, str] | None = None  # cache group and medium that are followed
        self._node_of: dict[wire.BlockHash, int] = {}
        self._salts: dict[wire.BlockHash, str] = {}  # salt of each block of a request with one
        self._open: dict[wire.BlockHash, SeenRequest] = {}  # requests by the last block that they stored
        self._just_stored: set[wire.BlockHash] = set()  # blocks of the message before
        self._num_copies: Counter[int] = Counter()  # resident copies by node
        self._gone: dict[int, Reason] = {}  # nodes that were stored once, and why they left
        self._ghosts: Ghosts[int] = Ghosts()  # without those that leave in this message, for a request that it stores
        self._leaving: dict[int, None] = {}
        # node, salt -> the next nodes, in the order in which they were stored
        self._after: defaultdict[tuple[int, str | None], dict[int, None]] = defaultdict(dict)
        self._message = 0  # number of the one that is read

    def take(self, message: Applied) -> None:
        self._message = message.number
        if message.is_restarted:
            self._clear("restarted")
        before, self._just_stored = self._just_stored, set()
        for event in message.events:
            match event:
                case wire.Stored():
                    self._store(event, before)
                case wire.Removed() if self._place is not None and event.group == self._place[0]:
                    if event.medium in (None, self._place[1]):
                        self._remove(event.hashes)
                case wire.Cleared():
                    self._clear("cleared")
        for node in self._leaving:
            self._ghosts.add(node, message.number)
        self._leaving.clear()

    def _clear(self, why: Reason) -> None:
        self._open.clear()
        for node in self._num_copies:
            self._leave(node, why)
        self._num_copies.clear()

    def _remove(self, hashes: list[wire.BlockHash]) -> None:
        for node in filter(self._num_copies.__contains__, map(self._node_of.get, hashes)):
            assert node is not None, "only nodes have copies"
            self._num_copies[node] -= 1
            if not self._num_copies[node]:
                del self._num_copies[node]
                self._leave(node, "evicted")

    def _leave(self, node: int, why: Reason) -> None:
        self._gone[node] = why
        self._leaving[node] = None

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
        is_prompt = request is None or is_chunk or len(event.hashes) > 1
        if request is None or (is_prompt and not is_chunk):
            num_hit = found.depth(node)
            salt = _salt_of(event) if event.parent is None else self._salts.get(event.parent)
            request = SeenRequest(num_hit, node, self._message, num_hit, salt, event.lora)
            found.requests.append(request)
        tokens = _tokens_of(event)
        for place, (block_hash, content) in enumerate(zip(event.hashes, _contents(event), strict=True)):
            if node == -1 and request.salt is not None:
                content = f"{request.salt} {content}"
            before_it = self._after[node, request.salt]
            node = self._node_of[block_hash] = found.add(node, content)
            if tokens is not None:
                found.keep_tokens(node, tokens[place * event.block_size : (place + 1) * event.block_size])
            if is_prompt:
                self._judge(node, request, before_it)
            if not self._num_copies[node]:
                before_it.pop(node, None)
                before_it[node] = None
            self._num_copies[node] += 1
            self._gone.pop(node, None)
            self._leaving.pop(node, None)
            self._ghosts.drop(node)
        if request.salt is not None:
            self._salts |= dict.fromkeys(event.hashes, request.salt)
        request.end = node
        self._open[event.hashes[-1]] = request
        self._just_stored.update(event.hashes)

    def _judge(self, node: int, request: SeenRequest, others: dict[int, None]) -> None:
        """Count the next block of a prompt, and say of the first one why it was not found. `others`: blocks that were
        there after the same ones."""
        is_there, why = self._num_copies[node] > 0, self._gone.get(node)
        if request.num_prompt == request.num_hit:
            request.reason = "in_flight" if is_there else why
            if why is not None:
                request.gone_message, _, num_more = self._ghosts.find(node) or (self._message, None, 1)
                request.num_more_blocks = num_more if why == "evicted" else None
            newest = islice(reversed(others), _MOST_COMPARED)
            cached = [each for each in newest if self._num_copies[each] or each in self._leaving]
            own = self._found.tokens_of(node)
            request.num_partial_tokens = max(
                (num_equal(own, self._found.tokens_of(each)) for each in cached), default=0
            )
        request.num_prompt += 1
        request.num_in_flight += is_there
        request.num_evicted += not is_there and why is not None

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


def _contents(event: wire.Stored) -> Iterator[BlockContent]:
    """What each block holds: a digest of its tokens, or its hash where there are none."""
    ids, size = _tokens_of(event), event.block_size
    if ids is None:
        yield from (str(each) for each in event.hashes)
        return
    for start in range(0, len(ids), size):
        yield xxhash.xxh64_intdigest(ids[start : start + size].tobytes())
