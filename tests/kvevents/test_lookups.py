"""The requests that a recording shows."""

import msgspec
import pytest
from cli_harness import pagedcli
from kv_event_harness import message, stored

from pagedcli.answers.why import Reasons
from pagedcli.kvevents.capture import CaptureReader, CaptureWriter
from pagedcli.kvevents.lookups import read_lookups


def record(path, batches, *, tokens=True):
    with CaptureWriter(path, ["tcp://host:1"], tokens=tokens) as writer:
        for number, events in enumerate(batches):
            writer.write(message(number, *events), float(number))
    return path


def salts(found):
    return Reasons("", found.lookups(), found.block_size).salts()


def chains(path):
    found = read_lookups(CaptureReader(path))
    return [(request.num_hit, request.num_prompt, found.depth(request.end)) for request in found.requests]


def test_what_comes_before_a_stored_run_was_found(tmp_path):
    path = record(
        tmp_path / "a.jsonl",
        [
            [stored(1, 2, 3)],
            [stored(4, 5, parent=2)],
            [stored(6, parent=5)],
            [stored(7, parent=6)],
            [stored(8, 9, parent=3)],
        ],
    )
    # the second hits 2 blocks and generates 2 alone; the third continues the first after a while, and hits 3
    assert chains(path) == [(0, 3, 3), (2, 4, 6), (3, 5, 5)]


def test_the_next_chunk_of_a_prompt_is_the_same_request(tmp_path):
    path = record(
        tmp_path / "a.jsonl", [[stored(1, 2)], [stored(3, 4, parent=2)], [stored(9, 10)], [stored(5, 6, parent=4)]]
    )
    assert chains(path) == [(0, 4, 4), (0, 2, 2), (4, 6, 6)]


@pytest.mark.parametrize("tokens", [True, False])
def test_salts_keep_requests_apart_and_have_hit_rates_of_their_own(tmp_path, tokens):
    """The same three blocks for tenant a, twice for tenant b, and without a salt."""
    one, other = ({"extra_keys": [[salt], None, None]} for salt in ("tenant-a", "tenant-b"))
    same = [7, 7, 8, 8, 9, 9]
    batches = [
        [stored(1, 2, 3, tokens=same, **one)],
        [stored(11, 12, 13, tokens=same, **other)],
        [stored(14, parent=13, tokens=[5, 5]), stored(15, 16, parent=13, tokens=[6, 6, 7, 7])],
        [stored(21, 22, 23, tokens=same)],
    ]
    path = record(tmp_path / "a.jsonl", batches, tokens=tokens)
    found = read_lookups(CaptureReader(path))
    assert [request.num_hit for request in found.requests] == [0, 0, 3, 0]
    assert [each.reason for each in found.lookups()] == [
        "no_shared_prefix",
        "different_salt",
        "not_seen_before",
        "different_salt",
    ]
    rows = {row.salt: (row.num_lookups, row.num_tokens, row.tokens_hit) for row in salts(found)}
    assert rows == {"1": (1, 6, 0), "2": (2, 16, 6), "none": (1, 6, 0)}
    assert salts(read_lookups(CaptureReader(record(tmp_path / "b.jsonl", [[stored(1, 2)]])))) == []
    document = msgspec.json.decode(pagedcli("explain", path, "--format", "json").stdout)
    assert [row["salt"] for row in document["salts"]] == ["2", "1", "none"]
    assert "tenant" not in pagedcli("attach", path).stdout
