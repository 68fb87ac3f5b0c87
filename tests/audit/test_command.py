"""`pagedcli audit` as a person uses it: verdicts, exit codes, files, limits, and what is never printed."""

import json
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


@pytest.fixture(scope="module")
def correct():
    with serving(Settings(noise=0.0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def wrong():
    with serving(Settings(fault="full-hit")) as server:
        yield server.url


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
