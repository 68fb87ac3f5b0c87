"""A run as a queue in a folder or a bucket: workers of any machines take its parts by leases and write one output.

Used by cli.queue and distributed.ray_job. The queue has queue.json, inputs/ (what PartFolder.cut makes), lease/, and
journal/ with the rows of unfinished parts, a file per beat. The output is that of PartFolder: a part is sent as
.work/00012/DIGEST, and the record that is created first says which of them it is.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagedcli.batch.fingerprint import settings_that_differ
from pagedcli.batch.journal import RunRecord, journal_path, read_record, record_path
from pagedcli.buckets import Folder, is_url
from pagedcli.distributed.leases import Lease, Leases
from pagedcli.distributed.parts import MANIFEST, ROWS, WORK, Manifest, PartFolder
from pagedcli.errors import UsageError

if TYPE_CHECKING:
    from pagedcli.distributed.worker import Worker

POLL_S = 1.0
_TERMS, _INPUTS, _JOURNAL = "queue.json", "inputs", "journal"


class Terms(msgspec.Struct, frozen=True):
    """The content of queue.json, which appears once the input has been cut."""

    asked: dict[str, str]  # the settings, the input and the output of the run
    inputs: str  # their folder
    manifest: Manifest


def join(folder: Folder, output: str, asked: dict[str, str], local: Path, cut: Callable[[], PartFolder]) -> "Queue":
    """The queue in a folder. Of all that join it one cuts the input, and the others wait. `local`: the folder of the
    parts that are made here. Raises: UsageError if the queue is of another run."""
    asked = {**asked, "-o": output if is_url(output) else os.path.abspath(output)}
    leases = Leases(folder)
    while (terms := read_terms(folder)) is None:
        if leases.take("cut", leases.newest().get("cut")) is not None:
            with leases.renewed():
                _send_cut(folder, asked, parts := cut())
            parts.remove_work()
        else:
            time.sleep(POLL_S)
    if differ := settings_that_differ(terms.asked, asked):
        hint = "use the same input and settings, or another --queue and -o"
        raise UsageError(f"the queue {folder} is of a run with other settings; {'; '.join(differ)}", hint=hint)
    queue = Queue(folder, terms)
    queue.open(local)
    return queue


def read_terms(folder: Folder) -> Terms | None:
    """None if the input has not been cut yet."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode(folder.read(_TERMS), type=Terms)
    return None


def _send_cut(folder: Folder, asked: dict[str, str], parts: PartFolder) -> None:
    """Send the input of each part, then the terms."""
    inputs = f"{_INPUTS}/{secrets.token_hex(4)}"  # its own, as a slow worker may still be sending another cut
    if not folder.create(f"{inputs}/probe", b"1") or folder.create(f"{inputs}/probe", b"2"):
        raise UsageError(f"{folder} replaces a file where it should create one: no queue can be there")
    files = [parts.path / ROWS, *(path for number in range(parts.manifest.num_parts) for path in parts.inputs(number))]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda path: folder.send(path, f"{inputs}/{path.name}"), files))
    folder.create(_TERMS, msgspec.json.encode(Terms(asked, inputs, parts.manifest)))


def lease_name(part: int) -> str:
    return f"{part:05}"


def next_part(free: list[int], last: int | None) -> int:
    """Which of the untaken parts a worker takes: the one after its last one, whose prefixes are alike, else one in the
    widest gap: its middle, as another worker comes from below, or the first part of all."""
    if last is not None and last + 1 in free:
        return last + 1
    gaps = ([part for _, part in gap] for _, gap in groupby(enumerate(free), lambda pair: pair[1] - pair[0]))
    gap = max(gaps, key=len)
    return gap[len(gap) // 2 if gap[0] else 0]


class Queue:
    """A queue whose input has been cut. `open` comes before parts are taken."""

    _local: PartFolder

    def __init__(self, folder: Folder, terms: Terms, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.output = Folder(terms.asked["-o"])
        self.manifest = terms.manifest
        self.leases = Leases(folder, self._send_journal, clock=clock)
        self.records: dict[int, RunRecord] = {}  # of the parts that are done
        self.left = list(range(self.manifest.num_parts))  # the others
        self._folder = folder
        self._inputs = terms.inputs
        self._last: int | None = None  # the part taken last
        self._taking = threading.Lock()

    def open(self, local: Path) -> None:
        """Write what describes the run into the folder of the parts that are made here, and into the output."""
        manifest = msgspec.json.format(msgspec.json.encode(self.manifest)) + b"\n"
        (local / WORK).mkdir(exist_ok=True)
        (local / MANIFEST).write_bytes(manifest)
        if MANIFEST not in self.output.names():
            self._folder.fetch(f"{self._inputs}/{ROWS}", local / ROWS)
            self.output.send(local / ROWS, ROWS)
        if not self.output.create(MANIFEST, manifest):
            raise UsageError(f"{self.output} is the output of another run", hint="use new folders for --queue and -o")
        self.output.fetch(ROWS, local / ROWS)
        self._local = PartFolder(local)
        self.update()

    def update(self) -> None:
        """Read the records of the parts that were done meanwhile."""
        names = set(self.output.names())
        done = [number for number in self.left if self.manifest.part(number) in names]
        self.records = self.records | {number: self._record(number) for number in done}  # others iterate over it
        self.left = [number for number in self.left if number not in self.records]

    def count(self) -> tuple[int, int]:
        """The rows of the parts that are done, and the failed ones of these."""
        records = self.records.values()
        return sum(each.num_rows for each in records), sum(each.num_failed_rows for each in records)

    def take(self) -> Lease | None:
        """Take a part that is not done and that no living worker has."""
        while True:
            self.update()
            newest = self.leases.newest()
            free = [number for number in self.left if lease_name(number) not in newest]
            if not free:
                break
            self._last = next_part(free, self._last)
            if lease := self.leases.take(lease_name(self._last), None):
                return lease
        held = {lease.name for lease in list(self.leases.held)}
        names = [name for name in map(lease_name, self.left) if name not in held]
        return next((lease for name in names if (lease := self.leases.take(name, newest[name]))), None)

    def run_next(self, worker: "Worker") -> bool:
        """Make a part that nobody has, once there is one. Returns False if all are done, or the worker was stopped.
        Called from several threads."""
        while self.left and not worker.is_stopped:
            with self._taking:
                lease = self.take()
            if lease is not None:
                self.run(lease, worker)
                return True
            time.sleep(POLL_S)
        return False

    def run_all(self, worker: "Worker") -> None:
        """Make parts while there are any."""
        while self.run_next(worker):
            pass

    def run(self, lease: Lease, worker: "Worker") -> None:
        """Make the part of a lease, or the rest of it, and send it, unless the worker is stopped."""
        number, is_made = int(lease.name), False
        try:
            is_made = not self._fetch(lease) or worker.run_part(number)
            if is_made:
                self._finish(number)
        except FileNotFoundError:
            with self._taking:
                self.update()
            if self.left:  # else others have completed the run, and removed its work
                raise
        finally:
            self.leases.release(lease, give_back=not is_made)
            self._local.remove(number)

    def clear(self) -> None:
        """Remove what a complete run needs no more."""
        self.output.remove(WORK)
        self._folder.remove(_INPUTS)
        self._folder.remove(_JOURNAL)

    def _fetch(self, lease: Lease) -> bool:
        """Fetch the input of a part and the rows that earlier leases have sent. Returns False if the part was made."""
        part = self._local.part(int(lease.name))
        with suppress(FileNotFoundError):
            self._record(int(lease.name))
            return False
        for path in self._local.inputs(int(lease.name)):
            self._folder.fetch(f"{self._inputs}/{path.name}", path)
        content = b"".join(map(self._folder.read, self._folder.names(f"{_JOURNAL}/{lease.name}")))
        if content:
            journal_path(part).write_bytes(content)
        lease.num_sent_bytes = len(content)
        return True

    def _send_journal(self, lease: Lease) -> None:
        """Send the new rows of a part."""
        if lease.num_sent_bytes is None:
            return
        with suppress(FileNotFoundError), journal_path(self._local.part(int(lease.name))).open("rb") as file:
            file.seek(lease.num_sent_bytes)
            content = file.read()
            if content := content[: content.rfind(b"\n") + 1]:
                self._folder.write(f"{_JOURNAL}/{lease.name}/{lease.file[-4:]}.{lease.num_sent_bytes:012}", content)
                lease.num_sent_bytes += len(content)
                lease.num_rows += content.count(b"\n")

    def _finish(self, number: int) -> None:
        """Put a part into the output: as it was made here, or by whoever has created its record before."""
        part, work = self._local.part(number), f"{WORK}/{lease_name(number)}"
        if part.exists():
            self.output.send(part, f"{work}/{read_record(part).digest}")
            self.output.create(record_path(part).name, record_path(part).read_bytes())
        self.output.copy(f"{work}/{self._record(number).digest}", part.name)

    def _record(self, number: int) -> RunRecord:
        content = self.output.read(record_path(Path(self.manifest.part(number))).name)
        return msgspec.json.decode(content, type=RunRecord)
