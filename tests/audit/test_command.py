"""`pagedcli audit` as a person uses it: verdicts, exit codes, files, limits, and what is never printed."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from cli_harness import pagedcli

from pagedcli.audit.faulty import Settings, serving
from pagedcli.audit.plan import ProbePrompts, Target
from pagedcli.audit.restart import FORMAT, Memory, RememberedPrompt, remembered_asks, save_memory
from pagedcli.audit.survey import WORDS

NOWHERE = "http://127.0.0.1:9/v1"
FEW = ("--checks", "noise,repeat,twins")
CHECKS = (
    "noise",
    "repeat",
    "resume",
    "stream",
    "samples",
    "crowd",
    "twins",
    "moved",
    "salts",
    "users",
    "speed",
    "evict",
)


@pytest.fixture(scope="module")
def correct():
    with serving(Settings(noise=0.0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def wrong():
    with serving(Settings(fault="full-hit")) as server:
        yield server.url


def test_a_correct_server_passes(correct, tmp_path):
    result = pagedcli("audit", correct, *FEW, "--output-dir", tmp_path)
    assert re.search(r"^ok +repeat +warm answers equal cold ones in 48 of 48 pairs", result.stdout, re.MULTILINE)
    assert "prefixes match in units of 16 tokens; the shortest cached prefix has 16" in result.stdout
    assert "The cache tells the truth" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_written_to_a_file_that_can_be_replayed(wrong, correct, tmp_path):
    first = pagedcli("audit", wrong, *FEW, "--output-dir", tmp_path, "-o", tmp_path / "a.html", expect=1)
    assert "do not trust this cache" in first.stderr
    (case,) = tmp_path.glob("audit-*.json")
    assert case.name in first.stdout
    content = json.loads(case.read_text())
    assert (content["check"], content["length"], content["unit"]) == ("repeat", 16, 16)
    assert content["requests"][0]["prompt"] == content["requests"][1]["prompt"]
    assert content["requests"][0]["text"] or content["requests"][1]["text"]

    again = pagedcli("audit", "--replay", case, wrong, expect=1)
    assert "4 of 4 fail" in again.stdout
    assert "0 of 4 fail" in pagedcli("audit", "--replay", case, correct).stdout

    page = (tmp_path / "a.html").read_text()
    assert "do not trust this cache" in page
    assert "in 16 of 48 pairs" in page
    assert "<svg" in page
    assert "<script" not in page
    assert "already exists" in pagedcli("audit", wrong, "-o", tmp_path / "a.html", expect=2).stderr


@pytest.mark.long
def test_a_second_failing_pair_replaces_no_file(wrong, tmp_path):
    for _ in range(2):
        pagedcli("audit", wrong, *FEW, "--output-dir", tmp_path, expect=1)
    assert len(list(tmp_path.glob("audit-*.json"))) == 2


def test_json_has_everything(wrong, tmp_path):
    result = pagedcli("audit", wrong, *FEW, "--output-dir", tmp_path, "--format", "json", expect=1)
    document = json.loads(result.stdout)
    assert document["exit_code"] == 1
    assert document["unit_tokens"] == 16
    assert document["model"] == "toy"
    assert document["interrupted"] is False
    assert len(document["lookups"]) <= document["num_requests"] <= 300
    assert document["files"]
    assert {row["status"] for row in document["verdicts"]} == {"ok", "FAULT"}, document["verdicts"]
    (failing,) = [row for row in document["verdicts"] if row["status"] == "FAULT"]
    differing = [row for row in document["pairs"] if row["differs"]]
    assert failing["num_different"] == len(differing) >= 16  # on a busy machine one more may meet
    assert {row["prompt_tokens"] % 16 for row in differing} == {0}


def test_a_dry_run_prints_the_plan_and_sends_nothing():
    result = pagedcli("audit", NOWHERE, "--dry-run", columns=120)
    for check in CHECKS:
        assert re.search(rf"^{check} +\d+ ", result.stdout, re.MULTILINE)
    assert f"to {NOWHERE} only; at most 300 requests, 200,000 tokens, 290 s" in result.stdout
    rows = json.loads(pagedcli("audit", NOWHERE, "--dry-run", "--format", "json").stdout)["plan"]
    assert sum(row["requests"] for row in rows) <= 300


def test_a_dry_run_has_what_a_restart_needs(tmp_path):
    asks = remembered_asks(ProbePrompts(Target(len(WORDS), unit=16, isolates=True, bypass="salt", concurrency=8), 0))
    remembered = [RememberedPrompt(words=ask.words, text="", tokens=(), logprobs=(), top=()) for ask in asks]
    kept = tmp_path / "kept.json"
    memory = Memory(format=FORMAT, model="", words=WORDS, num_extra=0, tolerance=0.0, prompts=tuple(remembered))
    save_memory(memory, kept, overwrite=False)
    arguments = ("--dry-run", "--remember", tmp_path / "new.json", "--recall", kept, "--format", "json")
    rows = {row["check"]: row for row in json.loads(pagedcli("audit", NOWHERE, *arguments).stdout)["plan"]}
    assert (rows["restart"]["requests"], rows["remember"]["requests"]) == (64, 32)
    assert sum(row["requests"] for row in rows.values()) <= 300
    assert not (tmp_path / "new.json").exists()


def test_a_server_that_is_not_there_is_an_error():
    result = pagedcli("audit", NOWHERE, expect=3)
    assert "no answer from http://127.0.0.1:9/v1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no URL"),
        (["ftp://x"], "not the URL of a server"),
        ([NOWHERE, "--checks", "nonsense"], "there is no check 'nonsense'"),
        ([NOWHERE, "--key-env", "PAGEDCLI_NO_SUCH_KEY"], "PAGEDCLI_NO_SUCH_KEY is not set"),
        ([NOWHERE, "--output-dir", "/no/such/folder"], "there is no folder"),
        ([NOWHERE, "--replay", "/no/such/file"], "cannot read"),
        (["--self-test", "--remember", "a.json"], "--remember has no effect with --self-test"),
        (["--self-test", NOWHERE], "URL has no effect with --self-test"),
        ([NOWHERE, "--replay", "a.json", "--recall", "b.json"], "--recall has no effect with --replay"),
        ([NOWHERE, "--recall", "/"], "cannot read /: Is a directory"),
        ([NOWHERE, "--ca-file", "/no/such/file", "--proxy", "nonsense"], "cannot set up the connection"),
    ],
)
def test_wrong_usage_is_explained(arguments, words):
    assert words in pagedcli("audit", *arguments, expect=2).stderr


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": "other"}', "\xff"])
def test_a_file_that_is_no_case_is_refused(content, tmp_path):
    (tmp_path / "case.json").write_text(content, encoding="latin-1")
    assert "cannot read" in pagedcli("audit", "--replay", tmp_path / "case.json", NOWHERE, expect=2).stderr


def test_a_key_is_used_and_never_printed(correct, monkeypatch, tmp_path):
    monkeypatch.setenv("AUDIT_KEY", "sk-very-secret")
    result = pagedcli("audit", correct, *FEW, "--key-env", "AUDIT_KEY", "-o", tmp_path / "a.html", "--format", "json")
    everything = result.stdout + result.stderr + (tmp_path / "a.html").read_text()
    assert "sk-very-secret" not in everything
    monkeypatch.setenv("AUDIT_KEY", "sk very secret")
    assert "secret" not in pagedcli("audit", correct, "--key-env", "AUDIT_KEY", expect=2).stderr


def test_a_choice_of_models_has_to_be_made(correct):
    assert pagedcli("audit", correct, *FEW, "-m", "toy").exit_code == 0
    assert "there is no model" in pagedcli("audit", correct, *FEW, "-m", "other", expect=3).stderr


@pytest.mark.long
def test_ctrl_c_shows_what_is_known(tmp_path):
    with serving(Settings(seconds_per_token=2e-3)) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "pagedcli", "audit", server.url, "-o", tmp_path / "a.html"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        deadline_s = time.monotonic() + 60
        while server.num_answers < 60 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted: the verdicts cover only what was sent before" in err
    assert "prefixes match in units of 16 tokens" in out
    assert "the audit was stopped before" in out
    assert "Traceback" not in err
    assert "Audit of" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_the_self_test_finds_every_fault():
    result = pagedcli("audit", "--self-test", columns=120)
    assert "All servers were judged rightly" in result.stderr
    assert len(re.findall(r"^[\w-]+ +right ", result.stdout, re.MULTILINE)) == 12
