"""`pagedcli plan`: hit rates that others measured, the law of shared prefixes, bad rows, and what a run would do."""

import json
import random

import pytest
from cli_harness import pagedcli
from conftest import shared_data
from harness.core import make_seq, prefill

from pagedcli.core.block_manager import BlockManager
from pagedcli.planning.prompt_survey import PrefixRows, PromptSurvey

QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def plan(*arguments, stdin=None, expect=0):
    return pagedcli("plan", *arguments, "--no-calibrate", stdin=stdin, expect=expect)


def as_json(*arguments, **others):
    return json.loads(plan(*arguments, "--format", "json", **others).stdout)


def hit_rates(found):
    return {row["block_size"]: round(100 * row["hit_rate"], 1) for row in found["block_sizes"]}


@pytest.mark.quick("mt_bench_question.jsonl-arguments1-expected1")
@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ("ifeval_input_data.jsonl", (), {8: 31.9, 16: 21.3, 32: 0.3, 64: 0.0, 128: 0.0, 256: 0.0}),
        ("mt_bench_question.jsonl", ("--field", "turns"), {8: 24.4, 16: 16.3, 32: 0.0, 64: 0.0, 128: 0.0, 256: 0.0}),
    ],
)
def test_the_measured_hit_rates_of_known_prompt_sets(file, arguments, expected):
    tokenizer = shared_data("qwen2_tokenizer")
    template = ("--tokenizer", tokenizer, "--chat-template", tokenizer / "chat_template.jinja")
    prompts = shared_data("prompts") / file
    found = as_json(prompts, *arguments, *template, "--system-prompt", QWEN25_SYSTEM)
    assert hit_rates(found) == expected
    assert found["longest_shared_prefix_tokens"] >= 24
    assert "num_kvcache_blocks" not in found  # no config.json, so no machine to judge


# ---------------------------------------------------------------------- the fold


def test_the_last_token_of_an_equal_prompt_is_not_a_hit():
    found = PromptSurvey()
    for i in range(3):
        found.add(i, list(range(64)), 0)
    assert found.num_repeated == 2
    assert {row["block_size"]: row["hit_tokens"] for row in found.block_size_rows()} == {
        8: 126, 16: 126, 32: 126, 64: 126, 128: 0, 256: 0,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_hits_are_those_of_a_block_manager_with_blocks_enough(seed):
    rng = random.Random(seed)
    prompts = []
    for _ in range(60):  # prompts that grow out of earlier ones
        base = rng.choice(prompts)[0] if prompts and rng.random() < 0.7 else []
        token_ids = base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        prompts.append((token_ids, rng.choice([None, None, "salt"])))
    found = PromptSurvey()
    for i, (token_ids, salt) in enumerate(prompts):
        found.add(i, token_ids, 0, cache_salt=salt)
    for row in found.block_size_rows():
        size = row["block_size"]
        manager, hits = BlockManager(sum(-(-len(token_ids) // size) for token_ids, _ in prompts), size), 0
        for token_ids, salt in prompts:
            hits += prefill(manager, make_seq(token_ids, cache_salt=salt))
        assert row["hit_tokens"] == hits
        assert row["num_blocks"] == manager.num_blocks - manager.num_free_blocks


def test_shared_prefixes_name_their_rows_and_leave_out_parts_of_longer_ones():
    system, first, second = list(range(24)), [7] * 16, [8] * 16
    found = PromptSurvey()
    for line, tail in enumerate([first, second, first, first, second], 1):
        found.add(line, [*system, *tail, line], 0)
    rows = [(len(each.token_ids), each.num_prompts, each.rows) for each in found.shared_prompts()]
    assert rows == [(24, 5, [1, 2, 3, 4]), (40, 3, [1, 3, 4]), (40, 2, [2, 5])]
    assert found.common_prefix_tokens() == 40
    assert found.common_prefix_tokens(0.9) == 24


@pytest.mark.parametrize("seed", range(5))
def test_the_prompts_of_a_shared_prefix_are_the_first_that_begin_with_it(seed):
    rng = random.Random(seed)
    prompts = []
    for _ in range(60):
        base = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        prompts.append(base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(1, 40))])
    found = PromptSurvey()
    for line, token_ids in enumerate(prompts, 1):
        found.add(line, token_ids, 0)
    named = found.shared_prompts()
    assert len(named) == 5
    for shared in named:
        size = len(shared.token_ids)
        lines = [line for line, token_ids in enumerate(prompts, 1) if token_ids[:size] == shared.token_ids]
        assert (shared.num_prompts, shared.rows) == (len(lines), lines[:4])


def test_the_index_finds_the_same_before_and_after_merging():
    """It is merged after 65,536 digests, twice here."""
    index, of_rows = PrefixRows(), [range(40_000 * row, 40_000 * row + 40_000) for row in range(5)]
    for row, digests in enumerate(of_rows):
        assert index.num_known(digests) == 0
        index.add(digests, row)
    assert len(index) == 200_000
    for row, digests in enumerate(of_rows):
        assert index.num_known([*digests, 10**9]) == 40_000
        assert {index.first_row(digest) for digest in digests} == {row}


def test_waste_and_blocks_by_hand():
    found = PromptSurvey()
    for line in range(4):
        found.add(line, [line] * 20, 11)  # 30 tokens in the cache: two blocks of 16, two slots unfilled
    row = next(row for row in found.block_size_rows() if row["block_size"] == 16)
    assert (row["waste"], row["num_blocks"]) == (2 / 32, 8)


def test_samples_of_a_prompt_share_its_full_blocks_and_need_their_own_for_the_rest():
    found = PromptSurvey()
    found.add(0, list(range(40)), 20, num_seqs=3)  # at 16: 2 full blocks of the prompt, 2 for each sample
    found.add(1, list(range(100, 110)), 7)  # 1 block
    row = next(row for row in found.block_size_rows() if row["block_size"] == 16)
    assert row["num_blocks"] == 2 + 3 * 2 + 1
    assert row["waste"] == pytest.approx(1 - (32 + 3 * 27 + 16) / (9 * 16))
    assert found.output_tokens == 67


# ---------------------------------------------------------------------- the command


def test_what_cannot_be_used_is_told_with_the_reason(no_compiler):
    told = plan("-", "--max-tokens", "4", stdin='{"prompt": "Once"}\n').stderr
    assert f"not used: cpu: {no_compiler}" in told
