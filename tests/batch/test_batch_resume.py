"""A run that is killed at any moment and resumed gives the file that an uninterrupted run gives."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from conftest import forget_library
from harness.engine import comparable_rows, is_complete

from pagedcli.batch.job import Job
from pagedcli.batch.journal import journal_path, record_path
from pagedcli.batch.rows import reasons_of
from pagedcli.cli.session import run_job
from pagedcli.config import load_config
from pagedcli.errors import UsageError
from pagedcli.events import PrefixLookedUp, RequestFinished

FLAGS = {
    "sampling.max_tokens": 12,
    "sampling.temperature": 1.0,
    "sampling.ignore_eos": True,
    "engine.dtype": "float32",
    "engine.max_num_seqs": 4,
    "engine.num_kvcache_blocks": 12,
}


def lines():
    """All kinds of rows: plain, OpenAI, n > 1, greedy and sampled, guided by a grammar, and bad ones."""
    for i in range(60):
        if i % 10 == 3:
            yield "{broken"
        elif i % 10 == 6:
            body = {"messages": [{"role": "user", "content": f"Tell me about number {i}."}], "max_tokens": 6}
            yield json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        elif i % 10 == 8:
            yield json.dumps({"prompt": f"Row {i}", "regex": "[a-z]{4,30}", "n": 2, "ignore_eos": False})
        else:
            yield json.dumps({"prompt": f"Story number {i}: Once upon a time", "n": 2 if i % 7 == 0 else 1, "id": i})


def job(folder: Path, *, resume: bool) -> Job:
    reuse = tuple(folder.glob("old.jsonl"))
    return Job(load_config(None, FLAGS), str(folder / "in.jsonl"), folder / "out.jsonl", resume=resume, reuse=reuse)


def run_in_child(folder: Path, resume: bool) -> None:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(folder / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os._exit(run_job(job(folder, resume=resume)))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder, rows and duration of a run in peace."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    start_s = time.monotonic()
    assert run_job(job(folder, resume=False)) == 3, "some lines are bad on purpose"
    return folder, comparable_rows(folder / "out.jsonl"), time.monotonic() - start_s


def size_of(path):
    """Bytes; -1 for a file that is not there (any more)."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def killed_and_resumed(folder, processes, rng, num_kills, size, longest_wait_s):
    """Run, kill when the journal has grown to a random size or at a random time, resume, until it is done."""
    out = folder / "out.jsonl"
    kills = 0
    while not is_complete(out):  # a kill between the rename and the end of the journal leaves both: resumed, too
        process = processes.Process(target=run_in_child, args=(folder, kills > 0))
        process.start()
        if kills < num_kills:
            partial = journal_path(out)
            target = rng.uniform(0, size)
            while process.is_alive() and size_of(partial) < target:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, longest_wait_s))
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:  # it was done before
                break
            kills += 1
            if partial.exists() and rng.random() < 0.5:  # and as if the disk had lost its last sector
                os.truncate(partial, rng.randint(0, size_of(partial)))
        else:
            process.join()
            assert process.exitcode == 3, (folder / "stderr.txt").read_text()
    return kills


def check_kills(uninterrupted, processes, tmp_path, *, seed, num_kills):
    _, rows, duration_s = uninterrupted
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    size = (uninterrupted[0] / "out.jsonl").stat().st_size * 1.2
    rng, longest_wait_s = random.Random(seed), min(0.03, duration_s / 20)  # on a fast machine a run is over soon
    kills = killed_and_resumed(tmp_path, processes, rng, num_kills, size, longest_wait_s)
    resumed = comparable_rows(tmp_path / "out.jsonl")
    assert len(resumed) == 60, "no row is lost and none is there twice"
    assert resumed == rows
    assert not journal_path(tmp_path / "out.jsonl").exists()
    return kills


def check_many_kills(uninterrupted, processes, tmp_path, *, num_kills, per_run, old=()):
    """Runs until so many were killed; some are done before the kill."""
    total = 0
    for seed in range(20 * num_kills):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for path in old:
            shutil.copy(path, folder)
        total += check_kills(uninterrupted, processes, folder, seed=seed, num_kills=per_run)
        if total >= num_kills:
            return
    pytest.fail(f"only {total} of {20 * num_kills} runs could be killed before their end")


@pytest.mark.long
def test_a_run_killed_three_times_gives_the_same_file(uninterrupted, processes, tmp_path):
    check_many_kills(uninterrupted, processes, tmp_path, num_kills=3, per_run=3)


@pytest.mark.long
def test_a_run_that_takes_over_rows_and_is_killed_ten_times_gives_the_same_file(uninterrupted, processes, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in [*lines()][:30]))
    old = tmp_path / "old.jsonl"
    assert run_job(replace(job(tmp_path, resume=False), output=old)) == 3
    check_many_kills(uninterrupted, processes, tmp_path, num_kills=10, per_run=3, old=[old, record_path(old)])


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_lose_no_row_and_double_none(uninterrupted, processes, tmp_path):
    check_many_kills(uninterrupted, processes, tmp_path, num_kills=100, per_run=5)


def test_two_interrupts_stop_at_once_and_keep_the_finished_rows(tmp_path, monkeypatch, capsys):
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    from pagedcli.batch import run as run_module

    calls = []

    def finish(self, row):
        calls.append(row)
        original(self, row)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    original = run_module.BatchRun._write_success
    monkeypatch.setattr(run_module.BatchRun, "_write_success", finish)
    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path, resume=False))
    assert "continue with:" in capsys.readouterr().err
    from pagedcli.batch.journal import Journal

    header = json.loads(journal_path(tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert Journal.resume(journal_path(tmp_path / "out.jsonl"), header["fingerprint"]).num_rows >= 10


def texts(row):
    """What a row says, without the ids, which digest the input."""
    body = (row.get("response") or {}).get("body", row)
    return [body.get(name) for name in ("text", "outputs", "choices", "error")]


@pytest.mark.quick("5")
@pytest.mark.parametrize("kept", [0, 5])
def test_resume_from_a_shorter_stdin_is_refused_and_keeps_the_journal(uninterrupted, tmp_path, monkeypatch, kept):
    """A pipe that delivers fewer rows than the journal has answers to is another input, not the end of the run."""
    every_line = [line + "\n" for line in lines()]

    def stdin(some):
        path = tmp_path / "stdin"
        path.write_text("".join(some))
        monkeypatch.setattr("sys.stdin", path.open())
        return Job(load_config(None, FLAGS), "-", tmp_path / "out.jsonl", resume=journal_path(out).exists())

    out = tmp_path / "out.jsonl"
    calls = iter(range(10**6))
    assert run_job(stdin(every_line), stop_requested=lambda: next(calls) > 40) == 130
    journal = journal_path(out).read_bytes()
    num_rows = journal.count(b"\n") - 1
    assert num_rows > kept
    with pytest.raises(UsageError, match=f"the input ends after {kept} rows") as raised:
        run_job(stdin(every_line[:kept]))
    assert "--overwrite" in raised.value.hint
    assert journal_path(out).read_bytes() == journal
    assert not out.exists()
    assert run_job(stdin(every_line)) == 3
    assert [texts(row) for row in comparable_rows(out)] == [texts(row) for row in uninterrupted[1]]


def test_a_run_is_not_resumed_with_other_kernels(tmp_path, monkeypatch, capsys):
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    steps = iter(range(100))
    assert run_job(job(tmp_path, resume=False), stop_requested=lambda: next(steps) > 30) != 0
    partial = journal_path(tmp_path / "out.jsonl")
    written = partial.read_bytes()

    with monkeypatch.context() as patch:
        patch.setenv("PAGEDCLI_NATIVE", "build")
        patch.setenv("CXX", "/nowhere/g++")
        forget_library()
        with pytest.raises(UsageError, match=r"kernels: .* -> torch"):
            run_job(job(tmp_path, resume=True))
    forget_library()
    assert partial.read_bytes() == written
    header, _, rows = written.partition(b"\n")
    content = json.loads(header)
    assert content["fingerprint"].pop("kernels")
    partial.write_bytes(json.dumps(content).encode() + b"\n" + rows)  # as older versions wrote it
    assert run_job(job(tmp_path, resume=True)) == 3
    assert is_complete(tmp_path / "out.jsonl")
    assert run_job(job(tmp_path, resume=True)) == 3
    assert "nothing to resume" in capsys.readouterr().err


@pytest.mark.parametrize("reorder", ["none", "prefix"])
def test_runs_that_max_time_stops_finish_what_they_began_and_resume_to_the_rows_of_one_in_peace(
    tmp_path, uninterrupted, reorder
):
    (tmp_path / "in.jsonl").write_text("".join(line + "\n" for line in lines()))
    config = load_config(None, FLAGS | {"run.max_time": "0.4s", "run.reorder": reorder})
    codes, clock, ran = [130], count(step=10**6), []  # a millisecond per look at it
    while codes[-1] == 130:
        events = []
        one = replace(job(tmp_path, resume=bool(ran)), loaded=config, watch=ran.append)
        codes.append(run_job(one, emit=events.append, clock_ns=clock.__next__))
        begun = {event.seq_id for event in events if isinstance(event, PrefixLookedUp)}
        ended = {event.seq_id: event.reason for event in events if isinstance(event, RequestFinished)}
        assert begun, "each of them gets further"
        assert "abort" not in {ended[seq_id] for seq_id in begun}
    assert (codes[-1], len(codes) > 4) == (3, True)
    assert comparable_rows(tmp_path / "out.jsonl") == uninterrupted[1]
    written = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert ran[-1].ended.reasons == Counter(reason for row in written for reason in reasons_of(row))
