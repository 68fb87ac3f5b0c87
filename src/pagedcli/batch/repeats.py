"""Rows that ask for the same: one is computed, and the others receive its answers. It is one of the run itself with
`--deduplicate`, and one of an earlier output with `--reuse`.

Used by batch.run, batch.job and batch.prompts. Known rows lie in a file without a name; 200 bytes per row in memory.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import xxhash

from pagedcli.batch.columns import kind_of
from pagedcli.batch.fingerprint import settings_that_differ
from pagedcli.batch.journal import NO_KEY, check_unchanged, output_digest, read_record, record_path
from pagedcli.batch.outputs import output_rows
from pagedcli.batch.requests import BatchRow
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import writing

_OF_INPUT = frozenset(("shard", "keep", "id_field"))  # settings that say which rows there are, and what they copy


def request_key(row: BatchRow) -> bytes:
    """Equal for two rows whose answers are equal: the same prompts, and the same parameters with the same draws."""
    prompts = []
    for prompt in row.prompts:
        params = prompt.params
        draws = not params.greedy and params.beam_width is None
        asked = params if draws else msgspec.structs.replace(params, seed=None)
        scored = prompt.scored
        wanted = prompt.embedding or (scored and (scored.continuations, scored.num_bytes, scored.with_tokens))
        prompts.append((prompt.token_ids, prompt.is_chat, prompt.tools, asked, wanted, prompt.asked))
    return xxhash.xxh3_128_digest(msgspec.json.encode((row.shape, row.cache_salt, prompts)))


class KnownRows:
    """Good rows by their request_key. `keeps_own`: whether those of the run itself are added."""

    def __init__(self, *, keeps_own: bool = False) -> None:
        self.keeps_own = keeps_own
        self.notes: list[str] = []  # why no row of an earlier output counts
        self._file = TemporaryFile()  # noqa: SIM115
        self._places: dict[bytes, int] = {}
        self._end = self._first_own = 0  # offsets

    def add_output(self, path: Path, settings: Mapping[str, str], *, to_parquet: bool) -> None:
        """Add the rows of an earlier output if its run had these settings.

        Raises: UsageError, PagedcliError for a file that is no output, or has changed.
        """
        record, kind = read_record(path), kind_of(path)
        if kind == "csv" or (kind == "parquet" and not to_parquet):
            hint = "reuse JSONL rows; Parquet rows serve a Parquet output"
            raise UsageError(f"{path} has no rows that can be reused here", hint=hint)
        if len(record.keys) != len(NO_KEY) * record.num_rows:
            why = f"{record_path(path).name} does not say what its rows asked for, as an earlier version wrote it"
            raise UsageError(f"{path} cannot be reused: {why}")
        if found := settings_that_differ(record.fingerprint, settings, apart_from=_OF_INPUT):
            self.notes.append(f"no row of {path} is reused, as settings differ; {'; '.join(found)}")
            return
        check_unchanged(path, record, output_digest(path))
        for start, row in zip(range(0, len(record.keys), len(NO_KEY)), output_rows(path), strict=True):
            if (key := record.keys[start : start + len(NO_KEY)]) != NO_KEY:
                self.add(key, row.rstrip(b"\n"))
        self._first_own = self._end

    @property
    def has_earlier(self) -> bool:
        """Whether it has rows of earlier outputs."""
        return self._first_own > 0

    def add(self, key: bytes, row: bytes) -> None:
        """Add a row, unless one is known. Raises: PagedcliError if the disk is full."""
        if self._places.setdefault(key, self._end) == self._end:
            with writing("a temporary file of rows", PagedcliError):
                self._file.seek(self._end)
                self._end += self._file.write(row + b"\n")
                self._file.flush()

    def find(self, key: bytes) -> tuple[bytes, bool] | None:
        """The row that asked for the same, and whether it is one of the run itself; None: there is none."""
        if (place := self._places.get(key)) is None:
            return None
        self._file.seek(place)
        return self._file.readline(), place >= self._first_own
