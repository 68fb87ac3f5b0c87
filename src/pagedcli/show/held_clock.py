"""The clock of a run that somebody watches: time in which the run waits for a reader or a key is not the engine's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class HeldClock:
    """A monotonic clock in nanoseconds that stands still while it is held. For one thread."""

    def __init__(self) -> None:
        self._num_held_ns = 0  # so far

    def __call__(self) -> int:
        return time.perf_counter_ns() - self._num_held_ns

    @contextmanager
    def held(self) -> Iterator[None]:
        """The time within this context does not pass on the clock."""
        now_ns = self()
        try:
            yield
        finally:
            self._num_held_ns += self() - now_ns
