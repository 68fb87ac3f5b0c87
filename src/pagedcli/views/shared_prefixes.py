"""Block tables that begin alike: each shared beginning gets a name, and is then told once."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_LEAST_BLOCKS = 2  # a single block is as short as a name

Blocks = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `num_blocks` blocks of some block tables, from `start` on told by this name."""

    name: str
    parent: str | None  # the name of what comes before `start`
    start: int
    block_ids: tuple[int, ...]  # the blocks from `start` on
    seq_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.block_ids)


def shared_prefixes(tables: Mapping[int, Blocks]) -> tuple[list[SharedPrefix], dict[int, SharedPrefix]]:
    """The shared beginnings of block tables (by sequence), parents first, and for each sequence its longest one.

    Tables 0 1 2 3 8, 0 1 2 3 9 and 0 1 5 share P1 = 0 1, the first two also P2 = P1 2 3. A block that a window has
    released ends a beginning.
    """
    found: list[SharedPrefix] = []
    longest: dict[int, SharedPrefix] = {}
    # sequences with equal blocks up to `at`, told by `parent` up to its end
    groups: deque[tuple[list[int], int, SharedPrefix | None]] = deque([(list(tables), 0, None)])
    while groups:
        seq_ids, start, parent = groups.popleft()
        for same in _by_block(seq_ids, start, tables):
            end = start + 1
            while (further := _by_block(same, end, tables)) and len(further[0]) == len(same):
                end += 1
            begin = 0 if parent is None else parent.end
            block_ids = tuple(block_id for block_id in tables[same[0]][begin:end] if block_id is not None)
            inner = parent
            if len(block_ids) >= _LEAST_BLOCKS:
                name = f"P{len(found) + 1}"
                inner = SharedPrefix(name, None if parent is None else parent.name, begin, block_ids, tuple(same))
                found.append(inner)
                longest.update(dict.fromkeys(same, inner))
            groups.append((same, end, inner))
    return found, longest


def _by_block(seq_ids: Iterable[int], place: int, tables: Mapping[int, Blocks]) -> list[list[int]]:
    """The sequences grouped by the block at a place, without those that are alone."""
    by_block: dict[int, list[int]] = defaultdict(list)
    for seq_id in seq_ids:
        table = tables[seq_id]
        if place < len(table) and (block_id := table[place]) is not None:
            by_block[block_id].append(seq_id)
    return [same for same in by_block.values() if len(same) > 1]
