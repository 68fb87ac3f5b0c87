"""The dialects of servers, answers that are none, answers that differ by more than noise, and the probes as data."""

import itertools
import math

import pytest

from pagedcli.audit.answers import AnswerChoice, Pieces, parse_answer
from pagedcli.audit.compare import AnswerDifference, compare, measure_noise
from pagedcli.audit.plan import CHECKS, MAX_NEW, ProbePrompts, Target, plan


def parse(document):
    return parse_answer(document, first_s=None, total_s=1.0)


@pytest.mark.parametrize(
    ("rest", "field", "cached"),
    [
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}},
         "usage.prompt_tokens_details.cached_tokens", 32),
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": None}}, None, None),
        ({"usage": {"prompt_tokens": 40}, "timings": {"cache_n": 39, "prompt_n": 1}}, "timings.cache_n", 39),
        ({"usage": {"prompt_tokens": 40, "prompt_cache_hit_tokens": 0}}, "usage.prompt_cache_hit_tokens", 0),
        ({"usage": {"prompt_tokens": 40}, "meta_info": {"cached_tokens": 16}}, "meta_info.cached_tokens", 16),
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": "many"}}}, None, None),
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": -1}}}, None, None),
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": True}}}, None, None),
        ({"usage": {"prompt_tokens": 40, "prompt_tokens_details": [7]}}, None, None),
    ],
)  # fmt: skip
def test_cached_tokens_are_found_where_servers_report_them(rest, field, cached):
    answer = parse({"choices": [{"text": "a"}], **rest})
    assert (answer.cached_field, answer.num_cached, answer.num_prompt) == (field, cached, 40)


TOPS = [{" a": -0.1, " c": -3}, {" b": -0.2}]
LEGACY = {"tokens": [" a", " b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": TOPS}


def as_content(top):
    likeliest, *_ = rows = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
    return {**likeliest, "top_logprobs": rows}


CONTENT = {"content": [as_content(top) for top in TOPS]}


def test_both_shapes_of_logprobs_are_the_same_answer():
    legacy, content = (
        parse({"choices": [{"text": " a b", "logprobs": each}]}).choices[0] for each in (LEGACY, CONTENT)
    )
    assert legacy == content
    assert legacy.tokens == (" a", " b")
    assert legacy.top == ({" a": -0.1, " c": -3.0}, {" b": -0.2})


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a"], "token_logprobs": [None]},
        {"tokens": ["a"], "token_logprobs": [7.0]},
        {"tokens": ["a", "b"], "token_logprobs": [-1.0]},
        {"tokens": "ab", "token_logprobs": "cd"},
        {"content": [{"token": 1, "logprob": -1.0}]},
        {"content": "x"},
        [],
    ],
)
def test_malformed_logprobs_are_none(logprobs):
    choice = parse({"choices": [{"text": "a", "logprobs": logprobs}]}).choices[0]
    assert (choice.text, choice.tokens, choice.top) == ("a", (), ())


@pytest.mark.parametrize(
    "document", [None, 3, [], {}, {"choices": []}, {"choices": {}}, {"choices": [1]}, {"choices": [{"text": 5}]},
                 {"choices": [{"text": "a"}] * 17}],
)  # fmt: skip
def test_what_is_no_completion_is_refused(document):
    with pytest.raises(ValueError):  # noqa: PT011
        parse(document)


def test_a_stream_is_the_same_answer_as_a_whole():
    pieces = Pieces()
    for i in range(2):
        part = {key: values[i : i + 1] for key, values in LEGACY.items()}
        assert pieces.add({"choices": [{"index": 0, "text": LEGACY["tokens"][i], "logprobs": part}]})
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    assert not pieces.add({"choices": [], "usage": usage})
    assert parse(pieces.document()) == parse({"choices": [{"text": " a b", "logprobs": LEGACY}], "usage": usage})


@pytest.mark.parametrize(
    "event", [1, [], {"choices": 3}, {"choices": [{"index": 99, "text": "a"}]}, {"choices": [{"index": 0, "text": []}]},
              {"error": {"message": "no"}}],
)  # fmt: skip
def test_events_that_are_no_pieces_are_refused(event):
    with pytest.raises(ValueError):  # noqa: PT011
        Pieces().add(event)


def test_little_is_kept_of_an_answer_that_is_too_long():
    rows = [
        {"token": "x" * 9999, "logprob": -1.0, "top_logprobs": [{"token": str(i), "logprob": -2.0} for i in range(99)]}
    ]
    choice = parse({"choices": [{"text": "y" * 1_000_000, "logprobs": {"content": rows * 1000}}]}).choices[0]
    assert len(choice.text) == 16_384
    assert len(choice.tokens) == len(choice.top) == 64
    assert {len(token) for token in choice.tokens} == {200}
    assert {len(top) for top in choice.top} == {21}


def choice(*rows):
    """An answer of one token per row: the likeliest of {token: probability}."""
    tokens = tuple(max(row, key=row.get) for row in rows)
    tops = tuple({token: math.log(share) for token, share in row.items()} for row in rows)
    return AnswerChoice("".join(tokens), tokens, tuple(max(top.values()) for top in tops), tops)


def test_two_likely_tokens_that_swap_are_within_noise():
    cold, warm = choice({"a": 0.401, "b": 0.4}, {"x": 1.0}), choice({"b": 0.401, "a": 0.4}, {"y": 1.0})
    found = compare(cold, warm)
    assert not found.is_same
    assert found.position == 0
    assert found.distance == pytest.approx(math.log(0.401 / 0.4))  # what follows other tokens is not compared
    assert not found.exceeds(0.01)


def test_an_unlikely_token_that_comes_out_is_far_away():
    found = compare(choice({"a": 0.9, "b": 0.05}), choice({"b": 0.9, "a": 0.05}))
    assert found.distance == pytest.approx(math.log(0.9 / 0.05))
    assert found.exceeds(1.0)


def test_a_token_that_one_answer_does_not_list_is_at_most_as_likely_as_its_last():
    found = compare(choice({"a": 0.6, "b": 0.3}), choice({"z": 0.6, "a": 0.3}))
    assert found.distance == pytest.approx(math.log(0.6 / 0.3))


def test_equal_tokens_with_other_logprobs_differ():
    found = compare(choice({"a": 0.9, "b": 0.1}), choice({"a": 0.6, "b": 0.4}))
    assert found.is_same
    assert found.exceeds(0.2)


def test_the_next_turn_is_compared_after_the_tokens_it_was_given():
    cold = choice({"a": 1.0}, {"b": 1.0}, {"c": 0.8, "d": 0.2})
    assert compare(cold, choice({"b": 1.0}, {"c": 0.8, "d": 0.2}), skip=1) == AnswerDifference(0.0, True)
    assert compare(cold, choice({"c": 0.2, "d": 0.8}), skip=2).exceeds(1.0)


def test_texts_are_compared_where_there_are_no_logprobs():
    assert compare(AnswerChoice("abc"), AnswerChoice("abc")) == AnswerDifference(None, True)
    assert compare(AnswerChoice("abc"), AnswerChoice("abd")) == AnswerDifference(None, False, 2)
    assert compare(AnswerChoice("abc"), AnswerChoice("ab")) == AnswerDifference(None, False, 2)


def differences(*distances):
    return [AnswerDifference(distance, True) for distance in distances]


def test_the_tolerance_covers_the_noise_of_equal_requests_and_of_other_shapes():
    assert measure_noise(differences(0.02, 0.04), []).tolerance == pytest.approx(0.1)
    assert measure_noise(differences(0.0, 0.0), differences(0.01, 0.01, 5.0)).tolerance == pytest.approx(0.08)
    assert measure_noise(differences(0.0), []).tolerance == 0.02


def test_a_cache_that_is_always_wrong_does_not_pass_for_noise():
    noise = measure_noise(differences(0.0, 0.0), differences(3.0, 3.1, 2.9))
    assert noise.tolerance == pytest.approx(0.2)
    assert AnswerDifference(2.9, True).exceeds(noise.tolerance)


def test_a_server_that_answers_anything_is_too_noisy_to_judge():
    assert measure_noise(differences(2.0, 0.0), []).is_too_large
    assert measure_noise([AnswerDifference(None, False), AnswerDifference(None, True)], []).is_too_large


def test_noise_explains_one_different_text_of_many_but_not_ten():
    noise = measure_noise([AnswerDifference(None, True)] * 18, [])
    assert noise.chance(1, 24) > 0.1
    assert noise.chance(10, 24) < 1e-6
    assert noise.chance(0, 24) == pytest.approx(1.0)


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
