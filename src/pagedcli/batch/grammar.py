"""Structured output: a JSON schema, regular expression or grammar restricts the next token. Used by batch.run and the
Python interface; the only place that talks to llguidance.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.sequence import TokenMask
from pagedcli.errors import RequestError
from pagedcli.later import llguidance
from pagedcli.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_KEPT = 16  # compiled grammars: lines of one file mostly share a few
_MAX_LEXER_STATES = 50_000  # limit per grammar, at 1 to 2 kB a state
# larger ones take seconds to minutes to compile, during which no row advances
_MAX_CHOICES = 10_000
_MAX_PROPERTIES, _MAX_ALL_PROPERTIES = 2_000, 5_000  # per object of a schema, and in all; time grows with the square
_MAX_TEXT = 2**20  # characters of a schema, regular expression or grammar
# JSON on one line. With free white space some models write it until their tokens run out, and all spend tokens on line
# ends. A schema may allow it: {"x-guidance": {"whitespace_flexible": true}, ...}.
_JSON_STYLE: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class GrammarGuide:
    """Follows one sample; see core.sequence.Guide. `error` is the reason if the grammar could not be followed."""

    __slots__ = ("_allowed_tokens", "_masks", "_matcher", "error")

    def __init__(self, matcher: "llguidance.LLMatcher", allowed_tokens: TokenMask, masks: "_Masks") -> None:
        self._matcher = matcher
        self._masks = masks
        self._allowed_tokens: TokenMask | None = allowed_tokens  # None: not known since the last token
        self.error: str | None = None

    @property
    def allowed_tokens(self) -> TokenMask:
        """A bit per token id, lowest first."""
        if self._allowed_tokens is None:
            self.find_allowed([self])
        assert self._allowed_tokens is not None, "it has been found"
        return self._allowed_tokens

    def accept(self, token_id: int) -> None:
        """Take a token."""
        self._matcher.consume_token(token_id)
        self._allowed_tokens = None

    def copy(self) -> "GrammarGuide":
        """Another one after the same tokens."""
        return GrammarGuide(self._matcher.deep_copy(), self.allowed_tokens, self._masks)

    @classmethod
    def find_allowed(cls, guides: "Sequence[GrammarGuide]") -> list[bool]:
        """Find what may come next. Returns whether each text is complete, or cannot continue (`error`)."""
        words, complete = guides[0]._masks.of([guide._matcher for guide in guides])
        for row, (guide, mask) in enumerate(zip(guides, words.view(np.uint8), strict=True)):
            guide._allowed_tokens = mask.data
            if guide._matcher.is_error():
                guide.error, complete[row] = _one_line(guide._matcher.get_error()), True
        return complete


class _Masks:
    """Finds which tokens may come next in many texts at once, on several threads."""

    def __init__(self, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._executor = llguidance.LLExecutor()
        self._ends = np.zeros(-(-vocab_size // 32), dtype=np.uint32)  # a bit per token id, as all masks
        for token_id in end_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._with_ends = np.flatnonzero(self._ends)

    def of(self, matchers: "list[llguidance.LLMatcher]") -> tuple[np.ndarray[Any, np.dtype[np.uint32]], list[bool]]:
        """Masks [G, V / 32], and for each whether only end tokens are in it."""
        words = np.empty((len(matchers), len(self._ends)), dtype=np.uint32)
        of_rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(of_rows, words.ctypes.data, words.shape[1] * 4, len(matchers))
        complete = [False] * len(matchers)
        may_end = (words[:, self._with_ends] & self._ends[self._with_ends]).any(axis=1)
        for row in np.flatnonzero(may_end).tolist():
            complete[row] = not (words[row] & ~self._ends).any()
        return words, complete


class Guides:
    """Makes the guides of one request: the engine calls it once per sample."""

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
    """Compiles the grammars of requests for one model, and caches the latest.

    `end_token_ids`: the model's end-of-sequence tokens, allowed where a text may end. The vocabulary is prepared for
    the first grammar, in about a second for 150,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_token_ids: Iterable[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(end_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._masks: _Masks | None = None
        self._compiled = lru_cache(maxsize=_MAX_KEPT)(self._compile)

    def guides(self, params: SamplingParams) -> Guides | None:
        """The factory of guides for a request's samples; None if it has no grammar.

        Raises: RequestError 'invalid_schema', 'invalid_regex', ... with the reason; 'unsupported_parameter'.
        """
        structure = params.structure
        if structure is None:
            return None
        if params.ignore_eos:
            raise RequestError(
                "invalid_parameter", "ignore_eos cannot be used with a grammar, which decides where the text ends"
            )
        if not self._end_token_ids:
            raise RequestError("unsupported_parameter", "a grammar needs a model with an end-of-sequence token")
        matcher, allowed_tokens = self._compiled(_grammar(structure), structure.kind)
        masks = self._masks = self._masks or _Masks(self._vocab_size, self._end_token_ids)
        return Guides(lambda: GrammarGuide(matcher.deep_copy(), allowed_tokens, masks))

    def _compile(self, grammar: str, kind: str) -> "tuple[llguidance.LLMatcher, bytes]":
        """A matcher at its start, and the tokens that it allows there."""
        self._vocabulary = self._vocabulary or self._new_vocabulary()
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        allowed_tokens = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"invalid_{kind}", f"the {kind} cannot be used: {_one_line(matcher.get_error())}")
        return matcher, allowed_tokens

    def _new_vocabulary(self) -> "llguidance.LLTokenizer":
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._end_token_ids[0], self._vocab_size))
        return llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._end_token_ids)


class _Vocabulary:
    """Our tokenizer in llguidance's interface."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = tokenizer.all_token_bytes(vocab_size)
        self.special_token_ids = [token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size]
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._id_of = {text: i for i, text in enumerate(self.tokens) if text and i not in special}
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of exactly these bytes: the tokenizer's, unless it changes the text. SentencePiece prepends a space,
        which a grammar that forces the text would then force too."""
        token_ids = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == text:
            return token_ids
        return self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[int]:
        """Greedy longest-match tokens of the text, up to the first byte that no token begins with."""
        token_ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._id_of), None)
            if end is None:
                break
            token_ids.append(self._id_of[text[start:end]])
            start = end
        return token_ids


def _grammar(structure: StructuredOutputsParams) -> str:
    """A request's grammar in llguidance's format."""
    _check_size(structure)
    if structure.regex is not None:
        # \d as in JSON Schema: 0 to 9, not the 600 digits of Unicode; llguidance does not accept an empty pattern
        return llguidance.LLMatcher.grammar_from_lark(
            f"start: /{llguidance.regex_to_lark(structure.regex, 'd') or '()'}/"
        )
    if structure.choice is not None:
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, structure.choice)))
    if structure.grammar is not None:
        return llguidance.LLMatcher.grammar_from_lark(structure.grammar)
    schema = {"type": "object"} if structure.json is None else structure.json
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_schema(text)
        return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE, overrides={"lenient": False})
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_schema", f"the schema cannot be used: {_one_line(str(error))}") from error


def check_grammar(params: SamplingParams) -> None:
    """Raises: RequestError if the grammar of a whole run cannot be compiled; needs no vocabulary."""
    if params.structure is None:
        return
    problem = llguidance.LLMatcher.validate_grammar(_grammar(params.structure))
    if problem:
        kind = params.structure.kind
        raise RequestError(f"invalid_{kind}", f"the {kind} cannot be used: {_one_line(problem)}")


def _check_size(structure: StructuredOutputsParams) -> None:
    """Raises: RequestError for a grammar that would take too long to compile."""
    for kind, text in (("regex", structure.regex), ("grammar", structure.grammar)):
        if text is not None and len(text) > _MAX_TEXT:
            raise RequestError(f"invalid_{kind}", f"the {kind} has {len(text):,} characters, allowed: {_MAX_TEXT:,}")
    choices = structure.choice or ()
    if len(choices) > _MAX_CHOICES or sum(map(len, choices)) > _MAX_TEXT:
        raise RequestError(
            "invalid_choice",
            f"there are {len(choices):,} choices with {sum(map(len, choices)):,} characters,"
            f" allowed: {_MAX_CHOICES:,} with {_MAX_TEXT:,}",
        )


def _check_schema(text: str) -> None:
    """Raises: RequestError for a JSON schema that would take too long to compile."""
    if len(text) > _MAX_TEXT:
        raise RequestError("invalid_schema", f"the schema has {len(text):,} characters, allowed: {_MAX_TEXT:,}")
    num_properties = [0]

    def count(fields: dict[str, object]) -> dict[str, object]:
        found = fields.get("properties")
        if isinstance(found, dict):
            num_properties.append(len(found))
        return fields

    with suppress(ValueError, RecursionError):  # no JSON: the library says why
        json.loads(text, object_hook=count)
    if max(num_properties) > _MAX_PROPERTIES or sum(num_properties) > _MAX_ALL_PROPERTIES:
        raise RequestError(
            "invalid_schema",
            f"the schema has {sum(num_properties):,} properties, {max(num_properties):,} of them in one object,"
            f" allowed: {_MAX_ALL_PROPERTIES:,} and {_MAX_PROPERTIES:,}",
        )


def _one_line(message: str) -> str:
    """The essential part of the library's messages, which also picture the grammar."""
    lines = message.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")[:300]
