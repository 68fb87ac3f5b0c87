"""Engines with windows, without a model: tokens that depend on nothing but what the windows show, and lawful traces."""

import random
from collections import Counter

import msgspec
import pytest
from harness.core import EventList, Simulation, check_events, simulated

from pagedcli.answers.fits import group_rows
from pagedcli.core.groups import TableShape, cache_groups, sized
from pagedcli.core.limits import Limits
from pagedcli.errors import TraceError
from pagedcli.events import BlocksFilled, PrefixLookedUp, StepFinished, WindowPassed
from pagedcli.trace.check import TraceChecker
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.views.explain import Explainer

WINDOWS = [(5,), (3,), (4, None), (3, 3, None), (6, 9)]


def fill(sim, seed=0, num_requests=8):
    """Requests of which many share beginnings; some draw several samples."""
    rng = random.Random(seed)
    shared = [rng.randrange(3) for _ in range(9)]
    for number in range(num_requests):
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        sim.add(shared[: rng.randint(0, 9)] + tail, rng.randint(1, 14), n=1 + (number % 4 == 3))
    return sim


@pytest.mark.slow_cases("*-windows4", "True-windows1", "True-windows3")
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_trace_with_windows_obeys_every_law(windows, runs_ahead):
    num_preemptions = 0
    for extra in (0, 2, 3, 5):
        events = []
        pool = TableShape(2, windows).most_blocks(9 + 9 + 14, 2) + extra
        limits = {"runs_ahead": runs_ahead, "chunked_prefill_size": 2}
        sim = Simulation(pool, windows=windows, emit=events.append, trace_tokens=True, **limits)
        fill(sim, num_requests=12).run()
        state = check_events(events).state
        num_preemptions += sim.stats.num_preemptions
        assert sim.stats.num_cached_tokens > 0
        assert sum(isinstance(event, WindowPassed) for event in events) > 10
        assert list(state.free_block_ids) == list(sim.block_manager.free_block_ids)
        assert state.hash_to_block_id == sim.block_manager.hash_to_block_id
        explainer = Explainer()
        fold(EventList(events), explainer)
        explainer.finish()
    assert num_preemptions > 0


@pytest.mark.quick("windows0")
@pytest.mark.parametrize("windows", [(None, 3), (6, 3), (None, 4, 7)])
def test_a_lookup_names_the_hash_of_the_group_that_is_missing(windows):
    """So a block of another group that is still cached is not taken for a collision of hashes."""
    reasons, num_others = Counter(), 0
    for seed in range(4):
        explainer = Explainer()
        events = simulated(num_blocks=14 * len(windows), windows=windows, num_requests=60, seed=seed)
        folding = pool_fold(explainer)
        for event in events:
            if isinstance(event, PrefixLookedUp) and event.miss_reason == "no_match":
                assert event.missing_hash not in folding.state.hash_to_block_id
            folding(event)
        explainer.finish()
        reasons.update(lookup.reason for lookup in explainer.lookups)
        filled = [event for event in events if isinstance(event, BlocksFilled)]
        missing = {event.missing_hash for event in events if isinstance(event, PrefixLookedUp)}
        num_others += len(missing & {each for event in filled for each in event.hashes[1 :: len(windows)]})
    assert reasons["evicted"] > 0 < num_others
    assert not reasons["hash_collision"] + reasons["unfindable"]


def test_blocks_in_use_stay_flat_while_a_sequence_grows_past_its_window():
    checker, used = TraceChecker(), []

    def emit(event):
        checker(event)
        if isinstance(event, StepFinished):
            used.append(checker.state.num_used_blocks)

    sim = Simulation(30, 4, windows=(16,), emit=emit, max_model_len=300)
    sim.add([1, 2, 3], 250)
    sim.run()
    assert set(used[16:-1]) == {4, 5}
    assert used[-1] == 0
    groups = sized(cache_groups([16, 16]), heads=(1, 1), kv_dtype="int8")
    limits = Limits(block_size=4, groups=groups, max_num_batched_tokens=8)
    [row] = group_rows({"here": 253}, limits, block_bytes=8)
    assert (row.num_blocks, row.kv_cache_bytes, row.one_table_bytes) == (5, 40, 64 * 8)
    assert row.num_prefill_blocks == 7
    assert limits.tables.concurrency(30, 253) == 6


@pytest.mark.parametrize("windows", [(3,), (4, None)])
def test_a_release_that_is_missing_or_of_another_block_is_found(windows):
    events = []
    pool = TableShape(2, windows).most_blocks(32, 2) + 2
    fill(Simulation(pool, windows=windows, emit=events.append, chunked_prefill_size=2)).run()
    places = [i for i, event in enumerate(events) if isinstance(event, WindowPassed)]
    for place in places[::5]:
        event = events[place]
        for block_ids in ((), tuple((block_id + 1) % pool for block_id in event.block_ids), event.block_ids * 2):
            changed = [msgspec.structs.replace(event, block_ids=block_ids)] if block_ids else []
            with pytest.raises(TraceError):
                check_events([*events[:place], *changed, *events[place + 1 :]])
