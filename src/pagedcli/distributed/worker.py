"""A worker: runs a part's rows through its engine, into its journal and its file; and the engine in its own thread that
it shares with PagedBatchGenerator, to which rows are submitted from any thread. Independent of the cluster.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pagedcli.batch.columns import Columns
from pagedcli.batch.fingerprint import run_key
from pagedcli.batch.journal import Journal, open_journal
from pagedcli.batch.lines import InputDigest, InputScan, Line
from pagedcli.batch.parquet import ParquetRows
from pagedcli.batch.prompts import BatchOptions, batch_options
from pagedcli.batch.requests import BatchRow, decode_line
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import FileSink, Sink
from pagedcli.batch.stats import BatchStats, total
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.distributed.parts import PartFolder, PartLine
from pagedcli.errors import PagedcliError, RequestError, UsageError
from pagedcli.runner.llm_engine import LLMEngine

_IDLE_WAIT_S = 0.05  # how soon an idle engine sees a new row or the end


class Receiver(Protocol):
    """Receives the rows of a batch or a part, in completion order, in the engine's thread."""

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None: ...

    def flush(self) -> None:
        """All rows of an engine step have been written."""

    def fail(self, error: BaseException) -> None:
        """The stream ended with this error; no more rows will come."""


class RowStream(Sink):
    """One engine that serves rows until `close`. An error in the engine's thread or in a receiver ends the stream, and
    all waiting receivers fail."""

    def __init__(
        self,
        config: EngineConfig,
        options: BatchOptions,
        make_rows: Callable[[Tokenizer], RowWriter],
        *,
        chat_template: str | None = None,
    ) -> None:
        self.engine = LLMEngine(config)
        tokenizer = Tokenizer(
            self.engine.model_path, chat_template=chat_template, trust_remote_code=config.trust_remote_code
        )
        self.rows = make_rows(tokenizer)
        self._came: queue.Queue[Line | None] = queue.Queue(maxsize=self.engine.limits.max_in_work)  # None: the end
        self._lock = threading.Lock()  # guards the two below
        self._receivers: dict[int, Receiver] = {}  # by row index
        self._error: BaseException | None = None
        self._written: set[Receiver] = set()  # since the last flush
        self._stopping = False
        self._run = BatchRun(
            self.engine, tokenizer, self._lines(), self, self.rows, options, stop_requested=lambda: self._stopping
        )
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> BatchStats:
        return self._run.stats

    @property
    def is_stopped(self) -> bool:
        return self._stopping

    def submit(self, line: Line, receiver: Receiver) -> None:
        """Add a row; blocks while the queue is full. Its index must differ from those of all unfinished rows.

        Raises: the error that ended the stream.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._receivers[line.index] = receiver
        while True:
            try:
                self._came.put(line, timeout=1.0)
                return
            except queue.Full:
                if self._error is not None:
                    raise self._error from None

    def stop(self) -> None:
        """End after this step; unfinished rows fail."""
        self._stopping = True

    def close(self) -> None:
        """End once all rows are done."""
        self._came.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self._run.run()
            error: BaseException = PagedcliError("the run was stopped")
        except BaseException as raised:
            error = raised
        self.engine.close()
        with self._lock:
            self._error = error
            waiting = set(self._receivers.values())
            self._receivers.clear()
        for receiver in waiting:
            receiver.fail(error)

    def _lines(self) -> Iterator[Line | None]:
        """The rows for the run; None where none is waiting."""
        while True:
            try:
                busy = self.engine.has_unfinished_requests()
                line = self._came.get(block=not busy, timeout=_IDLE_WAIT_S)
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            yield line

    # ------------------------------------------------------------------ the sink of the run

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        with self._lock:
            receiver = self._receivers.pop(index)
        receiver.write(index, line_digest, row, ok=ok)
        self._written.add(receiver)

    def flush(self) -> None:
        for receiver in self._written:
            receiver.flush()
        self._written.clear()

    def finish(self, read: InputScan) -> None:
        self.flush()

    def abandon(self) -> None:
        self.flush()


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
        options = replace(batch_options(loaded, columns), check_ids=False).with_run(limit=None, max_errors=None)
        model, key = config.engine.model, run_key(manifest.fingerprint)
        self._stream = RowStream(
            config.engine,
            options,
            lambda tokenizer: RowWriter(tokenizer, model, key, manifest.created_s, columns),
            chat_template=config.run.chat_template,
        )
        self._duplicates = BatchStats()  # rows that never reach the engine
        self._lock = threading.Lock()

    @property
    def stats(self) -> BatchStats:
        return total([self._stream.stats, self._duplicates])

    def stop(self) -> None:
        """Stop unfinished parts; finished rows are kept."""
        self._stream.stop()

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
            carried, marked = self._folder.carried(number, self._columns), self._stream.rows.marked_columns
            rows_format = ParquetRows(carried, self._columns, marked)
        return FileSink(self._folder.part(number), self._journal(number), order="input", rows_format=rows_format)

    def _journal(self, number: int) -> Journal:
        """The part's journal, which a dying worker may still have locked."""
        fingerprint = self._manifest.fingerprint | {"shard": self._manifest.shard(number)}
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                path = self._folder.part(number)
                journal = open_journal(path, fingerprint, resume=True, overwrite=False)
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
        self.sink.write(self._places[each.line.index], each.line.digest, row, ok=False)

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

    def write(self, index: int, line_digest: int, row: bytes, *, ok: bool) -> None:
        self.sink.write(self._places[index], line_digest, row, ok=ok)
        self._num_left -= 1

    def flush(self) -> None:
        self.sink.flush()
        if not self._num_left:  # only now: from here on only the part's thread uses the sink
            self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()
