"""Folding the events of the real block manager gives back the real pool, exactly."""

import random
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from harness.core import PoolMachine, Simulation, run_at_random
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.prefixes import hash_block
from pagedcli.errors import TraceError
from pagedcli.events import (
    SCHEMA_VERSION,
    BlockEvicted,
    BlocksAllocated,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    EngineStarted,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.state import PoolState
from pagedcli.views.rows import Now, SequenceRow, block_slots, written_slots


def engine_started(num_blocks: int, block_size: int, **changes: object) -> EngineStarted:
    fields: dict[str, object] = {
        "schema_version": SCHEMA_VERSION, "pagedcli_version": "0", "time_ns": 0, "model": "m", "device": "cpu",
        "dtype": "float32", "backend": "b", "refused": (), "num_blocks": num_blocks, "block_size": block_size,
        "block_bytes": 64 * block_size, "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096,
        "chunked_prefill_size": None, "enable_prefix_caching": True,
    }  # fmt: skip
    return EngineStarted(**(fields | changes))  # type: ignore[arg-type]


def assert_same_ledgers(manager: BlockManager, state: PoolState, users: Iterable[SimpleNamespace]) -> None:
    assert state.ref_counts == [block.ref_count for block in manager.blocks]
    assert state.hashes == [block.hash for block in manager.blocks]
    assert list(state.free_block_ids) == list(manager.free_block_ids)
    assert state.hash_to_block_id == manager.hash_to_block_id
    assert {user.seq_id: user.block_table for user in users} == {
        seq.seq_id: seq.block_table for seq in state.seqs.values()
    }
    cached = sum(block.ref_count == 0 and block.hash is not None for block in manager.blocks)
    assert state.num_cached_blocks == cached
    assert state.num_used_blocks + state.num_cached_blocks + state.num_empty_blocks == state.num_blocks
    assert state.num_references == sum(len(user.block_table) for user in users)
    assert state.num_shared_blocks == sum(block.ref_count > 1 for block in manager.blocks)


class Tokens(list):
    """Token ids of a sequence: the fold is told of each that is sampled, so none is taken back."""

    def __init__(self, token_ids, sampled):
        super().__init__(token_ids)
        self._sampled = sampled

    def append(self, token_id):
        self._sampled()
        super().append(token_id)

    def pop(self):
        pass


class FoldMachine(PoolMachine):
    """The pool's machine with preemptions, for pools of any shape: the fold must follow."""

    seqs = PoolMachine.seqs

    @initialize(
        num_blocks=st.integers(1, 9), block_size=st.integers(1, 3), caching=st.booleans(), colliding=st.booleans()
    )
    def start(self, num_blocks, block_size, caching, colliding):
        self.emit = pool_fold()
        self.state = self.emit.state
        self.emit(engine_started(num_blocks, block_size))
        self.hash_function = (lambda tokens, prefix: 7) if colliding else hash_block
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, emit=self.emit, hash_function=self.hash_function
        )
        self.allocate, self.keep, self.drop = (
            self.manager.allocate, self.manager.keep_accepted, self.manager.deallocate,
        )  # fmt: skip
        self.manager.allocate, self.manager.fork = self.admitted, self.forked(self.manager.fork)
        self.manager.keep_accepted, self.manager.deallocate = self.checked, self.finished
        self.unfinished, self.waiting = {}, []

    def new_seq(self, tokens):
        seq = super().new_seq(tokens)
        self.emit(RequestAdded(seq.seq_id, f"r{seq.seq_id}", 0, len(tokens), 16, False))
        seq.token_ids = Tokens(seq.token_ids, lambda: self.emit(TokensSampled((seq.seq_id,))))
        self.unfinished[seq.seq_id] = seq
        self.waiting.append(seq.seq_id)
        return seq

    def admitted(self, seq, hit, num_new_tokens):
        self.waiting.remove(seq.seq_id)
        self.allocate(seq, hit, num_new_tokens)

    def forked(self, fork):
        def call(parent, child):
            self.waiting.remove(child.seq_id)
            fork(parent, child)

        return call

    def checked(self, seq, num_drafted, num_accepted, token_ids, *, num_again):
        folded = self.state.seqs[seq.seq_id]
        folded.num_computed_tokens, folded.num_drafted_tokens = seq.num_computed_tokens, num_drafted
        if num_drafted:
            self.keep(seq, num_drafted, num_accepted, token_ids, num_again=num_again)

    def finished(self, seq):
        self.emit(RequestFinished(seq.seq_id, "abort", self.state.seqs[seq.seq_id].num_output_tokens))
        self.drop(seq)
        del self.unfinished[seq.seq_id]
        if seq.seq_id in self.waiting:
            self.waiting.remove(seq.seq_id)

    @rule(target=seqs, twin=seqs, chunk=st.integers(1, 3))
    def admit_twin(self, twin, chunk):
        """A request for the same tokens, which may take over what the other computes meanwhile."""
        return self.admit(list(twin.token_ids), chunk)

    @rule(seq=seqs)
    def preempt(self, seq):
        if seq.block_table:
            dropped = seq.num_computed_tokens
            freed = self.drop(seq)
            seq.num_preemptions += 1
            self.waiting.insert(0, seq.seq_id)
            self.emit(RequestPreempted(seq.seq_id, seq.seq_id, 1, dropped, freed))

    @rule(seq=seqs)
    def admit_again(self, seq):
        if not seq.block_table and seq in self.live:
            hit = self.manager.lookup(seq)
            left = len(seq.token_ids) - self.manager.num_computed_after(seq, hit)
            if self.manager.can_allocate(seq, hit, left):
                self.manager.allocate(seq, hit, left)
                seq.num_computed_tokens += left

    @invariant()
    def fold_gives_back_the_pool(self):
        for seq in self.unfinished.values():  # what StepScheduled says
            self.state.seqs[seq.seq_id].num_computed_tokens = seq.num_computed_tokens
        assert_same_ledgers(self.manager, self.state, self.unfinished.values())
        assert [seq.seq_id for seq in self.state.waiting()] == self.waiting


TestFold = pytest.mark.long(FoldMachine.TestCase)
TestFold.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BlocksAllocated(0, (1,)), "next free block is 0"),
        (BlocksAllocated(0, (9,)), "next free block is 0"),
        (BlocksAllocated(5, (0,)), "seq 5 is unknown"),
        (BlocksReused(0, (0,)), "no lookup of seq 0"),
        (BlockEvicted(0, 1), "holds hash None"),
        (BlockEvicted(7, 1), "there is no block 7 in a pool of 3"),
        (BlocksFilled(0, (0,), (5,)), "not neighbours in the block table"),
        (BlocksReleased(0, (2,)), "not the block table"),
        (PrefixLookedUp(0, "new", 5, 3, 0, 0, None, None, None, 0), "0 hits of 3 blocks, where 2 can be asked for"),
        (RequestPreempted(0, 0, 1, 0, 0), "seq 0 is waiting, not running"),
        (RequestFinished(0, "stop", 3), "0 output tokens, not 3"),
        (StepScheduled(0, (0,), (1,), 0), "step 0 is not the one that runs"),
        (engine_started(3, 2), "a second start"),
        (engine_started(3, 2, part=3), "a second start"),
    ],
)
def test_an_impossible_event_is_refused(event: object, message: str) -> None:
    fold = pool_fold()
    fold(engine_started(3, 2))
    fold(RequestAdded(0, "r0", 0, 5, 16, False))
    with pytest.raises(TraceError, match=message):
        fold(event)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("eviction", "evicted", "taken", "message"),
    [
        ("lru", 1, (2, 1), None),
        ("lru", 0, (2, 0), "block 0 was taken, but the next free block is 1"),
        ("lfu", 0, (2, 0), None),
        ("lfu", 0, (2, 1), "block 1 was taken, but the next free block is 0"),
        ("lfu", 0, (0,), "block 0 was taken, but the next free block is 2"),
    ],
)
def test_cached_blocks_are_evicted_only_when_no_empty_one_is_left_and_by_lru_if_the_engine_says_so(
    eviction: str, evicted: int, taken: tuple[int, ...], message: str | None
) -> None:
    fold = pool_fold()
    fold(engine_started(3, 1, eviction=eviction))
    for event in (
        RequestAdded(0, "r0", 0, 2, 1, False),
        PrefixLookedUp(0, "new", 2, 2, 0, 0, 0, 7, "no_match", 0),
        BlocksAllocated(0, (0, 1)),
        BlocksFilled(0, (0, 1), (7, 8)),
        RequestFinished(0, "abort", 0),
        BlocksReleased(0, (1, 0)),  # block 1 is the least recently used one, and block 2 is empty
        RequestAdded(1, "r1", 0, 2, 1, False),
        PrefixLookedUp(1, "new", 2, 2, 0, 0, 0, 9, "no_match", 0),
        BlockEvicted(evicted, 7 + evicted),
    ):
        fold(event)
    with nullcontext() if message is None else pytest.raises(TraceError, match=message):
        fold(BlocksAllocated(1, taken))


@pytest.mark.parametrize(("evicted", "message"), [(0, None), (1, None), (2, "the next free block is 0")])
def test_with_lru_a_duplicate_may_be_evicted_before_its_turn_but_need_not(evicted: int, message: str | None) -> None:
    fold, hashes = pool_fold(), (7, 7, 8)
    fold(engine_started(3, 1))
    for seq_id in (0, 1, 2):
        fold(RequestAdded(seq_id, f"r{seq_id}", 0, 1, 1, False))
        fold(PrefixLookedUp(seq_id, "new", 1, 1, 0, 0, 0, hashes[seq_id], "no_match", 0))
        fold(BlocksAllocated(seq_id, (seq_id,)))
    for seq_id in (0, 1, 2):
        fold(BlocksFilled(seq_id, (seq_id,), (hashes[seq_id],)))
    for seq_id in (0, 1, 2):
        fold(RequestFinished(seq_id, "abort", 0))
        fold(BlocksReleased(seq_id, (seq_id,)))
    fold(RequestAdded(3, "r3", 0, 1, 1, False))
    fold(PrefixLookedUp(3, "new", 1, 1, 0, 0, 0, 9, "no_match", 0))
    fold(BlockEvicted(evicted, hashes[evicted]))
    with nullcontext() if message is None else pytest.raises(TraceError, match=message):
        fold(BlocksAllocated(3, (evicted,)))


def test_events_before_the_start_are_refused() -> None:
    with pytest.raises(TraceError, match="before engine_started"):
        pool_fold()(StepStarted(0, 0))


def test_slots_of_300_tokens_in_blocks_5_and_12_of_256():
    state = PoolState()
    state.apply(engine_started(13, 256))
    state.apply(RequestAdded(0, "r", 0, 300, 9, salted=False))
    seq = state.seqs[0]
    seq.block_table, seq.num_computed_tokens = [5, 12], 300
    assert (block_slots(5, 256, state), block_slots(12, 44, state)) == ("1280-1535", "3072-3115")
    assert written_slots(seq, 300, state) == "1280-1535 3072-3115"
    seq.num_computed_tokens += 1
    assert written_slots(seq, 1, state) == "3116"


@pytest.mark.parametrize("windows", [(None,), (4, None)])
def test_the_slots_that_a_step_is_said_to_write_are_those_that_it_writes(windows):
    told, written, fold = [], [], pool_fold()

    def observe(event):
        fold(event)
        if isinstance(event, StepScheduled):
            rows = [SequenceRow(seq, Now(fold.state)) for seq in fold.state.seqs.values()]
            texts = [text for row in rows if row.slots_written for text in row.slots_written.split("; ")]
            ranges = [part.split("-") for text in texts for part in text.split()]
            told.append(sorted(slot for ends in ranges for slot in range(int(ends[0]), int(ends[-1]) + 1)))

    sim = Simulation(
        13 * len(windows), 2, windows=windows, emit=observe, max_num_batched_tokens=7, chunked_prefill_size=5
    )
    launch = sim.executor.launch_model

    def launched(step):
        written.append(sorted(slot for slot in step.slots.flatten().tolist() if slot >= 0))
        return launch(step)

    sim.executor.launch_model = launched
    run_at_random(sim, random.Random(5), 30)
    assert sim.stats.num_preemptions
    assert sim.stats.num_cached_tokens
    assert told == written
