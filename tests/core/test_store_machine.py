"""Any order of admissions, growth, releases, writes and restarts: a block that was restored has the content that was
computed for its tokens, its group and its salt, and the folder stays within its bound."""

import shutil
import tempfile
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from harness.core import SIZE, make_seq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pagedcli.content_files import ContentFolder
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache import Cache
from pagedcli.core.store import PrefixStore

MOST_BYTES = 6_000
# two beginnings, which most prompts share in part
PROMPTS = st.builds(
    lambda begin, length, end: (begin * 12)[:length] + end,
    st.sampled_from([[0], [0, 1, 1]]),
    st.integers(4, 11),
    st.lists(st.integers(0, 1), max_size=2),
)


class Contents(dict):
    """A pool's memory: of each block the group, the salt and the tokens up to its end that it was computed from."""

    block_bytes = 64

    def read(self, block_id):
        return self[block_id]

    def write(self, block_id, content):
        self[block_id] = content


class AtOnce:
    """Writes where it is asked to: another thread would make a failing case come and go."""

    def submit(self, work, *args, **given):
        future = Future()
        future.set_result(work(*args, **given))
        return future

    def shutdown(self):
        pass


def write_at_once(store):
    store._thread = AtOnce()


class StoreMachine(RuleBasedStateMachine):
    """Runs that follow each other on one folder, each with a pool of 9 blocks of 2 tokens per group."""

    windows = (None,)
    eviction = "lru"
    num_restored = 0

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.start()

    def start(self):
        self.manager = BlockManager(9 * len(self.windows), SIZE, windows=self.windows, eviction=self.eviction)
        self.cache, self.memory, self.live, self.next_id = Cache(self.manager), Contents(), [], 0
        folder = ContentFolder(self.folder, most_bytes=MOST_BYTES)
        self.store = self.cache.store = PrefixStore(folder, {"a": "b"}, self.memory, SIZE, len(self.windows))
        write_at_once(self.store)

    def expected(self, seq, index):
        span, group = divmod(index, len(self.windows))
        content = msgspec.json.encode([group, seq.cache_salt, seq.token_ids[: (span + 1) * SIZE]])
        return content.ljust(Contents.block_bytes)

    def compute(self, seq, num_new):
        """A step: what it fills is computed, and everything else must be there."""
        seq.num_computed_tokens += num_new
        for index, block_id in enumerate(seq.block_table):
            if block_id is not None and self.manager.blocks[block_id].prefix is not None:
                if block_id in self.manager._filled_now:
                    self.memory[block_id] = self.expected(seq, index)
                assert self.memory[block_id] == self.expected(seq, index)
        self.manager.begin_step()
        self.manager.confirm_filled(latest=True)

    @rule(tokens=PROMPTS, salt=st.sampled_from([None, None, "salt"]))
    def admit(self, tokens, salt):
        self.next_id += 1
        seq = make_seq(tokens, self.next_id, salt)
        hit = self.cache.lookup(seq)
        if self.manager.num_prefill_blocks(seq, hit, 4) > self.manager.num_free_blocks:
            return
        before = self.manager.num_computed_after(seq, hit)
        hit = self.cache.restore(seq, hit)
        after = self.manager.num_computed_after(seq, hit)
        assert after >= before
        StoreMachine.num_restored += after - before
        num_new = min(4, len(tokens) - after)
        assert self.manager.can_allocate(seq, hit, num_new)
        self.cache.allocate(seq, hit, num_new)
        self.cache.offer(seq, hit)
        self.live.append(seq)
        self.compute(seq, num_new)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        seq = data.draw(st.sampled_from(self.live))
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.token_ids.append(token)
        num_new = min(4, len(seq.token_ids) - seq.num_computed_tokens)
        self.manager.release_unseen(seq)
        if self.manager.can_append(seq, num_new):
            self.manager.may_append(seq, num_new)
            self.compute(seq, num_new)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.release(seq)

    @rule()
    def keep(self):
        self.store.keep(1.0)

    @rule()
    def restart(self):
        self.store.close(1.0)
        self.start()

    @invariant()
    def holds(self):
        self.manager.check(self.live)
        assert sum(file.stat().st_size for file in self.folder.iterdir()) <= MOST_BYTES

    def teardown(self):
        self.store.close(1.0)
        shutil.rmtree(self.folder)


@pytest.mark.quick("windows0-lru")
@pytest.mark.parametrize(
    ("windows", "eviction"), [((None,), "lru"), ((3, None), "lru"), ((None,), "prefix-lru"), ((4,), "next-use")]
)
def test_what_is_restored_is_what_was_computed(windows, eviction, store_files_of):
    store_files_of(2 * Contents.block_bytes)
    machine = type("Machine", (StoreMachine,), {"windows": windows, "eviction": eviction})
    StoreMachine.num_restored = 0
    run_state_machine_as_test(machine, settings=settings(max_examples=25, derandomize=True, deadline=None))
    assert StoreMachine.num_restored > 0
