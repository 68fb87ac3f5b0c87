"""What a larger cache would have kept: for each block stored again, how many more blocks would have held it.

The blocks that left the cache, the last one on top, are what a cache with more blocks would still hold, as long as
it evicts in the same order (least recently used): with N more blocks, the N on top. A block that is stored again at
place p of that stack needed at most p more blocks; then it leaves the stack, as the larger cache would have hit it.
"""

from dataclasses import dataclass, field

from pagedcli.kvevents.tree import Node


class _CountTree:
    """How many of the last marks still stand, in O(log n) (a Fenwick tree that doubles)."""

    def __init__(self) -> None:
        self.counts = [0] * 1025
        self.num_marks = 0
        self._standing: list[bool] = []

    def mark(self) -> int:
        """Set the next mark; returns its number, from 1."""
        self.num_marks += 1
        self._standing.append(True)
        if self.num_marks >= len(self.counts):
            self._rebuild(2 * len(self.counts))
        else:
            self._add(self.num_marks, 1)
        return self.num_marks

    def unmark(self, number: int) -> None:
        self._standing[number - 1] = False
        self._add(number, -1)

    def num_from(self, number: int) -> int:
        """Marks that stand from this one on, itself included."""
        return self._sum(self.num_marks) - self._sum(number - 1)

    def _add(self, place: int, change: int) -> None:
        while place < len(self.counts):
            self.counts[place] += change
            place += place & -place

    def _sum(self, place: int) -> int:
        total = 0
        while place:
            total += self.counts[place]
            place &= place - 1
        return total

    def _rebuild(self, length: int) -> None:
        self.counts = [0] * length
        for place, stands in enumerate(self._standing, 1):
            if stands:
                self._add(place, 1)


@dataclass(slots=True)
class LargerCache:
    """Watches one tree. Blocks that left because the cache was cleared or restarted would have left any cache."""

    num_more_blocks: list[int] = field(default_factory=list)  # per block stored again after an eviction
    num_tokens: list[int] = field(default_factory=list)  # of that block
    _marks: _CountTree = field(default_factory=_CountTree)
    _place_of: dict[Node, int] = field(default_factory=dict)

    def gone(self, node: Node) -> None:
        if node.cause == "evicted":
            self._place_of[node] = self._marks.mark()
        else:
            self._reset()

    def back(self, node: Node) -> None:
        place = self._place_of.pop(node, None)
        if place is not None:
            self.num_more_blocks.append(self._marks.num_from(place))
            self.num_tokens.append(node.num_tokens)
            self._marks.unmark(place)

    def _reset(self) -> None:
        if self._place_of:
            self._place_of.clear()
            self._marks = _CountTree()


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """With this many more blocks, at least this much would have been kept."""

    num_more_blocks: int
    num_blocks_kept: int
    num_tokens_kept: int


def curve(watchers: list[LargerCache], most_points: int = 12) -> list[CurvePoint]:
    """The curve over all trees, each with that many more blocks; at most so many points, the last one keeps all."""
    rows = sorted(
        (more, tokens) for w in watchers for more, tokens in zip(w.num_more_blocks, w.num_tokens, strict=True)
    )
    points: list[CurvePoint] = []
    num_tokens = 0
    for place, (more, tokens) in enumerate(rows, 1):
        num_tokens += tokens
        if place == len(rows) or rows[place][0] != more:
            points.append(CurvePoint(more, place, num_tokens))
    if len(points) <= most_points:
        return points
    chosen = [round(i * (len(points) - 1) / (most_points - 1)) for i in range(most_points)]
    return [points[i] for i in chosen]
