"""The processor's features as the system reports them."""

import platform
from pathlib import Path


def processor_flags() -> frozenset[str]:
    """The processor's features by the system's names for them; empty if the system reports none."""
    lines = [line for line in processor_features().splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(lines[0].split(":", 1)[1].split()) if lines else frozenset()


def processor_features() -> str:
    """What determines -march=native, as far as the system reports it."""
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found = _first_processor()
    return platform.processor() if found is None else "\n".join(found[name] for name in names if name in found)


def processor_name() -> str:
    """The name of the processor, as the system gives it."""
    line = (_first_processor() or {}).get("model name", ":")
    return line.split(":", 1)[1].strip() or platform.processor() or platform.machine()


def _first_processor() -> dict[str, str] | None:
    """The lines of /proc/cpuinfo on the first processor by what they name; None without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return {line.split(":", 1)[0].strip(): line for line in reversed(lines) if ":" in line}
