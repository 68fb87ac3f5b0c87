"""URLs in place of files: inputs, outputs, recordings and models in fsspec's file system in memory."""

import fsspec
import pytest
from cli_harness import FAST, PROMPTS, invoke, pagedcli, rows_of
from harness.engine import without_run_dependent_fields

from pagedcli.buckets import Folder, open_url, reaching
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.models.hub import resolve_model

BAD = PROMPTS + '{"prompt": 7}\n'


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes this another machine, whose cache it returns."""

    def other(name):
        monkeypatch.setattr("pagedcli.buckets.cache_home", lambda: tmp_path / name)
        return tmp_path / name

    other("cache")
    return other


@pytest.fixture
def bucket(machine):
    """An empty bucket, memory://b, with prompts in two files."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pipe({"/b/in/1.jsonl": PROMPTS.encode(), "/b/in/2.jsonl": BAD.encode(), "/b/in/notes.txt": b"no rows"})
    return files


def names(bucket):
    return sorted(name.removeprefix("/b/") for name in bucket.find("/b") if "/in/" not in name)


def rows(text):
    return [without_run_dependent_fields(row) for row in rows_of(text)]


def in_one_file(tmp_path, *flags):
    """What a run on files of this machine writes."""
    (tmp_path / "in.jsonl").write_text(PROMPTS + BAD)
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *FAST, *flags, expect=3)
    return rows(tmp_path / "out.jsonl")


def test_what_a_run_writes_is_in_the_bucket_and_nothing_of_it_here(bucket, machine, tmp_path):
    extra = ("--record", "memory://b/run.jsonl.zst", "--summary-json", "memory://b/s.json", "--metrics", "memory://b/m")
    generate = ("generate", "memory://b/in/*.jsonl", "-o", "memory://b/out.jsonl", *FAST)
    assert "rows: memory://b/out.jsonl\n" in pagedcli(*generate, *extra, expect=3).stderr
    assert names(bucket) == ["m", "out.jsonl", "out.jsonl.run.json", "run.jsonl.zst", "s.json"]
    assert rows(bucket.cat("/b/out.jsonl").decode()) == in_one_file(tmp_path)
    assert not list((machine("cache") / "buckets").iterdir())

    already = "error: the output: memory://b/out.jsonl already exists\n"
    assert pagedcli(*generate, expect=2).stderr.startswith(already)
    told = pagedcli(*generate, "--resume", expect=3).stderr
    assert "memory://b/out.jsonl is complete (7 rows, 1 failed): nothing to resume\n" in told
    assert "7 of 7 rows are equal" in pagedcli("verify", "memory://b/out.jsonl", tmp_path / "out.jsonl").stdout
    assert pagedcli("trace", "memory://b/run.jsonl.zst", "--check").stdout.startswith("memory://b/run.jsonl.zst: ok")
    pagedcli("explain", "memory://b/run.jsonl.zst", "-o", "memory://b/page.html")
    assert b"<html" in bucket.cat("/b/page.html")
    reuse = pagedcli("generate", "memory://b/in/", "-o", "memory://b/2.jsonl", *FAST, "--reuse", generate[3], expect=3)
    assert "(6 of them from earlier outputs)" in reuse.stderr
    trace = pagedcli("generate", "memory://b/in/", "-o", "memory://b/run.jsonl.zst", *FAST, "--overwrite", expect=2)
    assert "memory://b/run.jsonl.zst already exists, and is a trace\n" in trace.stderr


def test_a_stopped_run_continues_on_another_machine(bucket, machine, tmp_path):
    generate = ("generate", "memory://b/in/2.jsonl", "-o", "memory://b/out.jsonl", "--max-num-seqs", "1", *FAST[:4])
    pagedcli(*generate, "--max-errors", 1, expect=1)
    assert names(bucket) == ["out.jsonl.partial"]
    assert list(machine("cache").rglob("out.jsonl.partial")), "the next run here needs no copy"
    machine("another")
    left = "error: memory://b/out.jsonl.partial contains the rows of a stopped run\n"
    assert pagedcli(*generate, expect=2).stderr.startswith(left)
    assert "\nresuming: " in pagedcli(*generate, "--resume", expect=3).stderr
    assert names(bucket) == ["out.jsonl", "out.jsonl.run.json"]
    assert rows(bucket.cat("/b/out.jsonl").decode()) == [
        row | {"index": row["index"] - 3} | ({"error": row["error"] | {"line": 4}} if row["error"] else {})
        for row in in_one_file(tmp_path)[3:]
    ]


def test_a_bucket_that_fails_at_the_end_loses_nothing(bucket, monkeypatch):
    generate = ("generate", "memory://b/in/1.jsonl", "-o", "memory://b/out.jsonl", *FAST)
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "put_file", lambda *_: (_ for _ in ()).throw(OSError("connection lost")))
        said = pagedcli(*generate, expect=1).stderr
    assert "error: cannot write memory://b/out.jsonl: connection lost\nhint: check the network" in said
    assert said.endswith(", and sent by the same command with --resume\n")
    assert "rows: " not in said
    assert names(bucket) == []
    assert "is complete (3 rows): nothing to resume\n" in pagedcli(*generate, "--resume").stderr
    assert names(bucket) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "memory://b/no.jsonl"], "there is no memory://b/no.jsonl"),
        (["generate", "memory://b/in/*.csv"], "no file matches memory://b/in/*.csv"),
        (["generate", "zz://b/in.jsonl"], "zz://b/in.jsonl: fsspec knows no zz://"),
        (["generate", "memory://b/in/", "-o", "memory://b/"], "memory://b/ is a folder"),
        (["generate", "memory://b/a", "-o", "memory://b/a"], "two files of this command are the same, memory://b/a"),
        (["generate", "memory://b/in/", "--prefix-store", "memory://b/s"], "prefix_store cannot be used: its blocks"),
        (["generate", "in.jsonl", "--record", "file:///a.jsonl"], "file:/a.jsonl is a file of this machine"),
        (["store", "memory://b/s"], "memory://b/s must be on this machine: no URL can be given here"),
        (["verify", "memory://b/x", "y"], "there is no memory://b/x"),
        (["generate", "memory://b/in/", "-m", "memory://b/in"], "memory://b/in has no config.json"),
        (["generate", "memory://b/in/", "-m", "memory://b/m"], "no model folder at memory://b/m"),
    ],
)
def test_what_cannot_be_a_url_says_so(bucket, arguments, said):
    assert f"error: {said}" in invoke(*arguments).stderr


@pytest.mark.parametrize("name", ["my-bucket", "logs-401"])
def test_a_file_that_is_missing_is_missing_whatever_its_bucket_is_called(name):
    with pytest.raises(FileNotFoundError):
        Folder(f"memory://{name}/job").read("queue.json")
    with pytest.raises(UsageError, match=f"there is no memory://{name}/x"):
        open_url(f"memory://{name}/x")


@pytest.mark.parametrize(("said", "hint"), [
    ("part-00401 is torn", None), ("error 401", "these credentials"), ("Access Denied", "these credentials"),
    ("The specified bucket does not exist", "create the bucket"),
])  # fmt: skip
def test_hints_follow_what_a_service_says(said, hint):
    with pytest.raises(PagedcliError) as error, reaching("s3://b/x", "read"):
        raise FileNotFoundError(said) if "bucket" in said else OSError(said)
    assert error.value.hint is None if hint is None else error.value.hint.startswith(hint)


def test_a_model_is_copied_once(bucket):
    demo = resolve_model("builtin")
    bucket.put([str(each) for each in demo.iterdir()], "/b/m/")
    folder = resolve_model("memory://b/m", weights=False)
    assert not (folder / "model.safetensors").exists()
    assert resolve_model("memory://b/m") == folder
    assert (folder / "model.safetensors").read_bytes() == (demo / "model.safetensors").read_bytes()
