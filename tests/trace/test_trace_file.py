"""A trace file gives back the events, line by line, and says clearly what is wrong with it."""

import random
import re
import shutil
import subprocess

import msgspec
import pytest
from harness.core import Simulation

from pagedcli.errors import TraceError
from pagedcli.events import OLDEST_SCHEMA, SCHEMA_VERSION, EngineStarted, Event, StepFinished
from pagedcli.line_files import zstd
from pagedcli.simulation.formats import read_traces
from pagedcli.trace.files import TraceReader, TraceWriter

SUFFIXES = [".jsonl", ".jsonl.zst"]


def record(path, *, num_requests=12, num_blocks=12, **limits):
    """A simulated run with sharing, forks, preemptions and evictions. Returns its events."""
    rng = random.Random(3)
    events: list[Event] = []
    with TraceWriter(path) as writer:

        def emit(event):
            events.append(event)
            writer(event)

        sim = Simulation(num_blocks, 2, emit=emit, trace_tokens=True, **limits)
        for index in range(num_requests):
            sim.add([7] * rng.randrange(6) + [rng.randrange(3) for _ in range(rng.randrange(1, 6))], 4, n=1 + index % 2)
        sim.run()
    return events


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_gives_back_the_events(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    events = record(path)
    reader = TraceReader(path)
    assert list(reader) == events
    assert reader.line_number == len(events)
    assert reader.notes == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_step_wrote_is_on_disk_when_the_step_is_over(tmp_path, suffix):
    """The writer is never closed, as in a killed run."""
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path)
    sim = Simulation(12, 2, emit=writer)
    sim.add([1, 2, 3])
    sim.step()
    reader = TraceReader(tmp_path / f"run.recording{suffix}")
    assert isinstance(list(reader)[-1], StepFinished)
    assert reader.line_number == writer.num_events
    assert bool(reader.notes) == (suffix == ".jsonl.zst")  # an unfinished zstd frame is worth a note
    assert writer.observer_ns > 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_cut_file_gives_a_prefix_of_the_events_and_a_note(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    events = record(path)
    whole = path.read_bytes()
    for num_bytes in range(len(whole) // 3, len(whole) - 1, max(1, len(whole) // 40)):
        path.write_bytes(whole[:num_bytes])
        reader = TraceReader(path)
        read = list(reader)
        assert read == events[: len(read)]
        assert len(read) < len(events) or reader.notes
    assert reader.notes


def test_a_wrong_type_and_an_unknown_event_are_named(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path)
    head = path.read_bytes().split(b"\n")[0]
    path.write_bytes(head + b'\n{"event":"step_started","step":"0","time_ns":1}\n')
    with pytest.raises(TraceError, match=r"run\.jsonl:2: .*Expected `int`, got `str` - at `\$\.step`"):
        list(TraceReader(path))
    path.write_bytes(head + b'\n{"event":"moon_landing"}\n')
    with pytest.raises(TraceError, match=r"run\.jsonl:2: .*moon_landing"):
        list(TraceReader(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "damaged", [lambda line: line[:15], lambda line: b"\x00" + line, lambda line: line[:15] + line, lambda line: b"7"]
)
@pytest.mark.parametrize("number", [1, 30])
def test_a_damaged_line_is_named_with_what_can_still_be_read(tmp_path, suffix, damaged, number):
    events, path = record(tmp_path / "whole.jsonl"), tmp_path / f"run{suffix}"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines()
    lines[number - 1] = damaged(lines[number - 1])
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(zstd.compress(content) if suffix.endswith("zst") else content)
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    message, hint = caught.value.message, caught.value.hint
    assert message.startswith(f"{path}:{number}: ")
    if number == 1:
        assert "not a trace of pagedcli, or its first line is damaged (" in message
        assert hint == "a trace is recorded by: pagedcli generate PROMPTS.jsonl --record run.jsonl.zst"
        return
    assert ": the trace is damaged: this line is no event (" in message
    command = re.fullmatch("what precedes the damage is still a trace: (.*)", hint)[1]
    if suffix.endswith("zst") and shutil.which("zstdcat") is None:
        pytest.skip("no zstdcat on this machine (apt-get install zstd)")
    subprocess.run(["sh", "-c", command], check=True)
    assert list(TraceReader(tmp_path / "run.whole.jsonl")) == events[: number - 1]


def test_a_damaged_compressed_stream_is_named_with_what_can_still_be_read(tmp_path):
    record(tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "run.jsonl.zst"
    path.write_bytes(zstd.compress(b"".join(lines[:30])) + b"\xff" * 40)
    with pytest.raises(TraceError, match=r"run\.jsonl\.zst: damaged after line 30: ") as caught:
        list(TraceReader(path))
    assert " | head -n 30 > " in caught.value.hint


@pytest.mark.parametrize(
    ("schema", "words", "hint"),
    [
        (OLDEST_SCHEMA - 1, "older", "record it again: pagedcli generate PROMPTS.jsonl --record {path} --overwrite"),
        (99, "newer", "read it with pagedcli 7.1, which wrote it, or a later version"),
    ],
)
def test_another_schema_version_is_refused_with_what_to_do(tmp_path, schema, words, hint):
    path = tmp_path / "run.jsonl"
    started = next(event for event in record(path) if isinstance(event, EngineStarted))
    changes = {"schema_version": schema, "pagedcli_version": "7.1"}
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(started, **changes)))
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    expected = f"{path}:1: the trace's format (schema {schema}) is {words} than the one that this version reads"
    assert caught.value.message == f"{expected} ({SCHEMA_VERSION})"
    assert caught.value.hint == hint.format(path=path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"hello\n", "not a trace"),
        ("a.jsonl", b'{"prompt": "hi"}\n', "not a trace"),
        ("a.jsonl", b'{"event":"step_started","step":0,"time_ns":1}\n', "begins with engine_started"),
        ("a.jsonl", b'{"event":"engine_started"}\n', "this file with one without schema_version"),
        ("a.jsonl.zst", b"not zstd at all", "damaged"),
    ],
)
def test_files_that_are_no_traces(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        list(TraceReader(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_file_that_was_cut_off_in_its_first_line_is_not_called_empty(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    record(path)
    path.write_bytes(path.read_bytes()[:40])
    for read in (TraceReader(path).__iter__().__next__, lambda: read_traces([str(path)])):
        with pytest.raises(TraceError) as caught:
            read()
        expected = f"{path}: the file was cut off in its first line, and nothing of the trace is left"
        assert caught.value.message == expected


def test_hashes_of_64_bits_survive(tmp_path):
    path = tmp_path / "run.jsonl"
    events = record(path)
    hashes = [h for event in events for h in getattr(event, "hashes", ())]
    assert max(hashes) > 2**63  # more than a float or a signed integer holds
    assert [h for event in TraceReader(path) for h in getattr(event, "hashes", ())] == hashes


def test_an_empty_line_is_named_as_such(tmp_path):
    path = tmp_path / "run.jsonl"
    record(path, num_requests=2)
    lines = path.read_bytes().splitlines(keepends=True)
    for place in (1, 3):
        path.write_bytes(b"".join([*lines[:place], b"\n", *lines[place:]]))
        with pytest.raises(TraceError, match=rf"run\.jsonl:{place + 1}: an empty line"):
            list(TraceReader(path))
