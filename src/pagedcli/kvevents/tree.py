"""The prefix tree of one cache, rebuilt from events: resident blocks, their copies, media and times. Also the
shape of a tree, and what a larger cache would have kept.

One tree per publisher and cache group. Removed blocks are remembered, to recognise one that is stored again: its tokens
were computed twice. Trees that share a History share its memory limit: the blocks gone for longest are dropped first.
"""

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import Annotated, Literal

from pagedcli.kvevents.wire import BlockHash
from pagedcli.trace.tokens import Decode

MAX_BLOCKS = 1_000_000
MAX_TOKEN_BYTES = 512 << 20
_MAX_MEDIA = 16
_NUM_RECENT = 4096  # lifetimes and pauses over which medians are taken
OTHER_MEDIUM = "OTHER"

Cause = Literal["evicted", "cleared", "restarted"]


@dataclass(slots=True, eq=False)
class Node:
    """One block: its tokens, its parent and its history."""

    home: "dict[BlockHash, Node]"  # the nodes of its tree
    hash: BlockHash
    parent: BlockHash | None  # None: it begins a prompt
    num_tokens: int
    lora: str | None
    tokens: bytes | None = None  # int64, kept only on request
    num_copies: int = 0  # copies in all media
    stored_s: float | None = None  # time at which the oldest present copy was stored
    gone_s: float | None = None
    cause: Cause | None = None  # why it is gone; None: it is resident


@dataclass(slots=True)
class History:
    """What trees have in common: how many blocks are resident in all of them, those that were removed, and the limits
    of blocks and tokens."""

    max_blocks: int = MAX_BLOCKS
    max_token_bytes: int = MAX_TOKEN_BYTES
    num_resident: int = 0  # blocks with at least one copy
    peak_resident: int = 0
    num_blocks: int = 0
    token_bytes: int = 0
    num_forgotten: int = 0
    gone: dict[Node, None] = field(default_factory=dict)  # the longest gone first

    def make_room(self) -> bool:
        """Make room for one more block by forgetting the one gone for longest. False if all are resident."""
        if self.num_blocks >= self.max_blocks:
            oldest = next(iter(self.gone), None)
            if oldest is None:
                return False
            del self.gone[oldest]
            del oldest.home[oldest.hash]
            self.token_bytes -= len(oldest.tokens or b"")
            self.num_blocks -= 1
            self.num_forgotten += 1
        self.num_blocks += 1
        return True

    def keep_tokens(self, node: Node, tokens: bytes) -> None:
        """Keep the tokens of a block, unless the limit is reached."""
        token_bytes = self.token_bytes - len(node.tokens or b"") + len(tokens)
        if token_bytes <= self.max_token_bytes:
            self.token_bytes, node.tokens = token_bytes, tokens


class ServerTree:
    """A tree changed by `store`, `remove`, `clear` and `move`, with counts. Unknown times are None."""

    def __init__(self, history: History | None = None, larger: "LargerCache | None" = None) -> None:
        self.nodes: dict[BlockHash, Node] = {}
        self.copies: dict[str, dict[BlockHash, int]] = {}  # medium -> block -> copies
        self.capacity: dict[str, int] = {}  # medium -> blocks, if published
        self.num_resident = 0  # blocks with at least one copy
        self.num_resident_tokens = 0
        self.num_stored = 0  # copies
        self.num_removed = 0  # copies
        self.num_unique = 0
        self.num_again: dict[Cause, int] = {"evicted": 0, "cleared": 0, "restarted": 0}
        self.num_tokens_again = 0
        self.num_more_copies = 0  # stored while a copy was resident
        self.num_vetoed = 0  # blocks that another cache group had, but were computed again, as this one lacked them
        self.num_unknown_removals = 0
        self.num_refused = 0  # blocks over the limit
        self.lifetimes_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self.pauses_s: deque[float] = deque(maxlen=_NUM_RECENT)  # time from gone to stored again
        self._history = history or History()
        self.larger = larger

    def store(
        self,
        block_hash: BlockHash,
        parent: BlockHash | None,
        num_tokens: int,
        medium: str,
        time_s: float | None,
        *,
        lora: str | None = None,
    ) -> Node | None:
        """A copy of a block became resident. None if the tree is full."""
        node = self.nodes.get(block_hash)
        if node is None:
            if not self._history.make_room():
                self.num_refused += 1
                return None
            node = self.nodes[block_hash] = Node(self.nodes, block_hash, parent, num_tokens, lora)
            self.num_unique += 1
        self.num_stored += 1
        if node.num_copies:
            self.num_more_copies += 1
        else:
            if node.cause is not None:
                self._came_back(node, time_s)
            node.stored_s = time_s
            self.num_resident += 1
            self.num_resident_tokens += node.num_tokens
            history = self._history
            history.num_resident += 1
            history.peak_resident = max(history.peak_resident, history.num_resident)
        node.num_copies += 1
        copies = self._copies_on(medium)
        copies[block_hash] = copies.get(block_hash, 0) + 1
        return node

    def remove(self, block_hash: BlockHash, medium: str | None, time_s: float | None) -> None:
        """A copy of a block was removed; without a medium, from any that has one."""
        node = self.nodes.get(block_hash)
        copies = None
        if node is not None and node.num_copies:
            where = self._medium_with(block_hash) if medium is None else medium
            copies = None if where is None else self.copies.get(self._medium_name(where))
        if node is None or copies is None or block_hash not in copies:
            self.num_unknown_removals += 1
            return
        self.num_removed += 1
        if copies[block_hash] > 1:
            copies[block_hash] -= 1
        else:
            del copies[block_hash]
        node.num_copies -= 1
        if not node.num_copies:
            self._leave(node, "evicted", time_s)

    def clear(self, cause: Cause, time_s: float | None, medium: str | None = None) -> None:
        """All copies were removed, or all on one medium."""
        for name in list(self.copies) if medium is None else [self._medium_name(medium)]:
            for block_hash, count in self.copies.pop(name, {}).items():
                node = self.nodes[block_hash]
                node.num_copies -= count
                self.num_removed += count
                if not node.num_copies:
                    self._leave(node, cause, time_s)

    def move(self, block_hash: BlockHash, old_medium: str, new_medium: str) -> None:
        """A copy moved to another medium."""
        copies = self.copies.get(self._medium_name(old_medium), {})
        if block_hash not in copies:
            self.num_unknown_removals += 1
            return
        copies[block_hash] -= 1
        if not copies[block_hash]:
            del copies[block_hash]
        new = self._copies_on(new_medium)
        new[block_hash] = new.get(block_hash, 0) + 1

    def note_alone(self, block_hash: BlockHash, more: int) -> None:
        """A block that has just come back did so by itself (`more` 1), or not after all (-1)."""
        node = self.nodes.get(block_hash)
        if node is not None and self.larger is not None:
            self.larger.alone(node, more)

    def resident(self) -> Iterator[Node]:
        """The blocks with at least one copy, in no particular order."""
        return (node for node in self.nodes.values() if node.num_copies)

    # ------------------------------------------------------------------ parts

    def _leave(self, node: Node, cause: Cause, time_s: float | None) -> None:
        node.cause, node.gone_s = cause, time_s
        self.num_resident -= 1
        self.num_resident_tokens -= node.num_tokens
        self._history.num_resident -= 1
        self._history.gone[node] = None
        if time_s is not None and node.stored_s is not None and cause == "evicted":
            self.lifetimes_s.append(max(0.0, time_s - node.stored_s))
        if self.larger is not None:
            self.larger.gone(node)

    def _came_back(self, node: Node, time_s: float | None) -> None:
        assert node.cause is not None, "it was gone"
        self.num_again[node.cause] += 1
        self.num_tokens_again += node.num_tokens
        if time_s is not None and node.gone_s is not None:
            self.pauses_s.append(max(0.0, time_s - node.gone_s))
        if self.larger is not None:
            self.larger.back(node)
        node.cause = None
        del self._history.gone[node]

    def _copies_on(self, medium: str) -> dict[BlockHash, int]:
        return self.copies.setdefault(self._medium_name(medium), {})

    def _medium_name(self, medium: str) -> str:
        """The medium, or one common name for all beyond the first few."""
        return medium if medium in self.copies or len(self.copies) < _MAX_MEDIA else OTHER_MEDIUM

    def _medium_with(self, block_hash: BlockHash) -> str | None:
        return next((medium for medium, copies in self.copies.items() if block_hash in copies), None)


_SHOWN_TOKENS = 24  # tokens of a branch, decoded


class TreeShape:
    """Children, sizes and depths of a tree's resident blocks.

    Lists by place: parents come before their children. Plain numbers, as there may be a million blocks.
    """

    def __init__(self, tree: ServerTree) -> None:
        self.nodes = list(tree.resident())
        self.parents = self._parents()  # places; -1: begins a prompt, or its parent is gone or unknown
        if not all(map(lt, self.parents, range(len(self.nodes)))):
            self._sort()
        self.roots = [place for place, parent in enumerate(self.parents) if parent < 0]
        self.num_blocks = [1] * len(self.nodes)  # sums over the subtree
        self.num_tokens = [node.num_tokens for node in self.nodes]  # sums over the subtree
        self.num_children = [0] * len(self.nodes)
        self.depth = [1] * len(self.nodes)  # blocks from the root on, 1 for a root
        self._first_child = [-1] * len(self.nodes)
        self._next_sibling = [-1] * len(self.nodes)
        self._measure()

    @property
    def max_depth(self) -> int:
        return max(self.depth, default=0)

    @property
    def num_orphans(self) -> int:
        """Roots that do not begin a prompt."""
        return sum(self.nodes[place].parent is not None for place in self.roots)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens[place] for place in self.roots)

    def children(self, place: int) -> list[int]:
        found, child = [], self._first_child[place]
        while child >= 0:
            found.append(child)
            child = self._next_sibling[child]
        return found

    def run(self, place: int) -> list[int]:
        """The block and those after it up to the next fork."""
        found = [place]
        while self.num_children[place] == 1:
            place = self._first_child[place]
            found.append(place)
        return found

    def _parents(self) -> list[int]:
        place_of = {node.hash: place for place, node in enumerate(self.nodes)}
        return [-1 if node.parent is None else place_of.get(node.parent, -1) for node in self.nodes]

    def _sort(self) -> None:
        """Put parents first. Blocks whose parents form a circle are in no tree, and left out."""
        children: dict[int, list[int]] = {}
        for place, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(place)
        order = children.get(-1, [])
        for place in order:  # grows
            order += children.get(place, ())
        self.nodes = [self.nodes[place] for place in order]
        self.parents = self._parents()

    def _measure(self) -> None:
        num_blocks, num_tokens, num_children, depth = self.num_blocks, self.num_tokens, self.num_children, self.depth
        first_child, next_sibling = self._first_child, self._next_sibling
        for place, parent in enumerate(self.parents):
            if parent >= 0:
                depth[place] = depth[parent] + 1
        for place in range(len(self.nodes) - 1, -1, -1):  # children before their parents
            parent = self.parents[place]
            if parent >= 0:
                num_blocks[parent] += num_blocks[place]
                num_tokens[parent] += num_tokens[place]
                num_children[parent] += 1
                next_sibling[place], first_child[parent] = first_child[parent], place


@dataclass(slots=True)
class TreeBranch:
    """A run of blocks without a fork, and the size of its subtree."""

    nodes: list[Node]
    level: int  # 0: begins at a root
    depth: int  # depth of the first block
    num_children: int  # branches at its end
    num_blocks: int  # whole subtree
    num_tokens: int
    order: tuple[int, ...] = field(default=())


def largest_branches(shape: TreeShape, most: int) -> list[TreeBranch]:
    """The branches with the most tokens, in tree order: a branch follows the one it continues."""
    chosen: list[TreeBranch] = []
    queue: list[tuple[int, tuple[int, ...], int]] = []

    def offer(places: list[int], order: tuple[int, ...]) -> None:
        largest = heapq.nlargest(most, places, key=shape.num_tokens.__getitem__)
        for rank, place in enumerate(largest):
            heapq.heappush(queue, (-shape.num_tokens[place], (*order, rank), place))

    offer(shape.roots, ())
    while queue and len(chosen) < most:
        negative_tokens, order, first = heapq.heappop(queue)
        run = shape.run(first)
        children = shape.children(run[-1])
        nodes, num_blocks = [shape.nodes[place] for place in run], shape.num_blocks[first]
        chosen.append(
            TreeBranch(nodes, len(order) - 1, shape.depth[first], len(children), num_blocks, -negative_tokens, order)
        )
        offer(children, order)
    return sorted(chosen, key=lambda branch: branch.order)


def branch_label(branch: TreeBranch, decode: Decode | None) -> str:
    """The text at the beginning of a branch, or the hash of its first block."""
    if decode is not None:
        ids = token_ids(branch.nodes[:2])[:_SHOWN_TOKENS]
        if ids:
            return repr(decode(tuple(ids)))
    return hash_text(branch.nodes[0].hash)


def hash_text(value: BlockHash) -> str:
    """The first 16 characters of a block's hash."""
    if isinstance(value, int):
        return f"{value & (1 << 64) - 1:016x}"
    return (value.hex() if isinstance(value, bytes) else value)[:16]


def token_ids(nodes: Iterable[Node]) -> list[int]:
    tokens: array[int] = array("q")
    for node in nodes:
        if node.tokens is None:
            break
        tokens.frombytes(node.tokens)
    return tokens.tolist()


SIZES = tuple(sorted({int(2**octave * step) for octave in range(20) for step in (1, 1.5)}))  # 1, 2, 3, 4, 6, 8, 12 ...


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """With this many more blocks, at least this much would have been kept."""

    num_more_blocks: int
    num_blocks_kept: int
    num_prompt_blocks_kept: Annotated[int, "blocks of prompts"]  # the others came back alone, as generated answers do
    num_tokens_kept: Annotated[int, "tokens not recomputed"]


class LargerCache:
    """Watches one tree: it is told when content leaves the cache and when it returns. A clear or a restart empties a
    cache of any size. These are lower bounds by the order of evictions: the events show no hits, so that simulating the
    blocks that were stored (as `answers.hits` does) would not know what was used last."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = sizes
        self.num_blocks_kept = [0] * len(sizes)
        self.num_tokens_kept = [0] * len(sizes)
        self.num_alone_kept = [0] * len(sizes)
        self._kept_from: dict[Node, int] = {}  # resident blocks that came back -> place of the smallest size
        self._left: list[OrderedDict[Node, None]] = [OrderedDict() for _ in sizes]  # per size, the longest gone first

    def gone(self, node: Node) -> None:
        self._kept_from.pop(node, None)
        for size, left in zip(self.sizes, self._left, strict=True):
            if node.cause == "evicted":
                left[node] = None
                if len(left) > size:
                    left.popitem(last=False)
            else:
                left.clear()

    def back(self, node: Node) -> None:
        for place in range(len(self.sizes) - 1, -1, -1):  # whatever a small cache has, every larger one has
            if node not in self._left[place]:
                break
            del self._left[place][node]
            self.num_blocks_kept[place] += 1
            self.num_tokens_kept[place] += node.num_tokens
            self._kept_from[node] = place

    def alone(self, node: Node, more: int) -> None:
        for place in range(self._kept_from.get(node, len(self.sizes)), len(self.sizes)):
            self.num_alone_kept[place] += more


def curve(watchers: Sequence[LargerCache]) -> list[CurvePoint]:
    """The curve over all trees, each with that many more blocks: a point for each size that keeps more than the
    previous one."""
    points: list[CurvePoint] = []
    for place, size in enumerate(watchers[0].sizes if watchers else ()):
        num_blocks, num_tokens, num_alone = (
            sum(kept[place] for kept in counts)
            for counts in zip(
                *((w.num_blocks_kept, w.num_tokens_kept, w.num_alone_kept) for w in watchers), strict=True
            )
        )
        if num_blocks > (points[-1].num_blocks_kept if points else 0):
            points.append(CurvePoint(size, num_blocks, num_blocks - num_alone, num_tokens))
    return points
