"""Tool calls in an answer, as names and arguments, where a chat format marks them.

The format is that of the tokenizer's tokens, whatever the model is called, as in batch.reasoning. Used by batch.rows,
for chats with tools.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from pagedcli.batch.reasoning import Channels, Span, find_format

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer

Tools = list[dict[str, Any]]  # tools in OpenAI's form


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


Found = tuple[list[Span], list[ToolCall]]  # spans outside the calls, and the calls in their order
Read = Callable[["Tokenizer", Ids[int], Tools], list[ToolCall]]  # raises ValueError for tokens without calls


def find_tool_format(tokenizer: "Tokenizer") -> "ToolFormat | None":
    """The format whose marks are tokens; None: there is none."""
    reasoning = find_format(tokenizer)
    if isinstance(reasoning, Channels):
        return ChannelCalls(tokenizer, reasoning)
    for opening, closing, read in _MARKS:
        first, last = tokenizer.token_id(opening), None if closing is None else tokenizer.token_id(closing)
        if first is not None and (closing is None) == (last is None):
            return MarkedCalls(tokenizer, first, last, read, may_be_unmarked=read is _llama)
    return None


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Calls after a mark, up to another one."""

    tokenizer: "Tokenizer"
    start: int
    end: int | None  # None: up to the next call or the end of the output
    read: Read
    may_be_unmarked: bool  # whether an answer that is nothing but calls of known tools needs no mark

    def find(self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], spans: list[Span], tools: Tools) -> Found:
        """The calls in these spans of an output."""
        outside: list[Span] = []
        calls: list[ToolCall] = []
        for first, last in spans:
            while (start := _place(output_token_ids, self.start, first, last)) < last:
                outside.append((first, start))
                end = _place(output_token_ids, self.start if self.end is None else self.end, start + 1, last)
                is_open = self.end is not None and end == last
                calls += self._calls(output_token_ids[start + 1 : end], tools, is_open=is_open)
                first = end if self.end is None else min(end + 1, last)
            outside.append((first, last))
        if calls or not self.may_be_unmarked or len(spans) != 1:
            return outside, calls
        return self._unmarked(output_token_ids, spans, tools)

    def _calls(self, token_ids: Ids[int], tools: Tools, *, is_open: bool) -> list[ToolCall]:
        return _read(self.read, self.tokenizer, token_ids, tools, "the call has no end" if is_open else None)

    def _unmarked(self, output_token_ids: Ids[int], spans: list[Span], tools: Tools) -> Found:
        calls = self._calls(output_token_ids[slice(*spans[0])], tools, is_open=False)
        known = {tool["function"]["name"] for tool in tools}
        return ([], calls) if all(call.name in known for call in calls) else (spans, [])


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """Messages to a tool, whose header names it: harmony."""

    tokenizer: "Tokenizer"
    channels: Channels

    def find(self, prompt_token_ids: Ids[int], output_token_ids: Ids[int], spans: list[Span], tools: Tools) -> Found:
        """See MarkedCalls. A call in the reasoning counts, too."""
        calls: list[ToolCall] = []
        called: set[int] = set()  # ends of the messages
        for message in self.channels.messages(prompt_token_ids, output_token_ids):
            header = self.tokenizer.decode(message.header, skip_special_tokens=False)
            if (recipient := re.search(r"\bto=([^\s<]+)", header)) is not None:
                name = recipient[1].removeprefix("functions.")
                body = output_token_ids[slice(*message.body)]
                calls += _read(partial(_harmony, name), self.tokenizer, body, tools)
                called.add(message.body[1])
        return [span for span in spans if span[1] not in called], calls


ToolFormat = MarkedCalls | ChannelCalls  # how a chat format marks calls


def _place(token_ids: Ids[int], token_id: int, first: int, last: int) -> int:
    """Where a token is among those from `first`; `last`: nowhere before it."""
    return next((place for place in range(first, last) if token_ids[place] == token_id), last)


def _read(
    read: Read, tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools, problem: str | None = None
) -> list[ToolCall]:
    """The calls in tokens, or their text with the problem."""
    try:
        if problem is None:
            return read(tokenizer, token_ids, tools)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        problem = str(error) or "nested too deeply"
    return [ToolCall(text=tokenizer.decode(token_ids).strip(), error=problem)]


# ---------------------------------------------------------------------- one call, by format


def _tagged(tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """JSON (Qwen 2.5 and 3, Hermes), <function=NAME> with parameters (Qwen3-Coder, Qwen3.5), keys and values (GLM)."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False).strip()
    if text.startswith("{"):
        return [_from_json(msgspec.json.decode(text))]
    if text.startswith("<function="):
        match = re.fullmatch(r"<function=([^>\n]+)>(.*)</function>", text, re.DOTALL)
        pairs = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    else:
        match = re.fullmatch(r"([^\s<]+)\s*(<arg_key>.*</arg_value>)?", text, re.DOTALL)
        pairs = r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>"
    if match is None:
        raise ValueError("neither JSON nor a name with arguments")
    name, body = match[1].strip(), match[2] or ""
    if left := re.sub(pairs, "", body, flags=re.DOTALL).strip():
        raise ValueError(f"{left[:40]!r} is not an argument")
    types = _types_of(name, tools)
    return [ToolCall(name, {key: _typed(value, types.get(key)) for key, value in re.findall(pairs, body, re.DOTALL)})]


_GEMMA_PARTS = re.compile(r'<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"]+)(?=\s*:)', re.DOTALL)


def _gemma(tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """call:NAME{key:value}, which is JSON with bare keys, and strings between tokens of their own."""

    def as_json(part: re.Match[str]) -> str:
        return part[2] or json.dumps(part[3] if part[1] is None else part[1])

    text = tokenizer.decode(token_ids, skip_special_tokens=False).strip()
    if (match := re.fullmatch(r"call:([^\s{]+)\s*(\{.*\})", text, re.DOTALL)) is None:
        raise ValueError("not of the form call:NAME{...}")
    return [ToolCall(match[1], _arguments(msgspec.json.decode(_GEMMA_PARTS.sub(as_json, match[2]))))]


def _mistral(tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """A JSON list of calls, or NAME[ARGS]{...}, with an id before the arguments in some versions."""
    marks = [tokenizer.token_id("[CALL_ID]"), tokenizer.token_id("[ARGS]")]
    places = [place for place, token_id in enumerate(token_ids) if token_id in marks]
    if places:
        name, arguments = tokenizer.decode(token_ids[: places[0]]), tokenizer.decode(token_ids[places[-1] + 1 :])
        return [ToolCall(name.strip(), _arguments(msgspec.json.decode(arguments)))]
    text = tokenizer.decode(token_ids).strip()
    if (match := re.fullmatch(r"([\w.-]+)\s*(\{.*)", text, re.DOTALL)) is not None:
        return [ToolCall(match[1], _arguments(msgspec.json.decode(match[2])))]
    calls = msgspec.json.decode(text)
    return [_from_json(call) for call in (calls if isinstance(calls, list) else [calls])]


def _llama(tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """JSON objects, separated by semicolons, or calls as in Python: NAME(key=value), NAME.call(key=value), a list."""
    text = tokenizer.decode(token_ids).strip()
    if not text.startswith("{"):
        return _from_python(text)
    calls, place = [], 0
    while place < len(text):
        _, end = json.JSONDecoder().raw_decode(text, place)
        calls.append(_from_json(msgspec.json.decode(text[place:end])))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return calls


def _harmony(name: str, tokenizer: "Tokenizer", token_ids: Ids[int], tools: Tools) -> list[ToolCall]:
    """The arguments as JSON; the header has said the name."""
    return [ToolCall(name, _arguments(msgspec.json.decode(tokenizer.decode(token_ids).strip() or "{}")))]


_MARKS: tuple[tuple[str, str | None, Read], ...] = (
    ("<tool_call>", "</tool_call>", _tagged),
    ("<|tool_call>", "<tool_call|>", _gemma),
    ("[TOOL_CALLS]", None, _mistral),
    ("<|python_tag|>", None, _llama),
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
    found = ast.parse(text, mode="eval").body
    calls = found.elts if isinstance(found, ast.List) else [found]
    if not calls or not all(isinstance(call, ast.Call) and not call.args for call in calls):
        raise ValueError("neither JSON nor calls with named arguments")
    return [_from_python_call(cast(ast.Call, call)) for call in calls]


def _from_python_call(call: ast.Call) -> ToolCall:
    arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
    if len(arguments) != len(call.keywords):
        raise ValueError("arguments without a name")
    try:
        arguments = msgspec.json.decode(msgspec.json.encode(arguments))
    except TypeError as error:  # a set, a complex number
        raise ValueError("an argument is not a JSON value") from error
    return ToolCall(ast.unparse(call.func).removesuffix(".call"), cast("dict[str, Any]", arguments))


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_KINDS |= {list: "array", dict: "object"}
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def _types_of(name: str, tools: Tools) -> dict[str, set[str]]:
    """The types that a tool's schema allows, by parameter."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    parameters = functions[0].get("parameters") if functions else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return {key: _types(schema) for key, schema in properties.items()} if isinstance(properties, Mapping) else {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type", [])
    types = {each for each in ([declared] if isinstance(declared, str) else declared) if isinstance(each, str)}
    return types.union(*(_types(each) for union in ("anyOf", "oneOf") for each in schema.get(union) or ()))


def _typed(text: str, types: set[str] | None) -> Any:
    """An argument as JSON of a type that its schema allows, otherwise as text."""
    try:
        value = msgspec.json.decode(_AS_JSON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    kind = _KINDS[type(value)]
    is_allowed = types and kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return value if is_allowed else text
