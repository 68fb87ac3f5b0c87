"""Advice while other work runs: python scripts/check_under_load.py [--jobs 20] [--seconds 3] [--measure-s 6]

Another process takes one core, two seconds on and two off. For each job five commands judge the same file and pool:
plan, plan --measure, generate, explain and simulate. No setting that one of them is sure of may be said to be worse by
another. Each such setting is then run in turns with the job as it is, in the order A B B A: it must compute fewer
tokens, or, where it was timed, take less processor time. Exit code 1 if commands contradict each other, or if more than
one in 20 sure settings is wrong.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

from check_advice import Job, generate, pagedcli, timed

_LOAD = """
import time
while True:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass
    time.sleep(2)
"""
_POOLS = (64, 128, 512)  # blocks


@contextlib.contextmanager
def load() -> Iterator[None]:
    """A process that takes a core on and off."""
    process = subprocess.Popen([sys.executable, "-c", _LOAD])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def random_job(number: int) -> tuple[Job, int]:
    """A job and its pool in blocks."""
    draw = random.Random(number)
    pool = draw.choice(_POOLS)
    job = Job(
        f"job {number}",
        num_rows=draw.randint(150, 500),
        num_heads=draw.choice((1, 4, 16, 64)),
        head=draw.randint(4, 80),
        rest=draw.randint(4, 40),
        output=draw.randint(4, 60),
        flags=("--num-gpu-blocks-override", str(pool)),
    )
    return job, pool


@dataclass
class Judged:
    """What a command says of settings: how much each saves; None: it is not sure."""

    command: str
    saved: dict[str, float | None]
    advised: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, command: str, document: dict) -> "Judged":
        rows = [row for row in document.get("settings_tried", []) if row["setting"] != "as it is"]
        saved = {row["setting"]: row["saved"] for row in rows} | {
            " ".join(row["flags"]): row["saved"] for row in document["advised"]
        }
        return cls(command, saved, [" ".join(row["flags"]) for row in document["advised"]])


def judge(folder: Path, job: Job, pool: int, measure_s: float) -> list[Judged]:
    """What the five commands say."""
    prompts, trace, summary = folder / "in.jsonl", folder / "run.jsonl", folder / "summary.json"

    def as_json(*arguments: object) -> dict:
        return json.loads(pagedcli(*arguments, "--format", "json")[0])

    found = [Judged.of("plan", as_json("plan", prompts, *job.flags))]
    measured = as_json("plan", prompts, *job.flags, "--measure", "--measure-s", measure_s)
    found.append(Judged.of("plan --measure", measured))
    generate(folder, *job.flags, "--record", str(trace), "--record-tokens")
    found.append(Judged.of("generate", json.loads(summary.read_text())["cache"]))
    found.append(Judged.of("explain", as_json("explain", trace)))
    found.append(Judged.of("simulate", as_json("simulate", prompts, "--pool", pool)))
    return found


def contradictions(found: list[Judged]) -> list[str]:
    """Settings that one command advises and another says to be worse."""
    return [
        f"{one.command} advises {setting}, {other.command} says {100 * saved:.1f} % saved"
        for one in found
        for setting in one.advised
        for other in found
        if (saved := other.saved.get(setting)) is not None and saved < 0
    ]


def computed(folder: Path, *flags: str) -> int:
    """Tokens that a run computes."""
    generate(folder, *flags)
    return int(json.loads((folder / "summary.json").read_text())["computed_tokens"])


def is_right(folder: Path, job: Job, flags: list[str], *, rounds: int = 1) -> tuple[bool, str]:
    """Whether runs with these flags compute fewer tokens, or take less processor time in turns."""
    kept = () if job.flags[0] in flags else job.flags
    before, after = computed(folder, *job.flags), computed(folder, *kept, *flags)
    if after < 0.99 * before:
        return True, f"{before:,} -> {after:,} tokens computed"
    times: dict[bool, list[float]] = {False: [], True: []}
    for is_changed in (False, True, True, False) * rounds:
        times[is_changed].append(timed(folder, *(*kept, *flags) if is_changed else job.flags)[1])
    was, now = median(times[False]), median(times[True])
    return now < was, f"processor time {was:.2f} s -> {now:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a job, roughly")
    parser.add_argument("--measure-s", type=float, default=6.0)
    parser.add_argument("--most-s", type=float, default=float("inf"), help="no job begins after so many seconds")
    args = parser.parse_args()
    start_s, num_jobs, num_sure, num_wrong, against = time.monotonic(), 0, 0, 0, []
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("pagedcli.planning.step_time.cache_folder", return_value=Path(name) / "times"),
        load(),
    ):
        folder = Path(name)
        for number in range(args.jobs):
            if time.monotonic() - start_s > args.most_s:
                break
            job, pool = random_job(number)
            job.write(folder / "in.jsonl", job.num_rows)
            job.write(folder / "in.jsonl", max(40, round(job.num_rows * args.seconds / timed(folder, *job.flags)[0])))
            (folder / "run.jsonl").unlink(missing_ok=True)
            found = judge(folder, job, pool, args.measure_s)
            num_jobs += 1
            against += contradictions(found)
            for setting in dict.fromkeys(setting for each in found for setting in each.advised):
                right, how = is_right(folder, job, setting.split())
                num_sure, num_wrong = num_sure + 1, num_wrong + (not right)
                by = ", ".join(each.command for each in found if setting in each.advised)
                print(f"{job.name}, pool {pool}: {setting} ({by}): {how}{'' if right else ': WRONG'}", flush=True)
            if not any(each.advised for each in found):
                print(f"{job.name}, pool {pool}: no command advises a setting", flush=True)
    print("\n".join(against))
    print(f"{num_jobs} jobs x 5 commands: {len(against)} contradictions; {num_sure} sure settings, {num_wrong} wrong")
    return 1 if against or num_wrong > num_sure / 20 else 0


if __name__ == "__main__":
    sys.exit(main())
