"""`plan` and `generate` agree on every row: which are valid, and the reason for each that is not."""

import json
import random

import pytest
from cli_harness import pagedcli, rows_of
from harness.core import Simulation

from pagedcli.planning.prompt_survey import PromptSurvey
from pagedcli.sampling_params import SamplingParams

POOL = ("--num-kvcache-blocks", "8", "--max-model-len", "160", "--max-num-seqs", "4")
IDS = (0, 1, 5, 700, 1023, 1024, -1, 2**31, 2**63 - 1, 2**63)


def random_row(rng):
    """A line that may be wrong in every way that only the model, its length or the pool can tell."""
    row = {"prompt": [5] * rng.choice((0, 1, 30, 100, 159, 160, 161, 190, 300))}
    if rng.random() < 0.2:
        row["prompt"] = [rng.choice(IDS) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        row["prompt"] = rng.choice(("", "Once upon a time", "\u00e9"))
    for name, values in {
        "max_tokens": (1, 2, 60, 159, 160, 200, 0, None),
        "min_tokens": (0, 1, 60, 100, 200, -1),
        "n": (1, 2, 8),
        "logit_bias": ({"5": 1}, {"1024": 1}, {"-1": 1}, {str(2**63): 1}),
        "regex": ("a+", "("),
    }.items():
        if rng.random() < 0.25:
            row[name] = rng.choice(values)
    if rng.random() < 0.1:
        row |= {"prompt": [5] * rng.choice((1, 30, 60)), "beam_width": rng.choice((1, 2, 4, 5, 200, 400))}
    return row


@pytest.mark.long
@pytest.mark.quick("changes1")
@pytest.mark.parametrize(
    "changes", [(), ("--no-enable-prefix-caching", "--max-num-seqs", "250", "--max-num-batched-tokens", "250")]
)
def test_plan_and_generate_agree_on_every_row_and_reason(tmp_path, changes):
    rng = random.Random(0)
    prompts = tmp_path / "in.jsonl"
    lines = [json.dumps(random_row(rng)) for _ in range(180)] + ["{broken", '{"prompt": "a", "id": "x"}'] * 2
    prompts.write_text("".join(line + "\n" for line in lines))
    rows = rows_of(pagedcli("generate", prompts, *POOL, *changes, expect=3).stdout)
    refused = [row["error"] for row in rows if row["error"] is not None]
    planned = json.loads(pagedcli("plan", prompts, *POOL, *changes, "--format", "json", expect=3).stdout)
    bad = [{"code": row["code"], "message": row["message"], "line": row["line"]} for row in planned["bad_rows"]]
    assert bad == refused
    codes = {error["code"] for error in refused}
    assert {"invalid_token_id", "context_length_exceeded", "kv_cache_exceeded", "empty_prompt"} <= codes
    assert any("beam_width is" in error["message"] for error in refused)
    assert planned["num_valid_rows"] == len(rows) - len(refused) > 20


@pytest.mark.long
def test_plan_says_that_random_samples_make_it_near(tmp_path):
    row = {"prompt": list(range(1, 40)), "max_tokens": 8}
    note = "near, not exact"
    for changes, is_near in ({"n": 2, "temperature": 1.0}, True), ({"n": 2, "temperature": 0.0}, False), ({}, False):
        (tmp_path / "in.jsonl").write_text(json.dumps(row | changes) + "\n")
        assert (note in pagedcli("plan", tmp_path / "in.jsonl", "--no-calibrate").stdout) == is_near


def random_request(rng):
    """A prompt and its parameters: plain, several samples, or beams."""
    kind = rng.choice(({}, {}, {"n": 3}, {"beam_width": 3, "n": 2}))
    prompt = [rng.randrange(10, 13) for _ in range(rng.randint(1, 14))]
    return prompt, SamplingParams(max_tokens=rng.randint(1, 12), temperature=0, ignore_eos=True, **kind)


def add_all(sim, requests):
    for prompt, params in requests:
        sim.add(prompt, params=params)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_blocks_that_a_plan_counts_keep_all_rows(num_groups, seed):
    rng = random.Random(seed)
    requests, survey = [random_request(rng) for _ in range(10)], PromptSurvey(num_groups)
    for row, (prompt, params) in enumerate(requests):
        is_beam_search = params.beam_width is not None
        survey.add(row, prompt, params.max_tokens, num_seqs=params.num_sequences, is_beam_search=is_beam_search)
    [num_blocks] = [row["num_blocks"] for row in survey.block_size_rows() if row["block_size"] == 8]
    sim = Simulation(num_blocks, 8, max_model_len=40, windows=(None,) * num_groups)
    add_all(sim, requests)
    sim.run()
    assert sim.stats.num_generated_tokens == survey.output_tokens
    assert (sim.stats.num_preemptions, sim.stats.num_evictions) == (0, 0)


def test_scored_rows_are_counted_alike_by_summary_plan_and_simulate(tmp_path):
    """An only continuation is computed with its context, and others may find it in the cache."""
    rng = random.Random(1)
    endings = [[rng.randrange(9) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    rows = [
        {"prompt": [5] * 16 + rng.choice(endings), "continuations": rng.choices(endings, k=rng.choice((1, 1, 1, 2)))}
        for _ in range(40)
    ]
    prompts, trace, summary = (tmp_path / f"{name}.jsonl" for name in ("in", "run", "summary"))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--block-size", "8", "--max-num-seqs", "2")
    pool = ("--num-kvcache-blocks", "256", "--max-model-len", "2048")
    run = ("--record", trace, "--record-tokens", "--summary-json", summary)
    pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", *flags, *pool, *run)
    done = json.loads(summary.read_text())
    planned = json.loads(pagedcli("plan", prompts, "--no-calibrate", *flags, *pool, "--format", "json").stdout)
    told = [planned["forecast"]["cached_tokens"]]
    (ideal,) = (row["hit_rate"] for row in planned["block_sizes"] if row["block_size"] == 8)
    assert ideal == done["cache"]["ideal_hit_rate"], "no lookup asks for blocks after the context"
    for source in (prompts, trace):
        found = json.loads(pagedcli("simulate", source, "--pool", "256", *flags, "--format", "json").stdout)
        assert found["pools"][0]["num_refused"] == 0
        assert found["num_prompt_tokens"] == done["prompt_tokens"]
        told.append(found["pools"][0]["num_cached_tokens"])
        assert found["ideal_hit_rate"] == done["cache"]["ideal_hit_rate"]
    assert told == [done["cached_tokens"]] * 3
