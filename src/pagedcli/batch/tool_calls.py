"""Tool calls in an answer, as names and arguments, where a chat format marks them.

The format is that of the tokenizer's tokens, whatever the model is called, as in batch.reasoning. Used by batch.rows,
for chats with tools.
"""

import ast
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar, cast
from urllib.parse import unquote

import msgspec

from pagedcli.batch.reasoning import Channels, TokenSpan, find_format
from pagedcli.batch.tokenizer import Tokenizer

Tools = list[dict[str, Any]]  # tools in OpenAI's form
_MOST_MARKS = 64  # in one call, as parts of its arguments: an output of nothing but marks must not take minutes


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or the text of one that cannot be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str | None = None  # why the text is not a call; None: it is one

    @property
    def plain(self) -> dict[str, Any]:
        """The call in a plain row."""
        if self.error is not None:
            return {"text": self.text, "error": self.error}
        return {"name": self.name, "arguments": self.arguments}

    def openai(self, call_id: str) -> dict[str, Any]:
        """The call in OpenAI's form, whose arguments are JSON as text; of one that cannot be read, its text."""
        arguments = msgspec.json.encode(self.arguments).decode() if self.error is None else self.text
        call = {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
        return call if self.error is None else call | {"error": self.error}


Calls = tuple[list[TokenSpan], list[ToolCall]]  # spans outside the calls, and the calls in their order
Read = Callable[["Tokenizer", Ids[int], Tools], list[ToolCall]]  # raises ValueError for tokens without calls


def find_tool_format(tokenizer: Tokenizer) -> "ToolFormat | None":
    """The format whose marks are tokens; None: there is none."""
    reasoning = find_format(tokenizer)
    if isinstance(reasoning, Channels):
        return ChannelCalls(tokenizer, reasoning)
    for opening, closing, read, length in _MARKS:
        first, last = tokenizer.token_id(opening), None if closing is None else tokenizer.token_id(closing)
        if first is not None and (closing is None) == (last is None):
            return MarkedCalls(tokenizer, first, last, read, length, may_be_unmarked=read is _llama)
    return None


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Calls after a mark, up to another one."""

    tokenizer: Tokenizer
    start: int
    end: int | None  # None: up to the next call or the end of the output
    read: Read
    length: Callable[[str], int]  # characters of the call that a text begins with, which may hold marks; 0: no call
    may_be_unmarked: bool  # whether an answer that is nothing but calls of known tools needs no mark

    def find(
        self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], spans: list[TokenSpan], tools: Tools
    ) -> Calls:
        """The calls in these spans of an output."""
        if self.may_be_unmarked and len(spans) == 1 and (calls := self._unmarked(output_token_ids, spans[0], tools)):
            return [], calls
        outside: list[TokenSpan] = []
        calls = []
        for first, last in spans:
            while (start := _place(output_token_ids, self.start, first, last)) < last:
                outside.append((first, start))
                found, first = self._after(output_token_ids, start + 1, last, tools)
                calls += found
            outside.append((first, last))
        return outside, calls

    def _after(self, ids: Ids[int], first: int, last: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """The calls after a mark, and where the text continues. Marks within an argument are part of it."""
        closing, num_closing = (self.start, 0) if self.end is None else (self.end, 1)  # tokens of the mark after a call
        ends = list(islice((place for place in range(first, last) if ids[place] == closing), _MOST_MARKS))
        limit = ends[-1] if len(ends) == _MOST_MARKS else last
        if self.end is None and limit == last:
            ends.append(last)
        read = partial(_read, self.read, self.tokenizer, tools=tools)
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        calls = read(ids[first : ends[0]]) if ends else []
        if calls and all(call.error is None for call in calls):
            return calls, ends[0] + num_closing
        length = self.length(decode(ids[first:limit]))
        later = bisect_left(ends, length, key=lambda end: len(decode(ids[first:end])))
        if later == len(ends):
            return read(ids[first:last], problem="the call has no end"), last
        longer = read(ids[first : ends[later]]) if later else []
        if longer and all(call.error is None for call in longer):
            return longer, ends[later] + num_closing
        return calls, ends[0] + num_closing

    def _unmarked(self, token_ids: Ids[int], span: TokenSpan, tools: Tools) -> list[ToolCall]:
        """The calls of an answer that is nothing but calls of known tools."""
        calls = _read(self.read, self.tokenizer, token_ids[slice(*span)], tools)
        known = {tool["function"]["name"] for tool in tools}
        return calls if all(call.name in known for call in calls) else []


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """Messages to a tool, whose header names it: harmony."""

    tokenizer: Tokenizer
    channels: Channels
    start: ClassVar[None] = None  # no token of its own begins a call

    def find(
        self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], spans: list[TokenSpan], tools: Tools
    ) -> Calls:
        """See MarkedCalls."""
        calls: list[ToolCall] = []
        called: set[int] = set()  # ends of the messages
        for message in self.channels.messages(prompt_token_ids, output_token_ids):
            if message.recipient is not None:
                name = message.recipient.removeprefix("functions.")
                body = output_token_ids[slice(*message.body)]
                calls += _read(partial(_harmony, name), self.tokenizer, body, tools)
                called.add(message.body[1])
        return [span for span in spans if span[1] not in called], calls


ToolFormat = MarkedCalls | ChannelCalls  # how a chat format marks calls


def _place(token_ids: Ids[int], token_id: int, first: int, last: int) -> int:
    """Where a token is among those from `first`; `last`: nowhere before it."""
    return next((place for place in range(first, last) if token_ids[place] == token_id), last)


def _read(
    read: Read, tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools, problem: str | None = None
) -> list[ToolCall]:
    """The calls in tokens, or their text with the problem."""
    try:
        if problem is None:
            return read(tokenizer, token_ids, tools)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        problem = str(error) or "nested too deeply"
    return [ToolCall(text=_without_end(tokenizer, token_ids), error=problem)]


# ---------------------------------------------------------------------- one call, by format


# calls, with the pattern of an argument, whose value ends where another argument or the end follows
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))", re.DOTALL)
_NAME_AND_KEYS = re.compile(r"([^\s<]+)\s*(<arg_key>.*</arg_value>)?", re.DOTALL)
_KEY_AND_VALUE = re.compile(
    r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def _tagged(tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """JSON (Qwen 2.5 and 3, Hermes), <function=NAME> with parameters (Qwen3-Coder, Qwen3.5), keys and values (GLM)."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False).strip()
    if text.startswith("{"):
        return [_from_json(msgspec.json.decode(text))]
    is_function = text.startswith("<function=")
    call, argument = (_FUNCTION, _PARAMETER) if is_function else (_NAME_AND_KEYS, _KEY_AND_VALUE)
    if (match := call.fullmatch(text)) is None:
        raise ValueError("neither JSON nor a name with arguments")
    name, body = match[1].strip(), match[2] or ""
    arguments, place, types = dict[str, Any](), 0, _types_of(name, tools)
    while (match := argument.match(body, place)) is not None:
        key, value = match.groups()
        arguments[key], place = _typed(value, types.get(key)), match.end()
    if left := body[place:].strip():
        raise ValueError(f"{left[:40]!r} is not an argument")
    return [ToolCall(name, arguments)]


def _tagged_length(text: str) -> int:
    found = re.search(r"(?:</function>|</arg_value>)(?=\s*</tool_call>)", text)
    return _json_length(text) or (0 if found is None else found.end())


_AS_JSON = {"True": "true", "False": "false", "None": "null"}
_QUOTE_AS_JSON = {"\\'": "'", '"': '\\"'}
_QUOTED = r"""<\|"\|>(.*?)(?:<\|"\|>|\Z)|"((?:[^"\\]|\\.)*)(?:"|\Z)|'((?:[^'\\]|\\.)*)(?:'|\Z)"""
_GEMMA_PARTS = re.compile(rf"""{_QUOTED}|([^\s{{}}\[\],:"'][^{{}}\[\],:"]*)(:?)""", re.DOTALL)
_GEMMA_END = re.compile(rf"{_QUOTED}|(<tool_call\|>)", re.DOTALL)


def _gemma(tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """call:NAME{key:value}, which is JSON with bare keys, strings between tokens or single quotes, and None."""

    def as_json(part: re.Match[str]) -> str:
        marked, double, single, bare, colon = part.groups()
        if bare is not None:
            bare = bare.strip()
            return f"{json.dumps(bare)}:" if colon else _AS_JSON.get(bare, bare)
        if marked is not None:
            return json.dumps(marked)
        if single is not None:
            double = re.sub(r"\\.|\"", lambda each: _QUOTE_AS_JSON.get(each[0], each[0]), single, flags=re.DOTALL)
        return f'"{double}"'

    text = tokenizer.decode(token_ids, skip_special_tokens=False).strip()
    if (match := re.fullmatch(r"call:([^\s{]+)\s*(\{.*\})", text, re.DOTALL)) is None:
        raise ValueError("not of the form call:NAME{...}")
    return [ToolCall(match[1], _arguments(msgspec.json.decode(_GEMMA_PARTS.sub(as_json, match[2]))))]


def _gemma_length(text: str) -> int:
    return next((part.start() for part in _GEMMA_END.finditer(text) if part.lastindex == 4), 0)


_NAMED_JSON = re.compile(r"([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def _mistral(tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """A JSON list of calls, or NAME[ARGS]{...}, with an id before the arguments in some versions."""
    text = _without_end(tokenizer, token_ids)
    if (match := _NAMED_JSON.fullmatch(text)) is not None:
        return [ToolCall(match[1], _arguments(msgspec.json.decode(match[2])))]
    calls = msgspec.json.decode(text)
    return [_from_json(call) for call in (calls if isinstance(calls, list) else [calls])]


_NEXT_OBJECT = re.compile(r"[;\s]*(?=\{)")


def _llama(tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """JSON objects, separated by semicolons, or calls as in Python: NAME(key=value), NAME.call(key=value), a list."""
    text = _without_end(tokenizer, token_ids)
    if not text.startswith("{"):
        return _from_python(text)
    calls, place = [], 0
    while place < len(text):
        _, end = json.JSONDecoder().raw_decode(text, place)
        calls.append(_from_json(msgspec.json.decode(text[place:end])))
        following = _NEXT_OBJECT.match(text, end)
        place = len(text) if following is None else following.end()
    return calls


def _json_length(text: str) -> int:
    """Characters of the JSON that a text begins with or has after a name; 0: there is none."""
    match, place = re.match(r"[^{<]*?(?=\{|\[\s*[{\]])", text), 0
    with suppress(ValueError, RecursionError):
        while match is not None:
            _, place = json.JSONDecoder().raw_decode(text, match.end())
            match = _NEXT_OBJECT.match(text, place)
    return place


def _without_end(tokenizer: Tokenizer, token_ids: Ids[int]) -> str:
    """The text of tokens with the special ones, except those at its end, which end an answer."""
    special = set(tokenizer.special_token_ids)
    last = next((place for place in range(len(token_ids), 0, -1) if token_ids[place - 1] not in special), 0)
    return tokenizer.decode(token_ids[:last], skip_special_tokens=False).strip()


def _harmony(name: str, tokenizer: Tokenizer, token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """The arguments as JSON; the header has said the name."""
    return [ToolCall(name, _arguments(msgspec.json.decode(tokenizer.decode(token_ids).strip() or "{}")))]


_MARKS: tuple[tuple[str, str | None, Read, Callable[[str], int]], ...] = (
    ("<tool_call>", "</tool_call>", _tagged, _tagged_length),
    ("<|tool_call>", "<tool_call|>", _gemma, _gemma_length),
    ("[TOOL_CALLS]", None, _mistral, _json_length),
    ("<|python_tag|>", None, _llama, _json_length),
)

# ---------------------------------------------------------------------- names, arguments and their types


def _from_json(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a JSON value without a name")
    arguments = call.get("arguments", call.get("parameters"))
    return ToolCall(call["name"], _arguments({} if arguments is None else arguments))


def _arguments(arguments: Any) -> dict[str, Any]:
    """Arguments that must be an object, or its JSON as text."""
    if isinstance(arguments, str):
        arguments = msgspec.json.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    return arguments


def _from_python(text: str) -> list[ToolCall]:
    if re.match(r"\[?\s*[\w.]+\(", text) is None:
        raise ValueError("neither JSON nor calls with named arguments")
    with warnings.catch_warnings(action="ignore"):  # about odd escapes in the model's text
        found = ast.parse(text, mode="eval").body
    calls = found.elts if isinstance(found, ast.List) else [found]
    if not calls or not all(isinstance(call, ast.Call) and not call.args for call in calls):
        raise ValueError("neither JSON nor calls with named arguments")
    return [_from_python_call(cast(ast.Call, call)) for call in calls]


def _from_python_call(call: ast.Call) -> ToolCall:
    try:
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
        decoded = msgspec.json.decode(msgspec.json.encode(arguments))
    except TypeError as error:  # a complex number, or a key that is a list
        raise ValueError("an argument is not a JSON value") from error
    if len(arguments) != len(call.keywords):
        raise ValueError("arguments without a name, or two of one name")
    return ToolCall(ast.unparse(call.func).removesuffix(".call"), decoded)


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_KINDS |= {list: "array", dict: "object"}


def _types_of(name: str, tools: Tools) -> dict[str, set[str]]:
    """The types that a tool's schema allows, by parameter."""
    root = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None)
    known: dict[int, set[str]] = {}
    found: dict[str, set[str]] = {}
    for schema in _with_references(root, root):
        if isinstance(properties := schema.get("properties"), Mapping):
            found |= {key: _types(each, root, known) for key, each in properties.items()}
    return found


def _types(schema: Any, root: Any, known: dict[int, set[str]]) -> set[str]:
    """The types that a schema allows; empty: it names none. `known`: by the schemas' ids, also those that are begun."""
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = set()
    stated: list[set[str]] = []
    for each in _with_references(schema, root):
        declared = each.get("type")
        types = {kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)}
        stated += [types | {"integer"} if "number" in types else types]
        stated += [{_KINDS.get(type(value), "") for value in _list(each, "enum")}]
        stated += [{_KINDS.get(type(each["const"]), "")}] if "const" in each else []
        stated += [set().union(*(_types(one, root, known) for one in _list(each, key))) for key in ("anyOf", "oneOf")]
    known[id(schema)] = types = set.intersection(*filter(None, stated)) if any(stated) else set()
    return types


def _with_references(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """A schema, and those that hold with it: what its $ref points to, and its allOf."""
    found, coming = dict[int, Mapping[str, Any]](), [schema]  # by the schemas' ids
    for each in coming:  # the list grows meanwhile
        if not isinstance(each, Mapping) or id(each) in found:
            continue
        found[id(each)] = each
        coming += _list(each, "allOf")
        if isinstance(reference := each.get("$ref"), str):
            coming.append(_referred(reference, root))
    return list(found.values())


def _referred(reference: str, root: Any) -> Any:
    """What a JSON pointer into the same schema points to; None: nothing."""
    if not reference.startswith("#"):
        return None
    for part in unquote(reference).split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _typed(text: str, types: set[str] | None) -> Any:
    """An argument as JSON of a type that its schema allows, otherwise as text."""
    try:
        value = msgspec.json.decode(_AS_JSON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    kind = "integer" if isinstance(value, float) and value.is_integer() else _KINDS[type(value)]
    return value if types and kind != "string" and kind in types else text
