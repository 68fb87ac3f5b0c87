"""What hits promises for a pool is what a run with it finds, and the smallest pool that is as good is the smallest."""

from array import array
from dataclasses import replace

import numpy as np
import pytest
from pool_harness import plan_for

from pagedcli.answers.hits import NEARLY, a_tenth_less, hits
from pagedcli.core.eviction import POLICIES
from pagedcli.events import CacheGroup
from pagedcli.simulation.requests import Request, Requests
from pagedcli.simulation.run import Schedule, simulate


def random_requests(seed):
    """Twenty requests that share beginnings; some with samples, salts, continuations to score, or times of arrival."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(0, 9, rng.integers(4, 30)).tolist() for _ in range(rng.integers(1, 5))]
    requests, has_times = [], seed % 5 == 4
    for number in range(20):
        ids = heads[rng.integers(len(heads))] + rng.integers(0, 9, rng.integers(1, 20)).tolist()
        arrival_s, salt = number * 0.5 if has_times else None, None if seed % 3 else str(number % 2)
        request = Request(str(number), arrival_s, len(ids), 0, token_ids=array("q", ids), cache_salt=salt)
        if number == seed:
            request.continuations, request.max_new_tokens = [[1, 2], [3]], 0
        else:
            request.num_output_tokens, request.num_samples = int(rng.integers(1, 30)), int(rng.choice([1, 1, 1, 2]))
            request.max_new_tokens = request.num_output_tokens + int(rng.integers(0, 3))
        requests.append(request)
    return Requests(requests, has_times=has_times)


def planned(seed, requests, policy, **limits):
    rng = np.random.default_rng(seed)
    groups = (CacheGroup(5), CacheGroup()) if seed % 7 == 6 else (CacheGroup(),)
    given = {"num_blocks": int(rng.integers(1, 60)), "block_size": int(rng.choice([1, 2, 4])),
             "max_num_seqs": int(rng.integers(1, 12)), "max_num_batched_tokens": 64,
             "groups": groups, "eviction": policy, **limits}  # fmt: skip
    return plan_for(requests, **given)


def run_with(requests, plan, num_blocks, schedule=None):
    return simulate(requests, replace(plan, limits=replace(plan.limits, num_blocks=num_blocks)), schedule)


def rate(run):
    found, total = run.hit_tokens()
    return found / max(1, total)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(40))
def test_the_pool_that_is_enough_is_as_good_as_one_without_limit_and_a_tenth_less_is_not(seed, policy):
    requests = random_requests(seed)
    plan = planned(seed, requests, policy)
    schedule = Schedule(speed=1.0) if requests.has_times else None
    found = hits(requests, plan, schedule)
    assert found.doubt is None
    assert found.unlimited.run.facts.num_preemptions == 0
    run = run_with(requests, plan, found.enough.num_blocks, schedule)
    assert run.hit_tokens() == found.enough.tokens, "to the token"
    assert run.num_refused == found.unlimited.num_refused == 0
    assert rate(run) >= found.unlimited.hit_rate - NEARLY
    if fewer := a_tenth_less(found.enough.num_blocks):
        less = run_with(requests, plan, fewer, schedule)
        assert less.num_refused or rate(less) < found.unlimited.hit_rate - NEARLY


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_without_limit_finds_what_any_larger_one_does(seed):
    requests = random_requests(seed)
    plan = planned(seed, requests, "lru")
    found = hits(requests, plan)
    assert run_with(requests, plan, 5000).hit_tokens() == found.unlimited.tokens
    assert found.unlimited.hit_rate <= found.ideal_hit_rate
