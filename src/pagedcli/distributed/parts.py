"""The folder of a distributed run: its manifest, and the input and output rows of each part, which are cut after one
pass that checks every row.

Used by the driver, which writes them, by the workers and by merge. The layout:
manifest.json, rows.u64 (row indexes, one part after the other), part-00000.jsonl and its record for each finished part;
.work/part-00000.in (its input lines) until the whole run is done.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from pagedcli.batch.columns import Columns
from pagedcli.batch.journal import journal_path, record_path
from pagedcli.batch.lines import Line, LineSource
from pagedcli.batch.parquet import ParquetSource
from pagedcli.batch.prompts import Prompts
from pagedcli.distributed.partition import Ints, PrefixKeys
from pagedcli.errors import UsageError
from pagedcli.files import read_own, sync_files, whole_file
from pagedcli.later import parquet as pq
from pagedcli.later import pyarrow as pa
from pagedcli.line_files import NOT_JSON

SCHEMA_VERSION = 1
PARTS_AT_ONCE = 2  # per worker: the next part's rows fill the engine while the last rows of one finish
MANIFEST, ROWS, WORK = "manifest.json", "rows.u64", ".work"
_BUFFER_BYTES = 64 * 2**20  # buffers of all parts together
_TOO_LONG, _DUPLICATE, _GOOD = b"x", b"d", b"-"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a distributed run."""

    pagedcli_parts: int  # schema version
    created_s: int  # Unix time of the run's first start
    fingerprint: dict[str, str]  # settings that, with the input, determine the rows
    suffix: str  # '.jsonl' or '.parquet'
    num_rows: list[int]  # one number per part
    costs: list[int]  # tokens to compute in each part
    local_time: datetime | None = None  # first start, for chat templates; None: not known

    @property
    def num_parts(self) -> int:
        return len(self.num_rows)

    def part(self, number: int) -> str:
        """The name of a part's file."""
        return f"part-{number:05}{self.suffix}"

    def shard(self, part: int) -> str:
        return f"{part + 1}/{self.num_parts}"


class PartLine(msgspec.Struct, frozen=True):
    """An input line of a part."""

    line: Line
    is_duplicate: bool  # an earlier line of the input has the same id


class PartFolder:
    """The files of a run. It has a manifest once the input has been cut into parts: `is_cut`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = self._read_manifest()

    @property
    def is_cut(self) -> bool:
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "the input has been cut into parts"
        return self._manifest

    def part(self, number: int) -> Path:
        return self.path / self.manifest.part(number)

    def is_done(self, number: int) -> bool:
        """Whether the part is complete: its record is written before it, its journal removed after it."""
        path = self.part(number)
        return path.exists() and record_path(path).exists() and not journal_path(path).exists()

    def missing(self) -> list[int]:
        return [number for number in range(self.manifest.num_parts) if not self.is_done(number)]

    def rows(self, number: int) -> Ints:
        """Row indexes of a part, with rows that share a prefix next to each other."""
        start = sum(self.manifest.num_rows[:number])
        count = self.manifest.num_rows[number]
        return np.fromfile(self.path / ROWS, "<i8", count, offset=8 * start).astype(np.int64)

    def part_of_row(self) -> Ints:
        """The part of each row of the input."""
        rows = np.fromfile(self.path / ROWS, "<i8")
        parts = np.empty(len(rows), np.int64)
        parts[rows] = np.repeat(np.arange(self.manifest.num_parts), self.manifest.num_rows)
        return parts

    def lines(self, number: int) -> Iterator[PartLine]:
        with (self._input(number)).open("rb") as file:
            for record in file:
                head, _, content = record[:-1].partition(b"\t")
                index, line_number, flag = head.split(b" ")
                text = None if flag == _TOO_LONG else content
                line = Line(int(index), int(line_number), text, xxhash.xxh64_intdigest(content))
                yield PartLine(line, flag == _DUPLICATE)

    def carried(self, number: int, columns: Columns) -> ParquetSource:
        """The rows of a part of a table, with all columns."""
        return ParquetSource(str(self._input(number).with_suffix(".parquet")), columns=columns)

    def inputs(self, number: int) -> list[Path]:
        """The files with the input of a part."""
        lines = self._input(number)
        return [lines, lines.with_suffix(".parquet")] if self.manifest.suffix == ".parquet" else [lines]

    # ------------------------------------------------------------------ changes

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raises: UsageError if existing files would be lost or mixed with new ones."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"the output {self.path} is a file, but a distributed run writes a folder of parts")
        if not self.is_cut:
            found = sorted(set(os.listdir(self.path)) - {WORK, ROWS}) if self.path.exists() else []
            if found:
                raise UsageError(
                    f"the folder {self.path} contains {found[0]}", hint="name a new or empty folder with -o"
                )
        elif not resume and not overwrite:
            raise UsageError(
                f"{self.path} contains a distributed run", hint="continue it with --resume, or use --overwrite"
            )

    def clear(self) -> None:
        """Remove only the files of an earlier run."""
        for number in range(self.manifest.num_parts if self.is_cut else 0):
            self.remove(number)
        (self.path / MANIFEST).unlink(missing_ok=True)
        (self.path / ROWS).unlink(missing_ok=True)
        self.remove_work()
        self._manifest = None

    def cut(
        self, lines: LineSource, parts: list[Ints], costs: list[int], duplicates: set[int], fingerprint: dict[str, str]
    ) -> None:
        """Write the input lines of each part, then the manifest."""
        self.path.mkdir(exist_ok=True)
        (self.path / WORK).mkdir(exist_ok=True)
        np.concatenate(parts).astype("<i8").tofile(self.path / ROWS)
        part_of_row = np.empty(sum(map(len, parts)), np.int64)
        for number, rows in enumerate(parts):
            part_of_row[rows] = number
        self._cut_lines(lines, part_of_row, duplicates, len(parts))
        if isinstance(lines, ParquetSource):
            self._cut_table(lines, part_of_row, len(parts))
        self._manifest = Manifest(
            pagedcli_parts=SCHEMA_VERSION,
            created_s=int(time.time()),
            fingerprint=fingerprint,
            suffix=".parquet" if isinstance(lines, ParquetSource) else ".jsonl",
            num_rows=[len(rows) for rows in parts],
            costs=costs,
            local_time=datetime.now(),
        )
        for folder in (self.path / WORK, self.path):  # The manifest, written next, says that they are complete.
            sync_files(folder)
        with whole_file(self.path / MANIFEST, overwrite=True) as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.manifest)) + b"\n")

    def remove(self, number: int) -> None:
        """Remove a part, what belongs to it and its input."""
        path = self.part(number)
        for each in (path, record_path(path), journal_path(path), *self.inputs(number)):
            each.unlink(missing_ok=True)

    def remove_work(self) -> None:
        shutil.rmtree(self.path / WORK, ignore_errors=True)

    def _input(self, number: int) -> Path:
        return self.path / WORK / f"part-{number:05}.in"

    def _cut_lines(self, lines: LineSource, part_of_row: Ints, duplicates: set[int], num_parts: int) -> None:
        buffers: list[list[bytes]] = [[] for _ in range(num_parts)]
        num_bytes = 0

        def write() -> None:
            for number, buffer in enumerate(buffers):
                with self._input(number).open("ab") as file:
                    file.writelines(buffer)
                buffer.clear()

        for number in range(num_parts):
            self._input(number).unlink(missing_ok=True)
        for line in lines:
            if line.index >= len(part_of_row):  # --limit
                break
            flag = _TOO_LONG if line.content is None else _DUPLICATE if line.index in duplicates else _GOOD
            record = b"%d %d %b\t%b\n" % (line.index, line.number, flag, line.content or b"")
            buffers[part_of_row[line.index]].append(record)
            num_bytes += len(record)
            if num_bytes >= _BUFFER_BYTES:
                write()
                num_bytes = 0
        write()

    def _cut_table(self, table: ParquetSource, part_of_row: Ints, num_parts: int) -> None:
        with ExitStack() as stack:
            writers = [
                stack.enter_context(pq.ParquetWriter(self._input(number).with_suffix(".parquet"), table.schema))
                for number in range(num_parts)
            ]
            buffers: list[list[Any]] = [[] for _ in range(num_parts)]
            num_bytes = start = 0

            def write() -> None:
                for writer, buffer in zip(writers, buffers, strict=True):
                    if buffer:
                        writer.write_table(pa.Table.from_batches(buffer))
                    buffer.clear()

            for batch in table.batches():
                parts = part_of_row[start : start + batch.num_rows]
                start += batch.num_rows
                for number in np.unique(parts):
                    buffers[number].append(batch.take(pa.array(np.flatnonzero(parts == number))))
                num_bytes += batch.nbytes
                if num_bytes >= _BUFFER_BYTES:
                    write()
                    num_bytes = 0
            write()

    def _read_manifest(self) -> Manifest | None:
        path = self.path / MANIFEST
        if not path.exists():
            return None
        try:
            manifest = msgspec.json.decode(read_own(path), type=Manifest)
        except (OSError, *NOT_JSON) as error:
            raise UsageError(f"{path} does not describe a distributed run: {error}") from error
        if manifest.pagedcli_parts != SCHEMA_VERSION:
            raise UsageError(
                f"{path} has version {manifest.pagedcli_parts}, this pagedcli reads version {SCHEMA_VERSION}"
            )
        return manifest


_PARTS_PER_WORKER = 8  # a whole part is the smallest piece that can be taken from a slow worker
_MAX_PART_BYTES = 32 * 2**20  # a worker keeps the lines of its parts in memory
MAX_PARTS = 500  # files that merge has open at once
_LARGEST_ID = 2**31


@dataclass(slots=True)
class WeighedRows:
    """The rows of an input by prefix and cost, from one pass over it."""

    keys: PrefixKeys
    duplicates: set[int] = field(default_factory=set)  # rows with the id of an earlier row
    ignored: dict[str, int] = field(default_factory=dict)  # field without effect -> lines
    num_bytes: int = 0

    def parts(self, num_workers: int) -> tuple[list[Ints], list[int]]:
        """The rows of each part, and the tokens that it has to compute."""
        ordered = self.keys.ordered()
        num_parts = max(_PARTS_PER_WORKER * num_workers, -(-self.num_bytes // _MAX_PART_BYTES))
        parts = ordered.parts(max(1, min(num_parts, MAX_PARTS, len(self.keys))))
        costs, start = [], 0
        for rows in parts:
            costs.append(int(ordered.costs[start : start + len(rows)].sum()))
            start += len(rows)
        return parts, costs


def weigh_rows(prompts: Prompts, block_size: int) -> WeighedRows:
    """Read and tokenize every row. Raises: PagedcliError if the input cannot be read."""
    weighed = WeighedRows(PrefixKeys(block_size))
    for row in prompts:
        assert row is not None, "a file does not wait"
        weighed.num_bytes += len(row.line.content or b"")
        if row.error is not None:
            weighed.keys.add([], 0)
            if row.error.code == "duplicate_id":
                weighed.duplicates.add(row.line.index)
        else:
            first, *more = row.prompts
            token_ids = first.token_ids
            if not all(0 <= token_id < _LARGEST_ID for token_id in token_ids):
                token_ids = []  # the engine will reject it
            num_more = sum(len(prompt.token_ids) for prompt in more)
            num_new = sum((prompt.params.max_tokens or 0) * prompt.params.num_sequences for prompt in row.prompts)
            weighed.keys.add(token_ids, num_more + num_new, row.cache_salt)
    weighed.ignored = prompts.ignored
    return weighed
