"""Parses a line of the input into a request: plain, chat or OpenAI batch line, with its own sampling parameters.

Used by batch.prompts. Any error in a line is a RequestError with a stable code; nothing else is raised. Chat messages
are in OpenAI's format, reduced to what a text model's chat template accepts.
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from pagedcli.batch.columns import INVALID_ROW, Columns
from pagedcli.batch.decisions import Asked, Question, read_questions, run_questions
from pagedcli.batch.embeddings import FIELDS as EMBED_FIELDS
from pagedcli.batch.embeddings import Embedding
from pagedcli.batch.grammar import Guides
from pagedcli.batch.lines import Line
from pagedcli.batch.scoring import FIELDS as SCORE_FIELDS
from pagedcli.batch.scoring import ScoredTokens, ScoreRequest, check_generates_nothing
from pagedcli.batch.tokenizer import StopCheckers
from pagedcli.config import RunConfig, in_words, tools_problem
from pagedcli.core.requests import FinishedRequest
from pagedcli.core.scoring import SCORING
from pagedcli.errors import RequestError, UsageError
from pagedcli.sampling_params import SamplingParams

ChatMessage = dict[str, Any]  # role, content (text, list of text parts, or None), and all that templates may use
ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; as in transformers the first counts


def read_messages(messages: Any) -> list[ChatMessage]:
    """Validated messages with all their fields. Raises: RequestError 'invalid_messages'."""
    if not isinstance(messages, list) or not messages:
        raise _invalid("'messages' must be a list with at least one message")
    return [_read_message(message, place) for place, message in enumerate(messages)]


def with_system_prompt(messages: list[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    """The messages preceded by `system_prompt`, unless they have a system message."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _read_message(message: Any, place: int) -> ChatMessage:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise _invalid(f"{where} must be an object with 'role' and 'content'")
    role = message.get("role")
    if role not in ROLES:
        wrong = f"{where} has no role" if role is None else f"{where}.role is {str(role)[:40]!r}"
        raise _invalid(f"{wrong}, known: {', '.join(ROLES)}")
    content = message.get("content")
    _check_content(content, where, may_be_absent=bool(message.get("tool_calls")))
    fields = {name: value for name, value in message.items() if value is not None}
    if (reasoning := next((fields[name] for name in _REASONING if name in fields), None)) is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    # templates expect 'system'; 'developer' is OpenAI's newer name for it
    return {**fields, "role": "system" if role == "developer" else role, "content": content}


def _check_content(content: Any, where: str, *, may_be_absent: bool) -> None:
    if isinstance(content, str) or (content is None and may_be_absent):
        return
    if not isinstance(content, list) or not content:
        raise _invalid(f"{where}.content must be a string or a list of text parts")
    for place, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else None
            raise _invalid(f"{where}.content[{place}] is {str(kind)[:40]!r}, only text parts are supported")


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_messages", message)


RowShape = Literal["plain", "chat.completion", "text_completion", "list"]

_MAX_PROMPTS = 10_000  # limit per line
_SHAPES: dict[str, RowShape] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_SHAPES |= {"/v1/embeddings": "list"}
_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
_ALIASES = {
    "max_completion_tokens": "max_tokens",
    "guided_regex": "regex",
    "num_beams": "beam_width",  # transformers
    "num_return_sequences": "n",  # transformers
}
_GRAMMAR_FIELDS = ("response_format", "regex", "structured_outputs")
_BEAM_FIELDS = ("use_beam_search", "best_of")  # names of older vLLM; best_of, or else n, is the number of beams
_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message")  # true or false, in the body as vLLM has them
_REQUEST_FIELDS = frozenset(("prompt", "messages", "tools", "cache_salt", "chat_template_kwargs", "top_logprobs"))
_REQUEST_FIELDS |= {*_CHAT_FIELDS, *_BEAM_FIELDS, *SCORE_FIELDS, "questions", "embed"}
_GUIDED_FIELDS = {"guided_json": "json", "guided_choice": "choice", "guided_grammar": "grammar"}  # vLLM's older names
_ENVELOPE_FIELDS = frozenset(("id", "custom_id", "method", "url", "body"))
# arguments of apply_chat_template that are not template variables
_TEMPLATE_SETTINGS = frozenset(
    ("conversation", "conversations", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation")
) | {
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "continue_final_message",
}
# about accounting, not about the answer
_HARMLESS_FIELDS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options", "model")
)
# would change the answer: ignoring them would give something other than requested
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {  # field: values without effect
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "web_search_options": (),
}
# a line without these has the parameters of the run
_PARAM_FIELDS = _SAMPLING_FIELDS | _GUIDED_FIELDS.keys() | {"top_logprobs", *_BEAM_FIELDS}
_USED_FIELDS = _SAMPLING_FIELDS | _REQUEST_FIELDS | _GUIDED_FIELDS.keys()
_SETTINGS = (_USED_FIELDS | _ALIASES.keys()) - {"prompt", "messages", "embed"}
_KNOWN = _USED_FIELDS | _ALIASES.keys() | _ENVELOPE_FIELDS | _UNSUPPORTED_FIELDS.keys()
LINE_FIELDS = _KNOWN - {"method", "url"}  # what a column of a table may be called to count as a field of the row
_JSON_FIELDS = frozenset(("messages", "body", "response_format", "chat_template_kwargs", "logit_bias")) | frozenset(
    ("tools", "structured_outputs", "stop_token_ids", "guided_choice", "continuations", "questions")
)  # may be JSON in a cell of text
# fields of one number, or true or false, which a cell of text may hold
NUMBERS = (_SAMPLING_FIELDS | _ALIASES.keys() | {"top_logprobs", *_BEAM_FIELDS, *SCORE_FIELDS, *_CHAT_FIELDS}) - (
    _JSON_FIELDS | {"stop", "regex", "guided_regex"}
)


class RowPrompt(msgspec.Struct, eq=False):
    """One prompt of a row: what its line asks for, what the engine gets, and what comes of it."""

    token_ids: list[int]
    params: SamplingParams
    is_chat: bool = False  # whether the chat template wrote it
    text: str | None = None  # text to tokenize; None: the line has the tokens
    lowers_max_tokens: bool = False  # the line leaves the limit to the run; after admission: it was lowered
    messages: list[ChatMessage] | None = None  # a chat, until the template has written its text
    template_kwargs: dict[str, Any] = {}  # variables for the chat template
    tools: list[dict[str, Any]] | None = None  # shown by the chat template; in a line None: the run's
    scoring: ScoreRequest | None = None  # texts to score; None: the line generates
    asked: Asked | None = None  # the question that follows, whose options are scored
    embedding: Embedding | None = None  # its vector is wanted
    scored: ScoredTokens | None = None  # the tokens of what is scored
    stop_checkers: StopCheckers | None = None  # None: no stop strings
    guides: Guides | None = None  # None: no grammar
    output: FinishedRequest | None = None  # None: unfinished
    texts: list[str] = []  # one per sample

    @property
    def result(self) -> FinishedRequest:
        assert self.output is not None, "the prompt is finished"
        return self.output

    @property
    def computed_ids(self) -> list[int]:
        """The tokens that its first sequence computes: with those of an only continuation, but for the last one."""
        if self.scored is None or len(self.scored.continuations) != 1:
            return self.token_ids
        return self.token_ids + self.scored.continuations[0][:-1]

    @property
    def has_stops(self) -> bool:
        return bool(self.params.stop_strings or self.params.stop_token_ids)

    @property
    def has_marks(self) -> bool:
        """Whether marks of reasoning count: a grammar has none, and special tokens in the text are wanted as they
        are."""
        return self.is_chat and self.guides is None and self.params.skip_special_tokens


class BatchRow(msgspec.Struct, eq=False):
    """A line of the input, from parsing to its output row, which repeats id and kept columns even if the rest of the
    line is invalid."""

    line: Line
    id: str | int | None = None
    shape: RowShape = "plain"
    kept: dict[str, Any] = {}  # columns of the line
    prompts: list[RowPrompt] = []  # mostly one; none: invalid, or done by an earlier run
    cache_salt: str | None = None
    error: RequestError | None = None  # why the line is invalid
    number: int | None = None  # rows that were started before; None: not started
    key: bytes = b""  # its repeats.request_key, once it has prompts

    def read_head(self, document: dict[str, Any], columns: Columns) -> RequestError | None:
        """Take id, shape and kept columns from the line. Returns what is wrong with them."""
        name = next((name for name in columns.ids if document.get(name) is not None), "")
        row_id, url = document.get(name), document.get("url")
        is_number = isinstance(row_id, int) and not isinstance(row_id, bool) and row_id.bit_length() <= 63
        self.id = row_id if is_number or isinstance(row_id, str) else None
        if not columns.sources and ("body" in document or "url" in document):
            self.shape = (_SHAPES.get(url) if isinstance(url, str) else None) or "chat.completion"
        if columns.copies:
            self.kept = columns.kept(document)
        known = ", ".join(_SHAPES)
        if INVALID_ROW in document:
            return RequestError("invalid_row", str(document[INVALID_ROW]))
        if name and self.id is None:
            return RequestError("invalid_request", f"{name} must be a string or a 64-bit integer")
        if self.shape == "plain":
            return None
        if url is None:
            return RequestError("unsupported_endpoint", f"a batch line needs a 'url': {known}")
        if url not in list(_SHAPES):  # a list compares, whatever type the url has
            return RequestError("unsupported_endpoint", f"url is {_shown(url)}, known: {known}")
        if not isinstance(self.id, str):
            return RequestError("invalid_request", "a batch line needs a 'custom_id' that is a string")
        return None


_MOST_KNOWN = 1000  # different parameters that are kept: most lines of a file have the same


class RequestParser:
    """Reads what lines ask for. For a note at the end `ignored` counts lines with fields that had no effect, and
    `first_lines` has the first one of each."""

    def __init__(self, defaults: SamplingParams, run: RunConfig) -> None:
        self.ignored: Counter[str] = Counter()
        self.first_lines: dict[str, int] = {}
        self._defaults = defaults
        self._default_fields = msgspec.structs.asdict(defaults)
        self._known: dict[bytes, SamplingParams] = {}  # parameters as JSON -> themselves, checked
        self._run = run
        self._asked = self._all_asked(run_questions(run))  # of rows without questions of their own, or continuations

    def parse(self, document: dict[str, Any], row: BatchRow) -> None:
        """Give a row the salt and the prompts of its line. Raises: RequestError with a code of this module."""
        body, shape = document, row.shape
        if shape != "plain":
            self._check_envelope(document, row)
            body = document["body"]
        body = {_ALIASES.get(name, name): value for name, value in body.items() if value is not None}
        if "logprobs_from" in body and "text" in body:
            if "prompt" in body:
                raise RequestError("invalid_request", "'logprobs_from' needs 'text' or 'prompt', not both")
            body["prompt"] = body.pop("text")
        embedding = self._embedding(body, shape)
        self._check_unknown(body, row)
        scoring = ScoreRequest.of(body)
        asked = [] if scoring is not None or embedding is not None else self._asked
        if "questions" in body:
            check_generates_nothing("questions", body, *SCORE_FIELDS)
            asked = self._all_asked(read_questions(body["questions"]))
        scores = scoring is not None or bool(asked) or embedding is not None
        if not scores:
            params = self._sampling_params(body, shape)
        else:
            params = SCORING
            self._ignore((name for name in body if name in _SAMPLING_FIELDS), row)
            if shape not in ("plain", "list"):
                raise RequestError("unsupported_parameter", "an OpenAI batch line cannot be scored; use a plain line")
        messages = read_messages(body["messages"]) if "messages" in body else None
        prompts = read_prompts(body["prompt"]) if "prompt" in body else []
        if bool(prompts) == (messages is not None):
            what = "both" if prompts else "neither"
            raise RequestError("invalid_request", f"a line needs either 'prompt' or 'messages', this one has {what}")
        if scores and len(prompts) > 1 and shape == "plain":
            raise RequestError("invalid_request", f"a line to score has one prompt, this one {len(prompts):,}")
        if shape != "plain" and (messages is None) == (shape == "chat.completion"):
            wanted = "messages" if shape == "chat.completion" else "prompt"
            raise RequestError("invalid_request", f"the body of a {document['url']} line needs {wanted!r}")
        row.cache_salt = _typed(body, "cache_salt", str, None)
        new = partial(
            RowPrompt,
            params=params,
            lowers_max_tokens="max_tokens" not in body,
            template_kwargs=_template_kwargs(body, in_chat=messages is not None),
            tools=_tools(body, in_chat=messages is not None),
            scoring=scoring,
            embedding=embedding,
        )
        if messages is None:
            row.prompts = [new([], text=each) if isinstance(each, str) else new(each) for each in prompts]
        else:
            row.prompts = [new([], messages=messages)]
        if asked:
            row.prompts = [msgspec.structs.replace(row.prompts[0], asked=each) for each in asked]

    def _embedding(self, body: dict[str, Any], shape: RowShape) -> Embedding | None:
        """None if no vector is wanted. Changes: body, as Embedding.of does."""
        name = "input" if shape == "list" else "embed"
        if shape == "list" or name in body:
            check_generates_nothing(name, body, *SCORE_FIELDS, "questions")
            return Embedding.of(body, self._run, name)
        is_other = not self._run.embed or any(name in body for name in (*SCORE_FIELDS, "questions"))
        return None if is_other else Embedding.of(body, self._run, None)

    def _all_asked(self, questions: Sequence[Question]) -> list[Asked]:
        asked = [each for question in questions for each in question.asked(self._run)]
        if len(asked) > _MAX_PROMPTS:
            raise RequestError("invalid_question", f"{len(asked):,} questions and orders, allowed: {_MAX_PROMPTS:,}")
        return asked

    def _check_envelope(self, document: dict[str, Any], row: BatchRow) -> None:
        if document.get("method", "POST") != "POST":
            raise RequestError("invalid_request", f"method is {document['method']!r}, only 'POST' is known")
        if not isinstance(document.get("body"), dict):
            raise RequestError("invalid_request", "a batch line needs a 'body' that is an object")
        self._ignore((name for name in document if name not in _ENVELOPE_FIELDS), row)

    def _check_unknown(self, body: dict[str, Any], row: BatchRow) -> None:
        unknown = []
        for name, value in body.items():
            if name in _USED_FIELDS or name in _HARMLESS_FIELDS:
                continue
            if name in _UNSUPPORTED_FIELDS:
                if value not in (harmless := _UNSUPPORTED_FIELDS[name]):
                    words = [word for word in harmless if isinstance(word, str) and word]
                    other = f", or use {' or '.join(words)}" if words else ""
                    raise RequestError("unsupported_parameter", f"{name!r} is not supported; leave it out{other}")
            elif row.shape != "plain" or name not in _ENVELOPE_FIELDS:
                unknown.append(name)
        self._ignore(unknown, row)

    def _ignore(self, names: Iterable[str], row: BatchRow) -> None:
        for name in names:
            if self._run.strict:
                raise RequestError("unknown_field", f"{without_effect(name)} (--strict)")
            if len(self.ignored) < 1000 or name in self.ignored:
                self.ignored[name] += 1
                self.first_lines.setdefault(name, row.line.number)

    def _sampling_params(self, body: dict[str, Any], shape: RowShape) -> SamplingParams:
        if _PARAM_FIELDS.isdisjoint(body):
            return self._defaults
        given = {name: value for name, value in body.items() if name in _SAMPLING_FIELDS}
        if "logprobs" in given or "top_logprobs" in body:
            given["logprobs"] = _num_logprobs(given.get("logprobs"), body.get("top_logprobs"), shape)
        if any(name in body for name in _BEAM_FIELDS):
            given |= _beams(body)
        guided = {_GUIDED_FIELDS[name]: value for name, value in body.items() if name in _GUIDED_FIELDS}
        if guided:
            given["structured_outputs"] = guided
        if any(name in given for name in _GRAMMAR_FIELDS):  # a line's own grammar replaces the run's
            given = dict.fromkeys(_GRAMMAR_FIELDS) | given
        default = self._defaults.max_tokens
        if "max_tokens" not in given and isinstance(given.get("min_tokens"), int) and default is not None:
            given["max_tokens"] = max(default, given["min_tokens"])
        try:
            key = msgspec.json.encode(given)
        except (TypeError, ValueError, OverflowError):  # Tables have other types, and JSON integers of any length.
            key = None
        if key is None or (params := self._known.get(key)) is None:
            try:
                params = msgspec.convert({**self._default_fields, **given}, SamplingParams, str_keys=True)
            except msgspec.ValidationError as error:
                raise RequestError("invalid_parameter", in_words(str(error))) from error
            if key is not None and len(self._known) < _MOST_KNOWN:
                self._known[key] = params
        return params


def without_effect(name: str) -> str:
    """What to say of a field that nobody knows: `max_token has no effect: max_tokens?`."""
    near = difflib.get_close_matches(name, sorted(_KNOWN), n=1, cutoff=0.75)
    return f"{name} has no effect" + (f": {near[0]}?" if near and near[0] != name else "")


def decode_line(content: bytes | None) -> dict[str, Any]:
    """The JSON object of a line; None is a line that was too long to read. Raises: RequestError."""
    if content is None:
        raise RequestError("line_too_long", "the line is over 16 MiB; it was skipped")
    try:
        document = msgspec.json.decode(content)
    except UnicodeDecodeError as error:
        raise RequestError("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError("invalid_json", f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RequestError("invalid_request", f"a line must be a JSON object, this one is {_json_type(document)}")
    if (key := _repeated_key(document, content)) is not None:
        raise RequestError("invalid_request", f"the line has {key!r} twice")
    return document


def _repeated_key(document: dict[str, Any], content: bytes) -> str | None:
    """A key that the line's object has twice, of which `document` holds the last value; None if there is none."""
    if b"\\u" not in content:
        for key in document:
            if content.count(b'"%b"' % key.encode()) != 1:
                break
        else:
            return None  # nearly every line, without decoding it again
    try:
        pairs = json.loads(content, object_pairs_hook=list, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise RequestError("invalid_json", "not JSON: nested too deeply") from error
    return next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), None)


def used_columns(name: str, names: list[str], columns: Columns) -> list[str]:
    """The columns of the table `name` that its lines need. Raises: UsageError."""
    if repeated := [column for column, number in Counter(names).items() if number > 1]:
        raise UsageError(f"{name} has two columns with the name {repeated[0]!r}", hint="rename one of them")
    text = {"text"} if "logprobs_from" in names else set[str]()
    text |= {"embed"} & set(names)
    prompts = columns.sources or {"prompt", "messages", "body"} | text
    missing = sorted(prompts.difference(names))
    if missing if columns.sources else len(missing) == len(prompts):
        wanted = repr(missing[0]) if columns.sources else "'prompt', 'messages' or 'body'"
        hint = "--field names the column that holds the prompts"
        raise UsageError(
            f"{name} has no column {wanted}; its columns: {', '.join(names)}",
            hint=hint if columns.template is None else "the template takes its texts from columns of the input",
        )
    used = {*LINE_FIELDS, *columns.ids, *columns.keep, *prompts, *text, *(EMBED_FIELDS if "embed" in text else ())}
    return [column for column in names if columns.keep_all or column in used]


def line_of(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The line that the cells of a table's row are, by column: without nulls, its `body` merged into it."""
    line = {
        name: _plain("" if name in columns.filled_in else name, value)
        for name, value in row.items()
        if value is not None and value == value
    }
    body = None if "body" in columns.sources else line.pop("body", None)
    return line | body if isinstance(body, dict) else line


def _plain(name: str, value: Any) -> Any:
    """A cell as a JSON value: structs without nulls, maps as objects, JSON text decoded."""
    if name in _JSON_FIELDS and isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value  # the request parser reports the error
    if isinstance(value, dict):
        return {key: _plain("", item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):  # a map
            return {str(key): _plain("", item) for key, item in value}
        return [_plain("", item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, float) and value.is_integer():  # pandas stores integers with nulls as floats
        return int(value)
    return value


def request_of(document: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The part of a line that is its request. With a field or a template for the prompt these are the prompt and the
    sampling parameters: everything else in the line is data. Raises: RequestError if the line lacks a field."""
    if columns.template is not None:
        settings = _SETTINGS - columns.template.names
        return {key: each for key, each in document.items() if key in settings} | columns.template.fill(document)
    name = columns.prompt
    if name is None and document.keys() <= _KNOWN:
        return document
    if name is None:
        used = {*columns.ids} | (set(document) if columns.keep_all else set(columns.keep))
        used -= {"text"} if "logprobs_from" in document else set()
        used -= {*EMBED_FIELDS} if "embed" in document else set()
        return {name: value for name, value in document.items() if name in _KNOWN or name not in used}
    if name not in document:
        raise RequestError("invalid_request", f"no field {name!r}")
    value = document[name]
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        value = first
    request = {key: each for key, each in document.items() if key in _SETTINGS}
    return request | {"messages" if isinstance(first, dict) else "prompt": value}


def read_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Text or token ids, or a list of either, as the completions endpoint accepts. Raises: RequestError."""
    if isinstance(prompt, str):
        return [prompt]
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    wanted: Any = list[int] if not several else list[str] if isinstance(prompt[0], str) else list[list[int]]
    try:
        prompts = msgspec.convert(prompt, wanted)
    except msgspec.ValidationError as error:
        raise RequestError(
            "invalid_request", f"'prompt' must be text, token ids, or a list of either: {in_words(str(error), 'it')}"
        ) from error
    if several and len(prompts) > _MAX_PROMPTS:
        raise RequestError("invalid_request", f"'prompt' has {len(prompts):,} prompts, allowed: {_MAX_PROMPTS:,}")
    return prompts if several else [prompts]


def _num_logprobs(logprobs: Any, top_logprobs: Any, shape: RowShape) -> Any:
    """vLLM's single number from OpenAI's two fields (chat) or one (completions); the type is checked later."""
    if logprobs is True and shape != "text_completion":
        return 0 if top_logprobs is None else top_logprobs
    if logprobs is False and top_logprobs is None:
        return None
    if top_logprobs is not None:
        raise RequestError("invalid_parameter", "'top_logprobs' needs 'logprobs': true")
    if shape == "chat.completion" or isinstance(logprobs, bool):
        wanted = "true or false" if shape == "chat.completion" else "a number"
        raise RequestError("invalid_parameter", f"'logprobs' must be {wanted}")
    return logprobs


def _beams(body: dict[str, Any]) -> dict[str, Any]:
    """beam_width by the fields of older vLLM. Raises: RequestError if they contradict each other."""
    wanted, best_of = _typed(body, "use_beam_search", bool, False), body.get("best_of")
    if not wanted and best_of not in (None, 1, body.get("n", 1)):
        raise RequestError(
            "unsupported_parameter", f"best_of is {_shown(best_of)}, which is only supported with use_beam_search"
        )
    if not wanted:
        return {"beam_width": None} if "use_beam_search" in body else {}
    width = body.get("beam_width", body.get("n") if best_of is None else best_of)
    if width is None:
        raise RequestError("invalid_parameter", "use_beam_search needs 'beam_width' (or best_of, n)")
    return {"beam_width": width}


def _tools(body: dict[str, Any], *, in_chat: bool) -> list[dict[str, Any]] | None:
    """The line's own tools. None: those of the run. Raises: RequestError."""
    if body.get("tool_choice") == "none":
        return []
    tools: list[dict[str, Any]] | None = body.get("tools")
    if tools is None:
        return None
    if (problem := tools_problem(tools)) is not None:
        raise RequestError("invalid_request", problem)
    if tools and not in_chat:
        raise RequestError("invalid_request", "'tools' needs 'messages'")
    return tools


def _template_kwargs(body: dict[str, Any], *, in_chat: bool) -> dict[str, Any]:
    """Variables for the chat template. A line must not contain a template: that is a program, which may never end."""
    ends = {name: _typed(body, name, bool, None) for name in _CHAT_FIELDS if name in body}
    if ends and not in_chat:
        raise RequestError("invalid_request", f"{next(iter(ends))!r} needs 'messages'")
    given: dict[str, Any] = _typed(body, "chat_template_kwargs", dict[str, Any], {})
    for name in given:
        if name in _TEMPLATE_SETTINGS:
            raise RequestError(
                "unsupported_parameter",
                f"chat_template_kwargs must not contain {name!r}",
                hint="set a template for the whole run with --chat-template",
            )
    given = given | ends
    if given.get("continue_final_message") and given.get("add_generation_prompt", True):
        raise RequestError(
            "invalid_request", "'continue_final_message' needs 'add_generation_prompt': false: no new message begins"
        )
    return given


def _typed(body: dict[str, Any], name: str, wanted: Any, default: Any) -> Any:
    if name not in body:
        return default
    try:
        return msgspec.convert(body[name], wanted)
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", in_words(str(error), name)) from error


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A value for a message, shortened to one line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
