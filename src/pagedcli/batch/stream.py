"""An engine in its own thread, to which rows are submitted from any thread.

Used by distributed.worker, distributed.generator and inspect_ai.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from pagedcli import runner
from pagedcli.batch.columns import DISK
from pagedcli.batch.lines import InputScan, Line
from pagedcli.batch.prompts import BatchOptions
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchRun
from pagedcli.batch.sinks import Sink
from pagedcli.batch.stats import BatchStats
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.config import EngineConfig
from pagedcli.errors import PagedcliError

_IDLE_WAIT_S = 0.05  # how soon an idle engine sees a new row or the end


class Receiver(Protocol):
    """Receives the rows of a batch or a part, in completion order, in the engine's thread."""

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None: ...

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
        self.engine = runner.LLMEngine(config, with_store=True)
        tokenizer = Tokenizer(
            self.engine.model_path, chat_template=chat_template, trust_remote_code=config.trust_remote_code
        )
        self.rows = make_rows(tokenizer)
        self._came: queue.Queue[Line | None] = queue.Queue(maxsize=self.engine.limits.max_in_work)  # None: the end
        self._lock = threading.Lock()  # guards the two below
        self._receivers: dict[int, Receiver] = {}  # row index -> receiver
        self._error: BaseException | None = None
        self._written: set[Receiver] = set()  # since the last flush
        self.is_stopped = False
        self._run = BatchRun(
            self.engine, tokenizer, self._lines(), self, self.rows, options, stop_requested=lambda: self.is_stopped
        )
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> BatchStats:
        return self._run.stats

    @property
    def marked_columns(self) -> frozenset[str]:
        """Columns of tables that only some runs have, those that rows of this one may have."""
        return self.rows.marked_columns | (DISK if self.engine.config.prefix_store is not None else frozenset[str]())

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
        self.is_stopped = True

    def close(self) -> None:
        """End once all rows are done."""
        self._came.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self.is_stopped |= self._run.run().outcome != "complete"
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

    def write(self, index: int, line_digest: int, row: bytes, *, key: bytes | None) -> None:
        with self._lock:
            receiver = self._receivers.pop(index)
        receiver.write(index, line_digest, row, key=key)
        self._written.add(receiver)

    def flush(self) -> None:
        for receiver in self._written:
            receiver.flush()
        self._written.clear()

    def finish(self, read: InputScan) -> None:
        self.flush()

    def abandon(self) -> None:
        self.flush()
