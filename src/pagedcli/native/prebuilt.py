"""The libraries that a wheel brings along, one for each set of instructions: a machine needs no compiler for them.

scripts/build_libraries.py makes them; build.py loads the best one that this processor can run, else compiles.
"""

import functools
import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from pagedcli.errors import BackendError
from pagedcli.native.processor import processor_flags

SOURCE_DIR = Path(__file__).parent
LIBRARIES = SOURCE_DIR / "libraries"

_V3 = ("avx2", "bmi1", "bmi2", "fma", "f16c", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_DOTS = (*_V4, "avx512_vnni", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Instructions:
    """A set of instructions that a library is compiled for."""

    name: str
    machine: str  # value of platform.machine() and of wheel tags
    cpu: str  # value of the compiler's -mcpu
    needs: tuple[str, ...] = ()  # all that the compiler may use, by the system's names for a processor's features
    system: str = "linux"  # value of sys.platform

    @property
    def file_name(self) -> str:
        """Changes with the kernels' sources, so that no other version's library is ever loaded."""
        return f"{self.name}-{source_digest()}.so"


# The best first: a processor gets the first one that it can run.
TARGETS = (
    Instructions("tiles", "x86_64", "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
           (*_DOTS, "amx_tile", "amx_bf16", "amx_int8")),
    Instructions("avx512-bf16", "x86_64", "x86_64_v4+avx512vnni+avx512bf16", _DOTS),
    Instructions("avx512-vnni", "x86_64", "x86_64_v4+avx512vnni", (*_V4, "avx512_vnni")),
    Instructions("avx512", "x86_64", "x86_64_v4", _V4),
    Instructions("avx2-vnni", "x86_64", "x86_64_v3+avxvnni", (*_V3, "avx_vnni")),
    Instructions("avx2", "x86_64", "x86_64_v3", _V3),
    Instructions("bf16-i8mm", "aarch64", "generic+dotprod+bf16+i8mm", ("asimddp", "bf16", "i8mm")),
    Instructions("dotprod", "aarch64", "generic+dotprod", ("asimddp",)),
    Instructions("neon", "aarch64", "generic"),
    Instructions("m1", "arm64", "apple_m1", system="darwin"),
)  # fmt: skip


@functools.cache
def source_digest() -> str:
    """Twelve hexadecimal digits that identify the kernels' sources."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Installed:
    """A library that this installation brought along, and why it is the one to load."""

    name: str
    path: Path
    why: str  # reason in words; empty where nothing is better


def for_this_system() -> tuple[Instructions, ...]:
    """The targets of this machine's architecture and system, whether its processor can run them or not."""
    return tuple(each for each in TARGETS if (each.machine, each.system) == (platform.machine(), sys.platform))


def runnable() -> Instructions | None:
    """The best target that this processor can run, whether its library is here or not."""
    return next((each for each in for_this_system() if not _missing(each)), None)


def library(name: str | None = None) -> Installed | str:
    """The library of the best target for this processor, or of the named one; in words why there is none.

    Raises: BackendError if there is no library of that name here, or this processor cannot run it.
    """
    targets = for_this_system()
    target = runnable() if name is None else next(each for each in targets if each.name == name)
    if target is None:
        return "no wheel has kernels for this processor"
    if missing := _missing(target):
        raise BackendError(f"this processor cannot run the {target.name} library: it has no {missing}")
    path = LIBRARIES / target.file_name
    if not path.is_file():
        absent = f"this installation brought no {target.name} library"
        if name is not None:
            raise BackendError(absent, hint="install a wheel with kernels: make wheels")
        return absent
    better = targets[: targets.index(target)]
    why = f"{better[-1].name} needs {_missing(better[-1])}" if better else ""
    return Installed(target.name, path, "asked for" if name is not None else why)


def _missing(target: Instructions) -> str:
    """What the processor has not, but the target may use."""
    flags = processor_flags()
    return ", ".join(need for need in target.needs if need not in flags)
