"""Eviction policies: which cached block goes, and that every policy keeps the pool's invariants."""

import pytest
from harness.core import CollidingPoolMachine, PoolMachine, make_seq, prefill
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, rule, run_state_machine_as_test

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.eviction import POLICIES, Lfu
from pagedcli.core.prefixes import Prefix, hash_block, token_bytes


class Pool:
    """A pool of blocks of one token; a request is a string of one-letter tokens."""

    def __init__(self, eviction, num_blocks):
        self.manager = BlockManager(num_blocks, 1, eviction=eviction)
        self.num_seqs = 0

    def seq(self, text):
        self.num_seqs += 1
        return make_seq([ord(letter) for letter in text], self.num_seqs)

    def run(self, *texts):
        """Serve requests one after another."""
        for text in texts:
            seq = self.seq(text)
            prefill(self.manager, seq)
            self.manager.deallocate(seq)
            self.manager.check([])
        return self

    def wait(self, text, *, first=False):
        seq = self.seq(text)
        self.manager.expect(seq, first=first)
        return seq

    @property
    def cached(self):
        """The last token of each cached chain."""
        blocks = self.manager.blocks
        return "".join(sorted(chr(block.token_ids[0]) for block in blocks if block.prefix is not None))


def test_lru_evicts_what_was_used_longest_ago():
    assert Pool("lru", 3).run("a", "b", "c", "a", "d").cached == "acd"


@pytest.mark.parametrize("eviction", POLICIES)
def test_a_copy_that_no_lookup_finds_goes_before_any_other_content(eviction):
    manager, first, second = twins(eviction)
    manager.deallocate(second)  # the copy of `1 1` and `2 2`, released before what lookups find
    manager.deallocate(first)
    prefill(manager, make_seq([7, 7, 8, 8], 3))  # an empty block, and one of the three cached ones
    assert num_hits(manager, [1, 1, 2, 2]) == 2
    manager.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_where_the_block_that_lookups_find_is_evicted_they_find_a_copy_in_use(eviction):
    manager, first, second = twins(eviction)
    manager.deallocate(first)
    prefill(manager, make_seq([7, 7], 3))  # the empty block
    prefill(manager, make_seq([8, 8], 4))  # that of the first
    assert num_hits(manager, [1, 1, 2, 2]) == 2
    assert manager.lookup(make_seq([1, 1, 2, 2, 3], 5)).block_ids == tuple(second.block_table)
    manager.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_contents_that_fit_into_the_pool_are_all_found_again_however_often_they_were_computed_at_once(eviction):
    manager = BlockManager(8, 2, eviction=eviction)
    prompts = [[1, 1], [2, 2], [3, 3], [4, 4]]
    for prompt in prompts:
        twice = [make_seq([*prompt, 9], seq_id) for seq_id in (1, 2)]
        for seq in twice:
            manager.allocate(seq, manager.lookup(seq), 1)
            seq.num_computed_tokens = 1
        for seq in twice:
            manager.may_append(seq, 2)
            seq.num_computed_tokens = 3
        for seq in twice:
            manager.deallocate(seq)
        manager.check([])
    assert [num_hits(manager, prompt) for prompt in prompts] == [1, 1, 1, 1]


def test_fifo_evicts_what_came_first_whatever_its_hits():
    assert Pool("fifo", 3).run("a", "b", "c", "a", "a", "d").cached == "bcd"
    assert Pool("fifo", 3).run("a", "b", "c", "a", "d", "e", "f").cached == "def"


def test_lfu_evicts_what_was_hit_least():
    assert Pool("lfu", 3).run("a", "a", "b", "b", "c", "d", "e").cached == "abe"


def test_lfu_forgets_what_was_popular_long_ago():
    news = [letter for pair in zip("bdfhjlnp", "cegikmoq", strict=True) for letter in (*pair, *pair)]
    assert "a" in Pool("lfu", 3).run("a", "a", "a", *news[:4]).cached
    assert "a" not in Pool("lfu", 3).run("a", "a", "a", *news).cached


def test_lfu_counts_the_hits_of_what_a_block_has_now():
    policy, old, new, other = Lfu(), *(Prefix(token_bytes([token]), None) for token in range(3))
    policy.freed(0, old)
    for _ in range(2):
        policy.hit(0)
    policy.freed(0, old)
    assert policy.choose() == 0
    policy.freed(0, new)
    policy.freed(1, other)
    assert policy.choose() == 0


def test_next_use_evicts_what_no_waiting_request_asks_for_and_then_the_farthest():
    pool = Pool("next-use", 4).run("a", "b", "c", "d")
    c, a, b = (pool.wait(letter) for letter in "cab")
    assert pool.run("e").cached == "abce"  # nobody asks for d
    assert pool.run("f").cached == "abcf"  # nor for e
    pool.manager.forget(c)
    assert pool.run("g").cached == "abfg"  # nor for c any more, which was used before f
    assert pool.run("h").cached == "abgh"
    pool.wait("g", first=True)
    pool.wait("h")
    assert pool.run("i").cached == "abgi"  # h is the last of g a b h
    assert pool.run("j").cached == "abgj"
    pool.manager.forget(a)
    assert pool.run("k").cached == "bgjk"
    assert b.block_table == []


def test_next_use_hashes_each_block_of_a_request_once():
    hashed = []

    def hash_function(tokens, prefix):
        hashed.append(tokens)
        return hash_block(tokens, prefix)

    manager = BlockManager(8, 2, eviction="next-use", hash_function=hash_function)
    seq = make_seq([1, 2, 3, 4, 5, 6, 7], 1)
    manager.expect(seq)
    assert len(hashed) == 3
    prefill(manager, seq)
    manager.expect(seq, first=True)
    manager.deallocate(seq)
    assert prefill(manager, seq) == 6
    assert len(hashed) == 3


def twins(eviction, num_blocks=4):
    """Two requests compute `a` at the same time; the chain of the second, of b, continues its own copy."""
    manager = BlockManager(num_blocks, 2, eviction=eviction)
    first, second = make_seq([1, 1], 1), make_seq([1, 1, 2, 2], 2)
    for seq in (first, second):
        manager.allocate(seq, manager.lookup(seq), 1)
        seq.num_computed_tokens = 1
    for seq in (first, second):
        num_new = len(seq.token_ids) - 1
        manager.may_append(seq, num_new)
        seq.num_computed_tokens += num_new
    assert first.block_table[0] != second.block_table[0]
    return manager, first, second


def num_hits(manager, token_ids):
    return len(manager.lookup(make_seq(token_ids, 9)).block_ids)


def test_prefix_lru_keeps_a_block_that_a_cached_one_follows():
    evicted = {}
    for eviction in ("lru", "prefix-lru"):
        manager, first, second = twins(eviction, num_blocks=5)
        head = first.block_table[0]
        manager.deallocate(first)  # lookups find its first block, not that of the second
        later = make_seq([5, 5], 4)
        prefill(manager, later)
        manager.deallocate(later)
        prefill(manager, make_seq([7, 7, 8, 8], 3))  # an empty block, and one of the two cached ones
        manager.deallocate(second)
        evicted[eviction] = [head] if manager.blocks[head].token_ids != (1, 1) else [5, 5]
        assert num_hits(manager, [1, 1, 2, 2]) == 2  # also where the copy of the second is all that is left
        manager.check()
    assert evicted == {"lru": [head], "prefix-lru": [5, 5]}


def test_prefix_lru_evicts_a_chain_from_its_end():
    pool = Pool("prefix-lru", 4).run("abc", "d", "e")
    assert pool.cached == "abde"
    assert pool.run("f").cached == "adef"
    assert pool.run("g").cached == "defg"


def test_prefix_lru_evicts_the_oldest_block_where_all_followers_are_in_use():
    manager, first, second = twins("prefix-lru")
    manager.deallocate(first)
    first_block = manager.hash_to_block_id[second.prefixes[0].hash]
    prefill(manager, make_seq([7, 7, 8, 8], 3))
    assert manager.blocks[first_block].token_ids != (1, 1)
    assert num_hits(manager, [1, 1]) == 1
    manager.check()
    manager.deallocate(second)
    manager.check()


class QueueMachine(PoolMachine):
    """Requests also wait, in a queue that the policy knows: compared with the definition of next-use at each choice."""

    eviction = "next-use"
    waiting = Bundle("waiting")

    def __init__(self):
        super().__init__()
        self.queue = []
        policy = self.manager.pool.policy
        choose = policy.choose

        def checked_choose():
            candidates = policy.block_ids()
            chosen = choose()
            assert self.next_use(chosen) == max(map(self.next_use, candidates))
            return chosen

        policy.choose = checked_choose

    def next_use(self, block_id):
        """The place of the first waiting request that asks for the block; a block that none can find is the last."""
        prefix = self.manager.blocks[block_id].prefix
        if self.manager.hash_to_block_id.get(prefix.hash) != block_id:
            return len(self.queue) + 1
        uses = (any(prefix.same_as(own) for own in seq.prefixes) for seq in self.queue)
        return next((place for place, asks in enumerate(uses) if asks), len(self.queue))

    @rule(target=waiting, tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8), first=st.booleans())
    def wait(self, tokens, first):
        seq = self.new_seq(tokens)
        self.manager.expect(seq, first=first)
        self.queue.insert(0 if first else len(self.queue), seq)
        return seq

    @rule(seq=consumes(waiting))
    def abort(self, seq):
        self.manager.forget(seq)
        self.queue.remove(seq)

    @rule(target=PoolMachine.seqs, seq=consumes(waiting))
    def start(self, seq):
        hit = self.manager.lookup(seq)
        new = len(seq.token_ids) - self.manager.num_computed_after(seq, hit)
        self.queue.remove(seq)
        if self.manager.can_allocate(seq, hit, new):
            self.manager.allocate(seq, hit, new)
            seq.num_computed_tokens += new
            self.live.append(seq)
        else:
            self.manager.forget(seq)
        return seq

    @rule(target=waiting, seq=consumes(PoolMachine.seqs))
    def preempt(self, seq):
        self.manager.expect(seq, first=True)
        self.queue.insert(0, seq)
        self.release(seq)
        return seq


class CollidingQueueMachine(QueueMachine):
    hash_function = staticmethod(lambda tokens, prefix: sum(tokens) % 2)

    def next_use(self, block_id):
        return 0  # where hashes collide, the choice is a guess


@pytest.mark.quick("lfu-plain")
@pytest.mark.parametrize("machine", [PoolMachine, CollidingPoolMachine], ids=["plain", "colliding"])
@pytest.mark.parametrize("eviction", [name for name in POLICIES if name != "lru"])
def test_every_policy_keeps_the_invariants(machine, eviction):
    steps = settings(max_examples=20, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(type(machine.__name__, (machine,), {"eviction": eviction}), settings=steps)


@pytest.mark.quick("plain")
@pytest.mark.parametrize("machine", [QueueMachine, CollidingQueueMachine], ids=["plain", "colliding"])
def test_next_use_evicts_what_is_needed_last_under_any_use(machine):
    steps = settings(max_examples=50, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=steps)
