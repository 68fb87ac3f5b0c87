"""The first answer of `plan` for a long file, from a sample of it."""

import json
import random
import re

import pytest
from cli_harness import pagedcli

from pagedcli.answers.survey import first_answer
from pagedcli.cli import plan


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
def test_the_sample_has_the_whole_file_in_its_intervals(long_file, monkeypatch):
    answers = []
    monkeypatch.setattr(plan, "first_answer", lambda *given: answers.append(first_answer(*given)) or answers[-1])
    whole = json.loads(pagedcli("plan", long_file, "--no-calibrate", "--format", "json", expect=3).stdout)
    [found] = answers
    assert 1000 < found.scan.num_rows < 4000
    for about, value in ((found.rows, whole["num_rows"]), (found.prompt_tokens, whole["num_prompt_tokens"])):
        assert about.low <= value <= about.high
        assert about.high < 1.25 * about.low
    assert 0.1 < found.run.hit_rate <= whole["forecast"]["hit_rate"] + 0.01
    bad = found.scan.num_bad / found.scan.num_rows
    assert bad == pytest.approx(whole["num_bad_rows"] / whole["num_rows"], rel=0.6)


@pytest.mark.long
def test_the_first_answer_goes_to_stderr_before_the_file_is_read_and_the_rest_is_exact(long_file):
    shown = pagedcli("plan", long_file, "--no-calibrate", "--format", "json", expect=3)
    first = shown.stderr.splitlines()[0]
    assert re.match(r"(|.* here: )about 1[12],\d00 rows, .* prompt tokens, at least .* % of the rows bad, from ", first)
    assert first.endswith(" rows spread over the file; reading all rows")
    assert shown.stderr.count("spread over the file") == 1
    assert "estimate from" not in shown.stderr
    assert json.loads(shown.stdout)["num_rows"] == 12_000
