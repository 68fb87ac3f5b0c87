"""`pagedcli store`: what is in the folder of --prefix-store, whether it is whole, and how to make it smaller."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pagedcli.cli.options import MEASURED_KEYS, ConfigFile, Flags, FormatOption, command_group, config_flags, option
from pagedcli.config import EngineConfig, load_config, parse_bytes
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
@config_flags(*MEASURED_KEYS)
def check(
    path: Folder,
    *,
    read: Annotated[
        str | None,
        option(metavar="SHARE", help="Also recompute so many of the blocks with the model, e.g. 5%, drawn at random."),
    ] = None,
    config: ConfigFile = None,
    flags: Flags,
) -> None:
    """Read every byte and compare it with its checksum. Changes nothing.

    With --read, blocks are computed again and compared bit by bit. The model and its settings are those of the run that
    wrote them; files of others are left out.

    \b
    Examples:
      pagedcli store check ~/.cache/prefixes
      pagedcli store check ~/.cache/prefixes --read 5% -m Qwen/Qwen3-0.6B

    Exit codes: 0 all files are as they were written, 1 some are not, 2 wrong usage.
    """
    share = None if read is None else _share(read)
    if share is None and (flags or config is not None):
        raise UsageError("a model and settings are for --read, which recomputes blocks", hint="name a share: --read 5%")
    folder = _folder(path)
    engine = None if share is None else _checked_engine(path, load_config(config, flags).config.engine)
    folder.is_writable = False  # reading is no use of a file here
    files, wrong = folder.files()
    for file in files:
        try:
            for part in range(len(file.head.sizes)):
                folder.read(file, [part])
        except DamagedFile as error:
            wrong[file.path.name] = str(error)
    num_whole = len(files) - len(wrong.keys() & {file.path.name for file in files})
    print(f"{plural(num_whole, 'file')} as written, {len(wrong):,} not")
    _print_files(wrong)
    if share is not None and engine is not None:
        whole = [file for file in files if file.path.name not in wrong]
        wrong |= _compare(engine, whole, share)
    if wrong:
        raise typer.Exit(EXIT_DAMAGED)


def _share(text: str) -> float:
    """Raises: UsageError."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    with suppress(ValueError):
        share = float(number) / (100 if is_percent else 1)
        if 0 < share <= 1:
            return share
    raise UsageError(f"--read is {text!r}, must be a share of the blocks", hint="5% or 0.05, at most 100%")


def _checked_engine(path: Path, config: EngineConfig) -> tuple[EngineConfig, ContentFolder]:
    """The configuration that reads the folder, and the folder."""
    config = msgspec.structs.replace(config, prefix_store=str(path))
    folder = ContentFolder(path)
    folder.is_writable = False
    return config, folder


def _compare(engine: tuple[EngineConfig, ContentFolder], files: list[ContentFile], share: float) -> dict[str, str]:
    """Recompute a share of the blocks and states, and say what is wrong."""
    from pagedcli.runner.store_check import compare_with_model

    config, folder = engine
    found = compare_with_model(config, folder, files, share)
    others = f"other bits in {plural(len(found.wrong), 'file')}"
    num_blocks, num_states = found.num_equal["blocks"], found.num_equal["state"]
    states = f" and {plural(num_states, 'state')}" if num_states else ""
    print(f"{plural(num_blocks, 'block')}{states} recomputed: the same bits; {others}")
    _print_files(found.wrong)
    if found.skipped:
        print(f"not recomputed: {plural(len(found.skipped), 'file')}")
        _print_files(found.skipped)
    return found.wrong


def _print_files(said: dict[str, str]) -> None:
    for name, what in said.items():
        print(f"  {name}: {printable(what)}")


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
