"""Scores of continuations as people ask for them and read them: texts to tokens, and sums to the best answer.

Used by batch rows and the Python interface; the engine's side is core.scoring.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from pagedcli.core.scoring import ContinuationScore
from pagedcli.errors import RequestError

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer

Continuation = str | Sequence[int]


class Score(msgspec.Struct, frozen=True):
    """How likely the model finds one continuation after its context."""

    index: int  # place among the continuations
    logprob: float  # sum over its tokens: raw log-softmax at temperature 1, without penalties, bias or grammar
    num_tokens: int
    num_bytes: int | None  # of its text as given, in UTF-8; None: token ids were given, and not decoded
    is_greedy: bool  # each token is the likeliest one, ties going to the lowest id
    token_ids: list[int]
    logprobs: list[float]  # one per token

    @classmethod
    def of(cls, index: int, found: ContinuationScore, num_bytes: int | None) -> "Score":
        logprobs = [token.logprob for token in found.tokens]
        token_ids = found.token_ids
        return cls(index, found.logprob, len(token_ids), num_bytes, found.is_greedy, token_ids, logprobs)


def best_of(scores: Sequence[Score]) -> dict[str, int | None]:
    """The index of the best continuation by each measure, the smallest if tied; None where there are no bytes."""
    measures: dict[str, Callable[[Score], float | None]] = {
        "logprob": lambda score: score.logprob,
        "per_token": lambda score: score.logprob / score.num_tokens,
        "per_byte": lambda score: score.logprob / score.num_bytes if score.num_bytes else None,
    }
    found: dict[str, int | None] = {}
    for name, measure in measures.items():
        values = [value for score in scores if (value := measure(score)) is not None]
        found[name] = values.index(max(values)) if len(values) == len(scores) else None
    return found


def encode_pair(
    tokenizer: "Tokenizer", context: str, continuations: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """The tokens of a text and of what may follow it, cut as lm-evaluation-harness does: whitespace at the end of the
    context belongs to the continuations, whose tokens are those that a continuation adds to the tokens of the context.

    Raises: RequestError, also for a continuation that adds none.
    """
    stripped = context.rstrip()
    space = context[len(stripped) :]
    context_ids = tokenizer.encode(stripped)
    found = []
    for index, text in enumerate(continuations):
        token_ids = tokenizer.encode(stripped + space + text)[len(context_ids) :]
        if not token_ids:
            raise RequestError("empty_continuation", f"continuation {index}, {text!r:.40}, adds no tokens")
        found.append(token_ids)
    return context_ids, found
