"""The probes as data: lengths, shared prefixes, order and cost."""

import itertools

import pytest

from pagedcli.audit.plan import CHECKS, MAX_NEW, ProbePrompts, Target, plan

TARGET = Target(38, unit=16, smallest=16, bypass="salt", isolates=True)


@pytest.mark.parametrize("max_requests", [100, 300, 1000])
@pytest.mark.parametrize("unit", [1, 16, 32, 128, None])
@pytest.mark.parametrize("concurrency", [2, 8])
def test_a_plan_leaves_room_for_the_survey_within_its_limits(max_requests, unit, concurrency):
    target = Target(38, unit=unit, smallest=unit or 0, bypass="salt", isolates=True, concurrency=concurrency)
    probes = plan(ProbePrompts(target, 0), max_requests=max_requests, max_tokens=200_000)
    assert {probe.check for probe in probes} == set(CHECKS)
    asks = [ask for probe in probes for ask in probe.asks()]
    assert len(asks) <= 0.92 * max_requests + 12
    assert sum(probe.num_tokens() for probe in probes) <= 200_000
    assert max(len(ask.words) + ask.max_new for ask in asks) <= target.max_length
    assert max(len(step) for probe in probes for step in probe.steps) <= concurrency


@pytest.mark.parametrize("max_length", [120, 250, 512])
def test_short_contexts_are_kept(max_length):
    target = Target(38, 1, max_length, 16, 16, "salt", True)
    for probe in plan(ProbePrompts(target, 0), max_requests=300, max_tokens=100_000):
        for ask in probe.asks():
            after = 0 if ask.after is None else ask.after[1]
            assert 1 + len(ask.words) + after + ask.max_new <= max_length


def test_all_prompts_of_a_plan_begin_differently():
    probes = plan(ProbePrompts(TARGET, 0), max_requests=300, max_tokens=200_000)
    firsts = [probe.asks()[0].words[:MAX_NEW] for probe in probes]
    assert len(set(firsts)) == len(firsts)


def test_each_wave_of_pressure_is_twice_the_one_before():
    (probe,) = plan(ProbePrompts(TARGET, 0), max_requests=300, max_tokens=200_000, checks=["evict"])
    numbers = [pair.warm for pair in probe.pairs]
    waves = [later - earlier - 1 for earlier, later in itertools.pairwise(numbers)]
    assert waves == sorted(waves)
    assert waves[-1] in (2 * waves[-2], 2 * waves[-2] + 1)
    asks = probe.asks()
    assert all(asks[pair.cold] == asks[pair.warm] for pair in probe.pairs)
