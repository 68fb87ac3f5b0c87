"""What recording a trace or watching a run costs: python scripts/bench_observer.py [--rounds 8]

Generates with the built-in model, 64 sequences at once, without observer, with events that nobody reads, with a
recorded trace and, on a terminal, under the application of `pagedcli trace`, in turns, in one process. Prints the
median tokens/s of each kind, their ratio to the one without, and the share of the time that the writer or the screen's
thread took.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from pagedcli.app.base import watch
from pagedcli.app.pool_app import PoolApp
from pagedcli.app.pool_players import LivePlayer
from pagedcli.config import EngineConfig
from pagedcli.events import Emit
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.files import TraceWriter
from pagedcli.views.whole_run import WholeRun

NUM_SEQS = 64
EVENTS, APPLICATION = "events", "application"


def rate_of(emit: Emit | None, num_tokens: int) -> float:
    """Tokens/s of one run. The engine's start is outside the clock."""
    engine = LLMEngine(EngineConfig(max_num_seqs=NUM_SEQS), emit=emit)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(NUM_SEQS):
        engine.add_request(str(i), [300 + i, *range(400, 420)], params)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return NUM_SEQS * num_tokens / (time.perf_counter() - start)


def recorded(trace: Path, num_tokens: int) -> tuple[float, float]:
    """Tokens/s with a trace, and the writer's share of the time."""
    with TraceWriter(trace, overwrite=True) as writer:
        rate = rate_of(writer, num_tokens)
        return rate, writer.observer_ns / 1e9 / (NUM_SEQS * num_tokens / rate)


class SelfClosing(PoolApp):
    """Needs no key at the end."""

    def tick(self) -> None:
        super().tick()
        if isinstance(self.player, LivePlayer) and self.player.has_ended:
            self.exit()


def watched(num_tokens: int) -> tuple[float, float]:
    """Tokens/s under the application, on this terminal, and the share of the time that the screen's thread computed."""
    player = LivePlayer(WholeRun())
    cpu_s = time.thread_time()
    rate = watch(SelfClosing(player, "bench"), player, lambda: rate_of(player.on_event, num_tokens))
    return rate, (time.thread_time() - cpu_s) / (NUM_SEQS * num_tokens / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording a trace or watching a run costs.")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each kind, in turns (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each sequence (default %(default)s)")
    kinds = [EVENTS, ".jsonl", ".jsonl.zst", *([APPLICATION] if sys.stderr.isatty() else [])]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="default: all that are possible here")
    args = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ["events off", *args.kinds]}
    with tempfile.TemporaryDirectory() as folder:
        rate_of(None, args.tokens)
        for _ in range(args.rounds):
            for name, seen in runs.items():
                if name == "events off":
                    seen.append((rate_of(None, args.tokens), 0.0))
                elif name == EVENTS:
                    seen.append((rate_of([].append, args.tokens), 0.0))
                elif name == APPLICATION:
                    seen.append(watched(args.tokens))
                else:
                    seen.append(recorded(Path(folder) / f"run{name}", args.tokens))
    off = statistics.median(rate for rate, _ in runs["events off"])
    for name, seen in runs.items():
        rate = statistics.median(rate for rate, _ in seen)
        share = statistics.median(share for _, share in seen)
        print(f"{name:11} median {rate:8,.0f} tok/s, ratio {rate / off:.3f}, in the observer {share:.2%} of the time")


if __name__ == "__main__":
    main()
