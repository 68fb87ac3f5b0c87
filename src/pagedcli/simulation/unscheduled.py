"""The block manager without a scheduler: one prompt at a time, no output, no running requests.

What scripts compute, with our own eviction policies. For LRU, stack_distance.py gives the same for all sizes at once.
"""

import itertools
import struct
from collections import deque
from collections.abc import Iterator

import numpy as np

from pagedcli.events import Eviction
from pagedcli.kvcache.block_manager import BlockManager
from pagedcli.kvcache.prefix_hash import Prefix
from pagedcli.simulation.accesses import Accesses, Ints


class Prompt:
    """A CacheUser of one prompt. A token stands for a block, as only the blocks' identity matters."""

    def __init__(self, seq_id: int, blocks: list[int]) -> None:
        self.seq_id = seq_id
        self.token_ids = blocks
        self.block_table: list[int | None] = []
        self.prefixes = self._chain(blocks)
        self.cache_salt: str | None = None
        self.num_computed_tokens = self.num_cached_tokens = self.num_preemptions = 0

    @staticmethod
    def _chain(blocks: list[int]) -> list[Prefix]:
        prefixes: list[Prefix] = []
        parent: Prefix | None = None
        for block in blocks:
            parent = Prefix(struct.pack("<q", block), parent)
            prefixes.append(parent)
        return prefixes


def unscheduled_hits(accesses: Accesses, num_blocks: int, policy: Eviction = "lru", known: Ints | None = None) -> Ints:
    """[R] blocks that hit. Of a prompt larger than the pool only as many blocks are kept as the pool has.

    `known` [R]: when request r runs, next-use knows the requests before known[r]; None: all of them.
    """
    manager = BlockManager(num_blocks, 1, eviction=policy)
    hits = np.zeros(accesses.num_requests, dtype=np.int64)
    ends = itertools.repeat(accesses.num_requests) if known is None else known.tolist()
    to_come, queue = _prompts(accesses, num_blocks), deque[Prompt]()
    for request, end in zip(range(accesses.num_requests), ends, strict=False):
        for prompt in itertools.islice(to_come, max(1 - len(queue), end - request - len(queue))):
            manager.expect(prompt)
            queue.append(prompt)
        prompt = queue.popleft()
        if not prompt.token_ids:
            continue
        hit = manager.lookup(prompt)
        hits[request] = len(hit.block_ids)
        manager.begin_step()
        manager.allocate(prompt, hit, len(prompt.token_ids) - manager.num_computed_after(prompt, hit))
        manager.confirm_filled(this_step=True)
        manager.deallocate(prompt)
    return hits


def _prompts(accesses: Accesses, num_blocks: int) -> Iterator[Prompt]:
    blocks, starts = accesses.blocks.tolist(), accesses.starts.tolist()
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        yield Prompt(request, blocks[first : min(end, first + num_blocks)])


def tokens_of_hits(accesses: Accesses, hits: Ints) -> Ints:
    """[R] tokens that the first `hits` blocks of each request save."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(accesses.tokens)])
    first = accesses.starts[:-1]
    saved: Ints = total[first + hits] - total[first]
    return saved
