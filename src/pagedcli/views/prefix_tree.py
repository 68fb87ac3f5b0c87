"""The tree of prefixes of a run: its full blocks by content, and how often lookups found them. A view of PoolState.

Used by the picture of the prefix tree. Contents stay in it after their eviction.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pagedcli.events as ev
from pagedcli.trace.dispatch import View
from pagedcli.trace.state import PoolState


@dataclass(slots=True)
class Branch:
    """Blocks in a row that the same lookups found."""

    num_blocks: int
    num_hits: int  # lookups that found them
    label: str  # the request that computed them first
    start: int  # blocks before it
    branches: list["Branch"] = field(default_factory=list)  # branches that were found, the most often found first
    num_unfound: int = 0  # further continuations, which no lookup found

    @property
    def num_saved_blocks(self) -> int:
        """Blocks found in it and after it, counted once per lookup."""
        return sum(each.num_hits * each.num_blocks for each in self.walk())

    def walk(self) -> Iterator["Branch"]:
        """It and all after it, in the order in which they are drawn."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting.extend(reversed(branch.branches))


@dataclass(slots=True)
class _Node:
    label: str
    num_hits: int = 0
    children: list[int] = field(default_factory=list)


class PrefixTree(View):
    """Collects contents and hits; of several groups of layers those of the first."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._roots: list[int] = []
        self.num_lookups = 0

    def on_blocks_filled(self, event: ev.BlocksFilled | ev.BlocksRestored, state: PoolState) -> None:
        seq = state.seqs[event.seq_id]
        for block_id in event.block_ids:
            block_hash = state.hashes[block_id]
            assert block_hash is not None, "it is full"
            if block_hash in self._nodes or state.block_groups[block_id]:
                continue
            self._nodes[block_hash] = _Node(seq.label)
            parent = state.parent_hashes[block_id]
            before = None if parent is None else self._nodes.get(parent)
            (self._roots if before is None else before.children).append(block_hash)

    on_blocks_restored = on_blocks_filled

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        self.num_lookups += not state.seqs[event.seq_id].repeats and event.reason != "continued"

    def on_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        if state.seqs[event.seq_id].repeats:  # it finds its own blocks
            return
        for block_id in event.block_ids:
            node = None if block_id is None else self._nodes.get(state.hashes[block_id] or 0)
            if node is not None:
                node.num_hits += 1

    def root(self) -> Branch:
        """The whole tree below an empty branch."""
        root = Branch(0, self.num_lookups, "", 0)
        waiting = [(root, self._roots)]
        while waiting:
            parent, hashes = waiting.pop()
            for block_hash in hashes:
                node, num_blocks = self._nodes[block_hash], 1
                if not node.num_hits:
                    parent.num_unfound += 1
                    continue
                label, num_hits = node.label, node.num_hits
                while len(node.children) == 1 and self._nodes[node.children[0]].num_hits == num_hits:
                    node, num_blocks = self._nodes[node.children[0]], num_blocks + 1
                branch = Branch(num_blocks, num_hits, label, parent.start + parent.num_blocks)
                parent.branches.append(branch)
                waiting.append((branch, node.children))
            parent.branches.sort(key=lambda each: -each.num_hits)
        return root


def pruned(root: Branch, most: int) -> tuple[Branch, int]:
    """The tree with the `most` branches that saved most, and how many were left out."""
    sizes = sorted(((each.num_saved_blocks, id(each)) for each in root.walk() if each is not root), reverse=True)
    kept = {identity for _, identity in sizes[:most]}

    def copy(branch: Branch) -> Branch:
        return Branch(
            branch.num_blocks, branch.num_hits, branch.label, branch.start,
            [copy(each) for each in branch.branches if id(each) in kept], branch.num_unfound,
        )  # fmt: skip

    return copy(root), len(sizes) - len(kept)
