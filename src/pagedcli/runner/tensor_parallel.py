"""Tensor parallelism: each process runs its part of the model, rank 0 schedules and samples.

Used by LLMEngine. Rank 0 is the engine's process; it starts the others as workers, sends them each step over a pipe
and takes part in the collective operations itself. If a worker dies, the run ends with its error. At the end all ranks
leave the group at the same time: NCCL's communicators are destroyed together, or each rank waits for the others.
"""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from pagedcli.config import EngineConfig
from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.step_input import StepInput, StepTokens
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.planning.decide import rank_devices, resolve_device
from pagedcli.planning.machine import this_machine
from pagedcli.runner.loading import LoadedEngine, load_engine
from pagedcli.runner.model_runner import ModelRunner
from pagedcli.runner.sampler import SampledTokens

T = TypeVar("T")
MAX_RANKS = 8
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # upper bound for one collective operation of a step
_LEAVE_S = 5.0  # time limit for all ranks to leave the group
_REAP_S = 3.0  # how long to wait for a process that caused an error to exit
_STUCK_S = 6.0  # a worker has died this long ago: the main thread must be stuck in a collective
_POLL_S = 20e-6
# Ctrl-C reaches all processes of a terminal, and SIGTERM often all of a job: rank 0 decides, its workers end with it.
# They ignore these signals from before they import torch, which takes seconds.
_WORKER = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
from pagedcli.runner.tensor_parallel import run_worker
run_worker(int(sys.argv[1]))
"""


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
        rank_devices(config, machine)  # raises if there are too few GPUs, before anything starts
        self._config = config
        self._parallel = ParallelContext(0, size)
        self._ranks = _Ranks(config, size)
        self._failure: WorkerFailure | None = None
        self._finalizer = weakref.finalize(self, self._ranks.part)  # The workers end with this process at the latest.

    def load(self) -> LoadedEngine:
        """Load rank 0's part, while the workers load theirs."""
        try:
            join_group(self._config, self._parallel, self._ranks.store)
            loaded = load_engine(self._config, parallel=self._parallel, on_weights=self._all_loaded, agree=self._agree)
        except BaseException as error:
            self._end_after(error)
            raise
        self._ranks.runner = loaded.runner
        return loaded

    def launch(self, step: StepInput, sampling: SamplingInput) -> "_GroupStep":
        """Start a step on all ranks."""
        message = step, sampling.num_rows, sampling.is_plain
        return _GroupStep(self._raise_if_dead, self._on_all(message, lambda runner: runner.launch(step, sampling)))

    def launch_model(self, step: StepInput) -> "Callable[[SamplingInput], _GroupStep]":
        """Start the model's part of a step on all ranks. Returns what samples its tokens, on rank 0."""
        launched = self._on_all((step, None, False), lambda runner: runner.launch_model(step))

        def sample(sampling: SamplingInput) -> _GroupStep:
            message = None, sampling.num_rows, False
            return _GroupStep(self._raise_if_dead, self._on_all(message, lambda _: launched(sampling)))

        return sample

    def _on_all(self, message: tuple[StepInput | None, int | None, bool], on_rank_0: Callable[[ModelRunner], T]) -> T:
        """Do what a message for ModelRunner.follow says, on all ranks."""
        runner = self._ranks.runner
        if runner is None:
            raise self._failure or ConfigError("the engine is closed", hint="load it again")
        try:
            self._send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
            return on_rank_0(runner)
        except BaseException as error:  # the workers are stuck in this step
            self._end_after(error)
            raise

    def close(self) -> None:
        """End the workers and leave the group."""
        self._finalizer()

    def _end_after(self, error: BaseException) -> None:
        """End the group after an error in rank 0. Raises: WorkerFailure if a worker's death is the cause of it."""
        if isinstance(error, WorkerFailure):
            return  # it has ended
        try:
            if isinstance(error, RuntimeError):  # how gloo and NCCL report a lost peer, among other things
                deadline = time.monotonic() + _REAP_S
                while time.monotonic() < deadline and self._ranks.dead_worker() is None:
                    time.sleep(0.05)
                self._raise_if_dead(error)
        finally:
            self._ranks.part(in_order=False)

    def _all_loaded(self) -> None:
        for worker in self._ranks.workers:
            self._receive(worker)

    def _agree(self, num_blocks: int) -> int:
        """The smallest number of blocks of any rank."""
        smallest = min([num_blocks, *(int(self._receive(worker)) for worker in self._ranks.workers)])
        self._send(pickle.dumps(smallest))
        return smallest

    def _send(self, message: bytes) -> None:
        for worker in self._ranks.workers:
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
        worker = self._ranks.dead_worker()
        if worker is not None:
            self._fail(worker, cause)

    def _fail(self, worker: "_Worker", cause: BaseException | None) -> NoReturn:
        hint = "rows written before are kept: --resume continues after them"
        self._failure = WorkerFailure(worker.obituary(), hint=hint)
        self._ranks.part(in_order=False)
        raise self._failure from cause


@dataclass(frozen=True, slots=True)
class _GroupStep:
    """A step that all ranks have started. A LaunchedStep."""

    raise_if_dead: Callable[[], None]
    tokens: SampledTokens

    def read(self) -> StepTokens:
        """Wait for the tokens. Raises: WorkerFailure if a worker dies first, as NCCL would wait forever."""
        while not self.tokens.is_ready:
            self.raise_if_dead()
            time.sleep(_POLL_S)
        return self.tokens.read()


@dataclass(slots=True)
class _Worker:
    """A worker process as rank 0 sees it."""

    rank: int
    size: int
    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"
    last_words: str | None = None

    def obituary(self) -> str:
        """How it ended, as far as known."""
        deadline = time.monotonic() + _REAP_S
        while self.last_words is None and time.monotonic() < deadline:
            ended = self.process.poll() is not None  # first: what it said before is in the pipe by now
            with suppress(EOFError, OSError, ValueError):
                while self.last_words is None and self.pipe.poll():
                    kind, value = self.pipe.recv()
                    self.last_words = value if kind == "error" else None
            if ended:
                break
            time.sleep(0.01)
        name = f"tensor-parallel worker {self.rank} of {self.size} (pid {self.process.pid})"
        if self.last_words is not None:
            return f"{name} failed: {self.last_words}"
        code = self.process.returncode
        if code is None:
            return f"{name} does not answer"
        return f"{name} was killed by {signal.Signals(-code).name}" if code < 0 else f"{name} ended with code {code}"


class _Ranks:
    """The processes of a group, from their start to the moment when all have left it.

    A thread of its own watches the workers, and takes rank 0 out of the group: whatever waits there for a lost peer
    must not be the main thread.
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.runner: ModelRunner | None = None  # rank 0's, once it is loaded; its graphs reference the communicators
        self._folder = tempfile.TemporaryDirectory(prefix="pagedcli-")
        self.store = str(Path(self._folder.name) / "store")
        self.workers = [_start_worker(config, rank, size, self.store) for rank in range(1, size)]
        self._ended = False
        self._in_order = True
        self._must_leave, self._left = threading.Event(), threading.Event()
        threading.Thread(target=self._watch_and_leave, name="pagedcli-ranks", daemon=True).start()

    def dead_worker(self) -> "_Worker | None":
        return next((worker for worker in self.workers if worker.process.poll() is not None), None)

    def part(self, *, in_order: bool = True) -> None:
        """End the workers and leave the group, all at the same time and within _LEAVE_S. With `in_order` False,
        something has failed: nobody waits for anybody."""
        if self._ended:
            return
        self._ended, self._in_order = True, in_order
        deadline = time.monotonic() + _LEAVE_S
        for worker in self.workers:
            worker.pipe.close()  # The worker leaves when its pipe ends.
            if not in_order:
                worker.process.kill()
        self._must_leave.set()
        try:
            self._left.wait(max(0.0, deadline - time.monotonic()))
            for worker in self.workers:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also after Ctrl-C
            for worker in self.workers:
                worker.process.kill()
                worker.process.wait()
            self._folder.cleanup()  # last: NCCL's threads retry for minutes to read a store that is gone

    def _watch_and_leave(self) -> None:
        died_s: float | None = None
        while not self._must_leave.wait(0.25):
            dead = self.dead_worker()
            if dead is None:
                continue
            now = time.monotonic()
            died_s = now if died_s is None else died_s
            if now - died_s > _STUCK_S:  # the last resort against a hang
                sys.stderr.write(f"error: {dead.obituary()}; the engine was waiting for it\n")
                sys.stderr.flush()
                os._exit(1)
        runner, self.runner = self.runner, None
        with suppress(Exception):  # the group may have fallen apart already
            _leave_group(runner, in_order=self._in_order)
        self._left.set()


def _start_worker(config: EngineConfig, rank: int, size: int, store: str) -> _Worker:
    ours, theirs = socket.socketpair()
    # a subprocess, not multiprocessing, which would run the caller's main module a second time;
    # -P: a torch.py in the current folder must not be imported
    command = [sys.executable, "-P", "-c", _WORKER, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    pipe: Connection[Any, Any] = Connection(ours.detach())
    pipe.send((config, rank, size, store, os.getpid()))
    return _Worker(rank, size, process, pipe)


def join_group(config: EngineConfig, parallel: ParallelContext, store: str) -> None:
    """Join the process group of an engine: NCCL between GPUs, gloo between CPU processes of this machine."""
    device = rank_devices(config, this_machine())[parallel.rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here; the host name need not resolve
    # NCCL's monitor asks the store every second whether to dump; a rank that is gone would hold up the others' exit
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, parallel.size),  # type: ignore[attr-defined,unused-ignore]
        rank=parallel.rank,
        world_size=parallel.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _leave_group(runner: ModelRunner | None, *, in_order: bool = True) -> None:
    """Leave the process group, after dropping the graphs: NCCL requires it, as they reference its communicators.

    With `in_order` False a peer may be lost, and its operation still run on the GPU. NCCL's communicators are aborted
    then, as destroying them would wait for all ranks; gloo waits for nobody.
    """
    if runner is not None:
        runner.graphs = None
    if not dist.is_initialized():
        return
    if in_order or dist.get_backend() == "gloo":
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()  # type: ignore[attr-defined,unused-ignore]


def run_worker(pipe_number: int) -> None:
    """A worker's main function: join the group, load its part, run rank 0's steps until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(pipe_number)
    config, rank, size, store, parent_pid = pipe.recv()
    threading.Thread(target=_end_with_parent, args=(parent_pid, store), daemon=True).start()
    parallel = ParallelContext(rank, size)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    runner: ModelRunner | None = None
    code = 0
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
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without destructors, which could wait for other ranks


def _end_with_parent(parent_pid: int, store: str) -> None:
    """End the worker if rank 0 is killed: the pipe closes, but a worker in a collective would not notice."""
    while os.getppid() == parent_pid:
        time.sleep(1)
    shutil.rmtree(Path(store).parent, ignore_errors=True)
    os._exit(1)
