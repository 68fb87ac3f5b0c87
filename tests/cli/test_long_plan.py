"""`plan` of a long file: bounded work after it has been read."""

import json

import pytest
from cli_harness import pagedcli


def write_rows(path, num_rows, **fields):
    rows = ({"prompt": f"row {n}: and a fox", "max_tokens": 4, "ignore_eos": True, **fields} for n in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_outputs_that_are_expected_count_for_the_rows_that_are_not_simulated_too(tmp_path, monkeypatch):
    """Rows may generate 200 tokens and are expected to generate two: time is that of two for all of them."""
    monkeypatch.setattr("pagedcli.cli.plan.MOST_SIMULATED", 100)
    path = write_rows(tmp_path / "in.jsonl", 600, max_tokens=200)
    found = json.loads(pagedcli("plan", path, "--expected-output", "2", "--no-calibrate", "--format", "json").stdout)[
        "forecast"
    ]
    assert found["simulated_share"] < 0.2
    assert found["requests"] == pytest.approx(600, abs=30)
    assert found["generated_tokens"] == pytest.approx(1200, abs=60)
