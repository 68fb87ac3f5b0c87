"""Compares the scores of two outputs: which answers flipped, how often each is right, how far log-probabilities differ.

Used by cli.verify: two outputs of the same rows with other weights or settings tell what these settings cost.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

TARGET = "target"  # field of a row with the index of the right continuation
MEASURES = ("logprob", "per_token", "per_byte")
Interval = tuple[float, float]
_Z = 1.959964  # standard deviations of a two-sided interval of 95 %


@dataclass(frozen=True, slots=True)
class RowScores:
    """The scores of one row."""

    scores: list[dict[str, Any]]
    best: dict[str, int | None]
    target: int | None  # index of the right continuation; None: not known

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "RowScores | None":
        """The scores in a row's fields; None if it has none. Raises: as Row.of."""
        if "scores" not in fields:
            return None
        target = fields.get(TARGET)
        is_index = isinstance(target, int) and not isinstance(target, bool)
        msgspec.convert([each["logprob"] for each in fields["scores"]], list[float])
        best = msgspec.convert({name: fields["best"][name] for name in MEASURES}, dict[str, int | None])
        return cls(fields["scores"], best, target if is_index else None)


def _shown(found: Interval) -> str:
    return f"{found[0]:.1%} to {found[1]:.1%}"


@dataclass(slots=True)
class BestAnswers:
    """Which continuations two outputs find best, by one measure."""

    measure: str
    flipped: Annotated[int, "answers that differ"] = 0
    with_target: Annotated[int, "rows with a target"] = 0
    right_a: Annotated[float | None, "A right", "{:.1%}".format] = None
    interval_a: Annotated[Interval | None, "95 %", _shown] = None
    right_b: Annotated[float | None, "B right", "{:.1%}".format] = None
    interval_b: Annotated[Interval | None, "95 %", _shown] = None


@dataclass(slots=True)
class ScoreComparison:
    """The counters over all rows with scores in both outputs."""

    num_rows: int = 0
    num_scores: int = 0
    sum_delta: float = 0.0  # sum of absolute differences of log-probabilities
    largest_delta: float = 0.0
    _flipped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEASURES, 0))
    _num_right: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0] for name in MEASURES})
    _num_targets: int = 0

    def add(self, a: RowScores, b: RowScores) -> None:
        """Two rows with the same continuations."""
        self.num_rows += 1
        for first, second in zip(a.scores, b.scores, strict=True):
            delta = abs(first["logprob"] - second["logprob"])
            self.num_scores += 1
            self.sum_delta += delta
            self.largest_delta = max(self.largest_delta, delta)
        target = a.target if a.target == b.target else None
        self._num_targets += target is not None
        for name in MEASURES:
            self._flipped[name] += a.best[name] != b.best[name]
            if target is not None:
                for place, row in enumerate((a, b)):
                    self._num_right[name][place] += row.best[name] == target

    def answers(self) -> list[BestAnswers]:
        """One line per measure."""
        found = []
        for name in MEASURES:
            each = BestAnswers(name, self._flipped[name], self._num_targets)
            if self._num_targets:
                a, b = self._num_right[name]
                each.right_a, each.right_b = a / self._num_targets, b / self._num_targets
                each.interval_a, each.interval_b = interval(a, self._num_targets), interval(b, self._num_targets)
            found.append(each)
        return found

    def facts(self) -> dict[str, Any]:
        return {
            "num_compared_with_scores": self.num_rows,
            "mean_score_difference": self.sum_delta / self.num_scores if self.num_scores else None,
            "largest_score_difference": self.largest_delta,
        }

    def note(self) -> str:
        """In words."""
        mean = self.sum_delta / max(1, self.num_scores)
        text = f"log-probabilities of {self.num_scores:,} continuations differ by {mean:.3g} on average, "
        return text + f"{self.largest_delta:.3g} at most"


def interval(num_right: int, num_rows: int) -> Interval:
    """Where the share lies with a confidence of 95 % (Wilson's interval)."""
    share, square = num_right / num_rows, _Z * _Z / num_rows
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / num_rows + square / (4 * num_rows)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def first_difference(a: RowScores, b: RowScores, tolerance: float) -> tuple[int, str, str, float] | None:
    """The first continuation whose scores differ: its index, both log-probabilities, and the largest difference of the
    row; None if none does. The numbers of continuations are equal."""
    deltas = [abs(x["logprob"] - y["logprob"]) for x, y in zip(a.scores, b.scores, strict=True)]
    for index, (x, y) in enumerate(zip(a.scores, b.scores, strict=True)):
        exact = () if tolerance else ("is_greedy", "logprobs")
        names = [name for name in ("num_tokens", "token_ids", *exact) if name in x and name in y and x[name] != y[name]]
        if names or not deltas[index] <= tolerance:
            name = "logprob" if not deltas[index] <= tolerance else names[0]
            return index, f"{name} {x[name]}", f"{name} {y[name]}", max(deltas)
    return None
