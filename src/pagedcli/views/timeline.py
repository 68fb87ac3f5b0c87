"""What each sequence did in which steps: waiting, prefill, decode, preempted. A view for the report and Perfetto."""

from dataclasses import dataclass, field

import pagedcli.events as ev
from pagedcli.trace.dispatch import View
from pagedcli.trace.records import SeqState, Status
from pagedcli.trace.state import PoolState


@dataclass(slots=True)
class Phase:
    """Steps first_step ... last_step, both included."""

    status: Status
    first_step: int
    last_step: int | None = None  # None while it lasts


@dataclass(slots=True)
class SeqTimeline:
    """All phases of one sequence, without gaps."""

    seq_id: int
    request_id: str
    label: str  # what a person calls the request (SeqState.label)
    num_prompt_tokens: int
    phases: list[Phase] = field(default_factory=list)
    finish_reason: str | None = None
    num_output_tokens: int = 0


class Timelines(View[PoolState]):
    """Call `finish` after the last event."""

    def __init__(self) -> None:
        self.seqs: dict[int, SeqTimeline] = {}
        self._in_prefill: set[int] = set()

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        """Another part: close what the earlier run left unfinished."""
        for seq_id, seq in state.finished.items():
            if seq_id in self.seqs and seq.finish_reason is None:
                self._cut(seq, state)

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        label = state.seqs[event.seq_id].label
        self.seqs[event.seq_id] = SeqTimeline(event.seq_id, event.request_id, label, event.num_prompt_tokens)
        self._enter(event.seq_id, "waiting", _now(state))

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        if event.reason != "continued":
            self._enter(event.seq_id, "prefill", _now(state))

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._enter(event.seq_id, "decode", _now(state) + 1)

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        for seq_id in self._in_prefill.intersection(event.seq_ids):
            self._enter(seq_id, "decode", _now(state) + 1)

    def on_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        self._enter(event.seq_id, "preempted", _now(state))

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        for seq_id in event.seq_ids:
            self._enter(seq_id, "preempted", state.step_number or 0)

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq = self.seqs[event.seq_id]
        self._end(seq, _now(state))
        self._in_prefill.discard(event.seq_id)
        seq.finish_reason, seq.num_output_tokens = event.reason, event.num_output_tokens

    def finish(self, state: PoolState) -> None:
        """Close the phases of sequences that the trace leaves unfinished."""
        for seq in state.seqs.values():
            self._cut(seq, state)

    def _cut(self, seq: SeqState, state: PoolState) -> None:
        timeline = self.seqs[seq.seq_id]
        if timeline.phases and timeline.phases[-1].last_step is None:
            self._end(timeline, state.step_number or 0)
        timeline.num_output_tokens = seq.num_output_tokens

    def _enter(self, seq_id: int, status: Status, step: int) -> None:
        seq = self.seqs[seq_id]
        if seq.phases:
            self._end(seq, step - 1)
        seq.phases.append(Phase(status, step))
        if status == "prefill":
            self._in_prefill.add(seq_id)
        else:
            self._in_prefill.discard(seq_id)

    def _end(self, seq: SeqTimeline, last_step: int) -> None:
        seq.phases[-1].last_step = last_step
        if last_step < seq.phases[-1].first_step:  # it lasted less than a step
            seq.phases.pop()


def _now(state: PoolState) -> int:
    """The current step; between steps the next one, to which events there belong."""
    step = state.step
    return 0 if step is None else step.step + (step.end_ns is not None)
