"""Answers of OpenAI-compatible servers, whole or streamed, in the dialects of vLLM, SGLang, llama.cpp and Ollama.

Everything is optional and nothing is trusted: a value of another type is the same as none, or a ValueError.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_CHOICES = 16
# what is kept of an answer: more than is asked for, and little enough to keep all answers of a run
_MAX_POSITIONS, _MAX_ALTERNATIVES = 64, 20
_MAX_TEXT, _MAX_TOKEN_TEXT = 16_384, 200  # characters
# paths of the number of cached prompt tokens, best first
_CACHED_FIELDS = (
    ("usage", "prompt_tokens_details", "cached_tokens"),  # OpenAI, vLLM, SGLang, llama-server
    ("timings", "cache_n"),  # llama-server
    ("usage", "prompt_cache_hit_tokens"),  # DeepSeek
    ("usage", "cached_tokens"),
    ("meta_info", "cached_tokens"),  # SGLang's own API
)


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One generated text. `logprobs` and `top` are empty if the server gave none."""

    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()  # natural logarithms, of `tokens`
    top: tuple[Mapping[str, float], ...] = ()  # per position: likely tokens, with their log-probabilities


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gave."""

    choices: tuple[AnswerChoice, ...]
    num_prompt: int | None  # tokens, as the server counts
    num_cached: int | None  # tokens of the prompt from the cache, as the server says
    cached_field: str | None  # path of num_cached in the answer
    first_s: float | None  # time to the first piece of a stream
    total_s: float

    @property
    def seen_s(self) -> float:
        """To the first token of a stream, else to the whole answer."""
        return self.total_s if self.first_s is None else self.first_s


def parse_answer(document: Any, *, first_s: float | None, total_s: float) -> Answer:
    """The answer in a JSON document. Raises: ValueError if it has no choices."""
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list) or not document["choices"]:
        raise ValueError("there are no choices in it")
    if len(document["choices"]) > _MAX_CHOICES:
        raise ValueError(f"it has {len(document['choices']):,} choices")
    choices = [_choice(each) for each in document["choices"]]
    counts = {".".join(path): _count(_at(document, *path)) for path in _CACHED_FIELDS}
    name, num_cached = next(((name, each) for name, each in counts.items() if each is not None), (None, None))
    num_prompt = _count(_at(document, "usage", "prompt_tokens"))
    return Answer(tuple(choices), num_prompt, num_cached, name, first_s, total_s)


@dataclass(slots=True)
class Pieces:
    """The events of a stream, joined to one document as of an answer that is not streamed."""

    _texts: dict[int, list[str]] = field(default_factory=dict)  # number of the choice -> texts
    _logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)  # number of the choice -> joined lists
    _rest: dict[str, Any] = field(default_factory=dict)

    def add(self, event: Any) -> bool:
        """Whether the event has a piece of text. Raises: ValueError."""
        if not isinstance(event, dict):
            raise ValueError("it is not an object")
        if "error" in event:
            raise ValueError(f"error: {str(event['error'])[:200]}")
        for key in ("usage", "timings", "meta_info"):
            if event.get(key) is not None:
                self._rest[key] = event[key]
        choices = event.get("choices", [])
        if not isinstance(choices, list):
            raise ValueError("its choices are not a list")
        for choice in choices:
            number = choice.get("index", 0) if isinstance(choice, dict) else None
            if not isinstance(number, int) or not 0 <= number < _MAX_CHOICES:
                raise ValueError("a choice has no number")
            self._texts.setdefault(number, []).append(_text(choice))
            for key in _LISTS:
                if isinstance(values := _at(choice, "logprobs", key), list):
                    self._logprobs.setdefault(number, {}).setdefault(key, []).extend(values)
        return bool(choices)

    def document(self) -> dict[str, Any]:
        texts = sorted(self._texts.items())
        choices = [{"text": "".join(parts), "logprobs": self._logprobs.get(number)} for number, parts in texts]
        return {**self._rest, "choices": choices}


def _choice(choice: Any) -> AnswerChoice:
    text = _text(choice)[:_MAX_TEXT]
    rows = [_row(*position) for position in _positions(choice.get("logprobs"))]
    tokens, values, top = zip(*filter(None, rows), strict=True) if rows and all(rows) else ((), (), ())
    return AnswerChoice(text, tokens, values, top)


def _text(choice: Any) -> str:
    text = choice.get("text") if isinstance(choice, dict) else ()
    if text is not None and not isinstance(text, str):
        raise ValueError("a choice has no text")
    return text or ""


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "content")
TokenRow = tuple[str, float, dict[str, float]]


def _positions(logprobs: Any) -> list[tuple[Any, Any, list[tuple[Any, Any]]]]:
    """(token, log-probability, alternatives) of each position, in either shape."""
    tokens, values, tops, content = (_list(_at(logprobs, key)) for key in _LISTS)
    if content:  # the shape of chat completions; llama-server
        tokens, values = ([_at(row, key) for row in content] for key in ("token", "logprob"))
        alternatives = [_list(_at(row, "top_logprobs")) for row in content[:_MAX_POSITIONS]]
        pairs = [[(_at(each, "token"), _at(each, "logprob")) for each in row] for row in alternatives]
    else:
        tops = tops if len(tops) == len(tokens) else [None] * len(tokens)
        pairs = [list(top.items()) if isinstance(top, dict) else [] for top in tops[:_MAX_POSITIONS]]
    return list(zip(tokens, values, pairs, strict=False)) if len(tokens) == len(values) else []


def _row(token: Any, value: Any, pairs: list[tuple[Any, Any]]) -> TokenRow | None:
    """A position: the token, and its alternatives with it among them. None if it is not one."""
    number = _number(value)
    if not isinstance(token, str) or number is None:
        return None
    top: dict[str, float] = {}
    for name, each in pairs[:_MAX_ALTERNATIVES]:
        if isinstance(name, str) and (likely := _number(each)) is not None:
            top[name[:_MAX_TOKEN_TEXT]] = max(likely, top.get(name[:_MAX_TOKEN_TEXT], -math.inf))
    token = token[:_MAX_TOKEN_TEXT]
    return token, number, {**top, token: top.get(token, number)}


def _at(document: Any, *path: str) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return max(-100.0, float(value)) if is_number and value <= 1e-3 and value == value else None
