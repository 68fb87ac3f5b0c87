"""The summary on a terminal: at most six lines, broken between words, and a page that explains every label of --all."""

import re
import sys
from pathlib import Path

import pytest
from cli_harness import FAST, pagedcli
from typer.testing import CliRunner

from pagedcli.cli.main import app
from pagedcli.show import terminal

ROOT = Path(__file__).resolve().parents[2]
LINE = "  waiting      mean 64.3 ms a sequence, 1.54 s in all: 52.3 % token budget, 47.7 % free blocks of the pool"


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_of_the_summary_break_between_words(monkeypatch, columns):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.say_wrapped(LINE, indent=15)
    lines = screen.text.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert screen.text.split() == LINE.split(), "no word is broken"
    assert all(line.startswith(" " * 15) for line in lines[1:])
    assert lines[0].startswith("  waiting      mean 64.3 ms")


def test_a_pipe_gets_each_line_whole(capsys):
    terminal.say_wrapped(LINE, indent=15)
    assert capsys.readouterr().err == LINE + "\n"


def test_a_page_explains_every_label_of_the_summary(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "The fox", "max_tokens": 40}\n' * 6)
    flags = ["-o", str(tmp_path / "out.jsonl"), "--num-kvcache-blocks", "8", "--max-num-seqs", "4", "--all"]
    result = CliRunner().invoke(app, ["generate", str(prompts), *flags], catch_exceptions=False)
    labels = set(re.findall(r"^  (\S.{10}\S?) +\S", result.stderr.split("none failed")[1], re.MULTILINE))
    labels = {label.split("  ")[0].strip() for label in labels}
    assert {"TTFT", "TPOT", "prefixes", "waste"} <= labels
    shown = (ROOT / "docs" / "look-inside.md").read_text(encoding="utf-8")
    assert {label for label in labels if label not in shown} == set()


def test_a_reason_with_a_number_of_thousands_of_digits_is_cut_in_the_summary(tmp_path):
    number = "9" * 4000
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": [{number}]}}\n{{"prompt": "a", "seed": {number}}}\n')
    result = pagedcli("generate", path, *FAST, "--all", expect=3)
    [first, second] = [line for line in result.stderr.splitlines() if "999…" in line]
    assert ("line 1: token id 999" in first, "line 2: seed is 999" in second) == (True, True)
    assert max(map(len, result.stderr.splitlines())) < 400
    assert number in result.stdout
