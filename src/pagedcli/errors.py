"""The exception hierarchy, and memory that the system refuses. Every user error is a PagedcliError that says what is
wrong and what to do next.

Used by every package; imports none.
"""

import errno
import re
import sys
from importlib.util import find_spec
from pathlib import Path

EXIT_FATAL, EXIT_BAD_ROWS = 1, 3
# torch's allocator, torch's and Python's maps, the dynamic loader, C++, threads, CUDA, numpy
_REFUSED = re.compile(
    r"can(?:no|')t allocate memory|failed to map segment|bad_alloc|bad_array_new_length|can't start new thread"
    r"|out of memory|unable to allocate|memory allocation",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:allocate|mmap|allocation of) ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WITH_TORCH = 2**28  # bytes for data, Python's modules, threads and a small model, on top of torch's libraries


class PagedcliError(Exception):
    """An error that the user can fix: `message` says what and where, `hint` the next action."""

    exit_code = EXIT_FATAL

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PagedcliError):
    """A flag, an argument or a path named on the command line is wrong (exit code 2)."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration value is unknown, of the wrong type or impossible on this machine (exit code 2)."""


class ParameterError(PagedcliError, ValueError):
    """A parameter is out of range. Also a ValueError: decoders then report its location."""


class ModelError(PagedcliError):
    """A model folder cannot be used: unsupported architecture, missing or damaged weights."""


class MissingModelError(ModelError, UsageError):
    """The model named on the command line does not exist (exit code 2)."""


class BackendError(ConfigError):
    """An attention backend is unknown, or does not support what is required (exit code 2)."""


class RequestError(PagedcliError):
    """One request cannot be served. `code` is a stable identifier, e.g. 'context_length_exceeded'."""

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class TraceError(PagedcliError):
    """A trace file is damaged, of another schema version, or breaks an invariant."""


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
