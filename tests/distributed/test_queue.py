"""A run as a queue: every part is made, once, whichever of its workers live, in a folder and in a bucket."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import typer
import yaml
from bucket_harness import s3_server
from cli_harness import pagedcli
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from ray_harness import FLAGS, rows, write_rows

from pagedcli.batch.journal import RECORD_VERSION, RunRecord, journal_path, write_record
from pagedcli.batch.lines import InputScan
from pagedcli.buckets import Folder
from pagedcli.cli.main import app
from pagedcli.distributed.leases import LEASE_S
from pagedcli.distributed.parts import ROWS, SCHEMA_VERSION, Manifest, PartFolder
from pagedcli.distributed.queue import Queue, Terms, lease_name, next_part

NUM_KILLS = int(os.environ.get("PAGEDCLI_WORKER_KILLS", "6"))
NUM_PARTS = 5
numbers = count()


class FakeWorker:
    """Writes parts without an engine; one that is stopped has written a journal."""

    def __init__(self, folder):
        self.parts, self.is_alive = PartFolder(folder), True

    def run_part(self, number):
        path = self.parts.part(number)
        (path if self.is_alive else journal_path(path)).write_text("row\n")
        record = RunRecord(
            pagedcli_run=RECORD_VERSION, order="input", num_rows=1, num_failed_rows=0, digest=f"{next(numbers):032}",
            input=InputScan("", 1), fingerprint={"shard": self.parts.manifest.shard(number)},
        )  # fmt: skip
        write_record(path, record)
        return self.is_alive


class LeasesOfWorkers(RuleBasedStateMachine):
    """Workers that take parts, make them, stand still, die and are replaced, each with a clock of its own."""

    def __init__(self):
        super().__init__()
        self.root = TemporaryDirectory()
        self.now_s, self.renewed_s = 0.0, {}  # by lease
        root = f"memory://queue{next(numbers)}"
        manifest = Manifest(
            pagedcli_parts=SCHEMA_VERSION, created_s=0, fingerprint={}, suffix=".jsonl", num_rows=[1] * NUM_PARTS,
            costs=[1] * NUM_PARTS, local_time=datetime(2026, 1, 1),
        )  # fmt: skip
        self.folder, self.terms = Folder(f"{root}/job"), Terms({"-o": f"{root}/out"}, "inputs", manifest)
        self.folder.write(f"inputs/{ROWS}", bytes(8 * NUM_PARTS))
        for number in range(NUM_PARTS):
            self.folder.write(f"inputs/part-{number:05}.in", b"")
        self.workers = [self.new_worker(off_s) for off_s in (0, 3600, -7)]

    def new_worker(self, off_s):
        local = Path(self.root.name, str(next(numbers)))
        local.mkdir()
        queue = Queue(self.folder, self.terms, clock=lambda: self.now_s + off_s)
        queue.open(local)
        return queue, FakeWorker(local), []

    def teardown(self):
        """Everybody else dies, and one worker completes the run."""
        queue, worker, _ = self.new_worker(0)
        for _ in range(3):
            while (lease := queue.take()) is not None:
                queue.run(lease, worker)
            self.now_s += LEASE_S
        assert queue.left == []
        for number in range(NUM_PARTS):
            name = f"part-{number:05}.jsonl"
            record = msgspec.json.decode(queue.output.read(f"{name}.run.json"), type=RunRecord)
            staged = queue.output.read(f".work/{lease_name(number)}/{record.digest}")
            assert queue.output.read(name) == staged, "the part is the one that its record describes"
            assert all(other.records.get(number, record) == record for other, *_ in self.workers), "it was the first"
        queue.clear()
        left = {name.partition(".")[0] for name in queue.output.names()}
        assert left == {"manifest", "rows", *(f"part-{number:05}" for number in range(NUM_PARTS))}
        self.root.cleanup()

    @rule(number=st.integers(0, 2))
    def take(self, number):
        queue, _, held = self.workers[number]
        if (lease := queue.take()) is not None:
            others = [each for *_, leases in self.workers for each in leases if each.name == lease.name]
            assert all(self.now_s - self.renewed_s[each] >= LEASE_S for each in others), "its holder lives"
            held.append(lease)
            self.renewed_s[lease] = self.now_s

    @rule(number=st.integers(0, 2), ends=st.sampled_from(["made", "stopped", "dead before the part appears"]))
    def make(self, number, ends):
        queue, worker, held = self.workers[number]
        if not held:
            return
        worker.is_alive = ends != "stopped"
        with pytest.MonkeyPatch.context() as patch, suppress(ZeroDivisionError):
            if ends.startswith("dead"):
                patch.setattr(Folder, "copy", lambda *_: 1 / 0)
            queue.run(held.pop(0), worker)
        if ends.startswith("dead"):
            self.die(number)

    @rule(number=st.integers(0, 2))
    def renew(self, number):
        queue, _, held = self.workers[number]
        for lease in held:
            queue.leases.renew(lease)
            self.renewed_s[lease] = self.now_s

    @rule(number=st.integers(0, 2))
    def die(self, number):
        self.workers[number] = self.new_worker(number * 1000)

    @rule(seconds=st.sampled_from([1, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds):
        self.now_s += seconds


def test_of_two_workers_with_the_same_part_the_first_record_counts():
    run = LeasesOfWorkers()
    for number in [0] * NUM_PARTS + [1]:  # the second worker sees that all have been taken
        run.take(number)
    run.wait(LEASE_S)
    run.take(1)
    (first, *_), (_, second, _) = run.workers[:2]

    def make_after_the_other(number):
        run.make(0, "made")
        first.update()
        return FakeWorker.run_part(second, number)

    second.run_part = make_after_the_other
    run.make(1, "made")
    assert list(first.records) == [0]
    run.teardown()


TestLeasesOfWorkers = LeasesOfWorkers.TestCase
TestLeasesOfWorkers.settings = settings(max_examples=5, stateful_step_count=20, deadline=None)


def test_workers_take_neighbours_and_share_the_widest_gap():
    assert [next_part(free, last) for free, last in [([0, 1, 2], None), ([1, 2, 3, 4], None), ([1, 2, 9], 8)]] == [
        0,
        3,
        9,
    ]


ARGUMENTS = (*FLAGS, "--max-tokens", "20")


def write_all_kinds(path, num_rows):
    """Greedy and sampled rows, bad ones, n = 2 and 3, and scored continuations."""
    write_rows(path, num_rows)
    with path.open("a") as file:
        for i in range(num_rows // 8):
            prompt = f"Story {i % 7}: Once upon a time there was a cat"
            file.write(json.dumps({"prompt": prompt, "n": 3, "temperature": 1.0, "logprobs": 2}) + "\n")
            file.write(json.dumps({"prompt": prompt, "continuations": [" and a dog", " that slept"]}) + "\n")


def check_merged(folder, out):
    """What is in the output is a run whose rows are those of one process."""
    out, copy = Folder(out), Path(folder, "parts")
    for name in out.names():
        copy.mkdir(exist_ok=True)
        out.fetch(name, copy / name)
    pagedcli("merge", copy, "-o", folder / "merged.jsonl", "--overwrite", expect=3)
    assert rows(folder / "merged.jsonl") == rows(folder / "single.jsonl")


@pytest.mark.long
def test_a_worker_makes_the_rows_of_one_run_and_says_what_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all_kinds(tmp_path / "in.jsonl", 24)
    pagedcli("generate", "in.jsonl", "-o", "single.jsonl", *ARGUMENTS, expect=3)
    command = ("generate", "in.jsonl", "-o", "out", "--queue", "job", *ARGUMENTS)
    pagedcli(*command, "--max-errors", 1, expect=1)
    status = ("generate", "--queue", "job", "--status")
    assert "of 16 parts are done" in pagedcli(*status).stdout
    assert json.loads(pagedcli(*status, "--format", "json").stdout)["held"] == []
    assert "all 30 rows in 16 parts are done" in pagedcli(*command, expect=3).stderr
    check_merged(tmp_path, "out")
    assert "0 to do" in pagedcli(*command, expect=3).stderr
    assert "16 of 16 parts are done (30 of 30 rows, 4 failed)." in pagedcli(*status).stdout
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    other = pagedcli(*command, "--temperature", 1, expect=2).stderr
    assert all(word in other for word in ("temperature", "input: in.jsonl of"))
    assert "another run" in pagedcli(*command[:4], "--queue", "new", expect=2).stderr
    assert "--status needs --queue" in pagedcli("generate", "--status", expect=2).stderr


def start(folder, url, *, last="-", lease_s=1.0, clock_off_s=0, name="in.jsonl"):
    """A worker, as a process."""
    worker = [sys.executable, Path(__file__).with_name("queue_worker.py"), lease_s, last, clock_off_s]
    command = [*worker, "generate", folder / name, "-o", f"{url}/out", "--queue", f"{url}/job", *ARGUMENTS]
    with (folder / "stderr.txt").open("ab") as stderr:
        return subprocess.Popen([*map(str, command)], stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(folder, workers):
    codes = [worker.wait(timeout=300) for worker in workers]
    assert set(codes) == {3}, f"exit codes {codes}\n{(folder / 'stderr.txt').read_text()[-3000:]}"


@pytest.fixture(scope="module")
def bucket():
    with s3_server():
        yield "s3://bkt"


@pytest.fixture(params=["s3", "folder"])
def url(request, tmp_path):
    """A place for a queue and its output."""
    return f"{request.getfixturevalue('bucket') if request.param == 's3' else tmp_path}/{tmp_path.name}"


@pytest.fixture
def single(tmp_path):
    write_all_kinds(tmp_path / "in.jsonl", 120)
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "single.jsonl", *ARGUMENTS, expect=3)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 4])
def test_processes_share_the_rows_of_one_run(single, url, num_workers):
    finish(single, [start(single, url, clock_off_s=3600 * number) for number in range(num_workers)])
    check_merged(single, f"{url}/out")


@pytest.mark.slow
def test_a_worker_that_stood_still_while_its_lease_expired_changes_nothing(single, url):
    workers = [start(single, url), start(single, url)]
    leases = Folder(f"{url}/job")
    while len(leases.names("lease")) < 4:
        time.sleep(0.05)
    os.kill(workers[0].pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(workers[0].pid, signal.SIGCONT)
    finish(single, workers)
    check_merged(single, f"{url}/out")


@pytest.mark.slow
def test_a_bucket_that_fails_every_20th_request_loses_nothing(single, bucket, monkeypatch):
    app = pytest.importorskip("moto.moto_server.werkzeug_app", reason="pip install 'moto[s3]' flask flask-cors")
    serve, requests = app.DomainDispatcherApplication.__call__, count(1)

    def serve_or_fail(self, environ, start_response):
        if next(requests) % 20:
            return serve(self, environ, start_response)
        start_response("503 Service Unavailable", [])
        return [b""]

    monkeypatch.setattr(app.DomainDispatcherApplication, "__call__", serve_or_fail)
    finish(single, [start(single, f"{bucket}/fails") for _ in range(2)])
    check_merged(single, f"{bucket}/fails/out")
    assert next(requests) > 400


@pytest.mark.slow
def test_kills_of_workers_lose_no_row_and_double_none(single, url):
    """A third of them when a part has been sent without its record, a third at a renewal, a third at any time."""
    rng, kills = random.Random(0), dict.fromkeys(("create:.run.json", "write:lease/", "-"), 0)
    for run in count():
        workers, is_complete = {}, False
        while workers or not is_complete:
            num_planned = sum(kills.values()) + sum(kind is not None for kind, _ in workers.values())
            while len(workers) < 3 and not is_complete:
                kind = min(kills, key=kills.get) if num_planned < NUM_KILLS else None
                last = f"{kind}:{rng.randrange(4)}" if kind not in (None, "-") else "-"
                end_s = time.monotonic() + rng.uniform(1, 9) if kind == "-" else float("inf")
                workers[start(single, f"{url}/{run}", last=last)] = kind, end_s
                num_planned += kind is not None
            time.sleep(0.05)
            for worker, (kind, end_s) in list(workers.items()):
                if time.monotonic() > end_s:
                    worker.kill()
                if (code := worker.poll()) is not None:
                    assert code in (3, -signal.SIGKILL), (single / "stderr.txt").read_text()[-3000:]
                    is_complete |= code == 3
                    kills[kind or "-"] += code != 3
                    del workers[worker]
        check_merged(single, f"{url}/{run}/out")
        print(f"run {run}: {kills}")
        if sum(kills.values()) >= NUM_KILLS:
            return


EXAMPLES = Path(__file__).parents[2] / "examples" / "queue"
CONTAINER = {"name": str, "image": str, "command": [str], "args": [str], "resources": {"limits": dict}}
POD = {"restartPolicy": str, "terminationGracePeriodSeconds": int, "serviceAccountName": str, "containers": [CONTAINER]}
JOB = {"parallelism": int, "completions": int, "backoffLimit": int, "template": {"spec": POD}}
FIELDS = {  # what may be in an example, from the reference of its program
    "kubernetes.yaml": {"apiVersion": str, "kind": str, "metadata": {"name": str}, "spec": JOB},
    "skypilot.yaml": {"resources": {"accelerators": str, "use_spot": bool}, "envs": dict, "setup": str, "run": str},
}


def check_fields(value, fields):
    if isinstance(fields, dict):
        assert set(value) <= set(fields)
        for name, each in value.items():
            check_fields(each, fields[name])
    elif isinstance(fields, list):
        for each in value:
            check_fields(each, fields[0])
    else:
        assert isinstance(value, fields)


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_have_the_fields_of_their_programs_and_commands_of_this_one(path):
    text = path.read_text()
    if path.suffix == ".yaml":
        check_fields(yaml.safe_load(text), FIELDS[path.name])
    (line,) = re.findall(r"pagedcli (generate .*?) \|\|", text.replace("\\\n", ""))
    _, command, words = typer.main.get_command(app).resolve_command(None, shlex.split(line))
    given = command.make_context("generate", words).params
    assert all(given[name] for name in ("queue", "output_file", "engine__model"))
