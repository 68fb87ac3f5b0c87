"""The verdict on a cache from its events, what a larger one would have kept, and the requests that events show."""

import json
import random
from collections import OrderedDict

import msgspec
import pytest
from cli_harness import pagedcli
from kv_event_harness import CLEARED, message, numbered, read_lookups, record, removed, state_of, stored

from pagedcli.answers.cures import cures
from pagedcli.answers.why import Reasons, why_of_server
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.tree import SIZES
from pagedcli.planning.prompt_sample import PromptSample


def judged(*messages):
    return why_of_server(state_of(*numbered(messages), larger=SIZES))


MORE_MEMORY = (
    "; give the cache more memory (vLLM: --gpu-memory-utilization, SGLang: --mem-fraction-static, TensorRT-LLM:"
    " free_gpu_memory_fraction)."
)


def test_what_was_evicted_and_stored_again_is_counted_with_the_blocks_that_would_have_kept_it():
    first = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], [stored(3, 4, parent=2)])
    counts = "33.3 % of the stored blocks (2 of 6) had been evicted before"
    assert first == f"{counts}; 2 more blocks would have kept at least 2 of these{MORE_MEMORY}"


def test_a_running_server_says_nothing_of_larger_caches():
    state = state_of(*numbered(([stored(1, 2)], [removed(2), removed(1)], [stored(1, 2)])))
    assert "more blocks would have kept" not in why_of_server(state)


def test_answers_that_are_generated_again_are_counted_apart():
    first = judged([stored(1, 2)], [removed(2)], [stored(2, parent=1)])
    assert first == (
        "No block of a prompt was stored again after an eviction; 1 block came back alone, as answers do that are"
        " generated again: a cache saves none of these."
    )


def test_what_a_larger_cache_would_have_kept_is_said_of_prompts_alone():
    """Two blocks of a prompt come back, and one by itself: the last block of an answer."""
    first = judged(
        [stored(1, 2, 3, 4)], [removed(4), removed(3), removed(2)], [stored(2, 3, parent=1)], [stored(4, parent=3)]
    )
    assert first == (
        "28.6 % of the stored blocks (2 of 7) had been evicted before; 2 more blocks would have kept at least 2 of"
        " these; 1 more block came back alone, as answers do that are generated again: a cache saves none of these"
        f"{MORE_MEMORY}"
    )


def test_a_block_after_one_that_came_back_in_the_same_message_is_no_answer():
    again = [stored(3, parent=2), stored(4, parent=3)]
    first = judged([stored(1, 2, 3, 4)], [removed(4), removed(3)], again)
    assert first.startswith("33.3 % of the stored blocks (2 of 6) had been evicted before; 2 more blocks")


def test_a_block_that_came_back_alone_after_the_cache_was_cleared_was_not_evicted():
    first = judged([stored(1, 2)], [{"type": "AllBlocksCleared"}], [stored(1)], [stored(2, parent=1)])
    assert first == "No block of a prompt was stored again after an eviction."


def test_an_empty_stream_is_not_judged():
    assert judged() == "No block was stored, so there is nothing to judge."


def test_the_commands_begin_with_the_answer(tmp_path):
    batches = [[stored(1, 2, 3)], [removed(3), removed(2)], [stored(2, 3, parent=1)]]
    path = record(tmp_path / "events.jsonl.zst", numbered(batches))
    begins = "40.0 % of the stored blocks (2 of 5)"
    for command in ("explain", "attach"):
        assert pagedcli(command, path).stdout.startswith(begins)
        document = json.loads(pagedcli(command, path, "--format", "json").stdout)
        assert document["answer"][0].startswith(begins)
    pagedcli("explain", path, "-o", tmp_path / "page.html")
    assert begins in (tmp_path / "page.html").read_text()


def test_a_recording_with_tokens_says_where_prompts_diverge_as_other_commands_do(tmp_path):
    """Twenty chats that begin with another number each and are equal after it, as a server stores their blocks."""
    library = list(range(100, 164))
    rows = [[7, 200 + number, *library, *[300 + number] * 14] for number in range(20)]
    batches = [
        [stored(*range(10 * number + 1, 10 * number + 6), tokens=ids, block_size=16)] for number, ids in enumerate(rows)
    ]
    paths = [record(tmp_path / f"{tokens}.jsonl", numbered(batches), tokens=tokens) for tokens in (True, False)]
    with_tokens, without = (
        json.loads(pagedcli("explain", path, "--format", "json").stdout)["answer"] for path in paths
    )
    sample = PromptSample()
    for ids in rows:
        sample.add(ids)
    [expected] = cures(None, prompts=sample, block_size=16)
    assert with_tokens[1] == expected.text
    assert expected.text.startswith("19 of 20 prompts diverge at token 1. ")
    assert not any("raises hits" in each for each in without)
    assert pagedcli("attach", paths[0]).stdout.splitlines()[1] == expected.text


def lru(accesses, num_blocks):
    """The events of an LRU cache of single blocks, and its misses."""
    cache, events, num_misses = OrderedDict(), [], 0
    for block_hash in accesses:
        if block_hash in cache:
            cache.move_to_end(block_hash)
            continue
        num_misses += 1
        if len(cache) == num_blocks:
            events.append(removed(cache.popitem(last=False)[0]))
        cache[block_hash] = None
        events.append(stored(block_hash))
    return events, num_misses


def test_the_curve_is_a_lower_bound_that_one_more_block_closes():
    """The block that makes room for the one stored again comes on the list before that one leaves it, which the larger
    cache would not have had to evict: so the curve may be one block late, never early."""
    rng = random.Random(3)
    for _ in range(20):
        accesses = [min(rng.randrange(40), rng.randrange(40)) for _ in range(400)]
        size = rng.randrange(3, 12)
        events, num_misses = lru(accesses, size)
        state = state_of(message(0, *events), larger=range(1, 40))
        kept = {point.num_more_blocks: point.num_blocks_kept for point in state.curve()}
        assert all(point.num_tokens_kept == 2 * point.num_blocks_kept for point in state.curve())
        for more in range(1, 30):
            saved = num_misses - lru(accesses, size + more)[1]
            at_most = max((blocks for n, blocks in kept.items() if n <= more + 1), default=0)
            at_least = max((blocks for n, blocks in kept.items() if n <= more), default=0)
            assert at_least <= saved <= at_most


def test_a_cleared_cache_would_have_been_cleared_at_any_size():
    cleared = message(0, stored(1, 2), removed(2), CLEARED, stored(1, 2))
    assert state_of(cleared, larger=SIZES).curve() == []


def salts(found):
    return Reasons("", found.lookups(), found.block_size).salts()


def lookups_of(folder, batches):
    return read_lookups(CaptureReader(record(folder / "a.jsonl", numbered(batches))))


def chains(folder, batches):
    found = lookups_of(folder, batches)
    return [(request.num_hit, request.num_prompt, found.depth(request.end)) for request in found.requests]


def test_what_comes_before_a_stored_run_was_found(tmp_path):
    batches = [[stored(1, 2, 3)], [stored(4, 5, parent=2)], [stored(6, parent=5)], [stored(7, parent=6)]]
    # the second hits 2 blocks and generates 2 alone; the third continues the first after a while, and hits 3
    assert chains(tmp_path, [*batches, [stored(8, 9, parent=3)]]) == [(0, 3, 3), (2, 4, 6), (3, 5, 5)]


def test_the_next_chunk_of_a_prompt_is_the_same_request(tmp_path):
    batches = [[stored(1, 2)], [stored(3, 4, parent=2)], [stored(9, 10)], [stored(5, 6, parent=4)]]
    assert chains(tmp_path, batches) == [(0, 4, 4), (0, 2, 2), (4, 6, 6)]


def test_a_block_that_comes_and_goes_does_not_hide_what_a_prompt_begins_with(tmp_path):
    comes_and_goes = [[stored(2)], [removed(2)]] * 300
    batches = [[stored(1, tokens=[5, 6])], *comes_and_goes, [stored(3, tokens=[5, 7])]]
    found = lookups_of(tmp_path, batches)
    assert found.requests[-1].num_partial_tokens == 1


@pytest.mark.parametrize("tokens", [True, False])
def test_salts_keep_requests_apart_and_have_hit_rates_of_their_own(tmp_path, tokens):
    """The same three blocks for tenant a, twice for tenant b, and without a salt."""
    one, other = ({"extra_keys": [[salt], None, None]} for salt in ("tenant-a", "tenant-b"))
    same = [7, 7, 8, 8, 9, 9]
    batches = [
        [stored(1, 2, 3, tokens=same, **one)],
        [stored(11, 12, 13, tokens=same, **other)],
        [stored(14, parent=13, tokens=[5, 5]), stored(15, 16, parent=13, tokens=[6, 6, 7, 7])],
        [stored(21, 22, 23, tokens=same)],
    ]
    path = record(tmp_path / "salts.jsonl", numbered(batches), tokens=tokens)
    found = read_lookups(CaptureReader(path))
    assert [request.num_hit for request in found.requests] == [0, 0, 3, 0]
    reasons = ["no_shared_prefix", "different_salt", "not_seen_before", "different_salt"]
    assert [each.reason for each in found.lookups()] == reasons
    rows = {row.salt: (row.num_lookups, row.num_tokens, row.tokens_hit) for row in salts(found)}
    assert rows == {"1": (1, 6, 0), "2": (2, 16, 6), "none": (1, 6, 0)}
    assert salts(lookups_of(tmp_path, [[stored(1, 2)]])) == []
    document = msgspec.json.decode(pagedcli("explain", path, "--format", "json").stdout)
    assert [row["salt"] for row in document["salts"]] == ["2", "1", "none"]
    assert "tenant" not in pagedcli("attach", path).stdout
