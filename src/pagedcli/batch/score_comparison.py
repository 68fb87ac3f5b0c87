"""Compares the scores of two outputs: which answers flipped, how often each is right, how far log-probabilities differ;
and the log-probabilities of prompts: KL divergence, likeliest tokens and perplexities.

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
PromptLogprobs = tuple[list[list[int | None]], list[list[float]]]
"""Per token: ids of it and of the likeliest ones, and their log-probabilities."""
_Z = 1.959964  # standard deviations of a two-sided interval of 95 %
_BLOCK, _LEAST_BLOCKS = 32, 20  # neighbouring tokens that count as one observation, and how many make an interval
_ROUNDING = 1e-7  # of a sum of probabilities in float32


@dataclass(frozen=True, slots=True)
class RowScores:
    """The scores of one row."""

    scores: list[dict[str, Any]]
    best: dict[str, int | None]
    target: int | None  # index of the right continuation; None: not known

    @classmethod
    def of(cls, fields: Mapping[str, Any], target: Any) -> "RowScores | None":
        """The scores in a row's fields; None if it has none. `target`: see there. Raises: as Row.of."""
        if "scores" not in fields:
            return None
        is_index = isinstance(target, int) and not isinstance(target, bool)
        msgspec.convert([each["logprob"] for each in fields["scores"]], list[float])
        best = msgspec.convert({name: fields["best"][name] for name in MEASURES}, dict[str, int | None])
        return cls(fields["scores"], best, target if is_index else None)


def interval_text(found: Interval) -> str:
    return f"{found[0]:.1%} to {found[1]:.1%}"


@dataclass(slots=True)
class BestAnswers:
    """Which continuations two outputs find best, by one measure."""

    measure: str
    flipped: Annotated[int, "answers that differ"] = 0
    with_target: Annotated[int, "rows with a target"] = 0
    right_a: Annotated[float | None, "A right", "{:.1%}".format] = None
    interval_a: Annotated[Interval | None, "95 %", interval_text] = None
    right_b: Annotated[float | None, "B right", "{:.1%}".format] = None
    interval_b: Annotated[Interval | None, "95 %", interval_text] = None


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


# ---------------------------------------------------------------------- log-probabilities of prompts


@dataclass(frozen=True, slots=True)
class LogitMeasure:
    """How far B's distributions of the prompts' tokens are from A's."""

    measure: str
    value: Annotated[float, "value", "{:.4g}".format]
    interval: Annotated[Interval | None, "95 %", lambda found: f"{found[0]:.4g} to {found[1]:.4g}"] = None


@dataclass(slots=True)
class LogitComparison:
    """The counters over all prompts with log-probabilities of the same tokens in both outputs."""

    num_prompts: int = 0
    num_left_out: int = 0
    num_listed: int = 0  # likeliest tokens at a position, at most
    _kls: list[float] = field(default_factory=list)  # per token
    _same: list[float] = field(default_factory=list)  # 1.0 where the likeliest token is the same
    _losses: list[tuple[float, float]] = field(default_factory=list)  # negative log-probabilities in A and B
    _blocks: list[slice] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self._kls)

    def add(self, a: PromptLogprobs, b: PromptLogprobs) -> None:
        """Count a prompt that both outputs have."""
        both = [[(ids, logprobs) for ids, logprobs in zip(*each, strict=True) if len(ids) > 1] for each in (a, b)]
        is_known = all(None not in ids for each in both for ids, _ in each)
        if not both[0] or not is_known or [ids[0] for ids, _ in both[0]] != [ids[0] for ids, _ in both[1]]:
            self.num_left_out += 1
            return
        self.num_prompts += 1
        start = self.num_tokens
        for (ids_a, in_a), (ids_b, in_b) in zip(*both, strict=True):
            self.num_listed = max(self.num_listed, len(ids_a) - 1, len(ids_b) - 1)
            self._kls.append(_divergence(dict(zip(ids_a, in_a, strict=True)), dict(zip(ids_b, in_b, strict=True))))
            self._same.append(float(ids_a[1] == ids_b[1]))
            self._losses.append((-in_a[0], -in_b[0]))
        self._blocks += [
            slice(place, min(place + _BLOCK, self.num_tokens)) for place in range(start, self.num_tokens, _BLOCK)
        ]

    def measures(self) -> list[LogitMeasure]:
        """Mean and 99th percentile of the KL divergence, share of equal likeliest tokens, perplexities and ratio."""
        kl, of_kl = self._mean(self._kls)
        same, of_same = self._mean(self._same)
        change, of_change = self._mean([b - a for a, b in self._losses])
        losses = [math.fsum(each) / self.num_tokens for each in zip(*self._losses, strict=True)]
        return [
            LogitMeasure("mean KL divergence, nats", kl, of_kl and (max(0.0, of_kl[0]), of_kl[1])),
            LogitMeasure("99th percentile of it", sorted(self._kls)[math.ceil(0.99 * self.num_tokens) - 1]),
            LogitMeasure("same likeliest token", same, of_same and (max(0.0, of_same[0]), min(1.0, of_same[1]))),
            *(LogitMeasure(f"perplexity of {name}", _exp(loss)) for name, loss in zip("AB", losses, strict=True)),
            LogitMeasure("perplexity, B / A", _exp(change), of_change and (_exp(of_change[0]), _exp(of_change[1]))),
        ]

    def _mean(self, values: list[float]) -> tuple[float, Interval | None]:
        """The mean of some numbers per token, and where it lies with a confidence of 95 %."""
        mean, num_blocks = math.fsum(values) / self.num_tokens, len(self._blocks)
        if num_blocks < _LEAST_BLOCKS:
            return mean, None
        squares = ((math.fsum(values[each]) - mean * (each.stop - each.start)) ** 2 for each in self._blocks)
        half = _Z * math.sqrt(math.fsum(squares) * num_blocks / (num_blocks - 1)) / self.num_tokens
        return mean, (mean - half, mean + half)

    def finding(self) -> str:
        """In words."""
        measures = self.measures()
        kl, same, ratio = measures[0], measures[2], measures[-1]
        change = f"{abs(ratio.value - 1) * 100:.2f} % {'above' if ratio.value >= 1 else 'below'} A's"
        doubt = "too few tokens to say how sure that is"
        if ratio.interval is not None:
            low, high = ((end - 1) * 100 for end in ratio.interval)
            doubt = f"95 %: {low:+.2f} % to {high:+.2f} %{', so maybe the same' if low <= 0 <= high else ''}"
        text = f"B's perplexity is {change} ({doubt}); the likeliest token is the same at {same.value * 100:.1f} % of "
        return text + f"the positions, and the KL divergence is {kl.value:.3g} nats on average"


def _divergence(a: Mapping[int | None, float], b: Mapping[int | None, float]) -> float:
    """KL divergence of b from a, over the tokens that both have and all others as one."""
    both = a.keys() & b.keys()
    rest_a, rest_b = (max(_ROUNDING, 1 - math.fsum(_exp(min(each[i], 0.0)) for i in both)) for each in (a, b))
    listed = math.fsum(_exp(min(a[i], 0.0)) * (a[i] - b[i]) for i in both)
    return max(0.0, listed + rest_a * math.log(rest_a / rest_b))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the largest that is a number
