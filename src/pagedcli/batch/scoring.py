"""Scores of continuations as people ask for them and read them: fields of a line to tokens, sums to the best answer.

Used by batch rows and the Python interface; the engine's side is core.scoring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.scoring import ContinuationScore
from pagedcli.errors import RequestError
from pagedcli.printable import plural

Continuation = str | Sequence[int]
FIELDS = ("continuations", "logprobs_from", "score_tokens")  # fields of a line
# what would make a row generate: values without effect
_GENERATING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "max_tokens": (0,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    **dict.fromkeys(("beam_width", "regex", "structured_outputs", "top_logprobs", "prompt_logprobs"), ()),
    **dict.fromkeys(("guided_json", "guided_choice", "guided_grammar"), ()),
}


class Score(msgspec.Struct, frozen=True):
    """How likely the model finds one continuation after its context."""

    index: int  # place among the continuations
    logprob: float  # sum over its tokens: raw log-softmax at temperature 1, without penalties, bias or grammar
    num_tokens: int
    num_bytes: int | None  # UTF-8 bytes of its text as given; None: token ids were given, and not decoded
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


# ---------------------------------------------------------------------- lines


def check_generates_nothing(what: str, body: dict[str, Any], *others: str) -> None:
    """Raises: RequestError for a field with which a line that has `what` would generate, or for one of the others."""
    for name, harmless in {**_GENERATING, **dict.fromkeys(others, ())}.items():
        if name in body and body[name] not in harmless:
            raise RequestError(
                "invalid_parameter", f"{name} is {body[name]!r:.40}, but a line with {what!r} generates nothing"
            )


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a line wants to be scored after its prompt."""

    continuations: list[str] | list[list[int]] | None  # None: the rest of the prompt itself
    start: int = 0  # tokens of the prompt before that rest; 0: the first one is predicted from BOS
    with_tokens: bool = False  # the scores of single tokens, too

    @classmethod
    def of(cls, body: dict[str, Any]) -> "ScoreRequest | None":
        """None if the line generates. Raises: RequestError."""
        given = [name for name in FIELDS if name in body]
        if not given:
            return None
        if given == ["score_tokens"] or (len(given) > 1 and "score_tokens" not in given):
            raise RequestError("invalid_request", "a line to score needs either 'continuations' or 'logprobs_from'")
        check_generates_nothing(given[0], body)
        with_tokens, start = body.get("score_tokens", False), body.get("logprobs_from", 0)
        if not isinstance(with_tokens, bool):
            raise RequestError("invalid_parameter", f"score_tokens is {with_tokens!r:.40}, must be true or false")
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise RequestError("invalid_parameter", f"logprobs_from is {start!r:.40}, must be a number of tokens")
        if "logprobs_from" in body:
            if "messages" in body:
                raise RequestError("invalid_request", "'logprobs_from' needs 'text', not 'messages'")
            return cls(None, start, with_tokens)
        return cls(_read_continuations(body["continuations"]), with_tokens=with_tokens)

    def tokens(
        self, tokenizer: Tokenizer, prompt: str | list[int], num_allowed: int, *, is_chat: bool
    ) -> "ScoredTokens":
        """The context of a prompt, and what is scored after it. Raises: RequestError, also for nothing to score."""
        if self.continuations is None:
            return self._rest(tokenizer, prompt, num_allowed)
        if isinstance(prompt, str) and not is_chat and isinstance(self.continuations[0], str):
            texts = [text for text in self.continuations if isinstance(text, str)]
            context, found = encode_pair(tokenizer, prompt, texts, num_allowed)
        else:
            context = _encode(tokenizer, prompt, num_allowed, add_special_tokens=not is_chat)
            found = [_encode(tokenizer, each, num_allowed, add_special_tokens=False) for each in self.continuations]
        num_bytes = [
            len(given.encode()) if isinstance(given, str) else _num_bytes(tokenizer, context, token_ids)
            for given, token_ids in zip(self.continuations, found, strict=True)
        ]
        return ScoredTokens(context, found, num_bytes, self.with_tokens)

    def _rest(self, tokenizer: Tokenizer, prompt: str | list[int], num_allowed: int) -> "ScoredTokens":
        if self.start:
            token_ids = _encode(tokenizer, prompt, num_allowed, add_special_tokens=True)
            context, rest = token_ids[: self.start], token_ids[self.start :]
        else:
            rest = _encode(tokenizer, prompt, num_allowed, add_special_tokens=False)
            if (first := tokenizer.start_token_id) is None:
                raise RequestError("invalid_parameter", "logprobs_from is 0, but the tokenizer has neither BOS nor EOS")
            context = [first]
        if not rest:
            raise RequestError(
                "empty_continuation", f"logprobs_from is {self.start}, but the text has {plural(len(context), 'token')}"
            )
        return ScoredTokens(context, [rest], [_num_bytes(tokenizer, context, rest)], self.with_tokens)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The tokens of a prompt and of what is scored after it."""

    context: list[int]
    continuations: list[list[int]]
    num_bytes: list[int]  # bytes of each
    with_tokens: bool  # rows have the scores of single tokens


def _read_continuations(given: Any) -> list[str] | list[list[int]]:
    wanted: Any = list[str] if isinstance(given, list) and given and isinstance(given[0], str) else list[list[int]]
    try:
        found: list[str] | list[list[int]] = msgspec.convert(given, wanted)
    except msgspec.ValidationError as error:
        raise RequestError(
            "invalid_request", f"'continuations' must be a list of texts or of lists of token ids: {error}"
        ) from error
    if not found:
        raise RequestError("empty_continuation", "'continuations' has none")
    if (empty := next((index for index, each in enumerate(found) if not each), None)) is not None:
        raise RequestError("empty_continuation", f"continuation {empty} is empty")
    return found


def _encode(tokenizer: Tokenizer, given: str | list[int], num_allowed: int, *, add_special_tokens: bool) -> list[int]:
    if not isinstance(given, str):
        return given
    return tokenizer.encode_within(given, num_allowed, add_special_tokens=add_special_tokens)


def _num_bytes(tokenizer: Tokenizer, context: list[int], token_ids: list[int]) -> int:
    if set(context) <= set(tokenizer.special_token_ids):  # the text begins here: its first word has no space before it
        return len(tokenizer.decode(token_ids, skip_special_tokens=False).encode())
    return len(tokenizer.decode_output(context, token_ids, skip_special_tokens=False).encode())


def encode_pair(
    tokenizer: Tokenizer, context: str, continuations: Sequence[str], num_allowed: int
) -> tuple[list[int], list[list[int]]]:
    """The tokens of a text and of what may follow it, cut as lm-evaluation-harness does: whitespace at the end of the
    context belongs to the continuations, whose tokens are those that a continuation adds to the tokens of the context.

    Raises: RequestError, also for a continuation that adds none, and for a text far beyond the tokens allowed.
    """
    stripped = context.rstrip()
    space = context[len(stripped) :]
    context_ids = tokenizer.encode_within(stripped, num_allowed)
    found = []
    for index, text in enumerate(continuations):
        token_ids = tokenizer.encode_within(stripped + space + text, num_allowed)[len(context_ids) :]
        if not text or not token_ids:
            raise RequestError("empty_continuation", f"continuation {index}, {text!r:.40}, adds no tokens")
        found.append(token_ids)
    return context_ids, found
