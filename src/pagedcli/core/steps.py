"""A step from its schedule to its times. Used by Scheduler and EngineCore; needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedcli.core.sequence import Sequence
from pagedcli.events import Emit, Event, WaitingReason


@dataclass(slots=True)
class ScheduledStep:
    """The work of one step."""

    seqs: list[Sequence] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)  # per sequence, at least 1; those of drafts included
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (source, copy), to be copied in this order
    num_preempted: int = 0
    blocked: WaitingReason | None = None  # why the first in the queue was not started
    waits_for_tokens: bool = False  # incomplete: the step in flight must be read before anything can be preempted
    groups: list[list[Sequence]] = field(default_factory=list)  # groups whose next step has been decided
    changed: list[Sequence] = field(default_factory=list)  # sequences that may have other blocks than before
    scores_targets: bool = False  # sequences with targets run
    drafted: list[Sequence] = field(default_factory=list)  # sequences whose draft it checks
    num_behind: int = 0  # further tokens, which it computes once more: see Sequence.num_behind_tokens

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    @property
    def is_decode(self) -> bool:
        """Whether the step computes the last token of each sequence, and no other."""
        return (
            not self.scores_targets
            and not self.num_behind
            and len(self.seqs) == sum(self.num_new_tokens)
            and all(seq.num_tokens - 1 == seq.num_computed_tokens >= seq.num_cached_tokens for seq in self.changed)
        )

    def add(self, seq: Sequence, num_new: int) -> None:
        """Schedule tokens of a sequence that may have other blocks than before."""
        self.seqs.append(seq)
        self.num_new_tokens.append(num_new)
        self.changed.append(seq)

    def drop_ended(self) -> None:
        """Drop sequences that have ended since they were scheduled. Their copies stay: the targets are free blocks by
        now, which nothing else writes in this step."""
        kept = [seq.finish_reason is None for seq in self.seqs]
        if not all(kept):
            self.num_new_tokens = [count for count, keep in zip(self.num_new_tokens, kept, strict=True) if keep]
            self.seqs = [seq for seq, keep in zip(self.seqs, kept, strict=True) if keep]
            self.changed = [seq for seq in self.changed if seq.finish_reason is None]


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


SCHEDULE, FORWARD, SAMPLE = range(3)  # the phases of a step


class StepClock:
    """Splits a step's time among its phases, without the time spent in observers.

    One step ahead, forward is the time to launch a step, and sample includes waiting for the one before.
    """

    __slots__ = ("_clock_ns", "_emit", "_observed_ns", "_phase", "_since_ns", "phases_ns")

    def __init__(self, clock_ns: Callable[[], int], emit: TimedEmit | None) -> None:
        self.phases_ns = [0, 0, 0]
        self._clock_ns = clock_ns
        self._emit = emit
        self._observed_ns = 0
        self._observed_ns = self.observer_ns  # nanoseconds up to this step

    @property
    def observer_ns(self) -> int:
        """Time of this step spent in observers."""
        return 0 if self._emit is None else self._emit.num_ns - self._observed_ns

    def phase(self, phase: int) -> "StepClock":
        """Add the time of a with statement to a phase."""
        self._phase = phase
        return self

    def __enter__(self) -> None:
        self._since_ns = self._clock_ns() - self.observer_ns

    def __exit__(self, *exception: object) -> None:
        self.phases_ns[self._phase] += self._clock_ns() - self.observer_ns - self._since_ns
