"""Allocates blocks to sequences: prefix hits and fresh ones at admission, more as they grow, copies on fork writes.

Used by the scheduler; needs neither torch nor the engine. The blocks themselves are in block_pool.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    Emit,
    Eviction,
    MissReason,
    PrefixLookedUp,
    SequenceForked,
)
from pagedcli.kvcache.block_pool import BlockPool, CacheUser
from pagedcli.kvcache.eviction import NextUse
from pagedcli.kvcache.prefix_hash import TOKEN_BYTES, HashFunction, Prefix, hash_block, token_bytes


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached part of a sequence: leading full blocks, verified to be equal."""

    block_ids: tuple[int, ...]
    num_free: int  # of these, blocks on the free list, which would leave it
    num_asked: int  # full blocks of the sequence


class BlockManager(BlockPool):
    """A pool of blocks, and the operations of sequences on it.

    Every operation is O(1) per block (eviction other than lru: O(log n)). `emit` receives an event after each change;
    with None no event is built. `hash_function` lets tests force collisions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction: Eviction = "lru",
        emit: Emit | None = None,
        hash_function: HashFunction = hash_block,
    ) -> None:
        super().__init__(num_blocks, block_size, eviction=eviction, emit=emit)
        self.enable_prefix_caching = enable_prefix_caching
        self._hash_function = hash_function
        self._queue = self._policy if isinstance(self._policy, NextUse) and enable_prefix_caching else None

    # ------------------------------------------------------------------ questions

    def lookup(self, seq: CacheUser) -> PrefixHit:
        """The leading full blocks of the sequence that are cached. May hash more of it; changes nothing else."""
        if not self.enable_prefix_caching:
            return PrefixHit((), 0, len(seq.token_ids) // self.block_size)
        self._extend_prefixes(seq, len(seq.token_ids) // self.block_size)
        block_ids = self._leading_blocks(seq, 0)
        num_free = sum(self.blocks[block_id].ref_count == 0 for block_id in block_ids)
        return PrefixHit(tuple(block_ids), num_free, len(seq.prefixes))

    def num_new_blocks(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> int:
        """Fresh blocks that allocate would take for num_new_tokens after the hit."""
        num_tokens = self.num_computed_after(seq, hit) + num_new_tokens
        return max(0, -(-num_tokens // self.block_size) - len(hit.block_ids))

    def num_computed_after(self, seq: CacheUser, hit: PrefixHit) -> int:
        """Tokens that the hit saves. The last token is always computed: its logits give the next token."""
        return min(len(hit.block_ids) * self.block_size, len(seq.token_ids) - 1)

    def can_allocate(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> bool:
        """Whether allocate would succeed."""
        return self.num_new_blocks(seq, hit, num_new_tokens) <= len(self.free_block_ids) - hit.num_free

    def can_append_in_place(self, seq: CacheUser) -> bool:
        """Whether the next token goes into an unshared partial block and does not fill it: may_append of one token
        would then change nothing."""
        index = seq.num_computed_tokens // self.block_size
        num_filled = seq.num_computed_tokens - index * self.block_size
        return 0 < num_filled < self.block_size - 1 and self.blocks[seq.block_table[index]].ref_count == 1

    def num_append_blocks(self, seq: CacheUser, num_new_tokens: int) -> int:
        """Fresh blocks that may_append would take, a copy of a shared partial block included."""
        num_tokens = seq.num_computed_tokens + num_new_tokens
        needed = -(-num_tokens // self.block_size) - len(seq.block_table)
        return needed + self._must_copy(seq)

    def num_fork_blocks(self, seqs: Sequence[CacheUser]) -> int:
        """Fresh blocks that the next tokens of these sequences take in turn, if no others share their partial blocks:
        the last one to write into a shared block needs no copy."""
        shared = {seq.block_table[seq.num_computed_tokens // self.block_size] for seq in seqs if self._must_copy(seq)}
        return sum(self.num_append_blocks(seq, 1) for seq in seqs) - len(shared)

    def can_append(self, seq: CacheUser, num_new_tokens: int = 1) -> bool:
        """Whether may_append would succeed."""
        return self.num_append_blocks(seq, num_new_tokens) <= len(self.free_block_ids)

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser, *, first: bool = False) -> None:
        """A sequence joined the waiting queue at its back, or as its first one: next-use keeps what it will ask for."""
        if self._queue is not None:
            self._extend_prefixes(seq, len(seq.token_ids) // self.block_size)
            self._queue.expect(seq.seq_id, seq.prefixes, first=first)

    def forget(self, seq: CacheUser) -> None:
        """A sequence left the waiting queue."""
        if self._queue is not None:
            self._queue.forget(seq.seq_id, seq.prefixes)

    # ------------------------------------------------------------------ changes

    def allocate(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> None:
        """Give a sequence without blocks its hits and fresh blocks for num_new_tokens more, and mark the blocks that
        this step fills as full. Sets its num_cached_tokens and num_computed_tokens.

        The hit must be current, and can_allocate true.
        """
        assert not seq.block_table, "allocate is called once, at prefill"
        assert self.can_allocate(seq, hit, num_new_tokens), "ask can_allocate first"
        if self._emit is not None:
            self._emit(self._looked_up(seq, hit, 0, self.num_computed_after(seq, hit)))
        self._claim(seq, hit.block_ids)
        self.forget(seq)
        seq.num_cached_tokens = len(hit.block_ids) * self.block_size
        seq.num_computed_tokens = self.num_computed_after(seq, hit)
        self._grow(seq, num_new_tokens)

    def reuse_more(self, seq: CacheUser) -> int:
        """Share blocks that others have filled since this sequence's prefill began, replacing its partial one.
        Returns how many tokens no longer need computing."""
        first = seq.num_computed_tokens // self.block_size
        num_full_blocks = len(seq.token_ids) // self.block_size
        if not self.enable_prefix_caching or first >= num_full_blocks or self._must_copy(seq):
            return 0
        self._extend_prefixes(seq, num_full_blocks)
        found = self._leading_blocks(seq, first)
        num_before = seq.num_computed_tokens
        num_after = min((first + len(found)) * self.block_size, len(seq.token_ids) - 1)
        if num_after <= num_before:
            return 0
        if self._emit is not None:
            hit = PrefixHit(tuple(found), 0, num_full_blocks - first)
            self._emit(self._looked_up(seq, hit, first, num_after - num_before))
        if first < len(seq.block_table):
            self._drop_partial_block(seq)
        self._claim(seq, tuple(found))
        seq.num_cached_tokens = (first + len(found)) * self.block_size
        seq.num_computed_tokens = num_after
        return num_after - num_before

    def may_append(self, seq: CacheUser, num_new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for the next tokens of a sequence that has blocks, and mark the blocks that they fill as full.

        Returns the (source, copy) block pairs to copy before the step writes: at most one, of a partial block shared
        by a fork. can_append must be true.
        """
        assert self.can_append(seq, num_new_tokens), "ask can_append first"
        copies = [self._copy_partial_block(seq)] if self._must_copy(seq) else []
        self._grow(seq, num_new_tokens)
        return copies

    def fill_known(self, seq: CacheUser, num_computed_tokens: int) -> None:
        """Mark the last block full if its last token, already computed, was still pending at may_append."""
        end = len(seq.token_ids) // self.block_size
        if self.enable_prefix_caching and len(seq.token_ids) == end * self.block_size <= num_computed_tokens:
            self._mark_full(seq, end - 1, end)

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        """Share all the parent's blocks with a new sequence of equal tokens; a partial one is copied on first write."""
        assert not child.block_table, "a forked sequence has no blocks yet"
        for block_id in parent.block_table:
            self.blocks[block_id].ref_count += 1
        child.block_table = parent.block_table.copy()
        child.prefixes = parent.prefixes.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        if self._emit is not None:
            table = tuple(child.block_table)
            self._emit(SequenceForked(parent.seq_id, child.seq_id, table, child.num_computed_tokens))

    def deallocate(self, seq: CacheUser) -> int:
        """Release all blocks of a sequence, tail first: the head of a prefix is evicted last. Returns how many became
        free."""
        released = tuple(reversed(seq.block_table))
        num_freed = sum(self._release(block_id) for block_id in released)
        seq.block_table = []
        seq.num_cached_tokens = seq.num_computed_tokens = 0
        if self._emit is not None and released:
            self._emit(BlocksReleased(seq.seq_id, released))
        return num_freed

    # ------------------------------------------------------------------ parts

    def _extend_prefixes(self, seq: CacheUser, num_full_blocks: int) -> None:
        prefixes = seq.prefixes
        first = len(prefixes)
        if first >= num_full_blocks:
            return
        tokens = token_bytes(seq.token_ids[first * self.block_size : num_full_blocks * self.block_size])
        if prefixes:
            parent: Prefix | None = prefixes[-1]
        else:
            parent = None if seq.cache_salt is None else Prefix.salt(seq.cache_salt)
        num_bytes = self.block_size * TOKEN_BYTES
        for start in range(0, len(tokens), num_bytes):
            parent = Prefix(tokens[start : start + num_bytes], parent, self._hash_function)
            prefixes.append(parent)

    def _leading_blocks(self, seq: CacheUser, first: int) -> list[int]:
        """The cached blocks equal to the sequence's full blocks from index `first` on, up to the first miss."""
        prefixes, block_ids = seq.prefixes, []
        for index in range(first, len(prefixes)):
            block = self._find(prefixes[index])
            if block is None:
                break
            assert block.prefix is not None
            self._share_prefix(seq, index, block.prefix)
            block_ids.append(block.block_id)
        return block_ids

    @staticmethod
    def _share_prefix(seq: CacheUser, index: int, prefix: Prefix) -> None:
        """Share one node per content: the next comparison is an identity check."""
        seq.prefixes[index] = prefix
        if index + 1 < len(seq.prefixes):
            seq.prefixes[index + 1].parent = prefix

    def _claim(self, seq: CacheUser, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
            if self._policy is not None:
                self._policy.hit(block_id)
            block.ref_count += 1
        seq.block_table.extend(block_ids)
        if self._emit is not None and block_ids:
            self._emit(BlocksReused(seq.seq_id, block_ids))

    def _grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        """Add fresh blocks for num_new_tokens after the computed ones; mark the blocks that they fill as full."""
        num_tokens = seq.num_computed_tokens + num_new_tokens
        num_missing = -(-num_tokens // self.block_size) - len(seq.block_table)
        if num_missing > 0:
            fresh = [self._take_free() for _ in range(num_missing)]
            seq.block_table.extend(fresh)
            if self._emit is not None:
                self._emit(BlocksAllocated(seq.seq_id, tuple(fresh)))
        if self.enable_prefix_caching:
            num_known = min(num_tokens, len(seq.token_ids))  # a token may still be pending: see fill_known
            self._mark_full(seq, seq.num_computed_tokens // self.block_size, num_known // self.block_size)

    def _mark_full(self, seq: CacheUser, first: int, end: int) -> None:
        """Hash and register the blocks first ... end-1 of the table, which this step fills."""
        if first >= end:
            return
        self._extend_prefixes(seq, end)
        filled: list[int] = []
        for index in range(first, end):
            block = self.blocks[seq.block_table[index]]
            if block.prefix is not None:  # a hit whose last token is recomputed but not written
                continue
            prefix = seq.prefixes[index]
            twin = self._find(prefix)
            if twin is not None and twin.prefix is not None:
                prefix = twin.prefix
                self._share_prefix(seq, index, prefix)
            self._filled_now.append(block.block_id)
            block.prefix = prefix
            self._index(block)
            filled.append(block.block_id)
        if self._emit is not None and filled:
            hashes = tuple(prefix.hash for prefix in seq.prefixes[first:end])[-len(filled) :]
            self._emit(BlocksFilled(seq.seq_id, tuple(filled), hashes))

    def _must_copy(self, seq: CacheUser) -> bool:
        """Whether the next token goes into a partial block that a fork shares."""
        index = seq.num_computed_tokens // self.block_size
        if index >= len(seq.block_table):
            return False
        block = self.blocks[seq.block_table[index]]
        return block.prefix is None and block.ref_count > 1

    def _copy_partial_block(self, seq: CacheUser) -> tuple[int, int]:
        index = seq.num_computed_tokens // self.block_size
        source_id, copy_id = seq.block_table[index], self._take_free()
        seq.block_table[index] = copy_id
        if self._emit is not None:
            self._emit(BlocksAllocated(seq.seq_id, (copy_id,)))
        self._release(source_id)
        if self._emit is not None:
            self._emit(BlocksReleased(seq.seq_id, (source_id,)))
            self._emit(BlockCopied(seq.seq_id, source_id, copy_id))
        return source_id, copy_id

    def _drop_partial_block(self, seq: CacheUser) -> None:
        block_id = seq.block_table.pop()
        self._release(block_id)
        if self._emit is not None:
            self._emit(BlocksReleased(seq.seq_id, (block_id,)))

    def _looked_up(self, seq: CacheUser, hit: PrefixHit, first: int, tokens_hit: int) -> PrefixLookedUp:
        """The record of a lookup of the blocks from index `first` on."""
        end = first + len(hit.block_ids)
        missed = len(hit.block_ids) < hit.num_asked
        miss_reason: MissReason | None
        if not self.enable_prefix_caching:
            miss_reason = "caching_off"
        elif hit.num_asked == 0:
            miss_reason = "no_full_block"
        else:
            miss_reason = "no_match" if missed else None
        return PrefixLookedUp(
            seq_id=seq.seq_id,
            reason="continued" if seq.block_table else "resumed" if seq.num_preemptions else "new",
            num_tokens=len(seq.token_ids),
            blocks_asked=hit.num_asked,
            blocks_hit=len(hit.block_ids),
            tokens_hit=tokens_hit,
            first_miss=end if missed else None,
            missing_hash=seq.prefixes[end].hash if missed and self.enable_prefix_caching else None,
            miss_reason=miss_reason,
            partial_tokens=self._partial_tokens(seq, end),
        )
