"""`pagedcli trace` of a recorded run, and `explain`, as a person meets them."""

import csv
import io
import json

import pytest
from harness.core import simulated, write
from typer.testing import CliRunner

from pagedcli.cli.main import app
from pagedcli.events import BlockEvicted, RequestPreempted


def pagedcli(*arguments, expect=0):
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, f"exit code {result.exit_code}\n{result.stderr}\n{result.stdout}"
    return result


@pytest.fixture(scope="module")
def events():
    return simulated()


@pytest.fixture(scope="module")
def trace(tmp_path_factory, events):
    return write(tmp_path_factory.mktemp("cli") / "run.jsonl.zst", events)


def test_check_says_ok_with_the_three_states_adding_up(trace, events):
    out = pagedcli("trace", trace, "--check").stdout
    assert f"ok, {len(events):,} events in " in out
    assert "at the end in use 0 + cached 13 + empty 1 = 14 blocks" in out
    facts = json.loads(pagedcli("trace", trace, "--check", "--format", "json").stdout)
    assert (facts["ok"], facts["num_events"]) == (True, len(events))


def test_check_exits_with_1_and_names_the_line(tmp_path, events):
    place = next(i for i, event in enumerate(events) if isinstance(event, BlockEvicted))
    path = write(tmp_path / "bad.jsonl", events[:place] + events[place + 1 :])
    result = pagedcli("trace", path, "--check", expect=1)
    assert f"bad.jsonl:{place + 1}: blocks_allocated: block " in result.stderr
    assert result.stdout == ""


def test_one_step_as_table_and_as_json(trace):
    out = pagedcli("trace", trace, "--step", "3").stdout
    assert "step 3, as its forward pass sees the cache" in out
    assert "step 4, as" not in out
    document = json.loads(pagedcli("trace", trace, "--step", "3", "--format", "json").stdout)
    assert document["step"] == 3
    shown = {str(seq["seq_id"]) for seq in document["sequences"]}
    assert shown <= {line.split()[0] for line in out.splitlines() if line.split()}


def test_every_step_as_json_lines(trace):
    lines = pagedcli("trace", trace, "--dump-kv", "--format", "json").stdout.splitlines()
    documents = [json.loads(line) for line in lines]
    assert [document["step"] for document in documents] == list(range(len(documents)))


def test_without_a_terminal_plain_lines(trace, events):
    out = pagedcli("trace", trace).stdout
    assert "\x1b" not in out
    assert out.count(" preempt seq ") == sum(isinstance(event, RequestPreempted) for event in events)
    assert "step 0: " in out


def test_following_one_request(trace):
    out = pagedcli("trace", trace, "--follow", "request-3").stdout
    assert "add seq 3: request request-3" in out
    assert "finish seq 3" in out
    assert "finish seq 4" not in out
    assert "add seq 3" in pagedcli("trace", trace, "--follow", "seq:3").stdout


def test_export_for_perfetto(trace, tmp_path):
    path = tmp_path / "run.json"
    pagedcli("trace", trace, "--export", "perfetto", "-o", path)
    to_stdout = pagedcli("trace", trace, "--export", "perfetto").stdout
    assert json.loads(path.read_bytes()) == json.loads(to_stdout)
    assert json.loads(to_stdout)["traceEvents"]


def test_the_old_name_works_and_says_the_new_one(trace):
    old, new = (pagedcli(name, trace, "--check") for name in ("replay", "trace"))
    assert old.stdout == new.stdout
    assert "note: pagedcli replay is pagedcli trace now" in old.stderr
    assert "replay" not in pagedcli("--help").stdout


def test_explain_totals_reasons_and_the_longest_prefix(trace):
    out = pagedcli("explain", trace, "--all").stdout
    assert "ceiling: an unlimited cache" in out
    assert "minimum cacheable prefix: 2 tokens (one block)" in out
    assert "longest shared prefix: " in out
    document = json.loads(pagedcli("explain", trace, "--lookups", "--format", "json").stdout)
    parts = {row["part"]: row["tokens"] for row in document["totals"]}
    whole = parts.pop("num_tokens")
    not_parts = ("ideal", "first_seen_shared", "last_block_shared")
    assert sum(tokens for part, tokens in parts.items() if part not in not_parts) == whole
    assert sum(row["num_tokens"] for row in document["lookups"] if row["kind"] == "first") == whole
    assert document["hit_rate"] <= document["ideal_hit_rate"]


def test_explain_one_request(trace):
    document = json.loads(pagedcli("explain", trace, "--request", "request-4", "--format", "json").stdout)
    assert {row["request_id"] for row in document["lookups"]} == {"request-4"}
    assert "totals" not in document
    header, *rows = pagedcli("explain", trace, "--request", "seq:4", "--format", "csv").stdout.splitlines()
    assert header.startswith("step,seq_id,label,kind,num_tokens")
    assert len(rows) == len(document["lookups"])


def test_csv_holds_one_table(trace):
    """So that a program reads it: every line has the columns of the header."""
    for options in ([], ["--lookups"], ["--request", "request-4"]):
        out = pagedcli("explain", trace, *options, "--format", "csv").stdout
        rows = list(csv.reader(io.StringIO(out)))
        assert rows[0][0] == ("step" if options else "label")
        assert {len(row) for row in rows} == {len(rows[0])}
        assert len(rows) > 1


def test_report_is_written(trace, tmp_path):
    path = tmp_path / "report.html"
    said = pagedcli("explain", trace, "-o", path).stderr
    assert str(path) in said
    assert path.read_text().startswith("<!doctype html>")
    assert "there is no folder" in pagedcli("explain", trace, "-o", tmp_path / "no" / "report.html", expect=2).stderr


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


def test_trace_of_one_step_as_json(prompts):
    result = pagedcli("trace", prompts, *FAST, "--step", "2", "--format", "json")
    assert json.loads(result.stdout)["step"] == 2
    assert (
        "this run has no step 500: the last one is "
        in pagedcli("trace", prompts, *FAST, "--step", "500", expect=2).stderr
    )


def test_trace_without_a_terminal_is_plain_on_stderr(prompts):
    result = pagedcli("trace", prompts, *FAST)
    assert result.stdout == ""
    assert "\x1b" not in result.stderr
    assert "idle: nothing is in use, ok" in result.stderr
    assert "in use 0 (0 shared) + cached " in result.stderr
