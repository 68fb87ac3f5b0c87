"""Scores of given continuations of a context: which tokens each sequence of a request predicts, and what was found.

A continuation of c tokens needs the logits of c tokens: the context's last one and its own first c - 1. So the context
is a sequence, and each continuation of two or more tokens one that forks from it, without its last token:

    context          5 6 7 8        its last row predicts the first token of every continuation
    `1 2 3`          5 6 7 8 1 2    the rows of 1 and 2 predict 2 and 3
    `4`              none: its only token is predicted by the context

The context of a single continuation needs no fork: both are one sequence, 5 6 7 8 1 2, with three rows of logits.
A vector is made of rows before the output layer: its request has one continuation, POOLED, which gets no score.
Used by the engine core; needs no torch.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from pagedcli.sampling_params import SamplingParams

SCORING = SamplingParams(temperature=0)  # parameters of requests that generate nothing: none has an effect
Pooling = Literal["last", "mean"]
POOLED = [[0]]  # continuations of a request for a vector; the token stands for any


class TokenScore(NamedTuple):
    """What the model says of one given token."""

    logprob: float  # sum over its tokens, raw logits at temperature 1
    is_greedy: bool  # whether it has the largest logit, and no token with a lower id has the same


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The scores of one continuation."""

    token_ids: list[int]
    tokens: list[Any]  # a TokenScore per token; of POOLED the hidden states that make the vector, [E] float32

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation: the sum."""
        return float(sum(token.logprob for token in self.tokens))

    @property
    def is_greedy(self) -> bool:
        """Whether the model would generate it."""
        return all(token.is_greedy for token in self.tokens)


@dataclass(slots=True, eq=False)
class Targets:
    """The tokens that a sequence predicts and scores, in order."""

    num_context_tokens: int
    token_ids: list[int]
    first: int  # position of the token that predicts the first of them
    together: bool = False  # whether this token predicts all of them; otherwise each is predicted by the one before
    num_fork_tokens: int = 0  # tokens computed by the sequences that fork from it
    index: int = 0  # place of the continuation in its row
    found: list[Any] = field(default_factory=list)  # scores or states so far: a preemption does not drop them
    pools: bool = False  # hidden states are wanted, not scores
    is_done: bool = False  # its last token has been computed, and the result read

    def wanted(self, start: int, end: int) -> tuple[int, list[int]]:
        """Which tokens get a score when the positions start ... end-1 are computed: the index of the first, and the
        position that predicts each."""
        if self.together:
            is_now = start <= self.first < end and not self.found
            return 0, [self.first] * len(self.token_ids) if is_now else []
        begin = max(start - self.first, len(self.found))
        return begin, list(range(self.first + begin, min(end, self.first + len(self.token_ids))))

    def add(self, begin: int, scores: list[Any]) -> None:
        """Scores of the tokens from index `begin` on; those that are known are the same."""
        self.found[begin : begin + len(scores)] = scores

    @classmethod
    def of_context(
        cls, num_context_tokens: int, continuations: Items[Items[int]], pooling: Pooling | None = None
    ) -> Self:
        """What the first sequence of a request predicts, or the tokens whose hidden states make a vector."""
        last = num_context_tokens - 1
        if pooling == "mean":
            return cls(num_context_tokens, POOLED[0] * num_context_tokens, 0, pools=True)
        if len(continuations) == 1:
            return cls(num_context_tokens, list(continuations[0]), last, pools=pooling is not None)
        firsts, num_later = [token_ids[0] for token_ids in continuations], sum(len(each) - 1 for each in continuations)
        return cls(num_context_tokens, firsts, last, together=True, num_fork_tokens=num_later)

    def of_forks(self, continuations: Items[Items[int]]) -> list[Self]:
        """What the sequences predict that fork from this context."""
        if not self.together:
            return []
        num_context = self.num_context_tokens
        pairs = enumerate(continuations)
        return [
            type(self)(num_context, list(token_ids[1:]), num_context, index=index)
            for index, token_ids in pairs
            if len(token_ids) > 1
        ]

    def scores(self, continuations: Items[Items[int]], forks: "Items[Targets]") -> list[ContinuationScore]:
        """The scores of all continuations, once this context and its forks have theirs."""
        if not self.together:
            return [ContinuationScore(self.token_ids, self.found)]
        rest = {fork.index: fork.found for fork in forks}
        pairs = enumerate(zip(continuations, self.found, strict=True))
        return [
            ContinuationScore(list(token_ids), [first, *rest.get(index, ())]) for index, (token_ids, first) in pairs
        ]
