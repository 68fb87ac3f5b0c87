"""The bounds, by brute force on small workloads: unconstrained >= clairvoyant = the best possible >= any policy."""

import pytest
from harness.core import make_seq, prefill
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.eviction import POLICIES
from pagedcli.simulation.caches import clairvoyant_hits

chains = st.lists(st.text("ab", max_size=4), min_size=1, max_size=7)


def workload(texts):
    """The blocks of requests: a block is a text up to one of its letters."""
    numbers, blocks, starts = {}, [], [0]
    for text in texts:
        blocks += [numbers.setdefault(text[:end], len(numbers)) for end in range(1, len(text) + 1)]
        starts.append(len(blocks))
    return blocks, starts


def best(texts, num_blocks):
    """Most hits of any choice of what to keep after each request: every choice is tried."""
    reached = {frozenset(): 0}  # content of the cache -> most hits so far
    for text in texts:
        chain = [text[:end] for end in range(1, len(text) + 1)][:num_blocks]
        after = {}
        for cached, hits in reached.items():
            for block in chain:
                if block not in cached:
                    break
                hits += 1
            for kept in subsets(sorted(cached - set(chain)), num_blocks - len(chain)):
                content = frozenset(kept) | set(chain)
                after[content] = max(after.get(content, 0), hits)
        reached = after
    return max(reached.values())


def subsets(blocks, most):
    if not blocks:
        return [()]
    rest = subsets(blocks[1:], most)
    return [*rest, *((blocks[0], *kept) for kept in rest if len(kept) < most)]


def run(texts, num_blocks, eviction, *, known=True):
    """Hits of each request in the real block manager, one request at a time; `known`: all are in the queue."""
    manager = BlockManager(num_blocks, 1, eviction=eviction)
    seqs = [make_seq([ord(letter) for letter in text[:num_blocks]], place) for place, text in enumerate(texts)]
    if known:
        for seq in seqs:
            manager.expect(seq)
    hits = []
    for seq in seqs:
        hits.append(len(manager.lookup(seq).block_ids))
        if seq.token_ids:
            prefill(manager, seq)
            manager.deallocate(seq)
    return hits


@settings(max_examples=150, deadline=None)
@given(texts=chains, num_blocks=st.integers(1, 5))
def test_no_choice_has_more_hits_than_the_clairvoyant(texts, num_blocks):
    clairvoyant = clairvoyant_hits(*workload(texts), num_blocks)
    assert sum(clairvoyant) == best(texts, num_blocks)


long_chains = st.lists(st.text("abc", max_size=9), min_size=1, max_size=40)


@pytest.mark.parametrize("eviction", POLICIES)
@settings(max_examples=60, deadline=None)
@given(texts=long_chains, num_blocks=st.integers(1, 20), known=st.booleans())
def test_no_policy_has_more_hits_than_the_clairvoyant(eviction, texts, num_blocks, known):
    hits = run(texts, num_blocks, eviction, known=known)
    clairvoyant = clairvoyant_hits(*workload(texts), num_blocks)
    assert sum(hits) <= sum(clairvoyant)


@settings(max_examples=100, deadline=None)
@given(texts=long_chains, num_blocks=st.integers(1, 20))
def test_next_use_with_every_request_in_the_queue_is_the_clairvoyant(texts, num_blocks):
    assert sum(run(texts, num_blocks, "next-use")) == sum(clairvoyant_hits(*workload(texts), num_blocks))
