"""The life of the sequences of one request, step by step: the blocks that they hold, and what happened to them.

A view of PoolState, used by the picture of a request. Its phases come from whole_run.
"""

from dataclasses import dataclass, field

import pagedcli.events as ev
from pagedcli.printable import plural
from pagedcli.trace.dispatch import Handler, View
from pagedcli.trace.state import PoolState
from pagedcli.views.names import NamedRequest
from pagedcli.views.whole_run import Phase, Timelines


@dataclass(slots=True)
class Life:
    """What is known of one sequence."""

    seq_id: int
    held: list[tuple[int, int, int]] = field(default_factory=list)  # step, blocks held, of these shared
    happenings: list[tuple[int, str]] = field(default_factory=list)  # step, words
    phases: list[Phase] = field(default_factory=list)


class RequestLife(View):
    """The lives of a request's sequences. Call `finish` after the last event."""

    def __init__(self, request: NamedRequest) -> None:
        self._request = request
        self._timelines = Timelines()
        self.lives: dict[int, Life] = {}

    def handlers(self, event_type: type[ev.Event]) -> list[Handler]:
        return [*self._timelines.handlers(event_type), *super().handlers(event_type)]

    def finish(self, state: PoolState) -> list[Life]:
        """The lives, in the order of the samples."""
        self._timelines.finish(state)
        for life in self.lives.values():
            life.phases = self._timelines.phases[life.seq_id]
        return sorted(self.lives.values(), key=lambda life: life.seq_id)

    def _note(self, seq_id: int, state: PoolState, words: str) -> None:
        if seq_id in self._request.seq_ids:
            life = self.lives.setdefault(seq_id, Life(seq_id))
            life.happenings.append((state.step_number or 0, words))

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        self._note(event.seq_id, state, f"arrives with {plural(event.num_prompt_tokens, 'token')}")

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        verb = {"new": "starts", "resumed": "starts again", "continued": "looks again"}[event.reason]
        self._note(event.seq_id, state, f"{verb}: {event.tokens_hit:,} of {plural(event.num_tokens, 'token')} found")

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._note(event.seq_id, state, f"shares the blocks of sequence {event.parent_seq_id}")

    def on_block_copied(self, event: ev.BlockCopied, state: PoolState) -> None:
        self._note(event.seq_id, state, f"copies block {event.source_block_id} to {event.copy_block_id}")

    def on_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        other = "itself" if event.for_seq_id == event.seq_id else f"sequence {event.for_seq_id}"
        self._note(event.seq_id, state, f"preempted for {other}: {plural(event.num_tokens_dropped, 'token')} dropped")

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        self._note(event.seq_id, state, f"ends after {plural(event.num_output_tokens, 'token')}: {event.reason}")

    def on_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        for seq_id, life in self.lives.items():
            seq = state.seqs.get(seq_id)
            held = [] if seq is None else seq.held_block_ids
            life.held.append((event.step, len(held), sum(state.ref_counts[each] > 1 for each in held)))
