"""A setting next to the run as it is: the same rows with and without it, in turns, and what that says for sure.

Made by `plan --tune`. Knows no engine.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import comb, inf
from statistics import median

from pagedcli.printable import percent_text

_LEAST_PAIRS = 8  # fewer say nothing that holds in _SURE of all measurements
_UNSURE = 0.01  # share of measurements whose interval lacks the true saving
_NO_MATTER = 0.01  # savings below are not looked for any longer


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of passes of the same rows with the settings of a run and with others. The passes of a pair ran one after
    the other, so that both met the same machine."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def _savings(self) -> list[float]:
        return sorted(1 - after_s / before_s for before_s, after_s in zip(self.before_s, self.after_s, strict=True))

    @property
    def gain(self) -> float:
        """Share of the time that the other settings save, below 0 if they take longer."""
        return median(self._savings)

    @property
    def interval(self) -> tuple[float, float]:
        """The sign test's interval of the median saving, from one of the smallest savings to one of the largest: it
        needs no assumption about the noise of a pass."""
        savings, below, place = self._savings, 0.0, 0
        while place < len(savings) // 2:
            below += comb(len(savings), place) / 2 ** len(savings)
            if 2 * below > _UNSURE:
                break
            place += 1
        return (savings[place - 1], savings[-place]) if place else (-inf, inf)

    @property
    def is_sure(self) -> bool:
        """Whether the other settings are faster, beyond doubt."""
        return self.interval[0] > 0

    @property
    def is_decided(self) -> bool:
        """Whether more pairs would change nothing: faster beyond doubt, or not by enough to matter."""
        return self.is_sure or self.interval[1] < _NO_MATTER

    @property
    def text(self) -> str:
        low, high = self.interval
        if low == -inf:
            return "not certain: too few passes"
        if high <= 0:
            return f"between {percent_text(-high)} and {percent_text(-low)} slower"
        if low > 0:
            return f"between {percent_text(low)} and {percent_text(high)} faster"
        return f"not certain: between {percent_text(high)} faster and {percent_text(-low)} slower"


def in_turns(serve: Callable[[int, int], float], budget_s: float) -> Turns:
    """Pairs of a pass without (0) and one with (1) other settings, until the saving is decided or the time is over.
    `serve` receives which of both, and the number of the pass, and returns its seconds. Which comes first is drawn, so
    that neither drift nor another program's rhythm falls on one of both."""
    times: tuple[list[float], list[float]] = ([], [])
    draw = random.Random(0)
    spent_s = serve(0, 0) + serve(1, 1)  # The first pass of each starts threads and uses memory for the first time.
    while True:
        for which in draw.choice(((0, 1), (1, 0))):
            times[which].append(serve(which, 2 + len(times[0]) + len(times[1])))
        found = Turns(tuple(times[0]), tuple(times[1]))
        taken_s = sum(found.before_s) + sum(found.after_s)
        is_measured = len(found.before_s) >= _LEAST_PAIRS and found.is_decided
        if is_measured or spent_s + taken_s * (1 + 1 / len(found.before_s)) > budget_s:
            return found


def pass_s(budget_s: float) -> float:
    """Seconds that a pass may take, so that there is time for enough of them."""
    return budget_s / (2 * _LEAST_PAIRS + 4)
