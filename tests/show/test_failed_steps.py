"""Steps that failed, in every view of a run: each is there in words, and the figures stay those of the engine."""

import io
import json

import pytest
from cli_harness import pagedcli
from harness.core import Simulation, simulated, write
from test_report import code, page_data

from pagedcli.events import RequestFinished, StepFailed, StepScheduled, StepStarted
from pagedcli.show.perfetto import export_perfetto
from pagedcli.show.report import render_report
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.views.explain import explain_trace, totals_of
from pagedcli.views.moment import Moment, Replay


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "ahead"])
def events(request):
    events = simulated(fails=0.2, runs_ahead=request.param)
    assert count(events, StepFailed) > 5
    assert count(events, StepFailed) < count(events, StepStarted)
    return events


def count(events, event_type):
    return sum(isinstance(event, event_type) for event in events)


def test_the_summary_counts_failed_steps_among_all(events):
    moment = Moment()
    fold(events, moment)
    assert moment.summary()["num_failed_steps"] == moment.stats.facts.num_failed_steps == count(events, StepFailed)
    assert moment.stats.facts.num_steps == count(events, StepStarted)


def test_a_failed_step_is_among_the_last_words():
    moment, words = Moment(), []
    sim = Simulation(8, emit=(seen := []).append)
    sim.add([1, 2, 3])
    sim.executor.fail_read = True
    with pytest.raises(RuntimeError):
        sim.step()
    for _ in pool_fold(moment).steps(seen):
        words += moment.new_words()
    assert words[-1].endswith("fail step 0: 1 sequence back in the queue, 0 blocks still cached")


def test_the_report_draws_each_step_and_the_pool_that_a_failure_leaves(events, tmp_path):
    data = page_data(render_report(TraceReader(write(tmp_path / "run.jsonl", events))))
    assert data["numSteps"] == count(events, StepStarted)
    assert len(data["frames"]) == data["numSteps"] + 1
    folding, drawn, pools = pool_fold(), set(), []
    for event in folding.steps(events):
        if isinstance(event, StepScheduled | StepFailed) and event.step not in drawn:
            drawn.add(event.step)
            pools.append([code(folding.state, block_id) for block_id in range(folding.state.num_blocks)])
    folded = [0] * folding.state.num_blocks
    for delta, pool in zip(data["frames"], pools, strict=False):
        for packed in delta:
            folded[packed // 16] = packed % 16
        assert folded == pool


def test_replay_stops_at_every_step_and_perfetto_has_it(events):
    replay = Replay(events)
    started = [event.step for event in events if isinstance(event, StepStarted)]
    assert replay.steps == [*started, None]
    assert [replay.stop_of_step(step) for step in started] == list(range(len(started)))
    export_perfetto(events, file := io.BytesIO())
    names = [event["name"] for event in json.loads(file.getvalue())["traceEvents"]]
    assert [name for name in names if name.startswith("step ")].count("step failed") == count(events, StepFailed)
    assert {f"step {step}" for step in started} <= set(names)


def test_what_a_failed_step_lost_was_never_cached():
    sim = Simulation(20, emit=(seen := []).append, max_num_batched_tokens=64, trace_tokens=True)
    for number in range(2):
        sim.add([1, 2, 3, 4, 5], request_id=str(number))
        sim.executor.fail_read = number == 0
        if number == 0:
            with pytest.raises(RuntimeError):
                sim.step()
            sim.abort("0")
    sim.run()
    explainer, _ = explain_trace(seen)
    assert explainer.num_failed_steps == 1
    assert explainer.num_lost_blocks == 2
    again = explainer.lookups[1]
    assert (again.reason, again.num_evicted, again.num_first) == ("no_shared_prefix", 0, 2)


def test_explain_leaves_nothing_unknown_and_says_what_was_lost(events, tmp_path):
    explainer, _ = explain_trace(events)
    assert count(events, RequestFinished)
    for own in (False, True):
        assert totals_of(explainer.lookups, own=own).not_known == 0
    done = pagedcli("explain", write(tmp_path / "run.jsonl", events))
    assert f"{count(events, StepFailed)} steps failed; the content of" in done.stdout
