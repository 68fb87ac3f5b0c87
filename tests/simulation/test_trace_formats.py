"""Traces of others: each format gives the same requests; what is broken is counted and named, in bounded memory."""

import gzip
import sys

import pytest
from cli_harness import pagedcli, write_rows

from pagedcli.errors import PagedcliError
from pagedcli.simulation.caches import accesses_of
from pagedcli.simulation.formats import read_traces

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# two requests of 9 and 6 tokens, 4 tokens per hash, the first of which they share
MOONCAKE = [
    {"timestamp": 1000, "input_length": 9, "output_length": 3, "hash_ids": [5, 6, 7]},
    {"timestamp": 3500, "input_length": 6, "output_length": 1, "hash_ids": [5, 8]},
]
BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 9, "output_length": 3, "type": "text",
     "turn": 1, "hash_ids": [5, 6, 7]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 3.5, "input_length": 6, "output_length": 1, "type": "text",
     "turn": 2, "hash_ids": [5, 8]},
]  # fmt: skip
SIMULATOR = [
    {"block_size": 4, "hash_ids": ["a", "b", "c"], "input_length": 9},
    {"block_size": 4, "hash_ids": ["a", "d"], "input_length": 6},
]


def dynamo(received_ms, num_output, replay):
    request = {"request_id": "r", "request_received_ms": received_ms, "output_tokens": num_output, "replay": replay}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}


DYNAMO = [
    {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}},
    dynamo(1000, 3, {"trace_block_size": 4, "input_length": 9, "input_sequence_hashes": [5, 6, 7]}),
    {"event": dynamo(3500, 1, {"trace_block_size": 4, "input_length": 6, "input_sequence_hashes": [5, 8]})},
]
LMCACHE = [
    {"timestamp": 1.0, "model_name": "m", "chunk_size": 4, "seq_len": 9, "chunk_hashes": ["0x5", "0x6"]},
    {"timestamp": 3.5, "model_name": "m", "chunk_size": 4, "seq_len": 6, "chunk_hashes": ["0x5"]},
]


@pytest.mark.parametrize(
    ("name", "rows", "has_times", "has_outputs"),
    [
        ("mooncake", MOONCAKE, True, True),
        ("bailian", BAILIAN, True, True),
        ("kvcache-simulator", SIMULATOR, False, False),
        ("dynamo", DYNAMO, True, True),
        ("lmcache", LMCACHE, True, False),
    ],
)
def test_every_format_gives_the_same_requests(tmp_path, name, rows, has_times, has_outputs):
    workload = read_traces([str(write_rows(tmp_path / "trace", rows))], hash_size=4)
    assert (workload.format, workload.num_bad, workload.hash_size) == (name, 0, 4)
    assert [request.num_prompt_tokens for request in workload.requests] == [9, 6]
    assert [request.num_output_tokens for request in workload.requests] == ([3, 1] if has_outputs else [None, None])
    assert [request.arrival_s for request in workload.requests] == ([0.0, 2.5] if has_times else [None, None])
    accesses = accesses_of(workload, 4)
    assert accesses.blocks.tolist() == [0, 1, 0]
    assert accesses.starts.tolist() == [0, 2, 3]


def test_smaller_blocks_split_the_hash_blocks_and_larger_ones_join_them(tmp_path):
    workload = read_traces([str(write_rows(tmp_path / "trace", MOONCAKE))], hash_size=4)
    # 9 tokens: 4 blocks; 6: two shared, one own
    assert accesses_of(workload, 2).blocks.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert accesses_of(workload, 8).blocks.tolist() == [0]
    assert accesses_of(workload, 4, partial_blocks=True).blocks.tolist() == [0, 1, 2, 0, 3]


@pytest.mark.parametrize("compress", [gzip.compress, lambda data: gzip.compress(data[:60]) + gzip.compress(data[60:]),
                                      zstd.compress])  # fmt: skip
def test_compressed_traces_are_found_by_their_content(tmp_path, compress):
    (tmp_path / "trace").write_bytes(compress(write_rows(tmp_path / "plain", MOONCAKE).read_bytes()))
    assert len(read_traces([str(tmp_path / "trace")], hash_size=4).requests) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "malformed"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 9, "output_length": -1, "hash_ids": [1, 2, 3]}', "output_length"),
        ('{"timestamp": 0, "input_length": 1e15, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 90, "output_length": 1, "hash_ids": [1, 2, 3]}', "3 hashes of 4 tokens"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2.5, 3]}', "hash_ids"),
        ('{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [1, 2, 3]}', "invalid"),
        ("[1, 2]", "object"),
        ("[" * 100_000, ""),
    ],
)
def test_a_bad_line_is_counted_and_named(tmp_path, line, reason):
    path = write_rows(tmp_path / "trace", [MOONCAKE[0], line, MOONCAKE[1]])
    workload = read_traces([str(path)], hash_size=4)
    assert (len(workload.requests), workload.num_bad) == (2, 1)
    assert workload.bad_lines[0].place == f"{path}:2"
    assert reason.lower() in workload.bad_lines[0].reason.lower()


def test_lines_out_of_order_are_sorted_and_counted(tmp_path):
    workload = read_traces([str(write_rows(tmp_path / "trace", MOONCAKE[::-1]))], hash_size=4)
    assert [request.num_prompt_tokens for request in workload.requests] == [9, 6]
    assert "1 line with an earlier time" in workload.notes[0]


@pytest.mark.parametrize("content", ["", "\n\n", "hello\n", '{"x": 1}\n'])
def test_a_file_without_requests_is_an_error_of_one_line(tmp_path, content):
    (tmp_path / "trace.jsonl").write_text(content)
    with pytest.raises(PagedcliError) as error:
        read_traces([str(tmp_path / "trace.jsonl")])
    assert "\n" not in error.value.message
    result = pagedcli("simulate", tmp_path / "trace.jsonl", expect=2)
    assert "error: " in result.stderr
