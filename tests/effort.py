"""Limits of work that hold on any machine: processor time in multiples of a fixed piece of Python."""

import time
from functools import cache


class Effort:
    """Counts the processor time of this thread within it.

    `pieces`: how often a fixed loop would have run in that time. It takes about 20 ms on a processor of 2023. Other
    processes and the speed of the machine hardly matter.
    """

    pieces = 0.0

    def __enter__(self):
        reference_s()
        self._start_s = time.thread_time()
        return self

    def __exit__(self, *_):
        self.pieces = (time.thread_time() - self._start_s) / reference_s()


@cache
def reference_s():
    """The processor time of the fixed loop in this process."""
    return min(_timed_loop() for _ in range(3))


def _timed_loop():
    start_s, total = time.thread_time(), 0
    for number in range(400_000):
        total += number % 7
    return time.thread_time() - start_s
