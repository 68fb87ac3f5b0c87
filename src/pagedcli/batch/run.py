"""The batch run: lines in, requests through the engine, rows out. Pulls lines only as the engine needs them.

Used by cli.generate; knows no terminal. Whatever is wrong with a line becomes its row.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from pagedcli.batch.chat import with_system_prompt
from pagedcli.batch.detokenizer import StopCheckers
from pagedcli.batch.lines import Line
from pagedcli.batch.requests import BatchRequest, RequestParser, RowHead, check_head, decode_line, read_head
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.sinks import Sink
from pagedcli.batch.stats import BatchStats, SeenIds
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.engine.outputs import RequestOutput

Outcome = Literal["complete", "interrupted", "too_many_errors"]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a run treats its lines."""

    defaults: SamplingParams
    max_tokens_given: bool = False  # by a flag: then it is not lowered to what fits
    seed: int = 0  # of requests that bring none
    system_prompt: str | None = None  # makes plain text prompts chats, too
    strict: bool = False  # unknown fields are errors
    limit: int | None = None  # rows of the input
    max_errors: int | None = None  # stop at this many error rows
    shard: tuple[int, int] = (0, 1)  # (i, n): of the input rows only those whose index % n is i


@dataclass(slots=True)
class BatchResult:
    """How a run ended."""

    outcome: Outcome
    stats: BatchStats
    ignored: dict[str, int] = field(default_factory=dict)  # field name -> lines where it had no effect


@dataclass(frozen=True, slots=True)
class _InWork:
    """What is kept of a line while the engine works on it."""

    head: RowHead
    line_digest: int
    params: SamplingParams
    stop_checkers: StopCheckers | None


class BatchRun:
    """One pass over an input.

    `num_rows` is how many rows the output will have, if known. `observe` is called after each step with the counters;
    `stop_requested` is asked before each step, and True ends the run after the rows so far are written.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        tokenizer: Tokenizer,
        lines: Iterable[Line],
        sink: Sink,
        rows: RowWriter,
        options: BatchOptions,
        *,
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
        self._parser = RequestParser(options.defaults, strict=options.strict)
        self._lines = self._wanted(lines)
        self._seen_ids = SeenIds()
        self._in_work: dict[str, _InWork] = {}
        # one engine step may end every running request: as many again are ready, tokenized, behind them
        self._max_in_work = 2 * engine.plan.max_num_seqs
        self.stats = BatchStats(num_rows=num_rows, num_blocks=engine.plan.num_blocks)

    def run(self) -> BatchResult:
        """Serve every line. The sink is finished if the run is complete, and abandoned if it stops early."""
        start_s = time.perf_counter()
        outcome = self._serve(start_s)
        if outcome == "complete":
            self._sink.finish()
        else:
            self._sink.abandon()
        self._update_stats(start_s)
        return BatchResult(outcome, self.stats, dict(self._parser.ignored))

    def _serve(self, start_s: float) -> Outcome:
        engine, options = self._engine, self._options
        self.stats.num_resumed = self._sink.resumed_rows
        self.stats.num_resumed_failed = self._sink.resumed_failed_rows
        exhausted = False
        while not self._stop_requested():
            exhausted = exhausted or not self._pull()
            self._sink.flush()  # also what the last step finished: on its way to the disk before the next one ends
            if options.max_errors is not None and self._num_failed >= options.max_errors:
                return "too_many_errors"
            if not engine.has_unfinished_requests():
                if exhausted:
                    return "complete"
                continue
            for output in engine.step():
                self._write_success(output)
            self._update_stats(start_s)
            if self._observe is not None:
                self._observe(self.stats)
        return "interrupted"

    @property
    def _num_failed(self) -> int:
        return self.stats.num_failed + self.stats.num_resumed_failed

    # ------------------------------------------------------------------ lines to requests

    def _wanted(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines of this shard, up to the limit."""
        place, num_shards = self._options.shard
        for line in lines:
            if self._options.limit is not None and line.index >= self._options.limit:
                return
            if line.index % num_shards == place:
                yield line

    def _pull(self) -> bool:
        """Give the engine what it has room for. Returns False when the input has ended."""
        max_errors = self._options.max_errors
        num_pulled = 0
        while len(self._in_work) < self._max_in_work and not self._sink.full:
            if num_pulled >= self._max_in_work:  # a run of bad lines must not keep the engine and Ctrl-C waiting
                return True
            line = next(self._lines, None)
            if line is None:
                return False
            self._take(line)
            num_pulled += 1
            if max_errors is not None and self._num_failed >= max_errors:
                return True
        return True

    def _take(self, line: Line) -> None:
        """Start the request of a line, or write its error row, unless the journal has its row already."""
        done = self._sink.holds(line.index, line.digest)
        head = RowHead(line.index, line.number)
        try:
            document = decode_line(line.content)
            head = read_head(document, line.index, line.number)
            if head.id is not None and not self._seen_ids.add(head.id):
                raise RequestError("duplicate_id", f"an earlier line has the same id {head.id!r}")
            if done:
                return
            check_head(document, head)
            self._start(line, head, self._parser.parse(document, head))
        except RequestError as error:
            if not done:
                self._write_error(line, head, error)

    def _start(self, line: Line, head: RowHead, request: BatchRequest) -> None:
        prompt_token_ids = self._encode(request)
        params = self._final_params(request, len(prompt_token_ids), line.index)
        stop_checkers = StopCheckers(self._tokenizer, prompt_token_ids, params) if params.stop_strings else None
        request_id = str(line.index)
        self._engine.add_request(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=request.cache_salt,
            make_stop_checker=stop_checkers,
        )
        self._in_work[request_id] = _InWork(head, line.digest, params, stop_checkers)

    def _encode(self, request: BatchRequest) -> list[int]:
        system_prompt = self._options.system_prompt
        messages = request.messages
        if messages is None and system_prompt is not None and isinstance(request.prompt, str):
            messages = [{"role": "user", "content": request.prompt}]
        if messages is not None:
            return self._tokenizer.encode_chat(
                with_system_prompt(messages, system_prompt), request.chat_template_kwargs
            )
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt)
        assert request.prompt is not None, "a request has a prompt or messages"
        return request.prompt

    def _final_params(self, request: BatchRequest, num_prompt: int, index: int) -> SamplingParams:
        """The request's parameters with a seed of its own, and the default max_tokens lowered to what fits."""
        params, plan = request.params, self._engine.plan
        changes: dict[str, int] = {}
        if params.seed is None:
            # from the row's index, so that a resumed run draws the same
            changes["seed"] = xxhash.xxh64_intdigest(f"{self._options.seed}:{index}".encode()) >> 1
        if params.max_tokens is not None and not (request.max_tokens_given or self._options.max_tokens_given):
            # the last generated token is never written to the cache
            room = min(plan.max_model_len - num_prompt, plan.num_slots - num_prompt + 1)
            if params.min_tokens <= room < params.max_tokens:
                changes["max_tokens"] = max(room, 1)
        return msgspec.structs.replace(params, **changes) if changes else params

    # ------------------------------------------------------------------ rows

    def _write_success(self, output: "RequestOutput") -> None:
        work = self._in_work.pop(output.request_id)

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
        if output.metrics.tpot_s is not None:
            self.stats.tpot.add(output.metrics.tpot_s)

    def _write_error(self, line: Line, head: RowHead, error: RequestError) -> None:
        self._sink.write(line.index, line.digest, self._rows.encode_error(head, error), ok=False)
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
