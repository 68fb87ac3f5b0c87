"""A machine that fails: its clock, its disk, and the deaths of its processes, all drawn from one seed.

Everything that a process does to the disk goes through `os`, whose functions are replaced while it lives: before any of
them the process may be killed, the power may go, or the disk may be full. What a death leaves is taken at that moment;
what the process still does while it unwinds is undone.
"""

import errno
import gc
import io
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from power_loss import CONTENTS, Cut, WatchedDisk

from pagedcli import files
from pagedcli.batch import journal

DEATHS = ("kill", "power cut")
MOST_STEP_S = 0.4


class Died(BaseException):
    """The process is gone: no `except Exception` of the program may take notice."""


@dataclass(slots=True)
class Fate:
    """What will happen to a process: `kind` before its `number`-th operation on the disk, or step of the engine."""

    kind: str
    number: int
    at_step: bool


class Machine:
    """A folder on a disk, and one process after the other. `counts`: what has happened, by kind."""

    def __init__(self, folder: Path, rng: random.Random, counts: Counter[str], *, is_calm: bool = False) -> None:
        self.folder, self.rng, self.counts, self.is_calm = folder, rng, counts, is_calm
        self.now_s = 1e6 * rng.random()
        self._wall_s = 1.7e9
        self.lives = 0
        self._mean_life = rng.choice((3, 10, 30))  # operations or steps
        self.is_full = self.is_interrupted = False  # what the process has to take notice of
        self._fate = Fate("none", 0, at_step=False)
        self._num_operations = self._num_steps = 0
        self._cut: Cut | None = None
        self._disk = WatchedDisk(folder)
        self._flushed: dict[Path, list[tuple[float, int]]] = {}  # journal -> when it had how many rows
        self.owed: dict[Path, int] = {}  # journal -> rows that the next process must find in it

    # ------------------------------------------------------------------ what a process sees

    def clock_ns(self) -> int:
        return int(self.now_s * 1e9)

    def step(self) -> None:
        """The engine computes: time passes, and the wall clock may be set."""
        self.now_s += self.rng.uniform(0.001, MOST_STEP_S)
        if self.rng.random() < 0.01:
            self._wall_s += self.rng.uniform(-1e6, 1e6)
            self.counts["jumps of the clock"] += 1
        self._num_steps += 1
        if self._fate.at_step and self._num_steps == self._fate.number:
            self._strike()

    def flushed(self, path: Path, num_rows: int) -> None:
        """A journal has handed over its rows to the operating system."""
        self._flushed.setdefault(path, []).append((self.now_s, num_rows))

    # ------------------------------------------------------------------ a process

    def run(self, program: Callable[[], None]) -> bool:
        """Let a process live until its end or its death. Returns whether it ended by itself."""
        self.lives += 1
        self.close()
        self._disk = WatchedDisk(self.folder)  # what is there now is on the disk
        self._num_operations = self._num_steps = 0
        self._fate = Fate("none", 0, at_step=False) if self.is_calm else self._draw()
        self._flushed.clear()
        try:
            with self._patches():
                program()
        except Died:
            assert self._cut is not None, "only a strike raises it"
            if self._fate.kind == "kill":
                self._cut.leave("kept", keeps_names=True)
            else:
                self._cut.leave(content := self.rng.choice(CONTENTS), keeps_names=self.rng.random() < 0.5)
                self.counts["torn writes"] += content in ("cut", "zeros", "noise") and self._cut.has_unsynced
            return False
        finally:
            self.is_full = self.is_interrupted = False
        return True

    def cut_power(self) -> None:
        """After the end of a process."""
        self._disk.cut().leave(self.rng.choice(CONTENTS), keeps_names=self.rng.random() < 0.5)

    def close(self) -> None:
        """Close what is held of the disk, and what a dead process has left open, as the system would."""
        self._disk.close()
        gc.collect()
        gc.freeze()  # with torch loaded the next collection would take a hundred times as long
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"{self.folder}/"):
                    os.close(int(name))

    def _draw(self) -> Fate:
        kind = self.rng.choices(("none", "interrupt", "kill", "power cut", "full disk"), (2, 2, 10, 6, 2))[0]
        at_step = kind == "interrupt" or (kind in DEATHS and self.rng.random() < 0.3)
        return Fate(kind, int(self.rng.expovariate(1 / self._mean_life)) + 1, at_step)

    def _strike(self) -> None:
        """The process dies here, or finds the disk full from here on, or is asked to stop."""
        self.counts[f"{self._fate.kind}s"] += 1
        self.is_full = self._fate.kind == "full disk"
        self.is_interrupted = self._fate.kind == "interrupt"
        if self._fate.kind not in DEATHS:
            return
        is_kill = self._fate.kind == "kill"
        for path, moments in self._flushed.items():
            # A power cut may take the rows of the last second, and those of the step in which the journal was to sync.
            durable = [rows for at_s, rows in moments if is_kill or at_s < self.now_s - 1 - 2 * MOST_STEP_S]
            self.owed[path] = max(self.owed.get(path, 0), *durable, 0)
        self._cut = self._disk.cut()
        raise Died

    def _operate(self) -> None:
        self._num_operations += 1
        if not self._fate.at_step and self._num_operations == self._fate.number and self._fate.kind != "none":
            self._strike()

    def _patches(self) -> ExitStack:
        stack = ExitStack()
        originals = SimpleNamespace(write=os.write, replace=os.replace, unlink=os.unlink, ftruncate=os.ftruncate)

        def write(fd: int, data: bytes) -> int:
            if os.fstat(fd).st_dev != self.folder.stat().st_dev or self.is_calm:
                return originals.write(fd, data)
            before = self._num_operations + 1 == self._fate.number
            if before and not self._fate.at_step and self._fate.kind in DEATHS:  # it dies in the middle of a write
                originals.write(fd, bytes(data)[: self.rng.randint(0, len(data))])
            self._operate()
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return originals.write(fd, data)

        def fsync(fd: int) -> None:
            self._operate()
            self._disk.sync(fd)

        def operation(name: str) -> Callable[..., object]:
            def call(*given: object, **named: object) -> object:
                self._operate()
                return getattr(originals, name)(*given, **named)

            return call

        for name in ("replace", "unlink", "ftruncate"):
            stack.enter_context(mock.patch.object(os, name, operation(name)))
        stack.enter_context(mock.patch.object(os, "write", write))
        stack.enter_context(mock.patch.object(os, "fsync", fsync))
        stack.enter_context(mock.patch.object(files, "_unnamed_file", _unnamed_file))
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self._wall_s + self.now_s)
        stack.enter_context(mock.patch.object(journal, "time", clock))
        return stack


class _File(io.FileIO):
    """A file whose writes go through `os.write`."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return os.write(self.fileno(), data)


def _unnamed_file(folder: Path) -> io.BufferedRandom:
    file = io.BufferedRandom(_File(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "r+"))
    files.lock(file)
    return file
