"""Several passes of one measurement: their spread, whether another measurement differs by more than that, and whether
other work took processor time from it: other processes, or other machines on the same host.

Used by the other files of bench and by cli.bench.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


# figures that have a spread -> whether more is better
FIGURES = {
    "wall_s": False,
    "output_tokens_per_s": True,
    "ttft_ms": False,
    "tpot_ms": False,
    "overhead_ms": False,
    "share_of_floor": True,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """The smallest, middle and largest value of a figure."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """None if a pass has no value."""
        known = [value for value in values if value is not None]
        return None if len(known) < len(values) or not known else cls(min(known), statistics.median(known), max(known))

    def __mul__(self, factor: float) -> "Spread":
        return Spread(self.min * factor, self.median * factor, self.max * factor)


def spread_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per workload and figure. `rows`: with their `spread`, as throughput_row makes them."""
    return [
        {**_names(row), "figure": figure, **values}
        for row in rows
        for figure, values in row["spread"].items()
        if values is not None
    ]


def compared_rows(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the figures of workloads that both measurements have: medians, the change, and what it means."""
    earlier = {tuple(_names(row).items()): row for row in before}
    rows = []
    for row in now:
        old = earlier.get(tuple(_names(row).items()))
        for figure, more_is_better in FIGURES.items():
            a, b = ((each or {}).get("spread", {}).get(figure) for each in (old, row))
            if a is None or b is None or not a["median"]:
                continue
            change = b["median"] / a["median"] - 1
            overlap = a["min"] <= b["max"] and b["min"] <= a["max"]
            verdict = "within the spread" if overlap else "better" if (change > 0) == more_is_better else "worse"
            values = {"before": a["median"], "now": b["median"], "change": change, "verdict": verdict}
            rows.append({**_names(row), "figure": figure, **values})
    return rows


def _names(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("workload", "batch_size") if name in row}
