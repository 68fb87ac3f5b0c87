"""Every command begins with where prompts part; `plan` fits on a screen."""

import json
import re

import planted_prompts as planted
from cli_harness import pagedcli

from pagedcli.cli.partings import judged_recording

LIBRARY = planted.words(planted.random.Random(1), 120)


def clock_of(number):
    return f"It is {9 + number % 13}:{10 + number % 50}:{10 + number // 650 % 50}. "


def clock_chats(path, num=60):
    rows = [
        {
            "id": number,
            "messages": [
                {"role": "system", "content": clock_of(number) + LIBRARY},
                {"role": "user", "content": f"Where is book {number}?"},
            ],
            "max_tokens": 4,
        }
        for number in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def as_json(*arguments):
    return json.loads(pagedcli("plan", *arguments, "--no-calibrate", "--format", "json").stdout)


def test_the_first_sentence_is_where_prompts_part_and_the_plan_fits_on_a_screen(tmp_path):
    path = tmp_path / "clock.jsonl"
    clock_chats(path)
    shown = pagedcli("plan", path, "--no-calibrate").stdout.splitlines()
    assert "prompts part at token" in shown[0]
    assert "the time differs" in shown[0]
    assert len(shown) <= 30
    assert len(pagedcli("plan", path, "--no-calibrate", "--all").stdout.splitlines()) > 50


def test_all_looks_at_what_memory_has_room_for_and_says_what_was_left_out(tmp_path, monkeypatch):
    path = tmp_path / "clock.jsonl"
    clock_chats(path)
    monkeypatch.setattr("pagedcli.cli.plan.MOST_TOKENS_OF_ALL", 3_000)
    (verdict,) = as_json(path, "--all")["verdicts"]
    assert "drawn prompts part at token" in verdict["finding"]
    assert verdict["not_looked_at"] == "rows that were not drawn"


def test_all_commands_begin_with_the_same_verdicts(tmp_path):
    path, trace, page = tmp_path / "clock.jsonl", tmp_path / "run.jsonl", tmp_path / "page.html"
    clock_chats(path, 20)
    flags = ("--max-tokens", "1", "--num-gpu-blocks-override", "48", "--max-num-seqs", "2")
    said = pagedcli("generate", path, *flags, "--record", trace, "--record-tokens", "-o", tmp_path / "out.jsonl").stderr
    verdicts = said.splitlines()[-2:-1]  # above the place of the rows
    assert "prompts part at token" in verdicts[0]
    assert "the time differs" in verdicts[0]

    def first_lines(*arguments):
        return pagedcli(*arguments).stdout.splitlines()[: len(verdicts)]

    assert first_lines("explain", trace) == verdicts
    assert judged_recording(trace)[:1] == verdicts, "the application"
    pagedcli("report", trace, "-o", page)
    said = json.loads(re.search(r'"verdicts":(\[.*?\]),"', page.read_text(encoding="utf-8"))[1])
    assert said[: len(verdicts)] == verdicts
    planned = first_lines("plan", path, "--no-calibrate", *flags)
    assert planned == verdicts
    answer, first, *_ = pagedcli("simulate", trace).stdout.splitlines()
    assert "an unlimited cache finds 0.0 %" in answer
    assert first == verdicts[0]
    assert "prompts part at token" not in pagedcli("explain", trace, "--request", "3").stdout
    assert verdicts[0] in pagedcli("trace", path, "--dump-kv", *flags).stderr


def test_without_prefix_caching_all_say_what_it_would_give_where_prompts_part(tmp_path):
    path, trace = tmp_path / "clock.jsonl", tmp_path / "run.jsonl"
    clock_chats(path, 20)
    kept = ("--record", trace, "--record-tokens", "-o", tmp_path / "out.jsonl", "--no-enable-prefix-caching")
    said = pagedcli("generate", path, "--max-tokens", "1", *kept).stderr.splitlines()[-2]
    assert said.startswith("With prefix caching, which is off, 19 of 20 prompts part at token")
    assert (
        "; turn it on (--enable-prefix-caching) and move it behind them, but not into another message: hits 0.0 % -> "
        in said
    )
    assert pagedcli("explain", trace).stdout.splitlines()[0] == said
    assert judged_recording(trace)[0] == said
    planned = pagedcli("plan", path, "--no-calibrate", "--max-tokens", "1", "--no-enable-prefix-caching").stdout
    assert planned.splitlines()[0] == said
    story = pagedcli("explain", trace, "--request", "7").stdout
    assert "without a prefix lookup, as prefix caching is off" in story
    assert "divergence" not in story


def test_the_first_lines_name_one_block_size(tmp_path):
    path = tmp_path / "short.jsonl"
    rows = ({"prompt": [*range(10, 20), *[30 + number] * 10], "max_tokens": 2} for number in range(20))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = pagedcli("plan", path, "--no-calibrate").stdout
    assert "use --block-size 8: hits 0.0 % -> " in shown.splitlines()[0]
    assert "Best block size known" not in shown
