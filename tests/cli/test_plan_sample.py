"""`plan --sample`, and the first answer of `plan` for a long file."""

import json
import random
import re

import pytest
from cli_harness import pagedcli

from pagedcli.cli import prompt_scan


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """12,000 rows, longer towards the end, with two in a hundred bad and a common beginning."""
    rng = random.Random(7)
    lines = []
    for n in range(12_000):
        tokens = [5, 6, 7] * 8 + [rng.randrange(3, 200) for _ in range(rng.randint(4, 8 + n // 400))]
        lines.append(json.dumps({"prompt": [] if n % 50 == 3 else tokens, "max_tokens": rng.choice([2, 9])}))
    path = tmp_path_factory.mktemp("sample") / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_the_sample_has_the_whole_file_in_its_intervals(long_file):
    sampled = pagedcli("plan", long_file, "--no-calibrate", "--sample", "--format", "json", expect=3)
    found = json.loads(sampled.stdout)["sample"]
    assert 1000 < found["num_sampled_rows"] < 4000
    whole = json.loads(pagedcli("plan", long_file, "--no-calibrate", "--format", "json", expect=3).stdout)
    assert "sample" not in whole
    for name, value in (
        ("rows", whole["num_rows"]),
        ("prompt_tokens", whole["num_prompt_tokens"]),
        ("generated_tokens", whole["num_output_tokens"]),
    ):
        about = found[name]
        assert about["low"] <= value <= about["high"], name
        assert about["high"] < 1.25 * about["low"], name
    assert 0.1 < found["hit_rate_at_least"] <= whole["forecast"]["hit_rate"] + 0.01
    bad = sum(found["sampled_bad_row_codes"].values()) / found["num_sampled_rows"]
    assert bad == pytest.approx(whole["num_bad_rows"] / whole["num_rows"], rel=0.6)


def test_sample_reads_only_the_sample(long_file, monkeypatch):
    seen = []
    real = prompt_scan.PromptSurvey.add
    monkeypatch.setattr(prompt_scan.PromptSurvey, "add", lambda *args, **given: (seen.append(1), real(*args, **given)))
    shown = pagedcli("plan", long_file, "--no-calibrate", "--sample", expect=3)
    assert 1000 < len(seen) < 4000
    assert re.match(r"(About|.* about) 1[12],\d00 rows, .* prompt tokens, ", shown.stdout)
    assert re.search(r"^From [12],\d{3} of about 1[12],\d00 rows$", shown.stdout, re.MULTILINE)
    assert "empty_prompt" not in shown.stdout
    assert "bad row in the sample: the prompt has no tokens" in shown.stdout


def test_the_first_answer_goes_to_stderr_before_the_file_is_read_and_the_rest_is_exact(long_file):
    shown = pagedcli("plan", long_file, "--no-calibrate", "--format", "json", expect=3)
    first = shown.stderr.splitlines()[0]
    assert re.match(
        r"(|.* for )about 1[12],\d00 rows, .* prompt tokens, at least .* 1.8 % of the rows bad; from ", first
    )
    assert first.endswith(" rows spread over the file; reading all of them")
    assert shown.stderr.count("spread over the file") == 1
    assert "estimate from" not in shown.stderr
    assert json.loads(shown.stdout)["num_rows"] == 12_000


def test_expected_output_counts_in_the_sample_too(long_file):
    given = ("plan", long_file, "--no-calibrate", "--sample", "--format", "json")
    found = json.loads(pagedcli(*given, "--expected-output", "1", expect=3).stdout)["sample"]
    assert found["generated_tokens"] == pytest.approx(
        {name: 0.98 * value for name, value in found["rows"].items()}, rel=0.02
    )


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("-", "--sample"), "from all over a JSONL file"),
        (("FILE", "--sample", "--limit", "9"), "nor with --limit"),
        (("FILE", "--sample", "--tune"), "--outputs, --tune and --workers need all"),
        (("FILE", "--sample", "--workers", "2"), "--outputs, --tune and --workers need all"),
    ],
)
def test_what_sample_does_not_go_with(arguments, wanted, long_file):
    given = [long_file if each == "FILE" else each for each in arguments]
    assert wanted in pagedcli("plan", *given, stdin='{"prompt": "x"}\n', expect=2).stderr


def test_a_short_file_is_planned_whole(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "The fox"}\n' * 30)
    shown = pagedcli("plan", path, "--no-calibrate", "--sample", "--all").stdout
    assert "spread over" not in shown
    assert "Ideal hit rate and waste" in shown
