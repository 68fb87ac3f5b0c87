"""Ctrl-C at any moment of a start ends with one word and exit code 130, never with a traceback."""

import subprocess
import sys

import pytest

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
