"""What the best eviction could reach: hits of a cache that knows all requests to come.

A workload is a list of blocks: request r looks up blocks[starts[r]:starts[r + 1]], first block first. Numbers are equal
where content and everything before it are equal, so a block always has the same one before it. Requests come one after
another and need their whole chain at once; of a chain longer than the cache, the part that fits.
"""

import heapq
from collections.abc import Sequence

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
    farthest: list[Access] = []  # of the cached blocks, outdated entries included
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


def unconstrained_hits(blocks: Sequence[int], starts: Sequence[int], num_blocks: int) -> list[int]:
    """Hits of each request in a cache without chains: blocks are looked up one by one, any of them can hit, and none
    has to be kept, not even while its request runs.

    At least the clairvoyant's, and a bound for every policy.
    """
    next_use = _next_places(blocks)
    cached: dict[int, int] = {}  # block -> its next place
    farthest: list[tuple[int, int]] = []
    hits = []
    for request in range(len(starts) - 1):
        num_hits = 0
        for place in range(starts[request], starts[request + 1]):
            block, use = blocks[place], next_use[place]
            num_hits += cached.pop(block, None) is not None
            if use is None:
                continue
            cached[block] = use
            heapq.heappush(farthest, (-use, block))
            while len(cached) > num_blocks:
                use, dropped = heapq.heappop(farthest)
                if cached.get(dropped) == -use:
                    del cached[dropped]
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


def _next_places(blocks: Sequence[int]) -> list[int | None]:
    """For each access, the place of the next access to the same block."""
    seen: dict[int, int] = {}
    following: list[int | None] = [None] * len(blocks)
    for place in range(len(blocks) - 1, -1, -1):
        following[place] = seen.get(blocks[place])
        seen[blocks[place]] = place
    return following
