"""A run on a Ray cluster: Ray Data's actor pool processes tickets, each of which stands for one part of the input.

The only module that imports ray. A ticket names no part: the coordinator assigns the next one of the worker's own
share, or steals one, and assigns the same one again if Ray retries the ticket because the worker died.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.exceptions

from pagedcli.config import LoadedConfig
from pagedcli.distributed.partition import Coordinator, Snapshot
from pagedcli.distributed.worker import Worker
from pagedcli.errors import PagedcliError

_REPORT_EVERY_S = 0.5
_PARTS_AT_ONCE = 2  # per worker: the next part's rows fill the engine while the last rows of one finish
_OBJECT_STORE_BYTES = 100 * 2**20  # enough for a local cluster: only tickets go through it


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a run."""

    num_workers: int
    num_cpus: int  # per worker
    num_gpus: int  # per worker


@contextmanager
def cluster(address: str | None, pool: WorkerPool) -> Iterator[None]:
    """A connection to a cluster; without an address a local one, for this run alone."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # on stderr; all of it is in the session's folder
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are also raised
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {
            "address": "local",
            "num_cpus": pool.num_cpus * pool.num_workers,
            "num_gpus": pool.num_gpus * pool.num_workers,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    try:
        with _silent_stderr():  # Ray's C++ code reports there that it has read the log level above
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "a local Ray cluster" if address is None else f"the Ray cluster {address}"
        raise PagedcliError(f"cannot start on {where}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what this process writes to file descriptor 2, also from C++."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class RayRun:
    """Runs the remaining parts on the connected cluster."""

    def __init__(
        self, folder: Path, loaded: LoadedConfig, parts: list[int], costs: list[int], pool: WorkerPool
    ) -> None:
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Coordinator)
        self._coordinator = actor.remote(parts, costs, pool.num_workers)
        self._dataset = _tickets(len(parts)).map_batches(
            _PartActor,
            batch_size=1,
            fn_constructor_args=(folder, loaded, self._coordinator),
            compute=ray.data.ActorPoolStrategy(
                size=min(pool.num_workers, len(parts)),
                max_tasks_in_flight_per_actor=_PARTS_AT_ONCE,
                max_concurrent_calls_per_actor=_PARTS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
        )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="ray data", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, up to a timeout. Returns whether the run has ended. Raises: PagedcliError on failure."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise PagedcliError(
                f"the run failed on the cluster: {cause_of(self._error)}",
                hint="finished rows are kept: run the same command with --resume",
            ) from self._error
        return True

    def stop(self) -> None:
        """Make the workers stop after their current step."""
        ray.get(self._coordinator.stop.remote())

    def snapshot(self) -> Snapshot:
        snapshot: Snapshot = ray.get(self._coordinator.snapshot.remote())
        return snapshot

    def _work(self) -> None:
        try:
            for _ in self._dataset.iter_batches(batch_size=1, prefetch_batches=0):
                pass
        except Exception as error:  # Ray wraps any exception of a worker.
            self._error = error


def _tickets(num_tickets: int) -> Any:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray.data.from_items([{"ticket": number} for number in range(num_tickets)], override_num_blocks=num_tickets)


class _PartActor:
    """A worker as a callable class for Ray Data: loaded once, called with one ticket after another."""

    def __init__(self, folder: Path, loaded: LoadedConfig, coordinator: Any) -> None:
        self._worker = Worker(folder, loaded)
        self._coordinator = coordinator
        self._name = ray.get_runtime_context().get_actor_id()
        self._sending = threading.Lock()  # one at a time, to keep reports in order
        threading.Thread(target=self._report_always, name="report", daemon=True).start()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for ticket in batch["ticket"].tolist():
            part = ray.get(self._coordinator.lease.remote(ticket, self._name))
            if part is not None:
                self._worker.run_part(part)
        self._report()
        return batch

    def _report_always(self) -> None:
        pause = threading.Event()
        while not self._report():
            pause.wait(_REPORT_EVERY_S)
        self._worker.stop()

    def _report(self) -> bool:
        process = f"{os.uname().nodename}:{os.getpid()}"
        with self._sending:
            answer = self._coordinator.report.remote(self._name, process, self._worker.stats)
        stop: bool = ray.get(answer)
        return stop


def cause_of(error: BaseException) -> str:
    """Our own message inside Ray's exception, whose text is the worker's traceback; otherwise its last line."""
    ours = re.findall(r"^pagedcli\.errors\.\w+: (.+)$", str(error), re.MULTILINE)
    if ours:
        return str(ours[-1])
    last = next((line.strip() for line in reversed(str(error).split("\n")) if line.strip()), "")
    return f"{type(error).__name__}: {last}"
