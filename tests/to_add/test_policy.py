"""To add an eviction policy, touch core/eviction.py: a class and its entry in POLICIES. Flags, help, configuration
files, events, laws, simulations and pages follow.

The fake policy here is registered before the command line is imported, as if it were written there, and nowhere else:
in a process of its own, which runs one command after another.
"""

import json
import subprocess
import sys

import pytest

REGISTERED = """
import json
import sys
from pagedcli.core import eviction

class Mru(eviction.RankedPolicy):
    def _value(self, block_id, prefix):
        return -float(self._num_released)

eviction.POLICIES["mru"] = Mru
from typer.testing import CliRunner
from pagedcli.cli.main import app
for line in sys.stdin:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, json.loads(line))
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""
POOL = ("--num-kvcache-blocks", "24", "--max-num-seqs", "2", "--block-size", "4", "--max-model-len", "80")
# three prefixes of 12 blocks in turns do not fit into 24 blocks
ROWS = [{"prompt": [group] * 48 + [20 + row], "max_tokens": 4} for row in range(12) for group in [5 + row % 3]]


@pytest.fixture(scope="module")
def pagedcli():
    """Runs a command: standard output, or standard error where it is expected to fail."""
    with subprocess.Popen(
        [sys.executable, "-c", REGISTERED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def call(*arguments, expect=0):
            print(json.dumps([str(argument) for argument in arguments]), file=process.stdin, flush=True)
            code, output, errors = json.loads(process.stdout.readline())
            assert code == expect, errors
            return errors if expect else output

        yield call
        process.stdin.close()


@pytest.fixture(scope="module")
def run(pagedcli, tmp_path_factory):
    """A folder with prompts, and the rows and trace of a run."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = ("--eviction", "mru", "--output-token-ids", "--record", folder / "run.jsonl", "--record-tokens")
    pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", *POOL, *flags)
    return folder


@pytest.mark.long
def test_help_and_messages_name_it(pagedcli):
    assert "prefix-lru|next-use|mru" in pagedcli("generate", "--help", "cache")
    assert "next-use, mru" in " ".join(pagedcli("simulate", "--help", "all").split())
    assert "'next-use', 'mru'" in pagedcli("generate", "x.jsonl", "--eviction", "x", expect=2)
    assert "next-use, mru" in pagedcli("simulate", "x.jsonl", "--policy", "x", expect=2)


def test_a_configuration_file_chooses_it(pagedcli, run):
    config = run / "run.yaml"
    config.write_text("engine: {eviction: mru}")
    shown = pagedcli("generate", run / "in.jsonl", "-C", config, "--show-config")
    assert any(line.split()[:2] == ["engine.eviction", "mru"] for line in shown.splitlines())
    config.write_text("engine: {eviction: rmu}")
    refused = pagedcli("generate", run / "in.jsonl", "-C", config, "--show-config", expect=2)
    assert "next-use, mru" in refused


def test_a_run_gives_the_same_rows_and_a_lawful_trace(pagedcli, run):
    first = json.loads((run / "run.jsonl").read_text().splitlines()[0])
    assert first["eviction"] == "mru"
    assert "block_evicted" in (run / "run.jsonl").read_text()
    pagedcli("trace", run / "run.jsonl", "--check")
    pagedcli("explain", run / "run.jsonl")
    lru = run / "lru.jsonl"
    pagedcli("generate", run / "in.jsonl", "-o", lru, *POOL, "--output-token-ids")
    assert [row["token_ids"] for row in map(json.loads, lru.read_text().splitlines())] == [
        row["token_ids"] for row in map(json.loads, (run / "out.jsonl").read_text().splitlines())
    ]


def test_the_laws_notice_what_lru_would_not_choose_and_a_policy_that_does_not_exist(pagedcli, run):
    trace = (run / "run.jsonl").read_text()
    assert trace.count('"eviction":"mru"') == 1
    (run / "other.jsonl").write_text(trace.replace('"eviction":"mru"', '"eviction":"lru"'))
    assert "the next free block is" in pagedcli("trace", run / "other.jsonl", "--check", expect=1)
    (run / "unknown.jsonl").write_text(trace.replace('"eviction":"mru"', '"eviction":"nru"'))
    assert "'nru' is unknown" in pagedcli("trace", run / "unknown.jsonl", "--check", expect=1)


def test_simulations_and_their_picture_have_it(pagedcli, run):
    picture = run / "hits.svg"
    flags = ("--pool", "24", "--policy", "lru,next-use,mru", "--picture", picture, "--format", "json")
    found = json.loads(pagedcli("simulate", run / "in.jsonl", *flags, *POOL[2:]))
    rates = {row["policy"]: row["hit_rate_tokens"] for row in found["pools"]}
    assert rates.keys() == {"lru", "next-use", "mru"}
    assert rates["next-use"] > max(rates["lru"], rates["mru"])
    assert "mru" in picture.read_text()
