"""Advice checked by running it: python scripts/check_advice.py [NUMBER OF FILES]

For files with shared prefixes and pools of several sizes: generate, then generate with each of the advised flags.
Cached tokens, preemptions, recomputed and computed tokens and the peak must be those that were promised.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from pagedcli.simulation.advice import recorded_advice

_WORDS = [
    "the",
    "old",
    "fox",
    "ran",
    "home",
    "and",
    "saw",
    "a",
    "red",
    "house",
    "near",
    "water",
    "while",
    "it",
    "rained",
]
_NAMES = ("cached_tokens", "preemptions", "recomputed_tokens", "computed_tokens", "kv_blocks_peak")
_LIMITS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128")


def write_prompts(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    heads = [" ".join(rng.choices(_WORDS, k=rng.randrange(5, 60))) for _ in range(rng.randrange(1, 8))]
    rows = [
        {"prompt": f"{rng.choice(heads)} {' '.join(rng.choices(_WORDS, k=rng.randrange(1, 20)))}",
         "max_tokens": rng.randrange(1, 40), "ignore_eos": True}
        for _ in range(60)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(folder: Path, *flags: str) -> dict[str, float]:
    """The summary of a run."""
    files = (folder / "in.jsonl", "-o", folder / "out.jsonl", "--overwrite", "--summary-json", folder / "summary.json")
    command = [sys.executable, "-m", "pagedcli", "generate", *map(str, files), *_LIMITS, *flags]
    subprocess.run(command, check=True, capture_output=True)
    summary: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return summary


def main() -> int:
    num_files = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    num_checked = num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(num_files):
            pool = ("--num-gpu-blocks-override", str((16, 24, 48, 200)[seed % 4]))
            write_prompts(folder / "in.jsonl", seed)
            generate(folder, *pool, "--record", str(folder / "run.jsonl"), "--record-tokens")
            found = recorded_advice(folder / "run.jsonl")
            for trial in found.best:
                flags = [text for pair in trial.setting.flags for text in pair if text]
                kept = () if pool[0] in flags else pool
                run, promised = generate(folder, *kept, *flags), trial.forecast
                expected = (promised.num_cached_tokens, promised.num_preemptions, promised.num_recomputed_tokens,
                            promised.num_computed_tokens, promised.peak_used_blocks)  # fmt: skip
                got = tuple(run[each] for each in _NAMES)
                num_checked += 1
                num_wrong += got != expected
                print(f"file {seed}, pool {pool[1]}: {trial.setting.text}: {got}, promised {expected}", flush=True)
            if not found.best:
                print(f"file {seed}, pool {pool[1]}: {found.sentences()[0]}", flush=True)
    print(f"{num_checked} advised runs, {num_wrong} not as promised")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
