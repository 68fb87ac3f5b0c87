"""The probes as data: lengths, shared prefixes, order and cost."""

import itertools

import pytest

from pagedcli.audit.plan import CHECKS, MAX_NEW, ProbePrompts, Target, plan, shared_length

TARGET = Target(38, unit=16, smallest=16, bypass="salt", isolates=True)


def prompts(**changes):
    return ProbePrompts(Target(**{**{"num_words": 38, "unit": 16, "smallest": 16}, **changes}), 1)


def test_boundaries_are_whole_blocks_from_the_shortest_cached_prefix():
    assert TARGET.boundaries() == [16, 32, 64, 128]
    assert Target(38, unit=128, smallest=1024).boundaries() == [1024, 1152, 1408, 1920]
    assert Target(38, unit=1).boundaries() == [16, 32, 64, 128]
    assert Target(38, unit=None, max_length=100).boundaries() == [16, 32, 64]


@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("length", [15, 16, 17, 64])
def test_a_prompt_has_the_tokens_it_should_have(length, extra):
    (cold,), (warm,), (again,) = CHECKS["repeat"].build(prompts(num_extra=extra), length).steps
    assert cold == warm == again
    assert len(cold.words) + extra == length


@pytest.mark.parametrize("extra", [0, 1])
def test_twins_share_all_but_the_last_token_of_a_block(extra):
    probe = CHECKS["twins"].build(prompts(num_extra=extra, bypass="salt"), 32)
    first, other, cold = probe.asks()
    assert shared_length(first.words, [other.words]) + extra == 31
    assert first.words[32 - extra :] == other.words[32 - extra :]
    assert cold.words == other.words
    assert cold.is_cold


def test_a_moved_block_comes_after_the_same_first_block():
    before, after = CHECKS["moved"].build(prompts(), 16).asks()
    assert shared_length(after.words, [before.words]) in (16, 17)  # a word more by chance
    assert after.words[16:32] == before.words[32:48]


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 63])
def test_prompts_part_exactly_where_they_should(shared):
    source = prompts()
    words = source.new(64)
    for _ in range(50):
        assert shared_length(source.parting(words, shared, 70), [words]) == shared


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
