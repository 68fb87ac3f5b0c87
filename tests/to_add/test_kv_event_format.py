"""To add a format of KV events, touch kvevents/formats.py: a class and its entry in FORMATS.

The fake format here is registered there, and nowhere else: lines of
{"added": [hash, ...], "size": tokens, "after": hash}.
"""

import json

import pytest
from cli_harness import pagedcli

from pagedcli.kvevents import formats, wire
from pagedcli.kvevents.capture import CaptureWriter

LINES = [{"added": ["secret-1", "secret-2"], "size": 4}, {"added": ["secret-3"], "size": 4, "after": "secret-2"}]


class Fake:
    def owns(self, plain):
        return isinstance(plain, dict) and "added" in plain

    def is_line(self, record):
        return self.owns(record)

    def read(self, plain):
        stored = wire.Stored(plain["added"], plain.get("after"), plain["size"], None, "GPU", None, None, {})
        return wire.Batch([stored])

    def redacted(self, plain, redactor):
        after = redactor.hashes(plain.get("after"))
        return {"added": redactor.hashes(plain["added"]), "size": plain["size"], "after": after}


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "fake", Fake())
    path = tmp_path / "fake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def figures(path):
    return json.loads(pagedcli("attach", path, "--format", "json").stdout)


def test_a_file_of_it_is_recognised_and_every_command_reads_it(lines, tmp_path):
    assert (figures(lines)["num_unique_blocks"], figures(lines)["num_malformed"]) == (3, 0)
    assert "resident 3" in pagedcli("trace", lines).stdout
    assert json.loads(pagedcli("explain", lines, "--format", "json").stdout)["num_unique_blocks"] == 3
    pagedcli("explain", lines, "-o", tmp_path / "page.html")
    assert "KV events of fake.jsonl" in (tmp_path / "page.html").read_text()
    assert json.loads(pagedcli("simulate", lines, "--format", "json").stdout)["format"] == "kv-events"


def test_a_recording_of_it_is_redacted_and_folds_to_the_same_counts(lines, tmp_path):
    path = tmp_path / "recording.jsonl"
    with CaptureWriter(path, ["tcp://host:1"], tokens=False) as writer:
        for number, line in enumerate(LINES):
            writer.write([b"kv", number.to_bytes(8, "big"), json.dumps(line).encode()], float(number))
    recorded, original = figures(path), figures(lines)
    for key in ("num_unique_blocks", "num_resident_tokens", "num_malformed"):
        assert recorded[key] == original[key]
    assert recorded["caches"][0]["max_depth_blocks"] == 3
    assert "secret" not in pagedcli("attach", path).stdout
    assert "secret" in pagedcli("attach", lines).stdout
