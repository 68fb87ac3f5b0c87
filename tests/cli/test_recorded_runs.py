"""`pagedcli trace` of a recorded run, and `explain`, as a person meets them."""

import csv
import io
import json

import pytest
from cli_harness import pagedcli
from harness.core import simulated, write


@pytest.fixture(scope="module")
def events():
    return simulated()


@pytest.fixture(scope="module")
def trace(tmp_path_factory, events):
    return write(tmp_path_factory.mktemp("cli") / "run.jsonl.zst", events)


def test_csv_holds_one_table(trace):
    """So that a program reads it: every line has the columns of the header."""
    for options in ([], ["--lookups"], ["--request", "request-4"]):
        out = pagedcli("explain", trace, *options, "--format", "csv").stdout
        rows = list(csv.reader(io.StringIO(out)))
        assert rows[0][0] == ("step" if options else "label")
        assert {len(row) for row in rows} == {len(rows[0])}
        assert len(rows) > 1


def test_no_view_is_written_over_its_trace_or_another_file(trace, tmp_path):
    before = trace.read_bytes()
    other = tmp_path / "other"
    other.write_text("precious")
    for command in (("explain", trace), ("trace", trace, "--export", "perfetto")):
        said = pagedcli(*command, "-o", trace, "--overwrite", expect=2).stderr
        assert "the trace are the same file" in said
        assert "already exists" in pagedcli(*command, "-o", other, expect=2).stderr
        assert other.read_text() == "precious"
        pagedcli(*command, "-o", other, "--overwrite")
        other.write_text("precious")
    assert trace.read_bytes() == before


FAST = ("--max-tokens", "4", "--num-kvcache-blocks", "64", "--max-num-seqs", "2", "--device", "cpu")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"The code of Anna is {number}."}) + "\n" for number in range(4)))
    return path


def test_trace_prints_steps_records_and_keeps_rows(prompts, tmp_path):
    record, rows = tmp_path / "run.jsonl.zst", tmp_path / "rows.jsonl"
    options = ("--dump-kv", "--record", record, "--record-tokens", "-o", rows)
    result = pagedcli("trace", prompts, *FAST, *options)
    assert "step 0, as its forward pass sees the cache" in result.stdout
    assert "not scheduled: sequence limit (2 run)" in result.stdout
    assert len(rows.read_text().splitlines()) == 4
    assert "ok, " in pagedcli("trace", record, "--check").stdout
    assert "first divergence at token " in pagedcli("explain", record, "--lookups").stdout
    assert '"' in pagedcli("explain", record, "--lookups").stdout.split("first divergence", 1)[1]
