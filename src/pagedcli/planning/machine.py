"""The machine as decisions see it: its GPUs, its memory, and software that attention backends lack.

Frozen values, read from this machine or made up (a GPU by name, tests). Used by engine.decide.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device."""

    name: str
    total_bytes: int
    free_bytes: int  # before anything is loaded
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware and software. Bytes are those of the host, or of this process's cgroup limit."""

    total_bytes: int
    available_bytes: int  # free for a process
    gpus: tuple[Gpu, ...] = ()
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
        current_gpu=torch.cuda.current_device() if gpus else 0,
    )


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
    """(total, available) bytes of the host, or of this process's cgroup limit."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total, available_memory()


def available_memory() -> int:
    """Available bytes of host memory, within the cgroup limit where it is readable."""
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no cgroup v2, or "max"
        limit, current = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - current)
    return available


def processor_name() -> str:
    """The name of the processor, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
