"""Messages on stderr, safe JSON on a terminal, and the clock of a run that somebody watches."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, TextIO

from pagedcli.printable import printable, printable_json, wrap_words


def is_interactive(*, with_stdout: bool = True) -> bool:
    """Whether an application may take the terminal: keys come from stdin, and it draws on stderr."""
    streams = [sys.stdin, sys.stderr, *([sys.stdout] if with_stdout else [])]
    plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return not plain and all(stream is not None and not stream.closed and stream.isatty() for stream in streams)


def say(text: str = "") -> None:
    """Print a line on stderr, where everything but data goes. If that is closed or full, the run continues without."""
    _print(printable(text) + "\n")


def say_notes(notes: Iterable[str]) -> None:
    """Print the harmless anomalies of what was read, a line each."""
    for note in notes:
        say(f"note: {note}")


def say_wrapped(text: str, *, indent: int = 4) -> None:
    """Print a line on stderr, wrapped between words at the terminal's width; a pipe gets one line."""
    width = _terminal_width()
    if width is None:
        say(text)
        return
    text = printable(text)
    first = text[: len(text) - len(text.lstrip())]
    say("\n".join(wrap_words(text.strip(), width, indent=" " * indent, first=first, break_long_words=False)))


def _terminal_width() -> int | None:
    """Columns of the terminal that stderr is; None if it is none."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return max(40, shutil.get_terminal_size().columns)


def _print(text: str) -> None:
    if sys.stderr is None:  # closed; print() would take stdout
        return
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Drop what is left in the buffer of a broken stream, and all that follows: Python flushes it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ProgressLine:
    """One line on stderr that changes on a terminal; elsewhere a line now and then."""

    def __init__(self, *, line_every_s: float) -> None:
        self._is_live = is_interactive(with_stdout=False)
        self._every_s = 0.2 if self._is_live else line_every_s
        self._start_s = self._shown_s = time.monotonic()

    def show(self, text: Callable[[float], str]) -> None:
        """Show the text, made from the elapsed seconds, unless the last one is too recent."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._every_s:
            return
        self._shown_s = now_s
        line = text(now_s - self._start_s)
        (self.show_now if self._is_live else say)(line)

    def show_now(self, text: str) -> None:
        """Show the text on a terminal, however recent the last one is."""
        if self._is_live:
            _print(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")

    def close(self) -> None:
        """Remove the line."""
        self.show_now("")


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show what takes some seconds while it does, on a terminal."""
    line = ProgressLine(line_every_s=float("inf"))
    line.show_now(text)
    try:
        yield
    finally:
        line.close()


class TerminalJson:
    """JSON lines for a terminal, with control characters escaped."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, line: bytes) -> int:
        return self._stream.write(printable_json(line))

    def flush(self) -> None:
        self._stream.flush()


class HeldClock:
    """A monotonic clock in nanoseconds that stands still while it is held: waiting for a reader or a key is no time of
    the engine. For one thread."""

    def __init__(self) -> None:
        self._num_held_ns = 0  # the sum so far

    def __call__(self) -> int:
        return time.perf_counter_ns() - self._num_held_ns

    @contextmanager
    def held(self) -> Iterator[None]:
        """The time within this context does not pass on the clock."""
        now_ns = self()
        try:
            yield
        finally:
            self._num_held_ns += self() - now_ns
