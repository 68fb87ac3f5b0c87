"""The block pool: invariants under random use, proof of hits, eviction order, hashes, speed of growth."""

import struct
from functools import partial

import numpy as np
import pytest
import xxhash
from harness.core import CollidingPoolMachine, PoolMachine, Simulation, make_seq, prefill
from hypothesis import settings

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.prefix_lookup import PrefixHit
from pagedcli.core.prefixes import Prefix, compute_hash, hash_block, token_bytes
from pagedcli.core.reservation import ReservedBlocks, reserving_cache


def test_hash_is_xxh64_of_parent_and_int64_tokens():
    first = xxhash.xxh64(struct.pack("<3q", 5, 6, 7)).intdigest()
    assert compute_hash((5, 6, 7)) == first
    assert compute_hash((1, 2), first) == xxhash.xxh64(struct.pack("<Q", first) + struct.pack("<2q", 1, 2)).intdigest()
    nano_vllm = xxhash.xxh64(first.to_bytes(8, "little"))  # as its BlockManager.compute_hash spells it
    nano_vllm.update(np.array([1, 2], dtype=np.int64).tobytes())
    assert compute_hash((1, 2), first) == nano_vllm.intdigest()


def test_a_pool_has_a_block_and_a_block_a_token():
    assert BlockManager(1, 1).num_free_blocks == 1
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"at least 1, got {wrong[0]} and {wrong[1]}"):
            BlockManager(*wrong)


def test_of_a_hit_only_whole_blocks_were_in_memory_before_others_were_read():
    hits = [PrefixHit((), 0, 3, 3, 3, num_disk_tokens=each).num_memory_tokens(4) for each in (None, 0, 2, 5, 12)]
    assert hits == [12, 12, 8, 4, 0]


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
    assert manager.pool.find(real) is not None
    assert manager.pool.find(impostor) is None


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


class Literal:
    """The block manager as tutorials on nano-vllm write it, with None for a hash of -1."""

    def __init__(self, num_blocks, size):
        self.refs, self.hashes, self.tokens = [0] * num_blocks, [None] * num_blocks, [None] * num_blocks
        self.hash_to_block_id, self.free, self.size = {}, list(range(num_blocks)), size

    def take(self, seq, block_id):
        self.free.remove(block_id)
        self.refs[block_id], self.hashes[block_id], self.tokens[block_id] = 1, None, None
        seq.block_table.append(block_id)

    def fill(self, block_id, tokens, parent):
        self.hashes[block_id], self.tokens[block_id] = compute_hash(tokens, parent), tokens
        self.hash_to_block_id[self.hashes[block_id]] = block_id

    def allocate(self, seq):
        parent, missed = None, False
        for start in range(0, len(seq.token_ids), self.size):
            tokens = seq.token_ids[start : start + self.size]
            is_full = len(tokens) == self.size
            found = self.hash_to_block_id.get(compute_hash(tokens, parent)) if is_full else None
            missed = missed or found is None or self.tokens[found] != tokens
            seq.num_cached_tokens += 0 if missed else self.size
            if missed or not self.refs[found]:
                self.take(seq, self.free[0] if missed else found)
            else:
                self.refs[found] += 1
                seq.block_table.append(found)
            if is_full:
                self.fill(seq.block_table[-1], tokens, parent)
                parent = self.hashes[seq.block_table[-1]]

    def may_append(self, seq):
        if len(seq.token_ids) % self.size == 1:
            self.take(seq, self.free[0])
        elif len(seq.token_ids) % self.size == 0:
            *_, before, last = [None, *seq.block_table]
            self.fill(last, seq.token_ids[-self.size :], None if before is None else self.hashes[before])

    def deallocate(self, seq):
        for block_id in reversed(seq.block_table):
            self.refs[block_id] -= 1
            if not self.refs[block_id]:
                self.free.append(block_id)
        seq.block_table, seq.num_cached_tokens = [], 0


# a prompt, an appended token or the end; then the block table, its cached tokens, and the ref count of each block
LITERAL_STEPS = [
    ("A", [11, 12, 13, 14, 21, 22], [0, 1], 0, "110000000"),
    ("A", 23, [0, 1], 0, "110000000"),
    ("A", 24, [0, 1], 0, "110000000"),  # fills block 1, which has a hash from now on
    ("B", [11, 12, 13, 14, 21, 22, 23, 24, 31], [0, 1, 2], 8, "221000000"),
    ("C", [11, 12, 13, 14, 41, 42, 43, 44], [0, 3], 4, "321100000"),
    ("A", 25, [0, 1, 4], 0, "321110000"),
    ("C", None, [], 0, "221010000"),
    ("D", [11, 12, 13, 14, 41, 42, 43, 44, 51], [0, 3, 5], 8, "321111000"),  # block 0 is shared, block 3 revived
    ("B", 32, [0, 1, 2], 8, "321111000"),
]


def test_blocks_are_those_of_the_literal_algorithm_step_by_step():
    """Up to the differences that docs/kv-cache.md names: where a partial block is freed to, and a full hit."""
    literal, manager, theirs, ours = Literal(9, 4), BlockManager(9, 4), {}, {}
    for name, change, table, num_cached, refs in LITERAL_STEPS:
        if isinstance(change, list):
            theirs[name], ours[name] = make_seq(change), make_seq(change)
            literal.allocate(theirs[name]), prefill(manager, ours[name])
        elif change is None:
            literal.deallocate(theirs[name]), manager.deallocate(ours[name])
        else:
            theirs[name].token_ids.append(change), ours[name].token_ids.append(change)
            literal.may_append(theirs[name]), manager.may_append(ours[name])
            ours[name].num_computed_tokens += 1
        assert theirs[name].block_table == ours[name].block_table == table
        assert theirs[name].num_cached_tokens == ours[name].num_cached_tokens == num_cached
        assert literal.refs == [block.ref_count for block in manager.blocks] == [*map(int, refs)]
        assert literal.hashes == [block.hash for block in manager.blocks]
        assert literal.hash_to_block_id == manager.hash_to_block_id
        assert literal.free == list(manager.free_block_ids)
    literal.deallocate(theirs["B"]), manager.deallocate(ours["B"])
    assert (literal.free, list(manager.free_block_ids)) == ([6, 7, 8, 2], [2, 6, 7, 8])
    whole = make_seq(range(11, 15)), make_seq(range(11, 15))
    literal.allocate(whole[0])
    assert whole[0].num_cached_tokens == 4  # of 4: nothing is left to compute
    assert prefill(manager, whole[1]) == 3
    assert whole[0].block_table == whole[1].block_table == [0]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCollidingPool = CollidingPoolMachine.TestCase
TestCollidingPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------- contiguous reservation


def test_a_piece_is_the_first_that_is_long_enough_and_free_blocks_in_smaller_ones_are_no_use():
    manager = ReservedBlocks(10, 2, longest=lambda seq: 6)  # three blocks for each
    a, b, c = (make_seq([1, 2, 3], number) for number in range(3))
    for seq in (a, b, c):
        prefill(manager, seq)
    assert [seq.block_table for seq in (a, b, c)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    manager.deallocate(b)
    manager.check([a, c])
    manager._longest = lambda seq: 2 * len(seq.token_ids)
    sizes = [manager.num_prefill_blocks(make_seq([1] * num), manager.lookup(a), 99) for num in (1, 3, 4)]
    assert sizes == [1, 3, 11], "3 and 1 are free, but not 4 in one piece"
    prefill(manager, short := make_seq([1], 4))
    assert short.block_table == [3]
    manager.may_append(a, 3)
    assert (a.block_table, a.num_writable_tokens) == ([0, 1, 2], 6), "it grows into what it has"


@pytest.mark.parametrize("of_model", [False, True])
def test_reserving_changes_who_runs_and_not_the_tokens(of_model):
    def tokens(**options):
        sim = Simulation(12, max_model_len=16, max_num_seqs=4, **options)
        seqs = [sim.add(range(1, 2 + number % 5), max_new_tokens=3 + number % 4) for number in range(9)]
        most = 0
        while sim.has_unfinished_requests():
            sim.step()
            most = max(most, len(sim.scheduler.running))
        assert sim.block_manager.num_free_blocks == 12
        return [seq.token_ids for seq in seqs], most, sim.stats.num_preemptions

    paged, reserved = tokens(), tokens(make_cache=partial(reserving_cache, of_model=of_model))
    assert reserved[0] == paged[0]
    assert reserved[1:] == ((1, 0) if of_model else (3, 0)), "one piece of 8 blocks fits into 12, and three of 2 to 5"
    assert paged[1] == 4
