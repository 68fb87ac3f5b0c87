"""OUT.run.json, next to a finished output: the record of the run, for `--resume` and `pagedcli merge`.

Written by batch.sinks, read by batch.outputs and batch.merge.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from pagedcli.batch.journal import journal_path
from pagedcli.batch.lines import InputScan
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import whole_file
from pagedcli.printable import plural

SCHEMA_VERSION = 1
RECORD_BEGINNING = b'{"pagedcli_run":'


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, or a finished shard of one."""

    pagedcli_run: int  # schema version
    order: str  # of the rows: 'input' or 'completion'
    num_rows: int
    num_failed_rows: int
    digest: str  # xxh3-128 of the lines of the output, in hex
    input: InputScan  # the rows that were read; for a shard, including those of the others
    fingerprint: dict[str, str]  # what determines the rows, apart from the input; see batch.fingerprint

    @property
    def shard(self) -> str:
        """'2/4' is the second of four; '1/1' a whole run."""
        return self.fingerprint.get("shard", "")

    @property
    def number(self) -> int:
        """1-based."""
        return int(self.shard.partition("/")[0])

    @property
    def num_shards(self) -> int:
        return int(self.shard.partition("/")[2])


class LineDigest:
    """Digests the lines of an output as they pass through."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def passing(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            self._digest.update(line)
            yield line

    def read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._digest.update(line)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def check_unchanged(path: Path, record: RunRecord, digest: str) -> None:
    """Raises: PagedcliError if the rows of an output, of this digest, are not those that its run wrote."""
    if digest != record.digest:
        raise PagedcliError(
            f"{path} is not what its run wrote: {plural(record.num_rows, 'row')} with digest {record.digest}",
            hint="copy it again; merge takes the files as they were written",
        )


def record_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")


def write_record(path: Path, record: RunRecord) -> None:
    """Raises: OSError."""
    with whole_file(record_path(path), overwrite=True) as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read_record(path: Path) -> RunRecord:
    """The record of an output. Raises: UsageError if it or the output does not exist."""
    described = record_path(path)
    if not path.exists():
        hint = "finish its run with --resume" if journal_path(path).exists() else None
        raise UsageError(f"there is no {path}", hint=hint)
    try:
        record = msgspec.json.decode(described.read_bytes(), type=RunRecord)
    except OSError as error:
        raise UsageError(
            f"{path} exists, but {described}, which says what run wrote it, cannot be read: {error.strerror}",
            hint=f"put {described.name} back next to {path.name}, move {path.name} away, or use --overwrite",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{described} does not describe a run: {error}", hint="run again with --overwrite") from error
    if record.pagedcli_run != SCHEMA_VERSION:
        raise UsageError(f"{described} has version {record.pagedcli_run}, this pagedcli reads version {SCHEMA_VERSION}")
    if re.fullmatch(r"[1-9]\d{0,8}/[1-9]\d{0,8}", record.shard) is None:
        raise UsageError(f"{described} does not describe a run: shard is {record.shard!r}")
    return record
