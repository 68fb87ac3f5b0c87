"""The number of cores this process may use. torch respects the affinity mask, but not a container's CPU quota."""

import math
import os
from pathlib import Path

import torch

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
