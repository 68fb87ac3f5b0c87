"""A trace in Python: data frames equal the files of --dump-kv, and steps, films and lookups show themselves."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from cli_harness import pagedcli
from harness.core import EventList, simulated, write

import pagedcli as package
from pagedcli import LLM, SamplingParams, open_trace
from pagedcli.errors import TraceError, UsageError
from pagedcli.events import StepScheduled
from pagedcli.show.notebook import Trace, data_frame
from pagedcli.show.pool_picture import pool_picture
from pagedcli.views.moment import Replay
from pagedcli.views.step_rows import TABLES, file_columns

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("trace") / "run.jsonl", simulated(num_requests=30))


@pytest.fixture
def trace(path):
    return open_trace(path)


def test_open_trace_is_offered_without_torch_or_pandas():
    assert "open_trace" in package.__all__
    heavy = {"torch", "pandas", "polars", "PIL"}
    program = f"from pagedcli import open_trace; import sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def plain(value):
    """None for what pandas calls absent."""
    return None if not isinstance(value, list) and (str(value) == "<NA>" or value != value) else value


@pytest.mark.quick("polars")
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_hold_what_the_files_of_dump_kv_hold(trace, path, tmp_path, monkeypatch, library):
    pytest.importorskip(library)
    if library == "polars":
        monkeypatch.setitem(sys.modules, "pandas", None)
    pagedcli("trace", path, "--dump-kv", tmp_path / "kv.jsonl")
    for name in ("steps", "sequences", "blocks", "lookups"):
        frame = getattr(trace, name)
        assert type(frame).__module__.startswith(library)
        written = [json.loads(line) for line in (tmp_path / f"kv.{name}.jsonl").read_text().splitlines()]
        assert list(frame.columns) == [column.key for column in file_columns(name)]
        if library == "pandas":
            rows = [{key: plain(value) for key, value in row.items()} for row in frame.to_dict("records")]
        else:
            rows = frame.to_dicts()
        assert rows == written


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_column_has_its_type_also_where_there_are_no_values(library, monkeypatch):
    pytest.importorskip(library)
    if library == "polars":
        monkeypatch.setitem(sys.modules, "pandas", None)
    for table in TABLES:
        assert list(data_frame(file_columns(table), []).columns) == [column.key for column in file_columns(table)]


def test_without_a_library_for_frames_the_error_names_both(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match="need pandas or polars") as error:
        _ = trace.steps
    assert error.value.hint == "pip install pandas, or polars"


def test_columns_say_what_they_mean_and_some_steps_can_be_chosen(trace):
    pytest.importorskip("pandas")
    shown = repr(trace.columns("steps"))
    for column in file_columns("steps"):
        assert column.key in shown
    assert trace.steps.attrs["meaning"]["start_ms"].startswith("when it began, in milliseconds")
    assert list(trace.frame("steps", 3, 9, every=2)["step"]) == [3, 5, 7, 9]


def test_a_step_is_its_picture_and_its_tables(trace, path):
    step = trace.step(12)
    state = Replay(EventList(simulated(num_requests=30))).go(12).state
    assert step._repr_svg_() == pool_picture(state).svg()
    page = step._repr_html_()
    assert page.startswith("<svg")
    assert "<table>" in page
    assert "KV cache at step 12" in repr(step)
    trace.step(3)  # travelling back does not change what was handed out
    assert step._repr_html_() == page


def test_what_is_not_there_is_named(trace, tmp_path):
    first, last = trace.step_numbers
    assert (first, repr(trace)) == (0, f"Trace('run.jsonl', steps 0 to {last})")
    with pytest.raises(UsageError, match="has no step 9999") as error:
        trace.step(9999)
    assert error.value.hint == f"it has steps 0 to {last}"
    with pytest.raises(UsageError, match="no request 'nobody'"):
        trace.explain("nobody")
    with pytest.raises(UsageError, match="there is no table 'rows'"):
        trace.frame("rows")
    with pytest.raises(UsageError, match="make no film"):
        trace.play(9, 3)
    (tmp_path / "no.jsonl").write_text("{}\n")
    with pytest.raises(TraceError):
        repr(open_trace(tmp_path / "no.jsonl"))


def test_a_run_that_has_not_begun_has_no_steps_and_a_damaged_one_says_so():
    events = simulated(num_requests=3)
    begun = Trace(lambda: EventList(events[:1]), "this run")
    assert (repr(begun), begun.step_numbers, len(begun.explain().tables[0].rows)) == (
        "Trace('this run', no steps)",
        None,
        0,
    )
    with pytest.raises(UsageError) as error:
        begun.play()
    assert error.value.hint == "it has no steps"
    ET.fromstring(begun.tree()._repr_svg_())
    damaged = Trace(lambda: EventList([*events, events[0]]), "this run")
    assert "damaged after them: event " in repr(damaged)
    with pytest.raises(TraceError):
        _ = damaged.steps


def test_explain_has_the_lookups_of_the_command(trace, path):
    found = json.loads(pagedcli("explain", path, "--request", "request-9", "--format", "json").stdout)["lookups"]
    (table,) = trace.explain("request-9").tables
    assert [(row["step"], row["why"]) for row in table.rows] == [(row["step"], row["why"]) for row in found]
    assert "<table>" in trace.explain()._repr_html_()


def test_a_film_is_kept_as_gif(trace, tmp_path, image):
    trace.play(2, 5).save(tmp_path / "pool.gif")
    with image.open(tmp_path / "pool.gif") as film:
        assert film.n_frames == 4
    with pytest.raises(UsageError, match="a film cannot be written to"):
        trace.play(2, 5).save("pool.svg")


def test_an_llm_that_records_gives_the_trace_of_its_run():
    prompt = [5, 6, 7, 8] * 10
    llm = LLM("builtin", record=True, num_kvcache_blocks=32, max_num_seqs=2)
    llm.generate([[*prompt, 9], [*prompt, 10]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    before = llm.trace
    first, last = before.step_numbers
    llm.generate([[*prompt, 11]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert before.step_numbers == (first, last)
    assert llm.trace.step_numbers[1] > last
    (table,) = llm.trace.explain("2").tables
    assert table.rows[0]["tokens_hit"] == 32
    assert "first divergence at token 40" in table.notes[0]


def test_an_observer_sees_the_events_that_are_recorded():
    seen = []
    llm = LLM("builtin", record=True, emit=seen.append, num_kvcache_blocks=32, max_num_seqs=2)
    llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
    steps = [event.step for event in seen if isinstance(event, StepScheduled)]
    assert (steps[0], steps[-1]) == llm.trace.step_numbers


def test_an_llm_that_does_not_record_says_how():
    llm = LLM("builtin", num_kvcache_blocks=32, max_num_seqs=2)
    with pytest.raises(UsageError) as error:
        _ = llm.trace
    assert error.value.hint == "create it with LLM(..., record=True)"


@pytest.mark.long
def test_the_example_notebook_runs_and_shows_what_it_promises():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    notebook = nbformat.read(ROOT / "examples" / "kv_cache.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "examples are kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = {cell.source: cell.outputs[-1]["data"] for cell in notebook.cells if cell.get("outputs")}
    assert "KV cache at step 2" in shown["t.step(2)"]["image/svg+xml"]
    assert "<table>" in shown["t.step(2)"]["text/html"]
    assert "srcdoc" in shown["t.play(0, 16)"]["text/html"]
    assert "The life of request 3" in shown['t.life("3")']["image/svg+xml"]
    assert "every full block was cached" in shown['t.explain("3")']["text/plain"]
    assert "first divergence at token 0" in shown['t.explain("4")']["text/plain"]
    columns = shown[next(source for source in shown if source.startswith("t.steps["))]
    assert "shared_blocks" in columns["text/html"]
