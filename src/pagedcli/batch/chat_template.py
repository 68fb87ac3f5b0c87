"""Chat templates: programs of others, rendered with bounds on time, memory and length.

Used by batch.tokenizer. A template that cannot multiply text is rendered in this process, any other in one of its own.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from pagedcli.errors import RequestError, UsageError
from pagedcli.files import read_whole

MAX_TEMPLATE_BYTES = 2**20
MAX_RENDERED = 2**24  # characters of a chat: as much as a line may have
MAX_RENDER_BYTES = 2**29  # memory that one chat may take in the process for templates
_MAX_RENDER_S = 5.0  # a chat template takes microseconds
_MAX_ADDED = 16  # variables that one expression of a plain template adds up
_PROCESS = "from pagedcli.batch.chat_template import serve; serve()"
# the parts of a plain template, see is_plain
_SYNTAX = (
    *("Output", "TemplateData", "If", "Assign", "Break", "Continue", "Const", "Name", "NSRef", "Getattr", "Getitem"),
    *("Slice", "Compare", "Operand", "And", "Or", "Not", "CondExpr", "Test", "Keyword", "Neg", "Sub", "Add", "Concat"),
    "Tuple",
)
_FILTERS = ("trim", "length", "count", "default", "d", "first", "last", "items", "upper", "lower")
_ESCAPING = ("tojson", "string")
_METHODS = ("strip", "lstrip", "rstrip", "split", "startswith", "endswith", "get", "items", "keys", "values")
_FUNCTIONS = ("raise_exception", "namespace", "strftime_now")


def read_template(template: str) -> str:
    """Jinja text unchanged; anything that does not look like Jinja is a path."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return read_whole(Path(template), MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot read the chat template {template}: {what}", hint="--chat-template takes a file or Jinja text"
        ) from error


class ChatRenderer:
    """Renders conversations with the chat template of a transformers tokenizer, or with one that is passed in."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._limit = TimeLimit(_MAX_RENDER_S)
        self._apart = _TemplateProcess(tokenizer)

    def render(self, messages: Iterable[Any], arguments: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises: RequestError if the template rejects it or exceeds a limit."""
        try:
            template = self._tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
            if sys.platform == "win32" or is_plain(template):
                _bound_length(template)
                with self._limit:
                    text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            else:
                text = self._apart.render(messages, {**arguments, "chat_template": template})
        except TimeoutError as error:
            raise _refusal("took", f"{_MAX_RENDER_S:g} s") from error
        except RequestError:
            raise
        except Exception as error:  # a template is a program: even in its sandbox it may divide by zero or recurse
            what = str(error) or type(error).__name__
            raise RequestError("chat_template_error", f"the chat template rejected the messages: {what}") from error
        return text


class _TemplateProcess:
    """A process that renders one conversation at a time, started when needed and again after it was ended.

    A template that exceeds a limit with a chat of one word would do so in every row, each time seconds later: it is
    not tried again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._turn = threading.Lock()
        self._refused: dict[str, RequestError | None] = {}  # template -> its refusal; None: it works
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Iterable[Any], arguments: Mapping[str, Any]) -> str:
        template = arguments["chat_template"]
        with self._turn:
            if template not in self._refused:
                self._refused[template] = None
                with suppress(ValueError):  # templates may reject it
                    try:
                        self._ask([{"role": "user", "content": "word"}], {"chat_template": template})
                    except RequestError as error:
                        what = f"{error.message}, even for a chat of one word"
                        self._refused[template] = RequestError(error.code, what, hint="mend it, or use --chat-template")
            if (refused := self._refused[template]) is not None:
                raise refused
            return self._ask(messages, arguments)

    def _ask(self, messages: Iterable[Any], arguments: Mapping[str, Any]) -> str:
        """Raises: RequestError if a limit was exceeded, ValueError with what the template raised."""
        if self._process is None:
            command = [sys.executable, "-P", "-c", _PROCESS, str(MAX_RENDER_BYTES)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            weakref.finalize(self, _end, self._process)
        reads, writes = self._process.stdout, self._process.stdin
        assert reads is not None, "a pipe"
        assert writes is not None, "a pipe"
        with suppress(OSError, EOFError):
            special_tokens = dict(self._tokenizer.special_tokens_map)
            pickle.dump((messages, arguments, special_tokens, _MAX_RENDER_S, MAX_RENDERED), writes)
            writes.flush()
            return _answer(reads)
        status = self._process.wait()
        _end(self._process)
        self._process = None
        if status == -signal.SIGALRM:
            raise _refusal("took", f"{_MAX_RENDER_S:g} s")
        raise RequestError("chat_template_error", f"the process that renders the chat template died: status {status}")


def _answer(reads: IO[bytes]) -> str:
    kind, size = reads.read(1), int.from_bytes(reads.read(8), "little")
    if len(content := reads.read(size)) < size or not kind:
        raise EOFError
    text = content.decode("utf-8", "surrogatepass")
    if kind == b"m":
        raise _refusal("needs", f"{MAX_RENDER_BYTES >> 20} MiB of memory")
    if kind == b"e":
        raise ValueError(text)
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
def _bound_length(template: str) -> None:
    """Let a template fail that joins too much text, before it is joined."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template).environment.concat = _joined


def _joined(parts: Iterable[str]) -> str:
    num_characters, kept = 0, []
    for part in parts:
        num_characters += len(part)
        _check_length(num_characters)
        kept.append(part)
    return "".join(kept)


def serve() -> None:
    """The process that renders templates within bounds: answer requests until the pipe is closed.

    A request that takes too long ends the process with SIGALRM. Imports neither torch nor the engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reads, writes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # A library that prints would spoil the answers.
    from transformers import PreTrainedTokenizerBase

    _limit_memory(int(sys.argv[1]))
    while True:
        try:
            messages, arguments, special_tokens, seconds, max_characters = pickle.load(reads)
        except EOFError:
            return
        tokenizer: Any = SimpleNamespace(
            special_tokens_map=special_tokens, get_chat_template=lambda template, tools: template
        )
        signal.setitimer(signal.ITIMER_REAL, seconds)
        kind = b"t"
        try:
            text: Any = PreTrainedTokenizerBase.apply_chat_template(tokenizer, messages, tokenize=False, **arguments)
            text = text[: max_characters + 1]
        except MemoryError:
            kind, text = b"m", ""
        except Exception as error:  # the template is a program of others
            kind, text = b"e", str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_REAL, 0)
        content = text.encode("utf-8", "surrogatepass")
        writes.write(kind + len(content).to_bytes(8, "little") + content)
        writes.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let allocations beyond `num_bytes` more than now fail. Systems without /proc have no such limit."""
    import resource  # not on Windows

    try:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = num_pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@lru_cache(maxsize=64)
def is_plain(template: str) -> bool:
    """Whether the memory and the uninterruptible work of a template grow at most in proportion to the conversation.

    A plain template has the syntax listed here, and adds to a variable only what the conversation contains and at most
    one variable that grows. Its output is bounded by _joined, its loops by a TimeLimit.
    """
    from jinja2 import Environment, TemplateError, nodes

    if len(template) > MAX_TEMPLATE_BYTES:
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        every = list(tree.find_all(nodes.Node))
    except (TemplateError, RecursionError):
        return False
    targets = [
        (each.target, each.node if isinstance(each, nodes.Assign) else each.iter)
        for each in every
        if isinstance(each, nodes.Assign | nodes.For)
    ]
    assigned = {name for target, _ in targets for name in _names(target)}
    if not all(map(_is_plain_node, every)) or assigned & {*_FUNCTIONS, "loop"}:
        return False
    added = nodes.Add, nodes.Concat
    if any(len(_names(node)) > _MAX_ADDED for node in tree.find_all(added)):
        return False
    grown: set[str] = set()
    for _ in targets:  # one pass for each variable that another one grows by
        for target, value in targets:
            if _within(value, added) or not grown.isdisjoint(_names(value)):
                grown.update(_names(target))
    for node in tree.find_all(nodes.Assign):
        num_grown = sum(name in grown for name in _names(node.node))
        # `~` escapes what is in a list, and the filters what is in a text: doubled each time
        if num_grown > (0 if _within(node.node, nodes.Concat) else 1):
            return False
        if any(each.name in _ESCAPING for each in _within(node.node, nodes.Filter)):
            return False
    return True


def _is_plain_node(node: Any) -> bool:
    from jinja2 import nodes

    match node:
        case nodes.Filter():
            return node.name in _FILTERS or (node.name in _ESCAPING and not (node.args or node.kwargs))
        case nodes.Call(node=nodes.Getattr(attr=name)):
            return name in _METHODS
        case nodes.Call(node=nodes.Name(name=name)):
            return name in _FUNCTIONS
        case nodes.List() | nodes.Tuple(ctx="load"):
            return all(isinstance(item, nodes.Const) for item in node.items)
        case nodes.Mod():  # `loop.index0 % 2`; with a text on the left it would be a format
            return isinstance(node.left, nodes.Getattr) and _names(node.left) == ["loop"]
        case nodes.For():
            return not node.recursive
    return type(node).__name__ in _SYNTAX


def _within(node: Any, kinds: Any) -> list[Any]:
    return [each for each in (node, *node.find_all(kinds)) if isinstance(each, kinds)]


def _names(node: Any) -> list[str]:
    """The variables in an expression, each as often as it is there."""
    from jinja2 import nodes

    return [each.name for each in _within(node, (nodes.Name, nodes.NSRef))]


class TimeLimit:
    """A context that Python code must leave within some seconds, else TimeoutError is raised there. For code that
    may loop; a single long call of C is not interrupted. Any thread may enter it, also several at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()  # guards all below
        self._entered_s: dict[int, float] = {}  # thread -> time
        self._is_late: set[int] = set()  # threads in which the error was raised
        self._watch: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._entered_s[threading.get_ident()] = time.monotonic()
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_always, name="time limit", daemon=True)
                self._watch.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._entered_s.pop(thread, None)
            is_late = thread in self._is_late
            self._is_late.discard(thread)
        if is_late and kind is not TimeoutError:
            time.sleep(0.01)  # the error is raised when this returns, unless the code inside has caught it
            raise TimeoutError

    def _watch_always(self) -> None:
        """Look once in a while, and end when nobody is inside."""
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            with self._lock:
                if not self._entered_s:
                    self._watch = None
                    return
                latest_s = time.monotonic() - self._seconds
                for thread in [each for each, entered_s in self._entered_s.items() if entered_s < latest_s]:
                    del self._entered_s[thread]
                    self._is_late.add(thread)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
