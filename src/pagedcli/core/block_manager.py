"""Allocates blocks to sequences: prefix hits and fresh ones at admission, more as they grow, copies on fork writes.

Used by the scheduler; needs neither torch nor the engine. The blocks themselves are in block_pool.py.
"""

from collections.abc import Sequence

from pagedcli.core.block_pool import CacheUser
from pagedcli.core.budget import blocks_for
from pagedcli.core.prefix_lookup import PrefixHit, PrefixLookup
from pagedcli.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    SequenceForked,
    WindowPassed,
)


class BlockManager(PrefixLookup):
    """A pool of blocks, and the operations of sequences on it.

    Every operation is O(1) per block (eviction other than lru: O(log n)). `emit` receives an event after each change;
    with None no event is built. `hash_function` lets tests force collisions.
    """

    # ------------------------------------------------------------------ questions

    def num_new_blocks(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> int:
        """Fresh blocks that allocate would take for num_new_tokens after the hit."""
        num_tokens = self.num_computed_after(seq, hit) + num_new_tokens
        return max(0, self.shape.num_entries(num_tokens) - len(hit.block_ids))

    def num_prefill_blocks(self, seq: CacheUser, hit: PrefixHit, chunk: int) -> int:
        """Free blocks that all tokens of the sequence need, in steps of at most `chunk`, with hits on the free list.

        With windows an upper bound: blocks shared at first may be released before others are taken.
        """
        if not self.has_windows:
            num_left = len(seq.token_ids) - self.num_computed_after(seq, hit)
            return self.num_new_blocks(seq, hit, num_left) + hit.num_free
        return self.shape.most_blocks(len(seq.token_ids), chunk)

    def num_computed_after(self, seq: CacheUser, hit: PrefixHit) -> int:
        """Tokens that the hit saves. The last token is always computed: its logits give the next token."""
        return min(hit.num_spans * self.block_size, len(seq.token_ids) - 1)

    def can_allocate(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> bool:
        """Whether allocate would succeed."""
        return self.num_new_blocks(seq, hit, num_new_tokens) <= len(self.free_block_ids) - hit.num_free

    def num_append_blocks(self, seq: CacheUser, num_new_tokens: int) -> int:
        """Fresh blocks that may_append would take, a copy of a shared partial block included."""
        needed = self.shape.num_entries(seq.num_computed_tokens + num_new_tokens) - len(seq.block_table)
        return needed + self.num_groups * self._must_copy(seq)

    def num_fork_blocks(self, seqs: Sequence[CacheUser]) -> int:
        """Fresh blocks that the next tokens of these sequences take in turn, if no others share their partial blocks:
        the last one to write into a shared block needs no copy."""
        size, num_groups = self.block_size, self.num_groups
        shared = {seq.block_table[seq.num_computed_tokens // size * num_groups] for seq in seqs if self._must_copy(seq)}
        return sum(self.num_append_blocks(seq, 1) for seq in seqs) - len(shared) * num_groups

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
        seq.num_cached_tokens = hit.num_spans * self.block_size
        seq.num_computed_tokens = self.num_computed_after(seq, hit)
        self._grow(seq, num_new_tokens)

    def reuse_more(self, seq: CacheUser) -> int:
        """Share blocks that others have filled since this sequence's prefill began, replacing its partial one.
        Returns how many tokens no longer need computing."""
        first = seq.num_computed_tokens // self.block_size
        num_full_spans = len(seq.token_ids) // self.block_size
        if not self.enable_prefix_caching or first >= num_full_spans or self._must_copy(seq):
            return 0
        self._extend_prefixes(seq, num_full_spans)
        found = self._leading_blocks(seq, first)
        end = first + len(found) // self.num_groups
        num_before = seq.num_computed_tokens
        num_after = min(end * self.block_size, len(seq.token_ids) - 1)
        if num_after <= num_before:
            return 0
        if self._emit is not None:
            hit = PrefixHit(tuple(found), 0, end - first, num_full_spans - first)
            self._emit(self._looked_up(seq, hit, first, num_after - num_before))
        if first * self.num_groups < len(seq.block_table):
            self._drop_partial_blocks(seq)
        self._claim(seq, tuple(found))
        seq.num_cached_tokens = end * self.block_size
        seq.num_computed_tokens = num_after
        return num_after - num_before

    def may_append(self, seq: CacheUser, num_new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for the next tokens of a sequence that has blocks, and mark the blocks that they fill as full.

        Returns the (source, copy) block pairs to copy before the step writes: of a partial block shared by a fork, one
        per group. can_append must be true. While num_computed_tokens < writable_until, there is nothing to do for one
        more token, except fill_last for the last one.
        """
        assert self.can_append(seq, num_new_tokens), "ask can_append first"
        copies = [self._copy_partial_block(seq, i) for i in range(self.num_groups)] if self._must_copy(seq) else []
        self._grow(seq, num_new_tokens)
        return copies

    def release_unseen(self, seq: CacheUser) -> None:
        """Release the blocks that no later token sees, oldest first."""
        table, released = seq.block_table, []
        for group in range(self.num_groups):
            index = self.shape.first_kept(group, seq.num_computed_tokens) * self.num_groups + group
            while (index := index - self.num_groups) >= 0 and (block_id := table[index]) is not None:
                table[index] = None
                released.append((index, block_id))
        block_ids = tuple(block_id for _, block_id in sorted(released))
        for block_id in block_ids:
            self._release(block_id)
        if self._emit is not None and block_ids:
            self._emit(WindowPassed(seq.seq_id, block_ids))

    def fill_last(self, seq: CacheUser) -> None:
        """Mark the last block full, as this step computes its last token."""
        end = seq.writable_until // self.block_size
        self._fill(seq, end - 1, end)

    def fill_known(self) -> None:
        """Mark the blocks full whose last token was pending when it was scheduled. By now it has been read, and
        sequences that ended with it have no blocks."""
        unknown, self._unknown = self._unknown, []
        for seq in unknown:
            if seq.block_table:
                self.fill_last(seq)

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        """Share all the parent's blocks with a new sequence of equal tokens; a partial one is copied on first write."""
        assert not child.block_table, "a forked sequence has no blocks yet"
        for block_id in parent.block_table:
            if block_id is not None:
                self.blocks[block_id].ref_count += 1
        parent.writable_until = child.writable_until = 0
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
        released = tuple(block_id for block_id in reversed(seq.block_table) if block_id is not None)
        num_freed = sum(self._release(block_id) for block_id in released)
        seq.block_table = []
        seq.num_cached_tokens = seq.num_computed_tokens = seq.writable_until = 0
        if self._emit is not None and released:
            self._emit(BlocksReleased(seq.seq_id, released))
        return num_freed

    # ------------------------------------------------------------------ parts

    def _claim(self, seq: CacheUser, block_ids: tuple[int | None, ...]) -> None:
        for block_id in block_ids:
            if block_id is None:
                continue
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
        size = self.block_size
        num_tokens = seq.num_computed_tokens + num_new_tokens
        num_spans = blocks_for(num_tokens, size)
        seq.writable_until = num_spans * size
        num_missing = num_spans * self.num_groups - len(seq.block_table)
        if num_missing > 0:
            fresh = [self._take_free() for _ in range(num_missing)]
            seq.block_table.extend(fresh)
            if self._emit is not None:
                self._emit(BlocksAllocated(seq.seq_id, tuple(fresh)))
        self._fill(seq, seq.num_computed_tokens // size, num_tokens // size)

    def _fill(self, seq: CacheUser, first: int, end: int) -> None:
        """Mark the blocks of the spans first ... end-1 full, which this step computes."""
        if first >= end or not self.enable_prefix_caching:
            return
        if end * self.block_size <= len(seq.token_ids):
            self._mark_full(seq, first, end)
        else:  # by a single token, which is still pending
            self._unknown.append(seq)

    def _mark_full(self, seq: CacheUser, first: int, end: int) -> None:
        """Hash and register the blocks of the spans first ... end-1."""
        self._extend_prefixes(seq, end)
        filled: list[int] = []
        end_index = end * self.num_groups
        for index in range(first * self.num_groups, end_index):
            block_id = seq.block_table[index]
            assert block_id is not None, "the block of a token to compute is kept"
            block = self.blocks[block_id]
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
            hashes = tuple(prefix.hash for prefix in seq.prefixes[end_index - len(filled) : end_index])
            self._emit(BlocksFilled(seq.seq_id, tuple(filled), hashes))

    def _must_copy(self, seq: CacheUser) -> bool:
        """Whether the next token goes into a partial block that a fork shares."""
        index = seq.num_computed_tokens // self.block_size * self.num_groups
        if index >= len(seq.block_table):
            return False
        block_id = seq.block_table[index]
        assert block_id is not None, "the block of a token to compute is kept"
        block = self.blocks[block_id]
        return block.prefix is None and block.ref_count > 1

    def _copy_partial_block(self, seq: CacheUser, group: int) -> tuple[int, int]:
        index = seq.num_computed_tokens // self.block_size * self.num_groups + group
        source_id, copy_id = seq.block_table[index], self._take_free()
        assert source_id is not None, "the block of a token to compute is kept"
        seq.block_table[index] = copy_id
        if self._emit is not None:
            self._emit(BlocksAllocated(seq.seq_id, (copy_id,)))
        self._release(source_id)
        if self._emit is not None:
            self._emit(BlocksReleased(seq.seq_id, (source_id,)))
            self._emit(BlockCopied(seq.seq_id, source_id, copy_id))
        return source_id, copy_id

    def _drop_partial_blocks(self, seq: CacheUser) -> None:
        dropped = tuple(block_id for block_id in seq.block_table[-self.num_groups :] if block_id is not None)
        del seq.block_table[-self.num_groups :]
        for block_id in dropped:
            self._release(block_id)
        if self._emit is not None:
            self._emit(BlocksReleased(seq.seq_id, dropped))
