"""The one-pass curve, the block manager without a scheduler, and the accounting of misses."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
from conftest import shared_data
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_harness import plan_for

from pagedcli.events import CacheGroup
from pagedcli.simulation.caches import (
    NEVER,
    accesses_of,
    hits_per_request,
    lru_curve,
    stack_distances,
    tokens_of_hits,
    unscheduled_hits,
)
from pagedcli.simulation.formats import read_traces
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.run import Schedule, simulate
from pagedcli.simulation.sweep import NEARLY, Sweep, enough_point, points, pool_verdict


def workload_of(prompts, num_output=2):
    requests = [
        TraceRequest(str(index), None, len(prompt), num_output, token_ids=array("q", prompt))
        for index, prompt in enumerate(prompts)
    ]
    return Workload(requests=requests)


some_prompts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda tail: [7] * (len(tail) % 3) + tail),
    min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(prompts=some_prompts, block_size=st.integers(1, 3))
def test_the_one_pass_curve_is_the_block_manager_at_every_pool_size(prompts, block_size):
    accesses = accesses_of(workload_of(prompts), block_size)
    distances = stack_distances(accesses)
    curve = lru_curve(accesses, distances)
    for num_blocks in range(1, accesses.num_unique + 2):
        hits = unscheduled_hits(accesses, num_blocks)
        tokens = tokens_of_hits(accesses, hits)
        assert hits_per_request(accesses, distances <= num_blocks).tolist() == tokens.tolist()
        assert curve.hits_at(num_blocks) == (hits.sum(), tokens.sum())
    assert curve.ceiling == curve.hits_at(accesses.num_unique + 1)


def test_a_stack_distance_by_hand():
    accesses = accesses_of(workload_of([[1, 2], [3], [1, 2], [1, 4]]), 1)
    distances = stack_distances(accesses).tolist()
    # the tail is released first: after request 0 the stack is 1, 2; then 3, 1, 2; then 1, 2, 3
    assert [None if each == NEVER else each for each in distances] == [None, None, None, 2, 3, 1, None]


@settings(max_examples=100, deadline=None)
@given(prompts=some_prompts, num_blocks=st.integers(6, 20), budget=st.integers(2, 12))
def test_the_parts_of_misses_add_up_to_all_tokens(prompts, num_blocks, budget):
    workload = workload_of(prompts)
    sweep = Sweep(workload, accesses_of(workload, 2))
    plan = plan_for(workload, num_blocks=1, block_size=2, max_num_seqs=4, max_num_batched_tokens=budget)
    for schedule in (Schedule(), None):
        [point] = points(sweep, plan, [num_blocks], ["lru"], schedule)
        assert sum(point.parts.values()) == workload.num_prompt_tokens
        assert min(point.parts.values()) >= 0
        assert point.parts["hit"] == point.hit_tokens[0]
        assert point.hit_tokens[1] == workload.num_prompt_tokens
    assert point.parts["in_flight"] == 0


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_that_is_called_enough_is_enough_in_a_run_with_it(seed):
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 9, rng.integers(4, 30)).tolist() for _ in range(rng.integers(1, 5))]
    prompts = [shared[rng.integers(len(shared))] + rng.integers(0, 9, rng.integers(1, 20)).tolist() for _ in range(30)]
    workload = workload_of(prompts, num_output=int(rng.integers(1, 30)))
    max_num_seqs = int(rng.integers(1, 12))
    plan = plan_for(workload, num_blocks=1, block_size=2, max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    sweep = Sweep(workload, accesses_of(workload, 2))
    swept = list(points(sweep, plan, sorted(rng.integers(1, 80, 2).tolist()), ["lru"], Schedule()))
    enough = enough_point(sweep, plan, swept, Schedule())
    finding = pool_verdict(sweep, swept, enough, None)
    if enough is None:
        assert "enough" not in finding
        return
    num_blocks = int(finding.partition(" ")[0]) if "enough" in finding else enough.num_blocks
    run = simulate(workload, replace(plan, limits=replace(plan.limits, num_blocks=num_blocks)), Schedule())
    hits, total = run.hit_tokens()
    assert hits / total >= sweep.curve.ceiling[1] / total - NEARLY
    assert run.num_refused == 0 or "enough" not in finding


def test_one_request_at_a_time_hits_like_a_cache_without_running_requests():
    rng = np.random.default_rng(0)
    prompts = [[7] * 8 + rng.integers(0, 2, 6).tolist() for _ in range(40)]
    workload = workload_of(prompts, num_output=1)
    sweep = Sweep(workload, accesses_of(workload, 2))
    plan = plan_for(workload, num_blocks=1, block_size=2, max_num_seqs=1, max_num_batched_tokens=64)
    for num_blocks in (8, 12, 20, 40):
        [real] = points(sweep, plan, [num_blocks], ["lru"], Schedule())
        [alone] = points(sweep, plan, [num_blocks], ["lru"], None)
        assert real.hit_blocks == alone.hit_blocks


@pytest.mark.parametrize("windows", [(5,), (6,), (4, None), (3, 3, None)])
def test_one_request_at_a_time_hits_like_a_cache_without_running_requests_also_with_windows(windows):
    rng = np.random.default_rng(0)
    prompts = [[7] * 8 + rng.integers(0, 2, 6).tolist() for _ in range(40)]
    workload = workload_of(prompts, num_output=1)
    groups = tuple(CacheGroup(window) for window in windows)
    plan = plan_for(workload, num_blocks=1, block_size=2, max_num_seqs=1, max_num_batched_tokens=4, groups=groups)
    sweep = Sweep(workload, accesses_of(workload, 2), windows=windows, chunk=4)
    for num_blocks in (8, 12, 20, 40, 200):
        num_blocks *= len(windows)
        [real] = points(sweep, plan, [num_blocks], ["lru"], Schedule())
        [alone] = points(sweep, plan, [num_blocks], ["lru"], None)
        assert real.hit_blocks == alone.hit_blocks
        assert sweep.lru(num_blocks) == (alone.hit_blocks[0], alone.hit_tokens[0])
        assert alone.hit_tokens[0] <= sweep.best(num_blocks)[0]
    assert alone.hit_tokens == (sweep.curve.ceiling[1], workload.num_prompt_tokens)


@pytest.fixture(scope="module")
def conversations():
    return read_traces([str(shared_data("mooncake") / "conversation_trace.jsonl")])


def test_published_figures_of_the_conversation_trace(conversations):
    """llmtrafficlens: 18.8 % at 4 Mi and 35.6 % at 16 Mi tokens; kvcache-simulator: 39.8 % without limit, LRU at three
    sizes. Both count the last 50 % of the requests, and the partial last block of a prompt as a block."""
    accesses = accesses_of(conversations, 512, partial_blocks=True)
    assert (len(accesses.blocks), accesses.num_unique) == (288_500, 182_790)
    curve = lru_curve(accesses, stack_distances(accesses), warmup=0.5)

    def rates(*sizes):
        return [100 * curve.hits_at(size)[1] / curve.num_tokens for size in sizes]

    assert rates(2**22 // 512, 2**24 // 512, accesses.num_unique) == pytest.approx([18.8, 35.6, 39.8], abs=0.05)
    assert rates(819, 6553, 26_214) == pytest.approx([4.649, 15.305, 33.000], abs=0.001)


def test_lmcaches_figure_without_limit(conversations):
    """Its cache simulator: 37.338 % of all tokens, full chunks only, no warm-up."""
    accesses = accesses_of(conversations, 512)
    curve = lru_curve(accesses, stack_distances(accesses))
    assert 100 * curve.ceiling[1] / curve.num_tokens == pytest.approx(37.338, abs=0.001)
