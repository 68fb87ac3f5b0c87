"""Rows bucketed by prefix, dealt round-robin and at random: what each worker's block manager finds and computes.

    python scripts/compare_distribution.py [--workers 4] [--blocks 2000] [--trace mooncake.jsonl]

Runs the real block manager of each worker over three prompt sets with shared prefixes, without a model: a worker holds
32 requests at a time, in the order in which it gets them, and its pool evicts.
"""

import argparse
import json
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.sequence import Sequence
from pagedcli.distributed.partition import PrefixKeys
from pagedcli.sampling_params import SamplingParams

BLOCK_SIZE, AT_ONCE, NUM_OUTPUT = 16, 32, 64
Prompts = list[list[int]]


def documents(rng: random.Random) -> Prompts:
    """Questions about 120 documents of 200 to 3,000 tokens, 2 to 40 each."""
    rows = []
    for document in range(120):
        text = [document * 4000 + place for place in range(int(200 * 15 ** rng.random()))]
        rows += [text + _own(rng, 30) for _ in range(int(2 * 20 ** rng.random()))]
    rng.shuffle(rows)
    return rows


def few_shot(rng: random.Random) -> Prompts:
    """One system prompt of 200 tokens, 40 tasks with examples of 300 to 1,200 tokens; a few tasks have most rows."""
    system = list(range(200))
    tasks = [[task * 2000 + place for place in range(rng.randint(300, 1200))] for task in range(1, 41)]
    weights = [1 / rank for rank in range(1, 41)]
    return [system + task + _own(rng, 40) for task in rng.choices(tasks, weights, k=2000)]


def conversations(path: Path) -> Prompts:
    """Requests of a production trace with hash_ids, each block of 512 tokens as one of 16."""
    with path.open() as file:
        return [_blocks(json.loads(line)["hash_ids"]) for line in file]


def _own(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(10**7, 10**8) for _ in range(rng.randint(num_tokens // 2, num_tokens * 2))]


def _blocks(hash_ids: list[int]) -> list[int]:
    return [hash_id * BLOCK_SIZE + place for hash_id in hash_ids for place in range(BLOCK_SIZE)]


def ways(prompts: Prompts, num_workers: int) -> Iterator[tuple[str, list[list[int]]]]:
    """A name, and the rows of each worker in the order in which it serves them."""
    keys = PrefixKeys(BLOCK_SIZE)
    for prompt in prompts:
        keys.add(prompt, NUM_OUTPUT)
    yield "bucketed", [rows.tolist() for rows in keys.ordered().parts(num_workers)]
    rows = list(range(len(prompts)))
    yield "round-robin", [rows[worker::num_workers] for worker in range(num_workers)]
    random.Random(1).shuffle(rows)
    yield "random", [sorted(rows[worker::num_workers]) for worker in range(num_workers)]


def computed_tokens(prompts: Prompts, rows: list[int], num_blocks: int) -> int:
    """Prompt tokens that a worker computes."""
    manager, running, num_computed = BlockManager(num_blocks, BLOCK_SIZE), deque[Sequence](), 0
    for row in rows:
        seq = Sequence(row, str(row), prompts[row], SamplingParams(), max_new_tokens=1)
        num_tokens = len(prompts[row])
        while True:
            hit = manager.lookup(seq)
            num_new = num_tokens - manager.num_computed_after(seq, hit)
            if len(running) < AT_ONCE and manager.can_allocate(seq, hit, num_new):
                break
            manager.deallocate(running.popleft())
        manager.allocate(seq, hit, num_new)
        running.append(seq)
        num_computed += num_new
    return num_computed


def compare(name: str, prompts: Prompts, num_workers: int, num_blocks: int) -> Iterator[dict[str, object]]:
    """A row of figures per way of distribution."""
    total = sum(map(len, prompts))
    for way, shares in ways(prompts, num_workers):
        computed = [computed_tokens(prompts, rows, num_blocks) for rows in shares]
        work = [tokens + NUM_OUTPUT * len(rows) for tokens, rows in zip(computed, shares, strict=True)]
        yield {
            "prompts": name,
            "rows": len(prompts),
            "tokens": total,
            "way": way,
            "computed": sum(computed),
            "hit rate": 1 - sum(computed) / total,
            "max / mean": max(work) * num_workers / sum(work),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2000, help="in each worker's pool, of 16 tokens")
    parser.add_argument("--trace", type=Path, help="a trace with hash_ids, such as Mooncake's conversation_trace.jsonl")
    arguments = parser.parse_args()
    sets = {"documents": documents(random.Random(0)), "few-shot tasks": few_shot(random.Random(0))}
    if arguments.trace is not None:
        sets["conversations"] = conversations(arguments.trace)
    print("| prompts | rows | prompt tokens | way | computed | hit rate | max / mean |")
    print("|---|---|---|---|---|---|---|")
    for name, prompts in sets.items():
        for row in compare(name, prompts, arguments.workers, arguments.blocks):
            print(
                f"| {name} | {row['rows']:,} | {row['tokens']:,} | {row['way']} | {row['computed']:,} |"
                f" {100 * row['hit rate']:.1f} % | {row['max / mean']:.2f} |"
            )


if __name__ == "__main__":
    main()
