"""Many short rows through `generate --ray` on this machine: time, and the peak memory of each process.

    python scripts/ray_rows.py [--rows 50000] [--workers 2]

Prints rows per second of the whole run (with reading, cutting and starting the cluster) and the largest resident set of
the driver and of each worker, from /proc.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAGS = ("--max-tokens", "1", "--dtype", "float32", "--num-gpu-blocks-override", "2000")


def write_rows(path: Path, num_rows: int) -> None:
    """Short prompts, 16 topics."""
    with path.open("w") as file:
        for row in range(num_rows):
            file.write(
                json.dumps({"id": row, "prompt": f"Story {row % 16}: once there was a dog, number {row}"}) + "\n"
            )


def peak_kib(pid: int) -> int:
    """The largest resident set so far; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def workers() -> list[int]:
    """Process ids of the engines."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"_PartActor" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "in.jsonl", arguments.rows)
        command = [sys.executable, "-m", "pagedcli", "generate", "in.jsonl", "-o", "parts", "--ray"]
        start_s = time.monotonic()
        process = subprocess.Popen([*command, "--workers", str(arguments.workers), *FLAGS], cwd=folder)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for pid in (process.pid, *workers()):
                peaks[pid] = max(peaks.get(pid, 0), peak_kib(pid))
            time.sleep(1.0)
        seconds = time.monotonic() - start_s
        num_rows = sum(sum(1 for _ in path.open()) for path in (folder / "parts").glob("part-*.jsonl"))
    driver = peaks.pop(process.pid)
    print(f"{num_rows:,} rows in {seconds:,.0f} s, {num_rows / seconds:,.0f} rows/s")
    print(f"peak memory: driver {driver / 1024:,.0f} MiB, workers {[peak // 1024 for peak in peaks.values()]} MiB")


if __name__ == "__main__":
    main()
