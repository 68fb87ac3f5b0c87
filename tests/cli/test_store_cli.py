"""`pagedcli store`, and generate with --prefix-store."""

import json

import pytest
from cli_harness import FAST, pagedcli, rows_of

LONG = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a store that two runs of the same prompts have used, and their results."""
    folder = tmp_path_factory.mktemp("runs")
    prompts, store = folder / "in.jsonl", folder / "store"
    prompts.write_text("".join(json.dumps({"prompt": f"{LONG}{i}"}) + "\n" for i in range(6)))
    kept = ("--prefix-store", store, "--prefix-store-size", "10MiB", "--verify", 2)
    results = [
        pagedcli("generate", prompts, "-o", folder / n, *FAST, *kept, "--record", folder / f"{n}.trace.jsonl")
        for n in ("a", "b")
    ]
    return folder, results


def details(path):
    return [row["usage"]["prompt_tokens_details"] for row in rows_of(path)]


def test_a_second_run_reads_what_the_first_wrote_and_gives_the_same_rows(runs):
    folder, (first, second) = runs
    assert "0 blocks read (0 B)" in first.stderr
    assert "10 blocks read" in second.stderr
    assert "160 tokens of these, from the prefix store" in second.stderr
    assert second.stderr.count("each alone and without cached blocks: the same bits") == 1
    assert [each["disk_cached_tokens"] for each in details(folder / "a")] == [0] * 6
    assert [each["disk_cached_tokens"] for each in details(folder / "b")] == [160, 0, 0, 0, 0, 0]
    assert [row["text"] for row in rows_of(folder / "a")] == [row["text"] for row in rows_of(folder / "b")]


def test_its_trace_is_lawful_and_explained(runs):
    folder, _ = runs
    assert "blocks_restored" in (folder / "b.trace.jsonl").read_text()
    pagedcli("replay", folder / "b.trace.jsonl", "--check")
    assert pagedcli("explain", folder / "b.trace.jsonl", "--format", "json").stdout
    pagedcli("report", folder / "b.trace.jsonl", "-o", folder / "b.html")


def test_ls_check_trim_and_clear(runs, tmp_path):
    folder, _ = runs
    store = folder / "store"
    [settings] = json.loads(pagedcli("store", "ls", store, "--format", "json").stdout)["settings"]
    assert (settings["num_files"], settings["differs"]) == (1, "")
    assert pagedcli("store", "check", store).stdout == "1 file as written, 0 not\n"
    [file] = store.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "other bytes than were written" in pagedcli("store", "check", store, expect=1).stdout
    (store / "notes.txt").write_text("mine")
    assert pagedcli("store", "trim", store, "--size", "1KiB").stdout.startswith("1 file removed, 4 B left")
    assert pagedcli("store", "clear", store).stdout.startswith("0 files removed")
    assert (store / "notes.txt").read_text() == "mine"
    assert "there is no folder" in pagedcli("store", "ls", tmp_path / "none", expect=2).stderr
