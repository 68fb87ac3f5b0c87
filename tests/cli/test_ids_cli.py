"""The user's own ids in every view of a run."""

import json
import re

import pytest
from cli_harness import FAST, pagedcli

IDS = ("code-Mirano", "code-Tavek", 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts with ids, and a trace with and without them."""
    folder = tmp_path_factory.mktemp("ids")
    rows = [{"id": row_id, "prompt": f"Once upon a time {row_id}"} for row_id in IDS]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "The fox"}]))
    for name, flags in (("named", ()), ("private", ("--no-ids",))):
        pagedcli("generate", folder / "p.jsonl", "--record", folder / f"{name}.jsonl", *FAST, *flags)
    return folder


def test_every_view_names_requests_by_the_users_id(folder, tmp_path):
    trace = folder / "named.jsonl"
    lines = pagedcli("trace", trace).stdout
    assert "admit seq 1 (code-Tavek): " in lines
    assert "admit seq 3: " in lines  # a row without an id
    assert re.search(r"^ *0 +code-Mirano +prefill", pagedcli("trace", trace, "--step", "0").stdout, re.MULTILINE)
    document = json.loads(pagedcli("trace", trace, "--step", "0", "--format", "json").stdout)
    assert [(seq["request_id"], seq["row_id"]) for seq in document["sequences"]] == [
        ("0", "code-Mirano"), ("1", "code-Tavek"), ("2", "7"), ("3", None),
    ]  # fmt: skip
    names = pagedcli("trace", trace, "--export", "perfetto").stdout
    assert "seq 2 (request 7)" in names
    assert "seq 3 (request 3)" in names
    pagedcli("explain", trace, "-o", tmp_path / "report.html")
    assert '"code-Tavek"' in (tmp_path / "report.html").read_text()
    assert " code-Tavek " in pagedcli("explain", trace, "--lookups").stdout


@pytest.mark.parametrize("name", ["code-Tavek", "1", "seq:1"])
def test_a_request_is_found_by_id_number_and_sequence(folder, name):
    trace = folder / "named.jsonl"
    lookups = json.loads(pagedcli("explain", trace, "--request", name, "--format", "json").stdout)["lookups"]
    assert [(row["seq_id"], row["label"]) for row in lookups] == [(1, "code-Tavek")]
    followed = pagedcli("trace", trace, "--follow", name).stdout
    assert "add seq 1 (code-Tavek): request 1, " in followed
    assert "code-Mirano" not in followed


def test_private_ids_are_in_no_byte_of_the_trace(folder):
    trace = folder / "private.jsonl"
    assert b"code-" in (folder / "named.jsonl").read_bytes()
    assert b"code-" not in trace.read_bytes()
    assert "admit seq 1: " in pagedcli("trace", trace).stdout
    assert "seq 1" in pagedcli("trace", trace, "--follow", "1").stdout


def test_following_a_live_run(folder):
    out = pagedcli("trace", folder / "p.jsonl", *FAST, "--dump-kv", "--follow", "code-Tavek").stdout
    assert re.search(r"Prefix lookups of this step\n(.*\n)+? +1 +code-Tavek +new ", out)
    assert "code-Mirano" not in out
    refused = pagedcli("trace", folder / "p.jsonl", *FAST, "--step", "0", "--follow", "seq:99", expect=2)
    assert "no request 'seq:99' in this run" in refused.stderr
