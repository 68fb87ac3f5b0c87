"""A step between its launch and the reading of its tokens: its record, and its timing.

Used by EngineCore; needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedcli.core.executor import LaunchedStep
from pagedcli.core.sequence import Sequence
from pagedcli.events import Emit, Event


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step whose tokens have not been read."""

    seqs: list[Sequence]  # those that get a token
    tokens: LaunchedStep
    scored: dict[int, Sequence] = field(default_factory=dict)  # by seq_id: those whose prompt it scores

    @property
    def has_beams(self) -> bool:
        """Whether the next step depends on which beams are kept."""
        return any(seq.is_beam for seq in self.seqs)

    @property
    def rows(self) -> dict[int, int]:
        """seq_id -> row of the tokens."""
        return {seq.seq_id: row for row, seq in enumerate(self.seqs)}


class TimedEmit:
    """An emit that sums the time spent in observers. An observer that raised gets no more events, as it missed one.

    Does not refer to the engine: a cycle would keep its KV cache until the garbage collector runs.
    """

    __slots__ = ("_clock_ns", "_emit", "num_ns")

    def __init__(self, emit: Emit, clock_ns: Callable[[], int]) -> None:
        self._emit = emit
        self._clock_ns = clock_ns
        self.num_ns = 0

    def __call__(self, event: Event) -> None:
        start_ns = self._clock_ns()
        try:
            self._emit(event)
        except BaseException:
            self._emit = _ignore
            raise
        self.num_ns += self._clock_ns() - start_ns


def _ignore(event: Event) -> None:
    pass


class StepClock:
    """Splits a step's time among its parts, without the time spent in observers.

    One step ahead, forward is the time to launch a step, and sample includes waiting for the one before.
    """

    def __init__(self, clock_ns: Callable[[], int], observer_ns: Callable[[], int]) -> None:
        self.schedule_ns = self.forward_ns = self.sample_ns = 0
        self._clock_ns = clock_ns
        self._observer_ns = observer_ns
        self._last_ns = clock_ns() - observer_ns()

    @property
    def total_ns(self) -> int:
        return self.schedule_ns + self.forward_ns + self.sample_ns

    def add_to(self, part: str) -> None:
        """Add the time since the last call to a part."""
        now_ns = self._clock_ns() - self._observer_ns()
        setattr(self, part, getattr(self, part) + now_ns - self._last_ns)
        self._last_ns = now_ns
