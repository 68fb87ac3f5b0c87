"""The application on a running engine: pause, steps, goals, the end, and what must never end the run."""

import itertools
import json
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from app_harness import Run, drive, press, screen_text, settle, until

from pagedcli.app.pool_app import PoolApp
from pagedcli.app.pool_players import LivePlayer
from pagedcli.batch.job import Job
from pagedcli.cli.session import run_job
from pagedcli.config import load_config
from pagedcli.events import StepFinished, StepScheduled, StepStarted, to_all
from pagedcli.show.terminal import HeldClock
from pagedcli.trace.files import TraceReader, TraceWriter


def at_step(run, step):
    def holds():
        moment = run.player.moment
        return moment is not None and moment.state.step_number == step

    return holds


def test_a_paused_run_does_one_step_for_each_press():
    run = Run(paused=True)

    async def script(pilot):
        await until(pilot, at_step(run, 0))
        assert "PAUSED" in screen_text(pilot.app)
        await press(pilot, ".")
        await until(pilot, at_step(run, 1))
        await press(pilot, "right", "right")
        await until(pilot, at_step(run, 3))
        await pilot.pause(0.2)
        assert run.player.live.state.step_number == 3, "nothing ran without a key"
        assert "cannot go back" in await press(pilot, ",")
        await press(pilot, "space")
        await until(pilot, lambda: run.player.has_ended)

    run.under(script)
    assert run.error is None


def test_at_its_end_the_verdicts_on_the_run_are_on_the_first_page():
    run = Run()
    run.app = PoolApp(run.player, "pagedcli trace", judge=lambda: ["With --reorder prefix hits rise."])

    async def script(pilot):
        await until(pilot, lambda: "With --reorder prefix hits rise." in screen_text(pilot.app))
        assert run.player.has_ended

    run.under(script)
    assert run.error is None


def test_a_goal_pauses_the_run_there():
    run = Run(paused=True)

    async def script(pilot):
        await until(pilot, at_step(run, 0))
        await press(pilot, "p")
        await until(pilot, lambda: run.player.paused and run.player.moment.state.step.preemptions)
        assert run.player.moment.state.step_number == 4
        assert "step 4 preempt seq 2: 4 tokens dropped" in screen_text(pilot.app)
        await press(pilot, "6", "enter")
        await until(pilot, at_step(run, 6))
        assert run.player.paused
        assert "cannot go back" in await press(pilot, "2", "enter")

    run.under(script)


def test_the_last_screen_stays_until_a_key():
    run = Run()

    async def script(pilot):
        await until(pilot, lambda: pilot.app.player is run.player.past)
        await pilot.pause(0.2)
        text = screen_text(pilot.app)
        assert "FINISHED, q closes" in text
        assert "3 done" in text
        assert "all sequences: 3" in text
        assert "first token" in await press(pilot, "enter")
        assert "this is the end" in await press(pilot, "escape", ".")
        await press(pilot, "q")
        await until(pilot, lambda: not pilot.app.is_running)

    run.under(script)


@pytest.mark.quick("ctrl+c")
@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_quitting_ends_the_run_after_its_step(key):
    run = Run(num_new=13, num_requests=1, paused=True)

    async def script(pilot):
        await until(pilot, at_step(run, 0))
        await press(pilot, key)
        await until(pilot, lambda: not pilot.app.is_running)

    run.under(script)
    assert run.error is None
    assert isinstance(run.events[-1], StepFinished)
    assert run.player.live.state.step_number == 0


def test_quitting_twice_ends_the_run_at_once():
    def second_press(run):
        run.player.request_stop()
        run.player.request_stop()
        run.sim.step()

    run = Run(act=second_press)

    async def script(pilot):
        await until(pilot, lambda: run.player.has_ended)

    run.under(script)
    assert isinstance(run.error, KeyboardInterrupt)


def test_contradictory_events_end_the_view_not_the_run():
    run = Run(act=lambda run: run.player.on_event(StepFinished(77, 1, 0, 0, 0, 0)))

    async def script(pilot):
        await until(pilot, lambda: "THE VIEW ENDED EARLY" in screen_text(pilot.app))

    run.under(script, (200, 60))
    assert run.error is None
    assert not run.sim.has_unfinished_requests()


def test_the_speed_is_that_of_the_keys():
    run = Run(num_new=6, num_requests=1, paused=True)
    times = []

    async def script(pilot):
        await until(pilot, at_step(run, 0))
        await press(pilot, "-", "-", "space")  # 25 steps per second
        for step in range(1, 6):
            await until(pilot, lambda step=step: run.sim.stats.num_steps >= step)
            times.append(time.monotonic())
        await until(pilot, lambda: run.player.has_ended)

    run.under(script)
    assert times[-1] - times[0] > 3 / 25


def test_what_others_print_meanwhile_is_kept_for_later():
    run = Run(paused=True)

    async def script(pilot):
        await until(pilot, at_step(run, 0))
        print("while the screen is open", file=sys.stderr)
        await settle(pilot)

    run.under(script)
    assert "".join(run.app.printed) == "while the screen is open\n"


def test_every_key_may_come_before_the_first_step():
    player = LivePlayer()
    app = PoolApp(player, "pagedcli trace")

    async def script(pilot):
        for key in (*"sazpem.,+-<>[]", "tab", "up", "enter", "z", "right", "enter", "escape", "space"):
            await press(pilot, key)
        assert "waiting for the first one" in screen_text(app)

    drive(app, script)


class WatchedClock(HeldClock):
    """Tells whether the run waits."""

    is_held = False

    @contextmanager
    def held(self):
        with super().held():
            self.is_held = True
            yield
            self.is_held = False


def test_a_pause_while_the_speed_holds_the_run_shows_the_step_that_waits():
    """The screen showed an earlier one, for which it had asked last, and `.` seemed to do two steps."""
    run = Run(num_requests=1, paused=True)
    player = run.player
    player.clock_ns = WatchedClock()

    def wait(holds):
        end = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.01)

    def waits_in(step):
        steps = [event.step for event in run.events if isinstance(event, StepScheduled)]
        return steps == list(range(step + 1)) and player.clock_ns.is_held

    player.screen_is_open.set()
    run.thread.start()
    wait(lambda: waits_in(0))
    player.faster(-7)  # a step in two seconds
    player.toggle_pause()
    wait(lambda: waits_in(1))
    player.toggle_pause()
    wait(lambda: player.live.state.step_number == 1)
    assert player.poll()
    assert player.moment.state.step_number == 1
    player.release()
    run.thread.join(10)


def test_the_pause_key_stops_the_clock_of_a_real_run(tmp_path):
    """The second request waits while the first is paused: neither figures nor waiting nor the recording say so."""
    prompts, trace = tmp_path / "in.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"prompt": "The fox", "max_tokens": 12}\n{"prompt": "Once upon a time", "max_tokens": 3}\n')
    loaded = load_config(None, {"engine.num_kvcache_blocks": 64, "engine.max_num_seqs": 1})
    player = LivePlayer(paused=True)
    player.clock_ns = WatchedClock()
    job = Job(loaded, str(prompts), tmp_path / "out.jsonl", record=trace, summary_json=tmp_path / "summary.json")
    app = PoolApp(player, "pagedcli trace")
    results, pauses = [], []

    def work():
        with TraceWriter(trace) as writer:
            emit = to_all(writer, player.on_event)
            results.append(run_job(job, emit=emit, terminal_is_taken=True, clock_ns=player.clock_ns))
        player.finish()

    async def pause(pilot):
        await until(pilot, lambda: "PAUSED" in screen_text(app) and player.clock_ns.is_held)
        step, start = player.live.state.step_number, time.monotonic()
        await pilot.pause(1)
        assert player.live.state.step_number == step
        pauses.append(time.monotonic() - start)

    async def script(pilot):
        await until(pilot, lambda: player.moment is not None and player.moment.state.step_number == 0)
        await pause(pilot)
        await press(pilot, "-", "-", "space")  # 25 steps per second
        await until(pilot, lambda: player.live.state.step_number >= 2)
        await press(pilot, "space")
        await pause(pilot)
        before = player.live.state.step_number
        await press(pilot, ".")
        await until(pilot, lambda: player.live.state.step_number == before + 1)
        await pause(pilot)
        await press(pilot, "space")
        await until(pilot, lambda: player.has_ended)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert player.has_started.wait(60)
    start = time.monotonic()
    try:
        drive(app, script)
    finally:
        player.release()
        thread.join(60)
    running_s = time.monotonic() - start - sum(pauses)
    assert results == [0]
    times = [event.time_ns for event in TraceReader(trace) if isinstance(event, StepStarted | StepFinished)]
    assert times == sorted(times)
    assert (times[-1] - times[0]) / 1e9 < running_s
    assert max(b - a for a, b in itertools.pairwise(times)) / 1e9 < min(pauses)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["elapsed_s"] < running_s
    assert summary["ttft_s"]["p99"] < running_s
    assert 0 < summary["queued_s"]["p99"] < running_s
    assert sum(summary["cache"]["waiting_s"].values()) < running_s
