"""A recorded run through a pipe, or on stdin, is the same as its file."""

import subprocess
import sys

import pytest
from cli_harness import PROMPTS
from harness.core import simulated, write

from pagedcli.kvevents.capture import CaptureWriter


def shell(command):
    command = command.replace("pagedcli", f"{sys.executable} -m pagedcli", 1)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.zst"])
def test_a_run_through_a_pipe_reads_as_its_file(tmp_path, name):
    path = write(tmp_path / name, simulated())
    for command in ("pagedcli trace {} --format json", "pagedcli explain {} --format json"):
        expected = shell(command.format(path))
        assert expected[0] == 0
        assert shell(command.format("-") + f" < {path}") == expected
        assert shell(command.format(f"<(cat {path})")) == expected


def test_kv_events_through_a_pipe_are_no_prompts(tmp_path):
    path = tmp_path / "events.jsonl"
    CaptureWriter(path, ["tcp://127.0.0.1:5557"], tokens=False).close()
    assert shell(f"pagedcli trace - < {path}") == (0, "", "")


def test_prompts_through_a_pipe_are_generated_from_or_refused_as_a_run(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    code, _, err = shell(f"pagedcli trace <(cat {prompts}) --max-tokens 2")
    assert (code, "3 rows in " in err) == (0, True)
    code, _, err = shell(f"pagedcli trace - --check < {prompts}")
    assert code == 1
    assert "stdin.jsonl:1: not a trace, but a file of prompts" in err
