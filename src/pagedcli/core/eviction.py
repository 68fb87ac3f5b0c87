"""Eviction policies: which free cached block is evicted when no empty block is left.

Used by BlockManager, which reports to its policy what happens to full blocks. A policy is a class and its entry in
POLICIES, from which flags, configuration files and commands take the names. Every operation takes O(log n), amortized.
"""

import heapq
from bisect import bisect_left
from math import inf

from pagedcli.core.prefixes import Prefix
from pagedcli.errors import ConfigError

Rank = tuple[float, int]  # the lowest is evicted first; the second part counts releases: ties are LRU
_UNFINDABLE = -inf
_NEVER = -(2.0**62)


class RankedPolicy:
    """The free cached blocks of a pool and their ranks, in a heap, and the choice among them. By itself it is LRU.

    `prefix` is a block's content. It is None for a block that no lookup finds, as an equal one is found instead: such
    blocks go first.
    """

    sees_queue = False  # whether it needs to know which sequences wait

    def __init__(self) -> None:
        self._num_released = 0
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._ranks: dict[int, Rank] = {}  # rank of each free cached block, in order of release
        self._heap: list[tuple[Rank, int]] = []  # (rank, block_id), outdated ones included

    def block_ids(self) -> set[int]:
        """The free cached blocks."""
        return set(self._ranks)

    def filled(self, prefix: Prefix) -> None:
        """A block was filled, and lookups find it."""

    def freed(self, block_id: int, prefix: Prefix | None) -> None:
        """The last owner of a full block released it."""
        self._num_released += 1
        value = _UNFINDABLE if prefix is None else self._value(block_id, prefix)
        self._put(block_id, (value, self._num_released))

    def hit(self, block_id: int) -> None:
        """A sequence claimed a full block, which was free or in use."""
        self._ranks.pop(block_id, None)

    def expect(self, seq_id: int, prefixes: list[Prefix], *, first: bool) -> None:
        """A sequence with this chain joined the queue at its back, or as its first one. Only with `sees_queue`."""

    def forget(self, seq_id: int, prefixes: list[Prefix]) -> None:
        """A sequence left the queue, if it was there. Its chain may have grown. Only with `sees_queue`."""

    def choose(self) -> int:
        """Remove and return the block to evict. There is at least one."""
        while self._heap:
            rank, block_id = heapq.heappop(self._heap)
            if self._ranks.get(block_id) == rank and self._may_go(block_id):
                break
        else:  # none may go: the oldest
            block_id, rank = next(iter(self._ranks.items()))
        del self._ranks[block_id]
        self._evicted(block_id, rank[0])
        return block_id

    def _put(self, block_id: int, rank: Rank) -> None:
        """Add a block, or change its rank."""
        self._ranks[block_id] = rank
        heapq.heappush(self._heap, (rank, block_id))
        if len(self._heap) > 2 * len(self._ranks) + 64:  # drop the outdated entries
            self._heap = [(rank, block_id) for block_id, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def _value(self, block_id: int, prefix: Prefix) -> float:
        """The first part of the rank of a released block."""
        return 0.0

    def _may_go(self, block_id: int) -> bool:
        """Whether the block may be evicted now. If not, it must be put again as soon as it may."""
        return True

    def _evicted(self, block_id: int, value: float) -> None:
        """The block was chosen; its rank had this value."""


class Fifo(RankedPolicy):
    """Evicts the content that was released first; later hits do not renew it."""

    def clear(self) -> None:
        super().clear()
        self._first_release: dict[int, int] = {}  # block_id -> when its present content was first released

    def _value(self, block_id: int, prefix: Prefix) -> float:
        return self._first_release.setdefault(block_id, self._num_released)

    def _evicted(self, block_id: int, value: float) -> None:
        self._first_release.pop(block_id, None)


class Lfu(RankedPolicy):
    """Evicts the content with the fewest hits, with ageing: the value of the last evicted block is added to that of
    released ones, so content that was popular long ago does not stay for ever.

    Source: Arlitt et al., Evaluating content management techniques for web proxy caches, 2000 (LFU-DA).
    """

    def clear(self) -> None:
        super().clear()
        self._num_hits: dict[int, int] = {}  # block_id -> hits of its present content
        self._age = 0.0

    def hit(self, block_id: int) -> None:
        super().hit(block_id)
        self._num_hits[block_id] = self._num_hits.get(block_id, 0) + 1

    def _value(self, block_id: int, prefix: Prefix) -> float:
        return self._age + self._num_hits.get(block_id, 0)

    def _evicted(self, block_id: int, value: float) -> None:
        self._num_hits.pop(block_id, None)
        self._age = max(self._age, value)


class _ContentPolicy(RankedPolicy):
    """Base of the policies that look at content: knows that of the free blocks, where lookups find it."""

    def clear(self) -> None:
        super().clear()
        self._prefixes: dict[int, Prefix] = {}  # free block_id -> content
        self._free_ids: dict[int, int] = {}  # its hash -> block_id

    def freed(self, block_id: int, prefix: Prefix | None) -> None:
        super().freed(block_id, prefix)
        if prefix is not None:
            self._prefixes[block_id] = prefix
            self._free_ids[prefix.hash] = block_id

    def hit(self, block_id: int) -> None:
        super().hit(block_id)
        self._drop(block_id)

    def _evicted(self, block_id: int, value: float) -> None:
        self._drop(block_id)

    def _drop(self, block_id: int) -> Prefix | None:
        """Forget the content of a block that is no longer free."""
        prefix = self._prefixes.pop(block_id, None)
        if prefix is not None:
            del self._free_ids[prefix.hash]
        return prefix


class PrefixLru(_ContentPolicy):
    """Evicts the least recently used block that no cached block follows, so no chain is broken in its middle.

    Only where all free blocks have followers, in use by sequences that own a copy of the block, the oldest one goes.
    """

    def clear(self) -> None:
        super().clear()
        self._num_followers: dict[int, int] = {}  # hash -> findable blocks that come next in a chain

    def filled(self, prefix: Prefix) -> None:
        if prefix.parent is not None:
            parent = prefix.parent.hash
            self._num_followers[parent] = self._num_followers.get(parent, 0) + 1

    def _may_go(self, block_id: int) -> bool:
        prefix = self._prefixes.get(block_id)
        return prefix is None or prefix.hash not in self._num_followers

    def _evicted(self, block_id: int, value: float) -> None:
        prefix = self._drop(block_id)
        if prefix is None or prefix.parent is None:
            return
        parent = prefix.parent.hash
        self._num_followers[parent] -= 1
        if not self._num_followers[parent]:
            del self._num_followers[parent]
            parent_id = self._free_ids.get(parent)
            if parent_id is not None:
                self._put(parent_id, self._ranks[parent_id])


class NextUse(_ContentPolicy):
    """Evicts what the queue needs last: content that no waiting request asks for, least recently used first, and then
    that of the request farthest back. With the whole input in the queue this is Belady's rule.

    A chain is evicted from its tail: who asks for a block asks for all before it, and tails are released first.
    """

    sees_queue = True

    def clear(self) -> None:
        """Forget all blocks and the queue."""
        super().clear()
        self._uses: dict[int, list[int]] = {}  # hash -> places in the queue that ask for it, rising
        self._waiting: dict[int, tuple[int, int]] = {}  # seq_id -> its place, number of its hashes
        self._front = self._back = 0  # places at the ends of the queue

    def expect(self, seq_id: int, prefixes: list[Prefix], *, first: bool) -> None:
        self._front -= first
        self._back += not first
        place = self._front if first else self._back
        self._waiting[seq_id] = place, len(prefixes)
        for prefix in prefixes:
            uses = self._uses.setdefault(prefix.hash, [])
            uses.insert(0 if first else len(uses), place)
            if uses[0] == place:
                self._rank_again(prefix.hash)

    def forget(self, seq_id: int, prefixes: list[Prefix]) -> None:
        place, num_expected = self._waiting.pop(seq_id, (0, 0))
        for prefix in prefixes[:num_expected]:
            uses = self._uses[prefix.hash]
            del uses[bisect_left(uses, place)]
            if not uses:
                del self._uses[prefix.hash]
            self._rank_again(prefix.hash)

    def _rank_again(self, block_hash: int) -> None:
        block_id = self._free_ids.get(block_hash)
        if block_id is not None:
            _, order = self._ranks[block_id]
            self._put(block_id, (self._value(block_id, self._prefixes[block_id]), order))

    def _value(self, block_id: int, prefix: Prefix) -> float:
        uses = self._uses.get(prefix.hash)
        return _NEVER if uses is None else -uses[0]


# None: the order of the free list itself
POLICIES: dict[str, type[RankedPolicy] | None] = {
    "lru": None, "fifo": Fifo, "lfu": Lfu, "prefix-lru": PrefixLru, "next-use": NextUse,
}  # fmt: skip


def make_policy(name: str) -> RankedPolicy | None:
    """The policy of this name; None for the order of the free list. Raises: ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"eviction is {name!r}, known: {', '.join(POLICIES)}")
    kind = POLICIES[name]
    return None if kind is None else kind()


def sees_queue(name: str) -> bool:
    """Whether the policy of this name chooses by what the waiting requests need."""
    kind = POLICIES.get(name)
    return kind is not None and kind.sees_queue
