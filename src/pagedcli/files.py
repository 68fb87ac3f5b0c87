"""The rule for every file that a command writes: check all paths first, write under another name, then rename.

Used by every command and package that writes files, whatever their content.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pagedcli.errors import UsageError
from pagedcli.interrupt import as_exceptions

_STREAM_FOLDERS = ("/dev/fd/", "/proc/")
_STREAM_NAMES = ("/dev/stdin", "/dev/stdout", "/dev/stderr")


def check_files(reads: Mapping[str, Path | None], writes: Mapping[str, Path | None], *, overwrite: bool) -> None:
    """Refuse, before anything is opened, a command that would destroy a file.

    Keys say what each file is in a message: 'the input', '--record'. A path that is None was not given. Devices and
    pipes are never refused.
    Raises: UsageError for a file that is named twice, a folder, a missing parent folder, and, unless `overwrite`,
            an existing file.
    """
    check_distinct(reads, writes)
    if not overwrite:
        for what, path in writes.items():
            check_new(what, path)


def check_distinct(reads: Mapping[str, Path | None], writes: Mapping[str, Path | None]) -> None:
    """Check that the files of one command do not collide. Raises: UsageError."""
    taken = [(what, path) for what, path in reads.items() if path is not None and not is_stream(path)]
    for what, path in writes.items():
        if path is None or is_stream(path):
            continue
        if path.is_dir():
            raise UsageError(f"{what} is {path}, which is a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{what} is {path}, but there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
        for other, other_path in taken:
            if _is_same(path, other_path):
                raise UsageError(f"{what} and {other} are the same file, {path}", hint="use a different file for each")
        taken.append((what, path))


def check_new(
    what: str, path: Path | None, *, replaceable: bytes | None = None, hint: str = "use --overwrite, or another name"
) -> None:
    """Refuse to replace a file, except one that begins with `replaceable`, or an empty one. Raises: UsageError."""
    if path is None or is_stream(path) or not os.path.lexists(path):
        return
    if replaceable is not None:
        with suppress(OSError), path.open("rb") as file:
            if replaceable.startswith(file.read(len(replaceable))):
                return
    raise UsageError(f"{what}: {path} already exists", hint=hint)


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/null or /dev/stdout, which a rename would destroy."""
    name = os.path.abspath(path)
    if name in _STREAM_NAMES or name.startswith(_STREAM_FOLDERS):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


class PendingFile:
    """A file that appears under its name on `commit`, complete and on the disk, or not at all.

    It is written as `temporary`, in the same folder (by default an unused hidden name). A link is followed; a device
    or a pipe is written directly. `durable`: survives a power cut, with two fsyncs.
    Raises: OSError, here and in every method; FileExistsError if `path` exists and must not be replaced.
    """

    def __init__(self, path: Path, *, overwrite: bool, temporary: Path | None = None, durable: bool = True) -> None:
        self.path = path if is_stream(path) else Path(os.path.realpath(path))
        self._overwrite = overwrite
        self._durable = durable
        self._is_direct = is_stream(path)
        self.file: BinaryIO
        if self._is_direct:
            self.temporary, self.file = path, path.open("wb")
        else:
            _remove_leftovers(self.path)
            self.temporary, self.file = _hidden_file(self.path) if temporary is None else _locked_file(temporary)

    def commit(self) -> None:
        """Flush to the disk and rename."""
        self.file.flush()
        if self._is_direct:
            self.file.close()
            return
        if self._durable:
            os.fsync(self.file.fileno())
        if not self._overwrite and self.path.exists():
            raise FileExistsError(errno.EEXIST, "the file has been created meanwhile", str(self.path))
        if os.name == "nt":  # which does not rename open files
            self.file.close()
        os.replace(self.temporary, self.path)
        self.file.close()
        if self._durable:
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove what was written. Does nothing after `commit`."""
        with suppress(OSError):  # a full disk
            self.file.close()
        if not self._is_direct:
            with suppress(FileNotFoundError):
                self.temporary.unlink()


@contextmanager
def whole_file(path: Path, *, overwrite: bool, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears when the block ends, and not at all if it raises; see PendingFile. Raises: OSError."""
    with as_exceptions():
        pending = PendingFile(path, overwrite=overwrite, durable=durable)
        try:
            yield pending.file
            pending.commit()
        except BaseException:
            with suppress(OSError):
                pending.discard()
            raise


def is_in_use(path: Path) -> bool:
    """Whether a process is writing this PendingFile right now."""
    try:
        with path.open("rb") as file:
            return not _lock(file)
    except OSError:
        return False


def _lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed or its process has ended. Returns False if another has locked it."""
    try:
        import fcntl
    except ImportError:  # Windows has no advisory locks
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _locked_file(path: Path) -> tuple[Path, BinaryIO]:
    file = path.open("x+b")
    _lock(file)
    return path, file


def _hidden_file(path: Path) -> tuple[Path, BinaryIO]:
    """A new file under an unused hidden name, locked, so that no other process takes it for a leftover."""
    while True:
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = hidden.open("x+b")
        if _lock(file) and hidden.exists():
            return hidden, file
        file.close()  # another process was faster and removes it


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of this file under hidden names."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError):
        for each in path.parent.iterdir():
            if pattern.fullmatch(each.name):
                with each.open("rb") as file:
                    if _lock(file):
                        each.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a rename to the disk. Not every system can open a folder."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_same(path: Path, other: Path) -> bool:
    if os.path.realpath(path) == os.path.realpath(other):
        return True
    try:
        return path.samefile(other)  # hard links, and file systems that ignore case
    except OSError:
        return False
