"""What a power cut leaves of the files in a folder: a stand-in for the disk.

`left_behind` runs a program once, and then makes the folder all that a cut at one of its syncs, or at its end, may
leave. Content is on the disk once its file has been synced, a name once its folder has been; of the rest each byte may
be kept, dropped, cut off, zero (as file systems leave what they had only made room for) or noise.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from unittest import mock

CONTENTS = ("kept", "dropped", "cut", "zeros", "noise")  # what becomes of bytes that were not synced
Names = dict[Path, dict[str, int | None]]  # folder -> name -> number of the file; None: a folder


@dataclass(frozen=True, slots=True)
class Disk:
    """Files by number, and their names."""

    names: Names = field(default_factory=dict)
    content: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cut:
    """A moment of a program."""

    root: Path
    synced: Disk
    seen: Disk

    @property
    def has_unsynced(self) -> bool:
        """Whether some content is not on the disk."""
        return any(self.synced.content.get(number) != content for number, content in self.seen.content.items())

    def leave(self, content: str, *, keeps_names: bool) -> None:
        """Make the folder what a cut leaves."""
        shutil.rmtree(self.root)
        tree, files = (self.seen if keeps_names else self.synced).names, {**self.synced.content, **self.seen.content}
        folders = [self.root]
        while folders:
            folder = folders.pop()
            folder.mkdir()
            for name, number in tree.get(folder, {}).items():
                if number is None:
                    folders.append(folder / name)
                else:
                    (folder / name).write_bytes(left(self.synced.content.get(number, b""), files[number], content))


def left(synced: bytes, seen: bytes, content: str) -> bytes:
    """What is left of a file. Of one that was only appended to, what was synced stays."""
    if content == "kept" or synced == seen:
        return seen
    if content == "dropped":
        return synced
    start = len(synced) if seen.startswith(synced) else 0
    num_new = len(seen) - start
    if content == "cut":
        return seen[: start + num_new // 2]
    return seen[:start] + (bytes(num_new) if content == "zeros" else random.Random(num_new).randbytes(num_new))


def left_behind(root: Path, program: Callable[[], object]) -> Iterator[tuple[int, str, bool]]:
    """Each time the folder is what a cut has left: the number of the sync, what became of bytes that were not synced,
    and whether such names are kept."""
    for number, cut in enumerate(_moments(root, program)):
        for content, keeps_names in product(CONTENTS, (True, False)):
            cut.leave(content, keeps_names=keeps_names)
            yield number, content, keeps_names


class WatchedDisk:
    """What of a folder is on the disk. `sync` takes the place of os.fsync; `cut` gives the moment for a cut."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[int, int] = {}  # files that stay open, so that their numbers are not used again
        self._synced = self._look()

    def cut(self) -> Cut:
        return Cut(self.root, Disk(dict(self._synced.names), dict(self._synced.content)), self._look())

    def sync(self, fd: int) -> None:
        seen, status = self._look(), os.fstat(fd)
        folders = [folder for folder in seen.names if folder.stat().st_ino == status.st_ino]
        self._synced.names.update((folder, seen.names[folder]) for folder in folders)
        if not folders:
            self._hold(os.dup(fd))
            self._synced.content[status.st_ino] = os.pread(fd, status.st_size, 0)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def _hold(self, fd: int) -> int:
        number = os.fstat(fd).st_ino
        if self._held.setdefault(number, fd) != fd:
            os.close(fd)
        return number

    def _look(self) -> Disk:
        found = Disk()
        for folder, folders, files in os.walk(self.root):
            named = found.names[Path(folder)] = dict.fromkeys(folders)
            for name in files:
                fd = os.open(Path(folder, name), os.O_RDONLY)
                content = os.pread(fd, os.fstat(fd).st_size, 0)
                named[name] = number = self._hold(fd)
                found.content[number] = content
        return found


def synced_by(program: Callable[[], object]) -> list[int]:
    """What a program syncs, in this order: inode numbers."""
    numbers, fsync = list[int](), os.fsync

    def sync(fd: int) -> None:
        numbers.append(os.fstat(fd).st_ino)
        fsync(fd)

    _run_with(sync, program)
    return numbers


def _run_with(sync: Callable[[int], None], program: Callable[[], object]) -> None:
    with mock.patch.object(os, "fsync", sync):
        program()


def _moments(root: Path, program: Callable[[], object]) -> list[Cut]:
    cuts: list[Cut] = []
    disk = WatchedDisk(root)

    def sync(fd: int) -> None:
        cuts.append(disk.cut())
        disk.sync(fd)

    try:
        _run_with(sync, program)
        cuts.append(disk.cut())
    finally:
        disk.close()
    return cuts
