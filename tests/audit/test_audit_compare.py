"""When two answers differ by more than noise."""

import math

import pytest

from pagedcli.audit.answers import AnswerChoice
from pagedcli.audit.compare import AnswerDifference, compare, measure_noise


def choice(*rows):
    """An answer of one token per row: the likeliest of {token: probability}."""
    tokens = tuple(max(row, key=row.get) for row in rows)
    tops = tuple({token: math.log(share) for token, share in row.items()} for row in rows)
    return AnswerChoice("".join(tokens), tokens, tuple(max(top.values()) for top in tops), tops)


def test_equal_answers_have_no_distance():
    answer = choice({"a": 0.7, "b": 0.2}, {"c": 0.9, "d": 0.1})
    assert compare(answer, answer) == AnswerDifference(0.0, True)


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
