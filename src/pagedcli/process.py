"""What belongs to the process as a whole: Ctrl-C, garbage collection, memory that the system refuses, closing.

Imports nothing slow, as __main__ installs the handler of Ctrl-C before anything else is imported.
"""

import atexit
import errno
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Self

from pagedcli.errors import ConfigError

EXIT_INTERRUPTED = 130  # 128 + the signal's number, as shells do
_NEW_OBJECTS = 20_000
# torch's allocator, torch's and Python's maps, the dynamic loader, C++, threads, CUDA, numpy
_REFUSED = re.compile(
    r"can(?:no|')t allocate memory|failed to map segment|bad_alloc|bad_array_new_length|can't start new thread"
    r"|out of memory|unable to allocate|memory allocation",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:allocate|mmap|allocation of) ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WITH_TORCH = 2**28  # bytes for data, Python's modules, threads and a small model, on top of torch's libraries


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


@contextmanager
def interrupts_raised() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt within this context, so that files and the terminal can be put in order."""
    is_main = threading.current_thread() is threading.main_thread()  # Python sets handlers only there
    ends_at_once = is_main and signal.getsignal(signal.SIGINT) is _end_at_once
    if ends_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends_at_once and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # no run has set its own
            end_on_interrupt()


@contextmanager
def on_signals(act: Callable[[], None], numbers: Iterable[int] = (signal.SIGINT, signal.SIGTERM)) -> Iterator[None]:
    """Signals only call `act` within this context."""
    is_main = threading.current_thread() is threading.main_thread()  # Python delivers signals only there
    before = {each: signal.signal(each, lambda *_: act()) for each in numbers if is_main}
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


def address_space() -> tuple[int, int] | None:
    """The bytes that `ulimit -v` allows this process, and those of them that are left; None: it has no limit."""
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        return limit, max(0, limit - int(file.read().split()[0]) * resource.getpagesize())


def check_room_for_torch() -> None:
    """Raises: ConfigError if `ulimit -v` leaves too little to load torch, which otherwise ends the process."""
    if (space := address_space()) is None or (torch := find_spec("torch")) is None or torch.origin is None:
        return
    needed = _WITH_TORCH + sum(file.stat().st_size for file in Path(torch.origin).parent.glob("lib/*.so*"))
    if space[1] < needed:
        message = f"not enough memory to load torch and a model: they take {_shown(needed)} or more, and ulimit -v"
        raise ConfigError(f"{message} {_shown(space[0])} leaves {_shown(space[1])}", hint="raise ulimit -v")


def shortage(error: BaseException, what: str = "this", hint: str | None = None) -> ConfigError | None:
    """The error to show for one that says that memory has run out; None if it says something else. `what`: what the
    memory was for; `hint` names the flag that lowers it."""
    is_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not is_memory and not _REFUSED.search(str(error)):
        return None
    message = f"not enough memory for {what}"
    if (asked := _ASKED.search(str(error))) is not None:
        message += f": {_shown(float(asked[1]) * _UNITS[asked[2]])} more could not be had"
    if (space := address_space()) is not None:
        message += f" (ulimit -v allows {_shown(space[0])}, {_shown(space[1])} of it are left)"
        hint = f"{hint}, or raise ulimit -v" if hint else "raise ulimit -v"
    return ConfigError(message, hint=hint or "end other programs, or use a machine or container with more memory")


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


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
