"""A step between its launch and the reading of its tokens: who runs it, what is kept of it, where its time goes.

Used by LLMEngine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagedcli.engine.sampler import SampledTokens, SamplingBatch
from pagedcli.engine.step_input import StepInput
from pagedcli.events import Emit, Event


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step whose tokens have not been read."""

    sampling: SamplingBatch  # its sequences are those that get a token
    tokens: SampledTokens

    @property
    def rows(self) -> dict[int, int]:
        """seq_id -> row of the tokens."""
        return {seq.seq_id: row for row, seq in enumerate(self.sampling.seqs)}


class Executor(Protocol):
    """Runs steps: one ModelRunner, or a group of them in several processes."""

    def launch(self, step: StepInput, sampling: SamplingBatch) -> SampledTokens:
        """Start a step; see ModelRunner.launch."""
        ...

    def wait(self, tokens: SampledTokens) -> None:
        """Return when the tokens can be read."""
        ...


class TimedEmit:
    """An emit that adds up the time spent in observers. Knows nothing of the engine: a cycle would keep its KV cache
    until the garbage collector comes by."""

    __slots__ = ("_emit", "num_ns")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.num_ns = 0

    def __call__(self, event: Event) -> None:
        start_ns = time.perf_counter_ns()
        self._emit(event)
        self.num_ns += time.perf_counter_ns() - start_ns


class StepClock:
    """Splits a step's time among its parts, without the time spent in observers.

    One step ahead, forward is the time to launch a step, and sample includes waiting for the one before.
    """

    def __init__(self, observer_ns: Callable[[], int]) -> None:
        self.schedule_ns = self.forward_ns = self.sample_ns = 0
        self._observer_ns = observer_ns
        self._last_ns = time.perf_counter_ns() - observer_ns()

    def add_to(self, part: str) -> None:
        """Add the time since the last call to a part."""
        now_ns = time.perf_counter_ns() - self._observer_ns()
        setattr(self, part, getattr(self, part) + now_ns - self._last_ns)
        self._last_ns = now_ns
