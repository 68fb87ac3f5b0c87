"""Several passes of one measurement: their spread, and whether another measurement differs by more than that.

Used by the other files of bench and by cli.bench.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
