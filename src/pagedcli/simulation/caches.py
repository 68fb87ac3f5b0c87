"""Caches without a scheduler: one prompt at a time, no output, no running requests.

Requests are one list of block accesses (`Accesses`). From these: the hit rates of LRU at all pool sizes in one pass,
and the hits of the best possible eviction.
"""

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedcli.simulation.requests import Requests, block_keys

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Accesses:
    """The blocks that the prompts look up, request after request, the first block of each prompt first.

    R requests, A accesses. A block that hits saves its tokens; the last token of a prompt is always computed.
    """

    blocks: Ints  # [A] numbers from 0, equal where content and everything before it are equal
    starts: Ints  # [R+1] the accesses of request r are starts[r] ... starts[r+1] - 1
    tokens: Ints  # [A] that a hit saves
    prompt_tokens: Ints  # [R]

    @property
    def num_requests(self) -> int:
        return len(self.starts) - 1

    @property
    def num_unique(self) -> int:
        """Distinct blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def requests(self) -> Ints:
        """[A] the request of each access."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.starts))


def num_warmup(num_requests: int, warmup: float) -> int:
    """Requests that fill the cache without being counted."""
    return min(num_requests, int(num_requests * warmup))


def accesses_of(workload: Requests, block_size: int, *, partial_blocks: bool = False) -> Accesses:
    """The accesses of a workload. With `partial_blocks` the last, partial block of a prompt can hit, too, where the
    trace has its hash, and so can the last token: the definition of kvcache-simulator and llmtrafficlens."""
    numbers: dict[tuple[int, int], int] = {}
    blocks, tokens, starts = array("q"), array("q"), array("q", [0])
    for request in workload.requests:
        keys = list(block_keys(request, workload.hash_size, block_size))
        saved = [block_size] * len(keys)
        num_rest = request.num_prompt_tokens - len(keys) * block_size
        if request.continuations is not None:  # lookups end before the last token of the context
            num_looked_up = (request.num_context_tokens - 1) // block_size
            saved = [block_size if place < num_looked_up else 0 for place in range(len(keys))]
        elif keys and not num_rest and not partial_blocks:
            saved[-1] -= 1  # the last token of a prompt is always computed
        if partial_blocks and num_rest and workload.hash_size is not None:
            num_hashed = request.num_prompt_tokens - (len(request.hashes) - 1) * workload.hash_size  # by the last hash
            if 0 < num_hashed <= workload.hash_size:
                keys.append((request.hashes[-1], num_hashed))
                saved.append(num_rest)
        blocks.extend(numbers.setdefault(key, len(numbers)) for key in keys)
        tokens.extend(saved)
        starts.append(len(blocks))
    prompt_tokens = np.array([request.num_prompt_tokens for request in workload.requests], dtype=np.int64)
    return Accesses(_as_ints(blocks), _as_ints(starts), _as_ints(tokens), prompt_tokens)


def sums_before(values: Ints | Bools) -> Ints:
    """[N+1] the sum of the values before each place, and of all."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])


def ideal_hit_rate(accesses: Accesses) -> float:
    """Share of the prompts' tokens that a cache without limit has."""
    is_first = np.zeros(len(accesses.blocks), dtype=np.bool_)
    is_first[np.unique(accesses.blocks, return_index=True)[1]] = True
    return float(accesses.tokens[~is_first].sum() / max(1, accesses.prompt_tokens.sum()))


def _as_ints(values: "array[int]") -> Ints:
    return np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, dtype=np.int64)


NEVER = np.iinfo(np.int64).max  # the distance of a first access


def stack_distances(accesses: Accesses) -> Ints:
    """[A] the smallest pool, in blocks, in which LRU would still have the block; NEVER for a first access.

    That is the number of distinct blocks used since the block's last use, itself included, when the request arrives.

        requests            a b | a c | a b
        uses, tail first    b a | c a | b a      at places 0 to 5
        previous use        - - | - 1 | 0 3      the last b needs 3 blocks: 4 uses before its request arrives, less
                                                 place 0, less 1 as a was used twice in between (b, a and c are left)

    Source: Mattson et al., Evaluation techniques for storage hierarchies, 1970; all at once as in Olken, Efficient
    methods for calculating the success function of fixed-space replacement policies, 1981: the distinct blocks since a
    use are the uses since then, less the pairs of uses of one block that both lie in between.
    """
    # A block becomes the most recently used one when its request ends, tail first: that is its place.
    starts, requests = accesses.starts, accesses.requests
    request_start, request_end = starts[requests], starts[requests + 1]
    place_of_access = request_start + request_end - 1 - np.arange(len(accesses.blocks))
    by_block = np.lexsort((place_of_access, accesses.blocks))  # accesses in order of block, then of place
    block, place = accesses.blocks[by_block], place_of_access[by_block]
    is_again = np.zeros(len(by_block), dtype=bool)
    is_again[1:] = block[1:] == block[:-1]
    last_use = np.full(len(by_block), -1, dtype=np.int64)
    last_use[1:][is_again[1:]] = place[:-1][is_again[1:]]
    previous, arrival = np.empty_like(last_use), np.empty_like(last_use)  # [A], by place
    previous[place] = last_use
    arrival[place] = request_start[by_block]
    again = np.flatnonzero(previous >= 0)  # places of uses that are not the first of their block
    num_before_arrival = np.searchsorted(again, arrival[again])
    num_pairs = _count_larger(previous[again], num_before_arrival, previous[again])
    distance: Ints = np.full(len(by_block), NEVER, dtype=np.int64)
    distance[again] = arrival[again] - previous[again] - num_pairs
    by_access: Ints = distance[place_of_access]
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
        rank = sums_before(ones)
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
    num_tokens: int  # tokens of the prompts

    def hits_at(self, num_blocks: int) -> tuple[int, int]:
        """(blocks, tokens) that hit in a pool of this size."""
        place = int(np.searchsorted(self.sizes, num_blocks, side="right")) - 1
        return (int(self.blocks[place]), int(self.tokens[place])) if place >= 0 else (0, 0)

    @property
    def ceiling(self) -> tuple[int, int]:
        """(blocks, tokens) that hit in a pool without limit."""
        return (int(self.blocks[-1]), int(self.tokens[-1])) if len(self.sizes) else (0, 0)

    def size_for(self, num_tokens: float) -> int:
        """The smallest pool, in blocks, in which this number of tokens hits, or the most that ever do."""
        place = int(np.searchsorted(self.tokens, num_tokens))
        return 1 if num_tokens <= 0 or not len(self.sizes) else int(self.sizes[min(place, len(self.sizes) - 1)])


def lru_curve(accesses: Accesses, warmup: float = 0.0) -> LruCurve:
    """The hits at every pool size, counted over the requests after the warm-up."""
    first = accesses.starts[num_warmup(accesses.num_requests, warmup)]
    counted, weights = stack_distances(accesses)[first:], accesses.tokens[first:]
    order = np.argsort(counted, kind="stable")
    order = order[: int(np.searchsorted(counted[order], NEVER))]
    sizes, last = np.unique(counted[order][::-1], return_index=True)
    ends = len(order) - 1 - last  # the last access of each size
    num_tokens = int(accesses.prompt_tokens[num_warmup(accesses.num_requests, warmup) :].sum())
    return LruCurve(sizes, ends + 1, np.cumsum(weights[order])[ends], len(counted), num_tokens)


Access = tuple[int, int, int]  # (-place of the next use, -index in the chain, block): the lowest is dropped first


def clairvoyant_hits(blocks: Sequence[int], starts: Sequence[int], num_blocks: int) -> list[int]:
    """Hits of each request where the block that is needed last is evicted, the end of a chain before its start.

    No policy has more hits in total: Belady's rule is optimal also where a request needs several blocks at once and the
    room for the others varies. It evicts only the last cached block of a chain, as whoever needs a block needs those
    before it: being allowed to break chains gains nothing.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """
    next_use = _next_requests(blocks, starts)
    use: int | None
    cached: dict[int, int] = {}  # block -> the next request that needs it, if there is one
    farthest: list[Access] = []  # next accesses of the cached blocks, outdated entries included
    hits = []
    for request in range(len(starts) - 1):
        first, end = starts[request], min(starts[request + 1], starts[request] + num_blocks)
        chain = blocks[first:end]
        num_hits = sum(block in cached for block in chain)
        for block in chain:
            cached.pop(block, None)
        while len(cached) > num_blocks - len(chain):
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
        for index, block in enumerate(chain):
            use = next_use[first + index]
            if use is not None:
                cached[block] = use
                heapq.heappush(farthest, (-use, -index, block))
        hits.append(num_hits)
    return hits


def _next_requests(blocks: Sequence[int], starts: Sequence[int]) -> list[int | None]:
    """For each access, the next request that needs the same block."""
    seen: dict[int, int] = {}
    following: list[int | None] = [None] * len(blocks)
    for request in range(len(starts) - 2, -1, -1):
        places = range(starts[request], starts[request + 1])
        for place in places:
            following[place] = seen.get(blocks[place])
        for place in places:
            seen[blocks[place]] = request
    return following


def best_hits(accesses: Accesses, num_blocks: int, warmup: float = 0.0) -> tuple[int, int]:
    """(tokens that hit in all with the clairvoyant, tokens of the prompts), after the warm-up."""
    hits = np.array(clairvoyant_hits(accesses.blocks.tolist(), accesses.starts.tolist(), num_blocks), dtype=np.int64)
    total, first = sums_before(accesses.tokens), accesses.starts[:-1]
    saved, start = total[first + hits] - total[first], num_warmup(accesses.num_requests, warmup)
    return int(saved[start:].sum()), int(accesses.prompt_tokens[start:].sum())
