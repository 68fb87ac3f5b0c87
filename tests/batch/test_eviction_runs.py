"""Batch runs under each eviction policy: the same rows, and with next-use fewer prompt tokens computed again."""

import random

import pytest
from batch_harness import Harness
from model_zoo import cached_model

from pagedcli.core.eviction import POLICIES

NUM_ROWS = 60
# rows of five groups in turns, each with a prefix of 10 blocks: LRU loses most prefixes before they are needed again
LINES = [
    {"prompt": [group + 5] * 40 + [random.Random(row).randrange(3, 40) for _ in range(5)], "max_tokens": 6}
    for row in range(NUM_ROWS)
    for group in [row % 5]
]


def run(eviction, **options):
    harness = Harness(eviction=eviction, num_kvcache_blocks=40, max_num_seqs=2)
    _, rows = harness.run(LINES, output_token_ids=True, **options)
    return harness.engine.stats, [row["token_ids"] for row in rows]


@pytest.fixture(scope="module")
def of_policy():
    return {eviction: run(eviction) for eviction in POLICIES}


@pytest.mark.bits
def test_every_policy_gives_the_same_rows(of_policy):
    assert len({str(rows) for _, rows in of_policy.values()}) == 1


def test_next_use_computes_the_fewest_prompt_tokens(of_policy):
    cached = {eviction: stats.num_cached_tokens for eviction, (stats, _) in of_policy.items()}
    assert cached["next-use"] == max(cached.values())
    assert cached["next-use"] > 2 * cached["lru"]


def test_prompts_are_sorted_and_read_ahead_together(of_policy):
    stats, rows = run("next-use", reorder="prefix")
    assert rows == of_policy["next-use"][1]
    assert stats.num_cached_tokens >= of_policy["next-use"][0].num_cached_tokens


@pytest.mark.parametrize(("tokens", "most_rows"), [(0, 8), (20 * 128, 20 + 8), (None, 10 + 8)])
def test_the_read_ahead_bounds_the_queue(tokens, most_rows):
    harness, waiting = Harness(eviction="next-use", num_kvcache_blocks=40, max_num_seqs=4), []
    harness.run(
        LINES, read_ahead=tokens, run={"observe": lambda stats: waiting.append(harness.engine.num_unfinished_requests)}
    )
    assert max(waiting) <= most_rows
    assert max(waiting) >= most_rows - 8


def test_snapshots_are_made_where_prompts_far_apart_in_the_file_branch(tmp_path_factory):
    """Six beginnings of 24 tokens in turns, each twice: a queue of four rows never shows two of one kind. The first two
    rows start before more are read."""
    path = cached_model("qwen3_5", tmp_path_factory)
    lines = [
        {"prompt": [5 + kind] * 24 + [40 + row, 41, 42], "max_tokens": 4} for row in range(12) for kind in [row % 6]
    ]
    cached, rows = {}, {}
    for tokens in (0, None):
        harness = Harness(model=str(path), device="cpu", max_num_seqs=2, num_state_slots=9, max_model_len=64)
        _, found = harness.run(lines, read_ahead=tokens, output_token_ids=True)
        cached[tokens], rows[tokens] = harness.engine.stats.num_cached_tokens, [row["token_ids"] for row in found]
    assert rows[0] == rows[None]
    assert cached == {0: 0, None: 4 * 24}
