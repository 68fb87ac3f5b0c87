"""Pictures say what the trace says: they are read back, and compared with the state of the fold and with the events."""

import io
import json
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from cli_harness import pagedcli
from harness.core import EventList, simulated, write

import pagedcli.events as ev
from pagedcli.errors import UsageError
from pagedcli.show.curve import curve_lines
from pagedcli.show.drawing import NUM_PREFIX_COLOURS, Shape, Theme, colours_of
from pagedcli.show.pool_picture import pool_picture, pool_text
from pagedcli.show.raster import check_fonts
from pagedcli.show.run_pictures import life_picture, ticks, tree_picture, waste, waste_picture
from pagedcli.trace.fold import fold
from pagedcli.views.moment import Replay
from pagedcli.views.names import find_request
from pagedcli.views.prefix_tree import PrefixTree
from pagedcli.views.request_life import RequestLife
from pagedcli.views.stats import memory_use

PAGE = Path(__file__).parents[2] / "docs" / "look-inside.md"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def events():
    return simulated(num_requests=60)


@pytest.fixture(scope="module")
def trace(tmp_path_factory, events):
    return write(tmp_path_factory.mktemp("trace") / "run.jsonl", events)


def rects(svg, name):
    return [each for each in ET.fromstring(svg).iter(f"{SVG}rect") if f"data-{name}" in each.attrib]


def numbers(text):
    return [int(each) for each in text.split()]


@pytest.mark.parametrize("windows", [(None,), (3, 5, None)])
@pytest.mark.parametrize("shape", Shape)
def test_every_block_owner_and_ref_count_of_twenty_random_steps_is_that_of_the_trace(shape, windows):
    events = simulated(num_requests=60, num_blocks=14 * len(windows), windows=windows)
    replay, rng = Replay(EventList(events)), random.Random(1)
    seen = set()
    for stop in (0, *rng.sample(range(1, replay.last_stop + 1), 20)):
        state = replay.go(stop).state
        shown = rects(pool_picture(state, shape=shape).svg(), "block")
        assert [int(each.get("data-block")) for each in shown] == list(range(state.num_blocks))
        owners = {block_id: [] for block_id in range(state.num_blocks)}
        for seq in state.seqs.values():
            for block_id in seq.held_block_ids:
                owners[block_id].append(seq.seq_id)
        for block_id, block in enumerate(shown):
            assert numbers(block.get("data-owners")) == owners[block_id]
            assert int(block.get("data-ref-count")) == state.ref_counts[block_id] == len(owners[block_id])
            in_use, full = bool(owners[block_id]), state.hashes[block_id] is not None
            assert block.get("data-state") == ("in_use" if in_use else "cached" if full else "empty")
            seen.add(block.get("data-state"))
    assert seen == {"in_use", "cached", "empty"}


def test_tables_next_to_the_pool_are_those_of_the_sequences(events):
    replay = Replay(EventList(events))
    for stop in range(0, replay.last_stop, 7):
        state = replay.go(stop).state
        entries = {}
        for each in rects(pool_picture(state).svg(), "entry"):
            entries.setdefault(int(each.get("data-seq")), []).append(int(each.get("data-entry")))
        assert entries == {seq.seq_id: seq.block_table for seq in state.running() if seq.block_table}


def test_a_long_table_is_cut_in_its_middle_and_says_by_how_much():
    replay = Replay(EventList(simulated(num_blocks=300, num_requests=1, max_num_batched_tokens=99)))
    state = replay.go(0).state
    (seq,) = state.running()
    free = [block_id for block_id in range(300) if block_id not in seq.block_table]
    seq.block_table.extend(free[: 100 - len(seq.block_table)])
    for block_id in seq.block_table[len(seq.block_table) - 100 :]:
        if not state.ref_counts[block_id]:
            state.hold(block_id)
    svg = pool_picture(state, shape=Shape.COLUMN).svg()
    places = [int(each.get("data-place")) for each in rects(svg, "entry")]
    (left,) = re.findall(r">\+(\d+)</text>", svg)
    assert (places[0], places[-1], len(places) + int(left)) == (0, 99, 100)


def test_only_the_followed_request_has_its_table(events):
    replay = Replay(EventList(events))
    state = next(state for stop in range(replay.last_stop) if len((state := replay.go(stop).state).running()) > 2)
    chosen = state.running()[1]
    tables = rects(pool_picture(state, follow={chosen.seq_id}).svg(), "seq")
    assert {int(each.get("data-seq")) for each in tables} == {chosen.seq_id}
    assert not rects(pool_picture(state, follow=set()).svg(), "seq")


def test_shared_blocks_of_one_prefix_have_one_colour_and_letter_and_no_other():
    events = simulated(num_blocks=40, num_requests=40, max_num_seqs=8, max_num_batched_tokens=40)
    replay, found = Replay(EventList(events)), 0
    for stop in range(replay.last_stop):
        state = replay.go(stop).state
        picture = pool_picture(state).svg()
        by_first: dict[int, set[str]] = {}
        for block in rects(picture, "block"):
            if int(block.get("data-ref-count")) > 1:
                owner = state.seqs[numbers(block.get("data-owners"))[0]]
                by_first.setdefault(owner.block_table[0], set()).add(block.get("class"))
            else:
                assert not block.get("class").startswith("prefix")
        assert all(len(classes) == 1 for classes in by_first.values())
        if len(by_first) <= NUM_PREFIX_COLOURS:
            assert len(set.union(set(), *by_first.values())) == len(by_first)
        found = max(found, len(by_first))
    assert found > 1


@pytest.mark.parametrize("windows", [(None,), (3, 5, None)])
def test_written_blocks_are_those_that_the_steps_tokens_fill(windows):
    num_groups = len(windows)
    replay = Replay(EventList(simulated(num_requests=60, num_blocks=14 * num_groups, windows=windows)))
    for stop in range(0, replay.last_stop, 5):
        state = replay.go(stop).state
        expected = set()
        for seq_id, count in state.step.new_tokens.items():
            seq = state.seqs[seq_id]
            places = range(seq.num_computed_tokens - count, seq.num_computed_tokens)
            first = [token // state.block_size * num_groups for token in places]
            expected |= {seq.block_table[place + group] for place in first for group in range(num_groups)}
        expected.discard(None)
        marked = {int(cell.split()[0]) for cell in re.findall(r"\d+ \S*\*", pool_text(state).partition("\n\n")[0])}
        assert marked == expected


@pytest.mark.parametrize("theme", Theme)
def test_pictures_are_whole_files_without_anything_from_outside(events, theme):
    state = Replay(EventList(events)).go(30).state
    svg = pool_picture(state).svg(theme)
    root = ET.fromstring(svg)
    assert root.find(f"{SVG}title").text == f"KV cache at step {state.step_number}"
    assert not re.search("href|<script|<image|url\\(", svg)
    assert ("prefers-color-scheme: dark" in svg) == (theme is Theme.AUTO)
    ink = root.find(f"{SVG}text").get("fill")
    assert ink in colours_of(Theme.DARK if theme is Theme.DARK else Theme.LIGHT)


def test_names_cannot_leave_their_text():
    events = [
        *simulated(num_requests=1)[:1],
        ev.RequestAdded(0, "r", 0, 4, 4, False, row_id='"><script>alert(1)</script>\x00'),
        ev.StepStarted(0, 0),
        ev.PrefixLookedUp(0, "new", 4, 2, 0, 0, 0, 1, "no_match", 0),
        ev.BlocksAllocated(0, (0, 1)),
        ev.StepScheduled(0, (0,), (4,), 0),
    ]
    svg = pool_picture(Replay(EventList(events)).go(0).state).svg()
    assert "alert(1)" in svg
    assert "<script" not in svg
    ET.fromstring(svg)


@pytest.mark.long
def test_a_pool_too_large_to_be_seen_is_refused():
    state = Replay(EventList(simulated(num_blocks=14))).go(0).state
    state.reset_blocks(400_000)
    with pytest.raises(UsageError, match="400,000 blocks is too large"):
        pool_picture(state)


def test_the_life_of_a_request_holds_its_blocks_and_phases(events):
    preempted = next(event.seq_id for event in events if isinstance(event, ev.RequestPreempted))
    added = (event for event in events if isinstance(event, ev.RequestAdded))
    name = next(event.request_id for event in added if event.seq_id == preempted)
    request = find_request(EventList(events), name, "this run")
    view = RequestLife(request)
    state = fold(EventList(events), view)
    lives = view.finish(state)
    replay, expected = Replay(EventList(events)), []
    for stop in range(replay.last_stop):
        seq = replay.go(stop).state.seqs.get(lives[0].seq_id)
        expected.append(0 if seq is None else len(seq.held_block_ids))
    svg = life_picture(name, lives[:1]).svg()
    held = dict.fromkeys(range(len(expected)), 0)
    for each in rects(svg, "held"):
        held |= dict.fromkeys(
            range(int(each.get("data-first")), int(each.get("data-last")) + 1), int(each.get("data-held"))
        )
    assert [held[step] for step in sorted(held)] == expected
    assert "preempted" in {each.get("data-phase") for each in rects(svg, "phase")}
    assert "preempted for" in svg


def test_the_hits_of_the_tree_are_those_of_the_events():
    events = simulated(num_blocks=60, num_requests=50)
    tree = PrefixTree()
    state = fold(EventList(events), tree)
    repeats, hits = set(), []  # a later sample and a preempted request find blocks of their own request
    for event in events:
        if isinstance(event, ev.RequestPreempted) or (isinstance(event, ev.RequestAdded) and event.sample_index):
            repeats.add(event.seq_id)
        elif isinstance(event, ev.BlocksReused) and event.seq_id not in repeats:
            hits.append(event)
    root = tree.root()
    total = sum(each.num_hits * each.num_blocks for each in root.walk() if each is not root)
    assert total == sum(len(event.block_ids) for event in hits) > 20
    for each in root.walk():
        assert each is root or sum(after.num_hits for after in each.branches) <= each.num_hits
    shown = rects(tree_picture(tree, state.block_size).svg(), "hits")
    most = Counter(event.block_ids[0] for event in hits).most_common(1)[0][1]
    assert max(int(each.get("data-hits")) for each in shown) >= most


def test_smaller_branches_are_left_out_and_counted():
    tree = PrefixTree()
    state = fold(EventList(simulated(num_blocks=200, num_requests=300)), tree)
    branches = [each for each in tree.root().walk() if each.num_blocks]
    picture = tree_picture(tree, state.block_size)
    shown = rects(picture.svg(), "hits")
    assert len(shown) == 13 < len(branches)
    assert f"{len(branches) - 13} smaller branches are left out" in picture.caption


def test_waste_adds_up_with_the_memory_figures(events):
    replay = Replay(EventList(events))
    for stop in range(5, replay.last_stop, 11):
        state = replay.go(stop).state
        use = memory_use(state)
        longest, needed, paged = waste(state)
        slot_bytes = state.started.block_bytes / state.block_size
        assert longest.num_slots * slot_bytes == use.contiguous_bytes
        assert paged.num_slots - paged.num_filled == use.unfilled_slots
        assert needed.num_slots <= longest.num_slots
        slots = [int(each.get("data-slots")) for each in rects(waste_picture(state).svg(), "slots")]
        assert slots == [longest.num_slots, needed.num_slots, paged.num_slots]


def test_ticks_are_round_and_few():
    assert ticks(0, 7, 4) == [0, 2, 4, 6]
    assert ticks(12, 170) == [20, 40, 60, 80, 100, 120, 140, 160]
    assert ticks(0, 1) == [0, 1]


# ---------------------------------------------------------------------- the command


def test_a_machine_without_fonts_draws_no_pictures_without_text(monkeypatch):
    pytest.importorskip("resvg_py")
    monkeypatch.setattr("pagedcli.show.raster._rendered", lambda svg, width: b"blank")
    with pytest.raises(UsageError, match="no fonts"):
        check_fonts()


def test_a_picture_of_a_step_is_written_and_not_replaced(trace, tmp_path):
    path = tmp_path / "pool.svg"
    result = pagedcli("trace", trace, "--step", 9, "--picture", path)
    assert result.stdout == ""
    assert "pool.svg: " in result.stderr
    assert "KV cache at step 9" in path.read_text()
    assert "already exists" in pagedcli("trace", trace, "--step", 9, "--picture", path, expect=2).stderr
    pagedcli("trace", trace, "--step", 9, "--picture", path, "--overwrite", "--theme", "dark", "--shape", "column")
    assert "prefers-color-scheme" not in path.read_text()


COMMANDS = re.findall(
    r"^pagedcli ((?:trace|simulate) run[^\n#]*?--picture[^\n#]*?)(?: *#.*)?$",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.slow_cases("*pool.gif", "simulate*")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_draws_its_picture(trace, tmp_path, monkeypatch, request, command):
    if ".gif" in command:
        request.getfixturevalue("image")
    monkeypatch.chdir(tmp_path)
    words = [{"run.jsonl": trace, "code-Mirano": "request-3"}.get(word, word) for word in command.split()]
    pagedcli(*words)
    assert (tmp_path / words[words.index("--picture") + 1]).stat().st_size > 1000


@pytest.mark.long
def test_png_and_gif_are_drawn_from_the_svg(trace, tmp_path, image):
    pagedcli("trace", trace, "--step", 9, "--picture", tmp_path / "pool.png")
    with image.open(tmp_path / "pool.png") as picture:
        assert picture.size == (2560, 1440)
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20  # text and blocks, not a blank sheet
    film = tmp_path / "pool.gif"
    assert "80 steps" in pagedcli("trace", trace, "--steps", "0-79", "--picture", film).stderr
    assert film.stat().st_size < 2_000_000
    with image.open(io.BytesIO(film.read_bytes())) as picture:
        assert picture.n_frames == 80
        assert picture.convert("RGB").getpixel((2, 2)) == (255, 255, 255)


def test_without_the_extra_only_svg_is_drawn(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    result = pagedcli("trace", trace, "--step", 9, "--picture", tmp_path / "pool.png", expect=2)
    assert "pip install 'pagedcli[pictures]'" in result.stderr
    pagedcli("trace", trace, "--step", 9, "--picture", tmp_path / "pool.svg")


def test_simulate_draws_the_hit_rate_of_its_tables(trace, tmp_path):
    path = tmp_path / "hits.svg"
    result = pagedcli("simulate", trace, "--pool", "10,20,40", "--picture", path, "--format", "json")
    rates = [row["hit_rate_tokens"] for row in json.loads(result.stdout)["pools"]]
    shown = [float(each) for each in re.findall(r"<title>lru, \d+ blocks: ([\d.]+) %</title>", path.read_text())]
    assert sorted(shown) == sorted(round(100 * rate, 1) for rate in rates)
    assert len(shown) == 3


def test_columns_rise_with_the_shares_over_a_logarithmic_axis():
    curves = {"#": lambda place: 50 * min(1.0, place / 64)}
    lines = curve_lines(curves, 1, 4096, unit="%", label=lambda place: f"{place:,.0f} blocks")
    *rows, base, axis = lines
    assert rows[0].startswith(" 50.0 % |")
    assert base.startswith("  0.0 % +---")
    heights = [sum(row[9 + column : 10 + column] == "#" for row in rows) for column in range(60)]
    assert heights == sorted(heights)
    assert (heights[0], heights[30], heights[-1]) == (0, len(rows), len(rows)), "half way the axis is at 64"
    assert axis.split("  ")[0].strip() == ""
    assert [part.strip() for part in axis.split("  ") if part.strip()] == ["1 blocks", "69 blocks", "4,096 blocks"]
    assert max(map(len, lines)) < 80
