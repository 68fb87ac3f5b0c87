"""To add an eviction policy, touch core/eviction.py: a class and its entry in POLICIES. Flags, help, configuration
files, events, laws, simulations and pages follow.

The fake policy here is registered before the command line is imported, as if it were written there, and nowhere else.
"""

import json
import os
import subprocess
import sys

import pytest

REGISTERED = """
import sys
from pagedcli.core import eviction

class Mru(eviction.RankedPolicy):
    def _value(self, block_id, prefix):
        return -float(self._num_released)

eviction.POLICIES["mru"] = Mru
from pagedcli.cli.main import app
app(sys.argv[1:], prog_name="pagedcli")
"""
POOL = ("--num-gpu-blocks-override", "24", "--max-num-seqs", "2", "--block-size", "4", "--max-model-len", "80")
# three prefixes of 12 blocks in turns do not fit into 24 blocks
ROWS = [{"prompt": [group] * 48 + [20 + row], "max_tokens": 4} for row in range(12) for group in [5 + row % 3]]


def pagedcli(*arguments, expect=0):
    command = [sys.executable, "-c", REGISTERED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, timeout=240)
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with prompts, and the rows and trace of a run."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = ("--eviction", "mru", "--output-token-ids", "--record", folder / "run.jsonl", "--record-tokens")
    pagedcli("generate", folder / "in.jsonl", "-o", folder / "out.jsonl", *POOL, *flags)
    return folder


def test_help_and_messages_name_it():
    assert "prefix-lru|next-use|mru" in pagedcli("generate", "--help").stdout
    assert "next-use, mru" in " ".join(pagedcli("simulate", "--help").stdout.split())
    assert "'next-use', 'mru'" in pagedcli("generate", "x.jsonl", "--eviction", "x", expect=2).stderr
    assert "next-use, mru" in pagedcli("simulate", "x.jsonl", "--policy", "x", expect=2).stderr


def test_a_configuration_file_chooses_it(run):
    config = run / "run.yaml"
    config.write_text("engine: {eviction: mru}")
    shown = pagedcli("generate", run / "in.jsonl", "-C", config, "--show-config").stdout
    assert any(line.split()[:2] == ["engine.eviction", "mru"] for line in shown.splitlines())
    config.write_text("engine: {eviction: rmu}")
    refused = pagedcli("generate", run / "in.jsonl", "-C", config, "--show-config", expect=2).stderr
    assert "next-use, mru" in refused


def test_a_run_gives_the_same_rows_and_a_lawful_trace(run):
    first = json.loads((run / "run.jsonl").read_text().splitlines()[0])
    assert first["eviction"] == "mru"
    assert "block_evicted" in (run / "run.jsonl").read_text()
    pagedcli("replay", run / "run.jsonl", "--check")
    pagedcli("explain", run / "run.jsonl")
    lru = run / "lru.jsonl"
    pagedcli("generate", run / "in.jsonl", "-o", lru, *POOL, "--output-token-ids")
    assert [row["token_ids"] for row in map(json.loads, lru.read_text().splitlines())] == [
        row["token_ids"] for row in map(json.loads, (run / "out.jsonl").read_text().splitlines())
    ]


def test_the_laws_notice_another_choice(run):
    trace = (run / "run.jsonl").read_text()
    assert trace.count('"eviction":"mru"') == 1
    (run / "other.jsonl").write_text(trace.replace('"eviction":"mru"', '"eviction":"fifo"'))
    assert "fifo evicts" in pagedcli("replay", run / "other.jsonl", "--check", expect=1).stderr
    (run / "unknown.jsonl").write_text(trace.replace('"eviction":"mru"', '"eviction":"nru"'))
    assert "'nru' is unknown" in pagedcli("replay", run / "unknown.jsonl", "--check", expect=1).stderr


def test_simulations_and_their_page_have_it(run):
    page = run / "page.html"
    flags = ("--pool", "24", "--policy", "lru,next-use,mru", "-o", page, "--format", "json")
    found = json.loads(pagedcli("simulate", run / "in.jsonl", *flags, *POOL[2:]).stdout)
    rates = {row["policy"]: row["hit_rate_tokens"] for row in found["pools"]}
    assert rates.keys() == {"lru", "next-use", "mru"}
    assert rates["next-use"] > max(rates["lru"], rates["mru"])
    assert "mru" in page.read_text()
