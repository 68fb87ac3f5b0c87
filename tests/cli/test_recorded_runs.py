"""`pagedcli trace` of a recorded run, and `explain`, as a person meets them."""

import csv
import io

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
