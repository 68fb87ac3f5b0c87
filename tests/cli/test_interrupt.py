"""Ctrl-C: during a start one word and exit code 130, never a traceback; later, screens and files are put in order."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest
from cli_harness import pagedcli
from harness.core import simulated, write

# Ctrl-C arrives when a module is about to be imported
PROGRAM = """
import os, signal, sys
module, prompts, out = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from pagedcli.__main__ import run
sys.argv[1:] = ["generate", prompts, "-o", out]
run()
"""


@pytest.mark.quick("typer", "pagedcli.cli.generate")
@pytest.mark.parametrize("module", ["typer", "pagedcli.cli.generate", "transformers", "torch", "torch.nn"])
def test_an_early_interrupt_prints_no_traceback(tmp_path, module):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    command = [sys.executable, "-c", PROGRAM, module, str(prompts), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.endswith("interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# Ctrl-C arrives while a page, an export or a summary is half written
HALF_WRITTEN = """
import os, signal, sys
from pathlib import Path
from pagedcli import process
from pagedcli.files import whole_file
process.end_on_interrupt()
with whole_file(Path(sys.argv[1]), overwrite=False) as file:
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_leaves_no_half_written_file(tmp_path):
    command = [sys.executable, "-c", HALF_WRITTEN, str(tmp_path / "page.html")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in result.stderr
    assert list(tmp_path.iterdir()) == []


def interrupted_on_a_terminal(*arguments):
    """The exit code and the output of a command that gets Ctrl-C while its screen is shown."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "pagedcli", *map(str, arguments)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        shown = b""
        while b"quit" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        os.set_blocking(ours, False)
        while process.poll() is None:
            with suppress(BlockingIOError):
                shown += os.read(ours, 65536)
            time.sleep(0.01)
    assert termios.tcgetattr(theirs) == before, "echo and line mode are back"
    with suppress(BlockingIOError):
        shown += os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert shown.rfind(b"\x1b[?1049l") > shown.rfind(b"\x1b[?1049h"), "the alternate screen is left"
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l"), "the cursor is shown"
    return process.returncode, shown.decode(errors="replace")


@pytest.mark.long
def test_an_interrupt_in_replay_restores_the_terminal(tmp_path):
    code, shown = interrupted_on_a_terminal("trace", write(tmp_path / "run.jsonl", simulated()))
    assert code == 130
    assert "interrupted" in shown


def test_an_interrupt_ends_attach_with_its_summary_and_a_whole_recording(tmp_path):
    recording = tmp_path / "events.jsonl.zst"
    code, shown = interrupted_on_a_terminal("attach", "tcp://127.0.0.1:9", "--record", recording)
    assert code == 0
    assert "blocks stored" in shown
    assert "cut off" not in pagedcli("trace", recording).stderr


@pytest.mark.long
def test_an_interrupt_ends_trace_after_its_step_and_keeps_its_rows(tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "The fox", "max_tokens": 1}\n{"prompt": "Once upon a time", "max_tokens": 9}\n')
    code, shown = interrupted_on_a_terminal("trace", prompts, "-o", out, "--num-kvcache-blocks", 64, "--paused")
    assert code == 130
    assert "continue with:" in shown
    assert "1 sequence unfinished" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
