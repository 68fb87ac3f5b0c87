"""LRU hit rates of all cache sizes from one pass: the stack distance of each access (Mattson et al., 1970).

The cache is our block manager's without running requests: a request's hits are those of the moment it arrives, and its
blocks are released tail first, so the head of a prefix is evicted last and the hits of a request are its first blocks.
"""

from dataclasses import dataclass

import numpy as np

from pagedcli.simulation.accesses import Accesses, Bools, Ints, num_warmup

NEVER = np.iinfo(np.int64).max  # the distance of a first access


def stack_distances(accesses: Accesses) -> Ints:
    """[A] the smallest pool, in blocks, in which LRU would still have the block; NEVER for a first access.

    That is the number of distinct blocks used since the block's last use, itself included, when the request arrives.
    """
    # tail first: the place of an access in the order in which blocks become the most recently used
    starts, requests = accesses.starts, accesses.requests
    first, end = starts[requests], starts[requests + 1]
    place = first + end - 1 - np.arange(len(accesses.blocks))
    order = np.lexsort((place, accesses.blocks))
    block, at = accesses.blocks[order], place[order]
    follows = np.zeros(len(order), dtype=bool)
    follows[1:] = block[1:] == block[:-1]
    before = np.full(len(order), -1, dtype=np.int64)  # place of the last use
    before[1:][follows[1:]] = at[:-1][follows[1:]]
    previous = np.empty_like(before)  # [A], by place
    previous[at] = before
    # distinct blocks after `before` = uses after it until the request arrives, less those used again before it arrives
    asked = np.empty_like(before)
    asked[at] = first[order]  # [A], by place: the request's first place
    known = np.flatnonzero(previous >= 0)
    used_again_at = known  # by place: its block's earlier use is at previous[known], and `known` is in order
    num_until = np.searchsorted(used_again_at, asked[known])
    num_again = _count_larger(previous[known], num_until, previous[known])
    distance: Ints = np.full(len(order), NEVER, dtype=np.int64)
    distance[known] = asked[known] - previous[known] - num_again
    by_access: Ints = distance[place]
    return by_access


def _count_larger(values: Ints, ends: Ints, limits: Ints) -> Ints:
    """For each query q: how many of values[:ends[q]] are larger than limits[q]. Values and limits are at least 0.

    A wavelet matrix: the bits of the values from the highest on, each a stable partition; all queries at once.
    """
    larger = np.zeros(len(ends), dtype=np.int64)
    low, high = np.zeros(len(ends), dtype=np.int64), ends.astype(np.int64)
    num_bits = int(max(values.max(initial=0), limits.max(initial=0))).bit_length()
    for bit in range(num_bits - 1, -1, -1):
        ones = (values >> bit) & 1
        rank = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ones)])  # ones before each place
        num_zeros = len(values) - int(rank[-1])
        ones_low, ones_high = rank[low], rank[high]
        has_one = ((limits >> bit) & 1).astype(bool)
        larger += np.where(has_one, 0, ones_high - ones_low)
        low = np.where(has_one, num_zeros + ones_low, low - ones_low)
        high = np.where(has_one, num_zeros + ones_high, high - ones_high)
        values = np.concatenate([values[ones == 0], values[ones == 1]])
    return larger


@dataclass(frozen=True, slots=True)
class LruCurve:
    """Hits of an LRU cache without running requests, for every pool size, after the warm-up."""

    sizes: Ints  # [K] ascending: the pool sizes, in blocks, at which the hits change
    blocks: Ints  # [K] hits from that size on
    tokens: Ints  # [K]
    num_blocks: int  # looked up
    num_tokens: int  # of the prompts

    def hits_at(self, num_blocks: int) -> tuple[int, int]:
        """(blocks, tokens) that hit in a pool of this size."""
        place = int(np.searchsorted(self.sizes, num_blocks, side="right")) - 1
        return (int(self.blocks[place]), int(self.tokens[place])) if place >= 0 else (0, 0)

    @property
    def ceiling(self) -> tuple[int, int]:
        """(blocks, tokens) that hit in a pool without limit."""
        return (int(self.blocks[-1]), int(self.tokens[-1])) if len(self.sizes) else (0, 0)

    def size_for(self, share: float) -> int | None:
        """The smallest pool, in blocks, that saves this share of the tokens that an unlimited one saves."""
        if not len(self.sizes):
            return None
        place = int(np.searchsorted(self.tokens, share * int(self.tokens[-1])))
        return int(self.sizes[min(place, len(self.sizes) - 1)])


def lru_curve(accesses: Accesses, distances: Ints, warmup: float = 0.0) -> LruCurve:
    """The hits at every pool size, counted over the requests after the warm-up."""
    first = accesses.first_access(warmup)
    counted, weights = distances[first:], accesses.tokens[first:]
    order = np.argsort(counted, kind="stable")
    order = order[: int(np.searchsorted(counted[order], NEVER))]
    sizes, last = np.unique(counted[order][::-1], return_index=True)
    ends = len(order) - 1 - last  # the last access of each size
    num_tokens = int(accesses.prompt_tokens[num_warmup(accesses.num_requests, warmup) :].sum())
    return LruCurve(sizes, ends + 1, np.cumsum(weights[order])[ends], len(counted), num_tokens)


def hits_per_request(accesses: Accesses, hit: Bools) -> Ints:
    """[R] tokens that hit, where `hit` [A] is true for the first blocks of a request that hit."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.where(hit, accesses.tokens, 0))])
    hits: Ints = total[accesses.starts[1:]] - total[accesses.starts[:-1]]
    return hits
