"""The block manager without a scheduler: one prompt at a time, no output, no running requests.

What scripts compute, with our own eviction policies. For LRU, stack_distance.py gives the same for all sizes at once.
"""

import itertools
import struct
from collections import deque
from collections.abc import Iterator
from typing import cast

import numpy as np

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.groups import TableShape
from pagedcli.core.limits import STEP_TOKENS
from pagedcli.events import Eviction
from pagedcli.simulation.accesses import Accesses, Ints
from pagedcli.simulation.requests import MAX_TOKENS, chain_of


class Prompt:
    """A CacheUser of one prompt of full blocks. Of its tokens only the number matters: its chain is given."""

    def __init__(self, seq_id: int, blocks: list[int], tables: TableShape) -> None:
        self.seq_id = seq_id
        self.token_ids = cast("list[int]", range(len(blocks) * tables.block_size))
        self.block_table: list[int | None] = []
        self.prefixes = chain_of((struct.pack("<q", block) for block in blocks), tables.num_groups)
        self.cache_salt: str | None = None
        self.num_computed_tokens = self.num_cached_tokens = self.num_writable_tokens = self.num_preemptions = 0


def unscheduled_hits(
    accesses: Accesses,
    num_blocks: int,
    policy: Eviction = "lru",
    known: Ints | None = None,
    *,
    windows: tuple[int | None, ...] = (None,),
    chunk: int = STEP_TOKENS,
) -> Ints:
    """[R] blocks of each group of layers that hit. Of a prompt larger than the pool only its beginning is kept.

    `known` [R]: when request r runs, next-use knows the requests before known[r]; None: all of them. With windows, a
    prompt is computed in chunks, and releases what it no longer sees.
    """
    manager = BlockManager(num_blocks, accesses.block_size, windows=windows, eviction=policy)
    if not manager.has_windows:
        chunk = MAX_TOKENS
    hits = np.zeros(accesses.num_requests, dtype=np.int64)
    ends = itertools.repeat(accesses.num_requests) if known is None else known.tolist()
    to_come, queue = _prompts(accesses, manager, chunk), deque[Prompt]()
    for request, end in zip(range(accesses.num_requests), ends, strict=False):
        for prompt in itertools.islice(to_come, max(1 - len(queue), end - request - len(queue))):
            manager.expect(prompt)
            queue.append(prompt)
        prompt = queue.popleft()
        if prompt.token_ids:
            hits[request] = _serve(manager, prompt, chunk)
    return hits


def _serve(manager: BlockManager, prompt: Prompt, chunk: int) -> int:
    """Compute a prompt and release it. Returns the blocks of a group that hit."""
    hit, num_tokens = manager.lookup(prompt), len(prompt.token_ids)
    num_hits = hit.num_spans
    num_new = min(chunk, num_tokens - manager.num_computed_after(prompt, hit))
    manager.begin_step()
    manager.allocate(prompt, hit, num_new)
    while True:
        manager.confirm_filled(latest=True)
        prompt.num_computed_tokens += num_new
        if prompt.num_computed_tokens == num_tokens:
            break
        manager.begin_step()
        num_hits += -(-manager.reuse_more(prompt) // manager.block_size)
        manager.release_unseen(prompt)
        num_new = min(chunk, num_tokens - prompt.num_computed_tokens)
        manager.may_append(prompt, num_new)
    manager.deallocate(prompt)
    return num_hits


def _prompts(accesses: Accesses, manager: BlockManager, chunk: int) -> Iterator[Prompt]:
    blocks, starts, tables = accesses.blocks.tolist(), accesses.starts.tolist(), manager.tables
    most = tables.longest(manager.num_blocks, chunk, MAX_TOKENS) // tables.block_size
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        yield Prompt(request, blocks[first : min(end, first + most)], tables)


def tokens_of_hits(accesses: Accesses, hits: Ints) -> Ints:
    """[R] tokens that the first `hits` blocks of each request save."""
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(accesses.tokens)])
    first = accesses.starts[:-1]
    saved: Ints = total[first + hits] - total[first]
    return saved
