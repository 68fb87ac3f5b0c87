"""A trace as Chrome-trace JSON for ui.perfetto.dev: a row per sequence, the engine's steps, counters for the pool.

Used by `pagedcli trace --export perfetto`. Written as a stream; times are microseconds from the first step.
Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from typing import Any, BinaryIO

import msgspec

from pagedcli.events import RequestFinished, RequestPreempted, StepFailed, StepFinished, StepStarted
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import EventSource, fold
from pagedcli.trace.state import PoolState
from pagedcli.views.state_slots import slot_counts
from pagedcli.views.stats import RunStats
from pagedcli.views.whole_run import Timelines

_ENGINE, _SEQUENCES = 1, 2  # process ids in the viewer


def export_perfetto(source: EventSource, file: BinaryIO) -> None:
    """Write the whole trace. Raises TraceError if it is damaged or inconsistent."""
    stats, timelines = RunStats(), Timelines()
    export = _Export(file, stats, timelines)
    export.finish(fold(source, stats, timelines, export))


class _Export(View):
    """Writes each step when it ends, and each sequence when its last phase ends: one JSON object each, in one array."""

    def __init__(self, file: BinaryIO, stats: RunStats, timelines: Timelines) -> None:
        self._file, self._stats, self._timelines = file, stats, timelines
        self._separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
        self._zero_ns = self._first_step = 0
        self._starts: list[float] = []  # per step, from the first
        self._last = 0.0  # end of the last finished step
        self._ended: list[int] = []  # sequences that ended in the current step
        self._write(ph="M", name="process_name", pid=_ENGINE, args={"name": "engine"})
        self._write(ph="M", name="process_name", pid=_SEQUENCES, args={"name": "sequences"})

    def _write(self, **fields: Any) -> None:
        self._file.write(self._separator + msgspec.json.encode(fields))
        self._separator = b",\n"

    def _at(self, time_ns: int) -> float:
        return (time_ns - self._zero_ns) / 1000

    def on_step_started(self, event: StepStarted, state: PoolState) -> None:
        if not self._starts:
            self._first_step, self._zero_ns = event.step, event.time_ns
        self._starts.append(self._at(event.time_ns))

    def on_step_failed(self, event: StepFailed, state: PoolState) -> None:
        self._write(ph="i", s="p", name="step failed", pid=_ENGINE, tid=0, ts=self._at(event.time_ns))
        self.on_step_finished(event, state)

    def on_step_finished(self, event: StepFinished | StepFailed, state: PoolState) -> None:
        self._write_step(state)
        for seq_id in self._ended:
            self._write_sequence(seq_id, state)
        self._ended.clear()

    def on_request_preempted(self, event: RequestPreempted, state: PoolState) -> None:
        name, ts = f"preempted for seq {event.for_seq_id}", self._starts[-1] if self._starts else 0.0
        self._write(ph="i", s="t", name=name, pid=_SEQUENCES, tid=event.seq_id, ts=ts)

    def on_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        self._ended.append(event.seq_id)

    def finish(self, state: PoolState) -> None:
        """Write what the trace leaves unfinished, and the end of the array."""
        self._timelines.finish(state)
        for seq_id in list(self._timelines.phases):
            self._write_sequence(seq_id, state)
        self._file.write(b"\n]}\n")

    def _write_step(self, state: PoolState) -> None:
        """The step that just finished, its parts, and the counters at its end."""
        step = state.step
        assert step is not None, "a step finished"
        assert step.end_ns is not None, "a finished step has an end"
        start, self._last = self._at(step.start_ns), self._at(step.end_ns)
        args = {"sequences": len(step.seq_ids), "new tokens": sum(step.num_new_tokens), "waiting": step.num_waiting}
        self._write(ph="X", name=f"step {step.step}", pid=_ENGINE, tid=0, ts=start, dur=self._last - start, args=args)
        for name, part_ns in (("schedule", step.schedule_ns), ("forward", step.forward_ns), ("sample", step.sample_ns)):
            # the clocks of the step and its parts differ by microseconds
            part = min(part_ns / 1000, self._last - start)
            self._write(ph="X", name=name, pid=_ENGINE, tid=0, ts=start, dur=part)
            start += part
        blocks = {"in use": state.num_used_blocks, "cached": state.num_cached_blocks, "empty": state.num_empty_blocks}
        self._count("blocks", **blocks)
        slots = slot_counts(state)
        if slots is not None:
            shown = {"in use": slots["in_use"], "idle snapshots": slots["idle"], "empty": slots["empty"]}
            self._count("state slots", **shown)
        rate = self._stats.rolling.from_others.token_rate
        if rate is not None:
            self._count("prefix hit rate, last 100 steps (%)", rate=100 * rate)

    def _count(self, name: str, **values: float) -> None:
        self._write(ph="C", name=name, pid=_ENGINE, ts=self._last, args=values)

    def _write_sequence(self, seq_id: int, state: PoolState) -> None:
        """The row of a sequence. A phase lasts until the next one begins."""
        seq, starts = state.seq(seq_id), self._starts
        assert seq is not None, "it has phases"
        name = f"seq {seq_id} (request {seq.label})"
        self._write(ph="M", name="thread_name", pid=_SEQUENCES, tid=seq_id, args={"name": name})
        for phase in self._timelines.phases.pop(seq_id):
            assert phase.last_step is not None, "a finished timeline has no open phase"
            begin, next_step = phase.first_step - self._first_step, phase.last_step + 1 - self._first_step
            if not 0 <= begin < len(starts):
                continue
            ts, after = starts[begin], starts[next_step] if next_step < len(starts) else max(self._last, starts[-1])
            self._write(ph="X", name=phase.status, pid=_SEQUENCES, tid=seq_id, ts=ts, dur=after - ts)
