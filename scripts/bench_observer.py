"""What recording a trace costs: python scripts/bench_observer.py [--rounds 8]

Generates with the built-in model, 64 sequences at once, without and with a recorded trace in turns, in one process, and
prints the median tokens/s of each kind, their ratio to the one without, and the share of the time spent in the writer.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from pagedcli.config import EngineConfig
from pagedcli.engine.llm_engine import LLMEngine
from pagedcli.inspection.trace_writer import TraceWriter
from pagedcli.sampling_params import SamplingParams

NUM_SEQS = 64


def measure(trace: Path | None, num_tokens: int) -> tuple[float, float]:
    """Tokens/s of one run, and the writer's share of its time. The engine's start is outside the clock."""
    writer = TraceWriter(trace) if trace is not None else None
    engine = LLMEngine(EngineConfig(max_num_seqs=NUM_SEQS), emit=writer)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(NUM_SEQS):
        engine.add_request(str(i), [300 + i, *range(400, 420)], params)
    before_ns = writer.observer_ns if writer is not None else 0
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    elapsed = time.perf_counter() - start
    share = 0.0
    if writer is not None:
        share = (writer.observer_ns - before_ns) / 1e9 / elapsed
        writer.close()
    return NUM_SEQS * num_tokens / elapsed, share


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording a trace costs.")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each kind, in turns (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each sequence (default %(default)s)")
    args = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {"events off": [], ".jsonl": [], ".jsonl.zst": []}
    with tempfile.TemporaryDirectory() as folder:
        measure(None, args.tokens)
        for _ in range(args.rounds):
            for name, seen in runs.items():
                trace = None if name == "events off" else Path(folder) / f"run{name}"
                seen.append(measure(trace, args.tokens))
    off = statistics.median(rate for rate, _ in runs["events off"])
    for name, seen in runs.items():
        rate = statistics.median(rate for rate, _ in seen)
        share = statistics.median(share for _, share in seen)
        print(f"{name:11} median {rate:8,.0f} tok/s, ratio {rate / off:.3f}, in the writer {share:.2%} of the time")


if __name__ == "__main__":
    main()
