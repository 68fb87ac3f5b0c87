"""Recordings as traces: KV events of other engines, and our own runs without tokens."""

import json

import pytest
from cli_harness import pagedcli
from conftest import shared_data
from kv_event_harness import numbered, record, removed, stored

from pagedcli.simulation.caches import accesses_of
from pagedcli.simulation.sources import read_kv_events


@pytest.fixture
def recording(tmp_path):
    """A server stores a chain of three blocks, evicts the last two, and computes them again; another root follows."""
    batches = [[stored(11, 12, 13)], [removed(12, 13)], [stored(12, 13, parent=11)], [stored(20)]]
    return record(tmp_path / "events.jsonl", numbered(batches))


def test_blocks_that_a_server_computed_again_are_the_hits_of_a_larger_cache(recording):
    workload = read_kv_events(recording)
    assert [request.num_prompt_tokens for request in workload.requests] == [6, 4, 2]
    assert accesses_of(workload, 2).blocks.tolist() == [0, 1, 2, 1, 2, 3]
    document = json.loads(pagedcli("simulate", recording, "--no-schedule", "--pool", "3,1", "--format", "json").stdout)
    assert document["format"] == "kv-events"
    assert [row["hit_rate_blocks"] for row in document["pools"]] == [0, 2 / 6]


def test_requests_that_were_there_before_the_first_step_came_with_it(tmp_path):
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "run.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [5, 6, number], "max_tokens": 2}) + "\n" for number in range(40)))
    pagedcli("generate", prompts, "-o", tmp_path / "out.jsonl", "--max-num-seqs", "2", "--record", trace)
    assert 0 < json.loads(pagedcli("simulate", trace, "--format", "json").stdout)["span_s"] < 60


def test_a_published_recording_of_vllm_is_read(capsys):
    document = json.loads(
        pagedcli("simulate", shared_data("vllm_events") / "events.jsonl", "--pool", "100%", "--format", "json").stdout
    )
    assert document["num_blocks"] - document["num_unique_blocks"] == 5  # stored, removed and stored again
    assert document["pools"][0]["num_refused"] == 0
