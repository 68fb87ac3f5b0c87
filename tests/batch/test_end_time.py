"""The predicted end of a run, on a clock on which every step takes exactly what a record says."""

import random
from array import array

import pytest
from harness.core import scripted_plan

from pagedcli.batch.end_time import EndTime
from pagedcli.batch.stats import BatchStats
from pagedcli.planning.step_time import StepTime
from pagedcli.simulation.requests import Request
from pagedcli.simulation.run import SimulatedCore

MACHINE = StepTime(
    prompts=((1, 0.02), (256, 0.5)), decodes=((1, 0.02), (16, 0.08)), attended_s=1e-6, read_s=0.0,
)  # fmt: skip


def requests(num_rows, *, stops=False, seed=1):
    draw = random.Random(seed)
    found = []
    for index in range(num_rows):
        prompt, most = draw.randint(20, 200), draw.randint(20, 120)
        own = draw.randint(1, most) if stops else most
        ids = [array("q", [7] * own)]
        found.append(
            Request(
                str(index), None, prompt, own, token_ids=array("q", [draw.randrange(10**6) for _ in range(prompt)]),
                max_new_tokens=most, output_ids=ids, stopped=[stops and own < most],
            )
        )  # fmt: skip
    return found


def run(rows, *, at=0.3):
    """Runs rows on the machine. Returns the prediction after this share of the rows, and the real duration."""
    plan = scripted_plan(600, 16, max_num_seqs=16, max_num_batched_tokens=256)
    core = SimulatedCore(plan, None, step_time=MACHINE)
    end, stats, found = EndTime(core), BatchStats(num_rows=len(rows), facts=core.stats), None
    waiting = list(rows)
    while waiting or core.has_unfinished_requests():
        while waiting and core.num_unfinished_requests < plan.limits.max_in_work:
            core.add(waiting.pop(0))
        for output in core.step():
            stats.num_done += 1
            stats.num_stopped += sum(sample.finish_reason == "stop" for sample in output.samples)
        stats.elapsed_s = core.now_ns * 1e-9
        end.update(stats)
        if found is None and stats.num_done >= at * len(rows):
            found = stats.elapsed_s + (end.left_s(stats) or 0.0)
    return found, stats.elapsed_s


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_the_end_is_what_is_left_at_the_present_rate(at):
    found, took = run(requests(120), at=at)
    assert found == pytest.approx(took, rel=0.1)


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_continuations_that_are_still_to_fork_are_part_of_the_rest(at):
    rows, draw = requests(60), random.Random(2)
    for row in rows:
        row.num_output_tokens = row.max_new_tokens = 0
        row.output_ids = row.stopped = None
        row.continuations = [[draw.randrange(10**6) for _ in range(draw.randint(2, 60))] for _ in range(20)]
    found, took = run(rows, at=at)
    assert found == pytest.approx(took, rel=0.1)


def test_rows_that_end_by_themselves_are_expected_to():
    found, took = run(requests(200, stops=True))
    assert found == pytest.approx(took, rel=0.15)


def test_a_short_run_predicts_nothing():
    found, took = run(requests(2), at=0.5)
    assert found < took < 5.0
