"""The tokens of unfinished sequences, where a run recorded them. Base of the views that need them."""

from collections.abc import Callable

import pagedcli.events as ev
from pagedcli.trace.dispatch import View
from pagedcli.trace.state import PoolState

# token ids -> their text
Decode = Callable[[tuple[int, ...]], str]


class TokenView(View):
    """Knows the tokens of unfinished sequences. A method of it that a view replaces is called there, too."""

    def __init__(self) -> None:
        self._token_ids: dict[int, list[int]] = {}  # prompt and output of each sequence so far

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        self._token_ids.clear()

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        if event.token_ids is not None:
            self._token_ids[event.seq_id] = list(event.token_ids)

    def on_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        # A continuation of a context has tokens of its own.
        is_continuation = state.seqs[event.seq_id].num_context_tokens is not None
        if event.parent_seq_id in self._token_ids and not is_continuation:
            self._token_ids[event.seq_id] = self._token_ids[event.parent_seq_id].copy()

    def on_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        if event.seq_id in self._token_ids:
            self._token_ids[event.seq_id] += event.token_ids or ()

    def on_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        for seq_id, token_id in zip(event.seq_ids, event.token_ids or (), strict=False):
            if seq_id in self._token_ids:
                self._token_ids[seq_id].append(token_id)

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        self._token_ids.pop(event.seq_id, None)
