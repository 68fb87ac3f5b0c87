"""Structured output: a JSON schema or a regular expression decides which token may come next. Used by batch.run and the
Python door; the only place that talks to llguidance.
"""

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_KEPT = 64  # compiled grammars: lines of one file mostly share a few
# between the signs of a JSON text: nothing, one space, or a new line with its indentation. Without a bound, a model
# that likes spaces writes them until its tokens end
_JSON_WHITESPACE = r"( |\n[ \t]{0,32})"


class GrammarGuide:
    """Follows one sample; see engine.sequence.Guide. `error` says why the grammar could not be followed to its end."""

    __slots__ = ("_end_tokens", "_matcher", "allowed_tokens", "error")

    def __init__(self, matcher: "LLMatcher", allowed_tokens: bytes, end_tokens: int) -> None:
        self._matcher = matcher
        self._end_tokens = end_tokens  # a bit per token, as in allowed_tokens
        self.allowed_tokens = allowed_tokens
        self.error: str | None = None

    def accept(self, token_id: int) -> bool:
        """Take a token. Returns whether the text is complete, or cannot go on (`error`)."""
        self._matcher.consume_token(token_id)
        self.allowed_tokens = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.error = _first_line(self._matcher.get_error())
        return self.error is not None or not int.from_bytes(self.allowed_tokens, "little") & ~self._end_tokens


class Guides:
    """The guides of one request: the engine calls this once per sample for a fresh one."""

    __slots__ = ("_made", "_new")

    def __init__(self, new: Callable[[], GrammarGuide]) -> None:
        self._new = new
        self._made: list[GrammarGuide] = []

    def __call__(self) -> GrammarGuide:
        self._made.append(self._new())
        return self._made[-1]

    def check(self) -> None:
        """Raises: RequestError 'grammar_too_complex' if a sample ended because its grammar could not be followed."""
        for guide in self._made:
            if guide.error is not None:
                raise RequestError("grammar_too_complex", f"the grammar could not be followed: {guide.error}")


class Grammars:
    """Compiles the grammars of requests for one model, and keeps the latest.

    `end_token_ids`: the model's end-of-sequence tokens, allowed where a text may end. The vocabulary is prepared when
    the first grammar comes: 0.3 s for 150,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(end_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_MAX_KEPT)(self._compile)

    def guides(self, params: SamplingParams) -> Guides | None:
        """What makes guides for a request's samples; None if it asks for no grammar.

        Raises: RequestError 'invalid_schema' or 'invalid_regex', with the reason; 'unsupported_parameter'.
        """
        if not params.guided:
            return None
        if params.ignore_eos:
            raise RequestError("invalid_parameter", "ignore_eos excludes a grammar, which says where the text ends")
        if not self._end_token_ids:
            raise RequestError("unsupported_parameter", "a grammar needs a model with an end-of-sequence token")
        matcher, allowed_tokens = self._compiled(_grammar(params), "regex" if params.regex is not None else "schema")
        end_tokens = sum(1 << token_id for token_id in self._end_token_ids)
        return Guides(lambda: GrammarGuide(matcher.deep_copy(), allowed_tokens, end_tokens))

    def _compile(self, grammar: str, kind: str) -> "tuple[LLMatcher, bytes]":
        """A matcher at the beginning, and the tokens that it allows there."""
        from llguidance import LLMatcher

        self._vocabulary = self._vocabulary or self._new_vocabulary()
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        allowed_tokens = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"invalid_{kind}", f"the {kind} cannot be used: {_first_line(matcher.get_error())}")
        return matcher, allowed_tokens

    def _new_vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapped = TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_token_ids[0], self._vocab_size))
        return LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._end_token_ids)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = tokenizer.all_token_bytes(vocab_size)
        self.special_token_ids = [token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)


def _grammar(params: SamplingParams) -> str:
    """llguidance's own form of what a request asks for."""
    from llguidance import LLMatcher

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    assert params.response_format is not None, "a guided request has a regex or a format"
    described = params.response_format.get("json_schema", {})
    schema = described.get("schema", {"type": "object"})
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_pattern": _JSON_WHITESPACE, "lenient": False}
        )
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_schema", f"the schema cannot be used: {_first_line(str(error))}") from error


def _first_line(message: str) -> str:
    """The library's messages go on with pictures of the grammar."""
    return message.strip().partition("\n")[0][:300]
