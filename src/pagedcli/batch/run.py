"""The batch run: lines in, requests through the engine, rows out. Reads lines only as the engine needs them.

Used by batch.job; does not use the terminal. An invalid line becomes an error row. With `--reorder prefix` a window of
waiting requests is sorted, so that those with a common prefix hit the prefix cache; the output keeps its order.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from pagedcli.batch.grammar import Grammars, Guides
from pagedcli.batch.lines import InputDigest, InputScan, Line, as_they_come
from pagedcli.batch.prompts import BatchOptions, Prepared, Prompts, Refused
from pagedcli.batch.repeats import Repeats
from pagedcli.batch.requests import RowHead
from pagedcli.batch.rows import Answer, RowWriter
from pagedcli.batch.sinks import Sink
from pagedcli.batch.stats import BatchStats
from pagedcli.batch.tokenizer import StopCheckers, Tokenizer
from pagedcli.core.eviction import sees_queue
from pagedcli.core.limits import Limits
from pagedcli.core.prefixes import WINDOW_ROWS, WINDOW_TOKENS
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcli.core.requests import RequestOutput
    from pagedcli.runner.llm_engine import LLMEngine


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """The garbage collector does not look through what exists already: with torch's modules that takes 0.2 s each time,
    every few seconds of a run."""
    if gc.get_freeze_count():  # somebody has done so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class HasTokens(Protocol):
    """A prompt."""

    @property
    def token_ids(self) -> Items[int] | None: ...


class HasPrompts(Protocol):
    """A request, as far as its order depends on it."""

    @property
    def prompts(self) -> Items[HasTokens]: ...

    @property
    def cache_salt(self) -> str | None: ...


Waiting = TypeVar("Waiting", bound=HasPrompts)


class PrefixWindow(Generic[Waiting]):
    """Requests in the order of their tokens. One window is drained while the next fills: at most two are in memory, and
    a request waits for at most one window."""

    def __init__(self, *, max_rows: int = WINDOW_ROWS, max_tokens: int = WINDOW_TOKENS) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._filling: list[Waiting] = []
        self._num_tokens = 0  # of the window being filled
        self._sorted: list[Waiting] = []  # last one first

    def __len__(self) -> int:
        return len(self._filling) + len(self._sorted)

    @property
    def full(self) -> bool:
        """Whether a request must be taken before another can be added."""
        return len(self._filling) >= self._max_rows or self._num_tokens >= self._max_tokens

    def add(self, request: Waiting) -> None:
        self._filling.append(request)
        self._num_tokens += sum(len(prompt.token_ids or ()) for prompt in request.prompts)

    def take(self, *, partial: bool) -> Waiting | None:
        """The next request; None while a window fills. `partial`: no more input for now, so it need not be full."""
        if not self._sorted and self._filling and (self.full or partial):
            self._sorted, self._filling, self._num_tokens = self._filling, [], 0
            self._sorted.sort(key=_prefix_order, reverse=True)
        return self._sorted.pop() if self._sorted else None


def _prefix_order(request: HasPrompts) -> tuple[str, Items[int]]:
    """Only requests of one salt share blocks; of several prompts the first one counts."""
    return request.cache_salt or "", request.prompts[0].token_ids or ()


# prompt tokens in work where decisions look at the queue: so many times the pool, and at most; about 65 bytes each
READ_AHEAD_POOLS, MOST_READ_AHEAD = 8, 2**22
LEAST_TOKENS = 128  # a prompt counts as at least so many: its other objects take as much memory
_IDLE_WAIT_S = 0.1  # how soon an idle run notices Ctrl-C
Outcome = Literal["complete", "interrupted", "too_many_errors"]


@dataclass(slots=True)
class BatchResult:
    """How a run ended."""

    outcome: Outcome
    stats: BatchStats
    ignored: dict[str, int] = field(default_factory=dict)  # field name -> number of lines where it had no effect


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The state of a prompt while the engine works on it."""

    row: "_Row"
    num_tokens: int  # of the prompt, at least LEAST_TOKENS
    params: SamplingParams
    is_chat: bool
    stop_checkers: StopCheckers | None
    guides: Guides | None


@dataclass(frozen=True, slots=True)
class _Row:
    """The state of a line while the engine works on its prompts."""

    request: Prepared
    number: int  # rows that were started before
    request_ids: list[str]  # of its prompts
    answers: dict[str, Answer] = field(default_factory=dict)  # by request id

    @property
    def head(self) -> RowHead:
        return self.request.head

    @property
    def line(self) -> Line:
        return self.request.line


def read_ahead(limits: Limits) -> int:
    """Prompt tokens in work, unless the user says otherwise: next-use needs to know several pools of them, and
    checkpoints are made where prompts that are known branch."""
    looks = sees_queue(limits.eviction) or (limits.has_states and limits.checkpoints == "branches")
    if limits.num_blocks is None or not looks:
        return 0
    return min(READ_AHEAD_POOLS * limits.num_blocks * limits.block_size, MOST_READ_AHEAD)


class BatchRun:
    """One pass over an input.

    `live`: lines may arrive slowly, and available ones are served meanwhile. `num_rows`: of the output, if known.
    `read`: the rows of the input up to the limit, if they have been read before. `repeats`: to compute equal rows once.
    `observe` is called with the counters after each step, `observe_row` with each good row, `observe_computed` with how
    many rows were started before and each good row that is not a copy. `stop_requested` is called before each step, and
    True ends the run once the rows so far are written.
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
        read: InputScan | None = None,
        repeats: Repeats | None = None,
        observe: Callable[[BatchStats], None] | None = None,
        observe_row: Callable[[Line, list[Answer]], None] | None = None,
        observe_computed: Callable[[int, Prepared, list[Answer]], None] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._sink = sink
        self._rows = rows
        self._options = options
        self._observe = observe
        self._observe_row = observe_row
        self._observe_computed = observe_computed
        self._stop_requested = stop_requested
        self._grammars = Grammars(tokenizer, end_token_ids=engine.spec.eos_token_ids, vocab_size=engine.spec.vocab_size)
        if live:
            lines = as_they_come(lines, lambda: 0.0 if engine.has_unfinished_requests() else _IDLE_WAIT_S)
        self._read = read
        self._digest = InputDigest()  # as long as the rows have not been read before
        self._prompts = Prompts(
            lines,
            tokenizer,
            options,
            engine.limits,
            holds=sink.holds,
            observe=self._digest.add if read is None else lambda line: None,
        )
        self._coming = iter(self._prompts)
        self._in_work: dict[str, _Prompt] = {}  # by request id
        # one engine step may finish every running request: keep as many again tokenized and ready
        self._max_in_work = engine.limits.max_in_work
        # unless more is wanted: by eviction next-use and by checkpoints where prompts branch
        self._max_tokens_in_work = read_ahead(engine.limits) if options.read_ahead is None else options.read_ahead
        self._num_tokens_in_work = 0
        self._window: PrefixWindow[Prepared] | None = PrefixWindow() if options.reorder == "prefix" else None
        self._repeats = repeats
        self._num_started = 0  # rows
        self._exhausted = False  # whether the input has ended
        self.stats = BatchStats(num_rows=num_rows, facts=engine.stats)

    def run(self) -> BatchResult:
        """Serve every line. Finishes the sink if the run is complete, and abandons it if the run stops early."""
        start_ns = self._engine.clock_ns()
        try:
            with _old_objects_left_alone():
                outcome = self._serve(start_ns)
        except BaseException:  # a full disk, a changed input, Ctrl-C twice
            self._sink.abandon()
            raise
        if outcome == "complete":
            self._sink.finish(self._read or self._digest.scan())
        else:
            self._sink.abandon()
        self._update_time(start_ns)
        return BatchResult(outcome, self.stats, self._prompts.ignored)

    def _serve(self, start_ns: int) -> Outcome:
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
                self._take_output(output)
            self._update_time(start_ns)
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
                taken = next(self._coming)
            except StopIteration:
                self._exhausted = True
                break
            if taken is None:
                waits = True
                break
            if not isinstance(taken, Line):
                self._take(taken)
            elif self._repeats is not None:  # its row is done already
                self._repeats.leave_out(taken.index)
        if self._window is not None:
            self._start_waiting(self._window, partial=self._exhausted or waits or self._is_held_up)

    @property
    def _is_held_up(self) -> bool:
        """Whether too many rows wait for others to be done."""
        return self._sink.full or (self._repeats is not None and self._repeats.full)

    def _has_room(self) -> bool:
        if self._is_held_up:
            return False
        return self._engine_has_room() if self._window is None else not self._window.full

    def _engine_has_room(self) -> bool:
        return len(self._in_work) < self._max_in_work or self._num_tokens_in_work < self._max_tokens_in_work

    def _take(self, taken: Prepared | Refused) -> None:
        """Queue the request of a line, or write its row if its error or an equal row's answers are known."""
        if isinstance(taken, Refused):
            if self._repeats is not None:
                self._repeats.leave_out(taken.line.index)
            self._write_error(taken.head, taken.line.digest, taken.error)
            return
        found = False if self._repeats is None else self._repeats.take(taken)
        if not isinstance(found, bool):
            self._write_copy(taken.head, taken.line, found)
        elif found:
            pass  # another row that is being computed has its answers
        elif self._window is not None:
            self._window.add(taken)
        else:
            self._start(taken)

    def _start_waiting(self, window: PrefixWindow[Prepared], *, partial: bool) -> None:
        while self._engine_has_room():
            request = window.take(partial=partial)
            if request is None:
                return
            self._start(request)

    def _start(self, request: Prepared) -> None:
        """Submit the prompts of a line to the engine, or write its error row if one of them cannot be served."""
        num_prompts = len(request.prompts)
        name = self._options.cache_namespace or str(request.line.index)
        row = _Row(request, self._num_started, [name, *(f"{name}/{place}" for place in range(1, num_prompts))])
        self._num_started += 1
        for request_id, prompt in zip(row.request_ids, request.prompts, strict=True):
            ids, params = prompt.token_ids, prompt.params
            stop_checkers = StopCheckers(self._tokenizer, ids, params) if params.stop_strings else None
            try:
                guides = self._grammars.guides(params)
                self._engine.add_request(
                    request_id,
                    ids,
                    params,
                    row_id=None if request.head.id is None else str(request.head.id),
                    cache_salt=request.cache_salt,
                    make_stop_checker=stop_checkers,
                    make_guide=guides,
                )
            except RequestError as error:
                which = f"prompt {row.request_ids.index(request_id) + 1} of {num_prompts}: " if num_prompts > 1 else ""
                self._fail(row, RequestError(error.code, which + error.message))
                return
            num_tokens = max(LEAST_TOKENS, len(ids))
            self._in_work[request_id] = _Prompt(row, num_tokens, params, prompt.is_chat, stop_checkers, guides)
            self._num_tokens_in_work += num_tokens

    def _finish(self, request_id: str) -> _Prompt | None:
        """The prompt of a request, which is no longer in work. None: it was not."""
        prompt = self._in_work.pop(request_id, None)
        if prompt is not None:
            self._num_tokens_in_work -= prompt.num_tokens
        return prompt

    # ------------------------------------------------------------------ rows

    def _take_output(self, output: "RequestOutput") -> None:
        """Keep the output of a prompt, and write the row of its line once it has all of them."""
        prompt = self._finish(output.request_id)
        if prompt is None:
            return  # another prompt of its line has failed in this step
        row = prompt.row
        try:
            if output.error is not None:
                raise output.error
            if prompt.guides is not None:
                prompt.guides.check()
        except RequestError as error:
            self._fail(row, error)
            return
        has_stops = bool(prompt.params.stop_strings or prompt.params.stop_token_ids)
        # a grammar has no marks, and special tokens in the text are wanted as they are
        has_marks = prompt.is_chat and prompt.guides is None and prompt.params.skip_special_tokens
        row.answers[output.request_id] = Answer(output, self._texts(prompt, output), has_stops, has_marks)
        if len(row.answers) == len(row.request_ids):
            self._write_success(row)

    def _texts(self, prompt: _Prompt, output: "RequestOutput") -> list[str]:
        if prompt.stop_checkers is not None:
            return [prompt.stop_checkers.text(sample.index, sample.token_ids) for sample in output.samples]
        skip = prompt.params.skip_special_tokens
        return [
            self._tokenizer.decode_output(output.prompt_token_ids, sample.token_ids, skip_special_tokens=skip)
            for sample in output.samples
        ]

    def _write_success(self, row: _Row) -> None:
        answers = [row.answers[request_id] for request_id in row.request_ids]
        content = self._rows.encode_success(row.head, answers)
        self._sink.write(row.head.index, row.line.digest, content, ok=True)
        if self._observe_row is not None:
            self._observe_row(row.line, answers)
        if self._observe_computed is not None:
            self._observe_computed(row.number, row.request, answers)
        self.stats.num_done += 1
        for answer in answers:
            metrics = answer.output.metrics
            self.stats.num_row_tokens += sum(len(sample.token_ids) for sample in answer.output.samples)
            self.stats.num_stopped += sum(sample.finish_reason == "stop" for sample in answer.output.samples)
            self.stats.ttft.add(metrics.ttft_s)
            self.stats.queued.add(metrics.queued_s)
            if metrics.tpot_s is not None:
                self.stats.tpot.add(metrics.tpot_s)
        self._write_copies(row.line.index, answers)

    def _write_copies(self, index: int, outcome: list[Answer] | RequestError) -> None:
        """Write the rows that have waited for the answers of this one."""
        if self._repeats is not None:
            for head, line in self._repeats.finish(index, outcome):
                self._write_copy(head, line, outcome)

    def _write_copy(self, head: RowHead, line: Line, outcome: list[Answer] | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self._write_error(head, line.digest, outcome)
            return
        self._sink.write(head.index, line.digest, self._rows.encode_success(head, outcome), ok=True)
        if self._observe_row is not None:
            self._observe_row(line, outcome)
        self.stats.num_done += 1
        self.stats.num_copied += 1
        self.stats.num_copied_tokens += sum(len(each.token_ids) for answer in outcome for each in answer.output.samples)

    def _fail(self, row: _Row, error: RequestError) -> None:
        """Write the error row of a line, and drop its other prompts."""
        for request_id in row.request_ids:
            if self._finish(request_id) is not None:
                self._engine.abort(request_id)
        self._write_error(row.head, row.line.digest, error)
        self._write_copies(row.line.index, error)

    def _write_error(self, head: RowHead, line_digest: int, error: RequestError) -> None:
        self._sink.write(head.index, line_digest, self._rows.encode_error(head, error), ok=False)
        self.stats.num_done += 1
        self.stats.num_failed += 1
        self.stats.error_codes[error.code] += 1

    def _update_time(self, start_ns: int) -> None:
        self.stats.elapsed_s = (self._engine.clock_ns() - start_ns) * 1e-9
