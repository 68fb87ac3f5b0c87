"""The curve of a larger cache against a cache that is larger."""

import random
from collections import OrderedDict

from kv_event_harness import message, removed, stored

from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import SIZES


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
        state = KVState(larger=range(1, 40))
        state.take(message(0, *events), 0.0)
        kept = {point.num_more_blocks: point.num_blocks_kept for point in state.curve()}
        for more in range(1, 30):
            saved = num_misses - lru(accesses, size + more)[1]
            at_most = max((blocks for n, blocks in kept.items() if n <= more + 1), default=0)
            at_least = max((blocks for n, blocks in kept.items() if n <= more), default=0)
            assert at_least <= saved <= at_most


def test_a_cleared_cache_would_have_been_cleared_at_any_size():
    state = KVState(larger=SIZES)
    state.take(message(0, stored(1, 2), removed(2), {"type": "AllBlocksCleared"}, stored(1, 2)), 0.0)
    assert state.curve() == []


def test_a_block_that_was_pushed_out_once_does_not_come_back_when_others_leave():
    """With one more block, 3 would have been evicted for 2; that 2 is hit later does not bring 3 back."""
    state = KVState(larger=SIZES)
    events = [stored(1, 2, 3), removed(3), removed(2), stored(2, parent=1), stored(3, parent=2)]
    state.take(message(0, *events), 0.0)
    assert [(point.num_more_blocks, point.num_blocks_kept, point.num_tokens_kept) for point in state.curve()] == [
        (1, 1, 2), (2, 2, 4),
    ]  # fmt: skip
