"""Tensor parallelism: each process runs its part of the model, rank 0 schedules and samples.

Used by LLMEngine. Rank 0 is the engine's process; it starts the others as workers, sends them each step over a pipe
and takes part in the collective operations itself. If a worker dies, the run ends with its error.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pagedcli.config import EngineConfig
from pagedcli.core.step_input import SamplingInput, StepInput, StepTokens
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.planning.decide import rank_device, resolve_device
from pagedcli.planning.machine import this_machine
from pagedcli.runner.loading import LoadedEngine, load_engine
from pagedcli.runner.model_runner import ModelRunner
from pagedcli.runner.sampler import SampledTokens

MAX_RANKS = 8
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # upper bound for one collective operation of a step
_REAP_S = 5.0  # how long to wait for a process that caused an error to exit
_STUCK_S = 30.0  # after a worker's death: by then the main thread must be stuck in a collective
_POLL_S = 20e-6


class WorkerFailure(PagedcliError):
    """A process of a tensor-parallel group died; rows written before are kept."""


class WorkerGroup:
    """The workers of one engine, and rank 0's part. An Executor.

    Raises:  ConfigError for an impossible number of ranks; WorkerFailure, in later calls too, if a worker dies.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        if size > MAX_RANKS:
            raise ConfigError(f"tensor_parallel_size is {size}, allowed: 1 to {MAX_RANKS}")
        if dist.is_initialized():
            raise ConfigError(
                "tensor_parallel_size is above 1, but this process is in a torch.distributed group already",
                hint="close() the other engine first",
            )
        # every process counts its GPUs from the same one, whichever is current there
        machine = this_machine()
        config = msgspec.structs.replace(config, device=str(resolve_device(config.device, machine)))
        rank_device(config, machine)  # raises if there are too few GPUs, before anything starts
        self._config = config
        self._parallel = ParallelContext(0, size)
        self._folder = tempfile.TemporaryDirectory(prefix="pagedcli-")
        self._store = str(Path(self._folder.name) / "store")
        self._runner: ModelRunner | None = None
        self._workers = [_start_worker(config, rank, size, self._store) for rank in range(1, size)]
        self._reported = threading.Event()  # the main thread has seen the failure, or there is none
        self._finalizer = weakref.finalize(self, _end_workers, self._workers, self._reported, self._folder)
        threading.Thread(target=_watch, args=(self._workers, self._reported), daemon=True).start()

    def load(self) -> LoadedEngine:
        """Load rank 0's part, while the workers load theirs."""
        try:
            join_group(self._config, self._parallel, self._store)
            loaded = load_engine(self._config, parallel=self._parallel, on_weights=self._all_loaded, agree=self._agree)
        except RuntimeError as error:
            self.close_after(error)
            raise
        except PagedcliError:
            self.close()
            raise
        self._runner = loaded.runner
        return loaded

    def launch(self, step: StepInput, sampling: SamplingInput) -> "_GroupStep":
        """Start a step on all ranks."""
        assert self._runner is not None, "load comes first"
        self._send(pickle.dumps((step, sampling.num_rows, sampling.is_plain), protocol=pickle.HIGHEST_PROTOCOL))
        try:
            return _GroupStep(self, self._runner.launch(step, sampling))
        except RuntimeError as error:  # how gloo and NCCL report a lost peer, among other things
            self.close_after(error)
            raise
        except BaseException:  # the workers are stuck in this step
            self.close()
            raise

    def wait(self, tokens: SampledTokens) -> None:
        """Wait until the tokens can be read; raise if a worker dies first, as NCCL would wait forever."""
        while not tokens.is_ready:
            self._raise_if_dead()
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the workers and leave the group."""
        self._finalizer()
        if not dist.is_initialized():
            return
        # destroying NCCL's communicators would wait for dead peers; they end with this process
        if dist.get_backend() == "gloo" or all(worker.process.returncode == 0 for worker in self._workers):
            _leave_group(self._runner)

    def close_after(self, error: RuntimeError) -> None:
        """End the workers; raises WorkerFailure if one of them is the cause of an error of rank 0."""
        deadline = time.monotonic() + _REAP_S
        while time.monotonic() < deadline and all(worker.process.poll() is None for worker in self._workers):
            time.sleep(0.05)
        try:
            self._raise_if_dead(error)
        finally:
            self.close()

    def _all_loaded(self) -> None:
        for worker in self._workers:
            self._receive(worker)

    def _agree(self, num_blocks: int) -> int:
        """The smallest number of blocks of any rank."""
        smallest = min([num_blocks, *(int(self._receive(worker)) for worker in self._workers)])
        self._send(pickle.dumps(smallest))
        return smallest

    def _send(self, message: bytes) -> None:
        for worker in self._workers:
            try:
                worker.pipe.send_bytes(message)
            except OSError as error:
                self._fail(worker, error)

    def _receive(self, worker: "_Worker") -> Any:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError) as error:
            self._fail(worker, error)
        if kind == "error":
            worker.last_words = value
            self._fail(worker, None)
        return value

    def _raise_if_dead(self, cause: BaseException | None = None) -> None:
        for worker in self._workers:
            if worker.process.poll() is not None:
                self._fail(worker, cause)

    def _fail(self, worker: "_Worker", cause: BaseException | None) -> None:
        failure = WorkerFailure(worker.obituary(), hint="rows written before are kept: --resume continues after them")
        self.close()
        raise failure from cause


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step that all ranks have started. A LaunchedStep."""

    group: WorkerGroup
    tokens: SampledTokens

    def read(self) -> StepTokens:
        """Wait for the tokens. Raises: WorkerFailure if a worker dies first."""
        self.group.wait(self.tokens)
        return self.tokens.read()


class _Worker:
    """A worker process as rank 0 sees it."""

    def __init__(self, rank: int, size: int, process: "subprocess.Popen[bytes]", pipe: "Connection[Any, Any]") -> None:
        self.rank = rank
        self.size = size
        self.process = process
        self.pipe = pipe
        self.last_words: str | None = None

    def obituary(self) -> str:
        """How it ended, as far as known."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REAP_S)
        with suppress(EOFError, OSError, ValueError):
            while self.last_words is None and self.pipe.poll():
                kind, value = self.pipe.recv()
                self.last_words = value if kind == "error" else None
        name = f"tensor-parallel worker {self.rank} of {self.size} (pid {self.process.pid})"
        if self.last_words is not None:
            return f"{name} failed: {self.last_words}"
        code = self.process.returncode
        if code is None:
            return f"{name} does not answer"
        return f"{name} was killed by {signal.Signals(-code).name}" if code < 0 else f"{name} ended with code {code}"


def _start_worker(config: EngineConfig, rank: int, size: int, store: str) -> _Worker:
    ours, theirs = socket.socketpair()
    # a subprocess, not multiprocessing, which would run the caller's main module a second time;
    # -P: a torch.py in the current folder must not be imported
    command = [sys.executable, "-P", "-m", "pagedcli.runner.tensor_parallel", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    pipe: Connection[Any, Any] = Connection(ours.detach())
    pipe.send((config, rank, size, store, os.getpid()))
    return _Worker(rank, size, process, pipe)


def _end_workers(workers: list[_Worker], reported: threading.Event, folder: "tempfile.TemporaryDirectory[str]") -> None:
    """Close the pipe, which tells the worker to exit."""
    reported.set()
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        try:
            worker.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    folder.cleanup()


def _watch(workers: list[_Worker], reported: threading.Event) -> None:
    """The last resort against a hang: end this process if a dead worker has not been noticed in time."""
    while not reported.wait(0.5):
        if any(worker.process.poll() is not None for worker in workers):
            if not reported.wait(_STUCK_S):
                dead = next(worker for worker in workers if worker.process.poll() is not None)
                sys.stderr.write(f"error: {dead.obituary()}; the engine was waiting for it\n")
                sys.stderr.flush()
                os._exit(1)
            return


def join_group(config: EngineConfig, parallel: ParallelContext, store: str) -> None:
    """Join the process group of an engine: NCCL between GPUs, gloo between CPU processes of this machine."""
    device = rank_device(config, this_machine(), parallel.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host name need not resolve
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, parallel.size),  # type: ignore[attr-defined,unused-ignore]
        rank=parallel.rank,
        world_size=parallel.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _leave_group(runner: ModelRunner | None) -> None:
    """Destroy the process group, after the graphs: NCCL requires it, as they reference its communicators."""
    if runner is not None:
        runner.graphs = None
    dist.destroy_process_group()


def run_worker(pipe: "Connection[Any, Any]") -> None:
    """A worker's main function: join the group, load its part, run rank 0's steps until the pipe closes."""
    config, rank, size, store, parent_pid = pipe.recv()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()
    parallel = ParallelContext(rank, size)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    runner: ModelRunner | None = None
    try:
        join_group(config, parallel, store)

        def agree(num_blocks: int) -> int:
            pipe.send(("num_blocks", num_blocks))
            return int(pickle.loads(pipe.recv_bytes()))

        loaded = load_engine(config, parallel=parallel, on_weights=lambda: pipe.send(("loaded", None)), agree=agree)
        runner = loaded.runner
        while True:
            step, num_sampled, plain = pickle.loads(pipe.recv_bytes())
            runner.follow(step, num_sampled=num_sampled, plain=plain)
    except EOFError:
        _leave_group(runner)
    except Exception as error:  # whatever it is, rank 0 reports it to the user
        reason = error.message if isinstance(error, PagedcliError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            pipe.send(("error", reason))
        raise SystemExit(1) from error


def _end_with_parent(parent_pid: int) -> None:
    """End the worker if rank 0 is killed: the pipe closes, but a worker in a collective would not notice."""
    while os.getppid() == parent_pid:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    run_worker(Connection(int(sys.argv[1])))
