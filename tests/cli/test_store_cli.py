"""`pagedcli store`, and generate with --prefix-store."""

import csv
import json
import os
import re
import shutil
from itertools import count
from pathlib import Path

import pytest
from cli_harness import FAST, pagedcli, rows_of

from pagedcli.batch.job import Job
from pagedcli.cli.session import run_job
from pagedcli.config import load_config
from pagedcli.printable import byte_text, percent_text

LONG = "The quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a store that two runs of the same prompts have used, and their results."""
    folder = tmp_path_factory.mktemp("runs")
    prompts, store = folder / "in.jsonl", folder / "store"
    prompts.write_text("".join(json.dumps({"prompt": f"{LONG}{i}"}) + "\n" for i in range(6)))
    kept = ("--prefix-store", store, "--prefix-store-size", "10MiB", "--verify", 2)
    results = [
        pagedcli("generate", prompts, "-o", folder / n, *FAST, *kept, "--all", "--record", folder / f"{n}.trace.jsonl")
        for n in ("a", "b")
    ]
    return folder, results


def details(path):
    return [row["usage"]["prompt_tokens_details"] for row in rows_of(path)]


def test_a_second_run_reads_what_the_first_wrote_and_gives_the_same_rows(runs):
    folder, (_, second) = runs
    assert second.stderr.count("each alone and without cached blocks: the same bits") == 1
    assert [each["disk_cached_tokens"] for each in details(folder / "a")] == [0] * 6
    assert [each["disk_cached_tokens"] for each in details(folder / "b")] == [160, 0, 0, 0, 0, 0]
    assert [row["text"] for row in rows_of(folder / "a")] == [row["text"] for row in rows_of(folder / "b")]


def test_a_second_run_without_a_store_says_why_it_was_not_faster(runs, tmp_path, capsys):
    folder = runs[0]

    def told_by(output, **flags):
        flags = {f"engine.{name}": value for name, value in flags.items()} | {"sampling.max_tokens": 3}
        job = Job(load_config(None, flags), str(folder / "in.jsonl"), output, overwrite=True)
        assert run_job(job, clock_ns=count(step=10**9).__next__) == 0  # a second per look at it
        return " ".join(
            re.findall(r"The run of .* (?:computed here|ended with it)\.", capsys.readouterr().err.replace("\n", " "))
        )

    assert told_by(tmp_path / "first") == ""
    told = told_by(tmp_path / "first")
    assert told.startswith(f"The run of {tmp_path / 'first'} had the same prompts, but its KV cache ended with it: ")
    assert "--prefix-store DIR keeps what prompts share, up to 160 of the " in told
    assert told_by(tmp_path / "first", enable_prefix_caching=False).endswith("but its KV cache ended with it.")
    assert told_by(tmp_path / "second", prefix_store=str(tmp_path / "store")) == ""
    assert told_by(tmp_path / "third", dtype="float32") == ""


def test_its_trace_is_lawful_and_explained(runs):
    folder, _ = runs
    assert "blocks_restored" in (folder / "b.trace.jsonl").read_text()
    pagedcli("trace", folder / "b.trace.jsonl", "--check")
    totals = json.loads(pagedcli("explain", folder / "b.trace.jsonl", "--format", "json").stdout)["totals"]
    tokens = {row["part"]: row["tokens"] for row in totals}
    assert tokens["disk_hit"] == 160
    assert tokens["ideal"] >= tokens["disk_hit"] + tokens["hit"]
    whole = ("hit", "disk_hit", "late_hit", "evicted", "in_flight", "first_seen", "last_block", "last_token")
    assert sum(tokens.get(part, 0) for part in whole) == tokens["num_tokens"]
    told = pagedcli("explain", folder / "b.trace.jsonl").stdout
    hits = (tokens["hit"] + tokens["disk_hit"]) / tokens["num_tokens"]
    assert told.startswith(f"{percent_text(hits)} of ")
    pagedcli("explain", folder / "b.trace.jsonl", "-o", folder / "b.html")


def test_diff_names_the_tokens_that_were_read_from_disk(runs):
    folder, _ = runs
    found = json.loads(pagedcli("diff", folder / "a.trace.jsonl", folder / "b.trace.jsonl", "--format", "json").stdout)
    causes = {row["cause"]: row for row in found["causes"]}
    assert causes["store"]["detail"] == "0 -> 160 tokens"
    assert causes["store"]["computed_tokens"] == -160
    assert causes["store"]["hit_rate"] == found["changes"]["hit_rate"] > 0
    assert "unexplained" not in causes


@pytest.mark.quick("csv")
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_have_the_tokens_from_disk(runs, ending, tmp_path):
    folder, _ = runs
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    out, kept = tmp_path / f"c.{ending}", ("--prefix-store", folder / "store")
    pagedcli("generate", folder / "in.jsonl", "-o", out, *FAST, *kept)
    pagedcli("generate", folder / "in.jsonl", "-o", tmp_path / f"without.{ending}", *FAST)
    if ending == "csv":
        counts, without = (list(csv.DictReader(path.open())) for path in (out, tmp_path / "without.csv"))
    else:
        import pyarrow.parquet as pq

        counts, without = (
            [row["usage"]["prompt_tokens_details"] for row in pq.read_table(path).to_pylist()]
            for path in (out, tmp_path / "without.parquet")
        )
    assert [int(row["disk_cached_tokens"]) for row in counts] == [160, 0, 0, 0, 0, 0]
    assert "disk_cached_tokens" not in without[0]


def test_a_folder_that_cannot_be_written_loses_nothing_and_says_so(runs, tmp_path, monkeypatch):
    store = tmp_path / "store"
    shutil.copytree(runs[0] / "store", store)
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: not (Path(path) == store and mode & os.W_OK) and real(path, mode)
    )
    assert "cannot be written: nothing was removed" in pagedcli("store", store, "--trim", "0", expect=2).stderr
    assert len(list(store.iterdir())) == 1


def test_a_run_says_how_many_files_its_bound_removed(runs, tmp_path):
    shutil.copytree(runs[0] / "store", tmp_path / "store")
    bound = ("--prefix-store", tmp_path / "store", "--prefix-store-size", "1")
    said = pagedcli("generate", runs[0] / "in.jsonl", *FAST, *bound).stderr
    assert "  removed: 1 file when the folder was opened (size, days without use, or damage)" in said


def test_names_of_folders_do_not_steer_the_terminal(runs, tmp_path):
    store = tmp_path / "a\x1b[31mb"
    shutil.copytree(runs[0] / "store", store)
    for flags in ((), ("--check",), ("--trim", "0")):
        result = pagedcli("store", store, *flags)
        assert "\x1b" not in result.stdout + result.stderr


def test_a_bound_that_others_exceed_is_said(runs, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(runs[0] / "store", store)
    (store / "notes").write_bytes(bytes(100_000))
    kept = ("--prefix-store", store, "--prefix-store-size", "50KiB")
    result = pagedcli("generate", runs[0] / "in.jsonl", "-o", tmp_path / "out.jsonl", *FAST, *kept)
    assert "more than the bound: other files in the folder" in result.stderr
    assert "10 blocks read" in result.stderr
    assert "leave no room" in pagedcli("store", store, "--trim", "50KiB", expect=2).stderr
    listed = pagedcli("store", store).stdout
    assert "files of others: 97.7 KiB" in listed
    assert f"1 file of {byte_text(next(store.glob('*.kept')).stat().st_size)}" in listed


def test_a_damaged_file_is_found_and_trimming_leaves_what_is_not_its_own(runs, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(runs[0] / "store", store)
    [file] = store.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "other bytes than were written" in pagedcli("store", store, "--check", expect=1).stdout
    (store / "notes.txt").write_text("mine")
    assert pagedcli("store", store, "--trim", "1KiB").stdout.startswith("1 file removed, 4 B left")
    assert (store / "notes.txt").read_text() == "mine"
    assert "there is no folder" in pagedcli("store", tmp_path / "none", expect=2).stderr
