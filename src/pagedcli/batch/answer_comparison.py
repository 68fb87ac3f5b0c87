"""How good answers to questions are, and which differ in another output: shares of right ones, Brier score, calibration
error; and the temperature that makes probabilities fit.

Used by cli.verify.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from pagedcli.batch.decisions import log_softmax
from pagedcli.batch.score_comparison import Interval, interval, interval_text

_BINS, _RESAMPLES = 10, 1000  # of confidence, each as wide; of the bootstrap, with a fixed seed
_COLDEST, _HOTTEST, _GOLDEN = math.log(0.05), math.log(20), (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class AnswerQuality:
    """How good the answers of one output to a question are."""

    question: str
    file: str
    rows: int
    flipped: Annotated[int | None, "rows flipped"] = None  # None: it is the first file
    with_target: Annotated[int, "rows judged"] = 0
    right: Annotated[float | None, "right", "{:.1%}".format] = None
    interval: Annotated[Interval | None, "95 %", interval_text] = None
    brier: Annotated[float | None, "Brier", "{:.3f}".format] = None  # sum over the options
    log_loss: Annotated[float | None, "log loss", "{:.3f}".format] = None
    calibration_error: Annotated[float | None, "ECE", "{:.1%}".format] = None  # expected, by confidence
    error_interval: Annotated[Interval | None, "95 %", interval_text] = None


@dataclass(slots=True)
class Judged:
    """The answers of an output to one question."""

    num_answers: int = 0
    num_flipped: int | None = None  # choices that differ from those of the first output; None: it is that one
    labelled: list[tuple[list[float], int]] = field(default_factory=list)  # log-probabilities, place of the right one

    def add(self, answer: Mapping[str, Any], target: Any, first: Mapping[str, Any] | None = None) -> None:
        """Count an answer. `first`: that of the first output."""
        self.num_answers += 1
        if first is not None:
            self.num_flipped = (self.num_flipped or 0) + (first["choice"] != answer["choice"])
        if str(target) in (options := list(answer["probabilities"])):
            logprobs = [math.log(max(share, 1e-300)) for share in answer["probabilities"].values()]
            self.labelled.append((logprobs, options.index(str(target))))

    def quality(self, question: str, file: str, temperature: float = 1.0) -> AnswerQuality:
        found = question, file, self.num_answers, self.num_flipped
        if not (number := len(self.labelled)):
            return AnswerQuality(*found)
        shares = [np.exp(logprobs) for logprobs in self._logprobs(temperature)]
        rights = [right for _, right in self.labelled]
        confidence = np.array([each.max() for each in shares])
        hits = np.array([each.argmax() == right for each, right in zip(shares, rights, strict=True)])
        squares = [(each**2).sum() - 2 * each[right] + 1 for each, right in zip(shares, rights, strict=True)]
        bins, gaps = np.minimum(confidence * _BINS, _BINS - 1).astype(int), confidence - hits

        def error(places: Any) -> float:
            return float(np.abs(np.bincount(bins[places], gaps[places], _BINS)).sum() / number)

        draw = np.random.default_rng(0).integers
        low, high = np.quantile([error(draw(number, size=number)) for _ in range(_RESAMPLES)], [0.025, 0.975])
        return AnswerQuality(
            *(*found, number, float(hits.mean()), interval(int(hits.sum()), number)),
            *(float(np.mean(squares)), self._loss(temperature), error(slice(None)), (float(low), float(high))),
        )

    def _loss(self, temperature: float) -> float:
        """The mean negative log-probability of the right option."""
        both = zip(self._logprobs(temperature), self.labelled, strict=True)
        return -math.fsum(logprobs[right] for logprobs, (_, right) in both) / len(self.labelled)

    def _logprobs(self, temperature: float) -> Iterator[list[float]]:
        """The log-probabilities of each labelled answer's options at a temperature."""
        return (log_softmax([each / temperature for each in logprobs]) for logprobs, _ in self.labelled)

    def best_temperature(self) -> float:
        """The temperature with the least log loss, by golden-section search."""
        low, high = _COLDEST, _HOTTEST
        while high - low > 1e-4:
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            low, high = (low, right) if self._loss(math.exp(left)) < self._loss(math.exp(right)) else (left, high)
        return round(math.exp((low + high) / 2), 4)


def targets_of(answers: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """The right answers of a row by question: an object has one for each, another value is that of an only question."""
    return target if isinstance(target, dict) else dict.fromkeys(answers, target) if len(answers) == 1 else {}
