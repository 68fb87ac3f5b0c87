"""What hits promises for a pool is what a run with it finds, and the smallest pool that is as good is the smallest."""

import json
from array import array
from dataclasses import replace

import numpy as np
import pytest
from cli_harness import pagedcli
from harness.core import plan_for

from pagedcli.answers.hits import (
    NEARLY,
    OutOfTimeError,
    a_tenth_less,
    hits,
    hits_in_words,
    hits_one_at_a_time,
    least_pool,
)
from pagedcli.answers.settings import Subject
from pagedcli.answers.time import time
from pagedcli.core.eviction import POLICIES
from pagedcli.events import CacheGroup
from pagedcli.simulation.caches import accesses_of, lru_curve
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
@pytest.mark.quick("4-*", "6-*")  # times of arrival, windows
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


@pytest.mark.parametrize("seed", range(2))
def test_a_pool_without_limit_finds_what_any_larger_one_does(seed):
    requests = random_requests(seed)
    plan = planned(seed, requests, "lru")
    found = hits(requests, plan)
    assert run_with(requests, plan, 5000).hit_tokens() == found.unlimited.tokens
    assert found.unlimited.hit_rate <= found.ideal_hit_rate


def test_the_search_ends_when_its_time_is_over_and_the_line_says_so():
    requests = random_requests(3)
    plan = planned(3, requests, "lru")
    enough = hits(requests, plan).enough
    in_time = hits(requests, plan, search_s=0.0)
    assert in_time.enough.num_blocks > enough.num_blocks
    assert in_time.enough.hit_rate >= in_time.unlimited.hit_rate - NEARLY
    assert hits_in_words(in_time).endswith(f" ({in_time.doubt}).")
    assert in_time.doubt == "smaller pools were not all tried, to save time"

    def stop(num_blocks, num_done):
        raise OutOfTimeError

    with pytest.raises(OutOfTimeError):
        hits(requests, plan, observe=stop)


def test_pools_that_are_known_are_not_simulated_again():
    requests = random_requests(2)
    plan, seen = planned(2, requests, "lru"), set()
    first = hits(requests, plan)
    again = hits(requests, plan, known=first.tried, observe=lambda num_blocks, _: seen.add(num_blocks))
    assert (again.enough, seen) == (first.enough, set())


def test_the_smallest_pool_that_serves_every_request_is_the_least_one():
    for seed in range(10):
        requests = random_requests(seed)
        plan = planned(seed, requests, "lru")
        least = least_pool(requests, plan.limits)
        assert run_with(requests, plan, least).num_refused == 0
        assert least == 1 or run_with(requests, plan, least - 1).num_refused > 0


def alike(num_requests, *, head=8, tail=4, num_new=1):
    """Requests that begin with the same tokens, one at a time."""
    ids = [[7] * head + [100 + number] * tail for number in range(num_requests)]
    requests = [
        Request(str(number), None, len(each), num_new, token_ids=array("q", each)) for number, each in enumerate(ids)
    ]
    return Requests(requests)


@pytest.mark.parametrize(
    ("num_blocks", "said"),
    [
        (6, "6 blocks find 60.0 % of the prompt tokens, as much as an unlimited cache."),
        (7, "7 blocks find 60.0 % of the prompt tokens, as much as an unlimited cache; 6 blocks would do."),
        (5, "10 requests do not fit into 5 blocks; 6 blocks find 60.0 %, as much as an unlimited cache."),
    ],
)
def test_the_first_line_says_what_this_pool_finds_and_which_one_is_enough(num_blocks, said):
    requests = alike(10)
    plan = plan_for(requests, num_blocks=num_blocks, block_size=2, max_num_seqs=1, max_num_batched_tokens=64)
    assert hits_in_words(hits(requests, plan)) == said
    with_memory = said.replace("6 blocks", "6 blocks (6.0 MiB)").replace("5 blocks", "5 blocks (5.0 MiB)")
    assert hits_in_words(hits(requests, plan), 2**20) == with_memory.replace("7 blocks", "7 blocks (7.0 MiB)")


def test_what_is_found_is_that_of_the_order_in_which_the_run_starts_the_requests():
    rows = [request for pair in zip(*[alike(8, head=12 + place, tail=2).requests for place in (0, 1)], strict=True)
            for request in pair]  # fmt: skip
    for number, request in enumerate(rows):
        request.request_id = str(number)
        request.token_ids[0] = number % 4
    requests = Requests(rows)
    plan = plan_for(requests, num_blocks=8, block_size=2, max_num_seqs=1, max_num_batched_tokens=64)
    found = {}
    for order in ("none", "prefix"):
        given = Subject(requests, plan, reorder=order)
        found[order] = hits(given.in_order, plan).here.tokens[0]
        assert found[order] == time(requests, plan, reorder=order).num_cached_tokens
    assert found["prefix"] > found["none"]


def test_prompts_that_share_nothing_are_said_to_and_one_block_finds():
    requests = alike(10, head=0, num_new=1)
    plan = plan_for(requests, num_blocks=1, block_size=16, max_num_seqs=1, max_num_batched_tokens=64)
    assert hits_in_words(hits(requests, plan)) == (
        "1 block finds 0.0 % of the prompt tokens; the prompts share almost nothing as they are: an unlimited cache"
        " finds 0.0 %."
    )


def test_one_at_a_time_the_pool_that_is_enough_is_the_smallest_of_the_curve():
    requests = alike(10)
    curve = lru_curve(accesses_of(requests, 2))
    found = hits_one_at_a_time(curve, 3)
    assert (found.here.hit_rate, found.enough.num_blocks, found.ideal_hit_rate) == (0.45, 4, 0.6)
    assert "running requests" in found.doubt


def test_generate_finds_in_the_pool_that_is_enough_what_simulate_promises(tmp_path):
    """The engine itself, to the token."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": [5 + n % 4] * 64 + [50 + n] * 20, "max_tokens": 6, "ignore_eos": True} for n in range(24)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = ("--max-num-seqs", "2", "--max-num-batched-tokens", "64")
    found = json.loads(pagedcli("simulate", prompts, "--pool", "8", *limits, "--format", "json").stdout)
    for num_blocks, rate in ((each["num_blocks"], each["hit_rate"]) for each in (found["enough"], found["tried"][0])):
        pagedcli(
            "generate", prompts, "-o", out, "--num-kvcache-blocks", num_blocks, *limits, "--overwrite",
            "--summary-json", tmp_path / "summary.json",
        )  # fmt: skip
        done = json.loads((tmp_path / "summary.json").read_text())
        assert done["cached_tokens"] / done["prompt_tokens"] == rate
    assert found["enough"]["hit_rate"] > rate
