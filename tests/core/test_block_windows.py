"""Blocks that no later token sees: released as a sequence grows, looked up only as far as the window reaches."""

import pytest
from harness.core import PoolMachine, Simulation, make_seq, prefill
from hypothesis import settings

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.groups import TableShape, cache_groups, page_bytes, sized


def grow(manager, seq, token):
    """One decode step."""
    seq.token_ids.append(token)
    manager.release_unseen(seq)
    manager.may_append(seq)
    seq.num_computed_tokens += 1


def test_a_growing_sequence_holds_only_the_blocks_of_its_window():
    manager = BlockManager(8, 2, windows=(5,))
    seq = make_seq([0])
    prefill(manager, seq)
    held = []
    for token in range(40):
        grow(manager, seq, token)
        manager.check([seq])
        held.append(8 - manager.num_free_blocks)
    assert held[:8] == [1, 2, 2, 3, 3, 3, 3, 3], "positions 1 to 8: three blocks have five tokens and the current one"
    assert max(held) == manager.tables.most_blocks(41, 1) == 3
    assert seq.block_table[:-3] == [None] * 18


def test_of_layers_that_alternate_only_those_with_a_window_release_blocks():
    manager = BlockManager(64, 2, windows=(4, None))
    seq = make_seq([0])
    prefill(manager, seq)
    for token in range(29):
        grow(manager, seq, token)
        manager.check([seq])
    assert seq.block_table[1::2].count(None) == 0
    assert seq.block_table[::2].count(None) == 13
    assert 64 - manager.num_free_blocks == 15 + 2


def test_slots_without_a_token_are_those_of_the_last_block_of_each_group():
    sim = Simulation(64, 4, windows=(4, None))
    sim.add(range(6), 9)
    sim.step()
    assert sim.scheduler.num_unfilled_slots() == 2 * 2


@pytest.mark.parametrize("windows", [(5,), (5, None), (3, 8)])
def test_a_hit_needs_only_what_later_tokens_see(windows):
    manager = BlockManager(40, 2, windows=windows)
    first = make_seq(range(13))
    prefill(manager, first)
    manager.release_unseen(first)
    manager.check([first])
    again = make_seq([*range(13), 99])
    assert prefill(manager, again) == 12
    for group in range(len(windows)):
        passed = [block_id is None for block_id in again.block_table[group :: len(windows)]]
        assert passed.index(False) == passed.count(True) == manager.tables.first_kept(group, 12)
    manager.check([first, again])


def test_a_hit_may_be_shorter_than_the_window():
    manager = BlockManager(40, 2, windows=(8, None))
    prefill(manager, make_seq(range(7)))
    assert [manager.lookup(make_seq([*range(length), 99])).num_spans for length in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_beginning_of_which_the_window_is_evicted_does_not_hit():
    manager = BlockManager(6, 2, windows=(3,))
    first = make_seq(range(10))
    prefill(manager, first)
    last = first.block_table[4]
    manager.deallocate(first)
    other = make_seq(range(50, 54))
    prefill(manager, other)  # takes the empty block and the one that the first sequence released first, its tail
    assert manager.blocks[last].token_ids == (52, 53)
    hit = manager.lookup(make_seq([*range(10), 99]))
    assert hit.num_spans == 4, "the window before token 8 is still there"
    assert [block_id is None for block_id in hit.block_ids] == [True, True, True, False]


def test_the_hit_may_lie_after_a_gap():
    manager = BlockManager(8, 2, windows=(3,))
    first = make_seq(range(8))
    prefill(manager, first)
    manager.release_unseen(first)
    filler = make_seq(range(100, 112))
    prefill(manager, filler)  # takes all free blocks, those before the window included
    assert manager.lookup(make_seq([0, 1, 2, 3, 99])).num_spans == 0
    assert manager.lookup(make_seq([*range(8), 99])).num_spans == 4


def test_groups_have_the_size_of_the_fewest_layers_alike():
    gemma3_1b = [None if (i + 1) % 6 == 0 else 512 for i in range(26)]
    groups = cache_groups(gemma3_1b)
    assert [group.window for group in groups] == [512] * 6 + [None]
    assert [len(group.layers) for group in groups] == [4] * 4 + [3] * 2 + [4]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(26))
    assert cache_groups([None] * 3)[0].layers == (0, 1, 2)
    assert [group.layers for group in cache_groups([4, None, 4, None])] == [(0, 2), (1, 3)]
    assert [len(group.layers) for group in cache_groups([8] * 9 + [None] * 8)] == [9, 8], "about equal: no third group"


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_most_blocks_held_are_those_that_the_arithmetic_names(window, block_size):
    for chunk in (1, 7, 40):
        manager = BlockManager(200, block_size, windows=(window,))
        seq, most = make_seq(range(100)), 0
        hit = manager.lookup(seq)
        assert manager.num_prefill_blocks(seq, hit, chunk) == manager.tables.most_blocks(100, chunk)
        manager.allocate(seq, hit, chunk)
        seq.num_computed_tokens = chunk
        while True:
            most = max(most, manager.num_blocks - manager.num_free_blocks)
            new = min(chunk, 100 - seq.num_computed_tokens)
            if not new:
                break
            manager.release_unseen(seq)
            manager.may_append(seq, new)
            seq.num_computed_tokens += new
            manager.check([seq])
        bound = manager.tables.most_blocks(100, chunk)
        assert most <= bound
        assert chunk > 1 or most == bound


def test_the_longest_sequence_is_the_one_that_still_fits():
    tables = TableShape(4, (8, None))
    for num_blocks in range(2, 30):
        longest = tables.longest(num_blocks, 5, 1000)
        assert longest == 0 or tables.most_blocks(longest, 5) <= num_blocks < tables.most_blocks(longest + 1, 5)
    assert TableShape(4, (8,)).longest(6, 5, 1000) == 1000


class WindowedPoolMachine(PoolMachine):
    windows = (3,)
    num_blocks = 7


class AlternatingPoolMachine(PoolMachine):
    windows = (3, None)
    num_blocks = 14


TestWindowedPool = WindowedPoolMachine.TestCase
TestAlternatingPool = AlternatingPoolMachine.TestCase
TestWindowedPool.settings = TestAlternatingPool.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


def test_groups_of_layers_with_other_heads_take_about_the_same_bytes():
    # five layers of 2 heads of 8 with a window for each layer of 1 head of 16 without one, as bytes 16 and 16
    alike = cache_groups([4] * 5 + [None], [(2, 8)] * 5 + [(1, 16)])
    assert [(group.window, len(group.layers)) for group in alike] == [(4, 1)] * 5 + [(None, 1)]
    # layers of twice the bytes: a block holds one of them or two of the others
    wide = cache_groups([4] * 4 + [None] * 2, [(1, 8)] * 4 + [(1, 16)] * 2)
    assert [(group.heads, len(group.layers)) for group in wide] == [((1, 8), 4), ((1, 16), 2)]
    int8 = sized(wide, heads=(1, 8), kv_dtype="int8")  # scales: (8 + 4) * 4 against (16 + 4) * 2
    assert [group.used_bytes(2) for group in int8] == [2 * 2 * 4 * 12, 2 * 2 * 2 * 20]
    assert page_bytes(int8, 2) == 2 * 4 * 2 * 12
    # room for three layers of 4 elements, though the five of 2 take only 10
    rounded = cache_groups([4] * 25 + [None] * 5, [(2, 2)] * 25 + [(1, 2)] * 5)
    assert [len(group.layers) for group in rounded] == [3] * 7 + [2] * 2 + [5]


def test_layers_that_read_another_are_in_no_group():
    groups = cache_groups([4, None, 4, None], keeps=[True, True, False, False])
    assert [group.layers for group in groups] == [(0,), (1,)]
