"""Chat templates: programs of others, rendered with bounds on time, memory and length.

Used by batch.tokenizer. Each is rendered in a process of its own, but for those that are known to be harmless.
"""

import importlib.util
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import msgspec
import xxhash

from pagedcli.errors import RequestError, UsageError
from pagedcli.files import read_whole
from pagedcli.later import chat_template_utils, jinja2, transformers

MAX_TEMPLATE_BYTES = 2**20
MAX_RENDERED = 2**24  # characters of a chat: as much as a line may have
MAX_RENDER_BYTES = 2**29  # memory that one chat may take in the process for templates
_FRAME = struct.Struct("<cQQ")  # kind, number of the request, bytes that follow
_ASKS_FOR_NULL = re.compile(r"content\W{0,3}(is\s+(not\s+)?|[!=]=\s*)none\b", re.IGNORECASE)
_ONE_WORD = [{"role": "user", "content": "word"}]
_PROCESS = "from pagedcli.batch.chat_template import serve; serve()"
# xxh3 of templates that are rendered in this process, as they cannot multiply text: that of the built-in model, and of
# MiMo, QwQ, Qwen2.5, Qwen3, DeepSeek-R1-Distill (Llama, Qwen), Gemma 2 and Phi 3.5
_KNOWN = frozenset((
    "de18b84d7cccc740", "0536ae9be84138fa", "72a0ae47d7d0e90b", "639547fe4d33fa67", "0283f874ff58d644",
    "f47cfd234bfcd76a", "5fec36a258d64550", "2c2e86beabccd2a4", "cd8aff863abd4554",
))  # fmt: skip


def read_template(template: str) -> str:
    """Jinja text unchanged; anything that does not look like Jinja is a path."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return read_whole(Path(template), MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        what = (
            error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason} at byte {error.start}"
        )
        raise UsageError(
            f"cannot read the chat template {template}: {what}", hint="--chat-template takes a file or Jinja text"
        ) from error


class _NoTemplateError(ValueError):
    """The text is no Jinja template."""


class ChatRenderer:
    """Renders conversations with the chat template of a transformers tokenizer, or with one that is passed in.

    `clock`: the time that templates see; None: now. `most_s`: seconds for a chat, which takes microseconds.
    """

    def __init__(self, tokenizer: Any, *, most_s: float = 5.0) -> None:
        self.clock: datetime | None = None
        self._tokenizer = tokenizer
        self._apart = _TemplateProcess(most_s)
        own = type(tokenizer).apply_chat_template  # a tokenizer that comes as code may have a method of its own
        self._renders_itself = own is not transformers.PreTrainedTokenizerBase.apply_chat_template

    def check(self, template: str) -> None:
        """Raises: UsageError if a text is no template, or exceeds a limit with a chat of one word."""
        try:
            self._render(template, _ONE_WORD, {})
        except Exception as error:  # what else it raises may be about the chat
            if isinstance(error, RequestError | _NoTemplateError):
                hint = "correct the template, or leave it out to use the tokenizer's own"
                raise UsageError(f"--chat-template: {error}", hint=hint) from error

    def render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises: RequestError if the template rejects it or exceeds a limit."""
        try:
            template = self._tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
            return self._render_best(template, messages, arguments)
        except RequestError:
            raise
        except Exception as error:  # a template is a program: even in its sandbox it may divide by zero or recurse
            what = f"the chat template rejected the messages: {_words(error)}"
            raise RequestError("chat_template_error", what) from error

    def _render_best(self, template: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """The text of the first form of the conversation in which the most text parts are shown."""
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        best, most, refusal = "", -2, Exception()
        for form in _forms(messages, template):
            try:
                text = self._render(template, form, arguments)
            except Exception as error:
                if isinstance(error, RequestError):
                    raise
                refusal = error
                continue
            if (num_shown := _num_shown(text, parts)) > most:
                best, most = text, num_shown
            if most == len(parts):
                return best
        if most == -2:
            raise refusal
        return best

    def _render(self, template: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Raises: RequestError if a limit was exceeded, otherwise what the template raised."""
        variables = {**self._tokenizer.special_tokens_map, **arguments, "chat_template": template}
        request = messages, variables, self.clock
        if self._renders_itself:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        if xxhash.xxh3_64_hexdigest(template.encode(errors="surrogatepass")) not in _KNOWN:
            return self._apart.render(template, request)
        text = _rendered(*request)
        _check_length(len(text))
        return text


def _forms(messages: list[dict[str, Any]], template: str) -> Iterator[list[dict[str, Any]]]:
    """A conversation in the forms that templates may want: first as transformers passes it on, with lists of text parts
    and with arguments of tool calls as objects; then with these as JSON, and with each content as one text."""
    if all(isinstance(each.get("content"), str) and "tool_calls" not in each for each in messages):
        yield messages
        return
    made: list[Any] = []
    for is_text in (False, True):
        for has_objects in (True, False):
            form = [_form(message, template, is_text=is_text, has_objects=has_objects) for message in messages]
            if form not in made:
                made.append(form)
                yield form


def _form(message: dict[str, Any], template: str, *, is_text: bool, has_objects: bool) -> dict[str, Any]:
    """A message with its content as it is or as text, and with arguments of tool calls as objects or as JSON."""
    form, content, calls = dict(message), message.get("content"), message.get("tool_calls")
    if content is None and is_text:
        form["content"] = ""
    elif content is None and not _ASKS_FOR_NULL.search(template):
        form.pop("content", None)  # the template would write "None"
    elif isinstance(content, list) and is_text:
        form["content"] = "\n".join(part["text"] for part in content)  # vLLM joins them so, too
    if isinstance(calls, list):
        form["tool_calls"] = [_call(call, has_objects=has_objects) for call in calls]
    return form


def _call(call: Any, *, has_objects: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if has_objects and isinstance(arguments, str):
        with suppress(msgspec.DecodeError, RecursionError):
            decoded = msgspec.json.decode(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
    elif not has_objects and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _num_shown(text: str, parts: list[dict[str, Any]]) -> int:
    """How many of these text parts are in a rendered text; -1 if one is there as data, not as text."""
    if any(repr(part) in text or json.dumps(part, ensure_ascii=False) in text for part in parts):
        return -1
    return sum(part["text"].strip() in text for part in parts)


def _rendered(messages: list[dict[str, Any]], variables: dict[str, Any], clock: datetime | None) -> str:
    """The text of a conversation without bounds. Raises: _NoTemplateError, or what the template raises."""
    _environment(variables["chat_template"]).globals["strftime_now"] = (clock or datetime.now()).strftime
    found: Any = chat_template_utils.render_jinja_template([messages], **variables)
    return str(found[0][0])


class _TemplateProcess:
    """A process that renders one conversation at a time, started when needed and again after it was ended.

    A template that exceeds a limit with a chat of one word would do so in every row, each time seconds later: it is
    not tried again.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._turn = threading.Lock()
        self._refused: dict[str, RequestError | None] = {}  # template -> its refusal; None: it works
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0  # of the last request

    def render(self, template: str, request: tuple[Any, ...]) -> str:
        """Raises: RequestError if a limit was exceeded, ValueError with what the template raised."""
        with self._turn:
            if template not in self._refused:
                self._refused[template] = None
                with suppress(ValueError):  # templates may reject it
                    try:
                        self._ask((_ONE_WORD, {"chat_template": template}, None))
                    except RequestError as error:
                        what = f"{error.message}, even for a one-word chat"
                        self._refused[template] = RequestError(
                            error.code, what, hint="correct it, or use --chat-template"
                        )
            if (refused := self._refused[template]) is not None:
                raise refused
            return self._ask(request)

    def _ask(self, request: tuple[Any, ...]) -> str:
        content = pickle.dumps((*request, self._most_s, MAX_RENDERED))  # whole, before any of it is written
        process, self._process = self._process or self._started(), None  # no other request until this one is answered
        reads, writes = process.stdout, process.stdin
        assert reads is not None, "a pipe"
        assert writes is not None, "a pipe"
        self._number += 1
        try:
            _write_frame(writes, b"r", self._number, content)
            kind, number, answer = _read_frame(reads)
            assert number == self._number, "the process answers one request at a time"
            self._process = process
        except (OSError, EOFError) as error:
            status = process.wait()
            if status == -signal.SIGALRM:
                raise _refusal("took", f"{self._most_s:g} s") from error
            what = f"the process that renders the chat template died: status {status}"
            raise RequestError("chat_template_error", what) from error
        finally:
            if self._process is None:
                _end(process)
        return _text_of(kind, answer.decode("utf-8", "surrogatepass"))

    def _started(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-c", _PROCESS, str(MAX_RENDER_BYTES)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        weakref.finalize(self, _end, process)
        return process


def _write_frame(writes: IO[bytes], kind: bytes, number: int, content: bytes) -> None:
    writes.write(_FRAME.pack(kind, number, len(content)))
    writes.write(content)
    writes.flush()


def _read_frame(reads: IO[bytes]) -> tuple[bytes, int, bytes]:
    """Raises: EOFError."""
    if len(head := reads.read(_FRAME.size)) < _FRAME.size:
        raise EOFError
    kind, number, size = _FRAME.unpack(head)
    if len(content := reads.read(size)) < size:
        raise EOFError
    return kind, number, content


def _text_of(kind: bytes, text: str) -> str:
    """The text of an answer. Raises: RequestError if a limit was exceeded, ValueError with what the template raised."""
    if kind == b"m":
        raise _refusal("needs", f"{MAX_RENDER_BYTES >> 20} MiB of memory")
    if kind in b"se":
        raise _NoTemplateError(text) if kind == b"s" else ValueError(text)
    _check_length(len(text))
    return text


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:  # closes the pipes
        pass


def _refusal(verb: str, limit: str) -> RequestError:
    return RequestError("chat_template_error", f"the chat template {verb} more than {limit}")


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_RENDERED:
        raise RequestError("chat_template_error", f"the chat template made over {MAX_RENDERED:,} characters")


@lru_cache(maxsize=64)
def _environment(template: str) -> Any:
    """The environment in which transformers renders a template. Raises: _NoTemplateError."""
    try:
        return chat_template_utils._compile_jinja_template(template).environment
    except jinja2.TemplateSyntaxError as error:
        raise _NoTemplateError(f"line {error.lineno}: {error.message}") from error


def serve() -> None:
    """The process that renders templates within bounds: answer requests until the pipe is closed.

    A request that takes too long ends the process with SIGALRM. Imports neither torch nor the engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reads, writes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A library that prints would spoil the answers.
    _import_alone("transformers", "utils", "chat_template_utils")  # before the memory is limited
    _limit_memory(int(sys.argv[1]))
    while True:
        try:
            _, number, content = _read_frame(reads)
        except EOFError:
            return
        *request, seconds, max_characters = pickle.loads(content)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        kind = b"t"
        try:
            text = _rendered(*request)[: max_characters + 1]
        except MemoryError:
            kind, text = b"m", ""
        except _NoTemplateError as error:
            kind, text = b"s", str(error)
        except Exception as error:  # the template is a program of others
            kind, text = b"e", _words(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(writes, kind, number, text.encode("utf-8", "surrogatepass"))


def _import_alone(package: str, part: str, module: str) -> None:
    """Import a module of a part of a package without what these import for others: in a third of the time."""
    found = importlib.util.find_spec(package)
    for name, folder in ((package, ""), (f"{package}.{part}", part)):
        sys.modules[name] = alone = ModuleType(name)
        alone.__path__ = [str(Path(each, folder)) for each in (found and found.submodule_search_locations) or ()]
    try:
        importlib.import_module(f"{package}.{part}.{module}")
    except ImportError:  # another version needs more of it
        for name in [each for each in sys.modules if each.partition(".")[0] == package]:
            del sys.modules[name]
        importlib.import_module(f"{package}.{part}.{module}")


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "they are nested too deeply"
    return str(error) or type(error).__name__


def _limit_memory(num_bytes: int) -> None:
    """Let allocations beyond `num_bytes` more than now fail. Systems without /proc have no such limit."""
    import resource

    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = num_pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
