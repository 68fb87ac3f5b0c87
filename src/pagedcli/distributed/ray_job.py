"""A run on a Ray cluster: Ray Data's actor pool processes the parts of the input, and retries those of dead workers.

The only module that imports ray.
"""

import logging
import os
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.data
import ray.exceptions

from pagedcli.batch.stats import BatchStats
from pagedcli.buckets import Folder
from pagedcli.config import LoadedConfig
from pagedcli.distributed.parts import PARTS_AT_ONCE
from pagedcli.distributed.queue import Queue, read_terms
from pagedcli.distributed.worker import Worker
from pagedcli.errors import PagedcliError
from pagedcli.line_files import COPIES

_OBJECT_STORE_BYTES = 100 * 2**20  # enough for a local cluster: only numbers and counters go through it


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a run."""

    least: int
    most: int
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
            "num_cpus": pool.num_cpus * pool.most,
            "num_gpus": pool.num_gpus * pool.most,
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
    """Runs the remaining parts on the connected cluster. `runs`: the counters of each worker after its last part, by
    worker and process, as a restarted worker counts from 0."""

    def __init__(self, folder: Path | str, loaded: LoadedConfig, parts: list[int], pool: WorkerPool) -> None:
        """`folder`: of the parts, or the URL of their queue, from which each worker takes the next one."""
        ray.data.DataContext.get_current().enable_progress_bars = False
        # Workers take turns: in this order each begins with a share of neighbours, whose prefixes are alike.
        most = min(pool.most, len(parts))
        stride = -(-len(parts) // most)
        items = [{"part": part} for start in range(stride) for part in parts[start::stride]]
        self._dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _PartActor,
            batch_size=1,
            fn_constructor_args=(folder, loaded),
            compute=ray.data.ActorPoolStrategy(
                min_size=min(pool.least, most),
                max_size=most,
                max_tasks_in_flight_per_actor=PARTS_AT_ONCE,
                max_concurrent_calls_per_actor=PARTS_AT_ONCE,
                enable_true_multi_threading=True,
            ),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus,
        )
        self.runs: dict[str, dict[str, BatchStats]] = {}
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

    def _work(self) -> None:
        try:
            for batch in self._dataset.iter_batches(batch_size=1, prefetch_batches=0):
                worker, process, stats = (batch[name][0] for name in ("worker", "process", "stats"))
                self.runs = {**self.runs, worker: {**self.runs.get(worker, {}), process: pickle.loads(stats)}}
        except Exception as error:  # Ray wraps any exception of a worker.
            self._error = error


class _PartActor:
    """A worker as a callable class for Ray Data: loaded once, called with one part after another."""

    def __init__(self, folder: Path | str, loaded: LoadedConfig) -> None:
        self._name = ray.get_runtime_context().get_actor_id()
        self._queue: Queue | None = None
        if isinstance(folder, str):
            terms, self._local = read_terms(at := Folder(folder)), TemporaryDirectory(prefix=COPIES)
            assert terms is not None, "the input has been cut"
            self._queue, folder = Queue(at, terms), Path(self._local.name)
            self._queue.open(folder)
            self._renewing = self._queue.leases.renewed()
            self._renewing.__enter__()  # until the process ends
        self._worker = Worker(folder, loaded)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for part in batch["part"].tolist():
            if self._queue is None:
                self._worker.run_part(part)
            else:
                self._queue.run_next(self._worker)
        process = f"{os.uname().nodename}:{os.getpid()}"
        return {"worker": [self._name], "process": [process], "stats": [pickle.dumps(self._worker.stats)]}


def cause_of(error: BaseException) -> str:
    """Our own message inside Ray's exception, whose text is the worker's traceback; otherwise its last line."""
    ours = re.findall(r"^pagedcli\.errors\.\w+: (.+)$", str(error), re.MULTILINE)
    if ours:
        return str(ours[-1])
    last = next((line.strip() for line in reversed(str(error).split("\n")) if line.strip()), "")
    return f"{type(error).__name__}: {last}"
