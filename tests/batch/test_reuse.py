"""--reuse: rows of an earlier output are taken over where the line and the settings are equal; the file is the same."""

import json

import pytest
from cli_harness import FAST, pagedcli, write_rows
from harness.engine import comparable_rows

CHAT = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}}
LINES = [
    {"id": "a", "prompt": "Once upon a time", "label": "x", "n": 2},
    {"id": "b", "prompt": "The fox", "temperature": 1.0},  # draws by its place
    {"id": "c", "prompt": "The fox", "logprobs": 2, "stop": ["the"]},
    {"id": "d", "prompt": 5},
    {"custom_id": "e", **CHAT},
]
LATER = [LINES[0] | {"id": "new", "label": 7}, LINES[1], *LINES[2:], LINES[4] | {"custom_id": "f"}, {"prompt": "Hello"}]
LATER[2:2] = [{"prompt": "Lily"}]
FLAGS = (*FAST, "--keep", "label")
NUM_EQUAL = 5


def generate(path, name, *flags, lines=LATER):
    return pagedcli(
        "generate", write_rows(path / "in.jsonl", lines), "-o", path / name, *FLAGS, *flags, expect=3
    ).stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the outputs of the earlier lines, and of the later ones without anything taken over."""
    made = tmp_path_factory.mktemp("reuse")
    for name in ("old.jsonl", "old.parquet"):
        generate(made, name, lines=LINES)
    for name in ("plain.jsonl", "plain.parquet"):
        generate(made, name)
    return made


@pytest.mark.parametrize(("old", "new"), [("jsonl", "jsonl"), ("jsonl", "parquet"), ("parquet", "parquet")])
def test_equal_rows_are_taken_over_and_the_output_is_that_of_a_whole_run(folder, old, new):
    said = generate(folder, f"{old}.{new}", "--reuse", folder / f"old.{old}", "--summary-json", folder / f"{old}{new}")
    assert f"({NUM_EQUAL} of them from earlier outputs)" in said
    assert json.loads((folder / f"{old}{new}").read_text())["rows_reused"] == NUM_EQUAL
    assert "8 of 8" in pagedcli("verify", folder / f"{old}.{new}", folder / f"plain.{new}", "--keep", "label").stdout
    if new == "jsonl":
        assert comparable_rows(folder / "jsonl.jsonl") == comparable_rows(folder / "plain.jsonl")


def test_other_settings_reuse_nothing_and_are_named(folder, tmp_path):
    said = generate(tmp_path, "out.jsonl", "--top-p", "0.5", "--reuse", folder / "old.jsonl")
    assert "is reused, as settings differ; sampling.top_p: 1.0 -> 0.5\n" in said
    assert "earlier outputs" not in said


@pytest.mark.parametrize(
    ("name", "change", "why", "code"),
    [
        ("old.jsonl", lambda old: "{}\n", "is not what its run wrote", 1),
        ("old.jsonl.run.json", lambda old: old.replace('"keys"', '"older"'), "as an earlier version wrote it", 2),
    ],
)
def test_a_file_that_is_no_output_of_this_version_is_refused(folder, tmp_path, name, change, why, code):
    for each in ("old.jsonl", "old.jsonl.run.json"):
        (tmp_path / each).write_bytes((folder / each).read_bytes())
    (tmp_path / name).write_text(change((folder / name).read_text()))
    flags = ("-o", tmp_path / "out.jsonl", *FLAGS, "--reuse", tmp_path / "old.jsonl")
    said = pagedcli("generate", folder / "in.jsonl", *flags, expect=code).stderr
    assert why in said
