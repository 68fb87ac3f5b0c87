"""Runs from and into a bucket of a real S3 server: the rows of a run on files, also after kills; what errors say."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_harness import s3_server
from cli_harness import pagedcli
from ray_harness import FLAGS, finish, rows, start, table_rows, wait_for, workers_of, write_rows

from pagedcli.files import cache_home

pytestmark = pytest.mark.slow
PROGRAM = "from pagedcli.cli import urls, main; urls._SEND_EVERY_S = 0.1; main.run()"


@pytest.fixture(scope="module")
def s3():
    with s3_server() as files:
        yield files


def test_rows_of_jsonl_csv_and_parquet_are_those_of_files(s3, tmp_path):
    write_rows(tmp_path / "in.jsonl", 40)
    s3.put(f"{tmp_path}/in.jsonl", "bkt/in.jsonl")
    flags = ("--max-tokens", 8, "--output-token-ids", *FLAGS)
    for ending in ("jsonl", "jsonl.gz", "csv", "parquet"):
        for where in (f"{tmp_path}", "s3://bkt"):
            pagedcli("generate", f"{where}/in.jsonl", "-o", f"{where}/out.{ending}", *flags, expect=3)
        told = pagedcli("verify", f"s3://bkt/out.{ending}", tmp_path / f"out.{ending}").stdout
        assert told.startswith("40 of 40 rows are equal (compared: token ids)")
    for i, code in ((1, 0), (2, 3)):
        shard = ("-o", f"s3://bkt/shard-{i}.jsonl", "--shard", f"{i}/2")
        pagedcli("generate", "s3://bkt/in.jsonl", *shard, *flags, expect=code)
    pagedcli("merge", "s3://bkt/shard-*.jsonl", "-o", "s3://bkt/merged.jsonl", expect=3)
    assert "40 of 40 rows" in pagedcli("verify", "s3://bkt/merged.jsonl", tmp_path / "out.jsonl").stdout
    (tmp_path / "t").mkdir()
    for number in range(2):
        table = [
            {"id": i, "prompt": f"Story {i} of a fox", "other": "x" * i} for i in range(20 * number, 20 * number + 20)
        ]
        pq.write_table(pa.Table.from_pylist(table), tmp_path / "t" / f"{number}.parquet", row_group_size=7)
    s3.put(f"{tmp_path}/t/", "bkt/t/", recursive=True)
    for where in (f"{tmp_path}", "s3://bkt"):
        pagedcli("generate", f"{where}/t", "-o", f"{where}/tables.parquet", *flags)
    s3.get("bkt/tables.parquet", f"{tmp_path}/fetched.parquet")
    assert table_rows(tmp_path / "fetched.parquet") == table_rows(tmp_path / "tables.parquet")


def test_a_killed_run_continues_on_another_machine(s3, tmp_path):
    write_rows(tmp_path / "in.jsonl", 300)
    s3.put(f"{tmp_path}/in.jsonl", "bkt/long.jsonl")
    flags = [*FLAGS, "--max-tokens", "40", "--ignore-eos"]
    command = [sys.executable, "-c", PROGRAM, "generate", "s3://bkt/long.jsonl", "-o", "s3://bkt/killed.jsonl", *flags]

    def machine(name):
        """The environment of a machine: with a cache of its own, but for the compiled kernels."""
        (tmp_path / name / "pagedcli").mkdir(parents=True)
        (tmp_path / name / "pagedcli" / "native").symlink_to(cache_home() / "native")
        return os.environ | {"XDG_CACHE_HOME": f"{tmp_path}/{name}"}

    for name, least, resume in (("first", 5000, []), ("second", 15_000, ["--resume"])):
        process = subprocess.Popen([*command, *resume], env=machine(name), stderr=subprocess.DEVNULL)
        while process.poll() is None and s3.du("bkt/killed.jsonl.partial") < least:
            time.sleep(0.02)
        assert process.poll() is None, "it is killed during the run"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not s3.exists("bkt/killed.jsonl")
    done = subprocess.run([*command, "--resume"], env=machine("third"), capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert int(re.search(r"resuming: (\d+) rows done", done.stderr)[1]) > 10
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags, expect=3)
    s3.get("bkt/killed.jsonl", f"{tmp_path}/killed.jsonl")
    assert rows(tmp_path / "killed.jsonl") == rows(tmp_path / "out.jsonl")
    assert sorted(s3.find("bkt/", prefix="killed")) == ["bkt/killed.jsonl", "bkt/killed.jsonl.run.json"]


NETWORK = "check the network, and AWS_ENDPOINT_URL if it is set; then run the command again"
LOGIN = "log in as for the service's own tools (AWS_PROFILE, gcloud auth, hf auth login)"
CREATE = "create the bucket, or correct its name"
ERRORS = [
    ("s3://no/in.jsonl", {}, "read s3://no/in.jsonl: The specified bucket does not exist", CREATE),
    ("x.jsonl -o s3://no/o", {}, "list s3://no/o*: The specified bucket does not exist", CREATE),
    (
        "s3://b/x",
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
        "read s3://b/x: Could not connect to the endpoint",
        NETWORK,
    ),
    ("s3://b/x", {"AWS_ACCESS_KEY_ID": "", "HOME": "/no"}, "read s3://b/x: Unable to locate credentials", LOGIN),
]


@pytest.mark.parametrize(("arguments", "changed", "said", "hint"), ERRORS)
def test_errors_name_bucket_key_and_what_to_do(s3, arguments, changed, said, hint):
    command = [sys.executable, "-m", "pagedcli", "generate", *arguments.split(), *FLAGS]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    error, what = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: cannot {said}")
    assert what == f"hint: {hint}"


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'pagedcli[ray]'")
def test_workers_of_a_ray_cluster_share_a_bucket_also_after_a_kill(s3, tmp_path):
    write_rows(tmp_path / "in.jsonl", 200)
    s3.put(f"{tmp_path}/in.jsonl", "bkt/ray/in.jsonl")
    flags = ("--max-tokens", "60", "--ignore-eos")
    process = start(tmp_path, *flags, "-o", "s3://bkt/ray/parts", "--workers", "1-2", input_name="s3://bkt/ray/*.jsonl")
    assert wait_for(lambda: s3.exists("bkt/ray/parts/.queue/lease/00001.0000"), seconds=120, process=process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    finish(process, tmp_path, expect=3)
    assert "starting 1 to 2 workers" in (tmp_path / "stderr.txt").read_text()
    pagedcli("merge", "s3://bkt/ray/parts", "-o", tmp_path / "merged.jsonl", expect=3)
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *FLAGS, *flags, expect=3)
    assert rows(tmp_path / "merged.jsonl") == rows(tmp_path / "out.jsonl")
