"""Frames recorded from a real vLLM server against what the same process said of itself."""

import base64
import json
from itertools import pairwise

import pytest
from conftest import shared_data

from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.formats import decode_batch
from pagedcli.kvevents.wire import Removed, Stored


@pytest.fixture(scope="module")
def messages():
    lines = (shared_data("vllm_events") / "events.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["t"], [base64.b64decode(frame) for frame in row["frames"]]) for row in rows]


@pytest.fixture(scope="module")
def truth():
    return json.loads((shared_data("vllm_events") / "truth.json").read_text())


def single_changes(messages):
    """(stored?, hash, parent, tokens) of each block, in order."""
    for _, frames in messages:
        for event in decode_batch(frames[2]).events:
            if isinstance(event, Removed):
                yield from ((False, block_hash, None, None) for block_hash in event.hashes)
            else:
                assert isinstance(event, Stored)
                parents = [event.parent, *event.hashes]
                for place, (parent, block_hash) in enumerate(pairwise(parents)):
                    tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                    yield True, block_hash, parent, tuple(tokens)


def resident_before_each_change(messages):
    residents, resident = [], frozenset()
    for stored, block_hash, _, _ in single_changes(messages):
        residents.append(resident)
        resident = resident | {block_hash} if stored else resident - {block_hash}
    return [*residents, resident]


def test_the_counts_of_the_recording_are_those_its_readme_gives(messages):
    state = KVState(["vllm"])
    for time_s, frames in messages:
        state.take(frames, time_s)
    (tree,) = state.trees
    assert (state.num_batches, state.total("num_unique"), sum(tree.num_again.values())) == (52, 113, 5)
    assert state.history.peak_resident == 66 <= 70
    assert (state.num_malformed, tree.num_unknown_removals, tree.num_more_copies) == (0, 0, 0)
    assert not state.notes
    assert not state.unknown_fields


def test_every_request_had_the_longest_resident_prefix_cached(messages, truth):
    """vLLM admits requests in the order they came, so their lookups have an order, too: each happens before its first
    missing block is stored, with the cache as it was then. Without a missing full block, somewhere in between."""
    changes = list(single_changes(messages))
    residents = resident_before_each_change(messages)
    hash_of = {(parent, tokens): block_hash for stored, block_hash, parent, tokens in changes if stored}
    size, position, hits, queries, num_pinned = truth["block_size"], 0, 0, 0, 0
    for row in truth["rows"]:
        prompt, chain, parent = row["prompt_token_ids"], [], None
        for start in range(0, len(prompt) - size + 1, size):
            parent = hash_of.get((parent, tuple(prompt[start : start + size])))
            if parent is None:
                break
            chain.append(parent)

        def longest(resident, chain=chain, prompt=prompt):
            num_hit = next((i for i, block_hash in enumerate(chain) if block_hash not in resident), len(chain))
            return min(num_hit, (len(prompt) - 1) // size) * size

        cached = row["num_cached_tokens"]
        missing = chain[cached // size :]
        places = [i for i in range(position, len(changes)) if missing and changes[i][:2] == (True, missing[0])]
        if places:
            position = places[0]
            num_pinned += 1
            assert longest(residents[position]) == cached
        else:
            position = next(i for i in range(position, len(residents)) if longest(residents[i]) == cached)
        hits += longest(residents[position])
        queries += len(prompt)
    assert num_pinned > 30
    assert hits == truth["counters"]["vllm:prefix_cache_hits"] == 4448
    assert queries == truth["counters"]["vllm:prefix_cache_queries"] == 8375
    assert max(map(len, residents)) <= truth["num_gpu_blocks"] == 70
