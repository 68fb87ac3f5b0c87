"""`pagedcli store`: what is in the folder of --prefix-store, whether it is whole, and how to make it smaller."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pagedcli.cli.options import FormatOption, command_group, option
from pagedcli.config import parse_bytes
from pagedcli.content_files import ContentFile, ContentFolder, DamagedFile, differing, identity_digest
from pagedcli.errors import UsageError
from pagedcli.printable import byte_text, plural, printable
from pagedcli.records import Bytes
from pagedcli.show.tables import Format, print_tables, table

EXIT_DAMAGED = 1
_DAY_S = 86_400
_OTHER_USER = "run it as the user whose folder and files they are"

store = command_group("Look after the folder of --prefix-store: KV blocks of shared prefixes that later runs find.")
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of --prefix-store.")]


class Settings(msgspec.Struct, frozen=True):
    """The files of one model and its settings."""

    settings: str  # the digest of all parts
    differs: Annotated[str, "differs from the first in"]
    num_files: int
    num_bytes: Annotated[Bytes, "size"]
    seconds: Annotated[float, "seconds saved"]
    days: Annotated[float, "days since its last use"]


@store.command()
def ls(path: Folder, *, format_: FormatOption = Format.TABLE) -> None:
    """List what the folder has, by model and settings: those used last come first.

    A run reads only files whose parts are all its own; the names of the others' parts say why they were a miss.
    """
    folder = _folder(path)
    files, wrong = folder.files()
    by_settings: dict[str, list[ContentFile]] = {}
    for file in sorted(files, key=lambda each: -each.used_s):
        by_settings.setdefault(identity_digest(file.head.identity), []).append(file)
    rows, identities = [], [group[0].head.identity for group in by_settings.values()]
    for digest, group in by_settings.items():
        differs = differing(identities[0], group[0].head.identity)
        of_group, seconds = sum(each.num_bytes for each in group), sum(each.head.seconds for each in group)
        days = max(0.0, time.time() - group[0].used_s) / _DAY_S
        rows.append(Settings(digest[:16], differs, len(group), of_group, seconds, days))
    num_bytes, num_unused = sum(each.num_bytes for each in files), sum(folder.num_bytes(name) for name in wrong)
    title = f"{plural(len(files), 'file')} of {byte_text(num_bytes)} in {printable(str(path))}"
    notes = [f"{name}: {why}" for name, why in wrong.items()]
    if num_others := folder.used_bytes() - num_bytes - num_unused:
        notes.append(f"files of others: {byte_text(num_others)}, which --prefix-store-size counts, too")
    print_tables([table(Settings, "settings", title, rows, notes=notes)], format_)


@store.command()
def check(path: Folder) -> None:
    """Read every byte and compare it with its checksum. Changes nothing.

    \b
    Example:
      pagedcli store check ~/.cache/prefixes

    Exit codes: 0 all files are as they were written, 1 some are not, 2 wrong usage.
    """
    folder = _folder(path)
    folder.is_writable = False  # reading is no use of a file here
    files, wrong = folder.files()
    num_whole = 0
    for file in files:
        try:
            for part in range(len(file.head.sizes)):
                folder.read(file, [part])
            num_whole += 1
        except DamagedFile as error:
            wrong[file.path.name] = str(error)
    print(f"{plural(num_whole, 'file')} as written, {len(wrong):,} not")
    for name, what in wrong.items():
        print(f"  {name}: {printable(what)}")
    if wrong:
        raise typer.Exit(EXIT_DAMAGED)


@store.command()
def trim(
    path: Folder,
    *,
    size: Annotated[
        str | None,
        option(metavar="BYTES", help="Most bytes of all files, e.g. 20GiB. Default: a tenth of the disk stays free."),
    ] = None,
    days: Annotated[float | None, option(metavar="DAYS", help="Days without use. Default: no limit.", min=0)] = None,
) -> None:
    """Remove damaged files, those that were not used for so many days, and the least valuable above the size.

    The value of a file is the time that it saves per byte, halved for each day without use. Files of others in the
    folder count, but are never removed.
    """
    most_bytes = None if size is None else parse_bytes(size)
    folder = _folder(path, writes=True)
    folder.most_bytes, folder.most_age_s = most_bytes, None if days is None else days * _DAY_S
    trimmed = folder.trim()
    _print_left(folder, trimmed.num_removed)
    if trimmed.no_room is not None:
        raise UsageError(trimmed.no_room, hint="use a folder that has nothing else in it, or a larger --size")


@store.command()
def clear(path: Folder) -> None:
    """Remove all files of prefix stores from the folder. What others have put there stays."""
    folder = _folder(path, writes=True)
    files, wrong = folder.files()
    names = [*(file.path.name for file in files), *wrong]
    num_removed = sum(folder.remove(folder.path / name) for name in names)
    folder.trim()
    _print_left(folder, num_removed)
    if num_removed < len(names):
        raise UsageError(f"{plural(len(names) - num_removed, 'file')} could not be removed", hint=_OTHER_USER)


def _print_left(folder: ContentFolder, num_removed: int) -> None:
    left = f"{byte_text(folder.used_bytes())} left in {printable(str(folder.path))}"
    print(f"{plural(num_removed, 'file')} removed, {left}")


def _folder(path: Path, *, writes: bool = False) -> ContentFolder:
    """Raises: UsageError if there is no such folder, as none is made by looking at it, or if it cannot be written."""
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", hint="name the folder of --prefix-store")
    folder = ContentFolder(path)
    if writes and not folder.is_writable:
        raise UsageError(f"{path} cannot be written: nothing was removed", hint=_OTHER_USER)
    return folder
