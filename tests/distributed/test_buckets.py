"""Runs from and into a bucket of a real S3 server: the rows of a run on files, also after kills; what errors say."""

import os
import re
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from bucket_harness import s3_server
from cli_harness import pagedcli
from ray_harness import FLAGS, rows, table_rows, write_rows

from pagedcli.files import cache_home

pytestmark = pytest.mark.slow
PROGRAM = "from pagedcli.cli import urls, main; urls._SEND_EVERY_S = 0.1; main.run()"


@pytest.fixture(scope="module")
def s3():
    with s3_server() as files:
        yield files


@pytest.fixture
def machine(tmp_path):
    """A function that returns the environment of a machine: with a cache of its own, but for the compiled kernels."""

    def environment(name):
        (tmp_path / name / "pagedcli").mkdir(parents=True)
        (tmp_path / name / "pagedcli" / "native").symlink_to(cache_home() / "native")
        return os.environ | {"XDG_CACHE_HOME": str(tmp_path / name)}

    return environment


def test_rows_of_jsonl_csv_and_parquet_are_those_of_files(s3, tmp_path):
    write_rows(tmp_path / "in.jsonl", 40)
    s3.put(str(tmp_path / "in.jsonl"), "bkt/in.jsonl")
    for ending in ("jsonl", "jsonl.gz", "csv", "parquet"):
        for where in (f"{tmp_path}", "s3://bkt"):
            out = ("-o", f"{where}/out.{ending}", "--max-tokens", 8, "--output-token-ids", *FLAGS)
            pagedcli("generate", f"{where}/in.jsonl", *out, expect=3)
        told = pagedcli("verify", f"s3://bkt/out.{ending}", tmp_path / f"out.{ending}").stdout
        assert told.startswith("40 of 40 rows are equal (compared: token ids)")
    (tmp_path / "t").mkdir()
    for number in range(2):
        table = [
            {"id": i, "prompt": f"Story {i} of a fox", "other": "x" * i} for i in range(20 * number, 20 * number + 20)
        ]
        pq.write_table(pa.Table.from_pylist(table), tmp_path / "t" / f"{number}.parquet", row_group_size=7)
    s3.put(f"{tmp_path}/t/", "bkt/t/", recursive=True)
    pagedcli("generate", "s3://bkt/t", "-o", "s3://bkt/tables.parquet", "--max-tokens", 8, *FLAGS)
    pagedcli("generate", tmp_path / "t", "-o", tmp_path / "tables.parquet", "--max-tokens", 8, *FLAGS)
    s3.get("bkt/tables.parquet", str(tmp_path / "fetched.parquet"))
    assert table_rows(tmp_path / "fetched.parquet") == table_rows(tmp_path / "tables.parquet")


def test_shards_in_a_bucket_are_merged(s3, tmp_path):
    write_rows(tmp_path / "in.jsonl", 40)
    s3.put(str(tmp_path / "in.jsonl"), "bkt/in.jsonl")
    flags = ("--max-tokens", 8, *FLAGS)
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags, expect=3)
    for i, code in ((1, 0), (2, 3)):
        shard = ("-o", f"s3://bkt/shard-{i}.jsonl", "--shard", f"{i}/2")
        pagedcli("generate", "s3://bkt/in.jsonl", *shard, *flags, expect=code)
    pagedcli("merge", "s3://bkt/shard-*.jsonl", "-o", "s3://bkt/merged.jsonl", expect=3)
    told = pagedcli("verify", "s3://bkt/merged.jsonl", tmp_path / "out.jsonl").stdout
    assert told.startswith("40 of 40 rows are equal")


def test_a_killed_run_continues_on_another_machine(s3, machine, tmp_path):
    write_rows(tmp_path / "in.jsonl", 300)
    s3.put(str(tmp_path / "in.jsonl"), "bkt/long.jsonl")
    flags = [*FLAGS, "--max-tokens", "40", "--ignore-eos"]
    command = [sys.executable, "-c", PROGRAM, "generate", "s3://bkt/long.jsonl", "-o", "s3://bkt/killed.jsonl", *flags]
    for name in ("first", "second"):
        environment, resume = machine(name), ["--resume"] * (name == "second")
        process = subprocess.Popen([*command, *resume], env=environment, stderr=subprocess.DEVNULL)
        deadline_s, least = time.monotonic() + 120, 5000 if name == "first" else 15_000
        while time.monotonic() < deadline_s and process.poll() is None:
            found = s3.find("bkt/", prefix="killed.jsonl.partial", detail=True)
            if any(each["size"] > least for each in found.values()):
                break
            time.sleep(0.02)
        assert process.poll() is None, "it is killed during the run"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not s3.exists("bkt/killed.jsonl")
    done = subprocess.run([*command, "--resume"], env=machine("third"), capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert int(re.search(r"resuming: (\d+) rows done", done.stderr)[1]) > 10
    pagedcli("generate", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *flags, expect=3)
    (tmp_path / "killed.jsonl").write_bytes(s3.cat("bkt/killed.jsonl"))
    assert rows(tmp_path / "killed.jsonl") == rows(tmp_path / "out.jsonl")
    assert sorted(s3.find("bkt/", prefix="killed")) == ["bkt/killed.jsonl", "bkt/killed.jsonl.run.json"]


NETWORK = "check the network, and AWS_ENDPOINT_URL if it is set; then run the command again"
LOGIN = "log in as for the service's own tools (AWS_PROFILE, gcloud auth, hf auth login)"


@pytest.mark.parametrize(
    ("arguments", "changed", "said", "hint"),
    [
        ("s3://no/in.jsonl", {}, "read s3://no/in.jsonl: The specified bucket does not exist", "create the bucket"),
        ("x.jsonl -o s3://no/o", {}, "list s3://no/o*: The specified bucket does not exist", "create the bucket"),
        (
            "s3://bkt/in.jsonl",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            'read s3://bkt/in.jsonl: Could not connect to the endpoint URL: "http://127.0.0.1:9/bkt',
            NETWORK,
        ),
        ("s3://bkt/in.jsonl", {"AWS_ACCESS_KEY_ID": None, "HOME": "/nowhere"}, "read s3://bkt/in.jsonl: Unable", LOGIN),
    ],
)
def test_errors_name_bucket_key_and_what_to_do(s3, arguments, changed, said, hint):
    environment = {name: value for name, value in (os.environ | changed).items() if value is not None}
    if "HOME" in changed:
        del environment["AWS_SECRET_ACCESS_KEY"]
    command = [sys.executable, "-m", "pagedcli", "generate", *arguments.split(), *FLAGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    error, what = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: cannot {said}")
    assert what.startswith(f"hint: {hint}")
    assert (
        pagedcli("generate", "s3://bkt/absent.jsonl", expect=2).stderr == "error: there is no s3://bkt/absent.jsonl\n"
    )
