"""Time per block operation of the block manager: python scripts/bench_block_manager.py [--blocks 1000 10000 100000]

One operation is one block allocated, filled, looked up and claimed, or released. Torch is not needed.
"""

import argparse
import time
from types import SimpleNamespace

from pagedcli.core.block_manager import BlockManager

BLOCK_SIZE = 16


def new_seq(seq_id: int, num_blocks: int, first_token: int) -> SimpleNamespace:
    token_ids = list(range(first_token, first_token + num_blocks * BLOCK_SIZE))
    return SimpleNamespace(
        seq_id=seq_id, token_ids=token_ids, block_table=[], prefixes=[], cache_salt=None,
        num_computed_tokens=0, num_cached_tokens=0, num_preemptions=0,
    )  # fmt: skip


def measure(num_blocks: int) -> dict[str, float]:
    """Microseconds per block for each kind of operation on a pool of num_blocks."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    per_seq = 100
    count = num_blocks // per_seq
    seqs = [new_seq(i, per_seq, i * 10_000) for i in range(count)]
    timings: dict[str, float] = {}

    def timed(name: str, action: object, seqs: list[SimpleNamespace]) -> None:
        start = time.perf_counter_ns()
        for seq in seqs:
            action(seq)  # type: ignore[operator]
        timings[name] = (time.perf_counter_ns() - start) / 1000 / (count * per_seq)

    def allocate(seq: SimpleNamespace) -> None:
        hit = manager.lookup(seq)
        manager.allocate(seq, hit, len(seq.token_ids) - manager.num_computed_after(seq, hit))

    timed("hash", lambda seq: manager.lookup(seq), seqs)
    timed("allocate and fill", allocate, seqs)
    timed("release", manager.deallocate, seqs)
    again = [new_seq(count + i, per_seq, i * 10_000) for i in range(count)]
    for seq in again:
        manager.lookup(seq)
    timed("look up and claim", allocate, again)
    timed("release again", manager.deallocate, again)
    others = [new_seq(2 * count + i, per_seq, 10**9 + i * 10_000) for i in range(count)]
    for seq in others:
        manager.lookup(seq)
    timed("evict, allocate and fill", allocate, others)
    manager.check(others)
    return timings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="pool sizes, in blocks")
    parser.add_argument("--repeats", type=int, default=3, help="best of this many runs")
    args = parser.parse_args()
    results = {}
    for num_blocks in args.blocks:
        runs = [measure(num_blocks) for _ in range(args.repeats)]
        results[num_blocks] = {name: min(run[name] for run in runs) for name in runs[0]}
    print(f"{'us per block, pool of':28s}" + "".join(f"{n:>12,}" for n in args.blocks))
    for name in next(iter(results.values())):
        print(f"{name:28s}" + "".join(f"{results[n][name]:12.2f}" for n in args.blocks))


if __name__ == "__main__":
    main()
