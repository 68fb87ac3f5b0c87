"""`pagedcli trace`: generation under the application, or with printed steps."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagedcli.batch.job import Job
from pagedcli.batch.lines import is_live
from pagedcli.batch.prompts import open_source
from pagedcli.batch.requests import BatchRow, decode_line
from pagedcli.cli.dump_kv import Dump, DumpFiles, DumpKv, Every, Steps, table_width
from pagedcli.cli.options import ENGINE_KEYS, RUN_KEYS, SAMPLING_KEYS, ConfigFile, Flags, config_flags, option
from pagedcli.cli.replay import Follow, StepFormat, no_such_step
from pagedcli.cli.run_flags import NoIds, Overwrite, Record, RecordTokens, Resume
from pagedcli.cli.session import run_job
from pagedcli.config import load_config
from pagedcli.errors import EXIT_BAD_ROWS, RequestError, UsageError
from pagedcli.events import Emit, only_wanted, to_all
from pagedcli.show.panels import PlainView, print_ending
from pagedcli.show.step_tables import StepConsole, StepPrinter
from pagedcli.show.tables import Format
from pagedcli.show.terminal import is_interactive, say
from pagedcli.trace.files import TraceWriter
from pagedcli.views.names import NamedRequest, unknown_request
from pagedcli.views.step_choice import StepChoice
from pagedcli.views.whole_run import Findings, WholeRun

if TYPE_CHECKING:
    from pagedcli.app.pool_players import LivePlayer

_view = partial(option, panel="View")


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def trace(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help="Input file (also .gz).")],
    *,
    record: Record = None,
    record_tokens: RecordTokens = False,
    no_ids: NoIds = False,
    follow: Follow = None,
    step: Annotated[int | None, _view(metavar="N", help="Print only the tables of step N.")] = None,
    no_live: Annotated[bool, _view("--no-live", help="The same as --dump-kv without a file.")] = False,
    dump_kv: DumpKv = None,
    steps: Steps = None,
    every: Every = 1,
    paused: Annotated[bool, _view("--paused", help="Start paused at the first step.")] = False,
    output_file: Annotated[
        str | None, option("-o", "--output-file", help="Write the rows to this file. Default: discard them.")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    config: ConfigFile = None,
    format_: Annotated[StepFormat, _view("--format", help="Format of the tables.", show_default=True)] = "table",
    flags: Flags,
) -> None:
    """Generate and watch the KV cache: block pool, sequences, hit rates, events.

    On a terminal it opens an application: space pauses, . runs one step, + and - change the speed, Enter tells the
    story of a sequence or a block, q stops after the step, ? shows all keys; when the run has ended, one can go back to
    any of its steps. Without a terminal, and with NO_COLOR or
    TERM=dumb, it prints plain lines. Step tables go to stdout, all else to stderr. Takes the flags of generate.

    \b
    Examples:
      pagedcli trace prompts.jsonl
      pagedcli trace prompts.jsonl --num-gpu-blocks-override 64 --record run.jsonl.zst
      pagedcli trace prompts.jsonl --dump-kv | less -S
      pagedcli trace prompts.jsonl --step 12 --format json | jq .sequences
    """  # fmt: skip
    if prompts == "-" and sys.stdin.isatty():
        raise UsageError("cannot trace prompts typed on a terminal: its keys are the view's", hint="pass a JSONL file")
    if paused and not is_interactive(with_stdout=False):
        raise UsageError("--paused needs a terminal, whose keys run the steps", hint="omit it")
    dump = Dump.of(dump_kv, steps, every, step=step)
    dump_files = dump.named_files(overwrite=overwrite, resume=resume)
    only_tables = dump_files is None and (dump.chooses or format_ != "table")
    as_tables = dump.as_tables or no_live or only_tables
    output = Path(output_file if output_file is not None else os.devnull)
    if output_file == "-":
        raise UsageError("-o - would mix rows with the view", hint="pass a file, or use pagedcli generate --record")
    others = {} if dump_files is None else dump_files.paths
    job = Job(
        load_config(config, flags), prompts, output, resume=resume, overwrite=overwrite, record=record, others=others
    )
    job.check_files()
    request = None if follow is None else _named(follow, job)
    whole_run = WholeRun()
    run = partial(_run, job, whole_run, dump_files=dump_files, record_tokens=record_tokens, record_ids=not no_ids)
    if as_tables:
        code = _print_steps(run, whole_run, request, dump.chosen, Format(format_))
    elif is_interactive(with_stdout=False):
        code = _run_under_application(run, whole_run, request, paused=paused, recorded=job.record)
    else:
        with PlainView(Console(stderr=True), whole_run, follow=request) as view:
            code = run(view, terminal_is_taken=True)
    if request is not None and code in (0, EXIT_BAD_ROWS):
        request.check("this run")
    raise typer.Exit(code)


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
    from pagedcli.app.pool_players import LivePlayer

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
    view: "StepPrinter | PlainView | LivePlayer",
    *,
    dump_files: DumpFiles | None,
    record_tokens: bool,
    record_ids: bool,
    **how: Any,
) -> int:
    """Generate with a view, which folds the events into `whole_run`, too, and record a trace if the job names a file.
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

        code = run_job(
            job,
            emit=emit,
            trace_tokens=record_tokens,
            stdout_is_taken=True,
            findings_of_events=findings,
            **how,
        )
    if writer is not None and writer.path.exists():
        say(f"trace: {writer.path}; view it with: pagedcli replay {job.record}")
    return code
