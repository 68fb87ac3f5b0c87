"""Requests: their sequences, the forks that start further ones, and the output once all have ended.

Used by EngineCore; needs no torch. Samples fork after the prompt and share its blocks; beams fork at every step.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

from pagedcli.core.beams import BeamSearch, Candidates
from pagedcli.core.prefixes import Prefix
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.scoring import ContinuationScore
from pagedcli.core.sequence import (
    Guide,
    SampleOutput,
    ScoredPart,
    Sequence,
    SequenceFacts,
    SequenceStatus,
    StopChecker,
    TokenLogprobs,
)
from pagedcli.errors import RequestError

NewSequence = Callable[..., Sequence]  # makes one, as Sequence() does, with the next seq_id


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of the request's first sample, in seconds."""

    queued_s: float  # arrival to the first step that computed it
    ttft_s: float  # arrival to first token
    tpot_s: float | None  # mean time per later token; None if there is only one
    total_s: float
    num_preemptions: int  # all samples together
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A finished request."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    samples: list[SampleOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token, None for the first
    error: RequestError | None = None  # why it ended early: its samples then have the finish reason "error"
    scores: list[ContinuationScore] | None = None  # one per continuation, if they were given; it then has no samples
    num_disk_tokens: int | None = None  # cached ones read from the prefix store; None: it uses none


# ---------------------------------------------------------------------- a request and its forks


@dataclass(slots=True)
class UnfinishedRequest:
    """An unfinished request: its samples so far."""

    seqs: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    make_stop_checker: Callable[[], StopChecker] | None = None  # a fresh one for each sample
    make_guide: Callable[[], Guide] | None = None  # a fresh one for each sample
    make_prefixes: Callable[[], list[Prefix]] | None = None  # set where the prompt's tokens are not known
    error: RequestError | None = None
    search: BeamSearch | None = None  # once the prompt of a beam search is computed
    continuations: Items[Items[int]] | None = None  # tokens to score; None: it generates

    def parts(self) -> dict[str, Any]:
        """What each further sequence has of its own, as arguments of Sequence."""
        makers = {"stop_checker": self.make_stop_checker, "guide": self.make_guide, "prefixes": self.make_prefixes}
        return {name: make() for name, make in makers.items() if make is not None}

    @property
    def has_ended(self) -> bool:
        """Whether all its sequences have ended, those not yet started included; of a context, whether it is scored."""
        if self.continuations is None:
            return not self.num_unfinished
        return all(seq.status is SequenceStatus.FINISHED for seq in self.seqs)

    @property
    def targets(self) -> list[ScoredPart]:
        """What its sequences score, the context first; empty if it generates."""
        return [seq.targets for seq in self.seqs if seq.targets is not None]

    def count_unfinished(self) -> None:
        """Set num_unfinished from the samples, those not yet started included."""
        finished = sum(seq.status is SequenceStatus.FINISHED for seq in self.seqs)
        params = self.seqs[0].params
        self.num_unfinished = (len(self.seqs) if params.beam_width is not None else params.n) - finished

    def output(self) -> FinishedRequest:
        """The result once every sample has finished."""
        first = self.seqs[0]
        return FinishedRequest(
            request_id=first.request_id,
            prompt_token_ids=first.token_ids[: first.num_context_tokens or first.num_prompt_tokens],
            num_cached_tokens=first.facts.num_cached_tokens,
            num_disk_tokens=first.facts.num_disk_tokens,
            samples=self._samples(),
            metrics=self._metrics(),
            prompt_logprobs=None if first.params.prompt_logprobs is None else first.facts.prompt_logprobs or [None],
            error=self.error,
            scores=self._scores(),
        )

    def _scores(self) -> list[ContinuationScore] | None:
        if self.continuations is None or self.error is not None:
            return None
        context, *forks = self.targets
        return context.scores(self.continuations, forks) if context.found else None  # a simulation computes none

    def _samples(self) -> list[SampleOutput]:
        search, params = self.search, self.seqs[0].params
        if self.continuations is not None:
            return []
        if search is None or self.error is not None:
            return [SampleOutput.of(seq) for seq in self.seqs[: params.n]]
        return [replace(found, index=index) for index, found in enumerate(search.finished[: params.n])]

    def _metrics(self) -> RequestMetrics:
        first, facts = self.seqs[0], self.seqs[0].facts
        admitted_s, first_token_s, finished_s = facts.admitted_s, facts.first_token_s, facts.finished_s
        assert admitted_s is not None, "it has run"
        assert first_token_s is not None, "its prompt was computed"
        assert finished_s is not None, "it has ended"
        if self.continuations is not None:
            finished_s = max(seq.facts.finished_s for seq in self.seqs if seq.facts.finished_s is not None)
        later_tokens = first.num_output_tokens - 1
        return RequestMetrics(
            queued_s=admitted_s - facts.arrived_s,
            ttft_s=first_token_s - facts.arrived_s,
            tpot_s=(finished_s - first_token_s) / later_tokens if later_tokens > 0 else None,
            total_s=finished_s - facts.arrived_s,
            num_preemptions=sum(seq.num_preemptions for seq in self.seqs),
            num_recomputed_tokens=sum(seq.facts.num_recomputed_tokens for seq in self.seqs),
        )


class Forks:
    """Forks sequences in the scheduler.

    Does not refer to the engine: a cycle would keep its KV cache until the garbage collector runs.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._parents: set[int] = set()  # seq_ids
        self._contexts: set[int] = set()  # seq_ids, of contexts from which continuations will fork
        self._computed: list[Sequence] = []  # such contexts whose last token a launched step computes

    def expect(self, seq: Sequence, continuations: Items[Items[int]]) -> None:
        """Remember the first sequence of a request if others start, or fork from it, once its prompt is computed."""
        if seq.params.n > 1 and not seq.is_beam:
            self._parents.add(seq.seq_id)
        if seq.targets is not None and seq.targets.of_forks(continuations):
            self._contexts.add(seq.seq_id)

    def forget(self, request: UnfinishedRequest) -> None:
        """The request has ended."""
        first = request.seqs[0]
        self._parents.discard(first.seq_id)
        self._contexts.discard(first.seq_id)
        self._computed = [seq for seq in self._computed if seq is not first]  # a new list: it may be looped over

    def will_fork(self, seq: Sequence) -> bool:
        """Whether more samples of the sequence's request start once its prompt is computed."""
        return seq.seq_id in self._parents

    def fork_samples(
        self, requests: Mapping[str, UnfinishedRequest], sampled: list[Sequence], new_sequence: NewSequence
    ) -> tuple[list[Sequence], list[int] | None]:
        """Fork the other samples of requests whose prompt this step computes; they share its logits.

        Returns all sequences that get a token, and the logits row of each (None: one row per sequence).
        """
        parents = [(row, seq) for row, seq in enumerate(sampled) if self.will_fork(seq)] if self._parents else []
        if not parents:
            return sampled, None
        rows, sampled = list(range(len(sampled))), list(sampled)
        for row, parent in parents:
            request = requests[parent.request_id]
            for _ in range(len(request.seqs), parent.params.n):
                child = _new_sample(request, new_sequence)
                if self._scheduler.fork(parent, child):
                    sampled.append(child)
                    rows.append(row)
            self.forget(request)
        return sampled, rows

    def count_computed(self, seqs: list[Sequence]) -> None:
        """A step has been launched that computes the last tokens of these sequences."""
        self._computed += [seq for seq in seqs if seq.seq_id in self._contexts]

    def is_kept(self, seq: Sequence) -> bool:
        """Whether continuations will fork from this computed context."""
        return any(each is seq for each in self._computed)

    def start_continuations(self, requests: Mapping[str, UnfinishedRequest], new_sequence: NewSequence) -> None:
        """Queue the continuations of the contexts that have been computed and have their scores."""
        for context in self._computed:
            request, targets = requests[context.request_id], context.targets
            if targets is not None and targets.is_done:
                forks = targets.of_forks(request.continuations or ())[::-1]
                self._scheduler.keep_context(context, [_new_fork(request, each, new_sequence) for each in forks])
                self.forget(request)

    def recover(self) -> None:
        """The steps in flight have failed: contexts without scores are computed again. Those of which the continuations
        were being queued end, as these are queued by now."""
        scored = [seq for seq in self._computed if seq.targets is not None and seq.targets.is_done]
        self._computed = [seq for seq in scored if not seq.forks]

    def advance_beams(
        self, request: UnfinishedRequest, candidates: Mapping[int, Candidates], now_s: float, new_sequence: NewSequence
    ) -> list[Sequence]:
        """Continue the beams of a request with the tokens that its search chooses of their candidates, by seq_id.
        Returns them, best first, with a finish reason if the search has ended."""
        search = request.search = request.search or BeamSearch(request.seqs[0])
        finished, num_seqs = search.finished.copy(), len(request.seqs)
        prefixes = [(beam, beam.prefixes) for beam in search.beams]

        def start(parent: Sequence) -> Sequence:
            beam = _new_sample(request, new_sequence)
            beam.facts.first_token_s = parent.facts.first_token_s
            request.num_unfinished += 1
            forked = self._scheduler.fork(parent, beam)
            assert forked, "a beam search starts only with room for all its beams"
            return beam

        try:
            return search.step(candidates, now_s, start=start, replace=self._scheduler.replace)
        except BaseException:  # the beams are as they were: once they are computed again, the same step follows
            search.finished, search.ended = finished, None
            del request.seqs[num_seqs:]
            for beam, own in prefixes:  # perhaps another's, whose tokens it would have got
                beam.prefixes = own
            raise


def _new_fork(request: UnfinishedRequest, targets: ScoredPart, new_sequence: NewSequence) -> Sequence:
    """A sequence that scores a continuation after its first token."""
    assert request.continuations is not None, "continuations are scored"
    token_ids = [*request.seqs[0].token_ids, *request.continuations[targets.index][:-1]]
    return _new_sample(request, new_sequence, token_ids, targets=targets)


def _new_sample(
    request: UnfinishedRequest, new_sequence: NewSequence, token_ids: list[int] | None = None, **fields: Any
) -> Sequence:
    """A further sequence of a request, with these tokens, by default its prompt alone."""
    first = request.seqs[0]
    child = new_sequence(
        first.request_id,
        first.token_ids[: first.num_prompt_tokens] if token_ids is None else token_ids,
        first.params,
        **fields,
        **request.parts(),
        max_new_tokens=first.max_new_tokens,
        seed=first.seed,
        sample_index=len(request.seqs),
        eos_token_ids=first.eos_token_ids,
        cache_salt=first.cache_salt,
        is_private=first.is_private,
        facts=SequenceFacts(first.facts.row_id, first.facts.arrived_s, first.facts.admitted_s),
    )
    request.seqs.append(child)
    return child
