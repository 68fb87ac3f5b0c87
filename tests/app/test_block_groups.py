"""The block pool by groups of layers: what the map, its legend, the copy and the page of groups show."""

from collections import Counter

import pytest
from app_harness import app_of, cells_of_map, column_of, drive, panel, press, screen_text, settle, typed
from harness.core import simulated

from pagedcli.views.cache_groups import group_of

WINDOWS = (4, None, 6)


@pytest.fixture(scope="module")
def events():
    return simulated(num_blocks=60, windows=WINDOWS)


@pytest.fixture(scope="module")
def many_events():
    return simulated(num_blocks=5000, num_requests=40, max_num_seqs=16, max_num_batched_tokens=64, windows=WINDOWS)


def check_cells(app):
    """Each cell shows the most common group of its blocks, by hand; returns what the cells show."""
    state, cells, shown_ids = app.player.moment.state, cells_of_map(app), column_of(app, "map")
    size = panel(app, "map").size
    per_cell = max(1, -(-len(shown_ids) // (size.width * (size.height - 2))))
    selected = state.seq(panel(app, "sequences").cursor_key)
    for cell, (glyph, style) in enumerate(cells):
        ids = shown_ids[cell * per_cell : (cell + 1) * per_cell]
        held = [block_id for block_id in ids if group_of(state, block_id) is not None]
        counts = Counter(state.block_groups[block_id] for block_id in held)
        most = [group for group, count in counts.items() if count == max(counts.values())]
        assert glyph == ("·" if not most else str(most[0]) if len(most) == 1 else "*")
        num_cached = sum(not state.ref_counts[block_id] for block_id in held)
        assert bool(style.underline) == (2 * num_cached > len(held))
        assert bool(style.reverse) == (selected is not None and not set(ids).isdisjoint(selected.held_block_ids))
    assert len(cells) == -(-len(shown_ids) // per_cell)
    return {(glyph, bool(style.underline)) for glyph, style in cells}


def test_a_key_draws_the_group_of_each_block_at_every_step(events):
    app, seen = app_of(events), set()

    async def script(pilot):
        await press(pilot, "G")
        for stop in range(app.player.last + 1):
            app.player.move_to(stop)
            app.tick()
            await settle(pilot)
            seen.update(check_cells(app))
            num_empty = [glyph for glyph, _ in cells_of_map(app)].count("·")
            assert num_empty == app.player.moment.state.num_empty_blocks
        await settle(pilot)
        return screen_text(app)

    text = drive(app, script, (120, 40))
    assert "block pool by group of layers" in text
    assert "0 window 4, 1 layer  1 no window, 1 layer  2 window 6, 1 layer  cached  · empty" in text
    assert seen == {("·", False), *((group, is_cached) for group in "012" for is_cached in (False, True))}


@pytest.mark.quick("Gz")
@pytest.mark.parametrize("keys", ["G", "Gz", "zG"])
def test_a_cell_of_several_blocks_shows_the_most_common_group(many_events, keys):
    app = app_of(many_events)

    async def script(pilot):
        for stop in range(5, app.player.last, 9):
            app.player.move_to(stop)
            app.tick()
            await settle(pilot)
            if stop == 5:
                await press(pilot, *keys)
            check_cells(app)
        return screen_text(app)

    text = drive(app, script)
    assert "by group of layers" in text
    assert ("1 cell =" in text) == ("* tied" in text) == ("z" not in keys)


def test_a_model_with_one_group_says_so():
    app = app_of(simulated())

    async def script(pilot):
        text = await press(pilot, "G")
        assert "all layers of this model are in one group" in text
        assert "by group" not in text
        assert "all layers of this model are in one group" in await typed(pilot, ":", "groups")

    drive(app, script)


def test_the_line_under_the_cursor_and_the_copy_name_the_group(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, *"5", "enter")
        state = app.player.moment.state
        block_id = next(seq for seq in state.running()).held_block_ids[1]
        group = state.block_groups[block_id]
        window = "no window" if WINDOWS[group] is None else f"window {WINDOWS[group]}"
        for keys in ("", "G"):
            await press(pilot, *keys)
            assert f"block {block_id}, group {group} ({window}): held by seq" in await typed(
                pilot, ":", f"block {block_id}"
            )
        rows = [line.split("\t") for line in panel(app, "map").as_text().splitlines()]
        assert rows[0] == ["block", "state", "ref count", "content", "group", "held by seq"]
        groups = [group_of(state, block_id) for block_id in range(state.num_blocks)]
        assert [row[4] for row in rows[1:]] == ["" if each is None else str(each) for each in groups]

    drive(app, script, (120, 40))


def test_the_line_under_a_cell_counts_its_blocks_by_group(many_events):
    app = app_of(many_events)

    async def script(pilot):
        await press(pilot, ">", "G", "shift+tab", "home")
        state = app.player.moment.state
        counts = Counter(group for each in range(7) if (group := group_of(state, each)) is not None)
        assert counts == {0: 3, 1: 2, 2: 2}
        assert "blocks 0 to 6: 3 of group 0, 2 each of groups 1 2; Enter shows them" in screen_text(app)

    drive(app, script, (120, 40))


def test_groups_have_a_page_that_follows_the_steps(events):
    app = app_of(events)

    async def script(pilot):
        await press(pilot, *"20", "enter")
        await typed(pilot, ":", "groups")
        await settle(pilot)
        for _ in range(3):
            state = app.player.moment.state
            text = await press(pilot, "down")
            assert f"groups of layers, step {state.step_number}" in text
            await press(pilot, "y")
            heading, *rows = [line.split("\t") for line in app.clipboard.splitlines()]
            assert heading[:2] == ["group", "window, tokens"]
            in_use = Counter(state.block_groups[each] for each, count in enumerate(state.ref_counts) if count)
            assert [int(row[heading.index("blocks in use")]) for row in rows] == [in_use[group] for group in range(3)]
            await press(pilot, ".")
        assert "block pool" in await press(pilot, "escape")

    drive(app, script, (120, 40))
