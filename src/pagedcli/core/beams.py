"""Beam search: which tokens the beams of a request continue with, and what has finished so far.

Used by core.requests; needs no torch. Beams are forks of one sequence at every step; the scheduler only knows that they
move together.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from pagedcli.config_keys import flag_name
from pagedcli.core.limits import Limits
from pagedcli.core.sequence import SampleOutput, Sequence, TokenLogprobs
from pagedcli.errors import RequestError
from pagedcli.events import FinishReason
from pagedcli.printable import plural
from pagedcli.sampling_params import SamplingParams


def check_width(limits: Limits, width: int, params: SamplingParams) -> None:
    """Check that the beams of a request, all computed in the same step, fit into it. Raises: RequestError."""
    for name, limit in limits.of_step.items():
        if 1 < width > limit:
            flag = flag_name(name)
            raise RequestError(
                "invalid_parameter", f"beam_width is {width}, but {name} is {limit}", hint=f"raise {flag}"
            )
    if width > 1 and limits.num_state_slots is not None and 2 * width > limits.num_state_slots:
        raise RequestError(
            "invalid_parameter",
            f"beam_width is {width}, which needs {plural(2 * width, 'slot')} of recurrent state; there are "
            f"{limits.num_state_slots}",
            hint="raise --num-state-slots",
        )
    num_ends = 1 + len(params.stop_token_ids or ())
    if params.beam_width is not None and limits.vocab_size is not None and (1 + num_ends) * width > limits.vocab_size:
        raise RequestError(
            "invalid_parameter", f"beam_width is {width}, for a vocabulary of {plural(limits.vocab_size, 'token')}"
        )


Candidates = Items[tuple[int, float]]  # next tokens and their log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class BeamToken:
    """A beam and its next token."""

    parent: Sequence
    token_id: int
    logprob: float
    total: float  # sum of the log-probabilities of the output
    candidates: Candidates  # the beam's most likely next tokens

    def logprobs(self, num_top: int) -> TokenLogprobs:
        """Log-probabilities of the token and of the likeliest ones in its place."""
        return TokenLogprobs(self.token_id, self.logprob, list(self.candidates[:num_top]))


def num_candidates(seq: Sequence) -> int:
    """Tokens per beam that a step must consider, so that enough beams continue even if all end tokens are likely."""
    width = seq.params.beam_width
    assert width is not None, "the sequence is a beam"
    return max(2, 1 + len(seq.end_token_ids)) * width


class BeamSearch:
    """The beams of one request, best first, and its finished hypotheses."""

    def __init__(self, first: Sequence) -> None:
        """`first` is the request's sequence, which has computed the prompt."""
        assert first.params.beam_width is not None, "the request asks for a beam search"
        self.width: int = first.params.beam_width
        self.beams = [first]
        self._totals = [0.0]  # sum of the log-probabilities of each beam's output
        self.finished: list[SampleOutput] = []  # best first, at most `width`
        self.ended: FinishReason | None = None  # why no beam continues
        self._length_penalty = first.params.length_penalty
        self._early_stopping = first.params.early_stopping
        self._max_new_tokens = first.max_new_tokens

    def _advance(self, candidates: Mapping[int, Candidates]) -> list[BeamToken]:
        """The next token of each beam of the next step, best first. Adds to `finished`, and sets `ended` if the search
        ends with this token: its tokens are then the last."""
        first = self.beams[0]
        length = first.num_output_tokens + 1
        at_limit = length >= self._max_new_tokens
        best = self._best(candidates, num_candidates(first))
        ends = first.end_token_ids
        for continuation in best[: self.width]:  # others are only considered to keep the search going
            if at_limit or continuation.token_id in ends:
                self._finish(continuation, length)
        if at_limit:
            self.ended = "length"
            return best[: self.width]
        running = [continuation for continuation in best if continuation.token_id not in ends][: self.width]
        if not self._may_improve(running[0].total, length):
            self.ended = "stop"
        return running

    def step(
        self,
        candidates: Mapping[int, Candidates],
        now_s: float,
        *,
        start: Callable[[Sequence], Sequence],
        replace: Callable[[Sequence, Sequence], None],
    ) -> list[Sequence]:
        """Continue all beams with the tokens that the search chooses of their candidates, by seq_id. Returns them, best
        first, with a finish reason if the search has ended. `start` forks a beam from its parent; `replace` drops the
        blocks of a beam for those of another."""
        continuations, beams = self._advance(candidates), []
        for continuation, beam in zip(continuations, self._places(continuations), strict=True):
            parent = continuation.parent
            if beam is None:
                beam = start(parent)
            elif beam is not parent:
                replace(beam, parent)
            beams.append(beam)
        self._continue_with(beams, continuations, now_s)
        return beams

    def _places(self, continuations: Items[BeamToken]) -> list[Sequence | None]:
        """The sequence of each continuation: its parent's for the first one of a parent, then those of beams that are
        dropped; None: a new one."""
        parents = {continuation.parent.seq_id for continuation in continuations}
        dropped = [beam for beam in self.beams if beam.seq_id not in parents]
        found: list[Sequence | None] = []
        for continuation in continuations:
            if continuation.parent.seq_id in parents:
                parents.remove(continuation.parent.seq_id)
                found.append(continuation.parent)
            else:
                found.append(dropped.pop() if dropped else None)
        return found

    def _continue_with(self, beams: list[Sequence], continuations: Items[BeamToken], now_s: float) -> None:
        """Append the next tokens to the sequences of their places, which share their parents' blocks by now."""
        for beam, continuation in zip(beams, continuations, strict=True):
            if beam is not continuation.parent:
                beam.token_ids = continuation.parent.token_ids.copy()
                beam.logprobs = continuation.parent.logprobs.copy()
        for beam, continuation in zip(beams, continuations, strict=True):
            if beam.params.logprobs is not None:
                beam.logprobs.append(continuation.logprobs(beam.params.logprobs))
            beam.token_ids.append(continuation.token_id)
            beam.group = beams
            if self.ended is not None:
                beam.finish_reason, beam.facts.finished_s = self.ended, now_s
        self.beams, self._totals = beams, [continuation.total for continuation in continuations]

    def _best(self, candidates: Mapping[int, Candidates], count: int) -> list[BeamToken]:
        """The best continuations of all beams."""
        found = [
            BeamToken(beam, token_id, logprob, total + logprob, candidates[beam.seq_id])
            for beam, total in zip(self.beams, self._totals, strict=True)
            for token_id, logprob in candidates[beam.seq_id]
        ]
        return sorted(found, key=lambda continuation: -continuation.total)[:count]

    def _finish(self, continuation: BeamToken, length: int) -> None:
        parent, token_id = continuation.parent, continuation.token_id
        num_top = parent.params.logprobs
        is_stop_token = token_id in parent.end_token_ids - parent.eos_token_ids
        self.finished.append(
            SampleOutput(
                index=len(self.finished),
                score=self._score(continuation.total, length),
                token_ids=[*parent.output_token_ids, token_id],
                finish_reason="stop" if is_stop_token or token_id in parent.eos_token_ids else "length",
                stop_reason=token_id if is_stop_token else None,
                logprobs=None if num_top is None else [*parent.logprobs, continuation.logprobs(num_top)],
            )
        )
        self.finished.sort(key=lambda sample: -(sample.score or 0.0))
        del self.finished[self.width :]

    def _may_improve(self, best_total: float, length: int) -> bool:
        """Whether a running beam may still beat a finished one. With early_stopping False it is assumed that a longer
        one scores no better than it would now; with "never", no more than at the largest length."""
        if len(self.finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_new_tokens
        return self._score(best_total, length) > (self.finished[-1].score or 0.0)

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._length_penalty)
