"""Ctrl-C before and after a command runs, while modules are loaded and unloaded: a short message and exit code 130.

Used by __main__ and cli.main; imports nothing slow.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130  # 128 + the signal's number, as shells do


def install() -> None:
    """From now on Ctrl-C ends the process at once; inside `as_exceptions` it is a KeyboardInterrupt."""
    signal.signal(signal.SIGINT, _stop_at_once)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt, which gives time to clean up files."""
    if signal.getsignal(signal.SIGINT) is not _stop_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _stop_at_once)


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    # an exception could be raised in an import or an exit handler, which print a traceback or swallow it
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
