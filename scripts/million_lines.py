"""Memory and speed of a batch run over very many lines: python scripts/million_lines.py [--rows 1000000] [--dry].

Makes a file of short prompts, runs it through the whole batch path (reader, tokenizer, engine, journal, ordered output)
with the built-in model and one token per row, and prints speed and memory twenty times. Rows per second of processor
time tell, also on a machine that others use, whether the work per row stays the same. --dry leaves out the model: the
engine schedules and manages blocks as always, and every token is 0.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pagedcli.batch.job import Job, OpenJob
from pagedcli.batch.stats import BatchStats
from pagedcli.config import Config, EngineConfig, LoadedConfig, RunConfig
from pagedcli.core.step_input import SamplingInput, StepInput, StepTokens
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams


class NoModel:
    """An executor that computes nothing: every token is 0."""

    def launch(self, step: StepInput, sampling: SamplingInput) -> "Zeros":
        return Zeros(sampling.num_rows)

    def launch_model(self, step: StepInput) -> "Callable[[SamplingInput], Zeros]":
        return partial(self.launch, step)


class Zeros:
    """A step of NoModel."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def read(self) -> StepTokens:
        return StepTokens([0] * self._num_rows)


class Watch:
    """Prints how fast the last rows were and how much memory the process has, each time `every` more rows are done."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._next = every
        self._last = (time.perf_counter(), time.process_time(), 0)
        self.cpu_rates: list[float] = []  # rows per second of processor time

    def __call__(self, stats: BatchStats) -> None:
        if stats.num_done < self._next:
            return
        self._next += self._every
        before_s, before_cpu_s, before_rows = self._last
        self._last = now_s, cpu_s, num_rows = time.perf_counter(), time.process_time(), stats.num_done
        rate = (num_rows - before_rows) / (now_s - before_s)
        self.cpu_rates.append((num_rows - before_rows) / (cpu_s - before_cpu_s))
        print(
            f"{num_rows:>9,} rows  {rate:>7,.0f} rows/s  {self.cpu_rates[-1]:>7,.0f} rows/CPU s"
            f"  {memory_mib('VmRSS'):>5,} MiB",
            flush=True,
        )


def memory_mib(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process. Linux."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dry", action="store_true", help="no model: scheduler and batch layer only")
    parser.add_argument("--reorder", choices=("none", "prefix"), default="none")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run(Path(folder), arguments)


def run(folder: Path, arguments: argparse.Namespace) -> None:
    prompts, out = folder / "in.jsonl", folder / "out.jsonl"
    with prompts.open("w") as file:
        file.writelines(f'{{"id": {i}, "prompt": "Row {i}: the fox"}}\n' for i in range(arguments.rows))
    config = Config(
        engine=EngineConfig(max_num_seqs=512, max_num_batched_tokens=8192, num_gpu_blocks_override=4096),
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        run=RunConfig(reorder=arguments.reorder),
    )
    engine = LLMEngine(config.engine)
    if arguments.dry:
        engine.executor = NoModel()
    loaded = LoadedConfig(config, {"sampling.max_tokens": "--max-tokens"})
    work = OpenJob(Job(loaded, str(prompts), out))
    work.load_tokenizer()
    sink = work.open_sink(sys.stdout.buffer)
    watch = Watch(max(arguments.rows // 20, 1))
    print(f"{memory_mib('VmRSS'):,} MiB before the first row", flush=True)
    result = work.start(engine, sink, observe=watch, stop_requested=lambda: False).run()
    with out.open("rb") as file:
        num_rows = sum(1 for _ in file)
    assert num_rows == result.stats.num_done == arguments.rows, "one row per line"
    seconds = result.stats.elapsed_s
    print(f"{num_rows:,} rows in {seconds:,.1f} s: {num_rows / seconds:,.0f} rows/s, {memory_mib('VmHWM'):,} MiB peak")
    print(f"first half {half(watch.cpu_rates, 0):,.0f} rows/CPU s, second half {half(watch.cpu_rates, 1):,.0f}")


def half(rates: list[float], which: int) -> float:
    """Mean of the first or second half."""
    middle = len(rates) // 2
    part = rates[middle:] if which else rates[:middle]
    return sum(part) / max(len(part), 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
