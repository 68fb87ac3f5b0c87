"""A worker: runs a part's rows through its engine, into its journal and its file. Independent of the cluster."""

import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pagedcli.batch.columns import Columns
from pagedcli.batch.fingerprint import run_key
from pagedcli.batch.journal import Journal, open_journal
from pagedcli.batch.lines import InputDigest
from pagedcli.batch.parquet import ParquetRows
from pagedcli.batch.prompts import NO_SCORES, batch_options
from pagedcli.batch.requests import BatchRow, decode_line
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.sinks import FileSink
from pagedcli.batch.stats import BatchStats, total
from pagedcli.batch.stream import RowStream
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import LoadedConfig
from pagedcli.distributed.parts import PartFolder, PartLine
from pagedcli.errors import RequestError, UsageError

_LOCK_WAIT_S = 30.0  # time for a worker of a killed run to exit


class Worker:
    """One engine, which processes any number of parts of a folder at once."""

    def __init__(self, folder: Path, loaded: LoadedConfig) -> None:
        self._folder = PartFolder(folder)
        manifest = self._manifest = self._folder.manifest
        config = loaded.config
        is_table = manifest.suffix == ".parquet"
        self._columns = Columns.of(config.run, kind="parquet" if is_table else "jsonl")
        # a table carries the columns of its input itself
        columns = self._row_columns = replace(self._columns, keep=(), keep_all=False) if is_table else self._columns
        # the driver has checked what concerns the whole input
        no_scores = None if columns.kind == "jsonl" else NO_SCORES
        options = replace(batch_options(loaded, columns), check_ids=False, no_scores=no_scores)
        options = options.with_run(limit=None, max_errors=None)
        model, key = config.engine.model, run_key(manifest.fingerprint)

        def rows(tokenizer: Tokenizer) -> RowWriter:
            tokenizer.stop_clock(manifest.local_time or datetime.fromtimestamp(manifest.created_s))
            return RowWriter(tokenizer, model, key, manifest.created_s, columns)

        self._stream = RowStream(config.engine, options, rows, chat_template=config.run.chat_template)
        self._duplicates = BatchStats()  # rows that never reach the engine
        self._lock = threading.Lock()

    @property
    def stats(self) -> BatchStats:
        return total([self._stream.stats, self._duplicates])

    def stop(self) -> None:
        """Stop unfinished parts; finished rows are kept."""
        self._stream.stop()

    @property
    def is_stopped(self) -> bool:
        return self._stream.is_stopped

    def run_part(self, number: int) -> bool:
        """Process a part, or the rest of it. Returns False if the worker was stopped before its end."""
        if self._folder.is_done(number):
            return True
        lines = {each.line.index: each for each in self._folder.lines(number)}
        part = _PartRun(self._open_sink(number), sorted(lines))
        try:
            todo = [lines[index] for index in self._folder.rows(number).tolist() if not part.holds(lines[index])]
            for each in todo:
                if each.is_duplicate:
                    part.write_error(each, self._duplicate_row(each))
            todo = [each for each in todo if not each.is_duplicate]
            part.expect(len(todo))
            for each in todo:
                self._stream.submit(each.line, part)
            part.wait()
        except BaseException:
            part.sink.abandon()
            if self._stream.is_stopped:
                return False
            raise
        digest = InputDigest()
        for each in lines.values():
            digest.add(each.line)
        part.sink.finish(digest.scan())
        return True

    def _open_sink(self, number: int) -> FileSink:
        rows_format = None
        if self._manifest.suffix == ".parquet":
            carried, marked = self._folder.carried(number, self._columns), self._stream.marked_columns
            rows_format = ParquetRows(carried, self._columns, marked)
        return FileSink(self._folder.part(number), self._journal(number), order="input", rows_format=rows_format)

    def _journal(self, number: int) -> Journal:
        """The part's journal, which a dying worker may still have locked."""
        fingerprint = self._manifest.fingerprint | {"shard": self._manifest.shard(number)}
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                path = self._folder.part(number)
                # A worker may have been killed after it had written the part and before it removed the journal.
                journal = open_journal(path, fingerprint, resume=True, overwrite=True)
            except UsageError as error:
                if "another run" not in error.message or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
            else:
                return journal

    def _duplicate_row(self, each: PartLine) -> bytes:
        row = BatchRow(each.line)
        row.read_head(decode_line(each.line.content), self._row_columns)
        error = RequestError("duplicate_id", f"an earlier line has the same id {row.id!r}")
        with self._lock:
            self._duplicates.fail(each.line.number, error)
        return self._stream.rows.encode_error(row, error)


class _PartRun:
    """The rows of one part, by their index in it."""

    def __init__(self, sink: FileSink, indexes: list[int]) -> None:
        self.sink = sink
        self._places = {index: place for place, index in enumerate(indexes)}
        self._num_left = 0
        self._done = threading.Event()
        self._error: BaseException | None = None

    def holds(self, each: PartLine) -> bool:
        return self.sink.holds(self._places[each.line.index], each.line.digest)

    def write_error(self, each: PartLine, row: bytes) -> None:
        self.sink.write(self._places[each.line.index], each.line.digest, row, key=None)

    def expect(self, num_rows: int) -> None:
        """Announce the number of rows that will be submitted."""
        self._num_left = num_rows
        if not num_rows:
            self._done.set()

    def wait(self) -> None:
        """Wait until all rows are in the journal. Raises: the error that stopped the engine."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------ called by the engine's thread

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        self.sink.write(self._places[index], line_digest, row, key=key)
        self._num_left -= 1

    def flush(self) -> None:
        self.sink.flush()
        if not self._num_left:  # only now: from here on only the part's thread uses the sink
            self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()
