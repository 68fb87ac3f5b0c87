"""Twenty-two questions that people ask about their KV cache, each answered by one command: the command and the line."""

import json
import re

import pytest
from cli_harness import pagedcli
from typer.testing import CliRunner

from pagedcli.cli.cures import told_of_recording
from pagedcli.cli.main import app
from pagedcli.planning import step_time

PROMPTS = {
    "shared": [{"id": f"user-{n}", "prompt": [5] * 240 + [20 + n] * 30, "max_tokens": 3} for n in range(4)],
    "same": [{"id": f"same-{n}", "prompt": [7] * 40, "max_tokens": 2} for n in range(3)],
    "clock": [
        {"id": name, "prompt": f"Once upon a time it was 15:09:{name}", "max_tokens": 2} for name in ("20", "34")
    ],
    "tight": [{"id": f"row-{n}", "prompt": [30 + n] * 28, "max_tokens": 40} for n in range(4)],
    "long": [
        {"id": "fits", "prompt": [7] * 20, "max_tokens": 2},
        {"id": "never", "prompt": [7] * 200, "max_tokens": 4},
    ],
}
SMALL_POOL = ("--num-kvcache-blocks", "8")


@pytest.fixture(autouse=True)
def no_measured_times(tmp_path, monkeypatch):
    """No time is told, whatever this machine has been calibrated for."""
    monkeypatch.setattr(step_time, "cache_folder", lambda: tmp_path / "no-times")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The prompts, and a recorded run of each."""
    folder = tmp_path_factory.mktemp("questions")
    flags = {"clock": ("--record-tokens",), "tight": (*SMALL_POOL, "--max-num-seqs", "3"), "long": SMALL_POOL}
    for name, rows in PROMPTS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        record = ("--record", folder / f"{name}.run.jsonl", "-o", folder / f"{name}.out.jsonl")
        more = flags.get(name, ("--max-num-seqs", "1"))
        pagedcli("generate", folder / f"{name}.jsonl", *record, *more, expect=3 if name == "long" else 0)
    return folder


def answer(*arguments, expect=0):
    result = pagedcli(*arguments, expect=expect)
    return result.stdout + result.stderr


def test_1_why_no_hits_on_prompts_that_share_240_tokens(files):
    text = answer("generate", files / "shared.jsonl", "-o", "/dev/null", "--block-size", "256", "--all")
    assert "minimum cacheable prefix: 256 tokens (one block)" in text
    assert "prefixes     longest shared 240 tokens = 0 blocks of 256; ceiling 0.0 %" in text
    assert "720 tokens shared, but less than a block" in text
    assert "With --block-size" not in text, "how fast steps with smaller blocks are only plan times"
    text = answer("explain", files / "shared.run.jsonl")
    assert "longest shared prefix seen: 240 tokens = 15 blocks at block 16, 0 blocks at block 256" in text


def test_explain_of_a_run_that_lost_nothing_has_no_table_of_lost_lookups(files):
    trace = files / "clock.run.jsonl"
    text = answer("explain", trace)
    assert len(text.splitlines()) <= 30
    assert "Lookups" not in text
    assert text.splitlines()[0].endswith("came from the cache, as much as an unlimited cache would find.")
    assert json.loads(pagedcli("explain", trace, "--format", "json").stdout)["lookups"] == []


def test_explain_of_a_run_that_lost_tokens_begins_with_what_it_lost_and_fits_on_a_screen(files, tmp_path):
    text = answer("explain", files / "tight.run.jsonl")
    assert len(text.splitlines()) <= 30
    assert re.search(
        r"\A0\.0 % of 112 prompt tokens came from the cache, .*; 2 preemptions: [1-9]\d* tokens computed again\.$",
        text,
        re.M,
    )
    prompts, run = tmp_path / "in.jsonl", tmp_path / "run.jsonl"
    rows = [{"prompt": [5 + n % 6] * (60 + n), "max_tokens": 20, "ignore_eos": True, "cache_salt": f"{n % 2}"}
            for n in range(24)]  # fmt: skip
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = ("--record", run, "--record-tokens", "--num-kvcache-blocks", "16", "--max-num-seqs", "4")
    pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", *record)
    text = answer("explain", run)
    assert len(text.splitlines()) <= 30
    assert re.search(r"\A[\d.]+ % of .*: 16 blocks were too few \([\d,]+ tokens evicted before reuse\)", text)
    assert "Lookups that lost most" in text
    in_full = answer("explain", run, "--all")
    assert len(in_full.splitlines()) > 30
    assert "Prefix cache: " in in_full


def test_the_application_says_what_explain_would_change(files):
    said = told_of_recording(files / "tight.run.jsonl")
    assert said
    assert answer("explain", files / "tight.run.jsonl").splitlines()[1 : 1 + len(said)] == said
    assert told_of_recording(files / "same.run.jsonl") == []


def test_2_which_lookup_gave_this_cached_token_count(files):
    text = answer("explain", files / "shared.run.jsonl", "--request", "user-2")
    assert text.startswith("Request user-2 (seq 2) looked up its prompt at step ")
    assert ": 240 of 270 tokens (88.9 %) came from the cache." in text.splitlines()[0]
    lines = answer("explain", files / "shared.run.jsonl", "--request", "user-2", "--all").splitlines()
    title = next(place for place, line in enumerate(lines) if line.startswith("Lookups"))
    header, row = lines[title + 1], lines[title + 3]
    assert header.split()[:4] == ["step", "seq", "request", "kind"]
    assert row.split()[1:9] == ["2", "user-2", "first", "270", "16", "15", "240", "240"]
    assert row.endswith("the next block had never been computed before")


def test_3_where_did_my_prompt_diverge(files):
    text = answer("explain", files / "clock.run.jsonl", "--request", "34")
    assert 'First divergence at token 13: earlier " was 15:09:20" (request 20) vs prompt " was 15:09:34"' in text


def test_4_are_these_hits_too_few_for_the_same_prompt_three_times(files):
    text = answer("explain", files / "same.run.jsonl", "--all")
    assert re.search(r"^hit +64 +53\.3 %", text, re.MULTILINE)
    assert re.search(r"^seen for the first time +32 +26\.7 %", text, re.MULTILINE)
    assert re.search(r"^after the last full block +24 +20\.0 %", text, re.MULTILINE)
    assert re.search(r"^ceiling: an unlimited cache +64 +53\.3 %", text, re.MULTILINE)


def test_5_why_hits_on_random_data(files):
    text = answer("trace", files / "tight.jsonl", *SMALL_POOL, "--max-num-seqs", "3")
    assert re.search(r"^from other requests +0\.0 % +0\.0 %", text, re.MULTILINE)
    assert re.search(r"^own \(preempted, n > 1\) +[1-9][\d.]+ %", text, re.MULTILINE)


def test_6_over_what_is_this_rate_and_in_tokens_or_blocks(files):
    text = answer("trace", files / "same.jsonl")
    assert re.search(r"prefix hits +run: tokens +blocks +last 100 steps: tokens +blocks", text)
    assert "prompt tokens (53 % from the cache)" in answer("trace", files / "same.jsonl", "--max-num-seqs", "1")


def test_7_how_many_blocks_do_i_get_and_why():
    text = answer("profile-memory", "--max-num-seqs", "4")
    first = "num_kvcache_blocks = 512 (16.0 MiB; 16 tokens, 32.00 KiB each): 4 sequences of 2,048 tokens at once.\n"
    assert text.startswith(first)
    for term in ("total", "- other processes", "- weights", "- activation peak", "= room for KV", "KV cache"):
        assert re.search(rf"^{re.escape(term)} ", text, re.MULTILINE), term
    formula = "bytes/block = 2 (K and V) x 4 layers x 16 tokens x 2 kv_heads x 64 head_dim x 2 bytes = 32,768"
    assert formula in text


def test_8_which_concurrency_does_the_pool_hold_and_what_do_n_users_need(files):
    flags = ("--prompts", files / "shared.jsonl", "--target-concurrency", "64", *SMALL_POOL)
    short, text = answer("profile-memory", *flags), answer("profile-memory", *flags, "--all")
    in_short, in_full = (
        [line.split()[:5] for line in each.splitlines() if line.startswith("file ")] for each in (short, text)
    )
    assert in_short == in_full != []
    assert re.search(
        r"^requests of +tokens +blocks +requests at once +requests sharing 240 tokens( +requests in all .*)?$",
        text,
        re.MULTILINE,
    )
    for requests in ("model length", "file p50", "file p95", "file max"):
        assert re.search(rf"^{requests} +[\d,]+ +\d+ +[\d,]+ +[\d,]+( +[\d,]+)?$", text, re.MULTILINE), requests
    assert re.search(r"What 64 concurrent requests need\n(?:.*\n)+?file p50 +207 ", text)  # 15 shared, 3 of each


def test_9_why_does_no_block_fit(files):
    text = answer("generate", files / "same.jsonl", "--kv-cache-memory", "1KiB", expect=2)
    assert "error: no KV block fits: one needs 32768 bytes (kv_cache_memory 1024 bytes)" in text
    assert "hint: lower --max-num-batched-tokens or --block-size" in text


def test_10_why_is_the_cache_full_with_two_requests(files):
    wide = CliRunner(env={"COLUMNS": "140"})
    text = wide.invoke(app, ["trace", str(files / "tight.run.jsonl"), "--step", "7"]).stdout
    rows = re.findall(
        r"^ *\d +(row-\d) +(?:decode|stalled) +\d +0 +\d+/\d+ +\d/40 +(\d) +(\d+\.\d %)  (.*?) *$", text, re.MULTILINE
    )
    assert rows == [
        ("row-0", "3", "37.5 %", "0 1 6"),
        ("row-1", "3", "37.5 %", "2 3 7"),
        ("row-2", "2", "25.0 %", "4 5"),
    ]


def test_11_why_do_requests_wait_while_blocks_are_free(files):
    text = answer("trace", files / "tight.jsonl", "--step", "2", *SMALL_POOL, "--max-num-seqs", "1")
    assert "not scheduled: sequence limit (1 run)" in text
    assert "in use 2 (0 shared) + cached 0 + empty 6 = 8 blocks" in text


def test_12_why_does_my_long_request_never_run(files):
    row = json.loads((files / "long.out.jsonl").read_text().splitlines()[1])
    assert row["error"]["message"] == "needs 13 blocks of 16 tokens, the pool has 8"
    refused = answer("explain", files / "long.run.jsonl", "--request", "never", expect=2)
    assert "was refused: needs 13 blocks of 16 tokens, the pool has 8" in refused


def test_13_what_was_preempted_for_whom_and_what_did_it_cost(files):
    text = answer("trace", files / "tight.run.jsonl")
    preempted = r"step \d+ preempt seq \d \(row-\d\): \d+ tokens dropped, \d blocks? freed, "
    assert re.search(preempted + r"for seq \d \(row-\d\) which needed 1", text)
    text = answer("trace", files / "tight.jsonl", *SMALL_POOL, "--max-num-seqs", "3")
    assert re.search(r"; 2 preemptions, [1-9]\d* tokens computed again\.$", text, re.MULTILINE)
    assert re.search(r"^With --num-kvcache-blocks \d+ .*2 preemptions become 0; it takes .* more memory", text, re.M)


def test_14_is_it_a_leak_that_blocks_stay_occupied(files):
    assert "at the end in use 0 + cached 7 + empty 1 = 8 blocks" in answer(
        "trace", files / "tight.run.jsonl", "--check"
    )
    assert "idle: nothing is in use, ok" in answer("trace", files / "same.jsonl")


def test_15_how_much_is_wasted(files):
    text = answer("generate", files / "same.jsonl", "-o", "/dev/null", "--all")
    assert re.search(r"waste +\d+\.\d % of the slots in use held no token \(mean of the steps; peak \d+\.\d %\)", text)
    text = answer("trace", files / "same.run.jsonl", "--step", "1", "--format", "json")
    memory = json.loads(text)["memory"]
    assert memory["unfilled_bytes"] == memory["unfilled_slots"] * 2048
    assert memory["contiguous_times"] > 1
    assert "saved_bytes" in memory


@pytest.mark.long
def test_16_which_block_size_should_i_use(files):
    text = answer("plan", files / "shared.jsonl", "--all")
    assert re.search(r"^ +256 +0\.0 % +0 +46\.9 %", text, re.MULTILINE)
    assert re.search(r"^ +16 +66\.7 % +720 +0\.0 %", text, re.MULTILINE)
    assert "--block-size" not in text, "no other is better for sure"


def test_17_do_two_equal_prompts_in_one_step_get_two_copies(files):
    text = answer("trace", files / "same.jsonl")
    assert "duplicates so far: 0" in text
    step = answer("trace", files / "same.jsonl", "--step", "0")
    assert re.search(r"\n +1 +same-1 +new +40 +2 +2 +32 +-\s+every full block found\n", step)


def test_18_who_held_block_2_at_step_7(files):
    text = answer("trace", files / "tight.run.jsonl", "--block", "2", "--step", "7")
    assert text.startswith("At step 7 block 2 is held by seq 1 (row-1) since step 0.\n")
    assert "Block 2 at step 7: in use, ref count 1, 16 of 16 tokens, content " in text
    assert re.search(r"^ +1 +row-1 +0 +decode +0-15 +0 +allocated$", text, re.MULTILINE)
    assert re.search(r"^ +0 +allocated to seq 1 \(row-1\)$", text, re.MULTILINE)


def test_19_who_held_a_block_and_what_was_in_it_through_the_run(files):
    text = answer("explain", files / "clock.run.jsonl", "--block", "0")
    assert re.search(r"^ +0 +20 +0 +0 +\d+ +allocated +finished$", text, re.MULTILINE)
    assert "allocated to seq 0 (20)" in text


def test_20_the_pool_at_every_step_for_a_spreadsheet_or_a_database(files, tmp_path):
    answer("trace", files / "tight.run.jsonl", "--dump-kv", tmp_path / "kv.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "kv.blocks.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if row["step"] == 7 and row["block_id"] == 2)
    assert (row["state"], row["requests"]) == ("in_use", ["row-1"])


def test_21_which_rows_failed_where_and_why(files):
    text = pagedcli("generate", files / "long.jsonl", *SMALL_POOL, expect=3).stdout
    rows = [json.loads(line) for line in text.splitlines()]
    failed = [(row["id"], row["index"], row["error"]["message"]) for row in rows if row.get("error")]
    assert failed == [("never", 1, "needs 13 blocks of 16 tokens, the pool has 8")]


@pytest.mark.long
def test_22_which_prompts_share_most_by_line_and_text(files):
    text = answer("plan", files / "clock.jsonl", "--all")
    assert re.search(r'^ +8 +2 +8 +1, 2 +0  "Once upon a time it was 1"$', text, re.MULTILINE)
