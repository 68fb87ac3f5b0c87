"""`plan` of a long file: bounded work after it has been read."""

import json

import pytest
from cli_harness import pagedcli

from pagedcli.simulation.requests import Request, work_of


def write_rows(path, num_rows, **fields):
    rows = ({"prompt": f"row {n}: and a fox", "max_tokens": 4, "ignore_eos": True, **fields} for n in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_trials_for_a_long_file_use_a_sample(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr("pagedcli.cli.plan.MOST_IN_FULL", 6000)
    monkeypatch.setattr("pagedcli.cli.plan.SAMPLED", 2000)
    from pagedcli.answers import cures

    real = cures.cures

    def watched(subject, **given):
        tried.append((len(subject.workload.requests), subject.left_out))
        return real(subject, **given)

    monkeypatch.setattr("pagedcli.cli.cures.cures", watched)
    found = json.loads(
        pagedcli("plan", write_rows(tmp_path / "in.jsonl", 800), "--no-calibrate", "--format", "json").stdout
    )
    [(num_requests, left_out)] = tried
    assert num_requests < 200 < found["forecast"]["requests"] == 800
    each = work_of(Request("0", None, found["num_prompt_tokens"] // 800, 4))
    assert num_requests * each + left_out == pytest.approx(800 * each, rel=0.1)


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
