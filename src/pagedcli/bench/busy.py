"""Whether other work took processor time from a measurement: other processes, or other machines on the same host.

Used by bench.throughput and cli.bench.
"""

import time
from dataclasses import dataclass

import psutil

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

    def __init__(self) -> None:
        self._before = _times()

    def read(self) -> Busy | None:
        """What happened since then; None if too little time has passed."""
        total_s, busy_s, steal_s, own_s = (after - before for before, after in zip(self._before, _times(), strict=True))
        if total_s <= 0.1:  # the counters tick every 10 ms
            return None
        return Busy(others=max(0.0, busy_s - own_s) / total_s, steal=steal_s / total_s)


def _times() -> tuple[float, float, float, float]:
    """Seconds of all cores: all, busy, withheld, and those of this process."""
    found = psutil.cpu_times()
    waiting, steal = found.idle + getattr(found, "iowait", 0.0), getattr(found, "steal", 0.0)
    own = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")  # guests are counted in user
    busy = sum(getattr(found, name, 0.0) for name in own)
    return busy + waiting + steal, busy, steal, time.process_time()


def worst(measured: list[Busy]) -> Busy | None:
    """The largest shares of several measurements."""
    if not measured:
        return None
    return Busy(max(each.others for each in measured), max(each.steal for each in measured))
