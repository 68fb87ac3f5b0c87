"""The shape of a prefix tree: its largest branches, and near twins that diverge within a block. Used by the views."""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pagedcli.core.prefixes import num_equal
from pagedcli.kvevents.tree import Node, PrefixTree
from pagedcli.kvevents.wire import BlockHash

Decode = Callable[[tuple[int, ...]], str]
_SHOWN_TOKENS = 24  # of a branch, decoded


class Shape:
    """Children, sizes and depths of a tree's resident blocks, or of all blocks that it remembers."""

    def __init__(self, tree: PrefixTree, *, with_gone: bool = False) -> None:
        nodes: Iterable[Node] = tree.nodes.values() if with_gone else tree.resident()
        self.nodes = {node.hash: node for node in nodes}
        self.children: dict[BlockHash, list[Node]] = {}
        self.roots: list[Node] = []
        for node in self.nodes.values():
            if node.parent in self.nodes and node.parent is not None:
                self.children.setdefault(node.parent, []).append(node)
            else:
                self.roots.append(node)  # begins a prompt, or its parent is gone or unknown
        self.num_blocks = dict.fromkeys(self.nodes, 1)  # of the subtree
        self.num_tokens = {node.hash: node.num_tokens for node in self.nodes.values()}
        self.depth: dict[BlockHash, int] = {}  # in blocks, 1 for a root
        self._measure()

    @property
    def max_depth(self) -> int:
        return max(self.depth.values(), default=0)

    @property
    def num_orphans(self) -> int:
        """Roots that do not begin a prompt."""
        return sum(node.parent is not None for node in self.roots)

    def _measure(self) -> None:
        children, num_blocks, num_tokens = self.children, self.num_blocks, self.num_tokens
        levels = [self.roots]
        while level := levels[-1]:
            self.depth.update(dict.fromkeys([node.hash for node in level], len(levels)))
            levels.append([child for node in level if node.hash in children for child in children[node.hash]])
        for level in reversed(levels[1:]):  # children before their parents; roots add to nothing
            for node in level:
                assert node.parent is not None, "it is a child"
                num_blocks[node.parent] += num_blocks[node.hash]
                num_tokens[node.parent] += num_tokens[node.hash]


@dataclass(slots=True)
class Branch:
    """A run of blocks without a fork, and the size of its subtree."""

    nodes: list[Node]
    level: int  # 0: begins at a root
    depth: int  # of the first block
    num_children: int  # at its end
    num_blocks: int  # of the whole subtree
    num_tokens: int
    order: tuple[int, ...] = field(default=())


def largest_branches(shape: Shape, most: int) -> list[Branch]:
    """The branches with the most tokens, in tree order: a branch follows the one it continues."""
    chosen: list[Branch] = []
    queue: list[tuple[int, tuple[int, ...], Node]] = []

    def offer(nodes: list[Node], order: tuple[int, ...]) -> None:
        largest = heapq.nlargest(most, nodes, key=lambda node: shape.num_tokens[node.hash])
        for place, node in enumerate(largest):
            heapq.heappush(queue, (-shape.num_tokens[node.hash], (*order, place), node))

    offer(shape.roots, ())
    while queue and len(chosen) < most:
        negative_tokens, order, first = heapq.heappop(queue)
        run, children = [first], shape.children.get(first.hash, [])
        while len(children) == 1:
            run.append(children[0])
            children = shape.children.get(run[-1].hash, [])
        depth, num_blocks = shape.depth[first.hash], shape.num_blocks[first.hash]
        chosen.append(Branch(run, len(order) - 1, depth, len(children), num_blocks, -negative_tokens, order))
        offer(children, order)
    return sorted(chosen, key=lambda branch: branch.order)


def branch_label(branch: Branch, decode: Decode | None) -> str:
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


@dataclass(frozen=True, slots=True)
class Twins:
    """Two blocks after the same prefix that begin with equal tokens: a near miss."""

    first: Node
    second: Node
    num_prefix_tokens: int  # before both blocks
    num_equal: int  # tokens at the start of both blocks
    num_tokens: int  # of the smaller subtree: the most that could have been shared


def near_twins(shape: Shape, most: int) -> list[Twins]:
    """The pairs with the most tokens after the divergence. Needs the tokens, or digests of them."""
    found: list[Twins] = []
    prefix_tokens: dict[BlockHash | None, int] = {None: 0}
    for parent, siblings in _families(shape):
        before = prefix_tokens[parent]
        for node in siblings:
            prefix_tokens[node.hash] = before + node.num_tokens
        known = sorted((node for node in siblings if node.tokens), key=lambda node: node.tokens or b"")
        for a, b in pairwise(known):  # neighbours have the longest common prefix
            # equal content under two hashes: different adapters or salts, not a divergence
            num_common = 0 if a.tokens == b.tokens else num_equal(a.tokens or b"", b.tokens or b"") // 8
            if num_common:
                tokens = min(shape.num_tokens[a.hash], shape.num_tokens[b.hash])
                found.append(Twins(a, b, before, num_common, tokens))
    return heapq.nlargest(most, found, key=lambda twins: (twins.num_tokens, twins.num_equal))


def token_ids(nodes: Iterable[Node]) -> list[int]:
    tokens: array[int] = array("q")
    for node in nodes:
        if node.tokens is None:
            break
        tokens.frombytes(node.tokens)
    return tokens.tolist()


def _families(shape: Shape) -> Iterator[tuple[BlockHash | None, list[Node]]]:
    """Siblings, parents before their children."""
    queue: list[tuple[BlockHash | None, list[Node]]] = [(None, [node for node in shape.roots if node.parent is None])]
    while queue:
        parent, siblings = queue.pop()
        yield parent, siblings
        queue += [(node.hash, shape.children[node.hash]) for node in siblings if node.hash in shape.children]
