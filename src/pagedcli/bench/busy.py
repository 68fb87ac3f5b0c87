"""Whether other work took processor time from a measurement: other processes, or other machines on the same host.

Used by bench.throughput and cli.bench. Linux only; elsewhere nothing is known.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
OTHERS_ALLOWED, STEAL_ALLOWED = 0.05, 0.02  # shares of all cores


@dataclass(frozen=True, slots=True)
class Busy:
    """Shares of the processor time of all cores during a measurement, 0 to 1."""

    others: float  # used by other processes
    steal: float  # withheld by the hypervisor

    @property
    def disturbs(self) -> bool:
        """Whether the measurement says more about the other work than about this program."""
        return self.others > OTHERS_ALLOWED or self.steal > STEAL_ALLOWED


class BusyWatch:
    """Measures from its creation until `read`."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._before = _times(stat)

    def read(self) -> Busy | None:
        """What happened since then; None where the system does not say, or if too little time has passed."""
        now = _times(self._stat)
        if self._before is None or now is None:
            return None
        total_s, busy_s, steal_s, own_s = (after - before for before, after in zip(self._before, now, strict=True))
        if total_s <= 0.1:  # the counters tick every 10 ms
            return None
        return Busy(others=max(0.0, busy_s - own_s) / total_s, steal=steal_s / total_s)


def _times(stat: Path) -> tuple[float, float, float, float] | None:
    """Seconds of all cores: all, busy, withheld, and those of this process."""
    try:
        _, *ticks = stat.read_text().partition("\n")[0].split()
        user, nice, system, idle, iowait, irq, softirq, steal = (int(each) for each in ticks[:8])
    except (OSError, ValueError):
        return None
    per_s = os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + irq + softirq
    return (busy + idle + iowait + steal) / per_s, busy / per_s, steal / per_s, time.process_time()


def worst(measured: list[Busy]) -> Busy | None:
    """The largest shares of several measurements."""
    if not measured:
        return None
    return Busy(max(each.others for each in measured), max(each.steal for each in measured))
