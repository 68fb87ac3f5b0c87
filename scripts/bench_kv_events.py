"""KV events folded per second on one core: python scripts/bench_kv_events.py

A synthetic vLLM stream in the map form with every field a real server sends: a pool of 20,000 blocks of 32 tokens that
is full, so that each stored block evicts one; 8 BlockStored of one block and 8 BlockRemoved per message.
"""

import argparse
import random
import time

import msgspec

from pagedcli.kvevents.fold import KVState


def messages(num_messages: int, block_size: int = 32, pool: int = 20_000) -> list[list[bytes]]:
    rng = random.Random(0)
    resident: list[int] = []
    made = []
    for seq in range(num_messages):
        events: list[dict[str, object]] = []
        for _ in range(8):
            block_hash = rng.getrandbits(64)
            events.append(
                {
                    "type": "BlockStored", "block_hashes": [block_hash],
                    "parent_block_hash": resident[-1] if resident else None,
                    "token_ids": [rng.randrange(150_000) for _ in range(block_size)], "block_size": block_size,
                    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )  # fmt: skip
            resident.append(block_hash)
            evicted = resident.pop(0) if len(resident) > pool else rng.getrandbits(64)
            events.append({"type": "BlockRemoved", "block_hashes": [evicted], "medium": "GPU", "group_idx": 0})
        payload = msgspec.msgpack.encode([1e9 + seq / 100, events, 0])
        made.append([b"kv", seq.to_bytes(8, "big"), payload])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    args = parser.parse_args()
    stream = messages(args.messages)
    state = KVState(["bench"])
    start = time.process_time()
    for seq, frames in enumerate(stream):
        state.take(frames, seq / 100)
    seconds = time.process_time() - start
    print(f"{state.num_events:,} events in {seconds:.2f} s of processor time: {state.num_events / seconds:,.0f} per s")


if __name__ == "__main__":
    main()
