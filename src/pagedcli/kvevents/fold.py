"""Folds KV events into a state: a tree per publisher and cache group, counts, and what is unknown.

`take` is called with each message, live or from a recording; views read the state.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from pagedcli.kvevents import wire
from pagedcli.kvevents.formats import decode_batch
from pagedcli.kvevents.tree import MAX_BLOCKS, Cause, CurvePoint, History, LargerCache, ServerTree, curve
from pagedcli.printable import byte_text

MessagePlace = Literal["next", "first", "gap", "repeated", "restarted"]


@dataclass(slots=True)
class SequenceCheck:
    """Follows one publisher. `next_seq` is the number expected next, None before the first message."""

    next_seq: int | None = None
    first_seq: int | None = None  # first number of the current publisher; anything earlier is unknown
    last_time_s: float = -1.0  # publisher's clock
    num_gaps: int = 0
    num_missed: int = 0  # messages
    num_repeated: int = 0  # messages, ignored
    num_restarts: int = 0

    def judge(self, seq: int, time_s: float | None) -> MessagePlace:
        """Classify a message by its number. Changes nothing.

        A lower number than expected with a later time comes from a restarted publisher; otherwise it is a message
        that was received before, as replays send them.
        """
        if self.next_seq is None:
            return "first"
        if seq == self.next_seq:
            return "next"
        if seq > self.next_seq:
            return "gap"
        return "restarted" if time_s is not None and time_s > self.last_time_s else "repeated"

    def missing_before(self, seq: int, time_s: float | None) -> int | None:
        """The first message missing before this one; None if nothing is missing."""
        verdict = self.judge(seq, time_s)
        if verdict == "gap":
            return self.next_seq
        return 0 if seq and verdict in ("first", "restarted") else None

    def take(self, first: int, last: int, time_s: float | None) -> MessagePlace:
        """Count a message with these numbers, which are equal if messages, not events, are numbered."""
        verdict = self.judge(first, time_s)
        if verdict == "repeated":
            self.num_repeated += 1
            return verdict
        if verdict == "gap":
            assert self.next_seq is not None
            self.num_gaps += 1
            self.num_missed += first - self.next_seq
        elif verdict != "next":
            self.num_restarts += verdict == "restarted"
            self.first_seq = first
        self.next_seq = last + 1
        if time_s is not None:
            self.last_time_s = time_s
        return verdict


_MAX_PUBLISHERS = 256
_MAX_GROUPS = 64  # per publisher
_MAX_NAMES = 256  # distinct unknown types, fields and values that are counted
_MAX_OBJECTS = 1_000_000  # objects of all stores
Fetch = Callable[[int, int, int | None], Iterable[Sequence[bytes]]]
_RATE_S = 10.0  # the window of rates
_RATE_STEP_S = 0.1


@dataclass(slots=True)
class Publisher:
    """One stream of numbered messages: an endpoint and a topic."""

    source: int
    name: str  # the endpoint, with the topic where there are several
    sequence: SequenceCheck = field(default_factory=SequenceCheck)
    trees: dict[str, ServerTree] = field(default_factory=dict)  # cache group -> its tree
    spec_kinds: dict[str, str] = field(default_factory=dict)  # cache group -> kind of attention
    objects: dict[str, tuple[wire.BlockHash, tuple[str, ...]]] = field(default_factory=dict)  # hash, media
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A message that changes the caches of a publisher."""

    number: int  # its place among the messages of all publishers
    events: Sequence[wire.KVEvent]
    is_restarted: bool  # whether it is the first one after a restart


Observe = Callable[[Publisher, Applied], None]


class KVState:
    """The known state of the caches of some endpoints.

    `keep_tokens` keeps the token ids of each block, for text. `larger`: blocks by which larger caches are
    followed, too. `observe` receives every message that is applied. `fetch(source, first, before)` returns the frames
    of missing messages, if the publisher can replay them.
    """

    def __init__(
        self,
        names: Sequence[str] = ("",),
        *,
        keep_tokens: bool = False,
        max_blocks: int = MAX_BLOCKS,
        larger: Sequence[int] = (),
        observe: Observe = lambda publisher, message: None,
        fetch: Fetch | None = None,
    ) -> None:
        self.publishers: dict[tuple[int, bytes], Publisher] = {}
        self.num_messages = 0
        self.num_batches = 0  # messages that were applied
        self.num_events = 0
        self.num_malformed = 0  # messages or single events
        self.num_reconnects = 0
        self.num_cleared = 0  # AllBlocksCleared
        self.unknown_types: Counter[str] = Counter()
        self.unknown_fields: Counter[str] = Counter()
        self.field_values: Counter[tuple[str, str]] = Counter()  # (field, value), of few fields with few values
        # blocks stored again by themselves, next in a chain that was resident before: perhaps generated tokens
        self.num_alone: dict[Cause, int] = {"evicted": 0, "cleared": 0, "restarted": 0}
        self.time_s: float | None = None  # last message, on the receiver's clock
        self.first_time_s: float | None = None
        self.notes: deque[str] = deque(maxlen=200)  # what was odd, oldest first
        self.recent: deque[tuple[float, int, int]] = deque()  # (time, stored, removed) of the last seconds
        self._stored_now: dict[wire.BlockHash, Cause | None] = {}  # stored just now -> counted in num_alone
        # (group, block) of this message that was resident, and that was not, where there are several cache groups
        self._copied_now: list[tuple[str, wire.BlockHash]] = []
        self._new_now: set[tuple[str, wire.BlockHash]] = set()
        self._names = list(names)
        self._keep_tokens = keep_tokens
        self.history = History(max_blocks)
        self._larger, self._observe = larger, observe
        self._fetch = fetch

    # ------------------------------------------------------------------ changes

    def take(self, frames: Sequence[bytes], time_s: float | None = None, source: int = 0) -> None:
        """Apply a message, after any missing ones that can be fetched. Malformed messages are counted and noted, never
        raised."""
        read = self._read(frames, time_s, source)
        if read is None:
            return
        message, batch = read
        publisher = self._publisher(source, message.topic)
        if self._fetch is not None and publisher is not None and message.seq is not None:
            first = publisher.sequence.missing_before(message.seq, batch.time_s)
            if first is not None:
                self.catch_up(source, time_s, first=first, before=message.seq)
        self._take(message, batch, time_s, source)

    def reconnected(self, source: int) -> None:
        """The connection to an endpoint was lost; ZMQ keeps trying to make it again."""
        self.num_reconnects += 1
        self.notes.append(self.reconnect_note(source))

    def reconnect_note(self, source: int) -> str:
        most = byte_text(wire.MAX_PAYLOAD_BYTES, digits=0)
        return f"{self._name(source)}: connection lost (the server ended or restarted, or a message over {most})"

    def catch_up(self, source: int, time_s: float | None, *, first: int = 0, before: int | None = None) -> None:
        """Apply what the publisher can replay."""
        assert self._fetch is not None, "there is nothing to fetch from"
        for frames in self._fetch(source, first, before):
            read = self._read(frames, time_s, source)
            if read is not None:  # no time: earlier events do not count towards rates
                self._take(*read, None, source)

    def _read(
        self, frames: Sequence[bytes], time_s: float | None, source: int
    ) -> tuple[wire.Frames, wire.Batch] | None:
        self.num_messages += 1
        self._tick(time_s)
        try:
            message = wire.split_frames(frames)
            if self._fetch is not None:  # replayed messages may lack the topic: then there is one publisher per source
                message = replace(message, topic=b"")
            return message, decode_batch(message.payload)
        except wire.WireError as error:
            self._malformed(source, str(error))
            return None

    def _take(self, message: wire.Frames, batch: wire.Batch, time_s: float | None, source: int) -> None:
        publisher = self._publisher(source, message.topic)
        num_restarts = 0 if publisher is None else publisher.sequence.num_restarts
        if publisher is None or not self._in_order(publisher, message, batch):
            return
        is_restarted = publisher.sequence.num_restarts > num_restarts
        self._observe(publisher, Applied(self.num_messages - 1, batch.events, is_restarted))
        self.num_batches += 1
        self.num_events += len(batch.events)
        if batch.rank is not None:
            publisher.rank = batch.rank
        if batch.num_malformed:
            self.num_malformed += batch.num_malformed
            self.notes.append(f"{publisher.name}: {batch.num_malformed} malformed events in a message")
        for counter, names in ((self.unknown_types, batch.unknown_types), (self.unknown_fields, batch.unknown_fields)):
            for name in names:
                _count(counter, name)
        before = self._num_changes(publisher)
        clock = batch.time_s if batch.time_s is not None else time_s
        self._stored_now.clear()
        for event in batch.events:
            self._apply(publisher, event, clock)
        self._count_vetoes(publisher)
        after = self._num_changes(publisher)
        if time_s is not None:
            self._count_changes(time_s, after[0] - before[0], after[1] - before[1])

    def _count_changes(self, time_s: float, num_stored: int, num_removed: int) -> None:
        if self.recent and time_s - self.recent[-1][0] < _RATE_STEP_S:
            start, stored, removed = self.recent.pop()
            self.recent.append((start, stored + num_stored, removed + num_removed))
        else:
            self.recent.append((time_s, num_stored, num_removed))

    def _tick(self, time_s: float | None) -> None:
        if time_s is None:
            return
        self.time_s = time_s
        if self.first_time_s is None:
            self.first_time_s = time_s
        while self.recent and self.recent[0][0] < time_s - _RATE_S:
            self.recent.popleft()

    def _malformed(self, source: int, why: str) -> None:
        self.num_malformed += 1
        self.notes.append(f"{self._name(source)}: malformed message: {why}")

    def _name(self, source: int) -> str:
        return self._names[source] if source < len(self._names) else f"source {source}"

    def _publisher(self, source: int, topic: bytes) -> Publisher | None:
        key = (source, topic)
        publisher = self.publishers.get(key)
        if publisher is None:
            if len(self.publishers) >= _MAX_PUBLISHERS:
                self._malformed(source, "too many topics")
                return None
            name = self._name(source)
            if any(known == source for known, _ in self.publishers):
                name += f" topic {topic.decode(errors='backslashreplace')!r}"
            publisher = self.publishers[key] = Publisher(source, name)
        return publisher

    def _in_order(self, publisher: Publisher, message: wire.Frames, batch: wire.Batch) -> bool:
        """Check the sequence numbers; False if the message was already applied."""
        if message.seq is not None:
            first = last = message.seq
        elif batch.event_ids is not None:
            first, last = batch.event_ids
        else:
            return True
        check = publisher.sequence
        expected = check.next_seq
        verdict = check.take(first, last, batch.time_s)
        created = message.seq is None and first == 0 and any(isinstance(event, wire.Created) for event in batch.events)
        if verdict == "repeated" and created:  # event ids have no times: a newly created cache shows the restart
            check.num_repeated -= 1
            check.num_restarts += 1
            check.first_seq, check.next_seq, verdict = 0, last + 1, "restarted"
        if verdict == "first" and first > 0:
            self.notes.append(f"{publisher.name}: what happened before message {first:,} is unknown")
        elif verdict == "gap":
            self.notes.append(f"{publisher.name}: messages {expected:,} to {first - 1:,} are missing")
        elif verdict == "restarted":
            self.notes.append(f"{publisher.name}: the publisher was restarted, its cache is empty")
            for tree in publisher.trees.values():
                tree.clear("restarted", batch.time_s)
            publisher.objects.clear()
        return verdict != "repeated"

    def _apply(self, publisher: Publisher, event: wire.KVEvent, clock: float | None) -> None:
        match event:
            case wire.Stored():
                self._store(publisher, event, clock)
            case wire.Removed():
                tree = self._tree(publisher, event.group)
                for block_hash in event.hashes:
                    tree.remove(block_hash, event.medium, clock)
                if event.extra:
                    self._count_values(event.extra)
            case wire.Cleared():
                self.num_cleared += 1
                for tree in publisher.trees.values():
                    tree.clear("cleared", clock, event.medium)
                publisher.objects.clear()
            case wire.Moved():
                self._tree(publisher, event.group).move(event.hash, event.old_medium, event.new_medium)
            case wire.Created():
                self._tree(publisher, event.group).capacity.update(event.num_blocks)
            case wire.Placed():
                self._place(publisher, event, clock)

    def _store(self, publisher: Publisher, event: wire.Stored, clock: float | None) -> None:
        tree = self._tree(publisher, event.group)
        parent, num_tokens = event.parent, event.block_size
        tokens = self._packed_tokens(event)
        is_alone = len(event.hashes) == 1 and parent is not None and parent not in self._stored_now
        if (
            parent is not None and (cause := self._stored_now.get(parent)) is not None
        ):  # Its parent was not alone, either.
            self._stored_now[parent] = None
            self.num_alone[cause] -= 1
            tree.note_alone(parent, -1)
        before = tree.nodes.get(event.hashes[0]) if is_alone else None
        alone = None if before is None else before.cause
        if len(publisher.trees) > 1:
            self._note_stored(_group_name(event.group), tree, event.hashes)
        for place, block_hash in enumerate(event.hashes):
            node = tree.store(block_hash, parent, num_tokens, event.medium, clock, lora=event.lora)
            if node is not None and tokens is not None:
                self.history.keep_tokens(node, tokens[8 * num_tokens * place : 8 * num_tokens * (place + 1)])
            parent = block_hash
        if alone is not None:
            self.num_alone[alone] += 1
            tree.note_alone(event.hashes[0], 1)
        self._stored_now |= dict.fromkeys(event.hashes, alone)
        if event.extra:
            self._count_values(event.extra)
            kind = event.extra.get("kv_cache_spec_kind")
            if isinstance(kind, str) and _group_name(event.group) in publisher.trees:
                publisher.spec_kinds[_group_name(event.group)] = kind[:100]

    def _note_stored(self, group: str, tree: ServerTree, hashes: Sequence[wire.BlockHash]) -> None:
        for block_hash in hashes:
            node = tree.nodes.get(block_hash)
            if node is not None and node.num_copies:
                self._copied_now.append((group, block_hash))
            else:
                self._new_now.add((group, block_hash))

    def _count_vetoes(self, publisher: Publisher) -> None:
        """Count blocks that were computed again while their cache group had them, as another group did not: a hit needs
        both. Two requests that compute the same at once are no such case: all groups have it then."""
        for group, block_hash in self._copied_now:
            for name, tree in publisher.trees.items():
                node = tree.nodes.get(block_hash)
                has_it = node is not None and node.num_copies and (name, block_hash) not in self._new_now
                if name != group and not has_it:
                    tree.num_vetoed += 1
        self._copied_now.clear()
        self._new_now.clear()

    def _packed_tokens(self, event: wire.Stored) -> bytes | None:
        tokens = event.token_ids
        if not self._keep_tokens or tokens is None or len(tokens) != event.block_size * len(event.hashes):
            return None
        return tokens.tobytes()

    def _place(self, publisher: Publisher, event: wire.Placed, clock: float | None) -> None:
        tree = self._tree(publisher, None)
        block_hash, old_media = publisher.objects.get(event.key, (event.hash or event.key, ()))
        new = Counter(event.media)
        for medium, count in (Counter(old_media) - new).items():
            for _ in range(count):
                tree.remove(block_hash, medium, clock)
        for medium, count in (new - Counter(old_media)).items():
            for _ in range(count):
                node = tree.store(block_hash, event.parent, event.block_size, medium, clock)
                if node is not None and event.token_ids is not None and self._keep_tokens:
                    self.history.keep_tokens(node, event.token_ids.tobytes())
        num_objects = sum(len(each.objects) for each in self.publishers.values())
        if event.media and (event.key in publisher.objects or num_objects < _MAX_OBJECTS):
            publisher.objects[event.key] = (block_hash, event.media)
        else:
            publisher.objects.pop(event.key, None)

    def _tree(self, publisher: Publisher, group: str | None) -> ServerTree:
        name = _group_name(group)
        tree = publisher.trees.get(name)
        if tree is None:
            if len(publisher.trees) >= _MAX_GROUPS:
                self._malformed(publisher.source, "too many cache groups; the rest is counted with the first one")
                return publisher.trees[next(iter(publisher.trees))]
            tree = publisher.trees[name] = ServerTree(self.history, LargerCache(self._larger) if self._larger else None)
        return tree

    def _count_values(self, extra: dict[str, Any]) -> None:
        for name in ("locality", "ownership"):
            value = extra.get(name)
            if isinstance(value, str):
                _count(self.field_values, (name, value[:100]))

    @staticmethod
    def _num_changes(publisher: Publisher) -> tuple[int, int]:
        trees = publisher.trees.values()
        return sum(tree.num_stored for tree in trees), sum(tree.num_removed for tree in trees)

    # ------------------------------------------------------------------ questions

    @property
    def trees(self) -> list[ServerTree]:
        return [tree for publisher in self.publishers.values() for tree in publisher.trees.values()]

    @property
    def num_resident(self) -> int:
        """Blocks with at least one copy, over all trees."""
        return self.history.num_resident

    @property
    def num_again_alone(self) -> int:
        return sum(self.num_alone.values())

    @property
    def seconds(self) -> float | None:
        """Between the first and the last message."""
        return None if self.time_s is None or self.first_time_s is None else self.time_s - self.first_time_s

    def curve(self) -> list[CurvePoint]:
        """What larger caches would have kept; empty where none was followed."""
        return curve([tree.larger for tree in self.trees if tree.larger is not None])

    def total(self, name: str) -> int:
        """The sum of a count over all trees."""
        return sum(getattr(tree, name) for tree in self.trees)

    def rates(self) -> tuple[float, float]:
        """Blocks stored and removed per second, over the last seconds."""
        if self.time_s is None or self.first_time_s is None:
            return 0.0, 0.0
        seconds = max(1.0, min(_RATE_S, self.time_s - self.first_time_s))
        return sum(row[1] for row in self.recent) / seconds, sum(row[2] for row in self.recent) / seconds

    def median_of(self, name: str) -> float | None:
        """The median of the trees' last lifetimes_s or pauses_s, None if there are none."""
        values = [value for tree in self.trees for value in getattr(tree, name)]
        return median(values) if values else None


def _group_name(group: str | None) -> str:
    return "0" if group is None else group


def _count(counter: Counter[Any], name: object) -> None:
    if name in counter or len(counter) < _MAX_NAMES:
        counter[name] += 1
