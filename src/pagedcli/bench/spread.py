"""Several passes of one measurement: their spread, whether another measurement differs by more than that, and whether
other work took processor time from it: other processes, or other machines on the same host.

Used by the other files of bench and by cli.bench.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import psutil
from msgspec import UNSET, UnsetType

from pagedcli.errors import UsageError
from pagedcli.files import read_whole
from pagedcli.line_files import NOT_JSON
from pagedcli.records import RIGHT, Means

OTHERS_ALLOWED, STEAL_ALLOWED = 0.05, 0.02  # shares of all cores


@dataclass(frozen=True, slots=True)
class Busy:
    """Shares of the processor time of all cores during a measurement, 0 to 1."""

    others: float  # other processes
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


def worst(measured: Iterable[Busy | None]) -> Busy | None:
    """The largest shares of several measurements."""
    known = [each for each in measured if each is not None]
    return Busy(max(each.others for each in known), max(each.steal for each in known)) if known else None


@dataclass(frozen=True, slots=True)
class Spread:
    """The smallest, middle and largest value of a figure."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """The spread of the passes' values; None if a pass has none."""
        known = [value for value in values if value is not None]
        return None if len(known) < len(values) or not known else cls(min(known), statistics.median(known), max(known))


# figures of a workload that have a spread -> (name, whether more is better)
FIGURES = {
    "wall_s": ("s", False),
    "output_tokens_per_s": ("out tok/s", True),
    "ttft_ms": ("TTFT ms", False),
    "tpot_ms": ("TPOT ms", False),
    "overhead_ms": ("engine ms/step", False),
    "share_of_floor": ("share of the floor", True),
}


@dataclass(frozen=True, slots=True)
class EarlierRow:
    """The part of an earlier measurement's row that is compared."""

    workload: str
    spread: dict[str, Spread | None]
    num_tokens: int | UnsetType = UNSET  # tokens of the prompts and outputs


class Passes(Protocol):
    """The part of a measurement's row that is compared."""

    @property
    def workload(self) -> str: ...
    @property
    def spread(self) -> Mapping[str, Spread | None]: ...
    @property
    def num_tokens(self) -> int | UnsetType: ...


_OF_FIGURE = Means("", "that of the figure, in its name")


def read_earlier(path: Path) -> list[EarlierRow]:
    """The rows of an earlier measurement, printed with --format json. Raises: UsageError if the file has none."""
    try:
        document = msgspec.json.decode(read_whole(path, 2**24), type=dict[str, Any])
        return msgspec.convert(document["throughput"], list[EarlierRow])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (*NOT_JSON, KeyError) as error:
        hint = "make one with pagedcli bench --format json"
        raise UsageError(f"{path} is not a measurement of pagedcli bench", hint=hint) from error


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure before and now."""

    workload: str
    figure: Annotated[str, lambda key: FIGURES[key][0], RIGHT]
    before: Annotated[float, _OF_FIGURE]
    now: Annotated[float, _OF_FIGURE]
    change: Annotated[float, lambda share: f"{share:+.1%}"]
    verdict: str


def compared_rows(before: Sequence[Passes], now: Sequence[Passes]) -> list[FigureChange]:
    """The figures of workloads that both measurements have: medians, the change, and its verdict."""
    earlier = {(row.workload, row.num_tokens): row.spread for row in before}
    rows = []
    for row in now:
        old = earlier.get((row.workload, row.num_tokens), {})
        for figure, (_, more_is_better) in FIGURES.items():
            a, b = old.get(figure), row.spread.get(figure)
            if a is None or b is None or not a.median:
                continue
            change = b.median / a.median - 1
            overlap = a.min <= b.max and b.min <= a.max
            verdict = "within the spread" if overlap else "better" if (change > 0) == more_is_better else "worse"
            rows.append(FigureChange(row.workload, figure, a.median, b.median, change, verdict))
    return rows
