"""Blocks and bytes by hand: what a pool has room for, what requests hold, and the largest step."""

import pytest
import torch

from pagedcli.core.budget import ITEMSIZE, StepShape, Terms, block_bytes, blocks_for
from pagedcli.core.cache import pool_bytes
from pagedcli.core.groups import TableShape, sized
from pagedcli.core.limits import NO_LIMIT, Limits
from pagedcli.core.plan import Plan, Pool, started
from pagedcli.events import CacheGroup


def test_every_term_takes_its_bytes_from_the_cache():
    terms = Terms(total=1000, reserve=1, others=2, runtime=4, weights=8, activations=16, graphs=32)
    assert (terms.used, terms.available, terms.kv_cache) == (14, 938, 937)
    small = Terms(total=10, weights=8, activations=16)
    assert (small.available, small.kv_cache) == (-14, -14)


def test_bytes_of_blocks():
    assert [blocks_for(each, 4) for each in (0, 1, 4, 5)] == [0, 1, 1, 2]
    shape = {"num_layers": 3, "block_size": 4, "num_kv_heads": 5, "head_dim": 8}
    assert block_bytes(**shape, kv_dtype="float16") == 2 * 3 * 4 * 5 * 8 * 2
    assert block_bytes(**shape, kv_dtype="int8") == 2 * 3 * 4 * 5 * (8 + 4)
    groups = CacheGroup(None, (0, 1), (1, 8)), CacheGroup(None, (0, 1), (1, 8), value_dim=4), CacheGroup(None, (0,))
    assert [each.token_bytes for each in sized(groups, heads=(3, 8), kv_dtype="float16")] == [64, 32, 96]
    limits = Limits(num_blocks=6, num_state_slots=3, state_bytes=100)
    unknown = Limits(num_blocks=6, state_bytes=100)
    given = (limits, Limits(num_blocks=6), unknown, Limits())
    assert [pool_bytes(each, 7) for each in given] == [342, 42, 42, 0]
    assert Pool(6, "", num_state_slots=3).state_bytes(limits) == 300
    assert Pool(6, "").state_bytes(limits) == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "lengths"), [(10, 4, [3, 3, 2, 2]), (2, 4, [1, 1]), (100, 2, [20, 20]), (5, 1, [5])]
)
def test_the_largest_step_has_as_many_sequences_and_tokens_as_can_be(num_tokens, num_seqs, lengths):
    assert StepShape.largest(num_tokens, num_seqs, 20).lengths == lengths


def test_requests_share_the_full_blocks_of_their_prompts_in_layers_without_a_window():
    plain, both = TableShape(4), TableShape(4, (6, None))
    assert plain.blocks_of_request(9, 12, 1, chunk=8) == 3
    assert plain.blocks_of_request(9, 12, 3, chunk=8) == 3 * 3 - 2 * 2
    assert plain.blocks_of_request(9, 12, 3, chunk=8, shares_prompt=False) == 3 * 3
    assert both.blocks_of_request(9, 40, 2, chunk=1) == 2 * (3 + 10) - 2
    assert (both.most_in_windows(1), plain.most_in_windows(1)) == (3, 0)
    assert plain.concurrency(13, 16) == 13 / 4
    assert plain.concurrency(13, 16, shared_tokens=8) == (13 - 2) / 2
    assert plain.concurrency(13, 16, shared_tokens=16) == 13 - 3  # the last token is computed, in a block of its own
    assert plain.concurrency(1, 16, shared_tokens=8) == 0
    for num_requests in (1, 2, 5):
        num_blocks = both.blocks_for_requests(num_requests, 16, shared_tokens=8)
        assert both.concurrency(num_blocks, 16, shared_tokens=8) == num_requests
    assert plain.blocks_for_requests(5, 16, shared_tokens=8) == 2 + 5 * 2


def test_limits_and_plans_begin_with_none():
    limits = Limits()
    assert {getattr(limits, name) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")} == {NO_LIMIT}
    assert (limits.block_size, limits.min_prefill_tokens, limits.state_bytes, limits.windows) == (16, 0, 0, (None,))
    [event] = started(Plan(limits=Limits(num_blocks=1), model="m"))
    assert (event.num_blocks, event.block_bytes, event.enable_prefix_caching) == (1, 0, True)
    plan = Plan(limits=limits, model="m")
    assert (plan.seed, plan.weight_bytes, plan.runs_ahead, plan.in_one_call) == (0, 0, False, False)


def test_bytes_of_an_element_are_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE
