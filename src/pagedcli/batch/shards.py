"""What stands beside the output of one shard (OUT.shard), so that `pagedcli merge` knows what it puts together.

Written by batch.sinks, read by batch.merge.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from pagedcli.errors import UsageError

SCHEMA_VERSION = 1


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a run."""

    pagedcli_shard: int  # schema version
    shard: Annotated[str, msgspec.Meta(pattern=r"^[1-9]\d*/[1-9]\d*$")]  # '2/4' is the second of four
    order: str  # of the rows: 'input' or 'completion'
    num_rows: int
    digest: str  # xxh3-128 of the rows, in hex
    fingerprint: dict[str, str]  # what decides the rows, see batch.fingerprint; without the shard

    @property
    def number(self) -> int:
        """1-based."""
        return int(self.shard.partition("/")[0])

    @property
    def num_shards(self) -> int:
        return int(self.shard.partition("/")[2])


def shard_path(path: Path) -> Path:
    """Where the description of an output stands."""
    return path.with_name(path.name + ".shard")


class ShardWriter:
    """Describes an output while it is written. An output that is no shard has no description, and loses an old one."""

    def __init__(self, path: Path, fingerprint: dict[str, str], order: str) -> None:
        self._path = shard_path(path)
        self._fingerprint = dict(fingerprint)
        self._shard = self._fingerprint.pop("shard", "1/1")
        self._order = order
        self._num_rows = 0
        self._digest = xxhash.xxh3_128()

    def counted(self, rows: Iterable[bytes]) -> Iterator[bytes]:
        """The rows, which pass through."""
        for row in rows:
            self._digest.update(row)
            self._num_rows += 1
            yield row

    def write(self) -> None:
        """Raises: OSError."""
        if self._shard.endswith("/1"):
            self._path.unlink(missing_ok=True)
            return
        shard = Shard(
            pagedcli_shard=SCHEMA_VERSION,
            shard=self._shard,
            order=self._order,
            num_rows=self._num_rows,
            digest=self._digest.hexdigest(),
            fingerprint=self._fingerprint,
        )
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_bytes(msgspec.json.encode(shard) + b"\n")
        os.replace(temporary, self._path)


def read_shard(path: Path) -> Shard:
    """The description of an output. Raises: UsageError if it is not a finished shard."""
    described = shard_path(path)
    if not path.exists():
        partial = path.with_name(path.name + ".partial")
        hint = "finish its run with --resume" if partial.exists() else None
        raise UsageError(f"there is no {path}", hint=hint)
    try:
        shard = msgspec.json.decode(described.read_bytes(), type=Shard)
    except OSError as error:
        raise UsageError(
            f"cannot read {described}: {error.strerror}",
            hint="merge puts together what generate --shard wrote; copy OUT.shard along with OUT",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{described} does not describe a shard: {error}") from error
    if shard.pagedcli_shard != SCHEMA_VERSION:
        raise UsageError(f"{described} is of version {shard.pagedcli_shard}, this pagedcli knows {SCHEMA_VERSION}")
    return shard
