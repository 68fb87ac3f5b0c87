"""How far two answers to one prompt are apart, and whether that is more than noise.

The distance is the largest difference of a log-probability at positions that follow equal tokens. Two likely tokens
that noise can swap have nearly equal log-probabilities in both answers, so a swap adds nothing to the distance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedcli.audit.answers import AnswerChoice
from pagedcli.audit.plan import shared_length

_LEAST_LOGPROB = -12.0  # less likely tokens are all the same
ROUNDED = 2e-6  # answers closer than this are the same computation, rounded for JSON
SMALLEST_TOLERANCE = 0.02  # llama.cpp with K and V in float16 differs by 0.003 between batch shapes
USUAL_TOLERANCE = 0.2  # bfloat16 differs by less between batch shapes; above, noise has to be measured, not assumed
LARGEST_TOLERANCE = 1.0  # no arithmetic explains more; a server that is noisier cannot be audited
FACTOR_ALONE, _FACTOR_MEDIAN = 2.5, 8.0


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """Two answers compared."""

    distance: float | None  # largest difference of log-probabilities; None without them
    is_same: bool  # tokens, or the text where there are no tokens
    position: int | None = None  # first different token, or character where there are no tokens

    def exceeds(self, tolerance: float) -> bool:
        """Whether noise up to `tolerance` does not explain it."""
        return not self.is_same if self.distance is None else self.distance > tolerance

    def __lt__(self, other: "AnswerDifference") -> bool:
        """Whether the other one is the worse."""
        return (self.distance or 0.0, not self.is_same) < (other.distance or 0.0, not other.is_same)


def compare(cold: AnswerChoice, warm: AnswerChoice, *, skip: int = 0) -> AnswerDifference:
    """The difference of two answers; the first `skip` tokens of the cold one were part of the warm prompt."""
    if not (cold.top and warm.top):
        place = None if skip or cold.text == warm.text else shared_length(cold.text, [warm.text])
        return AnswerDifference(None, place is None, place)
    distance, place = 0.0, None
    for i, (old, new) in enumerate(zip(cold.top[skip:], warm.top, strict=False)):
        distance = max(distance, _distance(old, new))
        if cold.tokens[skip + i] != warm.tokens[i]:
            place = i
            break
    return AnswerDifference(distance, place is None, place)


def _distance(old: Mapping[str, float], new: Mapping[str, float]) -> float:
    least_old, least_new = (max(_LEAST_LOGPROB, min(row.values())) for row in (old, new))
    largest = 0.0
    for token in old.keys() | new.keys():
        a, b = old.get(token), new.get(token)
        if a is None or b is None:  # one row does not list it: there it is at most as likely as the last one listed
            known, bound = (b, least_old) if a is None else (a, least_new)
            assert known is not None, "the token is in one of the rows"
            largest = max(largest, known - bound)
        elif max(a, b) > _LEAST_LOGPROB:
            largest = max(largest, abs(max(a, _LEAST_LOGPROB) - max(b, _LEAST_LOGPROB)))
    return largest


@dataclass(frozen=True, slots=True)
class Noise:
    """What equal requests differ by with nothing to blame but arithmetic."""

    num_pairs: int
    num_different: int  # pairs with different tokens
    largest: float | None  # distance; None without log-probabilities
    tolerance: float

    @property
    def is_too_large(self) -> bool:
        """Whether answers differ so much that nothing can be said about a cache."""
        if self.largest is None:
            return self.num_different > self.num_pairs / 4
        return self.largest > LARGEST_TOLERANCE / 2

    def chance(self, num_different: int, num_pairs: int) -> float:
        """The probability that noise alone makes at least this number of pairs differ."""
        rate = (self.num_different if self.largest is None else 0) + 0.5
        rate /= self.num_pairs + 1
        return sum(
            math.comb(num_pairs, k) * rate**k * (1 - rate) ** (num_pairs - k)
            for k in range(num_different, num_pairs + 1)
        )


def measure_noise(same: Sequence[AnswerDifference], cold_warm: Sequence[AnswerDifference]) -> Noise:
    """The noise of equal requests, and a tolerance that covers other batch shapes.

    `same` are requests repeated with nothing different. The median of all cold and warm pairs shows what a different
    shape of the computation does; a cache that is wrong most of the time must not raise it, so it counts up to
    USUAL_TOLERANCE.
    """
    distances = [each.distance for each in same if each.distance is not None]
    shapes = sorted(each.distance for each in cold_warm if each.distance is not None)
    largest = max(distances, default=None)
    median = shapes[len(shapes) // 2] if shapes else 0.0
    tolerance = max(SMALLEST_TOLERANCE, min(USUAL_TOLERANCE, _FACTOR_MEDIAN * median), FACTOR_ALONE * (largest or 0.0))
    num_different = sum(not each.is_same for each in same)
    return Noise(len(same), num_different, largest, min(tolerance, LARGEST_TOLERANCE))
