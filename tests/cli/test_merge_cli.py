"""`pagedcli merge`: shards become the file that one run would have written, or nothing."""

import pytest
from cli_harness import FAST, pagedcli, rows_of, write_rows

from pagedcli.batch.journal import record_path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three shards of ten lines, one of which is bad, and what one run makes of them."""
    folder = tmp_path_factory.mktemp("shards")
    lines = [{"prompt": f"Story {i}", "id": f"r{i}", "temperature": 1.0, "n": 1 + i % 2} for i in range(9)]
    prompts = write_rows(folder / "in.jsonl", [*lines[:4], "{broken", *lines[4:]])
    pagedcli("generate", prompts, "-o", folder / "whole.jsonl", *FAST, expect=3)
    shards = [folder / f"{i}.jsonl" for i in (1, 2, 3)]
    for number, path in enumerate(shards, 1):
        pagedcli("generate", prompts, "-o", path, *FAST, "--shard", f"{number}/3", expect=3 if number == 2 else 0)
    return folder, shards


@pytest.fixture
def shards(made, tmp_path):
    """Copies, which a test may damage."""
    copies = []
    for path in made[1]:
        for source in (path, record_path(path)):
            (tmp_path / source.name).write_bytes(source.read_bytes())
        copies.append(tmp_path / path.name)
    return copies


def refused(shards, out, *flags, expect=2):
    result = pagedcli("merge", *shards, "-o", out, *flags, expect=expect)
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.endswith(".tmp")] == []
    return result.stderr


def test_merged_shards_are_what_one_run_writes(made, shards, tmp_path):
    out = tmp_path / "out.jsonl"
    result = pagedcli("merge", shards[2], shards[0], shards[1], "-o", out, expect=3)
    assert "10 rows of 3 shards, input order; 1 failed" in result.stderr
    assert out.read_bytes() == (made[0] / "whole.jsonl").read_bytes()


def test_a_shard_without_its_record_says_how_to_get_one(shards, tmp_path):
    record_path(shards[1]).unlink()
    said = refused(shards, tmp_path / "out.jsonl", "--overwrite")
    assert "put 2.jsonl.run.json back next to 2.jsonl, move 2.jsonl away, or use generate --overwrite" in said


def test_a_shard_that_was_cut_or_changed_is_refused(shards, tmp_path):
    whole = shards[1].read_bytes()
    for content in (whole[:-20], whole.replace(b"Story", b"story"), whole + b"{}\n", whole[: whole.index(b"\n") + 1]):
        if content != whole:
            shards[1].write_bytes(content)
            assert "is not what its run wrote" in refused(shards, tmp_path / "out.jsonl", expect=1)


def test_an_unfinished_shard_says_how_to_finish_it(shards, tmp_path):
    shards[0].rename(shards[0].with_name("1.jsonl.partial"))
    assert "--resume" in refused(shards, tmp_path / "out.jsonl")


def test_a_file_without_description_is_no_shard(made, shards, tmp_path):
    assert "generate --shard" in refused([made[0] / "whole.jsonl"], tmp_path / "out.jsonl")
    record_path(shards[0]).write_text("{}")
    assert "does not describe a run" in refused(shards, tmp_path / "out.jsonl")


def test_shards_in_completion_order_follow_each_other(tmp_path):
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": f"Story {i}"} for i in range(5)])
    shards = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, path in enumerate(shards, 1):
        pagedcli("generate", prompts, "-o", path, *FAST, "--shard", f"{number}/2", "--order", "completion")
    result = pagedcli("merge", *shards, "-o", tmp_path / "out.jsonl")
    assert "shard after shard, in order of completion" in result.stderr
    assert {row["index"] for row in rows_of(tmp_path / "out.jsonl")} == set(range(5))
