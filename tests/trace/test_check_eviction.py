"""`trace RUN --check` and eviction: every choice among the free cached blocks is lawful, but copies go first."""

import pytest
from cli_harness import pagedcli
from harness.core import check_events, simulated, write

from pagedcli.core.eviction import POLICIES
from pagedcli.errors import TraceError
from pagedcli.events import BlockEvicted
from pagedcli.trace.state import PoolState


@pytest.mark.slow_cases("0.1-*", "0-windows2-prefix-lru")
@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("windows", [(None,), (5,), (4, None)])
@pytest.mark.parametrize("fails", [0, 0.1])
def test_a_run_under_any_policy_obeys_every_law(eviction, windows, fails):
    for seed in (0, 2):
        limits = {"num_blocks": 18 * len(windows), "windows": windows, "fails": fails, "seed": seed}
        events = simulated(eviction=eviction, num_requests=60, runs_ahead=seed == 2, **limits)
        assert sum(isinstance(event, BlockEvicted) for event in events) > 20
        assert bool(check_events(events).notes) == (eviction != "lru")


def test_evicting_found_content_before_a_free_copy_is_refused():
    """Both copies of a block are free: the one that lookups find must stay."""
    events = simulated(eviction="lfu", num_blocks=18, num_requests=60)
    state, num_refused = PoolState(), 0
    for place, event in enumerate(events):
        if isinstance(event, BlockEvicted) and state.hash_to_block_id.get(event.hash) != event.block_id:
            found = state.hash_to_block_id[event.hash]
            if not state.ref_counts[found]:
                with pytest.raises(TraceError, match="a copy that no lookup finds, is evicted first"):
                    check_events([*events[:place], BlockEvicted(found, event.hash)])
                num_refused += 1
        state.apply(event)
    assert num_refused


def test_what_a_policy_chose_is_said_to_be_unchecked(tmp_path):
    trace = write(tmp_path / "run.jsonl", simulated(eviction="next-use", num_blocks=18))
    assert "which blocks next-use chose to evict was not checked" in pagedcli("trace", trace, "--check").stderr
