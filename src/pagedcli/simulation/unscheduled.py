"""The block manager without a scheduler: one prompt at a time, no output, no running requests.

What scripts compute, with our own eviction policies. For LRU, stack_distance.py gives the same for all sizes at once.
"""

import struct
from collections.abc import Iterable
from itertools import pairwise

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
        self.block_table: list[int] = []
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


def unscheduled_hits(accesses: Accesses, num_blocks: int, policy: Eviction = "lru") -> Ints:
    """[R] blocks that hit. Of a prompt larger than the pool only as many blocks are kept as the pool has.

    next-use knows all prompts from the start.
    """
    manager = BlockManager(num_blocks, 1, eviction=policy)
    hits = np.zeros(accesses.num_requests, dtype=np.int64)
    prompts = _prompts(accesses, num_blocks)
    if policy == "next-use":
        prompts = list(prompts)
        for prompt in prompts:
            manager.expect(prompt)
    for request, prompt in enumerate(prompts):
        if not prompt.token_ids:
            continue
        hit = manager.lookup(prompt)
        hits[request] = len(hit.block_ids)
        manager.begin_step()
        manager.allocate(prompt, hit, len(prompt.token_ids) - manager.num_computed_after(prompt, hit))
        manager.confirm_filled(this_step=True)
        manager.deallocate(prompt)
    return hits


def _prompts(accesses: Accesses, num_blocks: int) -> Iterable[Prompt]:
    blocks, starts = accesses.blocks.tolist(), accesses.starts.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        yield Prompt(request, blocks[first : min(end, first + num_blocks)])


def tokens_of_hits(accesses: Accesses, hits: Ints) -> Ints:
    """[R] tokens that the first `hits` blocks of each request save."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(accesses.tokens)])
    first = accesses.starts[:-1]
    saved: Ints = total[first + hits] - total[first]
    return saved
