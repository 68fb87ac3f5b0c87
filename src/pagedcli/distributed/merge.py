"""Merges the parts of a distributed run into one file, in the order of the input. Used by cli.merge."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pagedcli.batch.journal import RunRecord, check_unchanged, digest_of, read_record
from pagedcli.batch.merge import CheckedRows, Merged
from pagedcli.batch.parquet import is_parquet, require_pyarrow
from pagedcli.batch.sinks import whole_rows
from pagedcli.distributed.parts import PartFolder
from pagedcli.errors import PagedcliError, UsageError
from pagedcli.files import writing
from pagedcli.later import parquet as pq
from pagedcli.later import pyarrow as pa

_TABLE_ROWS = 16_384  # per row group of a merged table
_PIECE_ROWS = 1024  # rows of one part in memory at once


def merge_parts(path: Path, output: Path, *, overwrite: bool = False) -> Merged:
    """Write the rows of all parts in the folder to `output`.

    Raises: UsageError if the folder is not of a finished run; PagedcliError for a part that was changed. Nothing is
            written in either case.
    """
    folder = PartFolder(path)
    if not folder.is_cut:
        raise UsageError(f"{path} is not the output of a distributed run", hint="it has no manifest.json")
    missing = folder.missing()
    if missing:
        raise UsageError(
            f"{len(missing):,} of {folder.manifest.num_parts:,} parts of {path} are not done, the first is "
            f"{folder.part(missing[0]).name}",
            hint="finish the run with --resume",
        )
    if is_parquet(output) != (folder.manifest.suffix == ".parquet"):
        raise UsageError(f"the parts are {folder.manifest.suffix} files", hint=f"-o OUT{folder.manifest.suffix}")
    numbers = range(folder.manifest.num_parts)
    records = [read_record(folder.part(number)) for number in numbers]
    for number, record in zip(numbers, records, strict=True):
        if record.shard != folder.manifest.shard(number) or record.num_rows != folder.manifest.num_rows[number]:
            raise UsageError(f"{folder.part(number)} does not belong to the run that {path} describes")
    with writing(output, PagedcliError), ExitStack() as stack, whole_rows(output, overwrite=overwrite) as file:
        if is_parquet(output):
            _merge_tables(folder, records, stack, file)
        else:
            file.writelines(_lines(folder, records, stack))
    return Merged(
        num_rows=sum(record.num_rows for record in records),
        num_failed=sum(record.num_failed_rows for record in records),
    )


def _lines(folder: PartFolder, records: list[RunRecord], stack: ExitStack) -> Iterator[bytes]:
    """Rows of a part are in the order of the input: the input's next row is the next one of its part."""
    readers = [CheckedRows(folder.part(number), record, stack) for number, record in enumerate(records)]
    for number in folder.part_of_row().tolist():
        yield readers[number].next_row()
    for reader in readers:
        reader.check_end()


def _merge_tables(folder: PartFolder, records: list[RunRecord], stack: ExitStack, output: BinaryIO) -> None:
    """Write the rows of all parts in the order of the input. Rows of a part are in that order."""
    require_pyarrow()
    for number, record in enumerate(records):
        with folder.part(number).open("rb") as file:
            check_unchanged(folder.part(number), record, digest_of(file))
    files = [stack.enter_context(pq.ParquetFile(folder.part(number))) for number in range(len(records))]
    readers = [_TableReader(file) for file in files]
    part_of_row = folder.part_of_row()
    with pq.ParquetWriter(output, files[0].schema_arrow, compression="zstd") as writer:
        for start in range(0, len(part_of_row), _TABLE_ROWS):
            parts = part_of_row[start : start + _TABLE_ROWS]
            numbers, counts = np.unique(parts, return_counts=True)
            pieces = [readers[number].take(count) for number, count in zip(numbers, counts, strict=True)]
            order = np.argsort(np.argsort(parts, kind="stable"))  # the place of each row in the joined pieces
            writer.write_table(pa.concat_tables(pieces).take(pa.array(order)))


class _TableReader:
    """Reads rows of a table's part, any number at a time."""

    def __init__(self, file: Any) -> None:
        self._batches = file.iter_batches(_PIECE_ROWS)
        self._schema = file.schema_arrow
        self._left: list[Any] = []  # pyarrow.RecordBatch

    def take(self, num_rows: int) -> Any:
        while sum(batch.num_rows for batch in self._left) < num_rows:
            self._left.append(next(self._batches))
        table = pa.Table.from_batches(self._left, self._schema)
        self._left = table.slice(num_rows).to_batches()
        return table.slice(0, num_rows)
