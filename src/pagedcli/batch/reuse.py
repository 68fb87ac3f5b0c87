"""Rows of earlier outputs, which `--reuse` takes over where a row asks for the same under the same settings.

Used by batch.job and batch.run. The rows lie in a file without a name. Memory: about 200 bytes per row.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from pagedcli.batch.columns import kind_of
from pagedcli.batch.fingerprint import settings_that_differ
from pagedcli.batch.journal import NO_KEY, check_unchanged, output_digest, read_record, record_path
from pagedcli.batch.outputs import output_rows
from pagedcli.errors import UsageError

_OF_INPUT = frozenset(("shard", "keep", "id_field"))  # settings that say which rows there are, and what they copy


class Reuse:
    """The good rows of earlier outputs by their request_key. `notes`: why there are none of a file.

    Raises: UsageError, PagedcliError for a file that is no output, or has changed.
    """

    def __init__(self, paths: Sequence[Path], fingerprint: Mapping[str, str], *, to_parquet: bool) -> None:
        self.notes: list[str] = []
        self._file = TemporaryFile()  # noqa: SIM115
        self._places: dict[bytes, int] = {}
        for path in paths:
            record, kind = read_record(path), kind_of(path)
            if kind == "csv" or (kind == "parquet" and not to_parquet):
                hint = "reuse JSONL rows; Parquet rows serve a Parquet output"
                raise UsageError(f"{path} has no rows that can be reused here", hint=hint)
            if len(record.keys) != len(NO_KEY) * record.num_rows:
                why = f"{record_path(path).name} does not say what its rows asked for, as an earlier version wrote it"
                raise UsageError(f"{path} cannot be reused: {why}")
            if found := settings_that_differ(record.fingerprint, fingerprint, apart_from=_OF_INPUT):
                self.notes.append(f"no row of {path} is reused, as settings differ; {'; '.join(found)}")
                continue
            check_unchanged(path, record, output_digest(path))
            self._add(path, record.keys)

    def _add(self, path: Path, keys: bytes) -> None:
        for start, row in zip(range(0, len(keys), len(NO_KEY)), output_rows(path), strict=True):
            key = keys[start : start + len(NO_KEY)]
            if key != NO_KEY and key not in self._places:
                self._places[key] = self._file.tell()
                self._file.write(row.rstrip(b"\n") + b"\n")

    def find(self, key: bytes) -> bytes | None:
        """The row that asked for the same; None: there is none."""
        if (place := self._places.get(key)) is None:
            return None
        self._file.seek(place)
        return self._file.readline()
