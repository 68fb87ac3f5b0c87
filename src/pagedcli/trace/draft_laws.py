"""The laws of drafts."""

from typing import get_args

import pagedcli.events as ev
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.trace.laws import LawBook, live_seq, refuse, tables_of
from pagedcli.trace.state import PoolState


class DraftLaws(LawBook):
    """Tokens are guessed only where they can be checked in one step and taken back."""

    def start(self) -> None:
        self._drafted: set[int] = set()  # sequences whose guesses this step checks
        self._evicted: set[int] = set()  # blocks, in this step

    def before_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        if event.speculation not in (*get_args(ev.Speculation), "mtp", "auto"):  # the last two are of earlier versions
            refuse(event, f"speculation {event.speculation!r} is unknown")

    def before_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        self._evicted.clear()

    def before_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        self._evicted.add(event.block_id)

    def before_tokens_drafted(self, event: ev.TokensDrafted, state: PoolState) -> None:
        counts, step = dict(zip(event.seq_ids, event.num_drafted, strict=False)), state.step
        if not counts or not len(counts) == len(event.seq_ids) == len(event.num_drafted) == len(event.sources):
            refuse(event, "a sequence twice or none, or other numbers of counts, sources and sequences")
        if unknown := set(event.sources).difference(get_args(ev.DraftSource)):
            refuse(event, f"the sources {sorted(unknown)} are unknown")
        if state.started.speculation == "off" or step is None or step.scheduled or self._drafted:
            refuse(event, "no guess is due")
        for seq_id, num_drafted in counts.items():
            seq = live_seq(event, seq_id, state)
            decodes = seq.num_output_tokens > 0 and seq.num_computed_tokens == seq.num_tokens - 1
            if not seq.running or not decodes or seq.beam_width is not None:
                refuse(event, f"seq {seq_id} ({seq.status}) is not one that computes its last token, or has no guesses")
            num_needed = tables_of(state).num_entries(seq.num_tokens)
            if evicted := self._evicted.intersection(seq.block_table[num_needed:]):
                refuse(event, f"blocks {sorted(evicted)} were evicted for guesses")
            if not 1 <= num_drafted <= min(MOST_DRAFTED, seq.max_new_tokens - seq.num_output_tokens - 1):
                refuse(event, f"{num_drafted} guesses after {seq.num_output_tokens} of {seq.max_new_tokens} new tokens")
        self._drafted = set(event.seq_ids)

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        if not_computed := self._drafted.difference(event.seq_ids):
            refuse(event, f"guesses of sequences {sorted(not_computed)} are not computed")

    def before_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        if state.step is None or not state.step.scheduled:
            refuse(event, "comes before what the step computes")
        self._drafted.discard(event.seq_id)

    def before_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        if event.seq_id in self._drafted and event.reason != "abort":
            refuse(event, f"seq {event.seq_id} ended by {event.reason}, and its guesses have not been checked")
        self._drafted.discard(event.seq_id)

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        if self._drafted:
            refuse(event, f"guesses of sequences {sorted(self._drafted)} have not been checked")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._drafted.clear()
