"""Engines that follow each other on one prefix store, over a scripted executor that checks what each token sees: each
request gets the tokens that it gets alone, whatever was read."""

import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from harness.core import Simulation
from hypothesis import given, settings
from hypothesis import strategies as st
from test_core import alone, limits, play, request, same_pool
from test_store_machine import write_at_once

from pagedcli.content_files import ContentFolder
from pagedcli.core.prefixes import token_bytes, token_ids_of
from pagedcli.core.store import PrefixStore
from pagedcli.events import BlocksRestored
from pagedcli.trace.check import TraceChecker

pytestmark = pytest.mark.usefixtures("prompts_wait_in_small_batches")


class Blocks:
    """The tokens that stand for K and V."""

    def __init__(self, executor):
        self.cache, self.size = executor.cache, executor.block_size
        self.block_bytes = 8 * self.size

    def slots(self, block_id):
        return slice(block_id * self.size, (block_id + 1) * self.size)

    def read(self, block_id):
        return token_bytes(self.cache[self.slots(block_id)])

    def write(self, block_id, content):
        self.cache[self.slots(block_id)] = token_ids_of(content)


class States:
    """The tokens that a state has seen."""

    block_bytes = 200

    def __init__(self, executor):
        self.states = executor.states

    def read(self, slot_id):
        return json.dumps(self.states[slot_id]).encode().ljust(self.block_bytes)

    def write(self, slot_id, content):
        self.states[slot_id] = tuple(json.loads(content))


def engine(folder, **changes):
    """An engine with a store."""
    sim = Simulation(**changes)
    states = States(sim.executor) if sim.limits.has_states else None
    num_groups = sim.block_manager.num_groups
    memory = Blocks(sim.executor)
    sim.cache.store = PrefixStore(ContentFolder(folder), {"a": "b"}, memory, 2, num_groups, states=states)
    write_at_once(sim.cache.store)
    return sim


@pytest.fixture(scope="module", autouse=True)
def _no_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


kinds = st.sampled_from(
    [
        {},
        {"windows": (3,)},
        {"windows": (4, None)},
        *({"num_state_slots": 4, "checkpoints": name} for name in ("3", "end")),
    ]
)


@settings(max_examples=20, deadline=None)
@given(requests=st.lists(request, min_size=1, max_size=6), limits=limits, kind=kinds)
def test_after_a_restart_every_request_gets_the_tokens_that_it_gets_alone(requests, limits, kind):
    requests += requests[:2]  # what is hit is kept
    limits = {**limits, **kind, "block_size": 2, "enable_prefix_caching": True}
    limits["num_blocks"] *= len(kind.get("windows", (None,)))
    expected = {}
    for number, asked in enumerate(requests):
        expected |= alone(number, asked, windows=kind.get("windows", (None,)))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            laws = TraceChecker()
            sim = engine(Path(folder), emit=laws, trace_tokens=True, **limits)
            got, _ = play(sim, requests, [], after_step=partial(same_pool, sim, laws.state))
            sim.cache.store.close(1.0)
            assert got == {number: expected[number] for number in got}
            facts, stored = sim.stats, sim.cache.store.facts
            assert not facts.num_disk_tokens or stored.num_read_bytes
            assert facts.num_disk_tokens <= facts.num_cached_tokens
            assert not stored.not_used


def test_a_block_read_for_a_salted_prompt_may_have_held_others(tmp_path):
    """The laws took it for a block of the tokens before."""
    for salted, other in (([0, 0, 1], []), ([0, 0, 2], [[number] * 4 for number in range(1, 7)])):
        laws = TraceChecker()
        sim = engine(tmp_path, num_blocks=4, emit=laws, trace_tokens=True)
        run(sim, *other)
        outputs = run(sim, salted, salted, [3, 3], cache_salt="a")
        sim.cache.store.close(1.0)
    assert outputs[0].num_disk_tokens == 2


def run(sim, *prompts, **options):
    """Their outputs, one after the other."""
    outputs = []
    for number, prompt in enumerate(prompts):
        sim.add(prompt, 1, request_id=str(number), **options)
        while sim.has_unfinished_requests():
            outputs += sim.step()
    return outputs


@pytest.mark.parametrize("num_spans", [1, 3])
@pytest.mark.parametrize("windows", [(None,), (3, None)])
def test_what_two_prompts_had_in_common_is_read_and_not_computed(tmp_path, num_spans, windows):
    prompt, events = [1, 2, 3, 4, 1, 3][: 2 * num_spans], []
    first = engine(tmp_path, num_blocks=20, windows=windows)
    assert [output.num_disk_tokens for output in run(first, [*prompt, 0], [*prompt, 1])] == [0, 0]
    run(first, [7, 8], [8, 7])  # what is hit in a step is written in the next, and counted in the one after it
    assert first.cache.store.facts.num_written_blocks > 0
    first.cache.store.close(0.5)
    sim = engine(tmp_path, num_blocks=20, windows=windows, emit=events.append)
    [output] = run(sim, [*prompt, 2])
    assert (output.num_cached_tokens, output.num_disk_tokens) == (2 * num_spans, 2 * num_spans)
    assert (sim.stats.num_computed_tokens, sim.stats.num_disk_tokens) == (1, 2 * num_spans)
    [restored] = [event for event in events if isinstance(event, BlocksRestored)]
    assert len(restored.hashes) == restored.indices[-1] + 1 == len(windows) * num_spans
    assert len(restored.block_ids) == len(restored.indices) == sim.cache.store.facts.num_read_blocks
    private = engine(tmp_path, num_blocks=20, windows=windows)
    [output] = run(private, [*prompt, 2], is_private=True)
    assert (output.num_cached_tokens, private.stats.num_disk_tokens, output.num_disk_tokens) == (0, 0, None)


@pytest.mark.parametrize("num_spans", [1, 2])
def test_a_state_is_read_with_the_blocks_before_it(tmp_path, num_spans):
    prompt, limits = [1] + [2] * 2 * num_spans, {"num_blocks": 20, "num_state_slots": 4, "checkpoints": "end"}
    first = engine(tmp_path, **limits)
    run(first, prompt, prompt)
    first.cache.store.close(0.5)
    assert first.cache.store.facts.num_written_states == 1
    sim = engine(tmp_path, **limits)
    [output] = run(sim, prompt)
    assert (output.num_disk_tokens, sim.stats.num_computed_tokens) == (2 * num_spans, 1)
    facts = sim.cache.store.facts
    assert (facts.num_read_blocks, facts.num_read_states, sim.stats.num_snapshot_hits) == (num_spans, 1, 1)
