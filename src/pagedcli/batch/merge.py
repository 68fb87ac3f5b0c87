"""Merges the outputs of all shards of a run into one file. Used by cli.merge."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from pagedcli.batch.fingerprint import differences
from pagedcli.batch.journal import RunRecord, check_unchanged, open_rows, read_record
from pagedcli.batch.rows import RowStatus
from pagedcli.batch.sinks import whole_rows
from pagedcli.batch.stats import SeenIds
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import writing
from pagedcli.printable import plural

_MAX_NAMED = 5  # names in a message


@dataclass(slots=True)
class Merged:
    """The content of the merged file."""

    num_rows: int = 0
    num_failed: int = 0  # rows
    in_input_order: bool = True
    duplicate_ids: list[str | int] = field(default_factory=list)  # the first ones
    num_duplicate_ids: int = 0


def merge_shards(
    paths: list[Path], output: Path, *, overwrite: bool = False, allow_duplicate_ids: bool = False
) -> Merged:
    """Write the rows of all shards to `output`, in the order of the input if the shards have kept it.

    Raises: UsageError if the files are not all shards of one run, each exactly once; PagedcliError for a shard that was
            changed, and for a row id in two shards. Nothing is written in either case.
    """
    shards = _read_shards(paths)
    merged = Merged(in_input_order=all(shard.order == "input" for _, shard in shards))
    with writing(output, PagedcliError), ExitStack() as stack, whole_rows(output, overwrite=overwrite) as file:
        readers = [CheckedRows(path, shard, stack) for path, shard in shards]
        seen = SeenIds()
        for row in _rows(readers, in_input_order=merged.in_input_order):
            _count(merged, row, seen)
            file.write(row)
        for reader in readers:
            reader.check_end()
        if merged.num_duplicate_ids and not allow_duplicate_ids:
            raise _duplicates(merged)
    return merged


def _read_shards(paths: list[Path]) -> list[tuple[Path, RunRecord]]:
    shards = sorted(((path, read_record(path)) for path in paths), key=lambda pair: pair[1].number)
    first_path, first = shards[0]
    if first.num_shards == 1:
        raise UsageError(f"{first_path} is the output of a whole run", hint="merge joins outputs of generate --shard")
    for (path, shard), (before, earlier) in zip(shards[1:], shards, strict=False):
        if shard.num_shards != first.num_shards:
            raise UsageError(f"{first_path} is shard {first.shard}, but {path} is shard {shard.shard}")
        if shard.number == earlier.number:
            raise UsageError(f"{before} and {path} are both shard {shard.shard}")
        differing = differences({**first.fingerprint, "shard": ""}, {**shard.fingerprint, "shard": ""})
        if first.input != shard.input:
            differing.append("input: changed")
        if differing:
            raise UsageError(
                f"{first_path} and {path} are of different runs; {'; '.join(differing)}",
                hint="all shards need the same input and settings",
            )
    missing = sorted(set(range(1, first.num_shards + 1)) - {shard.number for _, shard in shards})
    if missing:
        named = ", ".join(f"{number}/{first.num_shards}" for number in missing[:_MAX_NAMED])
        raise UsageError(f"{len(missing)} of {plural(first.num_shards, 'shard')} missing: {named}")
    num_rows = sum(shard.num_rows for _, shard in shards)
    for path, shard in shards:
        expected = len(range(shard.number - 1, num_rows, shard.num_shards))
        if shard.num_rows != expected:
            raise UsageError(
                f"{path} has {plural(shard.num_rows, 'row')}, but of {num_rows:,} in all it must have {expected:,}"
            )
    return shards


class CheckedRows:
    """The rows of an output, one after the other, checked against its record."""

    def __init__(self, path: Path, record: RunRecord, stack: ExitStack) -> None:
        self._path = path
        self._record = record
        self._file = stack.enter_context(open_rows(path))
        self._digest = xxhash.xxh3_128()
        self.num_rows = record.num_rows

    def next_row(self) -> bytes:
        """Empty after the last one."""
        try:
            row = self._file.readline()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise PagedcliError(f"{self._path} is damaged: {error}") from error
        self._digest.update(row)
        return row

    def check_end(self) -> None:
        """Raises: PagedcliError if the rows are not those that the run wrote."""
        self.next_row()  # anything after the last one
        check_unchanged(self._path, self._record, self._digest.hexdigest())


def _rows(readers: list[CheckedRows], *, in_input_order: bool) -> Iterator[bytes]:
    """Shard i of n has the rows i, i + n, i + 2n, ... of the input."""
    if not in_input_order:
        for reader in readers:
            for _ in range(reader.num_rows):
                yield reader.next_row()
        return
    for place in range(readers[0].num_rows):
        for reader in readers:
            if place < reader.num_rows:
                yield reader.next_row()


def _count(merged: Merged, row: bytes, seen: SeenIds) -> None:
    merged.num_rows += 1
    try:
        decoded = msgspec.json.decode(row, type=RowStatus)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the shard's digest will show it
    merged.num_failed += decoded.error is not None
    row_id = decoded.row_id
    known_duplicate = decoded.error is not None and decoded.error.get("code") == "duplicate_id"
    if row_id is None or known_duplicate or seen.add(row_id):
        return
    merged.num_duplicate_ids += 1
    if len(merged.duplicate_ids) < _MAX_NAMED:
        merged.duplicate_ids.append(row_id)


def _duplicates(merged: Merged) -> PagedcliError:
    named = ", ".join(repr(row_id) for row_id in merged.duplicate_ids)
    return PagedcliError(
        f"{merged.num_duplicate_ids:,} row ids are in more than one shard: {named}",
        hint="a single run would have rejected these lines; --allow-duplicate-ids keeps all rows",
    )
