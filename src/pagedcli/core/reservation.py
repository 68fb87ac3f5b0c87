"""Contiguous reservation, as engines did before paging, to compare with: see `pagedcli bench reservation`.

A sequence gets blocks for its longest text when it starts, as one piece of the pool. Needs no torch.
"""

from bisect import insort
from collections.abc import Callable
from typing import Any

import pagedcli.events as ev
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache import Cache
from pagedcli.core.limits import Limits
from pagedcli.core.prefix_lookup import CacheUser, PrefixHit


class ReservedBlocks(BlockManager):
    """Gives each sequence the first free piece between those of others that is long enough. Nothing is shared, and
    sequences must not fork. `longest`: tokens that a sequence may ever have in the cache."""

    def __init__(
        self, num_blocks: int, block_size: int, *, longest: Callable[[Any], int], emit: ev.Emit | None = None
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False, emit=emit)
        self._longest = longest
        self._pieces: list[tuple[int, int]] = []  # the first block of each and the one after its last, by place

    def num_prefill_blocks(self, seq: CacheUser, hit: PrefixHit, chunk: int) -> int:
        """The blocks of its piece; more than the pool has while no free piece is long enough."""
        num_blocks = self._num_reserved(seq)
        return num_blocks if self._first_fit(num_blocks) is not None else self.num_blocks + 1

    def deallocate(self, seq: CacheUser) -> int:
        if seq.block_table:
            first = seq.block_table[0]
            assert first is not None, "a piece is kept whole"
            self._pieces.remove((first, first + len(seq.block_table)))
        return super().deallocate(seq)

    def _grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        if not seq.block_table:
            num_blocks = self._num_reserved(seq)
            first = self._first_fit(num_blocks)
            assert first is not None, "ask num_prefill_blocks first"
            insort(self._pieces, (first, first + num_blocks))
            piece = tuple(range(first, first + num_blocks))
            for block_id in piece:
                self.pool.claim(block_id)
            seq.block_table.extend(piece)
            if self._emit is not None:
                self._emit(ev.BlocksAllocated(seq.seq_id, piece))
        super()._grow(seq, num_new_tokens)

    def _num_reserved(self, seq: CacheUser) -> int:
        return self.tables.num_entries(self._longest(seq))

    def _first_fit(self, num_blocks: int) -> int | None:
        """The first block of the free piece."""
        end = 0
        for first, after in [*self._pieces, (self.num_blocks, self.num_blocks)]:
            if first - end >= num_blocks:
                return end
            end = after
        return None


def reserving_cache(num_blocks: int, limits: Limits, emit: ev.Emit | None = None, *, of_model: bool) -> Cache:
    """A cache that reserves the tokens that each request may have, or with `of_model` the model's length for each."""

    def longest(seq: Any) -> int:
        return limits.max_model_len if of_model else seq.num_prompt_tokens + seq.max_new_tokens - 1

    return Cache(ReservedBlocks(num_blocks, limits.block_size, longest=longest, emit=emit))
