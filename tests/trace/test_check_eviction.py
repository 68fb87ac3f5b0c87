"""`replay --check` computes the choices of eviction policies again."""

import msgspec
import pytest
from cli_harness import pagedcli
from trace_harness import check_events, simulated, write

from pagedcli.errors import TraceError
from pagedcli.events import BlockEvicted

CHECKED = ("fifo", "lfu", "prefix-lru")


@pytest.mark.parametrize("eviction", CHECKED)
@pytest.mark.parametrize("windows", [(None,), (5,), (4, None)])
@pytest.mark.parametrize("fails", [0, 0.1])
def test_the_choices_of_a_run_are_those_of_its_policy(eviction, windows, fails):
    for seed in range(3):
        limits = {"num_blocks": 18 * len(windows), "windows": windows, "fails": fails, "seed": seed}
        events = simulated(eviction=eviction, num_requests=60, runs_ahead=seed == 2, **limits)
        assert sum(isinstance(event, BlockEvicted) for event in events) > 20
        assert check_events(events).notes == ()


@pytest.mark.parametrize(("eviction", "other"), [("fifo", "lfu"), ("lfu", "fifo"), ("lfu", "prefix-lru")])
def test_the_choices_of_another_policy_are_found(eviction, other):
    first, *events = simulated(eviction=eviction, num_blocks=18, num_requests=60)
    with pytest.raises(TraceError, match=rf"was evicted, but {other} evicts block \d+"):
        check_events([msgspec.structs.replace(first, eviction=other), *events])


def test_what_next_use_chose_is_said_to_be_unchecked(tmp_path):
    trace = write(tmp_path / "run.jsonl", simulated(eviction="next-use", num_blocks=18))
    assert "which blocks next-use chose to evict was not checked" in pagedcli("replay", trace, "--check").stderr
