"""The libraries that a wheel brings along, one for each set of instructions: a machine needs no compiler for them.

scripts/build_libraries.py makes them; build.py loads the best one that this processor can run, else compiles.
"""

import functools
import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from pagedcli.native.processor import processor_flags

SOURCE_DIR = Path(__file__).parent
LIBRARIES = SOURCE_DIR / "libraries"

_V3 = ("avx2", "bmi1", "bmi2", "fma", "f16c", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_DOTS = (*_V4, "avx512_vnni", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Target:
    """A set of instructions that a library is compiled for."""

    name: str
    machine: str  # as platform.machine() and wheel tags name it
    cpu: str  # for the compiler's -mcpu
    needs: tuple[str, ...] = ()  # all that the compiler may use, by the system's names for a processor's features
    system: str = "linux"  # as sys.platform names it

    @property
    def file_name(self) -> str:
        """Changes with the kernels' sources, so that no other version's library is ever loaded."""
        return f"{self.name}-{source_digest()}.so"


# The best first: a processor gets the first one that it can run.
TARGETS = (
    Target("tiles", "x86_64", "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
           (*_DOTS, "amx_tile", "amx_bf16", "amx_int8")),
    Target("avx512-bf16", "x86_64", "x86_64_v4+avx512vnni+avx512bf16", _DOTS),
    Target("avx512-vnni", "x86_64", "x86_64_v4+avx512vnni", (*_V4, "avx512_vnni")),
    Target("avx512", "x86_64", "x86_64_v4", _V4),
    Target("avx2-vnni", "x86_64", "x86_64_v3+avxvnni", (*_V3, "avx_vnni")),
    Target("avx2", "x86_64", "x86_64_v3", _V3),
    Target("bf16-i8mm", "aarch64", "generic+dotprod+bf16+i8mm", ("asimddp", "bf16", "i8mm")),
    Target("dotprod", "aarch64", "generic+dotprod", ("asimddp",)),
    Target("neon", "aarch64", "generic"),
    Target("m1", "arm64", "apple_m1", system="darwin"),
)  # fmt: skip


@functools.cache
def source_digest() -> str:
    """Twelve hexadecimal digits that identify the kernels' sources."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def runnable() -> Target | None:
    """The best target that this processor can run, whether its library is here or not."""
    flags = processor_flags()
    here = (each for each in TARGETS if (each.machine, each.system) == (platform.machine(), sys.platform))
    return next((each for each in here if flags.issuperset(each.needs)), None)


def library() -> tuple[str, Path] | None:
    """The target's name and the library for this processor, if this installation brought one along."""
    target = runnable()
    if target is None or not LIBRARIES.is_dir():
        return None
    path = LIBRARIES / target.file_name
    return (target.name, path) if path.is_file() else None
