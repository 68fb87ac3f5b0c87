"""A folder of files that are found by what they hold: written whole or not at all, bounded, and checked when read.

Used by whatever keeps large computed data for later processes; knows nothing of their content. A file is never changed,
only created and removed, so several processes share a folder without locks: one that finds a file gone computes again.
"""

import logging
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from pagedcli.errors import UsageError
from pagedcli.files import CONTENT, PendingFile, cache_home, is_in_use, is_ours_alone, read_own, whole_file
from pagedcli.printable import byte_text

ENDING = ".kept"
log = logging.getLogger("pagedcli")
HALF_LIFE_S = 86_400.0  # a file that was not read for so long is worth half
_SAID_BYTES = 2**31  # a file that takes seconds to read
_SETTLED_S = 10  # a file that changed since may change again within the resolution of its time
FREE_SHARE = 0.1  # share of the disk left free where no bound is given
NO_ROOM = "other files in the folder or on the disk leave no room"
MOST_HEAD_BYTES = 2**28
_FIRST_LINE = re.compile(rb'\{"pagedcli_kept":1,"head_bytes":(\d+),"xxh3":"([0-9a-f]{32})"\}\n')
_NAME = re.compile("[0-9a-f]{16}-[0-9a-f]{32}" + re.escape(ENDING))
_LEFTOVER = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]{{8}}\.tmp")
Buffer = bytes | bytearray | memoryview


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself."""

    identity: dict[str, str]  # named parts: all that must be equal for the content to be of use
    note: bytes  # description of the content by whoever keeps it
    seconds: float  # time saved by reading the content
    depth: int = 0  # the deepest of equally worthy files is removed first
    sizes: list[int]  # bytes of each part
    checksums: list[str]  # xxh3-128 of each part
    multiple: int = 1  # bytes; parts begin at multiples of it

    def places(self, start: int) -> list[int]:
        """Where each part begins and the last one ends, if the head ends at `start`."""
        places, end = [], start
        for num_bytes in self.sizes:
            places.append(-(-end // self.multiple) * self.multiple)
            end = places[-1] + num_bytes
        return [*places, end]


@dataclass(slots=True, eq=False)
class ContentFile:
    """A file whose head is whole. Its parts are checked as they are read."""

    path: Path
    head: Head
    places: list[int]  # bytes before each part, and in all
    used_s: float  # Unix time of the last use

    @property
    def num_bytes(self) -> int:
        return self.places[-1]

    def worth(self, now_s: float) -> tuple[float, int]:
        """Seconds that it saves per byte, halved for each half-life without use; the least is removed first."""
        days = max(0.0, now_s - self.used_s) // HALF_LIFE_S
        return self.head.seconds / max(1, self.num_bytes) * 0.5**days, -self.head.depth


class DamagedFile(Exception):
    """A file is not what was written, or gone; the text says how."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What is left of a folder, and what was wrong with it."""

    files: list[ContentFile]
    wrong: dict[str, str]  # names of files of ours that are of no use -> why; those that can be are removed
    num_removed: int
    no_room: str | None  # why there is more in the folder than its bound allows; None: there is not


def digest_of(data: Buffer) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def identity_digest(identity: Mapping[str, str]) -> str:
    """A digest of all named parts."""
    return digest_of(msgspec.json.encode(sorted(identity.items())))


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """The names of the parts in which two identities differ."""
    return ", ".join(name for name in {**a, **b} if a.get(name) != b.get(name))


def file_digest(path: Path) -> str:
    """xxh3-128 of every byte of a file, remembered for this user as long as its size, time and inode stay, in a folder
    that nobody else can write to. Raises: OSError."""
    about = path.stat()
    state = f"{path.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ino} {about.st_dev}"
    remembered = cache_home() / "digests" / digest_of(state.encode())
    with suppress(OSError, UnicodeDecodeError):
        is_trusted = is_ours_alone(remembered.parent)
        if is_trusted and re.fullmatch("[0-9a-f]{32}", text := read_own(remembered).decode()):
            return text
    if about.st_size > _SAID_BYTES:
        why = "what is kept for later starts is found by its content"
        log.info("reading %s once (%s): %s", path, byte_text(about.st_size), why)
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(2**24):
            digest.update(piece)
    after = path.stat()
    if time.time() - about.st_mtime > _SETTLED_S and (after.st_size, after.st_mtime_ns) == (
        about.st_size,
        about.st_mtime_ns,
    ):
        with suppress(OSError):
            remembered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with whole_file(remembered, overwrite=True) as kept:
                kept.write(digest.hexdigest().encode())
    return digest.hexdigest()


class ContentFolder:
    """The files in a folder, and the bound of all that is in it.

    `most_bytes` counts every file, whoever has made it; without it, or with `spares_disk`, a tenth of the disk stays
    free. Files that others have put there are never removed. `most_age_s`: without use; older files are not found and
    go first.
    Raises: UsageError if it is not a folder that can be read, and cannot become one.
    """

    def __init__(
        self, path: Path, *, most_bytes: int | None = None, most_age_s: float | None = None, spares_disk: bool = False
    ) -> None:
        self.path, self.most_bytes, self.most_age_s = path, most_bytes, most_age_s
        self._spares_disk = spares_disk or most_bytes is None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._paths()
        except OSError as error:
            raise UsageError(f"{path} cannot be a folder for kept files: {error.strerror}") from error
        self.is_writable = os.access(path, os.W_OK | os.X_OK)

    # ------------------------------------------------------------------ what is there

    def _paths(self) -> list[Path]:
        return [self.path / name for name in sorted(os.listdir(self.path))]

    def files(self) -> tuple[list[ContentFile], dict[str, str]]:
        """The files that are whole and not too old, and for the others of ours their name and what is wrong. Raises:
        OSError if the folder can no longer be read."""
        found, wrong = [], {}
        for path in self._paths():
            if not _NAME.fullmatch(path.name):
                continue
            try:
                file = _open_head(path)
                if self.most_age_s is not None and time.time() - file.used_s > self.most_age_s:
                    raise DamagedFile("not used for too long")
                found.append(file)
            except DamagedFile as error:
                wrong[path.name] = str(error)
        return found, wrong

    def num_bytes(self, name: str) -> int:
        """Bytes of a file in the folder; 0 if it is gone."""
        with suppress(OSError):
            return os.lstat(self.path / name).st_size
        return 0

    def used_bytes(self) -> int:
        """Bytes of all files in the folder, those of others included."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    # ------------------------------------------------------------------ changes

    def write(
        self,
        identity: Mapping[str, str],
        note: bytes,
        parts: Sequence[Buffer],
        *,
        seconds: float,
        depth: int = 0,
        multiple: int = 1,
    ) -> ContentFile | str:
        """Keep some parts as one file, each at a multiple of so many bytes. Returns the file, or why it was not
        kept."""
        path = self.path / f"{identity_digest(identity)[:16]}-{digest_of(note)}{ENDING}"
        head = Head(
            identity=dict(identity),
            note=note,
            seconds=seconds,
            depth=depth,
            sizes=[len(memoryview(part).cast("B")) for part in parts],
            checksums=list(map(digest_of, parts)),
            multiple=multiple,
        )
        encoded = msgspec.msgpack.encode(head)
        first = b'{"pagedcli_kept":1,"head_bytes":%d,"xxh3":"%s"}\n' % (len(encoded), digest_of(encoded).encode())
        start = len(first) + len(encoded)
        file = ContentFile(path, head, head.places(start), time.time())
        if not self.is_writable:
            return "the folder is read-only"
        try:
            if (why := self._make_room(file.num_bytes, file)) is None:
                self._write_whole(file, first + encoded, parts)
            self._make_room(0)  # others have written meanwhile
        except OSError as error:
            return error.strerror or str(error)
        return file if why is None else why

    def _write_whole(self, file: ContentFile, beginning: bytes, parts: Sequence[Buffer]) -> None:
        """Raises: OSError."""
        pending = PendingFile(file.path, overwrite=True)
        try:
            os.fchmod(pending.file.fileno(), 0o600)
            pending.file.write(beginning)
            for place, part in zip(file.places, parts, strict=False):
                pending.file.write(bytes(place - pending.file.tell()))
                pending.file.write(part)
            pending.commit()
        except BaseException:
            pending.discard()
            raise

    def remove(self, path: Path) -> bool:
        """Remove a file of ours. Returns whether it is gone."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
            return True
        return False

    def trim(self) -> Trimmed:
        """Remove what is damaged, too old or left by killed processes, and what is above the bound; from a folder that
        cannot be written, nothing. Raises: OSError if the folder can no longer be read."""
        files, wrong = self.files()
        if not self.is_writable:
            return Trimmed(files, wrong, 0, self._over_bound())
        num_removed = 0
        for name in wrong:
            if os.access(self.path / name, os.R_OK):  # otherwise another user's, and perhaps whole
                num_removed += self.remove(self.path / name)
        for path in self._paths():
            if _LEFTOVER.fullmatch(path.name) and not is_in_use(path):
                num_removed += self.remove(path)
        self._make_room(0)
        left = [file for file in files if file.path.exists()]
        return Trimmed(left, wrong, num_removed + len(files) - len(left), self._over_bound())

    def _make_room(self, num_bytes: int, file: ContentFile | None = None) -> str | None:
        """Remove the least valuable files until so many bytes are within the bound; for a new file, only those that are
        worth less. Returns why they are not: then removing files would not help, and none is."""
        missing, now_s = self._missing_bytes(num_bytes), time.time()
        if missing <= 0:
            return None
        if self.most_bytes is not None and num_bytes > self.most_bytes:
            return "the bound is smaller than one file"
        files = sorted(self.files()[0], key=lambda each: each.worth(now_s))
        if sum(each.num_bytes for each in files) < missing:
            return NO_ROOM
        if file is not None:
            files = [each for each in files if each.worth(now_s) < file.worth(now_s) or each.path == file.path]
        if sum(each.num_bytes for each in files) < missing:
            return "the files that are there are worth more"
        for each in files:
            missing -= each.num_bytes * self.remove(each.path)
            if missing <= 0:
                return None
        return "files could not be removed"

    def _over_bound(self) -> str | None:
        """Why there is more than the bound allows."""
        missing = self._missing_bytes(0)
        if missing <= 0:
            return None
        return f"{byte_text(missing)} more than the bound: {NO_ROOM}"

    def _missing_bytes(self, num_bytes: int) -> int:
        missing = []
        if self.most_bytes is not None:
            missing.append(self.used_bytes() + num_bytes - self.most_bytes)
        if self._spares_disk:
            disk = shutil.disk_usage(self.path)
            missing.append(int(disk.total * FREE_SHARE) + num_bytes - disk.free)
        return max(missing)

    # ------------------------------------------------------------------ reading

    def read(self, file: ContentFile, wanted: Sequence[int]) -> list[bytes]:
        """Some parts of a file, each as it was written. Raises: DamagedFile."""
        parts = []
        try:
            with file.path.open("rb") as opened:
                for part in wanted:
                    opened.seek(file.places[part])
                    content = opened.read(file.head.sizes[part])
                    if digest_of(content) != file.head.checksums[part]:
                        raise DamagedFile("other bytes than were written")
                    parts.append(content)
            self._mark_used(file)
        except OSError as error:
            raise DamagedFile(error.strerror or str(error)) from error
        return parts

    def mapped(self, file: ContentFile) -> list[memoryview]:
        """All parts of a file, mapped into memory that processes share. Raises: DamagedFile if a byte is not as it was
        written."""
        try:
            with file.path.open("rb") as opened:
                whole = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            self._mark_used(file)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DamagedFile(str(error)) from error
        parts = [whole[place : place + size] for place, size in zip(file.places, file.head.sizes, strict=False)]
        with ThreadPoolExecutor() as pool:
            if list(pool.map(digest_of, parts)) != file.head.checksums:
                raise DamagedFile("other bytes than were written")
        return parts

    def _mark_used(self, file: ContentFile) -> None:
        """Raises: OSError."""
        if self.is_writable:
            os.utime(file.path)
        file.used_s = time.time()


def _open_head(path: Path) -> ContentFile:
    """Raises: DamagedFile."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or not CONTENT.has(path):  # opening a pipe would wait for ever
            raise DamagedFile("not a file of this program")
        with path.open("rb") as file:
            first = file.readline(256)
            match = _FIRST_LINE.fullmatch(first)
            if match is None or int(match[1]) > MOST_HEAD_BYTES:
                raise DamagedFile("the first line is damaged")
            encoded = file.read(int(match[1]))
    except OSError as error:
        raise DamagedFile(error.strerror or str(error)) from error
    if digest_of(encoded) != match[2].decode():
        raise DamagedFile("the head is damaged")
    try:
        head = msgspec.msgpack.decode(encoded, type=Head)
    except msgspec.DecodeError as error:  # another version's fields
        raise DamagedFile(f"the head is not as this version writes it: {error}") from error
    if len(head.checksums) != len(head.sizes) or min(head.sizes, default=0) < 0:
        raise DamagedFile("the head does not have a checksum for each part")
    if head.multiple < 1 or about.st_size != (places := head.places(len(first) + len(encoded)))[-1]:
        raise DamagedFile("cut or longer than written")
    return ContentFile(path, head, places, about.st_mtime)
