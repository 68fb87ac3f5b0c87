"""What a person reads while a run goes on, and that nothing steers the terminal."""

import io
import re
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from cli_harness import Terminal, pagedcli

from pagedcli.batch.stats import BatchStats
from pagedcli.cli.run_flags import is_prompt
from pagedcli.cli.session import TerminalTexts, parse_shard
from pagedcli.core.facts import RunFacts
from pagedcli.errors import UsageError
from pagedcli.printable import byte_text
from pagedcli.show import progress
from pagedcli.show.terminal import TerminalJson, printable, say_wrapped

ROOT = Path(__file__).resolve().parents[2]


def some_stats():
    facts = RunFacts(
        num_prompt_tokens=5000, num_cached_tokens=1250, num_computed_tokens=12_750, num_generated_tokens=9000,
        num_preemptions=7, num_used_blocks=30, num_blocks=40,
    )  # fmt: skip
    rows = {"num_rows": 1000, "num_done": 300, "num_failed": 2, "num_resumed": 100, "num_resumed_failed": 1}
    return BatchStats(**rows, facts=facts, elapsed_s=30.0)


def test_rows_and_time_left_count_what_the_journal_had():
    assert progress.rows_text(some_stats()) == "400/1,000 rows, 3 failed"
    assert progress.average_pace(some_stats()) == 60.0, "600 rows at 10 rows/s"
    assert progress.average_pace(BatchStats(num_rows=10)) is None
    assert progress.rows_text(BatchStats(num_done=5)) == "5 rows", "the number of lines of stdin is not known"


@contextmanager
def terminal(monkeypatch, columns):
    """What is shown on a terminal, without the moves of its cursor."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stderr(Terminal()) as screen:
        yield lambda: re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_live_display_fits_80_columns(clock, monkeypatch):
    with terminal(monkeypatch, 80) as shown, progress.progress_view(quiet_terminal=False) as view:
        clock[0] = 10.0
        view.update(some_stats())
        lines = [line for line in shown().splitlines() if line.strip()]
    assert len(lines) == 2
    assert lines[0].startswith("400/1,000 rows, 3 failed")
    assert lines[0].rstrip().endswith("60 s left")
    for part in ("tok/s", "KV 75 %", "hits 25 %", "preempted 7"):
        assert part in lines[1]
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_log_gets_a_plain_line_now_and_then(clock, capsys):
    with progress.progress_view(quiet_terminal=False) as view:
        for clock[0] in range(12):
            view.update(some_stats())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, "at 5 and at 10 seconds"
    assert lines[0].startswith("400/1,000 rows, 3 failed, prompt 1,000 tok/s, generated 1,800 tok/s, KV 75 %")
    assert lines[0].endswith("60 s left")


def test_continuations_that_are_computed_move_the_speed_of_prompts(clock, capsys):
    stats = BatchStats(facts=RunFacts(num_prompt_tokens=100, num_cached_tokens=40, num_blocks=1))
    with progress.progress_view(quiet_terminal=False) as view:
        for clock[0] in range(1, 6):
            stats.facts.num_computed_tokens = 60 + 50 * clock[0]
            view.update(stats)
    assert "prompt 70 tok/s" in capsys.readouterr().err, "100 once, and 50 tokens of continuations each second"


LINE = "  waiting      mean 64.3 ms a sequence, 1.54 s in all: 52.3 % token budget, 47.7 % free blocks of the pool"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_lines_of_the_summary_break_between_words(monkeypatch, columns):
    with terminal(monkeypatch, columns) as shown:
        say_wrapped(LINE, indent=15)
    lines = shown().splitlines()
    assert all(len(line) <= columns for line in lines)
    assert shown().split() == LINE.split(), "no word is broken"
    assert all(line.startswith(" " * 15) for line in lines[1:])
    assert lines[0].startswith("  waiting      mean 64.3 ms")


def test_a_pipe_gets_each_line_whole(capsys):
    say_wrapped(LINE, indent=15)
    assert capsys.readouterr().err == LINE + "\n"


def test_a_page_explains_every_label_of_the_summary(tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "The fox", "max_tokens": 40}\n' * 6)
    flags = ("-o", tmp_path / "out.jsonl", "--num-kvcache-blocks", 8, "--max-num-seqs", 4, "--all")
    said = pagedcli("generate", prompts, *flags).stderr.split("none failed")[1]
    labels = {label.split("  ")[0].strip() for label in re.findall(r"^  (\S.{10}\S?) +\S", said, re.MULTILINE)}
    assert {"TTFT", "TPOT", "prefixes", "waste"} <= labels
    shown = (ROOT / "docs" / "look-inside.md").read_text(encoding="utf-8")
    assert {label for label in labels if label not in shown} == set()


def test_control_characters_are_shown_as_escapes():
    assert printable("a\x1b[2Jb\x9bc\u202ed\te\nf") == "a\\x1b[2Jb\\x9bc\\u202ed\te\nf"
    out = io.BytesIO()
    TerminalJson(out).write('{"text": "\x7f\x9b2J\u202e caf\u00e9"}\n'.encode())
    assert out.getvalue().decode() == '{"text": "\\u007f\\u009b2J\\u202e caf\u00e9"}\n'


def test_a_prompt_on_the_command_line_is_a_text_with_spaces_that_names_no_file():
    prompts = ("Once upon a time", "It is 3.5 metres long.", "a\nb", "why? " * 999)
    assert all(map(is_prompt, prompts))
    assert not any(
        map(is_prompt, ("Once", "my prompts.jsonl", "my prompts.CSV", "a folder/in it", "a b.jsonl.gz", "-"))
    )
    out = io.BytesIO()
    TerminalTexts(out, "story").write(
        b'{"id":null,"outputs":[{"story":"a\\u001bb","finish_reason":"stop"},{"story":"c","finish_reason":"stop"}],"error":null}'
    )
    assert out.getvalue() == b"a\\x1bb\nc\n"


def test_shards_are_counted_from_one():
    assert parse_shard("1/1") == (0, 1)
    assert parse_shard("3/4") == (2, 4)
    for wrong in ("0/4", "5/4", "1", "a/b", "-1/2", "1/2/3"):
        with pytest.raises(UsageError, match="--shard"):
            parse_shard(wrong)


def test_bytes_in_words():
    assert [byte_text(n) for n in (5, 2048, 3 * 2**20, 5 * 2**30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]
    assert byte_text(5 * 2**18) == "1.3 MiB"  # half a digit rounds up, as in the browser: not 1.2 here and 1.3 there
