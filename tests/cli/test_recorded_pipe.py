"""A recorded run through a pipe, or on stdin, is the same as its file."""

import os
import signal
import subprocess
import sys
import time

import pytest
from cli_harness import PROMPTS, pagedcli
from harness.core import simulated, write

from pagedcli.kvevents.capture import CaptureWriter


def shell(command):
    command = command.replace("pagedcli", f"{sys.executable} -m pagedcli", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(("name", "on_stdin", "in_a_pipe"), [("run.jsonl", "trace", "explain"),
                                                             ("run.jsonl.zst", "explain", "trace")])  # fmt: skip
def test_a_run_through_a_pipe_reads_as_its_file(tmp_path, name, on_stdin, in_a_pipe):
    path = write(tmp_path / name, simulated())
    for command, given in ((on_stdin, f"- --format json < {path}"), (in_a_pipe, f"<(cat {path}) --format json")):
        expected = pagedcli(command, path, "--format", "json")
        assert shell(f"pagedcli {command} {given}") == (0, expected.stdout, expected.stderr)


def test_kv_events_through_a_pipe_are_no_prompts(tmp_path):
    path = tmp_path / "events.jsonl"
    CaptureWriter(path, ["tcp://127.0.0.1:5557"], tokens=False).close()
    assert shell(f"pagedcli trace - < {path}") == (0, "", "")


def test_prompts_through_a_pipe_are_generated_from_or_refused_as_a_run(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    code, _, err = shell(f"pagedcli trace <(cat {prompts}) --max-tokens 2")
    assert (code, "3 rows in " in err) == (0, True)
    said = pagedcli("trace", "-", "--check", stdin=PROMPTS, expect=1).stderr
    assert "stdin.jsonl:1: not a trace, but a file of prompts" in said


def test_damage_in_a_pipe_is_not_hinted_at_by_the_name_of_its_copy(tmp_path):
    path = write(tmp_path / "run.jsonl", simulated())
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in ([*lines[:3], b"no event\n", *lines[3:]], [b'{"event":"engine_started"}\n']):
        path.write_bytes(b"".join(damaged))
        code, _, err = shell(f"pagedcli explain - < {path}")
        assert code == 1
        assert "pagedcli-" not in err.partition("hint:")[2]


def test_two_runs_are_not_read_from_one_pipe(tmp_path):
    path = write(tmp_path / "run.jsonl", simulated())
    said = "error: standard input can be read only once\nhint: pass one of the two as a file\n"
    assert shell(f"pagedcli diff - - < {path}") == (2, "", said)


def test_an_interrupt_leaves_no_copy_of_the_run(tmp_path):
    trace = write(tmp_path / "run.jsonl", simulated())
    copies = tmp_path / "tmp"
    copies.mkdir()
    command = [sys.executable, "-m", "pagedcli", "explain", "-"]
    environment = os.environ | {"TMPDIR": str(copies)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        child.stdin.write(trace.read_bytes())
        child.stdin.flush()  # its end is still to come
        end_s = time.monotonic() + 60
        while not any(copies.rglob("stdin.jsonl")):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    assert list(copies.iterdir()) == []
