"""Leases in a folder or a bucket, each held by a process of any machine while it lives. Used by distributed.queue.

Who takes a lease creates the next of its files, lease/NAME.0000, lease/NAME.0001, ..., and renews it by writing the
next beat. No clock of another machine is read: a lease has expired once somebody has seen its newest file unchanged for
as long as leases last, by a clock of its own.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from pagedcli.buckets import Folder
from pagedcli.errors import PagedcliError
from pagedcli.process import meanwhile

LEASE_S = 60.0  # how long a worker may be silent
BEATS = 4  # in that time


class Holder(msgspec.Struct, frozen=True):
    """Content of a lease's file."""

    worker: str  # host:process:token
    beat: int = 0  # renewals so far
    num_rows: int = 0  # of the part, as far as they were sent
    is_given_back: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """A lease that this process has taken."""

    name: str
    file: str
    beat: int = 0
    num_rows: int = 0
    num_sent_bytes: int | None = None  # of the part's journal; None: it is being fetched


class Leases:
    """The leases in a folder. `observe` is called before a lease is renewed."""

    def __init__(
        self,
        folder: Folder,
        observe: Callable[[Lease], None] = lambda lease: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held: set[Lease] = set()
        self._folder = folder
        self._observe = observe
        self._clock = clock
        self._worker = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._seen: dict[str, tuple[Holder, float]] = {}  # file -> content, and since when it has not changed
        self._lock = threading.Lock()  # one renewal at a time

    def newest(self) -> dict[str, str]:
        """The newest file of each lease."""
        return {file.rpartition("/")[2].partition(".")[0]: file for file in self._folder.names("lease")}

    def holder(self, file: str) -> Holder:
        """The content of a file; one that a power cut has damaged expires as any."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(self._folder.read(file), type=Holder)
        return Holder("unknown")

    def take(self, name: str, newest: str | None) -> Lease | None:
        """Take a lease with this newest file; None if somebody has it, or was faster."""
        if newest is not None and not self._is_free(newest):
            return None
        generation = 0 if newest is None else int(newest[-4:]) + 1
        lease = Lease(name, f"lease/{name}.{generation:04}")
        if not self._folder.create(lease.file, msgspec.json.encode(Holder(self._worker))):
            return None
        self.held.add(lease)
        return lease

    def renew(self, lease: Lease, *, is_given_back: bool = False) -> None:
        """Say that its holder lives; if it cannot be said, the next beat may do so before the lease expires."""
        with suppress(PagedcliError, OSError), self._lock:
            if lease in self.held:
                self._observe(lease)
                lease.beat += 1
                holder = Holder(self._worker, lease.beat, lease.num_rows, is_given_back)
                self._folder.write(lease.file, msgspec.json.encode(holder))

    def release(self, lease: Lease, *, give_back: bool = True) -> None:
        """Renew a lease no more. With `give_back` another may take it at once."""
        if give_back:
            self.renew(lease, is_given_back=True)
        with self._lock:
            self.held.discard(lease)

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Within this context a thread renews the leases that are held; at its end they are given back."""

        def renew(ended: threading.Event) -> None:
            while not ended.wait(LEASE_S / BEATS):
                for lease in list(self.held):
                    self.renew(lease)

        try:
            with meanwhile(renew):
                yield
        finally:
            for lease in list(self.held):
                self.release(lease)

    def _is_free(self, file: str) -> bool:
        before_s, holder = self._clock(), self.holder(file)
        if file not in self._seen or self._seen[file][0] != holder:
            self._seen[file] = holder, self._clock()
        return holder.is_given_back or before_s - self._seen[file][1] >= LEASE_S
