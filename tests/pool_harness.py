"""Sequences for a block manager without an engine, and a state machine that uses one in any order."""

from types import SimpleNamespace

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import hash_block
from pagedcli.simulation.run import VOCAB_SIZE

SIZE = 2


def plan_for(workload, **limits):
    """The plan of a simulated engine with these Limits, which serves every request that the pool can hold."""
    return Plan(limits=Limits(max_model_len=workload.longest, vocab_size=VOCAB_SIZE, **limits), model="simulation")


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
        num_context_tokens=None,
    )


def prefill(manager, seq):
    """Allocate the whole sequence and count it as computed."""
    hit = manager.lookup(seq)
    manager.allocate(seq, hit, len(seq.token_ids) - manager.num_computed_after(seq, hit))
    cached = seq.num_computed_tokens
    seq.num_computed_tokens = len(seq.token_ids)
    return cached


class PoolMachine(RuleBasedStateMachine):
    """Any order of admissions, appends, forks and releases on a pool of 7 blocks of 2 tokens over 3 token values."""

    seqs = Bundle("seqs")
    hash_function = staticmethod(hash_block)
    eviction = "lru"
    windows = (None,)
    num_blocks = 7

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(
            self.num_blocks, SIZE, windows=self.windows, hash_function=self.hash_function, eviction=self.eviction
        )
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
        self.manager.release_unseen(seq)
        if self.manager.can_append(seq, new):
            needed, free = self.manager.num_append_blocks(seq, new), self.manager.num_free_blocks
            copies = self.manager.may_append(seq, new)
            # a copy frees nothing here: the shared block has another owner
            assert self.manager.num_free_blocks == free - needed
            assert len(copies) in (0, len(self.windows))
            seq.num_computed_tokens += new

    @rule(seq=seqs, guesses=st.lists(st.integers(0, 2), min_size=1, max_size=6), data=st.data())
    def check_draft(self, seq, guesses, data):
        """A step computes the last token and guesses after it, of which the first ones are right."""
        if not seq.block_table or seq.num_computed_tokens < len(seq.token_ids):
            return
        seq.token_ids.append(0)
        self.manager.release_unseen(seq)
        if not self.manager.can_append(seq):
            seq.token_ids.pop()
            return
        self.manager.may_append(seq)
        num_cached = sum(block.prefix is not None for block in self.manager.blocks)
        room = self.manager.make_room_for_draft(seq, len(guesses))
        assert sum(block.prefix is not None for block in self.manager.blocks) == num_cached  # nothing is evicted
        seq.num_computed_tokens += 1
        num_right = data.draw(st.integers(0, room))
        seq.token_ids += guesses[:num_right]
        self.manager.keep_accepted(seq, room, num_right, None, num_again=0)
        assert seq.num_computed_tokens == len(seq.token_ids)
        assert len(seq.block_table) == self.manager.tables.num_entries(seq.num_computed_tokens)

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

    @invariant()
    def content_in_the_pool_is_found(self):
        """Or, where hashes collide, other content of the same hash."""
        for block in self.manager.blocks:
            if block.prefix is not None:
                found = self.manager.blocks[self.manager.hash_to_block_id[block.hash]]
                assert found.prefix.same_as(block.prefix) or self.hash_function is not hash_block


class CollidingPoolMachine(PoolMachine):
    hash_function = staticmethod(lambda tokens, prefix: sum(tokens) % 2)
