"""`generate --ray` on a local cluster of two workers: the rows of one process, also under kills."""

import os
import random
import signal
import sys
import time
from importlib.util import find_spec

import pytest
from cli_harness import pagedcli
from ray_harness import (
    FLAGS,
    descendants,
    finish,
    kill_cluster,
    num_journal_bytes,
    rows,
    said,
    start,
    wait_for,
    workers_of,
    write_rows,
)

# not imported here: test_ray_data sets ray's environment first
if find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'pagedcli[ray]'", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]

NUM_WORKER_KILLS = int(os.environ.get("PAGEDCLI_WORKER_KILLS", "3"))
NUM_DRIVER_KILLS = int(os.environ.get("PAGEDCLI_DRIVER_KILLS", "2"))


def in_one_process(folder, *arguments, name="in.jsonl", out="single.jsonl", expect=3):
    pagedcli("generate", folder / name, "-o", folder / out, *FLAGS, *arguments, expect=expect)


def check_merged(folder, *, expect=3):
    pagedcli("merge", folder / "parts", "-o", folder / "merged.jsonl", "--overwrite", expect=expect)
    assert rows(folder / "merged.jsonl") == rows(folder / "single.jsonl")
    assert not list((folder / "parts").glob("*.partial"))
    assert not (folder / "parts" / ".work").exists()


def test_two_workers_give_the_rows_of_one_process(tmp_path):
    write_rows(tmp_path / "in.jsonl", 60)
    in_one_process(tmp_path, "--max-tokens", 8)
    process = start(tmp_path, "--max-tokens", 8)
    finish(process, tmp_path, expect=3)
    check_merged(tmp_path)
    assert said(tmp_path, r"(\d+) of [\d,]+ rows failed") == "11"
    assert "worker 2" in (tmp_path / "stderr.txt").read_text()
    assert not descendants(process.pid), "the cluster has ended with its driver"


def test_kills_of_workers_lose_no_row_and_double_none(tmp_path):
    write_rows(tmp_path / "in.jsonl", 40 + 60 * NUM_WORKER_KILLS)
    arguments = ("--max-tokens", 60, "--ignore-eos")
    in_one_process(tmp_path, *arguments)
    process, rng, num_kills, num_bytes = start(tmp_path, *arguments), random.Random(0), 0, 0
    while num_kills < NUM_WORKER_KILLS and process.poll() is None:
        more = num_bytes + rng.randint(1, 3000)
        if not wait_for(lambda: num_journal_bytes(tmp_path) > more, seconds=120, process=process):  # noqa: B023
            break
        alive = workers_of(process)
        if alive:
            os.kill(rng.choice(alive), signal.SIGKILL)
            num_kills += 1
            num_bytes = num_journal_bytes(tmp_path)
    finish(process, tmp_path, expect=3)
    print(f"{num_kills} workers were killed")
    assert num_kills >= min(NUM_WORKER_KILLS, 2)
    check_merged(tmp_path)


def test_kills_of_the_driver_lose_no_row_and_double_none(tmp_path):
    write_rows(tmp_path / "in.jsonl", 100 + 60 * NUM_DRIVER_KILLS)
    arguments = ("--max-tokens", 60, "--ignore-eos")
    in_one_process(tmp_path, *arguments)
    rng, num_kills, num_bytes = random.Random(0), 0, 0
    process = start(tmp_path, *arguments)
    while num_kills < NUM_DRIVER_KILLS:
        more = num_bytes + rng.randint(1, 3000)
        if rng.random() < 0.8:  # the others are killed while they start
            wait_for(lambda: num_journal_bytes(tmp_path) > more, seconds=120, process=process)  # noqa: B023
        else:
            time.sleep(rng.uniform(0, 10))
        if process.poll() is not None:
            break
        cluster = descendants(process.pid)
        process.kill()
        process.wait()
        time.sleep(rng.uniform(0, 1))  # what is left of the dead run may still write
        process = start(tmp_path, *arguments, "--resume")
        kill_cluster(cluster)
        num_kills, num_bytes = num_kills + 1, num_journal_bytes(tmp_path)
    finish(process, tmp_path, expect=3)
    print(f"the driver was killed {num_kills} times")
    assert num_kills >= min(NUM_DRIVER_KILLS, 2)
    check_merged(tmp_path)


def test_an_interrupted_run_says_how_to_continue_and_does(tmp_path):
    write_rows(tmp_path / "in.jsonl", 300)
    arguments = ("--max-tokens", 60, "--ignore-eos")
    process = start(tmp_path, *arguments)
    assert wait_for(lambda: num_journal_bytes(tmp_path) > 5000, seconds=120, process=process)
    os.kill(process.pid, signal.SIGINT)
    finish(process, tmp_path, expect=130)
    assert said(tmp_path, r"continue with: (.*)").endswith("--resume")
    # The thread that waited for parts did not start a cluster of its own: Ray says this of a start in a thread.
    assert "SIGTERM handler" not in (tmp_path / "stderr.txt").read_text()
    pagedcli("merge", tmp_path / "parts", "-o", tmp_path / "merged.jsonl", expect=2)
    said_twice = pagedcli(
        "generate", tmp_path / "in.jsonl", "-o", tmp_path / "parts", "--ray", *FLAGS, *arguments, expect=2
    ).stderr
    assert "--resume" in said_twice
    other = pagedcli(
        "generate", tmp_path / "in.jsonl", "-o", tmp_path / "parts", "--ray", "--resume", "--temperature", 1, expect=2
    ).stderr
    assert "temperature" in other
    in_one_process(tmp_path, *arguments)
    finish(start(tmp_path, *arguments, "--resume"), tmp_path, expect=3)
    check_merged(tmp_path)


def test_an_engine_that_cannot_start_ends_the_run_with_its_reason(tmp_path):
    write_rows(tmp_path / "in.jsonl", 10)
    finish(start(tmp_path, "--num-kvcache-blocks", "999999999"), tmp_path, expect=1)
    assert "GiB of memory are available" in said(tmp_path, r"error: (.*)")
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
