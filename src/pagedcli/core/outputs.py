"""What the engine returns for a finished request: integers and times, no text. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedcli.core.beams import BeamSearch
from pagedcli.core.prefixes import Prefix
from pagedcli.core.sequence import Guide, Sequence, SequenceStatus, StopChecker, TokenLogprobs
from pagedcli.errors import RequestError
from pagedcli.events import FinishReason


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One of the n samples of a request."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop token or string that ended it
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    score: float | None = None  # of a beam: sum of its log-probabilities / length ** length_penalty


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of the request's first sample, in seconds."""

    queued_s: float  # from arrival to the first step that computed it
    ttft_s: float  # from arrival to its first token
    tpot_s: float | None  # mean time per later token; None if there is only one
    total_s: float
    num_preemptions: int  # of all samples
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    samples: list[SampleOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token, None for the first
    error: RequestError | None = None  # why it ended early: its samples then have the finish reason "error"


@dataclass(slots=True)
class Request:
    """An unfinished request: its samples so far."""

    seqs: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    make_stop_checker: Callable[[], StopChecker] | None = None  # a fresh one for each sample
    make_guide: Callable[[], Guide] | None = None  # a fresh one for each sample
    make_prefixes: Callable[[], list[Prefix]] | None = None  # if only these are known of the prompt
    error: RequestError | None = None
    search: BeamSearch | None = None  # once the prompt of a beam search is computed

    def parts(self) -> dict[str, Any]:
        """What each further sequence has of its own, as arguments of Sequence."""
        makers = {"stop_checker": self.make_stop_checker, "guide": self.make_guide, "prefixes": self.make_prefixes}
        return {name: make() for name, make in makers.items() if make is not None}

    def count_unfinished(self) -> None:
        """Set num_unfinished from the samples, those not yet started included."""
        finished = sum(seq.status is SequenceStatus.FINISHED for seq in self.seqs)
        params = self.seqs[0].params
        self.num_unfinished = (len(self.seqs) if params.beam_width is not None else params.n) - finished

    def output(self) -> RequestOutput:
        """The result once every sample has finished."""
        first = self.seqs[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            num_cached_tokens=first.num_cached_prompt_tokens,
            samples=self._samples(),
            metrics=self._metrics(),
            prompt_logprobs=None if first.params.prompt_logprobs is None else first.prompt_logprobs or [None],
            error=self.error,
        )

    def _samples(self) -> list[SampleOutput]:
        search, params = self.search, self.seqs[0].params
        if search is None or self.error is not None:
            return [_sample_output(seq) for seq in self.seqs[: params.n]]
        return [
            SampleOutput(
                index=index,
                token_ids=found.token_ids,
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
                logprobs=found.logprobs if params.logprobs is not None else None,
                score=found.score,
            )
            for index, found in enumerate(search.finished[: params.n])
        ]

    def _metrics(self) -> RequestMetrics:
        first = self.seqs[0]
        finished_s = first.finished_s if first.finished_s is not None else first.arrived_s
        first_token_s = first.first_token_s if first.first_token_s is not None else finished_s
        admitted_s = first.admitted_s if first.admitted_s is not None else finished_s
        later_tokens = first.num_output_tokens - 1
        return RequestMetrics(
            queued_s=admitted_s - first.arrived_s,
            ttft_s=first_token_s - first.arrived_s,
            tpot_s=(finished_s - first_token_s) / later_tokens if later_tokens > 0 else None,
            total_s=finished_s - first.arrived_s,
            num_preemptions=sum(seq.num_preemptions for seq in self.seqs),
            num_recomputed_tokens=sum(seq.num_recomputed_tokens for seq in self.seqs),
        )


def _sample_output(seq: Sequence) -> SampleOutput:
    assert seq.finish_reason is not None, "only finished samples have an output"
    return SampleOutput(
        index=seq.sample_index,
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        logprobs=seq.logprobs if seq.params.logprobs is not None else None,
    )
