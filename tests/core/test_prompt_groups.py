"""New prompts of a full batch start in groups: fewer steps mix prompts with decodes, and nobody waits long."""

import pytest
from harness.core import Simulation

from pagedcli.core.scheduler import MOST_HELD
from pagedcli.events import RequestWaiting
from pagedcli.trace.check import TraceChecker

SEATS, GROUP = 16, 4  # a group is four prompts at most, as it is with 64 seats


@pytest.fixture(scope="module", autouse=True)
def _few_seats():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedcli.core.scheduler.ENOUGH_PROMPTS", SEATS // GROUP)
        yield


def job(least, *, num_rows=44, num_blocks=4000, runs_ahead=False):
    """A job of more rows than seats whose outputs end at different steps, its reasons to wait, and its laws."""
    checker, reasons = TraceChecker(), []

    def emit(event):
        checker(event)
        if isinstance(event, RequestWaiting):
            reasons.append(event.reason)

    sim = Simulation(
        num_blocks, 4, max_num_seqs=SEATS, max_num_batched_tokens=512, min_prefill_tokens=least,
        enable_prefix_caching=False, runs_ahead=runs_ahead, emit=emit, trace_tokens=True,
    )  # fmt: skip
    for number in range(num_rows):
        sim.add([number % 7] * 6, 12 + number * 37 % 31, request_id=str(number))
    sim.run()
    checker.result(())
    return sim, reasons


def num_mixed(sim):
    return sum(max(step) > 1 and 1 in step for step in sim.executor.steps)


@pytest.mark.quick("True")
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_fewer_steps_mix_prompts_with_decodes_and_all_tokens_are_the_same(runs_ahead):
    alone, _ = job(0, runs_ahead=runs_ahead)
    grouped, reasons = job(24, runs_ahead=runs_ahead)
    assert [seq.token_ids for seq in grouped.seqs] == [seq.token_ids for seq in alone.seqs]
    assert "min_prefill_tokens" in reasons
    assert num_mixed(grouped) < 0.5 * num_mixed(alone)
    # at worst as with three quarters of the seats: a group is a quarter
    assert SEATS * len(grouped.executor.steps) < (SEATS + GROUP) * len(alone.executor.steps)


def test_groups_are_of_so_many_tokens_or_a_part_of_the_seats():
    for least, group in [(12, 2), (1000, GROUP)]:
        sim, _ = job(least)
        later = [step.count(6) for step in sim.executor.steps[1:] if 6 in step and 1 in step]
        assert sorted(later)[len(later) // 2] == group


def ready(*, num_waiting, least=1000, seats=SEATS, **changes):
    """All seats but one decode, and so many prompts wait."""
    sim = Simulation(4000, 4, max_num_seqs=seats, max_num_batched_tokens=512, min_prefill_tokens=least, **changes)
    first = sim.add([1] * 3, 2)
    for _ in range(seats - 1):
        sim.add([2] * 3, 500)
    sim.step()
    waiting = [sim.add([3] * 3, 5) for _ in range(num_waiting)]
    while first.finish_reason is None:
        sim.step()
    return sim, waiting


def steps_until_start(sim, seq):
    num_before = sim.stats.num_steps
    while not seq.num_output_tokens:
        sim.step()
    return sim.stats.num_steps - num_before


def test_a_prompt_waits_for_others_for_a_bounded_number_of_steps():
    sim, [first, *_] = ready(num_waiting=2)
    assert steps_until_start(sim, first) == MOST_HELD + 1


def test_the_last_prompts_start_at_once():
    sim, [last] = ready(num_waiting=1)
    assert steps_until_start(sim, last) == 1


def test_batches_of_few_sequences_start_every_prompt_at_once():
    sim, [first, *_] = ready(num_waiting=2, seats=GROUP)
    assert steps_until_start(sim, first) == 1


def test_nothing_waits_where_nothing_else_runs():
    sim = Simulation(10, 4, max_num_seqs=SEATS, max_num_batched_tokens=512, min_prefill_tokens=1000)
    first, second = sim.add([1] * 30, 2), sim.add([2] * 30, 2)  # the pool holds one of them
    sim.step()
    assert (first.num_output_tokens, second.num_output_tokens) == (1, 0)
    assert steps_until_start(sim, second) == 2


def test_a_preempted_sequence_is_not_held_back():
    reasons = []

    def emit(event):
        if isinstance(event, RequestWaiting):
            reasons.append((event.seq_id, event.reason))

    sim = Simulation(
        40, 4, max_num_seqs=SEATS, max_num_batched_tokens=512, min_prefill_tokens=1000, enable_prefix_caching=False,
        emit=emit,
    )  # fmt: skip
    for number in range(40):
        sim.add([number % 7] * 6, 10 + number % 13)
    preempted = set()
    while sim.has_unfinished_requests():
        sim.step()
        preempted |= {seq.seq_id for seq in sim.seqs if seq.num_preemptions}
        held = {seq_id for seq_id, reason in reasons if reason == "min_prefill_tokens"}
        assert not held & preempted
        reasons.clear()
    assert preempted
