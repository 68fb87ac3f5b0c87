"""The block pool: invariants under random use, proof of hits, eviction order, hashes, speed of growth."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagedcli.kvcache.block_manager import BlockManager
from pagedcli.kvcache.prefix_hash import Prefix, compute_hash, hash_block, token_bytes

SIZE = 2


def make_seq(token_ids, seq_id=0, cache_salt=None):
    return SimpleNamespace(
        seq_id=seq_id,
        token_ids=list(token_ids),
        block_table=[],
        prefixes=[],
        cache_salt=cache_salt,
        num_computed_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def prefill(manager, seq):
    """Allocate the whole sequence and count it as computed."""
    hit = manager.lookup(seq)
    manager.allocate(seq, hit, len(seq.token_ids) - manager.num_computed_after(seq, hit))
    cached = seq.num_computed_tokens
    seq.num_computed_tokens = len(seq.token_ids)
    return cached


def test_hash_is_xxh64_of_parent_and_int64_tokens():
    first = xxhash.xxh64(struct.pack("<3q", 5, 6, 7)).intdigest()
    assert compute_hash((5, 6, 7)) == first
    assert compute_hash((1, 2), first) == xxhash.xxh64(struct.pack("<Q", first) + struct.pack("<2q", 1, 2)).intdigest()
    nano_vllm = xxhash.xxh64(first.to_bytes(8, "little"))  # as its BlockManager.compute_hash spells it
    nano_vllm.update(np.array([1, 2], dtype=np.int64).tobytes())
    assert compute_hash((1, 2), first) == nano_vllm.intdigest()


def test_chain_differs_where_only_the_parent_differs():
    assert compute_hash((3, 4), compute_hash((1, 2))) != compute_hash((3, 4), compute_hash((2, 2)))


def test_second_sequence_reuses_the_shared_blocks():
    manager = BlockManager(8, 4)
    a, b, c = make_seq(range(1, 9)), make_seq([*range(1, 9), 9, 10]), make_seq([0, *range(2, 9), 9, 10])
    assert prefill(manager, a) == 0
    assert prefill(manager, b) == 8
    assert b.block_table[:2] == a.block_table
    assert prefill(manager, c) == 0
    manager.check([a, b, c])


def test_whole_cached_prompt_computes_only_its_last_token_and_takes_no_block():
    manager = BlockManager(4, 2)
    a, b = make_seq([1, 2, 3, 4]), make_seq([1, 2, 3, 4])
    prefill(manager, a)
    free = manager.num_free_blocks
    hit = manager.lookup(b)
    assert manager.num_computed_after(b, hit) == 3
    assert manager.num_new_blocks(b, hit, 1) == 0
    manager.allocate(b, hit, 1)
    assert (b.num_cached_tokens, b.num_computed_tokens, manager.num_free_blocks) == (4, 3, free)
    manager.check([a, b])


def test_a_shared_block_lives_until_its_last_owner_leaves_and_can_be_revived():
    manager = BlockManager(4, 2)
    a, b = make_seq([1, 2, 3]), make_seq([1, 2, 4])
    prefill(manager, a), prefill(manager, b)
    shared = a.block_table[0]
    assert manager.blocks[shared].ref_count == 2
    manager.deallocate(a)
    assert manager.blocks[shared].ref_count == 1
    manager.deallocate(b)
    assert manager.blocks[shared].ref_count == 0
    assert shared in manager.free_block_ids
    c = make_seq([1, 2, 5])
    assert prefill(manager, c) == 2
    assert c.block_table[0] == shared
    manager.check([c])


def test_a_freed_block_stays_cached_until_it_is_taken_oldest_first():
    manager = BlockManager(3, 2)
    a = make_seq([1, 2, 3, 4])
    prefill(manager, a)
    head, tail = a.block_table
    manager.deallocate(a)
    assert list(manager.free_block_ids)[1:] == [tail, head], "empty ones first, then the tail, the head last"
    b = make_seq([7, 8, 9, 10])
    prefill(manager, b)
    assert manager.blocks[tail].token_ids == (9, 10), "the empty block was taken first, then the tail"
    assert manager.blocks[head].token_ids == (1, 2)
    assert prefill(manager, make_seq([1, 2])) == 1
    manager.check()


def test_a_request_claims_its_hits_before_it_takes_blocks():
    manager = BlockManager(3, 2)
    a = make_seq([1, 2, 3, 4])
    prefill(manager, a)
    manager.deallocate(a)
    b = make_seq([1, 2, 3, 4, 5, 6])
    assert prefill(manager, b) == 4
    manager.check([b])


def test_equal_salts_share_and_different_ones_never_do():
    manager = BlockManager(16, 2)
    prefill(manager, make_seq([1, 2, 3]))
    prefill(manager, make_seq([1, 2, 3], cache_salt="x"))
    assert prefill(manager, make_seq([1, 2, 3], cache_salt="x")) == 2
    assert prefill(manager, make_seq([1, 2, 3], cache_salt="y")) == 0
    assert prefill(manager, make_seq([1, 2, 3])) == 2


@pytest.mark.parametrize("buckets", [1, 3])
def test_colliding_hashes_never_give_a_false_hit(buckets):
    manager = BlockManager(32, 2, hash_function=lambda tokens, prefix: sum(tokens) % buckets)
    prefill(manager, make_seq([1, 2, 3, 4]))
    for other in ([2, 1, 3, 4, 0], [4, 2, 3, 4, 0], [3, 4, 0], [5, 7, 3, 4, 0]):
        assert manager.lookup(make_seq(other)).block_ids == (), other


def test_a_child_is_not_found_under_a_parent_of_equal_hash_and_other_tokens():
    # only the first block's hash collides: the second block has equal hash, tokens and parent hash
    def hash_function(tokens, prefix):
        return 7 if prefix is None else hash_block(tokens, prefix)

    manager = BlockManager(8, 2, hash_function=hash_function)
    a = make_seq([1, 2, 3, 4])
    prefill(manager, a)
    manager.deallocate(a)
    first, other, second = token_bytes([1, 2]), token_bytes([9, 9]), token_bytes([3, 4])
    real = Prefix(second, Prefix(first, None, hash_function), hash_function)
    impostor = Prefix(second, Prefix(other, None, hash_function), hash_function)
    assert real.hash == impostor.hash
    assert manager._find(real) is not None
    assert manager._find(impostor) is None


def test_evicting_a_twin_keeps_the_entry_of_the_other():
    manager = BlockManager(4, 2)
    a, b = make_seq([1, 2]), make_seq([1, 2])
    hit = manager.lookup(a)
    manager.allocate(a, hit, 1)  # chunks of one token: neither block is full when the other starts
    manager.allocate(b, manager.lookup(b), 1)
    for seq in (a, b):
        seq.num_computed_tokens = 1
        manager.may_append(seq)
        seq.num_computed_tokens = 2
    assert manager.blocks[a.block_table[0]].hash == manager.blocks[b.block_table[0]].hash
    entry = manager.hash_to_block_id[compute_hash((1, 2))]
    assert entry == a.block_table[0]
    manager.deallocate(b)
    others = make_seq(range(10, 16))
    prefill(manager, others)  # takes the two empty blocks and then b's
    assert manager.hash_to_block_id[compute_hash((1, 2))] == entry
    manager.check([a, others])


def test_fork_copies_the_partial_block_on_first_write_and_leaves_it_to_the_last():
    manager = BlockManager(6, 2)
    a, b, c = make_seq([1, 2, 3], 0), make_seq([1, 2, 3], 1), make_seq([1, 2, 3], 2)
    prefill(manager, a)
    manager.fork(a, b), manager.fork(a, c)
    partial_block = a.block_table[1]
    assert manager.blocks[partial_block].ref_count == 3
    for seq, token in ((b, 4), (c, 5), (a, 6)):
        seq.token_ids.append(token)
        copies = manager.may_append(seq)
        seq.num_computed_tokens += 1
        assert copies == ([] if seq is a else [(partial_block, seq.block_table[1])])
        manager.check([a, b, c])
    assert a.block_table[1] == partial_block
    assert len({seq.block_table[1] for seq in (a, b, c)}) == 3
    assert a.block_table[0] == b.block_table[0] == c.block_table[0]


class PoolMachine(RuleBasedStateMachine):
    """Any order of admissions, appends, forks and releases on a pool of 7 blocks of 2 tokens over 3 token values."""

    seqs = Bundle("seqs")
    hash_function = staticmethod(hash_block)

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(7, SIZE, hash_function=self.hash_function)
        self.live = []
        self.next_id = 0

    def new_seq(self, tokens):
        self.next_id += 1
        return make_seq(tokens, self.next_id)

    @rule(target=seqs, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8), chunk=st.integers(1, 8))
    def admit(self, tokens, chunk):
        seq = self.new_seq(tokens)
        hit = self.manager.lookup(seq)
        new = min(chunk, len(tokens) - self.manager.num_computed_after(seq, hit))
        free = self.manager.num_free_blocks
        if self.manager.can_allocate(seq, hit, new):
            expected = free - hit.num_free - self.manager.num_new_blocks(seq, hit, new)
            self.manager.allocate(seq, hit, new)
            assert self.manager.num_free_blocks == expected
            seq.num_computed_tokens += new
            self.live.append(seq)
        return seq

    @rule(seq=seqs, token=st.integers(0, 2), chunk=st.integers(1, 4))
    def grow(self, seq, token, chunk):
        if not seq.block_table:
            return
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids.append(token)
        new = min(chunk, len(seq.token_ids) - seq.num_computed_tokens)
        if self.manager.can_append(seq, new):
            needed, free = self.manager.num_append_blocks(seq, new), self.manager.num_free_blocks
            copies = self.manager.may_append(seq, new)
            # a copy frees nothing here: the shared block has another owner
            assert self.manager.num_free_blocks == free - needed
            assert len(copies) <= 1
            seq.num_computed_tokens += new

    @rule(seq=seqs)
    def reuse_more(self, seq):
        if seq.block_table and seq.num_computed_tokens < len(seq.token_ids):
            before = seq.num_computed_tokens
            assert self.manager.reuse_more(seq) == seq.num_computed_tokens - before
            assert seq.num_computed_tokens < len(seq.token_ids)

    @precondition(lambda self: self.live)
    @rule(target=seqs, parent=seqs)
    def fork(self, parent):
        child = self.new_seq(parent.token_ids)
        if parent.block_table and parent.num_computed_tokens == len(parent.token_ids):
            self.manager.fork(parent, child)
            self.live.append(child)
        return child

    @rule(seq=consumes(seqs))
    def release(self, seq):
        self.manager.deallocate(seq)
        self.live = [other for other in self.live if other is not seq]

    @invariant()
    def holds(self):
        self.manager.check(self.live)


class CollidingPoolMachine(PoolMachine):
    hash_function = staticmethod(lambda tokens, prefix: sum(tokens) % 2)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
