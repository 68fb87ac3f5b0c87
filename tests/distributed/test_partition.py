"""Rows that begin alike go to one worker, workers get equal work, and a worker that is done helps the others."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.prefixes import unit_digests
from pagedcli.core.sequence import Sequence
from pagedcli.distributed.partition import PrefixKeys
from pagedcli.sampling_params import SamplingParams

BLOCK = 4


def keys_of(prompts, num_output_tokens=1):
    keys = PrefixKeys(BLOCK)
    for prompt in prompts:
        keys.add(prompt, num_output_tokens)
    return keys


def families(num_families, num_rows, *, num_shared=8, num_own=3):
    """Rows of several families, mixed: those of a family begin with the same tokens."""
    rows = [
        [family * 1000 + place for place in range(num_shared)] + [500 + row] * num_own
        for row in range(num_rows)
        for family in range(num_families)
    ]
    random.Random(0).shuffle(rows)
    return rows


def test_the_chain_hash_is_that_of_the_block_manager():
    manager, tokens = BlockManager(8, BLOCK), list(range(11))
    for salt in (None, "tenant"):
        seq = Sequence(0, "0", tokens, SamplingParams(), max_new_tokens=1, cache_salt=salt)
        manager.lookup(seq)
        assert unit_digests(tokens, salt, BLOCK) == [prefix.hash for prefix in seq.prefixes]


def test_rows_of_a_family_are_neighbours_whatever_their_order_in_the_file():
    prompts = families(5, 7)
    rows = keys_of(prompts).ordered().rows
    firsts = [prompts[row][0] for row in rows]
    assert sum(a != b for a, b in pairwise(firsts)) == 4
    assert sorted(rows) == list(range(len(prompts)))


def test_what_neighbours_share_is_counted_in_full_blocks():
    prompts = [list(range(23)), [*range(13), *range(100, 110)], [*range(9), 7]]
    ordered = keys_of(prompts).ordered()
    shared = dict(zip(ordered.rows.tolist(), ordered.shared_tokens.tolist(), strict=True))
    assert sorted(shared.values()) == [0, 8, 12]
    assert sum(ordered.costs) == 23 + 23 + 10 - 8 - 12 + 3


def test_rows_that_share_more_are_nearer():
    system = list(range(8))
    prompts = [system + [100 * (row % 3)] * 8 + [row] for row in range(12)]  # one system prompt, three documents
    documents = [prompts[row][8] for row in keys_of(prompts).ordered().rows]
    assert sum(a != b for a, b in pairwise(documents)) == 2


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=40),
    num_parts=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_exactly_one_part(prompts, num_parts):
    parts = keys_of(prompts).ordered().parts(num_parts)
    assert len(parts) <= num_parts
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(len(prompts)))


def test_parts_are_balanced_by_tokens_and_not_by_rows():
    prompts = [[row] * (40 if row < 10 else 10) for row in range(50)]
    parts = keys_of(prompts).ordered().parts(4)
    work = [sum(len(prompts[row]) for row in part) for part in parts]
    assert max(work) <= 1.2 * sum(work) / 4
    assert len({len(part) for part in parts}) > 1


def test_a_cut_falls_between_two_families_if_that_is_near_enough():
    prompts = families(4, 10)
    parts = keys_of(prompts).ordered().parts(2)
    families_of = [{prompts[row][0] for row in part} for part in parts]
    assert not families_of[0] & families_of[1]


def test_one_family_is_still_shared_out_to_all_workers():
    parts = keys_of(families(1, 40)).ordered().parts(4)
    assert all(8 <= len(part) <= 11 for part in parts)
