"""What a larger cache would have kept: how many of the blocks stored again, by the number of additional blocks.

A cache with N more blocks evicts N blocks later: if it evicts in the same order, it still has the last N blocks that
left and were not stored again. So for each N a list of that length is kept; a block that is stored again while on the
list would have been a hit. This is a lower bound, as hits would also have saved evictions.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.kvevents.tree import Node

SIZES = tuple(sorted({int(2**octave * step) for octave in range(20) for step in (1, 1.5)}))  # 1, 2, 3, 4, 6, 8, 12 ...


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """With this many more blocks, at least this much would have been kept."""

    num_more_blocks: int
    num_blocks_kept: int
    num_tokens_kept: int


class LargerCache:
    """Watches one tree. A clear or a restart empties a cache of any size."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = sizes
        self.num_blocks_kept = [0] * len(sizes)
        self.num_tokens_kept = [0] * len(sizes)
        self._left: list[OrderedDict[Node, None]] = [OrderedDict() for _ in sizes]  # per size, the longest gone first

    def gone(self, node: Node) -> None:
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


def curve(watchers: Sequence[LargerCache]) -> list[CurvePoint]:
    """The curve over all trees, each with that many more blocks: a point for each size that keeps more than the
    previous one."""
    points: list[CurvePoint] = []
    for place, size in enumerate(watchers[0].sizes if watchers else ()):
        num_blocks = sum(watcher.num_blocks_kept[place] for watcher in watchers)
        if num_blocks > (points[-1].num_blocks_kept if points else 0):
            points.append(CurvePoint(size, num_blocks, sum(watcher.num_tokens_kept[place] for watcher in watchers)))
    return points
