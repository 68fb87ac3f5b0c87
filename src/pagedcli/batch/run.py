"""The batch run: lines in, requests through the engine, rows out. Reads lines only as the engine needs them.

Used by batch.job; does not use the terminal. An invalid line becomes an error row.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedcli.batch.detokenizer import StopCheckers
from pagedcli.batch.grammar import Grammars, Guides
from pagedcli.batch.intake import BatchOptions, Intake, Prepared, Refused
from pagedcli.batch.lines import InputDigest, Line, as_they_come
from pagedcli.batch.reorder import PrefixWindow
from pagedcli.batch.requests import RowHead
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.sinks import Sink
from pagedcli.batch.stats import BatchStats
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.engine.admission import AdmissionLimits
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.engine.outputs import RequestOutput

_IDLE_WAIT_S = 0.1  # how soon an idle run notices Ctrl-C
Outcome = Literal["complete", "interrupted", "too_many_errors"]


@dataclass(slots=True)
class BatchResult:
    """How a run ended."""

    outcome: Outcome
    stats: BatchStats
    ignored: dict[str, int] = field(default_factory=dict)  # field name -> number of lines where it had no effect


@dataclass(frozen=True, slots=True)
class _InWork:
    """The state of a line while the engine works on it."""

    head: RowHead
    line_digest: int
    params: SamplingParams
    stop_checkers: StopCheckers | None
    guides: Guides | None


def wanted_lines(lines: Iterable[Line | None], options: BatchOptions, read: InputDigest) -> Iterator[Line | None]:
    """The lines of this run's shard, up to the limit. None (no line yet) is passed through.

    Changes: `read` receives every line up to the limit.
    """
    place, num_shards = options.shard
    for line in lines:
        if line is None:
            yield None
            continue
        if options.limit is not None and line.index >= options.limit:
            return
        read.add(line)
        if line.index % num_shards == place:
            yield line


class BatchRun:
    """One pass over an input.

    `live`: lines may arrive slowly, and available ones are served meanwhile. `num_rows`: of the output, if known.
    `observe` is called with the counters after each step; `stop_requested` is called before each step, and True ends
    the run once the rows so far are written.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        tokenizer: Tokenizer,
        lines: Iterable[Line | None],
        sink: Sink,
        rows: RowWriter,
        options: BatchOptions,
        *,
        live: bool = False,
        num_rows: int | None = None,
        observe: Callable[[BatchStats], None] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sink = sink
        self._rows = rows
        self._options = options
        self._observe = observe
        self._stop_requested = stop_requested
        self._intake = Intake(tokenizer, options, AdmissionLimits.of(engine.plan))
        self._grammars = Grammars(tokenizer, end_token_ids=engine.spec.eos_token_ids, vocab_size=engine.spec.vocab_size)
        if live:
            lines = as_they_come(lines, lambda: 0.0 if engine.has_unfinished_requests() else _IDLE_WAIT_S)
        self._read = InputDigest()
        self._lines = wanted_lines(lines, options, self._read)
        self._in_work: dict[str, _InWork] = {}
        # one engine step may finish every running request: keep as many again tokenized and ready
        self._max_in_work = 2 * engine.plan.max_num_seqs
        self._window = PrefixWindow() if options.reorder == "prefix" else None
        self._exhausted = False  # whether the input has ended
        self.stats = BatchStats(num_rows=num_rows, num_blocks=engine.plan.num_blocks)

    def run(self) -> BatchResult:
        """Serve every line. Finishes the sink if the run is complete, and abandons it if the run stops early."""
        start_s = time.perf_counter()
        try:
            outcome = self._serve(start_s)
        except BaseException:  # a full disk, a changed input, Ctrl-C twice
            self._sink.abandon()
            raise
        if outcome == "complete":
            self._sink.finish(self._read.scan())
        else:
            self._sink.abandon()
        self._update_stats(start_s)
        return BatchResult(outcome, self.stats, dict(self._intake.parser.ignored))

    def _serve(self, start_s: float) -> Outcome:
        engine, options = self._engine, self._options
        self.stats.num_resumed = self._sink.resumed_rows
        self.stats.num_resumed_failed = self._sink.resumed_failed_rows
        while not self._stop_requested():
            self._pull()
            self._sink.flush()  # rows of the last step are written before the next one ends
            if options.max_errors is not None and self.stats.num_failed >= options.max_errors:
                return "too_many_errors"
            if not engine.has_unfinished_requests():
                if self._exhausted and not self._window:
                    return "complete"
                continue
            for output in engine.step():
                self._write_success(output)
            self._update_stats(start_s)
            if self._observe is not None:
                self._observe(self.stats)
        return "interrupted"

    # ------------------------------------------------------------------ lines to requests

    def _pull(self) -> None:
        """Read lines while there is room, and submit requests while the engine has room."""
        max_errors, waits = self._options.max_errors, False
        for _ in range(self._max_in_work):  # a sequence of invalid lines must not delay the engine or Ctrl-C
            if (
                self._exhausted
                or not self._has_room()
                or (max_errors is not None and self.stats.num_failed >= max_errors)
            ):
                break
            try:
                line = next(self._lines)
            except StopIteration:
                self._exhausted = True
                break
            if line is None:
                waits = True
                break
            self._take(line)
        if self._window is not None:
            self._start_waiting(self._window, partial=self._exhausted or waits or self._sink.full)

    def _has_room(self) -> bool:
        if self._sink.full:
            return False
        return len(self._in_work) < self._max_in_work if self._window is None else not self._window.full

    def _take(self, line: Line) -> None:
        """Queue the request of a line or write its error row, unless the journal already has its row."""
        taken = self._intake.prepare(line, done=self._sink.holds(line.index, line.digest))
        if isinstance(taken, Refused):
            self._write_error(taken.head, line.digest, taken.error)
        elif taken is not None and self._window is not None:
            self._window.add(line, taken)
        elif taken is not None:
            self._start(line, taken)

    def _start_waiting(self, window: PrefixWindow, *, partial: bool) -> None:
        while len(self._in_work) < self._max_in_work:
            item = window.take(partial=partial)
            if item is None:
                return
            self._start(*item)

    def _start(self, line: Line, request: Prepared) -> None:
        """Submit a request to the engine, or write the error row of one that cannot be served."""
        ids, params = request.prompt_token_ids, request.params
        stop_checkers = StopCheckers(self._tokenizer, ids, params) if params.stop_strings else None
        request_id = str(line.index)
        try:
            guides = self._grammars.guides(params)
            self._engine.add_request(
                request_id,
                ids,
                params,
                cache_salt=request.cache_salt,
                make_stop_checker=stop_checkers,
                make_guide=guides,
            )
        except RequestError as error:
            self._write_error(request.head, line.digest, error)
        else:
            self._in_work[request_id] = _InWork(request.head, line.digest, params, stop_checkers, guides)

    # ------------------------------------------------------------------ rows

    def _write_success(self, output: "RequestOutput") -> None:
        work = self._in_work.pop(output.request_id)
        if output.error is not None:
            self._write_error(work.head, work.line_digest, output.error)
            return
        if work.guides is not None:
            try:
                work.guides.check()
            except RequestError as error:
                self._write_error(work.head, work.line_digest, error)
                return

        def sample_text(sample_index: int, token_ids: list[int]) -> str:
            if work.stop_checkers is not None:
                return work.stop_checkers.text(sample_index, token_ids)
            return self._tokenizer.decode_output(
                output.prompt_token_ids, token_ids, skip_special_tokens=work.params.skip_special_tokens
            )

        row = self._rows.encode_success(work.head, output, sample_text)
        self._sink.write(work.head.index, work.line_digest, row, ok=True)
        self.stats.num_done += 1
        self.stats.ttft.add(output.metrics.ttft_s)
        self.stats.queued.add(output.metrics.queued_s)
        if output.metrics.tpot_s is not None:
            self.stats.tpot.add(output.metrics.tpot_s)

    def _write_error(self, head: RowHead, line_digest: int, error: RequestError) -> None:
        self._sink.write(head.index, line_digest, self._rows.encode_error(head, error), ok=False)
        self.stats.num_done += 1
        self.stats.num_failed += 1
        self.stats.error_codes[error.code] += 1

    def _update_stats(self, start_s: float) -> None:
        stats, engine = self.stats, self._engine
        stats.num_prompt_tokens = engine.stats.num_prompt_tokens
        stats.num_cached_tokens = engine.stats.num_cached_tokens
        stats.num_generated_tokens = engine.stats.num_generated_tokens
        stats.num_preemptions = engine.stats.num_preemptions
        stats.num_recomputed_tokens = engine.stats.num_recomputed_tokens
        stats.num_steps = engine.stats.num_steps
        stats.peak_used_blocks = engine.stats.peak_used_blocks
        stats.num_used_blocks = engine.plan.num_blocks - engine.block_manager.num_free_blocks
        stats.elapsed_s = time.perf_counter() - start_s
