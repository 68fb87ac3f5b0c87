"""What eviction policies lose: python scripts/bench_eviction.py [--mooncake TRACE] [--mt-bench FILE --replies FILE]

Serves sets of prompts in their order, one after another, from pools of 5, 10, 25 and 50 % of their unique blocks, and
prints for each policy the prompt tokens computed again and how much of the gap between lru and the clairvoyant it
closes. Sets: a synthetic tree with three levels; with --mooncake a trace by its hashes; with --mt-bench conversations
made of its questions and of replies (the prompts of ifeval). --read-ahead compares windows of next-use. --write DIR
writes the sets of prompts as JSONL. --wall ROUNDS times `pagedcli generate` on them, with lru and next-use in turns.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.batch.run import READ_AHEAD_POOLS
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig
from pagedcli.core.block_manager import BlockManager
from pagedcli.events import Eviction
from pagedcli.planning.decide import model_folder
from pagedcli.simulation.caches import (
    NEVER,
    Accesses,
    Ints,
    Prompt,
    accesses_of,
    clairvoyant_hits,
    hits_per_request,
    stack_distances,
    tokens_of_hits,
    unscheduled_hits,
)
from pagedcli.simulation.formats import read_traces
from pagedcli.simulation.requests import TraceRequest, Workload

POOLS = (0.05, 0.10, 0.25, 0.50)  # of the unique blocks
POLICIES: tuple[Eviction, ...] = ("lru", "fifo", "lfu", "prefix-lru")
WINDOWS = (0.25, 0.5, 1, 2, 4, 8, 16)  # prompt tokens, in pools
VOCAB_SIZE, LONGEST = 1024, 2000  # of the built-in model
BLOCK_SIZE = 16
WALL_POOL = 0.10  # of the unique blocks


def tree_prompts(rng: random.Random) -> list[list[int]]:
    """8 instructions of 256 tokens, 16 documents of 256 tokens for each, 10 questions of 40 for each; in any order."""

    def tokens(num: int) -> list[int]:
        return [rng.randrange(1, VOCAB_SIZE) for _ in range(num)]

    prompts = []
    for _ in range(8):
        instructions = tokens(256)
        for _ in range(16):
            document = instructions + tokens(256)
            prompts += [document + tokens(40) for _ in range(10)]
    rng.shuffle(prompts)
    return prompts


def chat_prompts(rng: random.Random, questions: Path, replies: Path, num_turns: int = 4) -> list[list[int]]:
    """80 conversations under one system prompt. A turn repeats those before it; turns of different conversations
    alternate in any order. Conversations that exceed the context of the built-in model end early."""
    tokenizer = Tokenizer(model_folder(EngineConfig()))
    asked = [turn for line in questions.read_text().splitlines() for turn in json.loads(line)["turns"]]
    answers = [json.loads(line)["prompt"] for line in replies.read_text().splitlines()]
    system = tokenizer.encode(
        "You are a helpful assistant. Answer in full sentences, and say so if you are not sure. " * 2
    )
    conversations: list[list[list[int]]] = []
    for first in range(0, len(asked), 2):
        so_far, turns = list(system), []
        for turn in range(num_turns):
            so_far = so_far + tokenizer.encode("\nUser: " + asked[(first + turn) % len(asked)] + "\nAssistant: ")
            turns.append(so_far)
            so_far = so_far + tokenizer.encode(answers[(first * num_turns + turn) % len(answers)])
        conversations.append([turn for turn in turns if len(turn) <= LONGEST])
    order = [place for place, turns in enumerate(conversations) for _ in turns]
    rng.shuffle(order)
    following = [iter(turns) for turns in conversations]
    return [next(following[place]) for place in order]


def workload_of(prompts: list[list[int]]) -> Workload:
    requests = [TraceRequest(str(i), None, len(ids), 1, token_ids=array("q", ids)) for i, ids in enumerate(prompts)]
    return Workload(requests, "prompts")


def windowed_hits(accesses: Accesses, num_blocks: int, read_ahead: int) -> Ints:
    """[R] blocks that hit with next-use, which knows that many prompt tokens of the requests to come."""
    manager = BlockManager(num_blocks, 1, eviction="next-use")
    blocks, starts = accesses.blocks.tolist(), accesses.starts.tolist()
    prompts = [Prompt(i, blocks[starts[i] : starts[i + 1]][:num_blocks]) for i in range(accesses.num_requests)]
    costs = np.maximum(accesses.prompt_tokens, 128).tolist()
    hits = np.zeros(len(prompts), dtype=np.int64)
    num_known = num_ahead = 0
    for place, prompt in enumerate(prompts):
        while num_known < len(prompts) and (num_ahead < read_ahead or num_known <= place):
            manager.expect(prompts[num_known])
            num_ahead += costs[num_known]
            num_known += 1
        if prompt.token_ids:
            hit = manager.lookup(prompt)
            hits[place] = len(hit.block_ids)
            manager.allocate(prompt, hit, len(prompt.token_ids) - manager.num_computed_after(prompt, hit))
            manager.deallocate(prompt)
        num_ahead -= costs[place]
    return hits


class PromptSet:
    """One set of prompts, and the tokens that hit under each policy."""

    def __init__(self, name: str, workload: Workload, block_size: int) -> None:
        self.accesses = accesses_of(workload, block_size)
        distances = stack_distances(self.accesses)
        self.unlimited = int(hits_per_request(self.accesses, distances != NEVER).sum())
        total = int(self.accesses.prompt_tokens.sum())
        print(
            f"\n{name}: {self.accesses.num_requests:,} prompts, {total:,} tokens,"
            f" {self.accesses.num_unique:,} unique blocks of {block_size} tokens;"
            f" {100 * self.unlimited / total:.1f} % hit in an unlimited cache"
        )

    def num_blocks(self, share: float) -> int:
        return round(share * self.accesses.num_unique)

    def tokens(self, hits: Ints | list[int]) -> int:
        return int(tokens_of_hits(self.accesses, np.asarray(hits)).sum())

    def bound(self, num_blocks: int) -> int:
        return self.tokens(clairvoyant_hits(*self._lists(), num_blocks))

    def _lists(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.accesses.blocks.tolist(), self.accesses.starts.tolist()

    def print_policies(self) -> None:
        """Prompt tokens computed again, and the share of the gap between lru and the clairvoyant that is closed."""
        print("  thousand prompt tokens computed again (share of the gap between lru and the clairvoyant closed)")
        names = [*POLICIES, "next-use", "clairvoyant"]
        print("  pool   blocks" + "".join(f"{name:>18s}" for name in names))
        for share in POOLS:
            size = self.num_blocks(share)
            found = [self.tokens(unscheduled_hits(self.accesses, size, policy)) for policy in POLICIES]
            found.append(
                self.tokens(windowed_hits(self.accesses, size, READ_AHEAD_POOLS * size * self.accesses.block_size))
            )
            found.append(self.bound(size))
            lru, bound = found[0], found[-1]
            cells = [
                f"{(self.unlimited - tokens) / 1000:,.0f} ({_percent(tokens - lru, bound - lru)})" for tokens in found
            ]
            print(f"  {share:4.0%} {size:8,}" + "".join(f"{cell:>18s}" for cell in cells))

    def print_windows(self) -> None:
        """The share of the gap that next-use closes, by the prompt tokens that it knows."""
        print("  share of the gap closed by next-use that knows so many times the pool's tokens")
        print("  pool  " + "".join(f"{window:12g}" for window in WINDOWS))
        for share in POOLS:
            size = self.num_blocks(share)
            lru, bound = self.tokens(unscheduled_hits(self.accesses, size)), self.bound(size)
            tokens_of_pool = size * self.accesses.block_size
            found = [self.tokens(windowed_hits(self.accesses, size, int(w * tokens_of_pool))) for w in WINDOWS]
            print(f"  {share:4.0%}  " + "".join(f"{_percent(tokens - lru, bound - lru):>12s}" for tokens in found))


def print_wall_times(prompts: dict[str, list[list[int]]], num_rounds: int) -> None:
    """Median seconds of whole runs on the built-in model, processes of the two policies in turns."""
    print("seconds of generate, 8 sequences at a time, 8 tokens each: median (least, most), and prompt tokens computed")
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), prompts)
        for name, each in prompts.items():
            num_blocks = round(WALL_POOL * accesses_of(workload_of(each), BLOCK_SIZE).num_unique)
            found: dict[str, list[float]] = {"lru": [], "next-use": []}
            computed = {}
            for _ in range(num_rounds):
                for eviction in found:
                    summary = generate(Path(folder), name, eviction, num_blocks)
                    found[eviction].append(summary["elapsed_s"])
                    computed[eviction] = summary["prompt_tokens"] - summary["cached_tokens"]
            for eviction, times in found.items():
                spread = f"{statistics.median(times):6.2f} ({min(times):.2f}, {max(times):.2f})"
                print(f"  {name:6s} {num_blocks:5,} blocks  {eviction:9s} {spread}  {computed[eviction]:,}", flush=True)


def generate(folder: Path, name: str, eviction: str, num_blocks: int) -> dict[str, Any]:
    """The summary of a run in a process of its own."""
    command: list[str | Path] = [
        sys.executable, "-m", "pagedcli", "generate", folder / f"{name}.jsonl", "-o", folder / "out.jsonl",
        "--overwrite", "--summary-json", folder / "summary.json", "--eviction", eviction,
        "--num-gpu-blocks-override", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "8",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def write_rows(folder: Path, prompts: dict[str, list[list[int]]]) -> None:
    for name, each in prompts.items():
        rows = [json.dumps({"id": place, "prompt": ids, "max_tokens": 8}) for place, ids in enumerate(each)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mooncake", metavar="TRACE", help="Mooncake's conversation trace")
    parser.add_argument("--mt-bench", type=Path, metavar="FILE", help="MT-bench's questions")
    parser.add_argument("--replies", type=Path, metavar="FILE", help="prompts that serve as replies: ifeval's")
    parser.add_argument("--read-ahead", action="store_true", help="compare windows of next-use")
    parser.add_argument("--wall", type=int, metavar="ROUNDS", help="time runs on the built-in model, and end")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the sets of prompts as JSONL, and end")
    args = parser.parse_args()
    prompts = {"tree": tree_prompts(random.Random(1))}
    if args.mt_bench is not None:
        prompts["chats"] = chat_prompts(random.Random(1), args.mt_bench, args.replies)
    if args.write is not None:
        write_rows(args.write, prompts)
        return
    if args.wall is not None:
        print_wall_times(prompts, args.wall)
        return
    workloads = {name: (workload_of(each), BLOCK_SIZE) for name, each in prompts.items()}
    if args.mooncake is not None:
        trace = read_traces([args.mooncake], "mooncake")
        workloads["mooncake"] = trace, trace.hash_size or BLOCK_SIZE
    for name, (workload, block_size) in workloads.items():
        prompt_set = PromptSet(name, workload, block_size)
        prompt_set.print_windows() if args.read_ahead else prompt_set.print_policies()


if __name__ == "__main__":
    main()
