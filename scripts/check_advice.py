"""Advice checked by running it: python scripts/check_advice.py [--files 20 | --tune [--rounds 1] [--seconds 5]]

For files with shared prefixes and pools of several sizes: generate, then generate with each of the advised flags.
Cached tokens, preemptions, recomputed and computed tokens and the peak must be those that were promised, and no row of
the table of settings may be better than the advised one. Counts do not depend on how busy the machine is.

--tune: five jobs of the built-in model, each as it is and with the settings of plan --tune, in the order A B B A.
Prints the promised gain and the measured one, in seconds of the run and, for machines that are busy, of processor time.
Exit code 1 if a tuned job takes over 2 % longer than the default.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

import typer

from pagedcli.cli.main import app
from pagedcli.simulation.advice import WORTH_SAYING, Trial, recorded_advice
from pagedcli.simulation.settings import flags_of

_TEXT = "the old fox ran home and saw a red house near water while it rained"
_NAMES = ("cached_tokens", "preemptions", "recomputed_tokens", "computed_tokens", "kv_blocks_peak")
_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128")
_POOLS = (16, 24, 48, 200)  # blocks


def write_prompts(path: Path, seed: int) -> None:
    rng, words = random.Random(seed), _TEXT.split()
    heads = [" ".join(rng.choices(words, k=rng.randrange(5, 60))) for _ in range(rng.randrange(1, 8))]
    rows = [
        {"prompt": f"{rng.choice(heads)} {' '.join(rng.choices(words, k=rng.randrange(1, 20)))}",
         "max_tokens": rng.randrange(1, 40), "ignore_eos": True}
        for _ in range(60)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pagedcli(*arguments: object) -> tuple[str, str]:
    """Run a command in this process, which has imported torch. Returns its stdout and stderr."""
    said, out = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = typer.main.get_command(app).main([str(each) for each in arguments], standalone_mode=False)
    if code:
        raise SystemExit(f"pagedcli {' '.join(map(str, arguments))}: exit code {code}\n{said.getvalue()}")
    out.seek(0)
    return out.read(), said.getvalue()


def generate(folder: Path, *flags: str) -> None:
    """A run, with its summary in summary.json."""
    files = ("-o", folder / "out.jsonl", "--overwrite", "--summary-json", folder / "summary.json")
    pagedcli("generate", folder / "in.jsonl", *files, *flags)


def counts(folder: Path, *flags: str) -> tuple[int, ...]:
    """The counts of a run."""
    generate(folder, *_LIMITS, *flags)
    summary = json.loads((folder / "summary.json").read_text())
    return tuple(summary[name] for name in _NAMES)


def promised(trial: Trial) -> tuple[int, ...]:
    run = trial.forecast
    return (run.num_cached_tokens, run.num_preemptions, run.num_recomputed_tokens, run.num_computed_tokens,
            run.peak_used_blocks)  # fmt: skip


def check_file(folder: Path, seed: int) -> tuple[int, int]:
    """(runs with advised flags, problems) of a file."""
    pool = ("--num-gpu-blocks-override", str(_POOLS[seed % len(_POOLS)]))
    write_prompts(folder / "in.jsonl", seed)
    trace = folder / f"{seed}.jsonl"
    counts(folder, *pool, "--record", str(trace), "--record-tokens")
    found = recorded_advice(trace)
    name, num_wrong = f"file {seed}, pool {pool[1]}", 0
    for trial in found.best:
        flags = flags_of(trial.setting.changes)
        got, expected = counts(folder, *(() if pool[0] in flags else pool), *flags), promised(trial)
        num_wrong += got != expected
        print(f"{name}: {trial.setting.text}: {got}, promised {expected}", flush=True)
    if not found.best:
        print(f"{name}: {found.text()}", flush=True)
    best = found.best[0].gain if found.best else WORTH_SAYING
    for trial in found.trials:
        if round(trial.gain, 3) > round(best, 3):  # gains that differ by less are equal
            num_wrong += 1
            print(f"{name}: {trial.setting.text} saves {trial.gain:.2%}, but is not advised", flush=True)
    return len(found.best), num_wrong


# ---------------------------------------------------------------------- --tune


@dataclass(frozen=True)
class Job:
    """Rows with one of several beginnings. Lengths in words, drawn from the upper half of these; outputs in tokens."""

    name: str
    num_rows: int
    num_heads: int
    head: int
    rest: int
    output: int
    flags: tuple[str, ...] = ()

    def write(self, path: Path, num_rows: int) -> None:
        rng, words = random.Random(self.name), _TEXT.split()

        def text(most: int) -> str:
            return " ".join(rng.choices(words, k=rng.randint(most // 2, most)))

        heads = [text(self.head) for _ in range(self.num_heads)]
        rows = [
            {"prompt": f"{rng.choice(heads)} {number} {text(self.rest)}",
             "max_tokens": rng.randint(self.output // 2, self.output), "ignore_eos": True}
            for number in range(num_rows)
        ]  # fmt: skip
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


_JOBS = (
    Job("short prompts, long answers", 400, 40, 4, 12, 80),
    Job("many with one beginning", 1200, 3, 30, 8, 12),
    Job("small pool", 400, 24, 60, 20, 60, ("--num-gpu-blocks-override", "256")),
    Job("long prompts", 150, 150, 20, 500, 6),
    Job("eight at a time", 300, 12, 20, 20, 40, ("--max-num-seqs", "8")),
)


def timed(folder: Path, *flags: str) -> tuple[float, float]:
    """(seconds of a run, seconds of processor time of all threads with loading)."""
    before_s = time.process_time()
    generate(folder, *flags)
    processor_s = time.process_time() - before_s
    return json.loads((folder / "summary.json").read_text())["elapsed_s"], processor_s


def check_tuned(folder: Path, job: Job, rounds: int, seconds: float) -> bool:
    """Whether the tuned job is at least as fast. The job has as many rows as take about so many seconds."""
    job.write(folder / "in.jsonl", job.num_rows)
    job.write(folder / "in.jsonl", round(job.num_rows * seconds / timed(folder, *job.flags)[0]))
    yaml, _ = pagedcli("plan", folder / "in.jsonl", "--tune", *job.flags)
    (folder / "tuned.yaml").write_text(yaml)
    promised_text = yaml.splitlines()[0]
    # the same memory in other blocks is part of what was found: a flag would override it
    kept = () if "num_gpu_blocks_override" in yaml and "--num-gpu-blocks-override" in job.flags else job.flags
    plain, tuned = job.flags, (*kept, "-C", str(folder / "tuned.yaml"))
    times: dict[tuple[str, ...], list[tuple[float, float]]] = {plain: [], tuned: []}
    for flags in (plain, tuned, tuned, plain) * rounds:
        times[flags].append(timed(folder, *flags))
    (before, before_cpu), (after, after_cpu) = (
        (median(wall for wall, _ in found), median(cpu for _, cpu in found)) for found in times.values()
    )
    print(
        f"{job.name}: {' '.join(yaml.split())}: {promised_text}; measured {before:.2f} s -> {after:.2f} s,"
        f" {1 - after / before:.1%} less (processor time {1 - after_cpu / before_cpu:.1%} less)",
        flush=True,
    )
    return after <= 1.02 * before


def check_tuning(folder: Path, rounds: int, seconds: float) -> int:
    """How many tuned jobs are slower."""
    with (
        mock.patch("pagedcli.planning.step_time.cache_folder", return_value=folder / "times"),  # calibrates first
        mock.patch("pagedcli.cli.session.MOST_ADVICE_S", 0.0),  # at the end of a run: not its processor time
    ):
        return sum(not check_tuned(folder, job, rounds, seconds) for job in _JOBS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of a job of --tune, roughly")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.tune:
            num_slower = check_tuning(Path(name), args.rounds, args.seconds)
            print(f"{len(_JOBS)} jobs, {num_slower} slower than the default")
            return 1 if num_slower else 0
        results = [check_file(Path(name), seed) for seed in range(args.files)]
    num_runs, num_wrong = (sum(column) for column in zip(*results, strict=True))
    print(f"{args.files} files: {num_runs} advised runs, {num_wrong} problems")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
