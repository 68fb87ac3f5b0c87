"""--deduplicate: rows that ask for the same are computed once, and the output is the one without the flag."""

import pytest
from harness.engine import Harness, without_run_dependent_fields

from pagedcli.batch.repeats import KnownRows, request_key
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.sampling_params import SamplingParams

LINES = [
    {"prompt": "Once upon a time", "id": 0, "n": 2},
    {"prompt": "Once upon a time", "id": 1, "n": 2, "user": "another one"},
    {"prompt": "The fox", "temperature": 1.0},
    {"prompt": "The fox", "temperature": 1.0},  # draws of its own
    {"prompt": "The fox", "temperature": 1.0, "seed": 7, "n": 2},
    {"prompt": "The fox", "temperature": 1.0, "seed": 7, "n": 2, "logprobs": 1},
    {"prompt": "The fox", "temperature": 1.0, "seed": 7, "n": 2, "logprobs": 1},
    {"prompt": ["a b c", "Hello"], "max_tokens": 3},
    {"max_tokens": 3, "prompt": ["a b c", "Hello"]},
    {"prompt": "Hello", "beam_width": 3, "n": 2},
    {"prompt": "Hello", "beam_width": 3, "n": 2},
    {"prompt": "Hello", "cache_salt": "mine"},
    {"prompt": "Hello"},
    {"prompt": "Hello"},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "Once upon a time " * 1000},
    {"prompt": "Once upon a time " * 1000},
    b"{broken",
    {"custom_id": "c", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}},
    {"custom_id": "d", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}]}},
    {"prompt": "Once upon a time", "id": 21, "n": 2},
]
NUM_EQUAL = 7  # good rows that an earlier one answers


@pytest.fixture(scope="module", params=["much memory", "preemptions"])
def harness(request):
    if request.param == "much memory":
        return Harness()
    return Harness(num_kvcache_blocks=16, max_num_seqs=8)


@pytest.mark.parametrize("reorder", ["none", "prefix"])
def test_the_rows_are_those_without_it_and_fewer_are_computed(harness, reorder):
    generated = harness.engine.stats.num_generated_tokens
    plain = harness.rows(LINES, reorder=reorder)
    plain_generated = harness.engine.stats.num_generated_tokens - generated
    result, rows = harness.run(LINES, reorder=reorder, run={"known": KnownRows(keeps_own=True)})
    assert [without_run_dependent_fields(row) for row in rows] == plain
    assert result.stats.num_deduplicated == NUM_EQUAL
    generated = harness.engine.stats.num_generated_tokens - generated - plain_generated
    assert generated < plain_generated


def test_what_makes_two_rows_equal():
    def key(token_ids, salt=None, **params):
        prompts = [RowPrompt(token_ids, SamplingParams(**params))]
        return request_key(BatchRow(None, prompts=prompts, cache_salt=salt))

    greedy = key([1, 2], temperature=0.0, seed=1)
    assert greedy == key([1, 2], temperature=0.0, seed=2), "greedy rows draw nothing"
    assert greedy != key([1, 2], temperature=0.0, max_tokens=3)
    assert greedy != key([1, 3], temperature=0.0)
    assert greedy != key([1, 2], salt="x", temperature=0.0)
    assert key([1], seed=1) == key([1], seed=1)
    assert key([1], seed=1) != key([1], seed=2)
    assert key([1], seed=1, beam_width=2) == key([1], seed=2, beam_width=2), "beams draw nothing either"
