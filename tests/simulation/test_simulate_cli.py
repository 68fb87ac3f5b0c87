"""`pagedcli simulate` as a person meets it: tables, JSON, flags that do not go together."""

import json
import re
import sys
from pathlib import Path

import pytest
from cli_harness import pagedcli, write_rows
from model_zoo import tiny_model

from pagedcli.core.eviction import POLICIES, Fifo
from pagedcli.events import RequestPreempted
from pagedcli.printable import byte_text
from pagedcli.trace.files import TraceReader


def rows(num_rows=60):
    """Three conversations whose prompts grow by a block each turn, 4 tokens per hash; two seconds between lines."""
    for index in range(num_rows):
        chat, turn = index % 3, index // 3
        hashes = [0, *(100 * (chat + 1) + place for place in range(turn + 1))]
        yield {"timestamp": 2000 * index, "input_length": 4 * len(hashes), "output_length": 5, "hash_ids": hashes}


@pytest.fixture
def trace(tmp_path):
    return write_rows(tmp_path / "trace.jsonl", list(rows()))


def simulate(trace, *flags, expect=0):
    return pagedcli("simulate", trace, "--hash-size", "4", *flags, expect=expect)


def as_json(trace, *flags):
    return json.loads(simulate(trace, "--format", "json", *flags).stdout)


def test_no_default_pool_of_a_small_file_refuses_a_request():
    prompts = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
    pools = json.loads(pagedcli("simulate", prompts, "--format", "json").stdout)["pools"]
    assert [row["num_refused"] for row in pools] == [0] * len(pools)
    small = json.loads(pagedcli("simulate", prompts, "--pool", "5%", "--format", "json").stdout)["pools"]
    assert small[0]["num_refused"], "a pool that is named is simulated as it is"


def test_of_a_file_with_salts_and_its_recording_one_salt_is_a_cure(tmp_path):
    prompts = [
        {"prompt": [5] * 48 + [20 + n] * 8, "max_tokens": 2, "cache_salt": f"user {n}", "ignore_eos": True}
        for n in range(12)
    ]
    path, run = write_rows(tmp_path / "salts.jsonl", prompts), tmp_path / "run.jsonl"
    pagedcli("generate", path, "-o", tmp_path / "out.jsonl", "--record", run, "--record-tokens")
    for source in (path, run):
        assert "but with another cache_salt. Giving those" in pagedcli("simulate", source).stdout.splitlines()[1]
    own, recorded = (json.loads(pagedcli("simulate", each, "--pool", "64", "--format", "json").stdout)
                     for each in (path, run))  # fmt: skip
    assert own["pools"][0]["hit_rate_tokens"] == recorded["pools"][0]["hit_rate_tokens"] == 0


def test_a_policy_more_than_there_are_markers_is_in_the_picture(trace, tmp_path, monkeypatch):
    for name in ("sixth", "seventh"):
        monkeypatch.setitem(POLICIES, name, Fifo)
    simulate(trace, "--pool", "30", "--policy", ",".join(POLICIES), "--picture", tmp_path / "hits.svg")
    text = (tmp_path / "hits.svg").read_text()
    assert "<title>seventh, 30 blocks: " in text
    assert len(POLICIES) == 7
    assert text.count("<title>") >= 7


@pytest.mark.long
def test_a_prompt_file_is_simulated_with_the_limits_that_generate_decides_here(tmp_path):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": f"{i} times " * 9, "max_tokens": 40} for i in range(40)])
    flags = ("--num-kvcache-blocks", "30", "--max-num-seqs", "8", "--block-size", "8")
    trace = tmp_path / "run.jsonl"
    outputs, ids = tmp_path / "out.jsonl", "--output-token-ids"
    pagedcli("generate", prompts, "-o", outputs, "--record", trace, "--ignore-eos", ids, *flags)
    ran = [event for event in TraceReader(trace) if isinstance(event, RequestPreempted)]
    recorded = tmp_path / "simulated.jsonl"
    simulated = ("simulate", prompts, "--outputs", outputs, "--pool", "30", *flags[2:], "--format", "json")
    found = json.loads(pagedcli(*simulated, "--record", recorded).stdout)
    assert found["pools"][0]["num_preemptions"] == len(ran) > 0
    assert not any("assumed" in note for note in found["notes"])
    engines = [next(iter(TraceReader(path))).max_num_batched_tokens for path in (trace, recorded)]
    assert engines == [512, 512]


def test_the_first_line_has_units_that_fit_its_figures(tmp_path):
    tiny = write_rows(tmp_path / "tiny.jsonl", [
        {"timestamp": 0, "input_length": 4, "output_length": 60, "hash_ids": [1]} for _ in range(8)
    ])  # fmt: skip
    text = simulate(tiny, "--pool", "50", "-m", "builtin").stdout
    assert "(0.0 GiB)" not in text
    alone = simulate(tiny, "--pool", "50", "-m", "builtin", "--no-schedule").stdout
    assert re.search(
        r"; 1 block \([\d.]+ KiB\) would do \(LRU alone, without the blocks of running requests\)\.", alone
    )


def test_arrivals_by_time_wait_less_than_all_at_once(trace):
    flags = ("--pool", "64", "--step-ms", "100", "--max-num-seqs", "2")
    at_once = as_json(trace, *flags)["pools"][0]
    in_time = as_json(trace, *flags, "--speed", "1")["pools"][0]
    assert in_time["mean_waiting_s"] == 0 < at_once["mean_waiting_s"]
    assert in_time["total_s"] > 118 > at_once["total_s"]
    faster = as_json(trace, *flags, "--speed", "1000")["pools"][0]
    assert faster["total_s"] < in_time["total_s"]


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that nobody can write")
def test_a_simulation_that_cannot_be_recorded_says_what_to_do(trace):
    error = simulate(trace, "--pool", "40", "--record", "/sys/run.jsonl", expect=1).stderr
    assert "cannot write the trace /sys/run.jsonl: Permission denied" in error
    assert "hint: name a file that can be written, or leave out --record\n" in error


def test_a_recording_of_a_simulation_is_a_trace_that_holds_every_law(trace, tmp_path):
    simulate(trace, "--pool", "40", "--record", tmp_path / "run.jsonl")
    assert "ok" in pagedcli("trace", tmp_path / "run.jsonl", "--check").stdout.lower()
    again = json.loads(pagedcli("simulate", tmp_path / "run.jsonl", "--format", "json").stdout)
    assert again["pools"][0]["hit_rate_tokens"] == as_json(trace, "--pool", "40")["pools"][0]["hit_rate_tokens"]


@pytest.mark.long
def test_a_model_with_windows_is_simulated_in_groups_of_layers(trace, tmp_path):
    long = write_rows(tmp_path / "long.jsonl", [
        {"timestamp": 0, "input_length": 4096, "output_length": 8, "hash_ids": [0, *range(9 * i + 1, 9 * i + 8)]}
        for i in range(8)
    ])  # fmt: skip
    flags = ("--format", "json", "--block-size", "16", "--max-num-seqs", "1", "--pool", "100%,128MiB",
             "--max-num-batched-tokens", "2048")  # fmt: skip
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
    model = tiny_model("gemma3", tmp_path / "gemma", num_hidden_layers=18, sliding_window=512,
                       max_position_embeddings=32768, **heads)  # fmt: skip
    found = json.loads(pagedcli("simulate", long, *flags, "-m", model).stdout)
    assert found["windows"] == [512] * 5 + [None]
    assert found["block_bytes"] == 2 * 3 * 16 * 256 * 4  # K and V of three layers
    assert found["num_unique_blocks"] == 6 * (32 + 8 * 7 * 32)
    small, large = found["pools"]
    enough = found["enough"]["num_blocks"]
    assert f"{enough:,} blocks ({byte_text(enough * found['block_bytes'])}) " in found["answer"][0]
    assert small["pool_blocks"] == 2**27 // found["block_bytes"]
    assert large["hit_rate_tokens"] == found["unlimited_hit_rate"] == 7 / 64
    # one request at a time holds its last window and one chunk in five groups, and everything in one
    assert 257 + 5 * 33 < large["peak_used_blocks"] < 257 + 5 * (33 + 2048 // 16) < 6 * 257
    screen = pagedcli("simulate", long, "--block-size", "16", "-m", model).stdout
    assert "the layers form 6 groups, each with blocks of its own" in " ".join(screen.split())


def test_what_to_change_is_about_the_smallest_pool_and_leaves_the_pool_to_the_first_line(trace):
    document = as_json(trace, "--pool", "22,200")
    assert all(each["kind"] != "pool" for each in document["cures"])
    assert all(each["hit_rate"] == document["pools"][0]["hit_rate_tokens"] for each in document["cures"])
    assert "--num-kvcache-blocks" not in simulate(trace, "--pool", "22,200", "--all").stdout.split("\n\n")[0]


@pytest.mark.long
@pytest.mark.usefixtures("step_times")
def test_steps_take_the_time_that_plan_has_measured(tmp_path):
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Once upon a time {index}"} for index in range(8)])
    refused = pagedcli("simulate", path, "--pool", "200", "--calibrated", expect=2).stderr
    assert "has no calibration on this machine" in refused
    forecast = json.loads(pagedcli("plan", path, "--format", "json").stdout)["forecast"]
    found = as_json(path, "--pool", "200", "--calibrated")
    steps_s = forecast["seconds"] - forecast["seconds_by_part"]["rows"]
    assert found["pools"][0]["total_s"] == pytest.approx(steps_s, rel=1e-3)
    text = pagedcli("simulate", path, "--pool", "200", "--calibrated", columns=120).stdout
    assert "waiting  preempted" in text
    assert "time: step times measured on this machine" in text
    assert "both set the time" in pagedcli("simulate", path, "--step-ms", "5", "--calibrated", expect=2).stderr
