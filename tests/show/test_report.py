"""The HTML report: complete, safe to embed whatever a request is called, and fast enough in a real browser."""

import json
import random
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
from harness.core import Simulation

from pagedcli import open_trace
from pagedcli.events import StepScheduled
from pagedcli.show.report import PoolFrames, embedded_json, render_report
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.trace.fold import pool_fold
from pagedcli.views.cache_groups import group_of, group_uses, group_words

NASTY = "</script><script>document.title='owned'</script>"
CHINESE = "你好,世界"


def recorded(path, *, num_steps=60, num_blocks=40, request_ids=(NASTY, CHINESE), seed=1, **limits):
    """A simulated run whose requests carry these ids."""
    rng = random.Random(seed)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "chunked_prefill_size": 16, **limits}
    with TraceWriter(path) as writer:
        sim = Simulation(num_blocks, 4, emit=writer, trace_tokens=True, check=False, **limits)
        while sim.stats.num_steps < num_steps:
            while len(sim.scheduler.waiting) < 3:
                head = [rng.randrange(3)] * rng.randrange(1, 20)
                prompt = head + [rng.randrange(50) for _ in range(rng.randrange(1, 8))]
                number = len(sim.seqs)
                name = request_ids[number % len(request_ids)] + (f" {number}" if number >= len(request_ids) else "")
                sim.add(prompt, rng.randrange(2, 30), request_id=name)
            sim.step()
        sim.run()
    return path


def page_data(page):
    return json.loads(re.search(r'id="trace-data">(.*?)</script>', page.decode(), re.DOTALL)[1])


def requests_of(data):
    return [dict(zip(data["requestColumns"], row, strict=True)) for row in data["requests"]]


def test_text_cannot_leave_the_script_element():
    text = embedded_json({"a": NASTY, "b": CHINESE, "c": "<!-- & \u2028"})
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == {"a": NASTY, "b": CHINESE, "c": "<!-- & \u2028"}


def test_the_page_holds_the_run_and_nothing_from_outside(tmp_path):
    path = recorded(tmp_path / "<b>{{data}}.jsonl")
    page = render_report(TraceReader(path), lambda: lambda ids: NASTY + CHINESE)
    text = page.decode()
    assert text.count("<script") == text.count("</script>") == 2
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", text.replace(NASTY, ""))
    assert "default-src 'none'" in text
    data = page_data(page)
    assert {row["label"].split()[0] for row in requests_of(data)} == {NASTY, CHINESE}
    assert any(NASTY + CHINESE in lookup[-1] for lookup in data["explain"]["lookups"] if lookup[-1])
    assert len(data["frames"]) == data["numSteps"] + 1
    assert all(len(column) == data["numSteps"] for column in data["columns"].values())


@pytest.mark.parametrize("windows", [(None,), (4, None), (3, 5, None)])
def test_frames_fold_to_the_states_and_groups_of_every_step(tmp_path, windows):
    frames, pools = PoolFrames(), []
    folding = pool_fold(frames)
    trace = recorded(tmp_path / "run.jsonl", num_blocks=24 * len(windows), windows=windows)
    for event in folding.steps(TraceReader(trace)):
        if isinstance(event, StepScheduled):
            pools.append(cells(folding.state))
    frames.add(folding.state)  # the end of the run
    pools.append(cells(folding.state))
    for group in (1, 7):
        deltas, folded = frames.grouped_blocks(group), [(0, None)] * folding.state.num_blocks
        assert len(deltas) == -(-(len(pools) - 1) // group) + 1
        for number, delta in enumerate(deltas):
            for packed in delta:
                place, code = divmod(packed, 16)
                block_id, of_layers = divmod(place, len(windows))
                folded[block_id] = code, of_layers if code else None
            last = len(pools) - 1 if number == len(deltas) - 1 else min(number * group + group, len(pools) - 1) - 1
            assert folded == pools[last]
    moved = sum(
        a != b and a[0] == b[0] for before, after in pairwise(pools) for a, b in zip(before, after, strict=True)
    )
    assert (moved > 0) == (len(windows) > 1), "a block of the same state in another group"


def test_table_frames_fold_to_the_block_tables_of_every_step(tmp_path):
    frames, expected = PoolFrames(), []
    folding = pool_fold(frames)
    for event in folding.steps(TraceReader(recorded(tmp_path / "run.jsonl"))):
        if isinstance(event, StepScheduled):
            seqs = folding.state.seqs.values()
            expected.append({seq.seq_id: list(seq.block_table) for seq in seqs if seq.block_table})
    frames.add(folding.state)  # the end of the run
    for group in (1, 7):
        tables = {}
        for number, frame in enumerate(frames.grouped_tables(group)):
            for seq_id, kept, *block_ids in frame:
                tables[seq_id] = tables.get(seq_id, [])[:kept] + block_ids
            tables = {seq_id: table for seq_id, table in tables.items() if table}
            last = min(number * group + group, len(expected)) - 1
            assert tables == (expected[last] if number < -(-len(expected) // group) else {})


def cells(state):
    """Of each block its code on the map, and its group."""
    return [(code(state, block_id), group_of(state, block_id)) for block_id in range(state.num_blocks)]


def code(state, block_id):
    ref_count, cached = state.ref_counts[block_id], state.hashes[block_id] is not None
    if ref_count == 0:
        return 1 if cached else 0
    return min(ref_count + 2, 13) if ref_count > 1 else 3 if cached else 2


def test_timelines_leave_no_gap(tmp_path):
    data = page_data(render_report(TraceReader(recorded(tmp_path / "run.jsonl.zst"))))
    for row in requests_of(data):
        assert row["end"] == "length"
        for before, after in pairwise(row["phases"]):
            assert after[1] == before[2] + 1
        assert all(first <= last for _, first, last in row["phases"])


def test_a_long_run_is_drawn_in_groups_and_says_so(tmp_path):
    path = recorded(tmp_path / "run.jsonl")
    whole = page_data(render_report(TraceReader(path)))
    data = page_data(render_report(TraceReader(path), most_frames=20))
    assert data["group"] == -(-whole["numSteps"] // 20)
    assert len(data["columns"]["used"]) <= 20
    assert sum(data["columns"]["sampled"]) == sum(whole["columns"]["sampled"])
    assert data["columns"]["used"][-1] == whole["columns"]["used"][-1]
    assert len(data["frames"]) == len(data["columns"]["used"]) + 1


@pytest.fixture
def chromium(tmp_path):
    """Loads a page in headless Chromium and returns its DOM once the script has run."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")

    def dump(path, *options):
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,2400", *options, "--dump-dom", path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode()

    return dump


@pytest.fixture
def probed(tmp_path, chromium):
    """Gives what a script at the end of a page finds in a browser."""

    def probe(page, script):
        script = f"<script>document.documentElement.dataset.probe = JSON.stringify((() => {{ {script} }})());</script>"
        path = tmp_path / "report.html"
        path.write_bytes(page.decode().replace("</body>", f"{script}</body>").encode())
        found = re.search(r'data-probe="(.*?)"', chromium(path), re.DOTALL)
        assert found, "the page's script failed"
        text = found[1].replace("&quot;", '"').replace("&amp;", "&")
        return json.loads(text.replace("&lt;", "<").replace("&gt;", ">"))

    return probe


def test_a_browser_shows_the_run_and_runs_nothing_of_it(tmp_path, probed):
    page = render_report(TraceReader(recorded(tmp_path / "run.jsonl")), lambda: lambda ids: NASTY + CHINESE)
    script = """
      setFrame(3);
      drawMap(); for (const chart of charts) chart.draw();
      const words = $("pool-words").textContent, pixels = $("map").getContext("2d").getImageData(2, 2, 1, 1).data[3];
      setFrame(numFrames - 1); drawMap();
      return { title: document.title, words, pixels, last: $("pool-words").textContent,
               lookups: $("lookups").textContent, tiles: $("tiles").children.length, scripts: document.scripts.length,
               ready: document.documentElement.dataset.ready };
    """
    found = probed(page, script)
    assert found["ready"] == "yes"
    assert found["title"] == "pagedcli: run.jsonl"
    assert found["scripts"] == 3  # the data, the page's own and the probe: none came from the data
    assert NASTY in found["lookups"]
    assert CHINESE in found["lookups"]
    assert found["tiles"] == 7
    assert found["pixels"] == 255
    assert found["words"].startswith("step 3, ")
    assert found["words"].endswith(" = 40 blocks")
    assert found["last"].startswith("the end, ")
    assert ": in use 0 " in found["last"]


def test_the_page_is_driven_by_search_sort_zoom_hover_and_selection(tmp_path, probed):
    """Through the same events as a person's; `frame` waits for what they draw."""
    path = recorded(tmp_path / "run.jsonl", request_ids=("code-Mirano", "code-Tavek"))
    page = render_report(TraceReader(path), what_to_change=lambda _: ["Prompts part (counted)."])
    script = """
      const textsOf = line => [...line.cells].map(cell => cell.textContent);
      const cells = id => [...$(id).querySelectorAll("tbody tr")].map(textsOf);
      const fire = (node, type, fields) => node.dispatchEvent(Object.assign(new Event(type), fields));
      const found = { story: [...$("story").children].map(p => p.textContent), slowest: $("slowest").children.length };
      $("requests-search").value = "TAVEK"; fire($("requests-search"), "input");
      found.searched = cells("requests").map(row => row[0]);
      $("requests-search").value = ""; fire($("requests-search"), "input");
      const headers = () => [...$("requests").querySelectorAll("th button")];
      const sortBy = words => headers().find(button => button.textContent.startsWith(words)).click();
      sortBy("total"); found.slowestFirst = cells("requests")[0][0];
      sortBy("total"); found.fastestFirst = cells("requests")[0][0];
      sortBy("generated"); found.generated = cells("requests").map(row => +row[4]);
      $("slider").value = 20; fire($("slider"), "input"); drawMap();
      found.step = $("step-name").textContent; found.tables = cells("tables"); found.pool = $("pool-words").textContent;
      const block = [...tables][0][1][0], size = mapGrid.size;
      const [x, y] = [block % mapGrid.perRow, Math.floor(block / mapGrid.perRow)];
      const place = { offsetX: x * size + 2, offsetY: y * size + 2, clientX: 5, clientY: 5 };
      fire($("map"), "pointermove", place);
      found.tip = tip.textContent; found.holder = requestOf.get([...tables][0][0])[R.label]; found.shown = !tip.hidden;
      found.all = timelineRows.length;
      setFrame(30); $("zoom-in").click(); $("zoom-in").click(); $("zoom-in").click();
      found.range = [+$("slider").min, +$("slider").max, from, to, current]; found.zoomed = timelineRows.length;
      found.listed = $("requests-words").textContent; found.rows = cells("requests").length;
      $("whole").click(); found.whole = [+$("slider").min, +$("slider").max, timelineRows.length, $("whole").hidden];
      [...$("requests").querySelectorAll("td .link")][5].click();
      found.selected = $("requests").querySelector("tr.selected").cells[0].textContent;
      found.jumped = [current, requestOf.get(selectedSeq)[R.first_step]];
      return found;
    """
    found = probed(page, script)
    links = ["the lookups", "the step of the peak", "its rows"]
    assert [next(link for link in links if text.endswith(link)) for text in found["story"]] == links
    assert found["slowest"] == 10
    assert found["searched"]
    assert all(name.startswith("code-Tavek") for name in found["searched"])
    rows = requests_of(page_data(page))
    by_time = sorted(rows, key=lambda row: row["total_s"])
    assert found["slowestFirst"] == by_time[-1]["label"]
    assert found["fastestFirst"] == by_time[0]["label"]
    assert found["generated"] == sorted(found["generated"], reverse=True)
    assert found["step"].startswith("step 20, ")
    assert f"in use {len({block for row in found['tables'] for block in blocks_of(row[4])})} " in found["pool"]
    assert found["shown"]
    assert f"held by {found['holder']} (seq " in found["tip"]
    first, last, start, end, shown = found["range"]
    assert first <= start <= shown <= end <= last
    assert last - first < 15
    assert 0 < found["zoomed"] == found["rows"] < found["all"]
    assert "; active in step " in found["listed"]
    assert found["whole"] == [0, page_data(page)["numSteps"], found["all"], True]
    assert found["selected"]
    assert found["jumped"][0] == found["jumped"][1]


def test_keys_need_no_focus_a_block_is_found_and_the_summary_leads_to_its_rows(tmp_path, probed):
    page = render_report(TraceReader(recorded(tmp_path / "run.jsonl")))
    script = """
      const press = (key, fields, on) => (on || document.body).dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...fields }));
      const found = {};
      setFrame(20); press("ArrowRight"); found.right = current;
      press("ArrowLeft", { shiftKey: true }); found.left = current;
      press("End"); found.end = current; press("Home"); found.home = current;
      setFrame(20); press("+"); found.zoomed = !$("whole").hidden; press("0"); found.whole = $("whole").hidden;
      press(" "); found.plays = $("play").textContent; press(" ");
      press("b"); found.focus = document.activeElement.id;
      press("ArrowRight", {}, $("block-search")); found.typing = current;
      const search = text => { $("block-search").value = text; $("block-search").dispatchEvent(new Event("input")); };
      setFrame(20);
      const block = [...tables][0][1][0];
      search(String(block)); found.words = $("block-words").textContent; found.block = block;
      const links = [...$("block-story").querySelectorAll("button")];
      found.changes = links.length; links[1].click(); found.jumped = current; found.expected = changesOf(block)[1][0];
      search("4000"); found.unknown = $("block-words").textContent;
      [...$("story").querySelectorAll("button")][0].click();
      found.peak = columns.used[current]; found.most = Math.max(...columns.used);
      found.quoted = [...document.querySelectorAll("#totals tr.quoted")].map(row => row.cells[0].textContent);
      found.overflow = document.documentElement.scrollWidth - innerWidth;
      return found;
    """
    found = probed(page, script)
    assert (found["right"], found["left"], found["home"]) == (21, 11, 0)
    assert found["end"] == page_data(page)["numSteps"]
    assert found["zoomed"]
    assert found["whole"]
    assert found["plays"] == "Pause"
    assert found["focus"] == "block-search"
    assert found["typing"] == 20, "a field that takes keys keeps them"
    assert found["words"].startswith(f"block {found['block']}: ")
    assert "; held by " in found["words"]
    assert found["changes"] > 1
    assert found["jumped"] == found["expected"]
    assert found["unknown"] == "There is no block 4000: they are numbered from 0 to 39."
    assert found["peak"] == found["most"]
    assert found["quoted"][0] == "hit"
    assert found["quoted"][-1].startswith("ceiling")
    assert found["overflow"] <= 0


def test_the_map_shows_the_groups_of_layers_by_number_alone_and_in_a_table(tmp_path, probed):
    trace = recorded(tmp_path / "run.jsonl", num_blocks=90, windows=(30, 30, None))
    script = """
      const drawn = [], draw = CanvasRenderingContext2D.prototype.fillText, found = { modes: {} };
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        if (this.canvas.id === "map") drawn.push([String(text), this.globalAlpha]);
        draw.call(this, text, x, y);
      };
      setFrame(20);
      found.offered = [...$("colour-by").options].map(option => option.value);
      for (const mode of found.offered) {
        $("colour-by").value = mode; $("colour-by").dispatchEvent(new Event("change"));
        drawn.length = 0; drawMap();
        found.modes[mode] = { drawn: [...drawn], legend: $("map-legend").textContent, note: $("map-note").textContent };
      }
      found.table = [...$("groups").tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent));
      found.words = [...pool.keys()].filter(block => pool[block]).map(block => [block, blockWords(block)]);
      const block = [...tables][0][1][0];
      selectBlock(block); found.block = block; found.story = $("block-story").textContent;
      return found;
    """
    found = probed(render_report(TraceReader(trace)), script)
    folding = pool_fold()
    next(event for event in folding.steps(TraceReader(trace)) if isinstance(event, StepScheduled) and event.step == 20)
    state = folding.state
    assert found["offered"] == ["state", "group", "0", "1", "2"]
    groups = [group_of(state, block_id) for block_id in range(90)]
    assert found["modes"]["group"]["drawn"] == [[str(group), 1] for group in groups if group is not None]
    assert "The number is the group's." in found["modes"]["group"]["note"]
    assert "of another group" in found["modes"]["1"]["legend"]
    shared = [group for group, count in zip(groups, state.ref_counts, strict=True) if count > 1]
    assert len(set(shared)) > 1
    assert [alpha for _, alpha in found["modes"]["2"]["drawn"]] == pytest.approx(
        [1 if group == 2 else 0.15 for group in shared], abs=0.01
    )
    for row, use in zip(found["table"], group_uses(state), strict=True):
        window, used = "none" if use.window is None else str(use.window), "16 B of 16 B"
        counts = [str(use.used_blocks), str(use.cached_blocks)]
        assert row == [str(use.group), str(use.group), window, "1 of 1", used, *counts, "0 B"]
    assert [block_id for block_id, _ in found["words"]] == [i for i, group in enumerate(groups) if group is not None]
    for block_id, words in found["words"]:
        assert f", {group_words(state.started, group_of(state, block_id))}" in words
    assert f", group {groups[found['block']]}" in found["story"]


def blocks_of(text):
    """The block ids of `0-3×2 7 9`."""
    for part in text.split():
        first, _, last = part.partition("×")[0].partition("-")
        yield from range(int(first), int(last or first) + 1)


@pytest.mark.quick("True")
@pytest.mark.parametrize("selected", [False, True])
def test_labels_have_units_and_axes_show_seconds(tmp_path, probed, selected):
    page = render_report(TraceReader(recorded(tmp_path / "run.jsonl")), selected={5} if selected else ())
    script = """
      const drawn = [], draw = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
        drawn.push(String(text));
        draw.call(this, text, x, y);
      };
      const words = {};
      for (const chart of charts) { drawn.length = 0; chart.draw(); words[chart.id] = [...drawn]; }
      const box = $("requests-box"), heights = [...$("requests").tBodies[0].rows].map(row => row.offsetHeight);
      return { words, selected: selectedSeq, listed: $("requests-words").textContent,
               cut: box.scrollWidth - box.clientWidth, highest: Math.max(...heights) };
    """
    found = probed(page, script)
    units = {"occupancy": "blocks", "hits": "%", "waste": "%", "speed": "tokens/s", "seqs": "sequences"}
    for chart, drawn in found["words"].items():
        assert {"step", "time"} <= set(drawn)
        assert any(text.endswith((" s", " ms", " µs")) for text in drawn)
        assert chart == "timeline" or units[chart] in drawn
    assert found["selected"] == (5 if selected else None)
    assert found["listed"].startswith("1 of ") == selected
    assert found["cut"] == 0, "all columns of the requests fit a laptop's screen"
    assert found["highest"] < 40, "a request takes one line"


def test_a_film_plays_in_a_browser_without_a_server(tmp_path, chromium):
    film, page = open_trace(recorded(tmp_path / "run.jsonl")).play(0, 20), tmp_path / "film.html"
    page.write_text(film.page(), encoding="utf-8")
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", film.page())
    shown = chromium(page, "--virtual-time-budget=3000")
    (step,) = re.findall(r"<title>KV cache at step (\d+)</title>", shown)
    assert 0 < int(step) <= 20  # it plays
    assert 'max="20"' in shown
    assert len(film._repr_html_()) < 300_000
