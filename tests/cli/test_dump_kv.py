"""`--dump-kv` of generate, trace and replay: one name, one meaning, tables or data."""

import json

import pytest
from cli_harness import FAST, PROMPTS, pagedcli, rows_of

TABLES = ("steps", "sequences", "blocks", "lookups")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Prompts, their rows, a trace, and the tables of the run as data."""
    folder = tmp_path_factory.mktemp("dump")
    (folder / "in.jsonl").write_text(PROMPTS)
    files = ("--record", folder / "run.jsonl", "--dump-kv", folder / "kv.jsonl")
    result = pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", *FAST, *files)
    assert f"KV tables: {folder}/kv.{{steps,sequences,blocks,lookups}}.jsonl" in result.stderr
    assert result.stdout == "", "no table"
    return folder


def tables(path):
    found = {table: rows_of(path.with_name(f"{path.stem}.{table}.jsonl")) for table in TABLES}
    for row in found["steps"]:
        del row["start_ms"]
    return found


def test_all_three_commands_write_the_same_data_and_print_the_same_tables(run, tmp_path):
    pagedcli("trace", run / "run.jsonl", "--dump-kv", tmp_path / "replay.jsonl")
    traced = ("trace", run / "in.jsonl", *FAST)
    pagedcli(*traced, "--dump-kv", tmp_path / "trace.jsonl")
    assert tables(run / "kv.jsonl") == tables(tmp_path / "replay.jsonl") == tables(tmp_path / "trace.jsonl")
    printed = pagedcli("trace", run / "run.jsonl", "--dump-kv").stdout
    assert printed == pagedcli(*traced, "--dump-kv").stdout
    assert printed == pagedcli("generate", run / "in.jsonl", "-o", "/dev/null", *FAST, "--dump-kv").stdout
    assert printed == pagedcli("trace", run / "run.jsonl", "--dump-kv").stdout
    assert printed.count("as its forward pass sees the cache") == len(rows_of(run / "kv.steps.jsonl"))


def test_a_bare_flag_takes_no_prompts_file_for_its_own(run):
    given = run / "in.jsonl"
    before = sorted(path.name for path in run.iterdir())
    for arguments in (
        ("generate", "--dump-kv", given, "-o", "/dev/null", *FAST),
        ("generate", "-o", "/dev/null", *FAST, "--dump-kv", given),
        ("trace", "--dump-kv", given, *FAST),
        ("trace", "--dump-kv", run / "run.jsonl"),
        ("trace", "--dump-kv", "--", run / "run.jsonl"),
    ):
        assert "Sequences (new, cached, tokens and out: in tokens)\n" in pagedcli(*arguments).stdout
    assert sorted(path.name for path in run.iterdir()) == before


def test_other_formats_have_the_same_steps_and_no_file_is_replaced(run):
    trace = run / "run.jsonl"
    lines = pagedcli("trace", trace, "--dump-kv", "--format", "json").stdout.splitlines()
    assert [json.loads(line)["step"] for line in lines] == [row["step"] for row in rows_of(run / "kv.steps.jsonl")]
    generated = ("generate", run / "in.jsonl", "-o", "/dev/null", *FAST, "--dump-kv", "--format", "md")
    assert pagedcli(*generated).stdout == pagedcli("trace", trace, "--format", "md").stdout
    said = pagedcli("trace", trace, "--dump-kv", run / "kv.jsonl", expect=2).stderr
    assert "kv.steps.jsonl already exists" in said


def test_what_a_resumed_run_adds_is_a_part_of_its_own(run, tmp_path):
    flags = ("-o", tmp_path / "out.jsonl", *FAST, "--dump-kv", tmp_path / "kv.csv")
    pagedcli("generate", run / "in.jsonl", *flags)
    again = pagedcli("generate", run / "in.jsonl", *flags, "--resume")
    assert "nothing to resume" in again.stderr
    assert not (tmp_path / "kv.part2.steps.csv").exists(), "a run without events leaves no files"
    assert "already exists" in pagedcli("generate", run / "in.jsonl", *flags, expect=2).stderr
    pagedcli("generate", run / "in.jsonl", *flags, "--overwrite")
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.run.json").unlink()
    pagedcli("generate", run / "in.jsonl", *flags, "--resume")
    assert (tmp_path / "kv.part2.steps.csv").exists()
