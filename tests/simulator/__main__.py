"""Run scenarios for some time: python -m simulator [--minutes 5] [--seed 0] [--only SEED]"""

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from simulator.scenario import run_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the first scenario"
    )
    parser.add_argument("--only", type=int, help="run this scenario alone")
    given = parser.parse_args()
    seed, counts, start_s = given.seed if given.only is None else given.only, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                run_seed(seed, Path(folder), counts)
            except BaseException:
                print(f"seed {seed} fails: make test-simulator ONLY={seed}; before:", dict(counts), flush=True)
                raise
            seed += 1
            if given.only is not None or time.monotonic() > start_s + 60 * given.minutes:
                break
    hours = counts.pop("virtual seconds") / 3600
    print(f"no violation in {hours:.1f} hours of virtual time:", *(f"{n:,} {what}," for what, n in counts.items()))


if __name__ == "__main__":
    main()
