"""Every command says where prompts diverge right after its answer."""

import json
import re

import planted_prompts as planted
from cli_harness import pagedcli

from pagedcli.cli.cures import told_of_recording

LIBRARY = planted.words(planted.random.Random(1), 120)


def clock_of(number):
    return f"It is {9 + number % 13}:{10 + number % 50}:{10 + number // 650 % 50}. "


def clock_chats(path, num):
    rows = []
    for number in range(num):
        texts = {"system": clock_of(number) + LIBRARY, "user": f"Where is book {number}?"}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        rows.append({"id": number, "messages": messages, "max_tokens": 4})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_prefix_caching_all_say_what_it_would_give_where_prompts_diverge(tmp_path):
    path, trace = tmp_path / "clock.jsonl", tmp_path / "run.jsonl"
    clock_chats(path, 20)
    kept = ("--record", trace, "--record-tokens", "-o", tmp_path / "out.jsonl", "--no-enable-prefix-caching")
    said = pagedcli("generate", path, "--max-tokens", "1", *kept).stderr.splitlines()[-2]
    assert re.match(r"19 of 20 prompts diverge at .*\. With --enable-prefix-caching, moving the time behind the ", said)
    assert told_of_recording(trace)[0] == said
    explained = pagedcli("explain", trace).stdout.splitlines()
    assert explained[0].startswith("Prefix caching was off: all of ")
    assert explained[1] == said
    planned = pagedcli("plan", path, "--no-calibrate", "--max-tokens", "1", "--no-enable-prefix-caching").stdout
    assert planned.splitlines()[1] == said
    story = pagedcli("explain", trace, "--request", "7").stdout
    assert "without a prefix lookup, as prefix caching is off" in story
    assert "divergence" not in story
