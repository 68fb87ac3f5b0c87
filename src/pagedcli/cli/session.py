"""A batch run from the command line: messages, signals and exit code. Shared by `generate` and `trace`."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from pagedcli import answers, runner, views
from pagedcli.answers.served import ServedRequests
from pagedcli.batch.end_time import EndTime
from pagedcli.batch.job import Job, OpenJob
from pagedcli.batch.journal import RunRecord
from pagedcli.batch.rows import WrittenRow
from pagedcli.batch.run import BatchResult
from pagedcli.batch.sinks import FileSink, Sink
from pagedcli.batch.stats import BatchStats
from pagedcli.cli.summary import (
    failed_rows,
    resume_command,
    say_figures,
    say_model,
    say_odd,
    say_plan,
    say_store,
    say_summary,
    write_summary,
)
from pagedcli.cli.urls import send_complete
from pagedcli.errors import EXIT_BAD_ROWS, EXIT_FATAL, UsageError
from pagedcli.events import Emit
from pagedcli.planning.step_time import TimeKey
from pagedcli.printable import plural, printable
from pagedcli.process import EXIT_INTERRUPTED, nothing_to_collect, on_signals
from pagedcli.show.progress import MetricsFile, progress_view
from pagedcli.show.terminal import TerminalJson, say, say_notes, say_wrapped

# the time that trials of other settings may take at the end of a run
CURES_SHARE, LEAST_CURES_S, MOST_CURES_S = 0.1, 1.0, 5.0


def run_job(
    job: Job,
    *,
    emit: Emit | None = None,
    trace_tokens: bool = False,
    terminal_is_taken: bool = False,
    all_figures: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
    findings_of_events: Callable[[], "views.whole_run.Findings | None"] = lambda: None,
    observe_told: Callable[[list[str]], None] = lambda told: None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> int:
    """Run a job to its end, or to the step after `stop_requested` returns True, and return the exit code.

    `emit` receives the engine's events. `terminal_is_taken`: show no progress, the terminal is in use.
    `all_figures`: the summary has more than its first lines. `findings_of_events` returns, once it has ended, what its
    events say about it; None: its counters do. `observe_told` receives all that is said of the run at its end.
    `clock_ns` is the clock of all times.
    Raises: PagedcliError for fatal errors.
    """
    work, start_ns = OpenJob(job), clock_ns()
    metrics = MetricsFile(job.metrics, job.loaded.config.engine.model) if job.metrics is not None else None
    say_model(job.loaded.config.engine.model)
    with nothing_to_collect():
        work.load_tokenizer()  # imports transformers
    if (record := work.finished()) is not None:
        return _say_complete(job, record)
    sink = work.open_sink(_stdout(job))
    say_notes(work.notes)
    if sink.journal is not None and sink.journal.num_rows:
        say(f"resuming: {plural(sink.journal.num_rows, 'row')} done")
    with _load_engine(job, sink, emit=emit, trace_tokens=trace_tokens, clock_ns=clock_ns) as engine:
        quiet_terminal = terminal_is_taken or (job.output_file is None and sys.stdout.isatty())
        key, served = engine.decision.time_key, ServedRequests(engine.plan)
        result = _run(work, engine, sink, metrics, served, stop_requested, start_ns, quiet_terminal=quiet_terminal)
        of_events = findings_of_events()
        findings = views.whole_run.Findings(engine.stats, None if of_events is None else of_events.losses)
        if metrics is not None:
            metrics.update(result.stats, now=True)
        of_store = engine.close_store()
        cures = _cures(work, engine, served, result, key)
        say_summary(result)
        if all_figures:
            say_figures(result.stats, findings)
        say_odd(result, job.loaded.config.run)
        if of_store is not None:
            say_store(of_store, engine.config.prefix_store or "")
        if work.lines.has_grown:
            say(f"note: {job.input_name} has grown since the run began; the new rows were not read")
        for text in [*_explained(work, engine, served, result), *(cure.text for cure in cures[:1])]:
            say_wrapped(text)
        observe_told([*failed_rows(result.stats), *(cure.text for cure in cures)])
        if job.summary_json is not None:
            write_summary(job.summary_json, result, findings, cures)
        send_complete()
        _say_rows(job, sink, result)
        if job.num_verified and result.outcome == "complete" and _rows_differ(work, engine):
            return EXIT_FATAL
        return exit_code(result)


def _say_complete(job: Job, record: RunRecord) -> int:
    """Say that all rows are there. Returns the exit code."""
    failed = f", {record.num_failed_rows:,} failed" if record.num_failed_rows else ""
    job.watch(BatchStats(num_resumed=record.num_rows, num_resumed_failed=record.num_failed_rows))
    say(f"{job.output} is complete ({plural(record.num_rows, 'row')}{failed}): nothing to resume")
    return EXIT_BAD_ROWS if record.num_failed_rows else 0


def _run(
    work: OpenJob,
    engine: "runner.LLMEngine",
    sink: Sink,
    metrics: MetricsFile | None,
    served: ServedRequests,
    stop_requested: Callable[[], bool],
    start_ns: int,
    *,
    quiet_terminal: bool,
) -> BatchResult:
    stop = StopRequest(rows_are_kept=lambda: sink.journal is not None and not sink.journal.is_lost)
    end_time = EndTime(engine)
    with progress_view(quiet_terminal=quiet_terminal, time_left=end_time.left_s) as view, stop.listening():

        def observe(stats: BatchStats) -> None:
            end_time.update(stats)
            view.update(stats)
            if metrics is not None:
                metrics.update(stats)

        run = work.start(
            engine,
            sink,
            observe=observe,
            observe_row=served.add,
            stop_requested=lambda: stop.requested or stop_requested(),
            start_ns=start_ns,
        )
        work.job.watch(run.stats)
        try:
            return run.run()
        except KeyboardInterrupt:
            _say_resumable(sink)
            raise


def _cures(
    work: OpenJob, engine: "runner.LLMEngine", served: ServedRequests, result: BatchResult, key: TimeKey
) -> "list[answers.cures.Cure]":
    """What to change. `key`: of the time of steps, as calibrated here and refined by this run."""
    from pagedcli.cli.cures import find_cures

    run, limits = work.job.loaded.config.run, engine.plan.limits
    subject = served.subject(key, is_reordered=run.reorder == "prefix", read_ahead=run.read_ahead)
    return find_cures(
        subject,
        prompts=None if subject is not None and served.has_all else served.drawn,
        tokenizer=work.tokenizer,
        block_size=limits.block_size,
        budget_s=min(max(LEAST_CURES_S, CURES_SHARE * result.stats.elapsed_s), MOST_CURES_S),
    )


def _explained(work: OpenJob, engine: "runner.LLMEngine", served: ServedRequests, result: BatchResult) -> list[str]:
    """Why a run has computed no row, has taken none over, or was not faster than an earlier one."""
    told = []
    if result.outcome == "out_of_time" and not result.stats.num_done:
        told = ["No row was started: --max-time counts from the start of the command, and loading took all of it."]
    if work.can_reuse and not result.stats.num_reused:
        told.append("No line asks for what a row of the earlier outputs has under the same settings.")
    return told + _not_kept(work, engine, served, result.stats)


def _not_kept(work: OpenJob, engine: "runner.LLMEngine", served: ServedRequests, stats: BatchStats) -> list[str]:
    """Why a run was not faster although an earlier one had the same prompts; with a store, if that would have kept
    enough."""
    from pagedcli.answers.cures import LEAST_TIMED_S, WORTH_SAYING

    plan, num_computed = engine.plan, stats.facts.num_prompt_tokens - stats.facts.num_cached_tokens
    if work.earlier is None or engine.config.prefix_store or stats.elapsed_s < LEAST_TIMED_S:
        return []
    told = f"The run of {work.earlier} had the same prompts, but its KV cache ended with it"
    can_keep = plan.in_one_call and stats.facts.prefix_caching and not plan.limits.has_states
    num_shared, computed = served.num_shared_tokens(plan.limits.block_size), plural(num_computed, "prompt token")
    if not can_keep or num_shared <= WORTH_SAYING * num_computed:
        return [f"{told}."]
    shared = f"what prompts share, up to {num_shared:,} of the {computed} computed here"
    return [f"{told}: --prefix-store DIR keeps {shared}."]


def _rows_differ(work: OpenJob, engine: "runner.LLMEngine") -> bool:
    """Generate some rows again, each alone, and say whether they are the same."""
    num_rows = len(work.sample.rows)
    if not num_rows:
        say("verify: this run has generated no row")
        return False
    differences = work.verify(engine)
    for each in differences:
        where = f"token {each.token}: " if each.token is not None else ""
        say(f"verify: {each.label} differs ({each.kind}): {where}{each.a!r}, alone {each.b!r}")
    if differences:
        say(f"verify: {len(differences):,} of {plural(num_rows, 'row')} differ when generated alone")
        say("hint: docs/reproducibility.md lists where equal bits are promised")
        return True
    say(f"verify: {plural(num_rows, 'row')} generated again, each alone and without cached blocks: the same bits")
    return False


def exit_code(result: BatchResult) -> int:
    if result.outcome != "complete":
        return EXIT_FATAL if result.outcome == "too_many_errors" else EXIT_INTERRUPTED
    return EXIT_BAD_ROWS if result.stats.num_failed + result.stats.num_resumed_failed else 0


def _say_rows(job: Job, sink: Sink, result: BatchResult) -> None:
    """Print where the rows are, or how to continue the run."""
    if result.outcome != "complete":
        _say_resumable(sink)
    elif job.output_file is not None:
        say(f"rows: {job.output_file}")


def _say_resumable(sink: Sink) -> None:
    """Print how to continue an interrupted run."""
    if isinstance(sink, FileSink):
        say(f"continue with: {resume_command(sys.argv[1:])}" if sink.rows_are_kept else f"note: {sink.loss}")


def _load_engine(
    job: Job, sink: Sink, *, emit: Emit | None, trace_tokens: bool, clock_ns: Callable[[], int]
) -> "runner.LLMEngine":
    """The engine of a job. Without one the sink is abandoned."""
    with nothing_to_collect():  # torch is imported
        new_engine = runner.LLMEngine
    config = job.loaded.config.engine
    try:
        engine = new_engine(config, emit=emit, trace_tokens=trace_tokens, clock_ns=clock_ns, with_store=True)
    except BaseException:
        sink.abandon()
        raise
    say_plan(engine.plan, config)
    say_notes(engine.plan.notes)
    return engine


def _stdout(job: Job) -> BinaryIO:
    stream = sys.stdout.buffer
    if not sys.stdout.isatty():
        return stream
    answer = job.loaded.config.run.output_field
    return cast(BinaryIO, TerminalTexts(stream, answer) if job.is_text else TerminalJson(stream))


class TerminalTexts(TerminalJson):
    """What rows have in the column `answer`, for a terminal."""

    def __init__(self, stream: BinaryIO, answer: str) -> None:
        super().__init__(stream)
        self._answer = answer

    def write(self, line: bytes) -> int:
        texts = [sample.text for sample in WrittenRow.of(line, self._answer).samples]
        return self._stream.write("".join(f"{printable(text or '')}\n" for text in texts).encode())


class StopRequest:
    """The first Ctrl-C (or SIGTERM, SIGHUP) sets `requested`; the second raises KeyboardInterrupt immediately."""

    def __init__(self, *, rows_are_kept: Callable[[], bool]) -> None:
        self.requested = False
        self._rows_are_kept = rows_are_kept

    @contextmanager
    def listening(self) -> Iterator[None]:
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else: nohup
            signals.append(signal.SIGHUP)  # the terminal was closed
        with on_signals(self._on_signal, signals):
            yield

    def _on_signal(self) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        kept = "; finished rows are kept" if self._rows_are_kept() else ""
        say(f"\nstopping after this step{kept} (press again to stop now)")


def parse_shard(text: str) -> tuple[int, int]:
    """'2/4', the second of four: (1, 4). Raises: UsageError."""
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard is {text!r}, but must be I/N with I from 1 to N", hint="for example --shard 1/4")
