"""One batch run from the command line: files, engine, signals and exit code. Shared by the commands that generate."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from pagedcli.batch.fingerprint import run_fingerprint, run_key
from pagedcli.batch.intake import BatchOptions
from pagedcli.batch.lines import InputScan, LineSource
from pagedcli.batch.parquet import ParquetRows, ParquetSource, is_parquet, require_pyarrow
from pagedcli.batch.rows import RowWriter
from pagedcli.batch.run import BatchResult, BatchRun
from pagedcli.batch.sinks import (
    FileSink,
    Sink,
    StreamSink,
    check_output,
    is_complete,
    is_csv,
    is_stream,
    open_file_sink,
)
from pagedcli.batch.sources import open_source
from pagedcli.batch.stats import BatchStats
from pagedcli.cli.metrics import MetricsFile
from pagedcli.cli.progress import progress_view
from pagedcli.cli.summary import resume_command, say_model, say_plan, say_summary, write_summary
from pagedcli.cli.terminal import TerminalJson, say
from pagedcli.config import LoadedConfig
from pagedcli.errors import UsageError
from pagedcli.events import Emit

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.engine.llm_engine import LLMEngine

EXIT_OK, EXIT_FATAL, EXIT_ERROR_ROWS, EXIT_INTERRUPTED = 0, 1, 3, 130


@dataclass(frozen=True, slots=True)
class Job:
    """What to run and where the rows go."""

    loaded: LoadedConfig
    input_name: str  # a path, or '-' for stdin
    output: Path | None  # None: stdout
    resume: bool = False
    overwrite: bool = False
    shard: tuple[int, int] = (0, 1)  # (i, n): the rows whose index % n is i
    metrics: Path | None = None  # counters for Prometheus, while the run goes on
    summary_json: Path | None = None  # what the run's last lines say, for machines

    @property
    def output_is_file(self) -> bool:
        """Whether rows go to a regular file, which is written beside its place and renamed at the end."""
        return self.output is not None and not is_stream(self.output)


def run_job(job: Job, *, emit: Emit | None = None, trace_tokens: bool = False, terminal_is_taken: bool = False) -> int:
    """Run a job to its end. Returns the exit code.

    `emit` gets the engine's events. `terminal_is_taken`: something else is drawn on the terminal, so no progress.
    Raises: PagedcliError for whatever makes the run impossible.
    """
    config = job.loaded.config
    lines = open_source(job.input_name)
    table = _parquet_rows(job, lines)
    if job.output_is_file and job.output is not None:
        if job.resume and is_complete(job.output):
            say(f"{job.output} is complete: nothing to resume")
            return EXIT_OK
        check_output(job.output, resume=job.resume, overwrite=job.overwrite)
        if job.shard[1] > 1 and is_csv(job.output):
            raise UsageError("a shard is written as JSONL, which merge reads", hint="-o shard.jsonl")
    elif job.resume:
        raise UsageError("--resume needs an output file: give one with -o")
    if job.summary_json is not None and not job.summary_json.parent.is_dir():
        raise UsageError(f"there is no folder {job.summary_json.parent} for the summary")
    metrics = MetricsFile(job.metrics) if job.metrics is not None else None
    say_model(config.engine.model)
    scan = lines.scan()
    return _run_on_engine(
        job, lines, scan, table, metrics, emit=emit, trace_tokens=trace_tokens, terminal_is_taken=terminal_is_taken
    )


def _run_on_engine(
    job: Job,
    lines: LineSource,
    scan: InputScan | None,
    table: ParquetRows | None,
    metrics: MetricsFile | None,
    *,
    emit: Emit | None,
    trace_tokens: bool,
    terminal_is_taken: bool,
) -> int:
    config = job.loaded.config
    tokenizer, folder = _load_tokenizer(job)
    fingerprint = run_fingerprint(
        config, folder, tokenizer, scan, shard=f"{job.shard[0] + 1}/{job.shard[1]}", strict=config.run.strict
    )
    sink, created_s = _open_sink(job, fingerprint, table)
    stop = StopRequest(resumable=isinstance(sink, FileSink))
    try:
        engine = _load_engine(job, emit=emit, trace_tokens=trace_tokens)
    except BaseException:
        sink.abandon()
        raise
    rows = RowWriter(
        tokenizer, config.engine.model, run_key(fingerprint), created_s, output_token_ids=config.run.output_token_ids
    )
    quiet = terminal_is_taken or (not job.output_is_file and sys.stdout.isatty())
    with progress_view(quiet_terminal=quiet) as view, stop.listening():

        def observe(stats: BatchStats) -> None:
            view.update(stats)
            if metrics is not None:
                metrics.update(stats)

        run = BatchRun(
            engine,
            tokenizer,
            lines,
            sink,
            rows,
            _options(job),
            live=lines.is_stdin,
            num_rows=_num_rows(job, scan),
            observe=observe,
            stop_requested=lambda: stop.requested,
        )
        try:
            result = run.run()
        except KeyboardInterrupt:
            _say_resumable(job)
            raise
    say_summary(result)
    if metrics is not None:
        metrics.update(result.stats, now=True)
    if job.summary_json is not None:
        write_summary(job.summary_json, result)
    return _exit_code(job, result)


def _exit_code(job: Job, result: BatchResult) -> int:
    if result.outcome != "complete":
        _say_resumable(job)
        return EXIT_INTERRUPTED if result.outcome == "interrupted" else EXIT_FATAL
    stats = result.stats
    if job.output_is_file:
        say(f"rows: {job.output}")
    return EXIT_ERROR_ROWS if stats.num_failed + stats.num_resumed_failed else EXIT_OK


def _say_resumable(job: Job) -> None:
    if job.output_is_file:
        say(f"go on with: {resume_command(sys.argv[1:])}")


def _load_tokenizer(job: Job) -> tuple["Tokenizer", Path]:
    from pagedcli.batch.tokenizer import Tokenizer
    from pagedcli.engine.plan import model_folder

    engine, run = job.loaded.config.engine, job.loaded.config.run
    folder = model_folder(engine)
    return Tokenizer(folder, chat_template=run.chat_template, trust_remote_code=engine.trust_remote_code), folder


def _load_engine(job: Job, *, emit: Emit | None, trace_tokens: bool) -> "LLMEngine":
    from pagedcli.engine.llm_engine import LLMEngine

    config = job.loaded.config.engine
    engine = LLMEngine(config, emit=emit, trace_tokens=trace_tokens)
    say_plan(engine.plan, enable_prefix_caching=config.enable_prefix_caching)
    for note in engine.model.notes:
        say(f"note: {note}")
    return engine


def _parquet_rows(job: Job, lines: LineSource) -> ParquetRows | None:
    """How rows become a Parquet table, if the output is one. Raises: UsageError for what a table cannot be."""
    if job.output is None or not is_parquet(job.output):
        return None
    require_pyarrow()
    run = job.loaded.config.run
    if job.shard[1] > 1:
        raise UsageError("a shard is written as JSONL, which merge reads", hint="-o shard.jsonl")
    if run.order == "completion":
        raise UsageError("a Parquet output is in the order of the input", hint="leave out --order completion")
    carried = lines if isinstance(lines, ParquetSource) else None
    if carried is not None:
        carried.check_answer_columns()
    return ParquetRows(carried, run.output_token_ids)


def _open_sink(job: Job, fingerprint: dict[str, str], table: ParquetRows | None) -> tuple[Sink, int]:
    """Where rows go, and the time the run first started."""
    order = job.loaded.config.run.order
    if job.output is not None and job.output_is_file:
        sink = open_file_sink(
            job.output, fingerprint, resume=job.resume, overwrite=job.overwrite, order=order, table=table
        )
        if sink.resumed_rows:
            say(f"resuming: {sink.resumed_rows:,} rows are done")
        return sink, sink.journal.header.created_s
    if job.output is not None:
        stream: BinaryIO = job.output.open("wb")
    else:
        stream = cast(BinaryIO, TerminalJson(sys.stdout.buffer)) if sys.stdout.isatty() else sys.stdout.buffer
    return StreamSink(stream, order=order, first_index=job.shard[0], step=job.shard[1]), int(time.time())


def _options(job: Job) -> BatchOptions:
    config = job.loaded.config
    return BatchOptions(
        defaults=config.sampling,
        max_tokens_given=job.loaded.sources.get("sampling.max_tokens", "").startswith("--"),
        seed=config.engine.seed,
        system_prompt=config.run.system_prompt,
        strict=config.run.strict,
        limit=config.run.limit,
        max_errors=config.run.max_errors,
        shard=job.shard,
        reorder=config.run.reorder,
    )


def _num_rows(job: Job, scan: InputScan | None) -> int | None:
    if scan is None:
        return None
    num_rows = min(scan.num_rows, job.loaded.config.run.limit or scan.num_rows)
    place, num_shards = job.shard
    return len(range(place, num_rows, num_shards))


class StopRequest:
    """Ctrl-C (or SIGTERM) once: `requested` becomes True. Twice: KeyboardInterrupt, now."""

    def __init__(self, *, resumable: bool) -> None:
        self.requested = False
        self._resumable = resumable

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals meanwhile."""
        if threading.current_thread() is not threading.main_thread():  # only there Python delivers signals
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        kept = "; finished rows are kept" if self._resumable else ""
        say(f"\nstopping after this step{kept} (again: stop now)")


def parse_shard(text: str) -> tuple[int, int]:
    """'2/4' is the second of four: (1, 4). Raises: UsageError."""
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard is {text!r}, but must be i/n with i from 1 to n", hint="for example --shard 1/4")
