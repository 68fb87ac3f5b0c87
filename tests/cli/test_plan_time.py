"""`plan` says how long a file takes: a calibration once, then the counts of the run; first from a sample."""

import json
import random
import re

import pytest
from cli_harness import pagedcli, write_rows

from pagedcli.bench.spread import Busy, BusyWatch


@pytest.fixture
def many(tmp_path):
    """Rows that generate exactly max_tokens."""
    story = "Once upon a time there was a fox"
    rows = [{"prompt": f"{story} {'and ' * (i % 7)}{i % 5}", "max_tokens": 8 + i % 20, "ignore_eos": True,
             "temperature": 0} for i in range(30)]  # fmt: skip
    return write_rows(tmp_path / "many.jsonl", rows)


@pytest.fixture
def others_take(monkeypatch):
    """Lets other work take a share of the processor time from now on."""
    return lambda share: monkeypatch.setattr(BusyWatch, "read", lambda _: Busy(share, steal=0.0))


def forecast_of(path, *flags, expect=0):
    return json.loads(pagedcli("plan", path, "--format", "json", *flags, expect=expect).stdout)["forecast"]


@pytest.mark.long
@pytest.mark.usefixtures("step_times")
def test_the_first_plan_calibrates_and_the_next_one_does_not(many, others_take):
    others_take(0.0)
    first, second = (pagedcli("plan", many, "--all") for _ in range(2))
    assert re.search("calibrating: loads builtin .* s; once for machine and model\n", first.stderr)
    assert "calibrating" not in second.stderr
    assert re.search(r"^time +(under [\d.]+ s|[\d.]+ s \([\d.]+ m?s to [\d.]+ s\))$", second.stdout, re.M)
    assert re.search(r"^generated tokens +[\d.]+ m?s +[\d.]+ %$", second.stdout, re.M)
    assert "measured on this machine" in second.stdout
    row = write_rows(many.with_name("long.jsonl"), [{"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}])
    late, in_time = (pagedcli("plan", row, "--max-time", most).stdout for most in ("0.02s", "1d"))
    assert re.search(r"^--max-time ends the run after 20 ms, before its last row\.$", late, re.M)
    assert "max-time" not in in_time


@pytest.mark.slow
def test_a_calibration_that_cannot_be_kept_is_not_said_to_be_the_only_one(many, step_times):
    step_times.touch()
    error = pagedcli("plan", many).stderr
    assert f"; each time, as {step_times} cannot be written: File exists (set XDG_CACHE_HOME)\n" in error
    assert "once for machine and model" not in error


@pytest.mark.slow
@pytest.mark.usefixtures("step_times")
def test_a_calibration_among_much_other_work_says_so_and_is_not_kept(many, others_take, monkeypatch):
    monkeypatch.setattr("pagedcli.bench.calibration.MOST_TAKEN", 0.2)
    outputs = []
    for others in (0.4, 0.1, 0.4):
        others_take(others)
        outputs.append(pagedcli("plan", many, "--all"))
    assert ["calibrating" in output.stderr for output in outputs] == [True, True, False]
    warns = ["while other work took 40.0 % of it" in " ".join(out.stdout.split()) for out in outputs]
    assert warns == [True, False, False]


@pytest.mark.long
def test_lengths_are_expected_or_those_of_a_finished_run(many, tmp_path):
    out = tmp_path / "out.jsonl"
    pagedcli("generate", many, "-o", out, "--limit", "30")
    generated = sum(json.loads(line)["usage"]["completion_tokens"] for line in out.read_text().splitlines())
    assert forecast_of(many, "--outputs", out)["generated_tokens"] == generated
    assert forecast_of(many, "--expected-output", "5")["generated_tokens"] == 30 * 5
    assert forecast_of(many, "--expected-output", "9999")["generated_tokens"] == generated
    result = pagedcli("plan", many, "--outputs", out, "--expected-output", "5", expect=2)
    assert "--expected-output and --outputs both set the output lengths" in result.stderr


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """12,000 rows, longer towards the end, with two in a hundred bad and a common beginning."""
    rng = random.Random(7)
    lines = []
    for n in range(12_000):
        tokens = [5, 6, 7] * 8 + [rng.randrange(3, 200) for _ in range(rng.randint(4, 8 + n // 400))]
        lines.append(json.dumps({"prompt": [] if n % 50 == 3 else tokens, "max_tokens": rng.choice([2, 9])}))
    return write_rows(tmp_path_factory.mktemp("sample") / "in.jsonl", lines)


@pytest.mark.long
def test_the_first_answer_goes_to_stderr_before_the_file_is_read_and_the_rest_is_exact(long_file):
    shown = pagedcli("plan", long_file, "--no-calibrate", "--format", "json", expect=3)
    first = shown.stderr.splitlines()[0]
    assert re.match(r"(|.* here: )about 1[12],\d00 rows, .* prompt tokens, at least .* % of the rows bad, from ", first)
    assert first.endswith(" rows spread over the file; reading all rows")
    assert shown.stderr.count("spread over the file") == 1
    assert "estimate from" not in shown.stderr
    assert json.loads(shown.stdout)["num_rows"] == 12_000
