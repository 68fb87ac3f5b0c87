"""What the MTP head of a model would save, where an earlier run tells how many of its guesses were right.

Used by `plan`; needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagedcli.core.drafting import LEAST_GAIN
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.errors import UsageError
from pagedcli.models.footprint import Footprint
from pagedcli.planning.step_time import StepTime, between


@dataclass(frozen=True, slots=True)
class HeadGuesses:
    """The guesses of a head in an earlier run."""

    name: str  # of its summary
    num_drafted: int
    num_accepted: int

    @property
    def share(self) -> float:
        """Right ones of all. Of guesses of several tokens it is less than the chance of each after right ones."""
        return self.num_accepted / self.num_drafted


class _Counts(msgspec.Struct):
    drafted: int
    accepted: int


class _Summary(msgspec.Struct):
    guesses: dict[str, _Counts] = {}


def read_head_guesses(path: Path) -> HeadGuesses:
    """The guesses of the head in a summary (--summary-json). Raises: UsageError if there are none, or no such file."""
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=_Summary)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no summary of a run: {error}", hint="--summary-json writes one") from error
    counts = summary.guesses.get("mtp")
    if counts is None or not 0 <= counts.accepted <= counts.drafted or not counts.drafted:
        hint = "give the summary of a run with --speculation mtp or auto"
        raise UsageError(f"{path} has no guesses of an MTP head", hint=hint)
    return HeadGuesses(path.name, counts.drafted, counts.accepted)


def head_gain(
    footprint: Footprint, num_layers: int, step_time: StepTime, right: float, most_sampled: int
) -> Callable[[int], float]:
    """How many times as fast decodes of so many sequences are with `auto` as without guesses, if each guess after right
    ones is right with this chance. The head reads as much as a layer, and the output layer, for each token that it
    guesses of a sequence."""

    def gain(num_seqs: int) -> float:
        decodes, layers_bytes = step_time.decodes, footprint.active_bytes(num_seqs)
        plain_s = between(decodes, num_seqs)
        head_bytes = layers_bytes / num_layers + footprint.head.num_bytes
        head_s = plain_s * head_bytes / (layers_bytes + footprint.head.num_bytes)
        best, tokens = 1.0, 1.0
        for depth in range(1, MOST_DRAFTED + 1):
            if num_seqs * (1 + depth) > most_sampled:
                break
            tokens += right**depth
            best = max(best, tokens * plain_s / (between(decodes, num_seqs * (1 + depth)) + depth * head_s))
        return best if best >= LEAST_GAIN else 1.0

    return gain
