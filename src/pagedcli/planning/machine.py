"""The machine as decisions see it: its GPUs, its memory, and software that attention backends lack.

Frozen values, read from this machine or made up (a GPU by name, tests). Used by planning.decide.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from pagedcli.errors import address_space

FOR_THREADS = 2**27  # bytes of address space that the stacks of threads take, and small tensors
_CUDA_13_DRIVER, _CUDA_12_DRIVER = 580, 525  # the oldest drivers for wheels of CUDA 13 and 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device."""

    name: str
    total_bytes: int
    free_bytes: int  # bytes before anything is loaded
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware and software. Bytes are those of the host, or of this process's cgroup limit."""

    total_bytes: int
    available_bytes: int  # free for a process
    gpus: tuple[Gpu, ...] = ()
    unseen_gpu: str | None = None  # why torch sees no GPU although an NVIDIA driver is loaded
    current_gpu: int = 0  # the GPU that plain "cuda" means
    is_here: bool = True  # False: described by flags; all software is installed except what `missing` names
    missing: Mapping[str, str] = field(default_factory=dict)  # attention backend -> why it cannot run there

    def gpu(self, device: str) -> Gpu | None:
        """The GPU that a device's full name means, cuda:N; None for the CPU."""
        kind, _, index = device.partition(":")
        return self.gpus[int(index)] if kind == "cuda" else None


def this_machine(*, free_memory: bool = False) -> Machine:
    """This machine as it is now.

    `free_memory`: ask each GPU what is free there, which creates a CUDA context on it (some 0.5 GiB). Otherwise all of
    its memory counts as free; decisions do not depend on it.
    """
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index) if free_memory else (card.total_memory, card.total_memory)
        gpus.append(Gpu(name=card.name, total_bytes=total, free_bytes=free, capability=(card.major, card.minor)))
    total, available = host_memory()
    return Machine(
        total_bytes=total,
        available_bytes=available,
        gpus=tuple(gpus),
        unseen_gpu=None if gpus else unseen_gpu(),
        current_gpu=torch.cuda.current_device() if gpus else 0,
    )


def unseen_gpu(about: Path = Path("/proc/driver/nvidia/version"), devices: Path = Path("/dev")) -> str | None:
    """Why torch sees no GPU although an NVIDIA driver is loaded, and what to do; None: no driver is loaded.
    `about`: the file in which a loaded driver names its version."""
    try:
        found = re.search(r"Kernel Module.*?  (\d+)\.([\d.]+)", about.read_text())
    except OSError:
        return None
    driver, version = (None, "of an unknown version") if found is None else (int(found[1]), f"{found[1]}.{found[2]}")
    return f"an NVIDIA driver ({version}) is loaded, but {_why_unseen(driver, devices)}"


def _why_unseen(driver: int | None, devices: Path) -> str:
    """`driver`: the first part of its version; None: not known."""
    build, cuda = f"torch {torch.__version__}", torch.version.cuda
    wheels = "cu126" if driver is not None and driver < _CUDA_13_DRIVER else "cu130"
    install = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheels}"
    if cuda is None:
        return f"{build} is a CPU-only build; {install} brings one for this driver"
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs from {build}; unset it, or name one"
    needed = _CUDA_13_DRIVER if int(cuda.partition(".")[0]) >= 13 else _CUDA_12_DRIVER
    if driver is not None and driver < _CUDA_12_DRIVER:
        return f"{build} was built for CUDA {cuda}, which needs driver {needed}; install a newer driver"
    if driver is not None and driver < needed:
        return f"{build} was built for CUDA {cuda}, which needs driver {needed}; {install} brings one for this driver"
    if not any(devices.glob("nvidia[0-9]*")):
        return f"there is no {devices}/nvidia0 here; a container is started with its GPUs by --gpus all"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # in the words of torch or the driver
        return f"{build}, built for CUDA {cuda}, says: {str(error).partition(chr(10))[0]}"
    return f"{build}, built for CUDA {cuda}, finds no device"


def described_gpu(
    total_bytes: int, *, name: str = "GPU", capability: tuple[int, int] = (9, 0), num_gpus: int = 1
) -> Machine:
    """A machine with described GPUs, idle and with all software installed."""
    gpu = Gpu(name=name, total_bytes=total_bytes, free_bytes=total_bytes, capability=capability)
    total, available = host_memory()
    return Machine(total_bytes=total, available_bytes=available, gpus=(gpu,) * num_gpus, is_here=False)


def described_host(total_bytes: int) -> Machine:
    """A machine without GPUs, idle and with all software installed."""
    return Machine(total_bytes=total_bytes, available_bytes=total_bytes, is_here=False)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host, or of what this process's cgroup and `ulimit -v` allow."""
    host = psutil.virtual_memory()
    total, available = int(host.total), int(host.available)
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        limit, current = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        total, available = min(total, limit), min(available, limit - current)
    if (space := address_space()) is not None:
        total, available = min(total, space[0]), min(available, max(0, space[1] - FOR_THREADS))
    return total, available


def available_memory() -> int:
    """The available bytes of host_memory."""
    return host_memory()[1]
