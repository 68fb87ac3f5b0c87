"""Getting about in the application: the time line, jumps by name, search, filters, copies, the way back."""

import time

import pytest
from app_harness import Run, app_of, contrast, drive, panel, press, screen_text, settle, typed, until
from harness.core import EventList, Simulation, simulated
from textual.events import MouseDown, MouseMove, MouseScrollUp, MouseUp
from textual.widgets import Input

from pagedcli.app.colours import ANSI
from pagedcli.app.commands import run_command
from pagedcli.trace.fold import fold
from pagedcli.views.search import find


@pytest.fixture(scope="module")
def events():
    return simulated()


def starts_of(line):
    """The first step of each column of a time line."""
    first, after = line.shown_range
    return [first + x * (after - first) // line.size.width for x in range(line.size.width)]


async def mouse(pilot, kind, widget, x, y=1):
    """A mouse event on a cell of a widget, as the terminal's driver sends it."""
    place = widget.region.offset
    pilot.app.screen._forward_event(
        kind(widget, x, y, 0, 0, 1, False, False, False, screen_x=place.x + x, screen_y=place.y + y)
    )
    for _ in range(3):
        await settle(pilot)
    await pilot.pause(0.06)


# ---------------------------------------------------------------------- the time line


def test_the_time_line_draws_the_pool_of_each_step(events):
    app = app_of(events)

    async def script(pilot):
        line, series = panel(app, "time"), app.player.series
        region = line.content_region
        rows = screen_text(app).splitlines()[region.y : region.bottom]
        starts, levels = starts_of(line), 8 * (line.size.height - 1)
        for x, start in enumerate(starts):
            *column, mark = [row[region.x + x] for row in rows]
            assert column.count("█") == -(-series.columns["used"][start] * levels // 14) // 8
            expected = "P" if series.columns["preempted"][start] else "e" if series.columns["evicted"][start] else " "
            assert mark.replace("▲", " ") == (expected if x == 0 or starts[x - 1] != start else " ")
        assert any("░" in row for row in rows)

    drive(app, script, (120, 40))


def test_a_click_a_drag_and_the_wheel_move_and_zoom(events):
    app = app_of(events)

    async def script(pilot):
        line = panel(app, "time")
        starts = starts_of(line)
        await mouse(pilot, MouseDown, line, 40)
        assert app.player.position == starts[40]
        for x in (50, 60, 20):
            await mouse(pilot, MouseMove, line, x)
            assert app.player.position == starts[x]
        await mouse(pilot, MouseUp, line, 20)
        await mouse(pilot, MouseMove, line, 70)
        assert app.player.position == starts[20], "the button is up"
        await mouse(pilot, MouseScrollUp, line, 40)
        first, after = line.shown_range
        assert after - first == pytest.approx(len(app.player.series) / 2, abs=1)
        assert first <= starts[40] < after
        assert f" of {len(app.player.series)}; Esc: all" in screen_text(app)

    drive(app, script)


def test_the_keys_of_the_time_line_move_zoom_and_follow(events):
    app = app_of(events)

    async def script(pilot):
        panel(app, "time").focus()
        await press(pilot, "3", "0", "enter", "up", "up")
        first, after = panel(app, "time").shown_range
        assert after - first < len(app.player.series) / 2
        assert first <= 30 < after
        await press(pilot, "right")
        await pilot.pause(0.05)
        assert app.player.position == 31
        await press(pilot, "5", "enter")
        assert panel(app, "time").shown_range[0] <= 5 < panel(app, "time").shown_range[1]
        await press(pilot, "escape")
        assert panel(app, "time").shown_range == (0, len(app.player.series))

    drive(app, script)


# ---------------------------------------------------------------------- jumps, search, filters


@pytest.mark.long
def test_jumps_by_name_go_there_and_say_what_they_do_not_know(events):
    app = app_of(events)

    async def script(pilot):
        await typed(pilot, ":", "step 12")
        assert app.player.moment.state.step_number == 12
        await typed(pilot, ":", "7")
        assert app.player.moment.state.step_number == 7
        stop = next(each for each in app.player.replay.landmarks["preemption"] if each > app.player.position)
        await typed(pilot, ":", "preempt")
        assert app.player.position == stop
        await typed(pilot, ":", "start")
        assert "no earlier preemption" in await typed(pilot, ":", "preempt back")
        await press(pilot, "escape")
        assert "block 9: " in await typed(pilot, ":", "block 9")
        assert app.focused is panel(app, "map")
        late = max(app.player.all_seqs(), key=lambda seq: (seq.added_step or 0, seq.sample_index == 0))
        await typed(pilot, ":", f"req {late.label}")
        await settle(pilot)
        assert app.player.moment.state.seq(panel(app, "sequences").cursor_key).label == late.label
        await typed(pilot, ":", "seq 3")
        await settle(pilot)
        assert panel(app, "sequences").cursor_key == 3
        for text, words in (
            ("block 99", "there is no block '99': they are numbered from 0 to 13"),
            ("req nobody", "there is no request 'nobody' in this run"),
            ("blok 3", "there is no 'blok': use step, start, end, block"),
            ("block", "block needs N"),
            ("s 3", "'s' may be step or start or seq or slots"),
            ("end 3", "end takes no '3'"),
        ):
            assert words in run_command(app.commands(), text)
        assert words in await typed(pilot, ":", text)
        assert app.screen is not app.screen_stack[0], "the line stays, to be corrected"

    drive(app, script)


def test_slots_of_recurrent_state_have_a_page():
    events = []
    sim = Simulation(64, 4, emit=events.append, max_num_batched_tokens=16, num_state_slots=4, checkpoints="16")
    sim.add([7] * 30, 3)
    sim.run()
    app = app_of(events)

    async def script(pilot):
        await typed(pilot, ":", "slots")
        await settle(pilot)
        shown = await press(pilot, "down")
        assert "4 state slots of" in shown
        assert "snapshot, the state after 16 tokens" in shown

    drive(app, script)


def test_a_model_without_recurrent_state_has_no_slots_to_show(events):
    assert "it has no slots" in run_command(app_of(events).commands(), "slots")


def test_tab_completes_names_and_requests(events):
    app = app_of(events)

    async def script(pilot):
        text = await press(pilot, ":", *"bl")
        assert "block N" in text
        await press(pilot, "tab")
        assert app.screen.query_one(Input).value == "block "
        assert "to a block of the pool" in screen_text(app)
        await press(pilot, "escape", ":")
        app.screen.query_one(Input).value = "req request-1"
        await settle(pilot)
        assert "request-1, request-10" in screen_text(app)

    drive(app, script)


@pytest.mark.long
def test_a_search_lists_what_it_finds_and_n_goes_on(events):
    app = app_of(events)

    async def script(pilot):
        text = await typed(pilot, "/", "preempt")
        assert "─ search: preempt ─" in text
        player = app.pool_player
        steps = [hit.step for hit in find("preempt", player.events(), player.moment.state, player.all_seqs())]
        text = await press(pilot, "enter")
        assert app.player.moment.state.step_number == steps[0]
        assert f"1 of {len(steps)}: step {steps[0]} preempt seq " in text
        await press(pilot, "n")
        assert app.player.moment.state.step_number == steps[1]
        await press(pilot, "N", "N")
        assert app.player.moment.state.step_number == steps[-1]
        assert "nothing was found" in await typed(pilot, "/", "xyzzy")
        await press(pilot, "escape")
        await typed(pilot, "/", "block 5")
        await press(pilot, "enter")
        assert app.focused is panel(app, "map")
        assert "block 5: " in screen_text(app)

    drive(app, script)


# ---------------------------------------------------------------------- what is seen


def colours(strip):
    """Of each visible piece of text its colours, as the terminal gets them."""
    for text, style, _ in strip:
        if text.strip() and style is not None and style.color is not None and style.bgcolor is not None:
            front, back = (tuple(each.get_truecolor(ANSI)) for each in (style.color, style.bgcolor))
            yield text, (back, front) if style.reverse else (front, back), style.dim


@pytest.mark.quick("sequences-p", "map-G")
@pytest.mark.parametrize(("focus", "key"), [("map", "p"), ("sequences", "p"), ("time", "p"), ("map", "G")])
def test_every_text_has_contrast(focus, key):
    """At least 4.5 : 1, WCAG's level AA for text. Borders and footer are Textual's. G shows groups of layers."""
    app = app_of(simulated(num_blocks=60, windows=(4, None, 6)) if key == "G" else simulated())

    async def script(pilot):
        panel(app, focus).focus()
        await press(pilot, "2", "0", "enter", key)
        panels = {y for panel in app.query(".panel") for y in range(panel.region.y + 1, panel.region.bottom)}
        strips = app.screen._compositor.render_strips()
        seen = [
            (text, round(contrast(*pair), 2), dim)
            for y in (0, *sorted(panels))
            for text, pair, dim in colours(strips[y])
            if text.strip()[0] < "\u2581" or text.strip()[0] > "\u2595"  # a scrollbar's blocks
        ]
        assert len(seen) > 20
        assert [each for each in seen if each[1] < 4.5 or each[2]] == []

    drive(app, script, (120, 40))


def test_the_cursor_and_the_selection_hide_no_ref_count(events):
    app = app_of(events)

    async def script(pilot):
        panel(app, "map").focus()
        for stop in range(app.player.last):
            app.player.move_to(stop)
            app.tick()
            state = app.player.moment.state
            shared = [block_id for block_id, count in enumerate(state.ref_counts) if count > 1]
            if not shared:
                continue
            panel(app, "map").go_to(shared[0])
            await settle(pilot)
            row = screen_text(app).splitlines()[panel(app, "map").region.y + 1]
            assert row[shared[0]] == str(state.ref_counts[shared[0]])
            return True
        return False

    assert drive(app, script)


def test_at_80_columns_a_key_shows_block_tables_and_reasons(events):
    app = app_of(events)

    async def script(pilot):
        text = await press(pilot, *"20", "enter")
        for name in ("seq", "request", "state", "tokens", "out", "blocks", "waited", "preempted"):
            assert name in text
        text = await press(pilot, "c")
        assert "blocks (×: ref count) / waits for" in text
        assert "place 2 in the queue" in text

    drive(app, script)


# ---------------------------------------------------------------------- copies


@pytest.mark.long
def test_a_table_is_copied_whole_to_the_clipboard_or_a_file(events, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = app_of(events)

    async def script(pilot):
        await press(pilot, *"20", "enter")
        assert "to the clipboard (OSC 52); Y writes a file" in await press(pilot, "y")
        state = app.player.moment.state
        heading, *rows = [line.split("\t") for line in app.clipboard.splitlines()]
        assert heading[:3] == ["seq", "request", "state"]
        assert {int(row[0]) for row in rows} == set(state.seqs)
        assert all(len(row) == len(heading) for row in rows)
        panel(app, "map").focus()
        await press(pilot, "y")
        blocks = [line.split("\t") for line in app.clipboard.splitlines()][1:]
        assert [int(row[2]) for row in blocks] == state.ref_counts
        panel(app, "time").focus()
        await press(pilot, "Y", "enter")
        lines = (tmp_path / "time-step-20.tsv").read_text().splitlines()
        assert [int(line.split("\t")[1]) for line in lines[1:]] == list(app.player.series.columns["used"])
        assert "File exists" in await press(pilot, "Y", "enter")

    drive(app, script)


# ---------------------------------------------------------------------- the way back after a run


def watched_to_its_end(script, has_ended, **options):
    """A small run under the application, which is driven once it has ended."""
    run = Run(num_requests=4, **options)

    async def when_ended(pilot):
        await until(pilot, lambda: has_ended(run.app, run.player))
        await pilot.pause(0.15)
        return await script(pilot, run.app, run.events)

    return run.under(when_ended)


def test_a_finished_run_goes_back_to_any_step():
    async def script(pilot, app, events):
        assert "FINISHED" in screen_text(app)
        for step in (0, 3, app.player.series.first_step + len(app.player.series) - 1, 1):
            await typed(pilot, ":", str(step))
            cut = next(i for i, e in enumerate(events) if type(e).__name__ == "StepScheduled" and e.step == step)
            expected = fold(EventList(events[: cut + 1]))
            assert app.player.moment.state.ref_counts == expected.ref_counts
            assert app.player.moment.state.hashes == expected.hashes
        await press(pilot, "]", ",")
        assert app.player.position == app.player.last - 1

    watched_to_its_end(script, lambda app, player: player.has_ended and app.player is player.past)


def test_a_run_too_long_to_keep_says_so():
    async def script(pilot, app, events):
        assert len(events) > 20
        assert "too long to keep: record it with --record" in await press(pilot, ",")

    watched_to_its_end(script, lambda app, player: player.has_ended, kept_events=20)


@pytest.mark.slow
def test_a_key_in_ten_thousand_steps_takes_effect_within_100_ms():
    """Processor time of the move and of all that it draws; the median of moves all over the run."""
    events = []
    sim = Simulation(400, 16, emit=events.append, check=False, max_num_seqs=16, max_num_batched_tokens=512)
    for index in range(1600):
        sim.add([7] * 40 + [index] * 8, 102)
    sim.run()
    app = app_of(events)

    async def script(pilot):
        assert app.player.last >= 10_000
        times = []
        for move in range(40):
            start = time.process_time()
            app.player.move_to((move * 7919) % app.player.last)
            app.tick()
            await settle(pilot)
            times.append(time.process_time() - start)
        print(f"median {sorted(times)[20]:.3f} s, worst {max(times):.3f} s")
        assert sorted(times)[20] < 0.1

    drive(app, script, (120, 40))
