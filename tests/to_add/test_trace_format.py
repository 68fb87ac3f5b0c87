"""To add a trace format for `simulate`, touch formats.py: a struct and its entry in FORMATS.

The fake format here is registered there, and nowhere else.
"""

import json
from pathlib import Path

import pytest
import typer
from cli_harness import pagedcli

from pagedcli.cli import simulate_flags
from pagedcli.simulation import formats

DOCS = Path(__file__).parents[2] / "docs" / "predict.md"


class Fake(formats.TraceRow, rename={"input_length": "length", "hash_ids": "words"}, kw_only=True):
    """{"words", "length"}: 4 tokens per hash, no output lengths, no times."""

    keys = frozenset(("words", "length"))
    default_hash_size = 4
    input_length: int
    hash_ids: list[int | str]


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "fake", Fake)
    path = tmp_path / "fake.jsonl"
    rows = [{"words": ["a", f"{index}"], "length": 8} for index in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"words": 1, "length": 8}\n')
    return path


def test_it_is_found_by_its_keys_and_simulated_in_every_way(trace, tmp_path):
    for flags in ((), ("--trace-format", "fake"), ("--no-schedule",), ("--picture", tmp_path / "hits.svg")):
        found = json.loads(pagedcli("simulate", trace, "--format", "json", "--pool", "10", *flags, expect=3).stdout)
        assert (found["format"], found["num_requests"], found["num_bad_lines"]) == ("fake", 5, 1)
        assert found["pools"][0]["hit_rate_blocks"] > 0
    assert "Trace (fake)" in pagedcli("simulate", trace, "--all", expect=3).stdout


def test_its_name_is_in_the_help_and_in_the_hint_for_unknown_names(trace):
    assert "fake" in formats.format_names()
    said = pagedcli("simulate", trace, "--trace-format", "other", expect=2).stderr
    assert "kvcache-simulator, fake, prompts" in said


def test_help_and_docs_name_every_format():
    declared = simulate_flags.SimulateOptions.__dataclass_fields__["trace_format"].type
    option = next(each for each in declared.__metadata__ if isinstance(each, typer.models.OptionInfo))
    text = DOCS.read_text(encoding="utf-8").lower()
    for name in formats.format_names():
        assert name in option.help
        assert name.replace("kv-events", "kv events") in text
