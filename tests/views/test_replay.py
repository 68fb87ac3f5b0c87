"""`trace RUN --check` accepts honest traces and finds corrupted ones; time travel shows what a fresh fold shows."""

import io
import json
import random
import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from harness.core import EventList, Simulation, check_events, simulated, write

from pagedcli.app.sequences import sequence_facts
from pagedcli.errors import TraceError
from pagedcli.events import (
    BlockCopied,
    BlockEvicted,
    BlocksReused,
    Event,
    PrefixLookedUp,
    RequestAdded,
    RequestPreempted,
    RequestWaiting,
    SequenceForked,
    StepFinished,
    StepScheduled,
)
from pagedcli.show.perfetto import export_perfetto
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceReader, TraceWriter
from pagedcli.trace.fold import fold, pool_fold
from pagedcli.views.moment import Moment, Replay
from pagedcli.views.stats import StepSeries


@pytest.fixture(scope="module")
def events() -> list[Event]:
    made = simulated()
    kinds = {type(event) for event in made}
    wanted = {PrefixLookedUp, BlocksReused, BlockEvicted, BlockCopied, SequenceForked, RequestPreempted, RequestWaiting}
    assert wanted <= kinds, f"the run is too tame: no {wanted - kinds}"
    return made


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_blocks", [9, 14, 200])
@pytest.mark.parametrize("caching", [True, False])
def test_check_accepts_honest_traces(seed, num_blocks, caching):
    result = check_events(simulated(num_blocks=num_blocks, seed=seed, caching=caching))
    assert result.notes == ()
    assert result.state.num_used_blocks == 0
    assert result.state.num_cached_blocks + result.state.num_empty_blocks == num_blocks


def test_check_accepts_what_a_killed_run_leaves(events):
    """A trace may end anywhere, but for an unfinished group of events."""
    last_step = max(i for i, event in enumerate(events) if isinstance(event, StepScheduled))
    result = check_events(events[: last_step + 1])
    assert "ends within step" in result.notes[0]


def first(events, kind, nth=0):
    return [i for i, event in enumerate(events) if isinstance(event, kind)][nth]


@pytest.mark.long
def test_no_event_can_be_lost_unnoticed():
    """Each event but the last is left out, one at a time."""
    silent, events = [], simulated(num_requests=12)
    for index in range(1, len(events) - 1):
        try:
            check_events(events[:index] + events[index + 1 :])
        except TraceError:
            continue
        silent.append(type(events[index]).__name__)
    assert silent == []


def test_check_names_file_and_line(tmp_path, events):
    corrupted = list(events)
    index = first(corrupted, BlockEvicted)
    del corrupted[index]
    path = write(tmp_path / "run.jsonl.zst", corrupted)
    with pytest.raises(TraceError, match=rf"run\.jsonl\.zst:{index + 1}: blocks_allocated: block \d+ still holds"):
        check_trace(TraceReader(path))


@pytest.mark.parametrize(
    ("lacking", "words", "num_blocks", "n", "limits"),
    [
        ("free_blocks", "free blocks", 10, 1, {"max_num_seqs": 3}),
        ("state_slots", "slots of recurrent state", 40, 2,
         {"max_num_seqs": 4, "num_state_slots": 2, "checkpoints": "end"}),
    ],
)  # fmt: skip
def test_a_sequence_that_stands_still_is_stalled_with_its_reason(lacking, words, num_blocks, n, limits):
    moment, seen = Moment(), set()
    folding = pool_fold(moment)

    def emit(event):
        folding(event)
        if isinstance(event, StepFinished):
            state, rows = moment.state, {row["seq_id"]: row for row in moment.summary()["sequences"]}
            for seq in state.running():
                row, lacks = rows[seq.seq_id], state.stalled_for(seq)
                stands = not row["num_new_tokens"] and state.num_used_blocks == state.num_blocks
                assert (lacks == "free_blocks") == stands
                assert (row["status"] == "stalled") == (lacks is not None)
                assert lacks is None or row["waiting_reason"] == lacks
                line = str(sequence_facts(moment, seq)).partition("\n")[0]
                assert (f"stalled (no {words})" in line) == (lacks is not None), line
                seen.add(lacks)
            assert state.num_stalled == sum(state.stalled_for(seq) is not None for seq in state.running())
            assert f"running ({state.num_stalled} stalled)" in moment.line() or not state.num_stalled

    sim = Simulation(num_blocks, 2, emit=emit, max_num_batched_tokens=64, **limits)
    for index in range(limits["max_num_seqs"]):
        sim.add(range(100 * index, 100 * index + 5 + index % 2), 8, n=n)
    sim.run()
    assert seen == {None, lacking}


def same(a: Moment, b: Moment) -> None:
    snapshots = a.state.copy(), b.state.copy()  # in which no sequences are counted together
    for name in ("ref_counts", "hashes", "free_block_ids", "seqs", "finished", "hash_to_block_id", "step"):
        assert getattr(snapshots[0], name) == getattr(snapshots[1], name), name
    assert list(a.state.free_block_ids) == list(b.state.free_block_ids)
    assert a.summary() == b.summary()


@pytest.mark.parametrize("snapshot_bytes", [100 << 20, 200_000])  # the second makes snapshots rare
def test_any_walk_through_a_trace_shows_what_a_fresh_fold_shows(tmp_path, events, snapshot_bytes):
    fresh, moments = Moment(), []
    for event in pool_fold(fresh).steps(EventList(events)):
        if isinstance(event, StepScheduled):
            moments.append(fresh.copy())
    moments.append(fresh)
    replay = Replay(TraceReader(write(tmp_path / "run.jsonl", events)), snapshot_bytes=snapshot_bytes)
    assert replay.last_stop == len(moments) - 1
    same(replay.moment, moments[-1])
    rng = random.Random(1)
    for stop in [0, replay.last_stop, *(rng.randrange(len(moments)) for _ in range(60))]:
        same(replay.go(stop), moments[stop])
        assert replay.position == stop
    same(replay.go(-5), moments[0])
    same(replay.go(10**6), moments[-1])


def test_a_damaged_trace_can_be_looked_at_up_to_the_damage(tmp_path, events):
    corrupted = list(events)
    index = first(corrupted, StepScheduled, 4)
    corrupted.insert(index + 1, corrupted[index])
    replay = Replay(TraceReader(write(tmp_path / "run.jsonl", corrupted)))
    assert replay.damage is not None
    assert f"run.jsonl:{index + 2}: step_scheduled" in replay.damage
    assert replay.go(10**6).state.step_number == 4


def test_perfetto_export_has_a_row_per_sequence_and_the_counters(events):
    slow = [  # each part of a step is as long as the step
        msgspec.structs.replace(event, schedule_ns=900, forward_ns=900) if isinstance(event, StepFinished) else event
        for event in events
    ]
    export_perfetto(EventList(slow), file := io.BytesIO())
    rows = json.loads(file.getvalue())["traceEvents"]
    named = {row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    added = [event for event in events if isinstance(event, RequestAdded)]
    assert named == {f"seq {event.seq_id} (request {event.request_id})" for event in added}
    phases = {row["name"] for row in rows if row["ph"] == "X"}
    assert {"waiting", "prefill", "decode", "preempted", "forward"} <= phases
    assert all(row["dur"] >= 0 for row in rows if row["ph"] == "X")
    engine = [row for row in rows if row["ph"] == "X" and row["pid"] == 1]
    ends = {}
    for row in engine:
        if row["name"].startswith("step "):
            step_end = row["ts"] + row["dur"]
            ends[row["name"]] = step_end
        else:
            assert row["ts"] + row["dur"] <= step_end, "a part ends with its step at the latest"
    num_steps = sum(isinstance(event, StepFinished) for event in events)
    assert len(ends) == num_steps
    blocks = [row["args"] for row in rows if row["ph"] == "C" and row["name"] == "blocks"]
    assert all(sum(args.values()) == 14 for args in blocks)
    assert len(blocks) == num_steps
    slices: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row["ph"] == "X" and row["pid"] == 2:
            slices.setdefault(row["tid"], []).append((row["ts"], row["ts"] + row["dur"]))
    assert len(slices) == len(added)
    for phases_of_one in slices.values():
        assert all(a[1] == b[0] for a, b in pairwise(sorted(phases_of_one))), "the phases leave no gap"


def test_series_adds_up_to_the_totals(events):
    moment, series = Moment(), StepSeries()
    fold(EventList(events), moment, series)
    columns = series.columns
    assert len(series) == moment.stats.facts.num_steps
    assert sum(columns["new_tokens"]) == moment.stats.facts.num_computed_tokens
    assert sum(columns["sampled"]) == moment.stats.facts.num_generated_tokens
    assert sum(columns["hit_tokens"]) == moment.stats.run.from_others.tokens_hit
    assert sum(columns["self_hit_tokens"]) == moment.stats.run.own.tokens_hit
    assert sum(columns["preempted"]) == moment.stats.facts.num_preemptions
    assert max(columns["used"]) == moment.stats.facts.peak_used_blocks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.machine
def test_a_million_events_are_checked_in_under_30_seconds_and_500_mb(tmp_path):
    path = tmp_path / "run.jsonl"
    rng = random.Random(1)
    with TraceWriter(path) as writer:
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
        sim = Simulation(2000, 16, emit=writer, check=False, **limits)
        heads = [[rng.randrange(1000) for _ in range(rng.randrange(50, 400))] for _ in range(20)]
        while writer.num_events < 1_000_000:
            while len(sim.scheduler.waiting) < 8:
                prompt = rng.choice(heads) + [rng.randrange(1000) for _ in range(rng.randrange(5, 300))]
                sim.add(prompt, rng.randrange(5, 300), n=rng.choice([1, 1, 1, 3]))
            sim.step()
    code = (
        "import contextlib, sys, time; from pagedcli.cli.main import run\n"
        "with contextlib.suppress(SystemExit): run()\n"
        # not ru_maxrss, which a child inherits from the process that started it
        "peak = [line for line in open('/proc/self/status') if line.startswith('VmHWM')][0].split()[1];"
        "print(time.process_time(), int(peak) // 1024, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", path, "--check"], capture_output=True, text=True, check=True
    )
    print(done.stdout)
    seconds, megabytes, has_torch = done.stdout.splitlines()[-1].split()
    assert "ok, 1,000," in done.stdout
    assert float(seconds) < 30
    assert int(megabytes) < 500
    assert has_torch == "False"
