"""Groups of layers in a trace: what no model has is refused, and each block belongs to the group of its place."""

import msgspec
import pytest
from harness.core import Simulation, check_events, simulated

from pagedcli.app.sequences import block_facts, sequence_facts
from pagedcli.errors import TraceError
from pagedcli.events import BlockCopied, CacheGroup, StepFinished
from pagedcli.trace.check import TraceChecker
from pagedcli.views.cache_groups import group_of, group_uses, group_words
from pagedcli.views.moment import Moment

WINDOWS = (4, None, 6)
WIDE = CacheGroup(None, (1, 2), (1, 2), 16)  # two layers of one head of two elements of two bytes, K and V
NARROW = CacheGroup(4, (0,), (3, 2), 24)


@pytest.fixture(scope="module")
def events():
    return simulated(num_blocks=18 * len(WINDOWS), windows=WINDOWS)


def with_groups(events, *groups, **changes):
    """The same run of an engine with these groups in blocks of 2 tokens."""
    start, *rest = events
    known = [group.token_bytes or 0 for group in groups]
    return [
        msgspec.structs.replace(start, **{"groups": groups, "block_bytes": 2 * max(known, default=0), **changes}),
        *rest,
    ]


def changed(group, **changes):
    return msgspec.structs.replace(group, **changes)


def test_groups_of_any_heads_that_fit_their_block_are_lawful():
    events = simulated(num_blocks=40, windows=(4, None))
    check_events(with_groups(events, NARROW, WIDE))
    check_events(with_groups(events, CacheGroup(4), CacheGroup()))  # simulated without a model
    int8 = [changed(NARROW, token_bytes=2 * 3 * (2 + 4)), changed(WIDE, token_bytes=2 * 2 * (2 + 4))]
    check_events(with_groups(events, *int8))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], r"groups of layers with windows \(\)"),
        ([changed(NARROW, window=0), WIDE], r"groups of layers with windows \(0, None\)"),
        ([changed(NARROW, window=-4), WIDE], r"groups of layers with windows \(-4, None\)"),
        ([changed(NARROW, layers=()), WIDE], r"groups of layers \[\[\], \[1, 2\]\]"),
        ([changed(NARROW, layers=(-1,)), WIDE], r"groups of layers \[\[-1\]"),
        ([changed(NARROW, layers=(2,)), WIDE], r"groups of layers \[\[2\], \[1, 2\]\]"),
        ([NARROW, changed(WIDE, layers=(2, 1))], r"groups of layers \[\[0\], \[2, 1\]\]"),
        ([NARROW, changed(WIDE, layers=(1, 1))], r"groups of layers \[\[0\], \[1, 1\]\]"),
        ([changed(NARROW, heads=None), WIDE], r"groups of layers with heads \[None, \(1, 2\)\]"),
        ([changed(NARROW, heads=(0, 2)), WIDE], r"groups of layers with heads \[\(0, 2\)"),
        ([changed(NARROW, heads=(3, -2)), WIDE], r"groups of layers with heads \[\(3, -2\)"),
        ([changed(NARROW, token_bytes=None), WIDE], r"take \[None, 16\] bytes per token, which no dtype explains"),
        ([changed(NARROW, token_bytes=25), WIDE], r"take \[25, 16\] bytes per token, which no dtype explains"),
        ([changed(NARROW, token_bytes=48), WIDE], r"take \[48, 16\] bytes per token, which no dtype explains"),
        ([changed(NARROW, layers=(0, 3)), WIDE], "which no dtype explains"),
        ([changed(NARROW, heads=(6, 2)), WIDE], "which no dtype explains"),
        ([CacheGroup(4), WIDE], r"groups of layers \[\[\], \[1, 2\]\]"),
    ],
)
def test_groups_that_no_model_has_are_refused(events, groups, message):
    with pytest.raises(TraceError, match=message):
        check_events(with_groups(events, *groups, block_bytes=48))


@pytest.mark.parametrize("block_bytes", [0, 47, 49, 96])
def test_a_block_of_other_bytes_than_the_largest_group_takes_is_refused(events, block_bytes):
    with pytest.raises(TraceError, match=f"a block has {block_bytes} bytes, but the largest group takes 48"):
        check_events(with_groups(events, NARROW, WIDE, block_bytes=block_bytes))


@pytest.mark.parametrize("windows", [(None,), (5,), (4, None), (3, 3, None)])
@pytest.mark.parametrize("fails", [0.0, 0.1])
def test_each_block_belongs_to_the_group_of_its_place_in_every_table(windows, fails):
    checker, num_copies = TraceChecker(), 0
    for event in simulated(num_blocks=16 * len(windows), windows=windows, fails=fails):
        checker(event)
        state = checker.state
        num_copies += isinstance(event, BlockCopied)
        for seq in state.running() if isinstance(event, StepFinished) else ():  # copies leave tables open in between
            for place, block_id in enumerate(seq.block_table):
                if block_id is not None:
                    assert group_of(state, block_id) == place % len(windows), event
        uses = group_uses(state)
        assert sum(use.used_blocks for use in uses) == state.num_used_blocks
        assert sum(use.cached_blocks for use in uses) == state.num_cached_blocks
        empty = [block_id for block_id in range(state.num_blocks) if group_of(state, block_id) is None]
        assert len(empty) == state.num_empty_blocks
    assert num_copies > 0


def test_what_a_group_leaves_of_its_blocks_is_unused():
    """A sequence of 5 tokens holds a block of 48 bytes for every 2 tokens and group; one takes 48 of it, one 32."""
    events = []
    sim = Simulation(20, 2, windows=(4, None), emit=events.append)
    sim.add([1, 2, 3, 4, 5], 4)
    sim.step()
    state = check_events(with_groups(events, NARROW, WIDE)).state
    narrow, wide = group_uses(state)
    assert (narrow.used_bytes, narrow.used_blocks, narrow.unused_bytes) == (48, 3, 0)
    assert (wide.used_bytes, wide.used_blocks, wide.unused_bytes) == (32, 3, 3 * 16)
    first, second, *_ = state.seqs[0].block_table
    assert (
        group_words(state.started, group_of(state, first))
        == "group 0: layer 0, window 4, 3 KV heads of 2, 48 B of 48 B used"
    )
    moment = Moment()
    moment.state = state
    assert "that no later token sees; one table for all layers" in sequence_facts(moment, state.seqs[0]).plain
    lines = block_facts(moment, second).plain.splitlines()
    assert lines[-1] == "layers     group 1: layers 1 2, no window, 1 KV head of 2, 32 B of 48 B used"
    empty = next(block_id for block_id in range(20) if block_id not in state.seqs[0].block_table)
    assert group_of(state, empty) is None
