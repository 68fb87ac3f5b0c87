"""`pagedcli store`: what is in the folder of --prefix-store, whether it is whole, and how to make it smaller."""

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pagedcli.cli.options import FormatOption, option
from pagedcli.config import parse_bytes
from pagedcli.content_files import ContentFile, ContentFolder, DamagedFile, differing, identity_digest
from pagedcli.errors import UsageError
from pagedcli.printable import byte_text, plural, printable
from pagedcli.records import Bytes
from pagedcli.show.tables import Format, Table, print_tables, table

EXIT_DAMAGED = 1
_DAY_S = 86_400
_CHECK_HELP = "Read every byte and compare it with its checksum; exit code 1 if a file is damaged."
_TRIM_HELP = "Remove damaged files, then the least valuable ones until the folder takes at most SIZE, e.g. 20GiB."


class StoredSettings(msgspec.Struct, frozen=True):
    """The files of one model and its settings."""

    settings: str  # the digest of all parts
    differs: Annotated[str, "differs from the first in"]
    num_files: int
    num_bytes: Annotated[Bytes, "size"]
    seconds: Annotated[float, "seconds saved"]
    days: Annotated[float, "days since its last use"]


def store(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of --prefix-store.")],
    *,
    check: Annotated[bool, typer.Option("--check", help=_CHECK_HELP)] = False,
    trim: Annotated[str | None, option("--trim", metavar="SIZE", help=_TRIM_HELP)] = None,
    format_: FormatOption = Format.TABLE,
) -> None:
    """Manage the prefix cache on disk (--prefix-store): KV blocks of shared prefixes, kept for later runs.

    Lists the files by model and settings, most recently used first. A run reads only files of its own model and
    settings; the table shows in what the others differ. The value of a file is the time that it saves per byte, halved
    for each day without use. Files of other programs count towards the size, but are never removed.

    \b
    Examples:
      pagedcli store ~/.cache/prefixes
      pagedcli store ~/.cache/prefixes --check
      pagedcli store ~/.cache/prefixes --trim 5GiB

    Exit codes: 0 success, 1 --check has found a damaged file, 2 wrong usage.
    """  # fmt: skip
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", hint="name the folder of --prefix-store")
    folder = ContentFolder(path)
    if trim is not None:
        _trim(folder, parse_bytes(trim))
    elif check:
        _check(folder)
    else:
        print_tables([_listed(folder)], format_)


def _listed(folder: ContentFolder) -> Table:
    files, wrong = folder.files()
    by_settings: dict[str, list[ContentFile]] = {}
    for file in sorted(files, key=lambda each: -each.used_s):
        by_settings.setdefault(identity_digest(file.head.identity), []).append(file)
    rows, identities = [], [group[0].head.identity for group in by_settings.values()]
    for digest, group in by_settings.items():
        differs = differing(identities[0], group[0].head.identity)
        of_group, seconds = sum(each.num_bytes for each in group), sum(each.head.seconds for each in group)
        days = max(0.0, time.time() - group[0].used_s) / _DAY_S
        rows.append(StoredSettings(digest[:16], differs, len(group), of_group, seconds, days))
    num_bytes, num_unused = sum(each.num_bytes for each in files), sum(folder.num_bytes(name) for name in wrong)
    title = f"{plural(len(files), 'file')} of {byte_text(num_bytes)} in {printable(str(folder.path))}"
    notes = [f"{name}: {why}" for name, why in wrong.items()]
    if num_others := folder.used_bytes() - num_bytes - num_unused:
        notes.append(f"files of others: {byte_text(num_others)}, which count towards --prefix-store-size")
    return table(StoredSettings, "settings", title, rows, notes=notes)


def _check(folder: ContentFolder) -> None:
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
    print(f"{plural(num_whole, 'file')} intact, {len(wrong):,} damaged")
    for name, what in wrong.items():
        print(f"  {name}: {printable(what)}")
    if wrong:
        raise typer.Exit(EXIT_DAMAGED)


def _trim(folder: ContentFolder, most_bytes: int) -> None:
    """Raises: UsageError if the folder cannot be written, or files of others alone exceed the bound."""
    if not folder.is_writable:
        raise UsageError(
            f"{folder.path} cannot be written: nothing was removed", hint="run it as the owner of the folder"
        )
    folder.most_bytes = most_bytes
    trimmed = folder.trim()
    left = f"{byte_text(folder.used_bytes())} left in {printable(str(folder.path))}"
    print(f"{plural(trimmed.num_removed, 'file')} removed, {left}")
    if trimmed.no_room is not None:
        raise UsageError(trimmed.no_room, hint="use a folder without other files, or a larger size")
