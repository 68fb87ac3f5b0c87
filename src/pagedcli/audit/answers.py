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
class Choice:
    """One generated text. `logprobs` and `top` are empty if the server gave none."""

    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()  # natural logarithms, of `tokens`
    top: tuple[Mapping[str, float], ...] = ()  # per position: likely tokens, with their log-probabilities


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gave."""

    choices: tuple[Choice, ...]
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
    field_name, num_cached = _num_cached(document)
    return Answer(
        tuple(choices), _count(_at(document, ("usage", "prompt_tokens"))), num_cached, field_name, first_s, total_s
    )


@dataclass(slots=True)
class Pieces:
    """The events of a stream, joined to one document as of an answer that is not streamed."""

    _texts: dict[int, list[str]] = field(default_factory=dict)  # number of the choice -> texts
    _logprobs: dict[int, list[Any]] = field(default_factory=dict)
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
            if not isinstance(number, int) or not 0 <= number < _MAX_CHOICES or not _is_text(choice.get("text", "")):
                raise ValueError("a choice has no number or no text")
            self._texts.setdefault(number, []).append(choice.get("text") or "")
            if choice.get("logprobs") is not None:
                self._logprobs.setdefault(number, []).append(choice["logprobs"])
        return bool(choices)

    def document(self) -> dict[str, Any]:
        choices = []
        for number in sorted(self._texts):
            joined = _join_logprobs(self._logprobs.get(number, []))
            choices.append({"text": "".join(self._texts[number]), "logprobs": joined})
        return {**self._rest, "choices": choices}


def _join_logprobs(parts: list[Any]) -> dict[str, Any] | None:
    joined: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, dict):
            for key in ("tokens", "token_logprobs", "top_logprobs", "content"):
                if isinstance(part.get(key), list):
                    joined.setdefault(key, []).extend(part[key])
    return dict(joined) or None


def _choice(choice: Any) -> Choice:
    if not isinstance(choice, dict) or not _is_text(choice.get("text")):
        raise ValueError("a choice has no text")
    text = (choice["text"] or "")[:_MAX_TEXT]
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return Choice(text)
    if isinstance(logprobs.get("content"), list):  # the shape of chat completions; llama-server
        rows = [_content_row(row) for row in logprobs["content"][:_MAX_POSITIONS]]
    else:
        rows = _legacy_rows(logprobs)
    if not rows or any(row is None for row in rows):
        return Choice(text)
    tokens, values, top = zip(*[row for row in rows if row is not None], strict=True)
    return Choice(text, tokens, values, top)


Row = tuple[str, float, dict[str, float]]


def _content_row(row: Any) -> Row | None:
    token, value = _at(row, ("token",)), _number(_at(row, ("logprob",)))
    if not isinstance(token, str) or value is None:
        return None
    alternatives = row.get("top_logprobs")
    pairs = [
        (_at(each, ("token",)), _at(each, ("logprob",)))
        for each in (alternatives[:_MAX_ALTERNATIVES] if isinstance(alternatives, list) else ())
    ]
    return _row(token, value, pairs)


def _legacy_rows(logprobs: dict[str, Any]) -> list[Row | None]:
    tokens, values, tops = (logprobs.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
    if not isinstance(tokens, list) or not isinstance(values, list) or len(tokens) != len(values):
        return []
    if not isinstance(tops, list) or len(tops) != len(tokens):
        tops = [None] * len(tokens)
    rows: list[Row | None] = []
    for token, value, top in zip(tokens[:_MAX_POSITIONS], values, tops, strict=False):
        number = _number(value)
        if not isinstance(token, str) or number is None:
            rows.append(None)
            continue
        rows.append(_row(token, number, list(top.items())[:_MAX_ALTERNATIVES] if isinstance(top, dict) else []))
    return rows


def _row(token: str, value: float, pairs: list[tuple[Any, Any]]) -> Row:
    """A position: the token, and its alternatives with it among them."""
    top: dict[str, float] = {}
    for name, each in pairs:
        number = _number(each)
        if isinstance(name, str) and number is not None:
            name = name[:_MAX_TOKEN_TEXT]
            top[name] = max(number, top.get(name, -math.inf))
    token = token[:_MAX_TOKEN_TEXT]
    return token, value, {**top, token: top.get(token, value)}


def _num_cached(document: dict[str, Any]) -> tuple[str | None, int | None]:
    for path in _CACHED_FIELDS:
        value = _count(_at(document, path))
        if value is not None:
            return ".".join(path), value
    return None, None


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return max(-100.0, float(value)) if is_number and value <= 1e-3 and value == value else None


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)
