"""The block tables of sequences: which blocks they share, take, fill, copy and release.

Used by the scheduler; needs neither torch nor the engine. The blocks themselves are in core.block_pool.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import pagedcli.events as ev
from pagedcli.core.block_pool import BlockPool
from pagedcli.core.budget import blocks_for
from pagedcli.core.groups import TableShape
from pagedcli.core.prefix_lookup import CacheUser, PrefixHit, PrefixLookup
from pagedcli.core.prefixes import HashFunction, Prefix, hash_block


class BlockManager(PrefixLookup):
    """Owns the pool; sequences own their tables.

    `emit` receives an event after each change; with None no event is built. `hash_function` lets tests force
    collisions.
    """

    may_fork = True  # whether samples share the blocks of their prompt

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        eviction: str = "lru",
        emit: ev.Emit | None = None,
        hash_function: HashFunction = hash_block,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        pool = BlockPool(num_blocks, eviction=eviction, emit=emit)
        tables = TableShape(block_size, windows)
        super().__init__(pool, tables, enable_prefix_caching=enable_prefix_caching, hash_function=hash_function)
        self.blocks, self.free_block_ids = pool.blocks, pool.free_block_ids
        self.hash_to_block_id = pool.hash_to_block_id
        self.has_forks = False  # whether sequences have ever shared partial blocks
        sees_queue = pool.policy is not None and pool.policy.sees_queue and enable_prefix_caching
        self._queue = pool.policy if sees_queue else None
        self._emit = emit
        self._filled_now: list[int] = []  # blocks marked full in this step: perhaps not written yet
        self._filled_before: list[int] = []  # the same of unread steps before it
        self._unknown: list[CacheUser] = []  # their last blocks are full once the last token is known

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    # ------------------------------------------------------------------ questions

    def num_new_blocks(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> int:
        """Fresh blocks that allocate would take for num_new_tokens after the hit."""
        num_tokens = self.num_computed_after(seq, hit) + num_new_tokens
        return max(0, self.tables.num_entries(num_tokens) - len(hit.block_ids))

    def num_prefill_blocks(self, seq: CacheUser, hit: PrefixHit, chunk: int) -> int:
        """Free blocks that all tokens of the sequence need, in steps of at most `chunk`, with hits on the free list.

        With windows an upper bound: blocks shared at first may be released before others are taken.
        """
        if not self.has_windows:
            num_left = len(seq.token_ids) - self.num_computed_after(seq, hit)
            return self.num_new_blocks(seq, hit, num_left) + hit.num_free
        return self.tables.most_blocks(len(seq.token_ids), chunk)

    def can_allocate(self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int) -> bool:
        """Whether allocate would succeed."""
        return self.num_new_blocks(seq, hit, num_new_tokens) <= len(self.free_block_ids) - hit.num_free

    def num_append_blocks(self, seq: CacheUser, num_new_tokens: int) -> int:
        """Fresh blocks that may_append would take, a copy of a shared partial block included."""
        needed = self.tables.num_entries(seq.num_computed_tokens + num_new_tokens) - len(seq.block_table)
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

    def is_written(self, block_id: int, prefix: Prefix) -> bool:
        """Whether a block has this content, and the step that computed it has run."""
        is_pending = block_id in self._filled_now or block_id in self._filled_before
        return self.blocks[block_id].prefix is prefix and not is_pending

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser, *, first: bool = False) -> None:
        """A sequence joined the waiting queue at its back, or as its first one: next-use keeps what it will ask for."""
        if self._queue is not None:
            self.extend_prefixes(seq)
            self._queue.expect(seq.seq_id, seq.prefixes[: self._num_asked(seq) * self.num_groups], first=first)

    def forget(self, seq: CacheUser) -> None:
        """A sequence left the waiting queue."""
        if self._queue is not None:
            self._queue.forget(seq.seq_id, seq.prefixes)

    # ------------------------------------------------------------------ changes

    def restore(self, seq: CacheUser, contents: Mapping[int, bytes], place: Callable[[int, bytes], None]) -> None:
        """Take free blocks for missing entries of the sequence's table, in rising order: lookups find them from now on.
        `place` is called with each block and its content, and fills it."""
        indices, block_ids = tuple(contents), [self.pool.take(seq.seq_id) for _ in contents]
        for index, block_id in zip(indices, block_ids, strict=True):
            place(block_id, contents[index])
            self.pool.fill(self.blocks[block_id], seq.prefixes[index])
        for block_id in reversed(block_ids):
            self.pool.release(block_id)
        if self._emit is not None:
            hashes = tuple(prefix.hash for prefix in seq.prefixes[: indices[-1] + 1])
            self._emit(ev.BlocksRestored(seq.seq_id, indices, tuple(block_ids), hashes))

    def allocate(
        self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int, *, num_shared_tokens: int | None = None
    ) -> None:
        """Give a sequence without blocks its hits and fresh blocks for num_new_tokens more, and mark the blocks that
        this step fills as full. Sets its num_cached_tokens and num_computed_tokens.

        The hit must be current, and can_allocate true. `num_shared_tokens` is for the record of the lookup.
        """
        assert not seq.block_table, "allocate is called once, at prefill"
        assert self.can_allocate(seq, hit, num_new_tokens), "ask can_allocate first"
        if self._emit is not None:
            num_fresh, num_computed = self.num_new_blocks(seq, hit, num_new_tokens), self.num_computed_after(seq, hit)
            told = self._looked_up(seq, hit, 0, num_computed, num_fresh=num_fresh, num_shared_tokens=num_shared_tokens)
            self._emit(told)
        self._claim(seq, hit.block_ids)
        self.forget(seq)
        seq.num_cached_tokens = hit.num_spans * self.block_size
        seq.num_computed_tokens = self.num_computed_after(seq, hit)
        self._grow(seq, num_new_tokens)

    def reuse_more(self, seq: CacheUser) -> int:
        """Share blocks that others have filled since this sequence's prefill began, replacing its partial one.
        Returns how many tokens no longer need computing."""
        first = seq.num_computed_tokens // self.block_size
        num_full_spans = self._num_asked(seq)
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
            hit = self._hit(found, num_full_spans - first)
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
        per group. can_append must be true. While num_computed_tokens < num_writable_tokens, there is nothing to do for
        one more token, except fill_last for the last one.
        """
        assert self.can_append(seq, num_new_tokens), "ask can_append first"
        copies = [self._copy_partial_block(seq, i) for i in range(self.num_groups)] if self._must_copy(seq) else []
        self._grow(seq, num_new_tokens)
        return copies

    def make_room_for_draft(self, seq: CacheUser, num_tokens: int) -> int:
        """Make room for so many guessed tokens after the next one, which has room, and for fewer if there are too few
        empty blocks: nothing is evicted for a guess. Returns for how many there is room now."""
        size, num_groups = self.block_size, self.num_groups
        first = seq.num_computed_tokens + 1  # position of the first of them
        num_missing = self.tables.num_entries(first + num_tokens) - len(seq.block_table)
        if num_missing > 0:
            num_taken = self.pool.num_empty(num_missing) // num_groups * num_groups
            fresh = [self.pool.take(seq.seq_id) for _ in range(num_taken)]
            seq.block_table.extend(fresh)
            if self._emit is not None and fresh:
                self._emit(ev.BlocksAllocated(seq.seq_id, tuple(fresh)))
        seq.num_writable_tokens = len(seq.block_table) // num_groups * size
        return min(num_tokens, seq.num_writable_tokens - first)

    def keep_accepted(
        self, seq: CacheUser, num_drafted: int, num_accepted: int, token_ids: tuple[int, ...] | None, *, num_again: int
    ) -> None:
        """A step has computed guessed tokens after the computed ones, and so many of them were right: count these as
        computed, release the blocks of the others, and mark the blocks full that the right ones fill. `token_ids`: of
        the right ones, for the event; `num_again`: what the next step computes once more, for the event."""
        num_before, table = seq.num_computed_tokens, seq.block_table
        seq.num_computed_tokens = num_after = num_before + num_accepted
        num_entries = self.tables.num_entries(num_after)
        released = tuple(block_id for block_id in reversed(table[num_entries:]) if block_id is not None)
        del table[num_entries:]
        seq.num_writable_tokens = num_entries // self.num_groups * self.block_size
        for block_id in released:
            self.pool.release(block_id)
        if self._emit is not None:
            self._emit(ev.DraftChecked(seq.seq_id, num_drafted, num_accepted, released, token_ids, num_again))
        self._fill(seq, num_before // self.block_size, num_after // self.block_size)

    def release_unseen(self, seq: CacheUser, num_behind: int = 0) -> None:
        """Release the blocks that no later token sees, oldest first. `num_behind`: the last computed tokens, which the
        next step computes once more."""
        table, released, num_seen = seq.block_table, [], seq.num_computed_tokens - num_behind
        for group in range(self.num_groups):
            index = self.tables.first_kept(group, num_seen) * self.num_groups + group
            while (index := index - self.num_groups) >= 0 and (block_id := table[index]) is not None:
                table[index] = None
                released.append((index, block_id))
        block_ids = tuple(block_id for _, block_id in sorted(released))
        for block_id in block_ids:
            self.pool.release(block_id)
        if self._emit is not None and block_ids:
            self._emit(ev.WindowPassed(seq.seq_id, block_ids))

    def fill_last(self, seq: CacheUser) -> None:
        """Mark the last block full, as this step computes its last token."""
        end = seq.num_writable_tokens // self.block_size
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
        self.has_forks = True
        for block_id in parent.block_table:
            if block_id is not None:
                self.blocks[block_id].ref_count += 1
        parent.num_writable_tokens = child.num_writable_tokens = 0
        child.block_table = parent.block_table.copy()
        child.prefixes = parent.prefixes.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        if self._emit is not None:
            table = tuple(child.block_table)
            self._emit(ev.SequenceForked(parent.seq_id, child.seq_id, table, child.num_computed_tokens))

    def deallocate(self, seq: CacheUser) -> int:
        """Release all blocks of a sequence, tail first: the head of a prefix is evicted last. Returns how many became
        free."""
        released = tuple(block_id for block_id in reversed(seq.block_table) if block_id is not None)
        num_freed = sum(self.pool.release(block_id) for block_id in released)
        seq.block_table = []
        seq.num_cached_tokens = seq.num_computed_tokens = seq.num_writable_tokens = 0
        if self._emit is not None and released:
            self._emit(ev.BlocksReleased(seq.seq_id, released))
        return num_freed

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """Blocks marked full from now on belong to the next step."""
        self._filled_before += self._filled_now
        self._filled_now = []

    def confirm_filled(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too: what they filled is written."""
        self._filled_before.clear()
        if latest:
            self._filled_now.clear()

    def recover(self, seqs: Iterable[CacheUser]) -> tuple[int, ...]:
        """Free all blocks after a step that raised, and drop those that may be unwritten from the prefix index.

        Returns the blocks that are still cached, as on the free list; the empty ones precede them there, by id.
        Everything is rebuilt from the blocks, as the step may have raised in the middle of a change. The sequences
        of `seqs` had blocks, and keep their block tables.
        """
        unwritten = (*self._filled_before, *self._filled_now)
        self._filled_before, self._filled_now, self._unknown = [], [], []
        held = (block_id for seq in seqs for block_id in reversed(seq.block_table) if block_id is not None)
        return self.pool.recover(unwritten, held)

    # ------------------------------------------------------------------ blocks of a table

    def _claim(self, seq: CacheUser, block_ids: tuple[int | None, ...]) -> None:
        for block_id in block_ids:
            if block_id is not None:
                self.pool.claim(block_id)
        seq.block_table.extend(block_ids)
        if self._emit is not None and block_ids:
            self._emit(ev.BlocksReused(seq.seq_id, block_ids))

    def _grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        """Add fresh blocks for num_new_tokens after the computed ones; mark the blocks that they fill as full."""
        size = self.block_size
        num_tokens = seq.num_computed_tokens + num_new_tokens
        num_spans = blocks_for(num_tokens, size)
        seq.num_writable_tokens = num_spans * size
        num_missing = num_spans * self.num_groups - len(seq.block_table)
        if num_missing > 0:
            fresh = [self.pool.take(seq.seq_id) for _ in range(num_missing)]
            seq.block_table.extend(fresh)
            if self._emit is not None:
                self._emit(ev.BlocksAllocated(seq.seq_id, tuple(fresh)))
        self._fill(seq, seq.num_computed_tokens // size, num_tokens // size)

    def _fill(self, seq: CacheUser, first: int, end: int) -> None:
        """Mark the blocks of the spans first ... end-1 full, which this step computes."""
        if first >= end or not self.enable_prefix_caching:
            return
        if end * self.block_size <= len(seq.token_ids):
            self._mark_full(seq, first, end)
        else:  # a single token fills it, and is still pending
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
            twin = self.pool.find(prefix)
            if twin is not None and twin.prefix is not None:
                prefix = twin.prefix
                self._share_prefix(seq, index, prefix)
            self._filled_now.append(block.block_id)
            self.pool.fill(block, prefix)
            filled.append(block.block_id)
        if self._emit is not None and filled:
            hashes = tuple(prefix.hash for prefix in seq.prefixes[end_index - len(filled) : end_index])
            self._emit(ev.BlocksFilled(seq.seq_id, tuple(filled), hashes))

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
        source_id, copy_id = seq.block_table[index], self.pool.take(seq.seq_id)
        assert source_id is not None, "the block of a token to compute is kept"
        seq.block_table[index] = copy_id
        if self._emit is not None:
            self._emit(ev.BlocksAllocated(seq.seq_id, (copy_id,)))
        self.pool.release(source_id)
        if self._emit is not None:
            self._emit(ev.BlocksReleased(seq.seq_id, (source_id,)))
            self._emit(ev.BlockCopied(seq.seq_id, source_id, copy_id))
        return source_id, copy_id

    def _drop_partial_blocks(self, seq: CacheUser) -> None:
        dropped = tuple(block_id for block_id in seq.block_table[-self.num_groups :] if block_id is not None)
        del seq.block_table[-self.num_groups :]
        for block_id in dropped:
            self.pool.release(block_id)
        if self._emit is not None:
            self._emit(ev.BlocksReleased(seq.seq_id, dropped))

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: Sequence[CacheUser] | None = None) -> None:
        """Verify every invariant; given the sequences, also that their tables explain every ref_count."""
        self.pool.check(self.block_size)
        if seqs is not None:
            self._check_tables(seqs)

    def _check_tables(self, seqs: Sequence[CacheUser]) -> None:
        owners = [0] * self.num_blocks
        for seq in seqs:
            held = [block_id for block_id in seq.block_table if block_id is not None]
            assert len(set(held)) == len(held), f"seq {seq.seq_id}: a block twice in its table"
            num_computed = seq.num_computed_tokens
            next_span = num_computed // self.block_size if num_computed < seq.num_writable_tokens else None
            for index, block_id in enumerate(seq.block_table):
                span, group = divmod(index, self.num_groups)
                if block_id is None:
                    needed = self.tables.first_kept(group, seq.num_computed_tokens)
                    assert span < needed, f"seq {seq.seq_id}: block {span} of group {group} was released too early"
                    continue
                owners[block_id] += 1
                prefix = self.blocks[block_id].prefix
                tokens = tuple(seq.token_ids[span * self.block_size : (span + 1) * self.block_size])
                assert prefix is None or prefix.token_ids == tokens, f"seq {seq.seq_id}: other tokens in {block_id}"
                own = span != next_span or prefix is not None or self.blocks[block_id].ref_count == 1
                assert own, f"seq {seq.seq_id}: a writable block, {block_id}, is shared"
        for block, count in zip(self.blocks, owners, strict=True):
            assert block.ref_count == count, f"block {block.block_id}: ref_count {block.ref_count}, {count} owners"
