"""The batch run: lines in, requests through the engine, rows out. Reads lines only as the engine needs them.

Used by batch.job; does not use the terminal. An invalid line becomes an error row. With `--reorder prefix` a window of
waiting requests is sorted, so that those with a common prefix hit the prefix cache; the output keeps its order.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import Generic, Literal, TypeVar

from pagedcli import runner
from pagedcli.batch.grammar import Grammars
from pagedcli.batch.lines import InputDigest, InputScan, Line, LineSource, as_they_come
from pagedcli.batch.prompts import BatchOptions, Prompts
from pagedcli.batch.repeats import KnownRows, request_key
from pagedcli.batch.requests import BatchRow, RowPrompt
from pagedcli.batch.rows import RowWriter, WrittenRow
from pagedcli.batch.sinks import Sink
from pagedcli.batch.stats import BatchStats
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.core.eviction import sees_queue
from pagedcli.core.limits import Limits
from pagedcli.core.prefixes import WINDOW_ROWS, WINDOW_TOKENS
from pagedcli.core.requests import FinishedRequest
from pagedcli.errors import RequestError
from pagedcli.process import old_objects_left_alone

Waiting = TypeVar("Waiting")


class PrefixWindow(Generic[Waiting]):
    """Requests in the order of their tokens. One window is drained while the next fills: at most two are in memory, and
    a request waits for at most one window."""

    def __init__(self, *, max_rows: int = WINDOW_ROWS, max_tokens: int = WINDOW_TOKENS) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._filling: list[tuple[tuple[str, bool, Items[int] | None], Waiting]] = []
        self._num_tokens = 0  # tokens in the window being filled
        self._sorted: list[Waiting] = []  # last one first

    def __len__(self) -> int:
        return len(self._filling) + len(self._sorted)

    @property
    def full(self) -> bool:
        """Whether a request must be taken before another can be added."""
        return len(self._filling) >= self._max_rows or self._num_tokens >= self._max_tokens

    def add(self, request: Waiting, prompts: Items[Items[int] | None], cache_salt: str | None) -> None:
        """Add a request with the tokens of its prompts, None where they are not known. Only requests of one salt share
        blocks; of several prompts the first one counts."""
        first = prompts[0] or None  # empty prompts come first: sequences of different types have no order
        self._filling.append(((cache_salt or "", first is not None, first), request))
        self._num_tokens += sum(len(token_ids or ()) for token_ids in prompts)

    def take(self, *, partial: bool) -> Waiting | None:
        """The next request; None while a window fills. `partial`: no more input for now, so it need not be full."""
        if not self._sorted and self._filling and (self.full or partial):
            self._filling.sort(key=itemgetter(0), reverse=True)
            self._sorted = [request for _, request in self._filling]
            self._filling, self._num_tokens = [], 0
        return self._sorted.pop() if self._sorted else None


# prompt tokens in work where decisions look at the queue: a multiple of the pool, and the most; about 65 bytes each
READ_AHEAD_POOLS, MOST_READ_AHEAD = 8, 2**22
LEAST_TOKENS = 128  # tokens; a shorter prompt counts as this many: its other objects take as much memory
_MOST_WAITING = 10_000  # rows in memory that wait for the answers of an equal one
_IDLE_WAIT_S = 0.1  # how soon an idle run notices Ctrl-C
Outcome = Literal["complete", "interrupted", "too_many_errors", "out_of_time"]


@dataclass(slots=True)
class BatchResult:
    """How a run ended."""

    outcome: Outcome
    stats: BatchStats
    ignored: dict[str, int] = field(default_factory=dict)  # field name -> number of lines where it had no effect
    first_ignored: dict[str, int] = field(default_factory=dict)  # field name -> number of the first one; may lack it


def read_ahead(limits: Limits, given: int | None) -> int:
    """Prompt tokens in work, unless the user says otherwise: next-use needs to know several pools of them, and
    snapshots are made where prompts that are known branch."""
    if given is not None:
        return given
    looks = sees_queue(limits.eviction) or (limits.has_states and limits.checkpoints == "branches")
    if limits.num_blocks is None or not looks:
        return 0
    return min(READ_AHEAD_POOLS * limits.num_blocks * limits.block_size, MOST_READ_AHEAD)


class InWork:
    """The prompts that an engine has, and whether it should get more. One step may finish every running request: as
    many again are kept ready, and more where `read_ahead` wants more tokens."""

    def __init__(self, limits: Limits, given: int | None) -> None:
        """`given`: prompt tokens that the user wants in work; None: see read_ahead."""
        self._max_requests = limits.max_in_work
        self._max_tokens = read_ahead(limits, given)
        self._num_requests = self._num_tokens = 0

    @property
    def has_room(self) -> bool:
        return self._num_requests < self._max_requests or self._num_tokens < self._max_tokens

    def count(self, num_prompt_tokens: int, change: int = 1) -> None:
        """A prompt has come, or with -1 as `change` gone."""
        self._num_requests += change
        self._num_tokens += change * max(LEAST_TOKENS, num_prompt_tokens)


class BatchRun:
    """One pass over an input.

    Lines of a live source may arrive slowly, and available ones are served meanwhile. `num_rows`: of the output, if
    known. `read`: the rows of the input up to the limit, if they have been read before. `known`: rows whose equals
    need not be computed.
    `observe` is called with the counters after each step, `observe_row` with each row that was computed and its
    answers. `stop_requested` is called before each step, and True ends the run once the rows so far are written.
    `start_ns`: when the command began, on the engine's clock; None: now.
    """

    def __init__(
        self,
        engine: "runner.LLMEngine",
        tokenizer: Tokenizer,
        lines: Iterable[Line | None],
        sink: Sink,
        rows: RowWriter,
        options: BatchOptions,
        *,
        num_rows: int | None = None,
        read: InputScan | None = None,
        known: KnownRows | None = None,
        observe: Callable[[BatchStats], None] | None = None,
        observe_row: Callable[[BatchRow, list[RowPrompt]], None] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        start_ns: int | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sink = sink
        self._rows = rows
        self._options = options
        self._observe = observe
        self._observe_row = observe_row
        self._stop_requested = stop_requested
        self._grammars = Grammars(tokenizer, end_token_ids=engine.spec.eos_token_ids, vocab_size=engine.spec.vocab_size)
        if isinstance(lines, LineSource) and lines.is_live:
            lines = as_they_come(lines, lambda: 0.0 if engine.has_unfinished_requests() else _IDLE_WAIT_S)
        self._read = read
        self._digest = InputDigest()  # used only if the rows have not been read before
        self._prompts = Prompts(
            lines,
            tokenizer,
            options,
            engine.limits,
            holds=sink.holds,
            observe=self._digest.add if read is None else lambda line: None,
        )
        self._coming = iter(self._prompts)
        self._in_work: dict[str, tuple[BatchRow, RowPrompt]] = {}  # request id -> row and prompt
        self._work = InWork(engine.limits, options.run.read_ahead)
        self._window: PrefixWindow[BatchRow] | None = PrefixWindow() if options.run.reorder == "prefix" else None
        self._known = known
        self._same: dict[bytes, list[BatchRow]] = {}  # key of a row in work -> rows that wait for its answers
        self._num_waiting = 0  # of these
        self._num_started = 0  # rows
        self._exhausted = False  # whether the input has ended, and no row of it was taken back
        most_s, start_ns = options.run.max_time, engine.clock_ns() if start_ns is None else start_ns
        self._end_ns = inf if most_s is None else start_ns + most_s * 1e9
        self.stats = BatchStats(num_rows=num_rows, facts=engine.stats, ended=rows.ended)

    def run(self) -> BatchResult:
        """Serve every line. Finishes the sink if the run is complete, and abandons it if the run stops early."""
        start_ns = self._engine.clock_ns()
        try:
            with old_objects_left_alone():
                outcome = self._serve(start_ns)
        except BaseException:  # a full disk, a changed input, Ctrl-C twice
            self._sink.abandon()
            raise
        if outcome == "complete":
            self._sink.finish(self._read or self._digest.scan())
        else:
            self._sink.abandon()
        self._update_time(start_ns)
        return BatchResult(outcome, self.stats, self._prompts.ignored, self._prompts.first_ignored)

    def _serve(self, start_ns: int) -> Outcome:
        engine, max_errors = self._engine, self._options.run.max_errors
        if (journal := self._sink.journal) is not None:
            self.stats.num_resumed, self.stats.num_resumed_failed = journal.num_rows, journal.num_failed_rows
            self.stats.name_failed(journal.failures)
            self.stats.ended.reasons.update(journal.reasons)
            if not self._options.config.sampling.ignore_eos:
                self.stats.ended.cut_at[None] += journal.reasons["length"]
        while not self._stop_requested():
            is_late = engine.clock_ns() >= self._end_ns
            if is_late:
                self._take_back()
            else:
                self._pull()
            self._sink.flush()  # rows of the last step are written before the next one ends
            if max_errors is not None and self.stats.num_failed >= max_errors:
                return "too_many_errors"
            if not engine.has_unfinished_requests():
                if self._exhausted and not self._window:
                    return "complete"
                if is_late:
                    return "complete" if self.stats.num_finished == self.stats.num_rows else "out_of_time"
                continue
            for output in engine.step():
                self._take_output(output)
            self._update_time(start_ns)
            if self._observe is not None:
                self._observe(self.stats)
        return "interrupted"

    # ------------------------------------------------------------------ lines to requests

    def _pull(self) -> None:
        """Read lines while there is room, and submit requests while the engine has room."""
        max_errors, waits = self._options.run.max_errors, False
        # at most this many: a sequence of invalid lines must not delay the engine or Ctrl-C
        for _ in range(self._engine.limits.max_in_work):
            if (
                self._exhausted
                or not self._has_room()
                or (max_errors is not None and self.stats.num_failed >= max_errors)
            ):
                break
            try:
                row = next(self._coming)
            except StopIteration:
                self._exhausted = True
                break
            if row is None:
                waits = True
                break
            self._take(row)
        if self._window is not None:
            self._start_waiting(self._window, partial=self._exhausted or waits or self._is_held_up)

    def _take_back(self) -> None:
        """Take back the rows of which nothing has been computed."""
        rows = [row for row, _ in self._in_work.values()]
        begun = {row.line.index for row in rows if any(each.output is not None for each in row.prompts)}
        begun |= {row.line.index for name, (row, _) in self._in_work.items() if self._engine.has_begun(name)}
        for name in [name for name, (row, _) in self._in_work.items() if row.line.index not in begun]:
            self._finish(name)
            self._engine.abort(name)
            self._exhausted = False

    @property
    def _is_held_up(self) -> bool:
        """Whether too many rows wait for others to be done."""
        return self._sink.full or self._num_waiting >= _MOST_WAITING

    def _has_room(self) -> bool:
        if self._is_held_up:
            return False
        return self._work.has_room if self._window is None else not self._window.full

    def _take(self, row: BatchRow) -> None:
        """Queue the request of a row, or write the row if its error or an equal one's answers are known."""
        if not row.prompts:
            if row.error is not None:
                self._write_error(row, row.error)
            return
        made_here = [each.token_ids for each in row.prompts if each.text is not None or each.scored is not None]
        self.stats.num_double_bos += sum(map(self._tokenizer.has_two_bos, made_here))
        row.key = request_key(row)
        if self._known is not None and (found := self._known.find(row.key)) is not None:
            self._write_known(row, *found)
            return
        if row.key in self._same:
            self._same[row.key].append(row)
            self._num_waiting += 1
            return
        if self._known is not None and self._known.keeps_own:
            self._same[row.key] = []
        if self._window is not None:
            self._window.add(row, [prompt.token_ids for prompt in row.prompts], row.cache_salt)
        else:
            self._start(row)

    def _start_waiting(self, window: PrefixWindow[BatchRow], *, partial: bool) -> None:
        while self._work.has_room:
            row = window.take(partial=partial)
            if row is None:
                return
            self._start(row)

    def _request_id(self, row: BatchRow, place: int) -> str:
        name = self._options.cache_namespace or str(row.line.index)
        return f"{name}/{place}" if place else name

    def _start(self, row: BatchRow) -> None:
        """Submit the prompts of a row to the engine, or write its error row if one of them cannot be served."""
        row.number, self._num_started = self._num_started, self._num_started + 1
        for place, prompt in enumerate(row.prompts):
            request_id, ids, params = self._request_id(row, place), prompt.token_ids, prompt.params
            prompt.stop_checkers = StopCheckers(self._tokenizer, ids, params) if params.stop_strings else None
            try:
                prompt.guides = self._grammars.guides(params)
                self._engine.add_request(
                    request_id,
                    ids,
                    params,
                    row_id=None if row.id is None else str(row.id),
                    cache_salt=row.cache_salt,
                    make_stop_checker=prompt.stop_checkers,
                    make_guide=prompt.guides,
                    continuations=None if prompt.scored is None else prompt.scored.continuations,
                    pooling=None if prompt.embedding is None else prompt.embedding.pooling,
                    is_private=self._options.cache_namespace is not None,
                )
            except RequestError as error:
                which = f"prompt {place + 1} of {len(row.prompts)}: " if len(row.prompts) > 1 else ""
                self._fail(row, RequestError(error.code, which + error.message))
                return
            self._in_work[request_id] = row, prompt
            self._work.count(len(ids))

    def _finish(self, request_id: str) -> tuple[BatchRow, RowPrompt] | None:
        """The row and the prompt of a request, which is no longer in work. None: it was not."""
        found = self._in_work.pop(request_id, None)
        if found is not None:
            self._work.count(len(found[1].token_ids), -1)
        return found

    # ------------------------------------------------------------------ rows

    def _take_output(self, output: FinishedRequest) -> None:
        """Keep the output of a prompt, and write its row once all prompts have one."""
        found = self._finish(output.request_id)
        if found is None:
            return  # another prompt of its row has failed in this step
        row, prompt = found
        try:
            if output.error is not None:
                raise output.error
            if prompt.guides is not None:
                prompt.guides.check()
        except RequestError as error:
            self._fail(row, error)
            return
        prompt.output, prompt.texts = output, self._texts(prompt, output)
        if all(each.output is not None for each in row.prompts):
            self._write_success(row)
            for each in row.prompts:
                self.stats.add_times(each.result)

    def _texts(self, prompt: RowPrompt, output: FinishedRequest) -> list[str]:
        if prompt.stop_checkers is not None:
            return [prompt.stop_checkers.text(sample.index, sample.token_ids) for sample in output.samples]
        skip = prompt.params.skip_special_tokens
        return [
            self._tokenizer.decode_output(output.prompt_token_ids, sample.token_ids, skip_special_tokens=skip)
            for sample in output.samples
        ]

    def _write_success(self, row: BatchRow) -> None:
        encoded = self._rows.encode_success(row, row.prompts)
        self._sink.write(row.line.index, row.line.digest, encoded, key=row.key)
        if self._observe_row is not None:
            self._observe_row(row, row.prompts)
        self.stats.num_done += 1
        self.stats.num_row_tokens += sum(
            len(each.token_ids) for prompt in row.prompts for each in prompt.result.samples
        )
        if self._known is not None and self._known.keeps_own:
            self._known.add(row.key, encoded)
        for each in self._waiting_for(row):
            self._write_known(each, encoded, is_own=True)

    def _waiting_for(self, row: BatchRow) -> list[BatchRow]:
        """The rows that have waited for this one."""
        waiting = self._same.pop(row.key, [])
        self._num_waiting -= len(waiting)
        return waiting

    def _write_known(self, row: BatchRow, known: bytes, is_own: bool) -> None:
        """Write a row with the answers of an equal one, of this run or of an earlier one."""
        self._sink.write(row.line.index, row.line.digest, self._rows.encode_known(row, known), key=row.key)
        self.stats.num_done += 1
        self.stats.num_reused += not is_own
        self.stats.num_deduplicated += is_own
        if is_own and (usage := WrittenRow.of(known, self._options.columns.answer).usage) is not None:
            self.stats.num_deduplicated_tokens += usage["completion_tokens"]

    def _fail(self, row: BatchRow, error: RequestError) -> None:
        """Write the error row of a line, and drop its other prompts."""
        for place in range(len(row.prompts)):
            request_id = self._request_id(row, place)
            if self._finish(request_id) is not None:
                self._engine.abort(request_id)
        for each in (row, *self._waiting_for(row)):
            self._write_error(each, error)

    def _write_error(self, row: BatchRow, error: RequestError) -> None:
        self._sink.write(row.line.index, row.line.digest, self._rows.encode_error(row, error), key=None)
        self.stats.fail(row.line.number, error)

    def _update_time(self, start_ns: int) -> None:
        self.stats.elapsed_s = (self._engine.clock_ns() - start_ns) * 1e-9
