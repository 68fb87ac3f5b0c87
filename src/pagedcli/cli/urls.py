"""URLs on the command line: what a command reads is copied here first, and what it writes lies in the user's cache
until it is sent, complete. The rest of the command sees files of this machine, whose names are printed as URLs.

Used by cli.main for every command; prompts and models are read by URL elsewhere. An unfinished run's journal is sent
about every minute.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pagedcli.buckets import Folder, cached, files_of, is_url
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import is_in_use
from pagedcli.line_files import COPIES
from pagedcli.printable import show_as
from pagedcli.process import at_end, meanwhile

# parameters of commands
_READ = {"reuse", "files", "shards", "before", "after", "trace", "traces", "outputs", "config", "tokenizer"}
_READ |= {"run__chat_template", "run__calibration"}
_WRITTEN = {"output_file", "record", "metrics", "summary_json", "picture", "calibrate", "dump_kv"}
_WRITTEN_TEXTS = ("output_file", "dump_kv")  # those of them that are no paths; attach --metrics is a server's address
_FOLDERS = ("ray", "ray_address", "queue")  # parameters of runs that write a folder with -o
_SEND_EVERY_S = 60.0
_SHARE = 0.1  # of the time, at most, is spent on sending a journal that grows
_LOOKED_AT = 2**20  # bytes of an existing file that show what would be replaced
_log = logging.getLogger("pagedcli")


def with_local_files(command: str, values: dict[str, Any]) -> None:
    """Replace the URLs among the parameters of a command, by name, by paths.

    Raises: UsageError for a file that is not there, and where a command takes no URL; PagedcliError.
    """
    _mirrors.clear()
    named = {name: [url for each in _listed(given) if (url := _url(each))] for name, given in values.items()}
    every = [url for urls in named.values() for url in urls]
    read = _READ | {"prompts"} if command == "trace" else _READ
    kept = _WRITTEN if command == "plan" else {"output_file"} if any(map(values.get, _FOLDERS)) else set()
    for name, urls in named.items():
        if not urls or name in kept:
            continue
        given = values[name]
        if name in read:
            paths = [path for each in _listed(given) for path in _copies(each)]
            values[name] = paths if isinstance(given, list) else paths[0]
        elif name in _WRITTEN and (isinstance(given, Path) or name in _WRITTEN_TEXTS):
            if every.count(urls[0]) > 1:
                raise UsageError(f"two files of this command are the same, {urls[0]}", hint="use different names")
            _mirrors.append(_Mirror(urls[0], resume=values.get("resume")))
            values[name] = type(given)(_mirrors[-1].path)
        elif isinstance(_listed(given)[0], Path):
            raise UsageError(f"{urls[0]} must be on this machine: no URL can be given here", hint="copy it first")


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _url(value: Any) -> str | None:
    """The URL that a parameter is: as a path it has lost a slash. None: it is none. Raises: UsageError for file://."""
    text = str(value)
    text = re.sub("^([a-zA-Z][a-zA-Z0-9+.-]+):/(?!/)", r"\1://", text) if isinstance(value, Path) else text
    if text.startswith("file:/"):
        raise UsageError(f"{value} is a file of this machine", hint="give its path")
    return text if is_url(text) else None


def _copies(value: Any) -> list[Any]:
    """What a parameter names on this machine: itself, or copies of what is in a bucket, of several by a pattern."""
    url = _url(value)
    if url is None:
        return [value]
    found = files_of(url) if "*" in url else None
    return [type(value)(_copy(each)) for each in found or [url]]


def _copy(url: str) -> Path:
    """A copy of a file or folder, with what belongs to it (a record, the parts of a trace), until the process ends."""
    parent, _, name = url.rstrip("/").rpartition("/")
    folder = TemporaryDirectory(prefix=COPIES)
    at_end(folder.cleanup)
    show_as(folder.name, parent)
    stem = name.removesuffix(".zst").removesuffix(".jsonl")
    ending = re.escape(name.removeprefix(stem))
    own = re.compile(rf"{re.escape(stem)}(\.part\d+|\.recording)*{ending}(\.run\.json|/[^.].*)?")
    prefix = name if stem == name else f"{stem}."  # not more: it may have to list a large folder
    bucket = Folder(parent)
    sizes = {each: size for each, (size, _) in bucket.files(prefix).items() if own.fullmatch(each)}
    if not sizes:
        raise UsageError(f"there is no {url}")
    bucket.fetch_all(sizes, Path(folder.name))
    return Path(folder.name, name)


class _Mirror:
    """A file in the user's cache that is sent to its URL, with the others of its folder: its journal, its record.

    A file whose time of change is 0 is not sent: it shows what is in the bucket, completely or only its beginning.
    """

    def __init__(self, url: str, *, resume: bool | None) -> None:
        """`resume`: None for a command without --resume: nothing of an earlier one is kept."""
        parent, _, name = url.rpartition("/")
        if not name:
            raise UsageError(f"{url} is a folder", hint="name a file")
        self._bucket, self._can_resume, self._lock = Folder(parent), resume is not None, threading.Lock()
        self._sent_ns = 0  # the journal's time of change when it was sent
        self._there: set[str] = set()  # files here that are in the bucket, too
        folder = cached(url)
        self.path, self._journal = folder / name, folder / f"{name}.partial"
        show_as(str(folder), parent)
        for path in folder.iterdir():
            if not (self._can_resume and path.stat().st_mtime_ns):
                path.unlink()
        stem, dot, _ = name.partition(".")
        for each, (size, _) in self._bucket.files(stem + dot).items():
            if re.fullmatch(rf"{re.escape(stem)}(\.[^/]*)?", each):
                path, is_whole = folder / each, bool(resume) and each.startswith(name)
                is_resumed = is_whole and path == self._journal
                if not path.exists() or (is_resumed and path.stat().st_size < size):
                    self._bucket.fetch(each, path, None if is_whole else _LOOKED_AT)
                    if not is_resumed:
                        os.utime(path, (0, 0))
                self._there.add(each)

    def send_journal(self) -> None:
        """Send how far a run is. Raises: PagedcliError."""
        with self._lock, suppress(FileNotFoundError):
            self._send(self._journal)

    def send(self) -> None:
        """Send what is complete, and remove in the bucket what was removed here. Raises: PagedcliError."""
        with self._lock:
            if not self.path.parent.is_dir():  # all was sent, or somebody has emptied the cache
                return
            # the record last: it says that the output is complete
            for path in sorted(self.path.parent.iterdir(), key=lambda each: (each.name.endswith(".run.json"), each)):
                if is_in_use(path) or path.name.startswith("."):
                    continue
                self._send(path)
                if path != self._journal:
                    path.unlink()
                    self._there.discard(path.name)
            for name in [each for each in self._there if not self.path.with_name(each).exists()]:
                self._bucket.remove(name)
                self._there.remove(name)
            with suppress(OSError):  # the journal of a stopped run stays
                self.path.parent.rmdir()

    def _send(self, path: Path) -> None:
        changed_ns = path.stat().st_mtime_ns
        if changed_ns in (0, self._sent_ns):
            return
        try:
            self._bucket.send(path, path.name)
        except PagedcliError as error:
            show_as(folder := str(path.parent), folder)
            again = ", and sent by the same command with --resume" if self._can_resume else ""
            raise PagedcliError(
                error.message, hint=f"{error.hint or 'try again'}; all is in {folder}{again}"
            ) from error
        self._sent_ns = changed_ns if path == self._journal else self._sent_ns
        self._there.add(path.name)


_mirrors: list[_Mirror] = []  # of the command that runs


def send_complete() -> None:
    """Send what the command has completed at URLs. Raises: PagedcliError."""
    for each in _mirrors:
        each.send()


@contextmanager
def sending() -> Iterator[None]:
    """What a command writes at URLs within this context is sent at its end, however it ends."""
    if not _mirrors:
        yield
        return
    try:
        with meanwhile(_send_often):
            yield
    finally:
        try:
            send_complete()
        finally:
            _mirrors.clear()


def _send_often(ended: threading.Event) -> None:
    wait_s = _SEND_EVERY_S
    while not ended.wait(wait_s):
        start_s = time.monotonic()
        for each in _mirrors:
            try:
                each.send_journal()
            except PagedcliError as error:
                _log.warning("%s: rows are kept here meanwhile", error.message)
        wait_s = max(_SEND_EVERY_S, (time.monotonic() - start_s) / _SHARE)
