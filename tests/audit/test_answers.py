"""The dialects of servers, and answers that are none."""

import pytest

from pagedcli.audit.answers import Pieces, parse_answer


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


LEGACY = {
    "tokens": [" a", " b"],
    "token_logprobs": [-0.1, -0.2],
    "top_logprobs": [{" a": -0.1, " c": -3}, {" b": -0.2}],
}
CONTENT = {
    "content": [
        {
            "token": " a",
            "logprob": -0.1,
            "top_logprobs": [{"token": " a", "logprob": -0.1}, {"token": " c", "logprob": -3}],
        },
        {"token": " b", "logprob": -0.2, "top_logprobs": [{"token": " b", "logprob": -0.2}]},
    ]
}


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
