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


def _moments(root: Path, program: Callable[[], object]) -> list[Cut]:
    cuts: list[Cut] = []
    held: dict[int, int] = {}  # files that stay open, so that their numbers are not used again

    def hold(fd: int) -> int:
        number = os.fstat(fd).st_ino
        if held.setdefault(number, fd) != fd:
            os.close(fd)
        return number

    def look() -> Disk:
        found = Disk()
        for folder, folders, files in os.walk(root):
            named = found.names[Path(folder)] = dict.fromkeys(folders)
            for name in files:
                fd = os.open(Path(folder, name), os.O_RDONLY)
                content = os.pread(fd, os.fstat(fd).st_size, 0)
                named[name] = number = hold(fd)
                found.content[number] = content
        return found

    synced = look()

    def note(seen: Disk) -> None:
        cuts.append(Cut(root, Disk(dict(synced.names), dict(synced.content)), seen))

    def sync(fd: int) -> None:
        seen, status = look(), os.fstat(fd)
        note(seen)
        folders = [folder for folder in seen.names if folder.stat().st_ino == status.st_ino]
        synced.names.update((folder, seen.names[folder]) for folder in folders)
        if not folders:
            hold(os.dup(fd))
            synced.content[status.st_ino] = os.pread(fd, status.st_size, 0)

    try:
        with mock.patch.object(os, "fsync", sync):
            program()
        note(look())
    finally:
        for fd in held.values():
            os.close(fd)
    return cuts
