"""Traces of simulated runs, and events in memory as a source."""

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress

from scripted import Simulation

from pagedcli.events import Event
from pagedcli.trace.check import check_trace
from pagedcli.trace.files import TraceWriter


def simulated(*, num_blocks=14, num_requests=24, seed=5, caching=True, fails=0.0, **limits) -> list[Event]:
    """A run in which everything happens: hits, forks, copies, chunks, preemptions, evictions, waiting, salts. `fails`:
    share of steps whose launch or read raises."""
    rng = random.Random(seed)
    events: list[Event] = []
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 7, "chunked_prefill_size": 5, **limits}
    sim = Simulation(num_blocks, 2, emit=events.append, trace_tokens=True, enable_prefix_caching=caching, **limits)
    for index in range(num_requests):
        prompt = [9] * rng.randrange(8) + [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
        sim.add(prompt, rng.randrange(2, 9), n=1 + (index % 5 == 0), cache_salt="a" if index % 7 == 0 else None)
    while sim.has_unfinished_requests():
        sim.executor.fail_launch, sim.executor.fail_read = rng.random() < fails / 2, rng.random() < fails / 2
        with suppress(RuntimeError):
            sim.step()
    return events


def write(path, events):
    with TraceWriter(path) as writer:
        for event in events:
            writer(event)
    return path


class EventList:
    """Events in memory as a source."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.notes: list[str] = []
        self._events = events
        self._number = 0

    def __iter__(self) -> Iterator[Event]:
        for number, event in enumerate(self._events, 1):
            self._number = number
            yield event

    @property
    def place(self) -> str:
        return f"event {self._number}"


def check_events(events):
    """check_trace for events in memory; errors name the event's number, from 1."""
    return check_trace(EventList(events))
