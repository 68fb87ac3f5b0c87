"""Caches to compare with pages, see `pagedcli bench reservation`: contiguous pieces, as engines reserved them before
paging, and pages that nothing shares. Needs no torch.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pagedcli.events as ev
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache import Cache, make_cache
from pagedcli.core.limits import Limits
from pagedcli.core.prefix_lookup import CacheUser, PrefixHit


class ReservedBlocks(BlockManager):
    """Gives each sequence that starts the first free piece that is long enough. `longest`: tokens that a sequence may
    ever have in the cache."""

    may_fork = False

    def __init__(
        self, num_blocks: int, block_size: int, *, longest: Callable[[Any], int], emit: ev.Emit | None = None
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False, emit=emit)
        self._longest = longest
        self._pieces: list[range] = []  # in use, by place

    def num_prefill_blocks(self, seq: CacheUser, hit: PrefixHit, chunk: int) -> int:
        """The blocks of its piece; more than the pool has while no free piece is long enough."""
        piece = self._first_fit(seq)
        return self.num_blocks + 1 if piece is None else len(piece)

    def deallocate(self, seq: CacheUser) -> int:
        self._pieces = [piece for piece in self._pieces if piece[0] not in seq.block_table]
        return super().deallocate(seq)

    def _grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        if not seq.block_table:
            piece = self._first_fit(seq)
            assert piece is not None, "ask num_prefill_blocks first"
            insort(self._pieces, piece, key=itemgetter(0))
            for block_id in piece:
                self.pool.claim(block_id)
            seq.block_table.extend(piece)
            if self._emit is not None:
                self._emit(ev.BlocksAllocated(seq.seq_id, tuple(piece)))
        super()._grow(seq, num_new_tokens)

    def _first_fit(self, seq: CacheUser) -> range | None:
        num_blocks, end = self.tables.num_entries(self._longest(seq)), 0
        for piece in [*self._pieces, range(self.num_blocks, self.num_blocks + 1)]:
            if piece[0] - end >= num_blocks:
                return range(end, end + num_blocks)
            end = piece[-1] + 1
        return None


def reserving_cache(num_blocks: int, limits: Limits, emit: ev.Emit | None = None, *, of_model: bool) -> Cache:
    """A cache that reserves the tokens that each request may have, or with `of_model` the model's length for each, at
    most the pool."""
    most = min(limits.max_model_len, num_blocks * limits.block_size)

    def longest(seq: Any) -> int:
        return most if of_model else seq.num_prompt_tokens + seq.max_new_tokens - 1

    return Cache(ReservedBlocks(num_blocks, limits.block_size, longest=longest, emit=emit))


def unshared_cache(num_blocks: int, limits: Limits, emit: ev.Emit | None = None) -> Cache:
    """A cache with pages, in which each sequence computes its own."""
    cache = make_cache(num_blocks, replace(limits, enable_prefix_caching=False), emit)
    cache.blocks.may_fork = False
    return cache
