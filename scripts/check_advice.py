"""Advice checked by running it: python scripts/check_advice.py [--files 20]

For files with shared prefixes and pools of several sizes: generate, then generate with each of the advised flags.
Cached tokens, preemptions, recomputed and computed tokens and the peak must be those that were promised, and no row of
the table of settings may be better than the advised one. Counts do not depend on how busy the machine is.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import typer

from pagedcli.cli.main import app
from pagedcli.simulation.advice import Trial, recorded_advice

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


def pagedcli(*arguments: object) -> str:
    """Run a command in this process, which has imported torch. Returns what it says on stderr."""
    said, out = io.StringIO(), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = typer.main.get_command(app).main([str(each) for each in arguments], standalone_mode=False)
    if code:
        raise SystemExit(f"pagedcli {' '.join(map(str, arguments))}: exit code {code}\n{said.getvalue()}")
    return said.getvalue()


def generate(folder: Path, *flags: str) -> tuple[int, ...]:
    """The counts of a run."""
    files = ("-o", folder / "out.jsonl", "--overwrite", "--summary-json", folder / "summary.json")
    pagedcli("generate", folder / "in.jsonl", *files, *_LIMITS, *flags)
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
    generate(folder, *pool, "--record", str(trace), "--record-tokens")
    found = recorded_advice(trace)
    name, num_wrong = f"file {seed}, pool {pool[1]}", 0
    for trial in found.best:
        flags = [text for pair in trial.setting.flags for text in pair if text]
        got, expected = generate(folder, *(() if pool[0] in flags else pool), *flags), promised(trial)
        num_wrong += got != expected
        print(f"{name}: {trial.setting.text}: {got}, promised {expected}", flush=True)
    if not found.best:
        print(f"{name}: {found.sentences()[0]}", flush=True)
    best = found.best[0].gain if found.best else 0.01
    for trial in found.trials:
        if round(trial.gain, 3) > round(best, 3):  # gains that differ by less are equal
            num_wrong += 1
            print(f"{name}: {trial.setting.text} saves {trial.gain:.2%}, but is not advised", flush=True)
    return len(found.best), num_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20)
    num_files = parser.parse_args().files
    with tempfile.TemporaryDirectory() as name:
        results = [check_file(Path(name), seed) for seed in range(num_files)]
    num_runs, num_wrong = (sum(counts) for counts in zip(*results, strict=True))
    print(f"{num_files} files: {num_runs} advised runs, {num_wrong} problems")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
