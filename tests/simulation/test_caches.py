"""The one-pass curve of LRU against a block manager, and the figures of other tools."""

from array import array

import numpy as np
import pytest
from conftest import shared_data
from harness.core import make_seq, plan_for, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.answers.hits import found_in
from pagedcli.core.block_manager import BlockManager
from pagedcli.simulation.caches import accesses_of, best_hits, lru_curve
from pagedcli.simulation.formats import read_traces
from pagedcli.simulation.requests import Request, Requests


def workload_of(prompts, num_output=2):
    requests = [
        Request(str(index), None, len(prompt), num_output, token_ids=array("q", prompt))
        for index, prompt in enumerate(prompts)
    ]
    return Requests(requests=requests)


some_prompts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tail: [7] * (len(tail) % 3) + tail),
    min_size=1, max_size=25,
)  # fmt: skip


def one_at_a_time(prompts, block_size, num_blocks):
    """(blocks, tokens) that hit in the block manager; of a prompt larger than the pool only the beginning is kept."""
    manager, blocks, tokens = BlockManager(num_blocks, block_size), 0, 0
    for place, prompt in enumerate(prompts):
        full = prompt[: len(prompt) // block_size * block_size]
        # one more token than the full blocks, so that all of them are looked up
        seq = make_seq([*full[: num_blocks * block_size], 8][: num_blocks * block_size + 1], place)
        hits = len(manager.lookup(seq).block_ids)
        blocks, tokens = blocks + hits, tokens + hits * block_size - (hits * block_size == len(prompt))
        seq.token_ids.pop()
        if seq.token_ids:
            prefill(manager, seq)
            manager.deallocate(seq)
    return blocks, tokens


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(prompts=some_prompts, block_size=st.integers(1, 3))
def test_the_one_pass_curve_is_the_block_manager_at_every_pool_size(prompts, block_size):
    accesses = accesses_of(workload_of(prompts), block_size)
    curve = lru_curve(accesses)
    for num_blocks in range(1, accesses.num_unique + 2):
        assert curve.hits_at(num_blocks) == one_at_a_time(prompts, block_size, num_blocks)
    assert curve.ceiling == curve.hits_at(accesses.num_unique + 1)
    for share in (0.3, 0.99, 1.0):
        wanted = share * curve.ceiling[1]
        size = curve.size_for(wanted)
        assert curve.hits_at(size)[1] >= wanted
        assert size == 1 or curve.hits_at(size - 1)[1] < wanted


def test_one_request_at_a_time_hits_like_a_cache_without_running_requests():
    rng = np.random.default_rng(0)
    prompts = [[7] * 8 + rng.integers(0, 2, 6).tolist() for _ in range(40)]
    workload = workload_of(prompts, num_output=1)
    accesses = accesses_of(workload, 2)
    plan = plan_for(workload, num_blocks=1, block_size=2, max_num_seqs=1, max_num_batched_tokens=64)
    for num_blocks in (8, 12, 20, 40):
        found = found_in(workload, plan, num_blocks)
        assert (found.blocks[0], found.tokens[0]) == lru_curve(accesses).hits_at(num_blocks)
        assert found.tokens[0] <= best_hits(accesses, num_blocks)[0]


@pytest.fixture(scope="module")
def conversations():
    return read_traces([str(shared_data("mooncake") / "conversation_trace.jsonl")])


def test_published_figures_of_the_conversation_trace(conversations):
    """llmtrafficlens: 18.8 % at 4 Mi and 35.6 % at 16 Mi tokens; kvcache-simulator: 39.8 % without limit, LRU at three
    sizes. Both count the last 50 % of the requests, and the partial last block of a prompt as a block."""
    accesses = accesses_of(conversations, 512, partial_blocks=True)
    assert (len(accesses.blocks), accesses.num_unique) == (288_500, 182_790)
    curve = lru_curve(accesses, warmup=0.5)

    def rates(*sizes):
        return [100 * curve.hits_at(size)[1] / curve.num_tokens for size in sizes]

    assert rates(2**22 // 512, 2**24 // 512, accesses.num_unique) == pytest.approx([18.8, 35.6, 39.8], abs=0.05)
    assert rates(819, 6553, 26_214) == pytest.approx([4.649, 15.305, 33.000], abs=0.001)


def test_lmcaches_figure_without_limit(conversations):
    """Its cache simulator: 37.338 % of all tokens, full chunks only, no warm-up."""
    accesses = accesses_of(conversations, 512)
    curve = lru_curve(accesses)
    assert 100 * curve.ceiling[1] / curve.num_tokens == pytest.approx(37.338, abs=0.001)
