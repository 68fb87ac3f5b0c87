"""Prefixes that were seen before, with their rows and to the token; entries that a store has."""

import random

import pytest
from harness.core import make_seq, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.prefixes import BLOCK_SIZES, SeenPrefixes, num_equal
from pagedcli.planning.prompt_survey import PrefixRows


def test_rows_of_prefixes_keep_the_row_that_was_added():
    known, rng = PrefixRows(), random.Random(1)
    digests = [rng.randrange(2**64) for _ in range(80_000)]
    for row in range(800):
        known.add(digests[100 * row : 100 * row + 100], row)
    assert len(known) == 80_000
    assert all(known.first_row(digests[100 * row + place]) == row for row in range(800) for place in (0, 99))
    assert known.first_row(7) is None
    assert known.first_row(2**64 - 1) is None
    assert known.num_known([*digests[:5], 7, 8]) == 5
    assert known.num_known([7]) == known.num_known([]) == 0
    assert known.num_known(digests[:3]) == 3


@settings(max_examples=60, deadline=None)
@given(seqs=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from([None, "a"])), max_size=40))
def test_what_was_seen_is_found_to_the_token_and_as_long_as_it_is_new(seqs):
    seen, known = SeenPrefixes(20), []  # known: salt, tokens, how many tokens were new up to here
    for tokens, salt in seqs:
        found = seen.add(tokens, salt)
        num_new = known[-1][2] if known else 0
        lengths = [
            [num_equal(tokens, other) for own, other, end in known if own == salt and num_new - end < window]
            for window in (20, num_new + 1)
        ]
        assert max(lengths[0], default=0) <= found <= max(lengths[1], default=0)
        known.append((salt, tokens, num_new + len(tokens)))
        assert seen.has_forgotten or found == max(lengths[1], default=0)


def test_of_two_trees_the_older_one_is_forgotten():
    seen = SeenPrefixes(4)
    assert (seen.add([1, 2]), seen.add([1, 2, 3]), seen.has_forgotten) == (0, 2, False)
    assert [seen.add([1, 2, 3], look_back=False) for _ in range(3)] == [3, 3, 3]  # no token of it is new
    assert (seen.add([5, 6]), seen.add([1, 2, 3, 4], look_back=False), seen.add([1, 2, 9])) == (0, 0, 2)
    assert (seen.add([1, 2, 3, 4]), seen.has_forgotten) == (4, True)
    assert [SeenPrefixes.add(seen := SeenPrefixes(4), range(4)), seen.add([0, 1], look_back=False)] == [0, 0]
    assert (seen.add([5, 6, 7]), seen.add([7, 7]), seen.add([7, 7, 7])) == (0, 0, 2)


def test_reports_compare_powers_of_two():
    assert list(BLOCK_SIZES) == [8, 16, 32, 64, 128, 256]


def test_equal_beginnings():
    assert num_equal([1, 2, 3], [1, 2, 4, 5]) == 2
    assert num_equal([1, 2], [1, 2, 4, 5]) == num_equal([1, 2, 3], [1, 2]) == 2
    assert num_equal([], [1]) == num_equal([2], [1]) == 0


def test_entries_of_a_store_end_where_all_kinds_continue_and_where_blocks_can_be_taken():
    manager = BlockManager(9, 2)
    seq = make_seq([1, 2, 3, 4, 5, 6, 7])
    manager.lookup(seq)
    assert manager.missing_entries(seq, {0, 1, 2}) == ([0, 1, 2], 3)
    assert manager.missing_entries(seq, {0, 2}) == ([0], 1)
    assert manager.missing_entries(seq, {0, 1, 2}, {1, 3}) == ([0, 1, 2], 3)
    assert manager.missing_entries(seq, {0, 1, 2}, {1, 2}) == ([0, 1], 2)
    assert manager.missing_entries(seq, {0, 1, 2}, {4}) == ([], 0)
    assert manager.missing_entries(seq, set()) == ([], 0)
    small = BlockManager(3, 2)
    held = make_seq([8, 9, 8])
    prefill(small, held)
    small.lookup(seq)
    assert small.missing_entries(seq, {0, 1, 2}) == ([0], 1)
    assert small.missing_entries(seq, {0, 1, 2}, {1, 3}) == ([0], 1)
    assert small.missing_entries(seq, {0, 1, 2}, {2, 3}) == ([], 0)
    groups = BlockManager(3, 2, windows=(None, None))
    other = make_seq([1, 2, 3, 4, 5, 6, 7])
    groups.lookup(other)
    assert groups.missing_entries(other, range(6)) == ([0, 1], 1)


@pytest.mark.parametrize(("eviction", "num_taken"), [("lru", 3), ("fifo", 1), ("prefix-lru", 1)])
def test_cached_blocks_make_room_for_what_is_read_where_it_is_known_which_goes(eviction, num_taken):
    manager = BlockManager(3, 2, eviction=eviction)
    old = make_seq([8, 9, 8, 9])
    prefill(manager, old)
    manager.deallocate(old)
    seq = make_seq([1, 2, 3, 4, 5, 6, 7], 1)
    manager.lookup(seq)
    assert manager.missing_entries(seq, {0, 1, 2}) == (list(range(num_taken)), num_taken)
