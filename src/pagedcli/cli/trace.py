"""`pagedcli trace`: a run, live or recorded, under the application or with printed steps."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pagedcli import show
from pagedcli.app.pool_players import LivePlayer
from pagedcli.batch.job import Job
from pagedcli.batch.lines import copied, is_live
from pagedcli.batch.prompts import open_source
from pagedcli.batch.requests import BatchRow, decode_line
from pagedcli.cli.dump_kv import table_width
from pagedcli.cli.options import (
    ENGINE_KEYS,
    RUN_KEYS,
    SAMPLING_KEYS,
    ConfigFile,
    Flags,
    config_flags,
    do_not_apply,
    option,
)
from pagedcli.cli.recorded_run import RecordedFlags, ViewFlags, look_at, no_such_step, recorded_file
from pagedcli.cli.run_flags import NoIds, Overwrite, Record, RecordTokens, Resume
from pagedcli.cli.session import run_job
from pagedcli.config import load_config
from pagedcli.errors import EXIT_BAD_ROWS, RequestError, UsageError, check_room_for_torch
from pagedcli.events import Emit, only_wanted, to_all
from pagedcli.show.panels import PlainView, print_ending
from pagedcli.show.step_tables import StepConsole, StepPrinter
from pagedcli.show.tables import Format
from pagedcli.show.terminal import is_interactive, say
from pagedcli.trace.files import TraceWriter
from pagedcli.views.names import NamedRequest, unknown_request
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.whole_run import Findings, WholeRun

_INPUT_HELP = "Prompts (also .gz) to generate from, or a recorded run; - is stdin."
_OUTPUT_HELP = "Write the rows, or the --export of a recorded run, to this file. Default: discard the rows."


@dataclass(frozen=True, slots=True)
class LiveFlags:
    """The flags that only a run of prompts takes."""

    record: Record = None
    record_tokens: RecordTokens = False
    no_ids: NoIds = False
    paused: Annotated[bool, option("--paused", panel="View", help="Start paused at the first step.")] = False
    resume: Resume = False
    config: ConfigFile = None


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def trace(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl|RUN.jsonl", help=_INPUT_HELP)],
    *,
    view: ViewFlags,
    live: LiveFlags,
    recorded: RecordedFlags,
    output_file: Annotated[str | None, option("-o", "--output-file", help=_OUTPUT_HELP)] = None,
    overwrite: Overwrite = False,
    flags: Flags,
) -> None:
    """Watch the KV cache of a run, live or recorded: block pool, sequences, hit rates, events.

    For a file of prompts it generates, with the flags of generate; a file written by --record or attach it steps
    through in either direction, without a model. On a terminal it opens an application: space pauses and plays, .
    and , step, p / e / m jump to the next preemption, eviction or prefix miss, Enter shows the history of a
    sequence or block, q ends, ? shows all keys. Without a terminal, and with NO_COLOR or TERM=dumb, it prints plain
    lines. Step tables go to stdout; each shows the cache as the step's forward pass sees it.

    \b
    Examples:
      pagedcli trace prompts.jsonl --num-kvcache-blocks 64 --record run.jsonl.zst
      pagedcli trace prompts.jsonl --dump-kv | less -S
      pagedcli trace run.jsonl.zst
      pagedcli trace run.jsonl --step 812 --follow code-Mirano
      pagedcli trace run.jsonl --block 37 --step 100
      pagedcli trace run.jsonl --check
      pagedcli trace run.jsonl --dump-kv kv.parquet      (every step as data: sequences, blocks, lookups, hit rates)
      pagedcli trace run.jsonl --export perfetto -o run.json      (open at ui.perfetto.dev)
      pagedcli trace run.jsonl --step 75 --picture pool.svg

    Exit codes: those of generate; for a recorded run 0 success, 1 the trace is inconsistent or damaged, 2 wrong usage.
    """  # fmt: skip
    run = recorded_file(prompts)
    if run is not None or recorded != RecordedFlags():
        _refuse(live, flags)
        look_at(run or copied(Path(prompts)), view, recorded, output_file=output_file, overwrite=overwrite)
        return
    check_room_for_torch()
    raise typer.Exit(_generate(prompts, view, live, output_file=output_file, overwrite=overwrite, flags=flags))


def _refuse(live: LiveFlags, flags: Flags) -> None:
    """Raises: UsageError if a flag of generating was given for a recorded run."""
    names = [each.name for each in fields(live) if getattr(live, each.name) != each.default]
    if names or flags:
        raise UsageError(f"a recorded run generates nothing: {do_not_apply([*names, *flags])}")


def _generate(
    prompts: str, view: ViewFlags, live: LiveFlags, *, output_file: str | None, overwrite: bool, flags: Flags
) -> int:
    """Generate and watch. Returns the exit code."""
    if prompts == "-" and sys.stdin.isatty():
        raise UsageError("cannot read prompts from a terminal, whose keys control the view", hint="pass a JSONL file")
    if live.paused and not is_interactive(with_stdout=False):
        raise UsageError("--paused needs a terminal, whose keys step through the run", hint="omit it")
    dump = view.dump
    dump_files = dump.named_files(overwrite=overwrite, resume=live.resume)
    only_tables = dump_files is None and (dump.chooses or view.format_ != "table")
    if output_file == "-":
        raise UsageError("-o - would mix rows with the view", hint="pass a file, or use pagedcli generate --record")
    job = Job(
        load_config(live.config, flags),
        prompts,
        Path(output_file if output_file is not None else os.devnull),
        resume=live.resume,
        overwrite=overwrite,
        record=live.record,
        others={} if dump_files is None else dump_files.paths,
    )
    job.check_files()
    request = None if view.follow is None else _named(view.follow, job)
    whole_run = WholeRun()
    run = partial(
        _run, job, whole_run, dump_files=dump_files, record_tokens=live.record_tokens, record_ids=not live.no_ids
    )
    if dump.as_tables or only_tables:
        code = _print_steps(run, whole_run, request, dump.chosen, Format(view.format_))
    elif is_interactive(with_stdout=False):
        code = _run_under_application(run, whole_run, request, paused=live.paused, recorded=job.record)
    else:
        with PlainView(Console(stderr=True), whole_run, follow=request) as plain:
            code = run(plain, terminal_is_taken=True)
    if request is not None and code in (0, EXIT_BAD_ROWS):
        request.check("this run")
    return code


def _named(name: str, job: Job) -> NamedRequest:
    """Raises: UsageError if no row of the input has this id or index. An input that is read once is not checked."""
    if is_live(job.input_name) or name.startswith("seq:"):
        return NamedRequest(name)
    known = []
    for line in open_source(job.input_name, job.columns):
        with suppress(RequestError):  # an error row when it is served
            row = BatchRow(line)
            row.read_head(decode_line(line.content), job.columns)
            row_id = row.id
            if name == str(row_id) or name.partition("/")[0] == str(line.index):
                return NamedRequest(name)
            known.append(str(line.index if row_id is None else row_id))
    raise unknown_request(name, known, job.input_name)


def _print_steps(
    run: Callable[..., int], whole_run: WholeRun, follow: NamedRequest | None, chosen: StepChoice, format: Format
) -> int:
    printer = StepPrinter(StepConsole(), whole_run, follow=follow, chosen=chosen, format=format, width=table_width())
    code = run(printer, clock_ns=printer.clock_ns)
    if chosen.first and not printer.num_printed:
        raise no_such_step(chosen, "this run", printer.moment.state)
    return code


def _run_under_application(
    run: Callable[..., int], whole_run: WholeRun, follow: NamedRequest | None, *, paused: bool, recorded: Path | None
) -> int:
    from pagedcli.app.base import watch
    from pagedcli.app.pool_app import PoolApp

    player = LivePlayer(whole_run, follow=follow, paused=paused, recorded=recorded)
    told: list[str] = []

    def work() -> int:
        return run(
            player,
            terminal_is_taken=True,
            stop_requested=lambda: player.stop_requested,
            observe_told=told.extend,
            clock_ns=player.clock_ns,
        )

    try:
        return watch(PoolApp(player, "pagedcli trace", judge=lambda: told), player, work)
    finally:
        print_ending(player.live, player.damage, Console(stderr=True))


def _run(
    job: Job,
    whole_run: WholeRun,
    view: StepPrinter | PlainView | LivePlayer,
    *,
    dump_files: "show.data_files.DumpFiles | None",
    record_tokens: bool,
    record_ids: bool,
    **how: Any,
) -> int:
    """Generate with a view, which also folds the events into `whole_run`, and record a trace if the job names a file.
    `how`: see run_job. Returns the exit code."""
    emit: Emit | None = view.on_event
    with ExitStack() as stack:
        writer = None
        if job.record is not None:
            writer = stack.enter_context(TraceWriter(job.record, overwrite=job.overwrite, resume=job.resume))
            emit = to_all(only_wanted(writer, tokens=record_tokens, row_ids=record_ids), view.on_event)
        if dump_files is not None:
            emit = to_all(stack.enter_context(dump_files.written()), emit)

        def findings() -> Findings | None:
            state = view.settled()
            if state is None:
                return None
            whole_run.finish(state)
            return whole_run.findings(state)

        code = run_job(job, emit=emit, trace_tokens=record_tokens, findings_of_events=findings, **how)
    if writer is not None and writer.path.exists():
        say(f"trace: {writer.path}; view it with: pagedcli trace {job.record}")
    return code
