"""`plan` of a long file: progress, an estimate from its beginning, and bounded work after it."""

import json

import pytest
from cli_harness import pagedcli

from pagedcli.cli.prompt_scan import ReadingLine
from pagedcli.planning.prompt_survey import PromptSurvey
from pagedcli.simulation.requests import Request, work_of


def write_rows(path, num_rows, **fields):
    rows = ({"prompt": f"row {n}: and a fox", "max_tokens": 4, "ignore_eos": True, **fields} for n in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_long_file_gives_an_estimate_while_it_is_read(tmp_path, monkeypatch):
    """It is due at once; the rows have one length, so that their number is known from the bytes of the first."""
    monkeypatch.setattr("pagedcli.cli.prompt_scan.ESTIMATE_AFTER_S", 0.0)
    path = write_rows(tmp_path / "in.jsonl", 90)
    path.write_text("".join(line for line in path.read_text().splitlines(True)[10:]))
    said = pagedcli("plan", path, "--no-calibrate").stderr
    assert "estimate from the first 1.2 % of the file: about 80 prompts" in said
    assert said.count("estimate from") == 1


def test_the_share_is_that_of_the_bytes_or_of_the_limit_and_unknown_for_a_stream(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", 50)
    for name, limit, expected in ((path, None, 1.0), (path, 200, 1.0), (path, 25, 2.0), ("-", None, None)):
        reading = ReadingLine(str(name), limit, lambda share: None)
        for number, content in enumerate(path.read_bytes().splitlines()):
            reading.observe(type("Line", (), {"content": content, "index": number}))
        assert reading._share == expected


def test_trials_for_a_long_file_use_a_sample(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr("pagedcli.answers.time.MOST_IN_FULL", 6000)
    monkeypatch.setattr("pagedcli.answers.time.SAMPLED", 2000)
    from pagedcli.simulation import advice

    real = advice.advise

    def watched(subject, **given):
        tried.append((len(subject.workload.requests), subject.left_out))
        return real(subject, **given)

    monkeypatch.setattr("pagedcli.simulation.advice.advise", watched)
    found = json.loads(
        pagedcli("plan", write_rows(tmp_path / "in.jsonl", 800), "--no-calibrate", "--format", "json").stdout
    )
    [(num_requests, left_out)] = tried
    assert num_requests < 200 < found["forecast"]["requests"] == 800
    each = work_of(Request("0", None, found["num_prompt_tokens"] // 800, 4))
    assert num_requests * each + left_out == pytest.approx(800 * each, rel=0.1)


def test_the_outputs_that_are_expected_count_for_the_rows_that_are_not_simulated_too(tmp_path, monkeypatch):
    """Rows may generate 200 tokens and are expected to generate two: time is that of two for all of them."""
    monkeypatch.setattr("pagedcli.answers.time.MOST_SIMULATED", 100)
    path = write_rows(tmp_path / "in.jsonl", 600, max_tokens=200)
    found = json.loads(pagedcli("plan", path, "--expected-output", "2", "--no-calibrate", "--format", "json").stdout)[
        "forecast"
    ]
    assert found["simulated_share"] < 0.2
    assert found["requests"] == pytest.approx(600, abs=30)
    assert found["generated_tokens"] == pytest.approx(1200, abs=60)


def test_block_sizes_of_rows_that_share_nothing_are_counted_without_looking_at_each_again():
    survey = PromptSurvey()
    for row in range(40):
        survey.add(row, [1000 + row] * 20, 13)
    [at_16] = [row for row in survey.block_size_rows() if row["block_size"] == 16]
    assert (at_16["num_blocks"], at_16["num_slots"], at_16["hit_tokens"]) == (80, 1280, 0)
    assert at_16["waste"] == 0.0, "20 + 13 tokens, of which the last is never cached, fill two blocks"
