"""Time runs with and without a prefix store, in turns: what a second run gains, and the price of a store of no use.

    python scripts/store_speed.py FOLDER [--prompts 200] [--shared 4096] [--own 64] [--output 16] [--turns 3]
                                  [--model SHAPE] [--dtype bfloat16] [--threads 2]

Random weights of a built-in shape, in a process for each run. Per turn: without a store (cold); with an empty one that
is filled (fills), and with what that run has left (warm); and prompts without a shared prefix, of which a store keeps
nothing, without one and with an empty one (useless off, useless on). Seconds from the first request to the last answer
with the store written, of the clock and of the processor, and until the engine is ready. The last lines have medians.
"""

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRST_ID, LAST_ID = 10, 10_000
MODES = ("cold", "fills", "warm", "useless off", "useless on")
OTHER_ORDER = ("useless on", "useless off", "fills", "warm", "cold")  # of every second turn


@dataclass(frozen=True, slots=True)
class Times:
    """Of one run, in seconds."""

    ready_s: float
    run_s: float
    processor_s: float
    num_disk_tokens: int
    num_computed_tokens: int
    digest: str  # of all answers


def prompts(given: argparse.Namespace, *, is_shared: bool) -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(given.shared)]
    own = [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(given.own)] for _ in range(given.prompts)]
    if is_shared:
        return [shared + each for each in own]
    num_own = given.own + given.shared // given.prompts  # about as many tokens to compute
    return [[rng.randrange(FIRST_ID, LAST_ID) for _ in range(num_own)] for _ in own]


def run(given: argparse.Namespace, mode: str, folder: Path | None) -> Times:
    """One run in this process."""
    import torch

    from pagedcli.bench.throughput import shape_folder
    from pagedcli.config import EngineConfig
    from pagedcli.content_files import digest_of
    from pagedcli.runner.llm_engine import LLMEngine
    from pagedcli.sampling_params import SamplingParams

    torch.set_num_threads(given.threads)
    begin_s = time.perf_counter()
    config = EngineConfig(
        model=given.model if Path(given.model).exists() else str(shape_folder(given.model)),
        load_format="dummy",
        dtype=given.dtype,
        device="cpu",
        max_model_len=given.shared + given.own + given.output + 64,
        prefix_store=None if folder is None else str(folder),
    )
    engine = LLMEngine(config, with_store=True)
    ready_s, before = time.perf_counter(), processor_s()
    params = SamplingParams(temperature=0, max_tokens=given.output, ignore_eos=True)
    for number, prompt in enumerate(prompts(given, is_shared=not mode.startswith("useless"))):
        engine.add_request(str(number), prompt, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.samples[0].token_ids for output in engine.step()}
    engine.close_store()
    end_s, stats = time.perf_counter(), engine.stats
    digest = digest_of(json.dumps(found, sort_keys=True).encode())
    computed = stats.num_disk_tokens, stats.num_computed_tokens
    return Times(ready_s - begin_s, end_s - ready_s, processor_s() - before, *computed, digest)


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(given: argparse.Namespace, mode: str, folder: Path | None) -> Times:
    """One run in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run", mode, *(["--store", str(folder)] if folder else [])]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Times(**json.loads(answer.splitlines()[-1]))


def turn(given: argparse.Namespace, folder: Path, modes: Sequence[str]) -> dict[str, Times]:
    for name in ("store", "empty"):
        shutil.rmtree(folder / name, ignore_errors=True)
    stores = {"fills": folder / "store", "warm": folder / "store", "useless on": folder / "empty"}
    found = {mode: timed(given, mode, stores.get(mode)) for mode in modes}
    assert found["cold"].digest == found["fills"].digest == found["warm"].digest, "the answers are not the same"
    assert found["useless off"].digest == found["useless on"].digest, "the answers are not the same"
    assert found["warm"].num_disk_tokens > 0, "nothing was read"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, value in {"prompts": 200, "shared": 4096, "own": 64, "output": 16, "turns": 3, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", default="qwen3-0.6b", help="a built-in shape, or a folder with config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        print(json.dumps(asdict(run(given, given.run, given.store))))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    turns = []
    for number in range(given.turns):
        turns.append(turn(given, given.folder, OTHER_ORDER if number % 2 else MODES))
        for mode in MODES:
            print_times(mode, turns[-1][mode])
    clock = {mode: statistics.median(each[mode].run_s for each in turns) for mode in MODES}
    used = {mode: statistics.median(each[mode].processor_s for each in turns) for mode in MODES}
    print(f"medians: without {clock['cold']:.1f} s, with a store {clock['warm']:.1f} s: ", end="")
    print(f"{clock['cold'] / clock['warm']:.2f} times as fast (processor {used['cold'] / used['warm']:.2f})")
    for what, on, off in (("filling it", "fills", "cold"), ("of no use", "useless on", "useless off")):
        price = [100 * (each[on] / each[off] - 1) for each in (clock, used)]
        print(f"{what}: {price[0]:+.1f} % of the time, {price[1]:+.1f} % of processor time")


def print_times(name: str, times: Any) -> None:
    tokens = f"{times.num_disk_tokens:,} tokens read, {times.num_computed_tokens:,} computed"
    print(f"{name:<12} ready {times.ready_s:5.1f} s, run {times.run_s:6.1f} s, ", end="")
    print(f"processor {times.processor_s:6.1f} s, {tokens}", flush=True)


if __name__ == "__main__":
    main()
