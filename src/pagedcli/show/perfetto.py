"""A trace as Chrome-trace JSON for ui.perfetto.dev: a row per sequence, the engine's steps, counters for the pool.

Used by `pagedcli replay --export perfetto`. Written as a stream; times are microseconds from the first step.
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
from pagedcli.views.whole_run import SeqTimeline, Timelines

_ENGINE, _SEQUENCES = 1, 2  # process ids in the viewer


def export_perfetto(source: EventSource, file: BinaryIO) -> None:
    """Write the whole trace. Raises TraceError if it is damaged or inconsistent."""
    stats, timelines = RunStats(), Timelines()
    rows = _Rows(_Writer(file), stats, timelines)
    rows.finish(fold(source, stats, timelines, rows))


class _Rows(View[PoolState]):
    """Writes each step when it ends, and each sequence when its last phase ends."""

    def __init__(self, out: "_Writer", stats: RunStats, timelines: Timelines) -> None:
        self._out = out
        self._stats = stats
        self._timelines = timelines
        self._starts: list[float] = []  # per step, from the first
        self._first_step = 0
        self._ended: list[int] = []  # sequences that ended in the current step

    def on_step_started(self, event: StepStarted, state: PoolState) -> None:
        if not self._starts:
            self._first_step, self._out.zero_ns = event.step, event.time_ns
        self._starts.append(self._out.at(event.time_ns))

    def on_step_failed(self, event: StepFailed, state: PoolState) -> None:
        self._out.write(ph="i", s="p", name="step failed", pid=_ENGINE, tid=0, ts=self._out.at(event.time_ns))
        self._end_step(state)

    def on_step_finished(self, event: StepFinished, state: PoolState) -> None:
        self._end_step(state)

    def _end_step(self, state: PoolState) -> None:
        self._out.step(state, self._stats)
        for seq_id in self._ended:
            self._out.sequence(self._timelines.seqs.pop(seq_id), self._starts, self._first_step)
        self._ended.clear()

    def on_request_preempted(self, event: RequestPreempted, state: PoolState) -> None:
        name, ts = f"preempted for seq {event.for_seq_id}", self._starts[-1] if self._starts else 0.0
        self._out.write(ph="i", s="t", name=name, pid=_SEQUENCES, tid=event.seq_id, ts=ts)

    def on_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        self._ended.append(event.seq_id)

    def finish(self, state: PoolState) -> None:
        self._timelines.finish(state)
        for seq in self._timelines.seqs.values():
            self._out.sequence(seq, self._starts, self._first_step)
        self._out.close()


class _Writer:
    """One JSON object per call, in one array."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
        self.zero_ns = 0
        self.last = 0.0  # end of the last finished step
        self.write(ph="M", name="process_name", pid=_ENGINE, args={"name": "engine"})
        self.write(ph="M", name="process_name", pid=_SEQUENCES, args={"name": "sequences"})

    def at(self, time_ns: int) -> float:
        return (time_ns - self.zero_ns) / 1000

    def write(self, **fields: Any) -> None:
        self._file.write(self._separator + msgspec.json.encode(fields))
        self._separator = b",\n"

    def close(self) -> None:
        self._file.write(b"\n]}\n")

    def step(self, state: PoolState, stats: RunStats) -> None:
        """The step that just finished, its parts, and the counters at its end."""
        step = state.step
        assert step is not None, "a step finished"
        assert step.end_ns is not None, "a finished step has an end"
        start, self.last = self.at(step.start_ns), self.at(step.end_ns)
        args = {"sequences": len(step.seq_ids), "new tokens": sum(step.num_new_tokens), "waiting": step.num_waiting}
        self.write(ph="X", name=f"step {step.step}", pid=_ENGINE, tid=0, ts=start, dur=self.last - start, args=args)
        for name, part_ns in (("schedule", step.schedule_ns), ("forward", step.forward_ns), ("sample", step.sample_ns)):
            part = min(part_ns / 1000, self.last - start)  # the clocks of the step and its parts differ by microseconds
            self.write(ph="X", name=name, pid=_ENGINE, tid=0, ts=start, dur=part)
            start += part
        blocks = {"in use": state.num_used_blocks, "cached": state.num_cached_blocks, "empty": state.num_empty_blocks}
        self.write(ph="C", name="blocks", pid=_ENGINE, ts=self.last, args=blocks)
        slots = slot_counts(state)
        if slots is not None:
            shown = {"in use": slots["in_use"], "idle checkpoints": slots["idle"], "empty": slots["empty"]}
            self.write(ph="C", name="state slots", pid=_ENGINE, ts=self.last, args=shown)
        rate = stats.rolling.from_others.token_rate
        if rate is not None:
            self.write(
                ph="C", name="prefix hit rate, last 100 steps (%)", pid=_ENGINE, ts=self.last, args={"rate": 100 * rate}
            )

    def sequence(self, seq: SeqTimeline, starts: list[float], first_step: int) -> None:
        """The row of a sequence. A phase lasts until the next one begins."""
        name = f"seq {seq.seq_id} (request {seq.label})"
        self.write(ph="M", name="thread_name", pid=_SEQUENCES, tid=seq.seq_id, args={"name": name})
        for phase in seq.phases:
            assert phase.last_step is not None, "a finished timeline has no open phase"
            begin, next_step = phase.first_step - first_step, phase.last_step + 1 - first_step
            if not 0 <= begin < len(starts):
                continue
            ts, after = starts[begin], starts[next_step] if next_step < len(starts) else max(self.last, starts[-1])
            self.write(ph="X", name=phase.status, pid=_SEQUENCES, tid=seq.seq_id, ts=ts, dur=after - ts)
