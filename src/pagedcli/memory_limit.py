"""Memory that the system refuses: what `ulimit -v` leaves, and an error for every form in which libraries report it.

Used by the command line, the planner and the loader. Free of torch.
"""

import errno
import importlib.util
import re
import sys
from pathlib import Path

from pagedcli.errors import ConfigError

# torch's allocator, torch's and Python's maps, the dynamic loader, C++, threads, CUDA, numpy
_REFUSED = re.compile(
    r"can(?:no|')t allocate memory|failed to map segment|bad_alloc|bad_array_new_length|can't start new thread"
    r"|out of memory|unable to allocate|memory allocation",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:allocate|mmap|allocation of) ([\d.]+) ?(bytes|[KMGT]iB)")
_WITH_TORCH = 2**28  # bytes for data, Python's modules, threads and a small model, on top of torch's libraries
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class MemoryShortage(ConfigError):
    """The system refused memory (exit code 2)."""


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
    """Raises: MemoryShortage if `ulimit -v` leaves too little to load torch, which otherwise ends the process."""
    if (space := address_space()) is None:
        return
    torch = importlib.util.find_spec("torch")
    libraries = Path(torch.origin).parent.glob("lib/*.so*") if torch is not None and torch.origin is not None else ()
    needed = sum(file.stat().st_size for file in libraries) + _WITH_TORCH
    if space[1] < needed:
        raise MemoryShortage(
            f"not enough memory to load torch and a model: they take {_shown(needed)} or more, and"
            f" ulimit -v {_shown(space[0])} leaves {_shown(space[1])}",
            hint="raise ulimit -v",
        )


def shortage(error: BaseException, what: str = "this", hint: str | None = None) -> MemoryShortage | None:
    """The error to show for one that says that memory has run out; None if it says something else.

    `what` the memory was for; `hint` names the flag that lowers it.
    """
    text = str(error)
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_system or _REFUSED.search(text)):
        return None
    message = f"not enough memory for {what}"
    if (asked := _ASKED.search(text)) is not None:
        message += f": {_shown(float(asked[1]) * _UNITS[asked[2]])} more could not be had"
    if (space := address_space()) is not None:
        message += f" (ulimit -v allows {_shown(space[0])}, {_shown(space[1])} of it are left)"
        hint = f"{hint}, or raise ulimit -v" if hint else "raise ulimit -v"
    return MemoryShortage(message, hint=hint or "end other programs, or use a machine or container with more memory")


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
