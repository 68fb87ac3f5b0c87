"""Prompts of repetitive text: no command that analyses ends in a crash, and a finding that fails costs a line."""

import random

import pytest
from cli_harness import pagedcli, write_rows

from pagedcli.answers.divergence import Finder
from pagedcli.planning.differences import between

FAST = ("--max-tokens", "2", "--num-kvcache-blocks", "256")
MARKS = ("<|im_start|>user\n", "<|im_end|>\n", "<|endoftext|>", "[INST] ", "<s>")
SAID = "could not be determined"


def _piece(draw):
    """A repetitive text: one letter, a table, its rule, code, a log, marks of templates or numbered headings."""
    repeated = draw.choice([
        draw.choice("ab- \n=#*|0é"),
        "| " + " | ".join(draw.choice(["a", "b", "12", "x y"]) for _ in range(draw.randint(2, 5))) + " |\n",
        "|" + "---|" * draw.randint(1, 6) + "\n",
        "    for i in range(10):\n        x += 1\n",
        f"2026-01-01 12:00:{draw.randint(10, 12)} INFO {draw.choice(['ok', 'failed'])}\n",
        draw.choice(MARKS),
        draw.choice(["Document 1: ", "# Heading\n\n", '{"id": 1}, ']),
    ])  # fmt: skip
    return repeated * draw.randint(1, 1 + 200 // len(repeated))


def repetitive_file(path, seed):
    """A file of random repetitive prompts that share pieces."""
    draw = random.Random(seed)
    pieces = [_piece(draw) for _ in range(draw.randint(1, 4))]
    prompts = ["".join(draw.choices(pieces, k=draw.randint(1, 4))) for _ in range(draw.randint(3, 9))]
    return write_rows(path, [{"prompt": prompt} for prompt in prompts])


def _analysed(tmp_path, seed):
    """Run every command that analyses on such a file and its output, and return what they printed."""
    path, other = (repetitive_file(tmp_path / f"{name}.jsonl", f"{seed} {name}") for name in ("a", "b"))
    trace = tmp_path / "run.jsonl"
    draw = random.Random(seed)
    some = draw.choice([(), ("--block-size", "8"), ("--max-num-seqs", "2")])
    runs = [
        pagedcli("generate", path, "-o", tmp_path / "out.jsonl", "--record", trace, "--record-tokens", *FAST, *some),
        pagedcli("trace", path, "--dump-kv", *FAST, *some),
        pagedcli("plan", path, "--no-calibrate", *some),
        pagedcli("simulate", path, "--pool", draw.choice(["25%,100%", "64"]), *some),
        pagedcli("simulate", trace),
        pagedcli("explain", trace),
        pagedcli("trace", trace, "--check"),
        pagedcli("explain", trace, "-o", tmp_path / "page.html"),
        pagedcli("diff", path, other),
    ]
    return [part for run in runs for part in (run.stdout, run.stderr)]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 200))])
def test_commands_analyse_repetitive_prompts(tmp_path, seed):
    assert not any(SAID in text for text in _analysed(tmp_path, f"few {seed}"))


def test_a_run_of_one_letter_that_reaches_past_what_both_texts_begin_with_ends_where_they_do():
    for text, other in (("a" * 200, "a" * 200 + "\n" + "a" * 50), ("a" * 9, "a" * 9), ("|---" * 9, "|---" * 5)):
        for end in range(0, len(text), 3):
            for other_end in range(0, len(other), 3):
                for mine in between(text, end, other, other_end, has_words=True):
                    assert mine.start <= mine.end <= len(mine.text)


def test_a_finding_that_fails_costs_a_line(tmp_path, monkeypatch):
    def fails(*_args, **_options):
        raise IndexError("no such place")

    monkeypatch.setattr(Finder, "find", fails)
    for text in _analysed(tmp_path, "failing")[1:4:2]:
        assert text.count(SAID) == 1
        assert "what to change could not be determined: IndexError: no such place" in text
