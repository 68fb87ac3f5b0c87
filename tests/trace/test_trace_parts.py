"""A trace never destroys a file; a killed or resumed run leaves parts that read as one run."""

import json
import os

import pytest
from harness.core import Simulation, simulated, write

from pagedcli.errors import TraceError, UsageError
from pagedcli.events import EngineStarted, RequestAdded, StepScheduled, StepStarted
from pagedcli.show.report import render_report
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.views.explain import explain_trace
from pagedcli.views.moment import Replay

EVENTS = simulated(num_requests=8)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(path, events, **options):
    """A run that writes these events and dies: the writer is never closed."""
    writer = TraceWriter(path, **options)
    for event in events:
        writer(event)
    writer.flush()


def test_a_run_that_never_starts_leaves_an_earlier_trace_as_it_was(tmp_path):
    path = write(tmp_path / "run.jsonl", EVENTS)
    before = path.read_bytes()
    with TraceWriter(path, overwrite=True), TraceWriter(path, resume=True):
        pass  # refused before the engine started
    assert (path.read_bytes(), names(tmp_path)) == (before, ["run.jsonl"])


def test_nothing_is_replaced_without_overwrite(tmp_path):
    path = write(tmp_path / "run.jsonl", EVENTS)
    with pytest.raises(UsageError, match=r"run\.jsonl already exists"):
        TraceWriter(path)
    killed(tmp_path / "other.jsonl", EVENTS)
    with pytest.raises(UsageError, match=r"other\.recording\.jsonl already exists"):
        TraceWriter(tmp_path / "other.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_killed_run_leaves_a_trace_that_every_reader_takes(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    killed(path, EVENTS[: len(EVENTS) // 2])
    assert names(tmp_path) == [f"run.recording{suffix}"]
    reader = TraceReader(path)
    assert list(reader) == EVENTS[: len(EVENTS) // 2]
    assert "never finished" in reader.notes[0]
    assert check_trace(TraceReader(tmp_path / f"run.recording{suffix}")).num_events == len(EVENTS) // 2


@pytest.mark.parametrize("cut", [1, 2, 20, len(EVENTS) // 2, len(EVENTS) // 2 + 1, len(EVENTS) // 2 + 2, len(EVENTS)])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_the_parts_of_a_resumed_run_read_as_one_run(tmp_path, suffix, cut):
    path = tmp_path / f"run{suffix}"
    killed(path, EVENTS[:cut])
    with TraceWriter(path, resume=True) as writer:
        for event in EVENTS:
            writer(event)
    assert names(tmp_path) == [f"run.part2{suffix}", f"run.recording{suffix}"]
    whole = list(TraceReader(path))
    assert len(whole) == cut + len(EVENTS)
    checked = check_trace(TraceReader(path))
    assert checked.num_events == len(whole)
    steps = [event.step for event in whole if isinstance(event, StepScheduled)]
    assert steps == list(range(len(steps)))
    added = [event.seq_id for event in whole if isinstance(event, RequestAdded)]
    assert len(set(added)) == len(added)
    times = [event.time_ns for event in whole if isinstance(event, StepStarted)]
    assert times == sorted(times)
    explainer, _ = explain_trace(TraceReader(path))
    assert explainer.lookups
    assert Replay(TraceReader(path)).last_stop == len(steps)
    page = render_report(TraceReader(path)).decode()
    data = json.loads(page.split('id="trace-data">')[1].split("</script>")[0])
    assert len(data["frames"]) == data["numSteps"] + 1 == len(steps) + 1
    assert list(TraceReader(tmp_path / f"run.part2{suffix}")) == EVENTS  # a part alone


def test_overwriting_removes_the_later_parts_of_the_earlier_run(tmp_path):
    path = write(tmp_path / "run.jsonl", EVENTS)
    with TraceWriter(path, resume=True) as writer:
        writer(EVENTS[0])
    assert names(tmp_path) == ["run.jsonl", "run.part2.jsonl"]
    with TraceWriter(path, overwrite=True) as writer:
        for event in EVENTS[:50]:
            writer(event)
        assert names(tmp_path) == ["run.recording.jsonl"]
    assert names(tmp_path) == ["run.jsonl"]
    assert len(list(TraceReader(path))) == 50


def test_a_part_of_another_pool_is_not_joined_and_said(tmp_path):
    path = write(tmp_path / "run.jsonl", EVENTS)
    with TraceWriter(path, resume=True) as writer:
        Simulation(3, 2, emit=writer).add([1, 2])
    reader = TraceReader(path)
    assert list(reader) == EVENTS
    assert "run.part2.jsonl was skipped, it has another pool (3 blocks of 2)" in reader.notes[0]


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path / "run.jsonl")
    writer(EVENTS[0])
    os.close(writer._file.file.fileno())  # every later write fails
    for event in EVENTS[1:]:
        writer(event)
    with pytest.raises(TraceError, match=r"cannot write the trace .*run\.jsonl: Bad file descriptor"):
        writer.close()


def test_a_folder_that_is_gone_ends_the_recording_and_not_the_run(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    writer = TraceWriter(folder / "run.jsonl")
    folder.rmdir()
    for event in EVENTS:
        writer(event)
    with pytest.raises(TraceError, match="cannot write the trace") as caught:
        writer.close()
    assert caught.value.hint == "the rows are not affected"


def test_the_first_record_is_on_disk_before_the_first_step(tmp_path):
    writer = TraceWriter(tmp_path / "run.jsonl.zst")
    writer(EVENTS[0])
    assert isinstance(next(iter(TraceReader(tmp_path / "run.jsonl.zst"))), EngineStarted)


def test_a_second_start_in_one_file_is_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    killed(path, [*EVENTS[:5], EVENTS[0]])
    with pytest.raises(TraceError, match=r"recording\.jsonl:6: engine_started: a second start"):
        list(TraceReader(path))
