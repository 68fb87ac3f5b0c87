"""`plan` and `generate` agree on every row: which are valid, and the reason for each that is not."""

import json
import random

from cli_harness import pagedcli, rows_of

POOL = ("--num-gpu-blocks-override", "8", "--max-model-len", "160", "--max-num-seqs", "4")
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
    return row


def test_plan_and_generate_agree_on_every_row_and_reason(tmp_path):
    rng = random.Random(0)
    prompts = tmp_path / "in.jsonl"
    lines = [json.dumps(random_row(rng)) for _ in range(150)] + ["{broken", '{"prompt": "a", "id": "x"}'] * 2
    prompts.write_text("".join(line + "\n" for line in lines))
    rows = rows_of(pagedcli("generate", prompts, *POOL, expect=3).stdout)
    refused = [row["error"] for row in rows if row["error"] is not None]
    planned = json.loads(pagedcli("plan", prompts, *POOL, "--format", "json", expect=3).stdout)
    bad = [{"code": row["code"], "message": row["message"], "line": row["line"]} for row in planned["bad_rows"]]
    assert bad == refused
    codes = {error["code"] for error in refused}
    assert {"invalid_token_id", "context_length_exceeded", "kv_cache_exceeded", "empty_prompt"} <= codes
    assert planned["num_valid_rows"] == len(rows) - len(refused) > 20
