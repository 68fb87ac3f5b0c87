"""Ctrl-C while modules are loaded and unloaded: a short message and exit code 130. Where a terminal or a file must be
put in order: KeyboardInterrupt.

Used by __main__, cli.main, and whoever opens a screen or a temporary file; imports nothing slow.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130  # 128 + the signal's number, as shells do


def install() -> None:
    """From now on Ctrl-C ends the process at once; inside `as_exceptions` it is a KeyboardInterrupt."""
    signal.signal(signal.SIGINT, _stop_at_once)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt within this context, so that files and the terminal can be put in order."""
    is_main = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    if not is_main or signal.getsignal(signal.SIGINT) is not _stop_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a run has set its own since then
            signal.signal(signal.SIGINT, _stop_at_once)


@contextmanager
def on_signals(act: Callable[[], None], numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Signals only call `act` within this context."""
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals only there
        yield
        return
    before = [(number, signal.signal(number, lambda *_: act())) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    # an exception could fall into an import or an exit handler, which print a traceback or swallow it
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
