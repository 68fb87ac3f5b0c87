"""The rule for every file that a command writes: check all paths first, write under another name, then rename.

Used by every command and package that writes files, whatever their content. What our own files begin with is here, too:
a file of another kind is never replaced by one of them.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import select
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pagedcli.errors import PagedcliError, UsageError
from pagedcli.line_files import first_decompressed
from pagedcli.process import interrupts_raised

_STREAM_FOLDERS = ("/dev/fd/", "/proc/")
_OPEN_FILES = "/proc/self/fd"
_STREAM_NAMES = ("/dev/stdin", "/dev/stdout", "/dev/stderr")


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that commands write."""

    name: str  # in messages: 'a trace'
    beginning: bytes

    def has(self, path: Path) -> bool:
        """Whether the file begins as one of this kind; an empty file does, one that was torn there, and one of nothing
        but zeros, as a power cut may leave it. Raises: OSError."""
        content = beginning_of(path, _ROW_BYTES)
        is_torn = len(content) < _ROW_BYTES and not content.strip(b"\0")
        return is_torn or self.beginning.startswith(content[: len(self.beginning)])


TRACE = FileKind("a trace", b'{"event":"engine_started"')
KV_RECORDING = FileKind("a recording of KV events", b'{"kv_events":')
JOURNAL = FileKind("the journal of a run", b'{"pagedcli_journal":')
RUN_RECORD = FileKind("the record of a run", b'{"pagedcli_run":')
SUMMARY = FileKind("the summary of a run", b'{\n  "pagedcli":')
METRICS = FileKind("counters for Prometheus", b"# HELP pagedcli_")
CONTENT = FileKind("a file of a store", b'{"pagedcli_kept":')
_GGUF = FileKind("a model file", b"GGUF")
_KINDS = (TRACE, KV_RECORDING, JOURNAL, RUN_RECORD, SUMMARY, METRICS, CONTENT, _GGUF)
_MODEL_ENDINGS = (".safetensors", ".safetensors.index.json", ".gguf")
_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "pytorch_model.bin"),
)
_ROW_BYTES = 1 << 20  # bytes read of a file to recognize its first row
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def beginning_of(path: Path, num_bytes: int) -> bytes:
    """What a file begins with, decompressed if it is a zstd file. Raises: OSError."""
    with path.open("rb") as file:
        content = file.read(num_bytes)
        if content[:4] != _ZSTD_MAGIC[: max(1, len(content))]:
            return content
        return first_decompressed(content + file.read(1 << 17), num_bytes)


def what_is(path: Path) -> str | None:
    """What a file is, in words, as far as its beginning shows it; None: nothing that this tool knows."""
    if path.name.endswith(_MODEL_ENDINGS):
        return _GGUF.name
    if path.name in _MODEL_FILES and (path.parent / "config.json").exists():
        return _GGUF.name
    with suppress(OSError):
        if not (content := beginning_of(path, _ROW_BYTES)):
            return None
        for kind in _KINDS:
            if content.startswith(kind.beginning):
                return kind.name
        return _lines_in_words(content.partition(b"\n")[0])
    return None


def _lines_in_words(first: bytes) -> str | None:
    try:
        names = set(json.loads(first))
    except (ValueError, TypeError, RecursionError):
        return None
    if {"index", "error"} <= names or {"response", "error"} <= names:
        return "rows of generate"
    return "a file of prompts" if names & {"prompt", "messages", "body"} else None


def check_files(
    reads: Mapping[str, Path | None],
    writes: Mapping[str, Path | None],
    *,
    overwrite: bool,
    kinds: Mapping[str, FileKind] | None = None,
) -> None:
    """Refuse, before anything is opened, a command that would destroy a file.

    Keys say what each file is in a message: 'the input', '--record'; `kinds` the kinds of those that have one. A path
    that is None was not given. Devices and pipes are never refused.
    Raises: UsageError for a file that is named twice, a folder, a missing parent folder, and for an existing file as
            check_new.
    """
    check_distinct(reads, writes)
    for what, path in writes.items():
        check_new(what, path, kind=(kinds or {}).get(what), overwrite=overwrite)


def check_distinct(reads: Mapping[str, Path | None], writes: Mapping[str, Path | None]) -> None:
    """Check that the files of one command do not collide, and that devices and pipes to be written are there.

    Raises: UsageError.
    """
    taken = [(what, path) for what, path in reads.items() if path is not None and not is_stream(path)]
    for what, path in writes.items():
        if path is None or is_stream(path):
            if path is not None and not path.exists():
                raise UsageError(
                    f"{what} is {path}, but there is no such device or pipe", hint="give the name of a file"
                )
            continue
        if path.is_dir():
            raise UsageError(f"{what} is {path}, which is a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{what} is {path}, but there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
        for other, other_path in taken:
            if _is_same(path, other_path):
                raise UsageError(f"{what} and {other} are the same file, {path}", hint="use a different file for each")
        taken.append((what, path))


_KEPT = (TRACE.name, KV_RECORDING.name, _GGUF.name)  # replaced by nothing but their own kind


def check_new(
    what: str,
    path: Path | None,
    *,
    kind: FileKind | None = None,
    overwrite: bool = False,
    hint: str = "use --overwrite, or another name",
) -> None:
    """Refuse to replace a file, unless `overwrite`. Even then: one of another kind than `kind`, and where there is no
    kind, a trace or a model file. Raises: UsageError."""
    if path is None or is_stream(path) or not os.path.lexists(path):
        return
    is_own = False
    with suppress(OSError):  # a link that leads nowhere
        is_own = kind is not None and kind.has(path)
    found = None if is_own else what_is(path)
    if (kind is not None and not is_own) or found in _KEPT:
        described = f", and is {found}" if found else f", and is not {kind.name}" if kind is not None else ""
        raise UsageError(f"{what}: {path} already exists{described}", hint="move it away, or use another name")
    if not overwrite:
        raise UsageError(f"{what}: {path} already exists", hint=hint)


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, such as /dev/null or /dev/stdout, which a rename would destroy."""
    name = os.path.abspath(path)
    if name in _STREAM_NAMES or name.startswith(_STREAM_FOLDERS):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def read_whole(path: Path, most_bytes: int, *, wait_s: float = 30) -> bytes:
    """The content of a small file of the user's, which may be a pipe or a device.

    Raises: OSError if it cannot be read, has more bytes, or is a pipe that nobody writes to for `wait_s` seconds.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with open(fd, "rb", buffering=0) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        if not is_pipe:
            os.set_blocking(fd, True)
        content = bytearray()
        while len(content) <= most_bytes:
            if is_pipe and not select.select([fd], [], [], wait_s)[0]:
                raise OSError(errno.ETIMEDOUT, f"nothing was written to this pipe for {wait_s:g} s", str(path))
            part = file.read(most_bytes + 1 - len(content))
            if not part:
                return bytes(content)
            content += part
    raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))


def cache_home() -> Path:
    """The folder of what this user's runs keep for later ones."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedcli"


def is_ours_alone(folder: Path) -> bool:
    """Whether a folder is this user's and no other can write to it. Raises: OSError."""
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_own(path: Path) -> bytes:
    """The content of a file that this program keeps, such as one in its cache. Raises: OSError if it is not a file."""
    if not path.is_file():  # a pipe would wait for ever
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return path.read_bytes()


class PendingFile:
    """A file that appears under its name on `commit`, complete and on the disk, or not at all.

    It is written as `temporary`, in the same folder: by default without a name, so that a killed process leaves nothing
    behind, or under a hidden one where the system has no such files. A link is followed; a device or a pipe is written
    directly. `durable`: survives a power cut, with two fsyncs.
    Raises: OSError, here and in every method; FileExistsError if `path` exists and must not be replaced.
    """

    def __init__(self, path: Path, *, overwrite: bool, temporary: Path | None = None, durable: bool = True) -> None:
        self.path = path if is_stream(path) else Path(os.path.realpath(path))
        self._overwrite = overwrite
        self._durable = durable
        self._is_direct = is_stream(path)
        self.temporary: Path | None = temporary
        self.file: BinaryIO
        if self._is_direct:
            self.file = path.open("wb")
        elif temporary is not None:
            self.file = _locked_file(temporary)
        else:
            _remove_leftovers(self.path)
            unnamed = _unnamed_file(self.path.parent)
            self.temporary, self.file = (None, unnamed) if unnamed is not None else _hidden_file(self.path)

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
        if self.temporary is None:
            self.temporary = _give_hidden_name(self.file, self.path)
        os.replace(self.temporary, self.path)
        self.file.close()
        if self._durable:
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove what was written. Does nothing after `commit`."""
        with suppress(OSError):  # a full disk
            self.file.close()
        if self.temporary is not None and not self._is_direct:
            with suppress(FileNotFoundError):
                self.temporary.unlink()


@contextmanager
def writing(what: object, error_type: type[PagedcliError] = UsageError, *, hint: str | None = None) -> Iterator[None]:
    """Within this context an OSError becomes an error that says what cannot be written."""
    try:
        yield
    except OSError as error:
        raise error_type(f"cannot write {what}: {error.strerror}", hint=hint) from error


@contextmanager
def whole_file(path: Path, *, overwrite: bool, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that appears when the block ends, and not at all if it raises; see PendingFile. Raises: OSError."""
    with interrupts_raised():
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
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return not lock(file)
    except OSError:
        return False


def lock(file: BinaryIO | int) -> bool:
    """Lock a file until it is closed or its process has ended. Returns False if another has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _locked_file(path: Path) -> BinaryIO:
    file = path.open("x+b")
    lock(file)
    return file


def _unnamed_file(folder: Path) -> BinaryIO | None:
    """A locked file without a name. None where there are none: not on Linux, or on a network file system."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir(_OPEN_FILES):
        return None
    try:
        file = os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:
        return None
    lock(file)
    return file


def _give_hidden_name(file: BinaryIO, path: Path) -> Path:
    """Name an unnamed file, so that it can be renamed to `path`. Raises: OSError."""
    folder = os.open(_OPEN_FILES, os.O_RDONLY)
    try:
        while True:
            hidden = _hidden_name(path)
            with suppress(FileExistsError):  # a folder as source makes Python follow the link to the open file
                os.link(str(file.fileno()), hidden, src_dir_fd=folder)
                return hidden
    finally:
        os.close(folder)


def _hidden_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def _hidden_file(path: Path) -> tuple[Path, BinaryIO]:
    """A new file under an unused hidden name, locked, so that no other process takes it for a leftover."""
    while True:
        hidden = _hidden_name(path)
        file = hidden.open("x+b")
        if lock(file) and hidden.exists():
            return hidden, file
        file.close()  # another process was faster and removes it


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of this file under hidden names."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.tmp")
    with suppress(OSError):
        for each in path.parent.iterdir():
            if pattern.fullmatch(each.name) and each.is_file():
                with each.open("rb") as file:
                    if lock(file):
                        each.unlink(missing_ok=True)


def sync_files(folder: Path) -> None:
    """Flush the files of a folder, and their names, to the disk. Raises: OSError."""
    for each in folder.iterdir():
        if each.is_file():
            with each.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush new names to the disk. Not every system can open a folder."""
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
