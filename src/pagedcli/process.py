"""What belongs to the process as a whole: Ctrl-C, garbage collection, closing.

Imports nothing slow, as __main__ installs the handler of Ctrl-C before anything else is imported.
"""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Self

EXIT_INTERRUPTED = 130  # 128 + the signal's number, as shells do
_NEW_OBJECTS = 20_000


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once; inside `interrupts_raised` it is a KeyboardInterrupt."""
    signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    # an exception could fall into an import or an exit handler, which print a traceback or swallow it
    os.write(2, b"interrupted\n")
    for act in _last_acts:
        with suppress(OSError):
            act()
    os._exit(EXIT_INTERRUPTED)


_last_acts: list[Callable[[], object]] = []


def at_end(act: Callable[[], object]) -> None:
    """Call this when the process ends, by Ctrl-C, too."""
    atexit.register(act)
    _last_acts.append(act)


def interrupts_raised() -> AbstractContextManager[None]:
    """Ctrl-C raises KeyboardInterrupt within this context, so that files and the terminal can be put in order."""
    ends_at_once = signal.getsignal(signal.SIGINT) is _end_at_once  # otherwise a run has set its own
    return _handled({signal.SIGINT: signal.default_int_handler} if ends_at_once else {})


def on_signals(
    act: Callable[[], None], numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM)
) -> AbstractContextManager[None]:
    """Signals only call `act` within this context."""
    return _handled(dict.fromkeys(numbers, lambda *_: act()))


@contextmanager
def _handled(handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()  # Python sets handlers and delivers signals there
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Modules are imported without garbage collections, which take a seventh of that time. At the end what they made is
    as old as if there had been some."""
    collects, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if collects and len(sys.modules) > num_modules and not _is_frozen():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """The garbage collector does not look through what exists already: with torch's modules that takes 0.2 s each time,
    every few seconds of a run. Most objects of a row die by their reference count."""
    is_outermost, threshold = not _is_frozen(), gc.get_threshold()
    if is_outermost:
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        if is_outermost:
            gc.set_threshold(*threshold)
            gc.unfreeze()


def _is_frozen() -> bool:
    """Whether somebody has frozen what exists. Takes 30 ms where it is so, as objects are counted one by one."""
    return gc.get_freeze_count() > 1000  # Python 3.12 begins with 375


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Within this context a thread works, until the event that it is given is set, at the end."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Closes:
    """An object that a `with` block closes at its end."""

    __slots__ = ()

    def close(self) -> None:
        """Release what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
