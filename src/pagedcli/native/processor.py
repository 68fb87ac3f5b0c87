"""The processor's features as the system reports them."""

import platform
from pathlib import Path


def processor_flags() -> frozenset[str]:
    """The processor's features by the system's names for them; empty if the system reports none."""
    lines = [line for line in processor_features().splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(lines[0].split(":", 1)[1].split()) if lines else frozenset()


def processor_features() -> str:
    """What determines -march=native, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found = {line.split(":", 1)[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(found[name] for name in names if name in found)
