"""Assigns rows to parts: rows are sorted by the chain hashes of their first blocks and cut by tokens.

Used by the distributed run; works on arrays, without text, files, a cluster or Ray.
Rows with a common prefix become neighbours at every depth, so a contiguous share computes the prefix once.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagedcli.core.prefixes import unit_digests

DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # blocks at the start of a prompt that are in its sort key
_CUT_TOLERANCE = 0.1  # share of a part's cost by which a cut may move to fall between two prefixes
Ints = npt.NDArray[np.int64]


class PrefixKeys:
    """What rows are ordered and weighted by: about 100 bytes per row, and 2 per block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._keys = array("Q")  # chain hashes at DEPTHS, row after row; 0 past the end of a prompt
        self._num_prompt_tokens = array("q")
        self._num_output_tokens = array("q")
        self._blocks = array("H")  # 16 bits of each block's chain hash: enough to count shared blocks
        self._starts = array("q", [0])  # the first place of each row in _blocks

    def __len__(self) -> int:
        return len(self._num_prompt_tokens)

    def add(self, token_ids: Sequence[int], num_output_tokens: int, cache_salt: str | None = None) -> None:
        hashes = unit_digests(token_ids[: DEPTHS[-1] * self.block_size], cache_salt, self.block_size)
        self._keys.extend(hashes[depth - 1] if depth <= len(hashes) else 0 for depth in DEPTHS)
        self._blocks.extend(value & 0xFFFF for value in hashes)
        self._starts.append(len(self._blocks))
        self._num_prompt_tokens.append(len(token_ids))
        self._num_output_tokens.append(num_output_tokens)

    def ordered(self) -> "OrderedRows":
        """All rows, with those that share a prefix next to each other."""
        keys = np.frombuffer(self._keys, np.uint64).reshape(-1, len(DEPTHS)) if len(self) else np.empty((0, 1))
        rows = np.lexsort(keys.T[::-1])  # the last key counts most, and equal rows keep the order of the input
        shared = np.zeros(len(self), np.int64)
        for place, (before, row) in enumerate(pairwise(rows.tolist()), 1):
            shared[place] = self._num_shared_blocks(before, row) * self.block_size
        num_prompt = np.frombuffer(self._num_prompt_tokens, np.int64)[rows]
        num_output = np.frombuffer(self._num_output_tokens, np.int64)[rows]
        return OrderedRows(rows, shared, num_prompt - shared + num_output)

    def _num_shared_blocks(self, one: int, other: int) -> int:
        """Number of equal leading blocks. A chain hash covers all blocks before it, so bisection finds the end."""
        first, second = self._starts[one], self._starts[other]
        most, blocks = min(self._starts[one + 1] - first, self._starts[other + 1] - second), self._blocks
        return bisect_left(range(most), True, key=lambda i: blocks[first + i] != blocks[second + i])


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """Rows in the order of their prefixes."""

    rows: Ints  # indexes in the input
    shared_tokens: Ints  # prompt tokens in full blocks shared with the previous row
    costs: Ints  # tokens of prompt and output that each has to compute beyond it

    def parts(self, num_parts: int) -> list[Ints]:
        """At most num_parts contiguous, non-empty pieces of about equal cost."""
        ends = [*balanced_cuts(self.costs, self.shared_tokens, num_parts), len(self.rows)]
        starts = [0, *ends[:-1]]
        return [self.rows[start:end] for start, end in zip(starts, ends, strict=True) if end > start]


def balanced_cuts(costs: Ints, shared_tokens: Ints, num_parts: int) -> list[int]:
    """Where to cut a sequence of rows into parts of about equal cost: the first row of each part but the first.

    Each cut is made where rows share least, within a tenth of a part's cost of the ideal position.
    """
    before = np.concatenate([[0], np.cumsum(costs)])
    slack = _CUT_TOLERANCE * before[-1] / num_parts
    cuts: list[int] = []
    for part in range(1, num_parts):
        ideal = before[-1] * part / num_parts
        low, high = np.searchsorted(before, [ideal - slack, ideal + slack + 1])
        near = np.arange(low, min(high, len(costs)))
        if not len(near):
            cuts.append(min(int(low), len(costs)))
            continue
        distance = np.abs(before[near] - ideal)
        cuts.append(int(near[np.lexsort((distance, shared_tokens[near]))[0]]))
    return list(np.maximum.accumulate(cuts)) if cuts else []
