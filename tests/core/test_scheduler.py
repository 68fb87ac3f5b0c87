"""The scheduler on small pools: limits, order, preemption, progress."""

from contextlib import suppress

import pytest
from harness.core import Simulation, check_events

from pagedcli.core.sequence import SequenceStatus
from pagedcli.errors import RequestError
from pagedcli.events import PrefixLookedUp, RequestPreempted, RequestWaiting, StepScheduled, StepStarted
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("prompts_wait_in_small_batches")


def test_equal_prompts_in_chunks_smaller_than_a_block_still_share_blocks():
    sim = Simulation(32, 4, max_num_batched_tokens=64, chunked_prefill_size=3)
    seqs = [sim.add([*range(12), 20 + i]) for i in range(3)]
    while any(seq.num_output_tokens == 0 for seq in seqs):
        sim.step()
    assert len({tuple(seq.block_table[:3]) for seq in seqs}) == 1
    assert sum(seq.facts.num_cached_tokens for seq in seqs) > 0


def test_decodes_come_before_new_prompts_and_prompts_are_cut_to_the_budget():
    sim = Simulation(32, max_num_batched_tokens=4)
    sim.add([1, 2], 9)
    sim.step()
    sim.add([3] * 9, 2)
    sim.step()
    sim.step()
    assert sim.executor.steps == [[2], [1, 3], [1, 3]]


def test_the_last_arrived_is_preempted_first_and_resumes_first():
    sim = Simulation(4, max_num_seqs=3)
    old, young = sim.add([1, 1, 1], 5), sim.add([2, 2, 2], 5)
    third = sim.add([3], 1)
    while not young.num_preemptions:
        sim.step()
    assert old.num_preemptions == 0
    assert sim.scheduler.waiting[0] is young
    sim.run()
    assert young.num_output_tokens == 5
    assert third.finish_reason == "length"


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_starts_in_a_step_that_preempts(ahead):
    steps = [[]]

    def emit(event):
        if isinstance(event, StepStarted):
            steps.append([])
        steps[-1].append(event)

    sim = Simulation(4, max_num_seqs=3, runs_ahead=ahead, emit=emit)
    for token in (1, 2, 3):
        sim.add([token] * 3, 5)
    sim.run()
    those = [events for events in steps if any(isinstance(event, RequestPreempted) for event in events)]
    assert those
    for events in those:
        assert [event.reason for event in events if isinstance(event, RequestWaiting)] == ["preemption"]
        assert not [event for event in events if isinstance(event, PrefixLookedUp)]


def test_beams_that_wait_for_unread_tokens_do_not_use_the_budget():
    reasons = []

    def emit(event):
        if isinstance(event, RequestWaiting):
            reasons.append(event.reason)
        elif isinstance(event, StepScheduled) and reasons and reasons[-1] == "token_budget":
            assert sum(event.num_new_tokens) == 7

    sim = Simulation(5, max_num_batched_tokens=7, max_num_seqs=5, runs_ahead=True, emit=emit)
    beams = {"beam_width": 2, "temperature": 0}
    sim.add([0, 1], 4)
    sim.add(range(10, 16), params=SamplingParams(max_tokens=3, **beams))
    sim.add([20, 21, 22], 4)
    sim.add([30, 31], params=SamplingParams(max_tokens=3, **beams))
    sim.run()
    # a token of the third request has to be read before the request is preempted for the beams
    assert reasons[-3:-1] == ["preemption", "preemption"]


def test_groups_of_which_some_run_come_before_all_others():
    sim = Simulation(9)
    single, first, second = (sim.add([1, 2]) for _ in range(3))
    first.group = second.group = [first, second]
    assert sim.scheduler._next_waiting() is single
    sim.scheduler.num_grouped, first.status = 1, SequenceStatus.RUNNING
    assert sim.scheduler._next_waiting() is first
    sim.scheduler.waiting.remove(first)
    assert sim.scheduler._next_waiting() is second


def test_the_largest_policy_takes_the_one_with_most_blocks():
    sim = Simulation(7, preemption_policy="largest", max_num_batched_tokens=32)
    first, large, small = sim.add([1, 1, 1], 10), sim.add([2] * 7, 6), sim.add([3], 8)
    while not any(seq.num_preemptions for seq in sim.seqs):
        sim.step()
    assert (first.num_preemptions, large.num_preemptions, small.num_preemptions) == (0, 1, 0)
    sim.run()


def test_a_sequence_short_of_blocks_keeps_its_own_while_older_ones_run():
    sim = Simulation(3, enable_prefix_caching=False)
    sim.add([1, 1], 2)
    young = sim.add([2, 2], 3)
    sim.step()
    sim.step()  # one free block left: the older takes it, the younger waits without losing its own
    assert sim.executor.steps == [[2, 2], [1]]
    assert young.num_preemptions == 0
    sim.run()
    assert young.num_preemptions == 0


@pytest.mark.parametrize(("num_requests", "shared", "block_size"), [(2, 5, 2), (5, 16, 4), (7, 33, 16), (3, 3, 4)])
def test_law_of_hits(num_requests, shared, block_size):
    """N requests that share P tokens at block S: hits = (N - 1) x floor(P / S) x S (vLLM issue 53749)."""
    sim = Simulation(1000, block_size, max_num_batched_tokens=10_000, max_num_seqs=64)
    seqs = [sim.add([*range(shared), 1000 + i, 2000 + i]) for i in range(num_requests)]
    sim.run()
    hits = sum(seq.facts.num_cached_tokens for seq in seqs)
    assert hits == (num_requests - 1) * (shared // block_size) * block_size


def test_a_chunk_takes_what_is_free_before_it_waits():
    sim = Simulation(9, max_num_batched_tokens=16, chunked_prefill_size=4, enable_prefix_caching=False)
    sim.add([1, 1], 3), sim.add([2, 2], 3)
    sim.add([3] * 12, 1)
    for _ in range(3):
        sim.step()
    assert sim.executor.steps == [[2, 2, 4], [1, 1, 4], [1, 1, 2]]  # one block is left, two would be needed
    sim.run()
    assert sim.stats.num_preemptions == 0


def test_beams_without_room_leave_the_whole_budget_to_the_queue_and_no_more():
    sim = Simulation(5, 4, max_num_batched_tokens=4)
    sim.add(range(8), 7)
    sim.add([50, 51], params=SamplingParams(max_tokens=6, beam_width=2, temperature=0))
    sim.add(range(100, 104), 3)
    sim.run()
    assert max(sum(new) for new in sim.executor.steps) == 4


def test_beams_of_a_model_with_windows_end_in_any_pool_that_admits_them():
    admitted = []
    for num_blocks in range(12, 20):
        sim = Simulation(num_blocks, windows=(4, None))
        sim.add([3, 3, 1, 3, 0, 0], 6)
        with suppress(RequestError):
            sim.add([3, 1, 4, 0, 4, 2], params=SamplingParams(max_tokens=3, beam_width=2, temperature=0))
            admitted.append(num_blocks)
        sim.run(max_steps=200)
    assert admitted == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("num_blocks", "row", "max_tokens", "prompt", "width"),
    [(3, [4], 10, [2, 1, 2, 0], 2), (5, [4, 0, 1, 3], 11, [1, 0, 4, 3, 2, 0, 1, 2], 3)],
)
def test_beams_share_a_prompt_that_each_has_computed_where_there_is_no_room(num_blocks, row, max_tokens, prompt, width):
    events = []
    sim = Simulation(num_blocks, 4, emit=events.append, chunked_prefill_size=1, max_num_batched_tokens=16)
    sim.add(row, max_tokens)
    sim.add(prompt, params=SamplingParams(max_tokens=3, beam_width=width, temperature=0))
    sim.run(max_steps=200)
    check_events(events)


def test_a_context_keeps_no_blocks_from_beams_that_wait_for_them():
    events = []
    sim = Simulation(5, windows=(4,), emit=events.append, chunked_prefill_size=2, max_num_batched_tokens=16)
    sim.add([3, 1, 3, 0, 2, 1, 2], continuations=[[3, 1], [2]])
    sim.add([4, 2], params=SamplingParams(max_tokens=3, beam_width=2, temperature=0))
    for _ in range(2):
        sim.step()
    sim.executor.fail_launch = True
    with pytest.raises(RuntimeError, match="launch failed"):
        sim.step()
    sim.run(max_steps=120)
    check_events(events)


def test_beams_take_a_token_each_of_the_budget_and_leave_the_rest():
    sim = Simulation(40, max_num_batched_tokens=6)
    sim.add([1, 2], params=SamplingParams(max_tokens=6, beam_width=2, temperature=0))
    sim.step()
    sim.add([3] * 12, 1)
    for _ in range(3):
        sim.step()
    assert sim.executor.steps == [[2], [1, 1, 4], [1, 1, 4], [1, 1, 4]]
