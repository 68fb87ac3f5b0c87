"""The driver of a run on a cluster: splits the input into parts, and counts what the workers have done. Independent of
the cluster.
"""

import logging
import time
from contextlib import suppress

from pagedcli.batch.columns import Columns, notes_of
from pagedcli.batch.fingerprint import check_same_run, input_fingerprint, run_fingerprint
from pagedcli.batch.job import Job
from pagedcli.batch.journal import journal_path, read_record
from pagedcli.batch.parquet import ParquetRows, ParquetSource
from pagedcli.batch.prompts import KeptColumns, Prompts, batch_options, limits_without_pool, open_source, open_tokenizer
from pagedcli.batch.stats import BatchStats, total
from pagedcli.distributed.parts import PartFolder, weigh_rows
from pagedcli.errors import UsageError
from pagedcli.models.hub import model_folder
from pagedcli.models.reading import read_spec


def prepare(job: Job, folder: PartFolder, num_workers: int) -> dict[str, int]:
    """Split the input into parts, or check that existing parts belong to this run. Returns ignored fields."""
    config = job.loaded.config
    columns = Columns.of(config.run)
    lines = open_source(job.input_name, columns)
    if lines.is_live:
        raise UsageError("a run in parts needs a file or folder as input, because it reads it more than once")
    kept = KeptColumns(lines, columns, in_rows=not isinstance(lines, ParquetSource))
    carried = ParquetRows(lines, columns).carried_as if isinstance(lines, ParquetSource) else {}
    model = model_folder(config.engine)
    tokenizer = open_tokenizer(config, model)
    scans = lines.scan(config.run.limit, observe=kept.add)
    assert scans is not None, "not live"
    kept.check()
    for note in (*kept.notes, *notes_of(carried, carried)):
        logging.getLogger("pagedcli").info("note: %s", note)
    scan, read = scans
    fingerprint = run_fingerprint(config, model, tokenizer, shard="1/1") | input_fingerprint(scan)
    if job.resume and folder.is_cut:
        check_same_run(folder.path, folder.manifest.fingerprint, fingerprint)
        if sum(folder.manifest.num_rows) != read.num_rows:
            raise UsageError(f"{folder.path} belongs to a run with a different --limit")
        return {}
    folder.clear()
    options = batch_options(job.loaded, columns)
    limits = limits_without_pool(config.engine, read_spec(model, trust_remote_code=config.engine.trust_remote_code))
    weighed = weigh_rows(Prompts(lines, tokenizer, options, limits), config.engine.block_size)
    parts, costs = weighed.parts(num_workers)
    folder.cut(lines, parts, costs, weighed.duplicates, fingerprint)
    return weighed.ignored


class Counts:
    """The counters of all workers, after the parts that they have done; rows also of the parts that they are doing."""

    def __init__(self, num_rows: int, *, num_resumed: int, max_errors: int | None) -> None:
        self._start_s = time.perf_counter()
        self._max_errors = max_errors
        self._num_rows = num_rows
        self._num_resumed = num_resumed
        self.runs: dict[str, dict[str, BatchStats]] = {}
        self.stats = BatchStats(num_rows=num_rows, num_resumed=num_resumed)

    @property
    def has_too_many_errors(self) -> bool:
        return self._max_errors is not None and self.stats.num_failed >= self._max_errors

    def update(self, runs: dict[str, dict[str, BatchStats]]) -> None:
        self.runs = runs
        self.stats = total(stats for processes in runs.values() for stats in processes.values())
        self.stats.num_rows, self.stats.num_resumed = self._num_rows, self._num_resumed
        self.stats.elapsed_s = time.perf_counter() - self._start_s

    def count_parts(self, folder: PartFolder) -> None:
        """Rows and failures from the records of the parts: workers that died cannot have counted all of theirs."""
        records = [read_record(folder.part(part)) for part in range(folder.manifest.num_parts)]
        self.stats.num_done = max(self._num_rows - self.stats.num_resumed, 0)
        num_failed = sum(record.num_failed_rows for record in records)
        self.stats.num_failed = min(self.stats.num_failed, num_failed)
        self.stats.num_resumed_failed = num_failed - self.stats.num_failed

    def count_rows(self, num_kept: int) -> None:
        """The rows that are in parts and journals by now."""
        self.stats.num_done = num_kept - self.stats.num_resumed


class RowCounter:
    """Counts the rows in finished parts and in journals, of which it reads each byte once."""

    def __init__(self, folder: PartFolder) -> None:
        self._folder = folder
        self._num_rows = list(folder.manifest.num_rows)
        self._ends = dict.fromkeys(folder.missing(), 0)  # unfinished part -> bytes of its journal that were read
        for part in self._ends:
            self._num_rows[part] = -1  # the first line is the header

    def count(self) -> int:
        """The rows by now."""
        for part, end in list(self._ends.items()):
            if self._folder.is_done(part):
                self._num_rows[part] = self._folder.manifest.num_rows[part]
                del self._ends[part]
                continue
            with suppress(FileNotFoundError), journal_path(self._folder.part(part)).open("rb") as file:
                file.seek(end)
                content = file.read()
                self._num_rows[part] += content.count(b"\n")
                self._ends[part] = end + len(content)
        return sum(max(0, number) for number in self._num_rows)
