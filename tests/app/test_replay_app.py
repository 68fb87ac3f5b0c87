"""The application on a recorded run: every key does what the help page says, and nothing is cut at 80 columns."""

import re

import pytest
from app_harness import app_of, cells_of_map, column_of, drive, panel, press, screen_text, settle, shown, typed
from harness.core import EventList, simulated

from pagedcli.app.block_map import BlockMap
from pagedcli.app.pool_app import PoolApp
from pagedcli.events import RequestAdded, RequestPreempted, SequenceForked
from pagedcli.trace.fold import fold
from pagedcli.views.moment import Replay
from pagedcli.views.names import NamedRequest
from pagedcli.views.whole_run import Timelines
from pagedcli.views.words import block_story, sequence_story

BUSY = {"num_blocks": 14, "num_requests": 24}


@pytest.fixture(scope="module")
def events():
    return simulated(**BUSY)


def large_run(num_blocks):
    return simulated(num_blocks=num_blocks, num_requests=40, max_num_seqs=16, max_num_batched_tokens=64)


@pytest.mark.quick("14-size0")
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("num_blocks", [14, 5000])
def test_every_panel_is_on_the_screen(size, num_blocks):
    text = shown(app_of(large_run(num_blocks)), ">", size=size)
    lines = text.split("\n")
    assert len(lines) == size[1]
    for part in ("block pool", "running", "waiting", "prefix hits", "last events", f"= {num_blocks:,} blocks"):
        assert part in text
    assert size[1] < 30 or re.search("pool [▁-█]+ .* hits [▁-█]+ ", text)
    assert "…" not in "".join(line for line in lines if "request-" not in line)
    assert "steps 0 to " in text
    assert "shared" in text
    assert ("1 cell =" in text) == (num_blocks > 1000)


@pytest.mark.quick("size0")
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_the_verdicts_on_the_run_are_on_the_first_page(events, size):
    said = ["59 of 60 prompts part at token 7: move it behind them.", "Also, with --max-num-seqs 2: 9.0 % less time."]
    app = app_of(events, judge=lambda: said)
    text = shown(app, size=size)
    assert "─verdict─" in text
    assert all(line in text for line in said)
    assert "running" in text
    assert "last events" in text
    assert "─verdict─" not in shown(app_of(events), size=size)


def test_no_line_of_a_verdict_ends_between_a_number_and_its_unit(events):
    said = [f"{'x' * num_before} 91.0 % with 漢字" for num_before in (73, 74)]
    text = shown(app_of(events, judge=lambda: said), size=(80, 60))
    assert text.count("91.0 %") == len(said)


def test_the_keys_step_jump_and_go_to(events):
    app = app_of(events)
    replay = app.player.replay
    preempted = sorted({stop for stop in range(replay.last_stop) if replay.go(stop).state.step.preemptions})
    replay.go(0)

    async def script(pilot):
        seen = []
        for keys in (
            ["."], ["right"], [","], ["p"], ["p"], ["P"], ["]"], ["["],
            [">"], ["<"], ["3", "enter"], ["g", "1", "2", "enter"],
        ):  # fmt: skip
            await press(pilot, *keys)
            seen.append(replay.position)
        return seen

    first, second = preempted[:2]
    assert drive(app, script) == [1, 2, 1, first, second, first, replay.last_stop, 0, 10, 0, 3, 12]


def test_what_cannot_be_done_is_said(events):
    app = app_of(events)

    async def script(pilot):
        assert "no earlier preemption" in await press(pilot, "P")
        assert "there is no step 99,999" in await press(pilot, *"99999", "enter")
        assert "this is the beginning" in await press(pilot, ",")
        assert "END" in await press(pilot, "]")
        assert "this is the end" in await press(pilot, "space")

    drive(app, script)


def test_playing_ends_at_the_end(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, *("+" * 8), "space")
        while not app.player.paused:
            await pilot.pause(0.05)
        return app.player.position

    assert drive(app, script) == app.player.last


def test_the_list_sorts_filters_and_shows_finished_sequences(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, "3", "0", "enter")
        state = app.player.moment.state
        assert set(column_of(app, "sequences")) == set(state.seqs)
        for order, key in (
            ("waited", lambda seq: seq.num_steps_waited(30)),
            ("preempted", lambda seq: seq.num_preemptions),
            ("blocks", lambda seq: len(seq.block_table)),
            ("seq", lambda seq: -seq.seq_id),
        ):
            assert f"▾{order}" in (await press(pilot, "s")).replace(" ", "")
            values = [key(state.seqs[seq_id]) for seq_id in column_of(app, "sequences")]
            assert values == sorted(values, reverse=True)
        assert "all sequences" in await press(pilot, "a")
        assert set(column_of(app, "sequences")) == set(state.seqs) | set(state.finished)
        assert "with 'finished'" in await press(pilot, "f", *"finished", "enter")
        assert set(column_of(app, "sequences")) == set(state.finished)
        assert "there is no field 'wait'" in await typed(pilot, "f", "wait>3")
        assert "with 'finished'" in await press(pilot, "escape"), "the filter stays"
        assert "with '[/x]'" in await typed(pilot, "f", "[/x]"), "brackets are no markup"

    drive(app, script)


def test_enter_tells_the_story_of_a_sequence_and_goes_to_its_step(events):
    app = app_of(events)
    preempted = next(event.seq_id for event in events if isinstance(event, RequestPreempted))

    async def script(pilot):
        await press(pilot, "p", "f", *f"request-{preempted}", "enter")
        seq_id = panel(app, "sequences").cursor_key
        text = await press(pilot, "enter")
        assert f"─ seq {seq_id} ─" in text
        for part in ("prompt  ", "waited  ", "preempted  ", "admit: hit", "first token"):
            assert part in text
        story = sequence_story(seq_id, app.pool_player.events(), app.player.moment.state)
        await press(pilot, "end", "enter")
        assert app.player.moment.state.step_number == story[-1][0]
        assert "prefix hits" in screen_text(app)  # the page is closed

    drive(app, script, (120, 40))


def test_the_map_zooms_to_the_blocks_in_use_and_enter_tells_who_holds_one(events):
    app = app_of(large_run(5000))

    async def script(pilot):
        await press(pilot, ">", "shift+tab")
        state = app.player.moment.state
        assert "1 cell =" in screen_text(app)
        text = await press(pilot, "z")
        assert "blocks in use" in text
        used = [block_id for block_id in range(5000) if state.ref_counts[block_id]]
        assert column_of(app, "map") == used
        text = await press(pilot, "end", "enter")
        holders = [seq.seq_id for seq in state.running() if used[-1] in seq.block_table]
        assert f"─ block {used[-1]} ─" in text
        assert all(f"seq {seq_id} " in text for seq_id in holders)
        assert "allocated to seq" in text
        text = await press(pilot, "escape", "z", "home", "enter")
        assert "blocks 0 to" in text  # a cell of several blocks opens
        assert column_of(app, "map")[0] == 0
        assert "1 cell =" in await press(pilot, "escape")

    drive(app, script)


def test_a_small_pool_is_drawn_block_by_block(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, "p")
        state = app.player.moment.state
        selected = state.seq(panel(app, "sequences").cursor_key).held_block_ids
        assert selected
        for block_id, (glyph, style) in enumerate(cells_of_map(app)):
            ref_count, cached = state.ref_counts[block_id], state.hashes[block_id] is not None
            assert bool(style.reverse) == (block_id in selected)
            of_one = ("■" if cached else "▫") if ref_count else ("○" if cached else "·")
            assert glyph == (str(ref_count) if ref_count > 1 else of_one)

    drive(app, script)


def test_the_mouse_selects_and_opens(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, "5", "enter")
        await pilot.click("#sequences", offset=(5, 4))  # the border, the heading, two rows
        assert panel(app, "sequences").cursor_key == column_of(app, "sequences")[2]
        for name in ("waited", "blocks", "seq"):
            heading = screen_text(app).splitlines()[panel(app, "sequences").region.y + 1]
            await pilot.click("#sequences", offset=(heading.index(name) + 2, 1))
            assert f"▾{name}" in screen_text(app)
        await pilot.click(BlockMap, offset=(2, 1), times=2)
        await pilot.pause()
        assert "─ block 2 ─" in screen_text(app)

    drive(app, script)


def test_a_followed_request_is_selected_from_the_beginning(events):
    app = app_of(events, follow=NamedRequest("request-3"))
    seq_ids = {event.seq_id for event in events if isinstance(event, RequestAdded) and event.request_id == "request-3"}

    async def script(pilot):
        return panel(app, "sequences").cursor_key

    assert drive(app, script) in seq_ids


def test_the_help_page_names_every_key(events):
    text = shown(app_of(events), "?", size=(120, 60))
    for words in ("quit", "pause, play", "faster, slower", "zoom to the blocks in use", "sort:", "Esc"):
        assert words in text
    names = {"question_mark": "?", "full_stop": ".", "comma": ",", "greater_than_sign": ">", "less_than_sign": "<",
             "left_square_bracket": "[", "right_square_bracket": "]", "slash": "/", "plus": "+",
             "minus": "-"}  # fmt: skip
    bound = {binding.key.split(",")[0] for cls in (PoolApp, PoolApp.__base__) for binding in cls.BINDINGS}
    keys = {names.get(key, key) for key in bound if len(key) == 1 and not key.isdigit()} | set(names.values())
    assert {key for key in keys if f" {key} " not in text} == set()


def test_text_of_a_request_cannot_steer_the_terminal(events):
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    app = app_of(events)

    async def script(pilot):
        app.player.moment.state.seqs[0].request_id = evil
        text = await press(pilot, "z", "enter")
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "u202e" in text

    drive(app, script)


# ---------------------------------------------------------------------- stories


def with_steps(events):
    return list(Replay(EventList(events)).events())


def test_a_block_story_ends_with_those_who_hold_it(events):
    half = events[: len(events) // 2]
    state = fold(EventList(half))
    for block_id in range(BUSY["num_blocks"]):
        holders, content = [], None
        for _, words in block_story(block_id, with_steps(half)):
            seq_id = words.split("seq ")[1].split(":")[0].split(",")[0] if "seq " in words else None
            if words.startswith(("allocated", "reused", "shared")):
                holders.append(seq_id)
            elif words.startswith("released"):
                holders.remove(seq_id)
            elif words.startswith("filled"):
                content = words.rpartition(" ")[2]
            elif words.startswith("evicted"):
                content = None
        assert sorted(holders) == sorted(str(s.seq_id) for s in state.running() for b in s.block_table if b == block_id)
        if content is not None and state.hashes[block_id] is not None:
            assert content == f"{state.hashes[block_id]:016x}"


def test_a_sequence_story_has_each_preemption_and_one_line_for_equal_waits(events):
    state = fold(EventList(events))
    steps = with_steps(events)
    for seq in state.finished.values():
        words = [line for _, line in sequence_story(seq.seq_id, steps, state)]
        assert sum(line.startswith("preempt:") for line in words) == seq.num_preemptions
        assert words[-1].startswith(("finish", "release"))
        assert sum(line == "first token" for line in words) == 1


@pytest.mark.parametrize("windows", [(None,), (4, None)])
def test_a_sequence_story_leaves_its_name_out_with_the_preposition_before_it(windows):
    events = simulated(num_blocks=28, windows=windows)
    state = fold(EventList(events))
    steps = with_steps(events)
    told = [line for seq in state.finished.values() for _, line in sequence_story(seq.seq_id, steps, state)]
    assert any("no later token sees them" in line for line in told) == (windows != (None,))
    assert not [line for line in told if re.search(" (of|to|with|for)(:|$)", line)]


def test_waited_steps_are_the_phases_of_waiting(events):
    timelines = Timelines()
    state = fold(EventList(events), timelines)
    forked = {event.seq_id for event in events if isinstance(event, SequenceForked)}
    for seq in state.finished.values():
        if seq.seq_id in forked:
            continue  # it begins to run in the step that adds it
        phases = [p for p in timelines.phases[seq.seq_id] if p.status in ("waiting", "preempted")]
        assert seq.num_steps_waited(state.step_number) == sum(p.last_step - p.first_step + 1 for p in phases)


def test_what_is_painted_line_by_line_is_what_the_whole_screen_would_be(events):
    app = app_of(events)

    async def script(pilot):
        for key in (".", ">", "p", "down", "s", "a", "tab", "tab", "z", ",", "[", "]", "right", "up"):
            await press(pilot, key)
            shown_now = app.screen._compositor.render_strips()
            for widget in app.screen.walk_children():
                widget.refresh()
            await settle(pilot)
            assert app.screen._compositor.render_strips() == shown_now, key

    drive(app, script, (120, 40))
