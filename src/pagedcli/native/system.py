"""What the system gives the kernels: the cores that this process may use, and memory in huge pages."""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagedcli.later import torch

HUGE_PAGE = 1 << 21  # bytes
_MADV_HUGEPAGE = 14


def empty_in_huge_pages(count: int, dtype: "torch.dtype") -> "torch.Tensor":
    """An uninitialized CPU tensor [count], aligned to a huge page, with huge pages requested."""
    num_bytes = count * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    room = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % HUGE_PAGE
    tensor = room[start : start + num_bytes].view(dtype)
    ask_for_huge_pages(tensor)
    return tensor


def ask_for_huge_pages(tensor: "torch.Tensor") -> None:
    """Request huge pages for the part of a fresh CPU tensor that is aligned to them. Linux only."""
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if num_bytes > 0:
        # only advice: without it everything works, slower
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)


def release_free_memory() -> None:
    """Return what has been freed to the system, which the C library keeps where large and small blocks alternate."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores in the affinity mask, or fewer if a cgroup (version 2 or 1) grants less CPU time; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def limit_threads() -> None:
    """Lower torch's number of threads to the usable cores. A lower number set by the user stays."""
    if torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on this thread alone: in small operations threads mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _quota(cgroup: Path) -> float | None:
    """CPU seconds per second that the cgroup grants; None if unlimited or unreadable."""
    try:
        granted, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            granted, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    if granted == "max" or int(granted) <= 0:
        return None
    return int(granted) / int(period)
