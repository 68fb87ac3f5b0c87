"""`pagedcli trace` and `explain` of recorded runs, and of recordings of KV events."""

import csv
import io
import json
import re

import pytest
from cli_harness import FAST, pagedcli
from harness.core import simulated, write
from kv_event_harness import CLEARED, message, record, removed, stored

from pagedcli.kvevents.capture import CaptureReader, stored_runs


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


ROUNDS = [
    message(0, stored(1, 2, 3)),
    message(1, removed(3), removed(2)),
    message(2, stored(2, parent=1), stored(3, parent=2)),
    message(3, CLEARED),
    message(5, stored(1)),
]


@pytest.fixture
def recording(tmp_path):
    return record(tmp_path / "events.jsonl.zst", ROUNDS)


def test_explain_says_why_blocks_were_stored_again_and_what_a_larger_cache_would_have_kept(recording):
    document = json.loads(pagedcli("explain", recording, "--format", "json").stdout)
    assert [document[f"num_blocks_stored_again_{cause}"] for cause in ("evicted", "cleared", "restarted")] == [2, 1, 0]
    assert {row["reason"]: row["lookups"] for row in document["reasons"]} == {
        "evicted": 1, "cleared": 1, "no_shared_prefix": 1,
    }  # fmt: skip
    assert [(row["num_more_blocks"], row["num_blocks_kept"]) for row in document["larger_cache"]] == [(1, 1), (2, 2)]
    said = pagedcli("explain", recording).stdout
    assert re.search(r"the content had been cached, but was evicted +1", said)


def test_explain_shows_where_prompts_diverge_in_text(tmp_path):
    from pagedcli.cli.recording import kv_decoder

    size, decode = 8, kv_decoder("builtin")
    text = {decode((token,)): token for token in range(300, 0, -1)}
    cached, prompt = ([text[c] for c in f"{'at 15:'}{end}"] for end in ("09", "10"))
    events = [stored(n, tokens=ids, block_size=size) for n, ids in enumerate((cached, prompt), 1)]
    path = record(tmp_path / "e.jsonl", [message(0, *events)])
    said = pagedcli("explain", path, "--tokenizer", "builtin", "--format", "json").stdout
    (row,) = [row for row in json.loads(said)["lookups"] if row["divergence"] is not None]
    expected = 'first divergence at token 6: earlier "at 15:09" (request 0) vs prompt "at 15:10"'
    assert row["divergence"] == expected


def test_without_token_ids_no_text_can_be_shown(tmp_path):
    private = record(tmp_path / "private.jsonl", ROUNDS[:1], tokens=False)
    assert "no token ids" in pagedcli("explain", private, "--tokenizer", "builtin", expect=2).stderr


def test_a_simulation_can_take_the_computed_blocks_as_work(recording):
    runs = list(stored_runs(CaptureReader(recording)))
    assert [(time_s, run.parent, run.hashes) for run, time_s, _ in runs] == [
        (0.0, None, [1, 2, 3]), (2.0, 1, [2]), (2.0, 2, [3]), (4.0, None, [1]),
    ]  # fmt: skip
    assert list(runs[1][0].token_ids) == [2, 2]


def test_private_ids_are_in_no_byte_of_the_trace(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"id": "code-Tavek", "prompt": "Once"}\n')
    for name, flags in (("named", ()), ("private", ("--no-ids",))):
        pagedcli("generate", tmp_path / "in.jsonl", "--record", tmp_path / f"{name}.trace.jsonl", *FAST, *flags)
        assert (b"code-Tavek" in (tmp_path / f"{name}.trace.jsonl").read_bytes()) == (name == "named")
