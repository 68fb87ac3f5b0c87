"""A distributed run in processes of its own, and ways to kill them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.engine import without_run_dependent_fields

FLAGS = ("--dtype", "float32", "--max-num-seqs", "16", "--num-kvcache-blocks", "400")


def start(folder, *arguments, input_name="in.jsonl"):
    """`pagedcli generate INPUT -o parts --ray --workers 2` in a process group of its own."""
    command = [sys.executable, "-m", "pagedcli", "generate", input_name, "-o", "parts", "--ray", "--workers", "2"]
    with (folder / "stderr.txt").open("ab") as stderr:
        return subprocess.Popen(
            [*command, *FLAGS, *map(str, arguments)],
            cwd=folder,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
        )


def finish(process, folder, *, expect):
    """Wait for the end of a run."""
    code = process.wait(timeout=240)
    assert code == expect, f"exit code {code}\n{(folder / 'stderr.txt').read_text()[-3000:]}"


def descendants(pid):
    """Process id -> command of all processes below one."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, frontier = {}, {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found |= {child: commands.get(child, "") for child in frontier}
    return found


def workers_of(process):
    """Process ids of the engines of a run."""
    return [pid for pid, command in descendants(process.pid).items() if "_PartActor" in command]


def kill_cluster(pids):
    """End what is left of a killed run's cluster: these processes, which this test has started."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def num_journal_bytes(folder):
    """Of all parts, those of finished ones included."""
    total = 0
    for path in (folder / "parts").glob("part-*.jsonl*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def wait_for(condition, *, seconds, process):
    """Until it holds, the run has ended or the time is over. Returns whether it holds."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and process.poll() is None:
        if condition():
            return True
        time.sleep(0.01)
    return False


def write_rows(path, num_rows):
    """Rows that share prefixes: greedy and seeded, plain and OpenAI, good and bad."""
    with path.open("w") as file:
        for i in range(num_rows):
            prompt = f"Story {i % 7}: Once upon a time there was a dog that went to the river number {i}"
            row = {"id": i, "prompt": prompt, "temperature": float(i % 2), "n": 2 if i % 11 == 0 else 1}
            if i % 10 == 6:
                body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
                row = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            elif i % 10 == 9:
                row = {"id": "same", "prompt": prompt}
            file.write("{broken\n" if i % 10 == 3 else json.dumps(row) + "\n")


def rows(path):
    """The rows of an output without what tells when the run began and what the cache held."""
    return [without_run_dependent_fields(json.loads(line)) for line in path.read_text().splitlines()]


def table_rows(path):
    """The rows of a table likewise."""
    import pyarrow.parquet as pq

    return [without_run_dependent_fields(row) for row in pq.read_table(path).to_pylist()]


def said(folder, pattern):
    """The last match on stderr."""
    return re.findall(pattern, (folder / "stderr.txt").read_text())[-1]
