"""`generate --notify CMD`: a command at the end, whatever the end is."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of
from quick import slow_but

BAD = PROMPTS + '{"prompt": ""}\n'


def said_to(path):
    """What the command found in its environment."""
    return dict(line.removeprefix("PAGEDCLI_").split("=", 1) for line in path.read_text().splitlines())


def command_for(path):
    return f"env | grep ^PAGEDCLI_ > '{path}'"


@pytest.mark.parametrize(
    ("lines", "flags", "code", "rows", "failed"),
    [(PROMPTS, (), 0, 3, 0), (BAD, (), 3, 4, 1), (BAD, ("--max-errors", "1"), 1, None, 1), ("", (), 0, 0, 0)],
)
def test_the_command_gets_counts_and_exit_code(lines, flags, code, rows, failed, tmp_path):
    (tmp_path / "in.jsonl").write_text(lines)
    given = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *FAST, *flags)
    pagedcli("generate", *given, "--notify", command_for(tmp_path / "said"), expect=code)
    said = said_to(tmp_path / "said")
    assert (said["EXIT_CODE"], said["FAILED_ROWS"]) == (str(code), str(failed))
    assert (said["INPUT"], said["OUTPUT"]) == (str(given[0]), str(given[2]))
    if rows is not None:
        written = rows_of(tmp_path / "out.jsonl")
        assert said["ROWS"] == str(rows) == str(len(written))
        usage = [row["usage"] for row in written if row["usage"]]
        assert said["PROMPT_TOKENS"] == str(sum(each["prompt_tokens"] for each in usage))
        assert said["GENERATED_TOKENS"] == str(sum(each["completion_tokens"] for each in usage))
    assert 0 <= float(said["SECONDS"]) < 60


def test_a_resumed_run_that_is_complete_counts_the_rows_that_are_there(tmp_path):
    (tmp_path / "in.jsonl").write_text(BAD)
    given = ("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *FAST)
    pagedcli(*given, expect=3)
    pagedcli(*given, "--resume", "--notify", command_for(tmp_path / "said"), expect=3)
    said = said_to(tmp_path / "said")
    assert (said["EXIT_CODE"], said["ROWS"], said["FAILED_ROWS"]) == ("3", "4", "1")


def test_an_error_is_told_on_one_line_and_keeps_its_exit_code(prompts, out, tmp_path):
    out.write_text("somebody's\n")
    result = pagedcli("generate", prompts, "-o", out, *FAST, "--notify", command_for(tmp_path / "said"), expect=2)
    said = said_to(tmp_path / "said")
    assert (said["EXIT_CODE"], said["ROWS"]) == ("2", "0")
    assert said["ERROR"]
    assert f"error: {said['ERROR']}" in result.stderr
    assert out.read_text() == "somebody's\n"


@pytest.mark.parametrize("command", ["exit 7", "kill -9 $$", "no-such-command-at-all"])
def test_a_command_that_fails_is_a_warning(prompts, out, command):
    result = pagedcli("generate", prompts, "-o", out, *FAST, "--notify", command, expect=0)
    assert "warning: --notify: the command ended with exit code" in result.stderr
    assert len(rows_of(out)) == 3


def run_as_a_process(tmp_path, *arguments):
    command = [sys.executable, "-m", "pagedcli", "generate", *map(str, arguments)]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_what_the_command_prints_is_not_among_the_rows(tmp_path):
    (tmp_path / "in.jsonl").write_text(PROMPTS)
    out, err = run_as_a_process(tmp_path, "in.jsonl", *FAST, "--notify", "echo not a row").communicate(timeout=120)
    assert len([json.loads(line) for line in out.splitlines()]) == 3
    assert "not a row" in err


@pytest.mark.long
@pytest.mark.parametrize("number", slow_but((signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)))
def test_an_interrupted_run_notifies_and_can_be_resumed(number, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"Once {n}"}) + "\n" for n in range(4000)))
    said = tmp_path / "said"
    given = ("in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "2", "--notify", command_for(said))
    process = run_as_a_process(tmp_path, *given)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(os.path.getsize(path) > 2000 for path in tmp_path.glob("out.jsonl*")):
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = said_to(said)
    assert found["EXIT_CODE"] == "130"
    assert 0 < int(found["ROWS"]) < 4000
    assert "continue with: " in err
    assert "--notify" in err.split("continue with: ")[1]
