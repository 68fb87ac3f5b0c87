"""Assigns parts to workers and collects their counters. The driver runs it as a separate actor.

A plain class without Ray, for tests.
"""

import time
from dataclasses import dataclass, field

from pagedcli.batch.stats import BatchStats
from pagedcli.distributed.partition import PartQueue


@dataclass(slots=True)
class WorkerState:
    """One worker, over all its restarts."""

    seat: int  # its share of the parts
    heard_s: float
    runs: dict[str, BatchStats] = field(default_factory=dict)  # per process: a restarted worker counts from 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters of each worker process, by worker and process."""

    workers: dict[str, dict[str, BatchStats]]
    num_stolen: int  # parts done by another worker than planned


class Coordinator:
    """Assigns parts to tickets. A ticket presented again, because its worker died, gets the same part."""

    def __init__(self, parts: list[int], costs: list[int], num_workers: int) -> None:
        self._parts = parts
        self._queue = PartQueue(costs, num_workers)
        self._num_workers = num_workers
        self._leases: dict[int, int] = {}  # ticket -> part
        self._workers: dict[str, WorkerState] = {}
        self._stopping = False

    def lease(self, ticket: int, worker: str) -> int | None:
        """The part of a ticket; None when the run is stopping or no part is left."""
        if self._stopping:
            return None
        if ticket not in self._leases:
            place = self._queue.take(self._state(worker).seat)
            if place is None:
                return None
            self._leases[ticket] = self._parts[place]
        return self._leases[ticket]

    def report(self, worker: str, process: str, stats: BatchStats) -> bool:
        """Record a worker's counters. Returns whether it should stop."""
        state = self._state(worker)
        state.runs[process] = stats
        state.heard_s = time.monotonic()
        return self._stopping

    def stop(self) -> None:
        """Assign no more parts, and stop those in progress."""
        self._stopping = True

    def snapshot(self) -> Snapshot:
        runs = {worker: state.runs for worker, state in self._workers.items()}
        return Snapshot(runs, self._queue.num_stolen)

    def _state(self, worker: str) -> WorkerState:
        if worker not in self._workers:
            self._workers[worker] = WorkerState(self._free_seat(), time.monotonic())
        return self._workers[worker]

    def _free_seat(self) -> int:
        """A free seat; otherwise that of the worker silent for longest, which is probably dead."""
        taken = {state.seat: state.heard_s for state in self._workers.values()}
        free = [seat for seat in range(self._num_workers) if seat not in taken]
        return free[0] if free else min(taken, key=lambda seat: taken[seat])
