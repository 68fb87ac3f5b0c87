"""`pagedcli trace`: generation with a live view of the KV cache."""

import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pagedcli.batch.job import Job
from pagedcli.batch.requests import decode_line, read_head
from pagedcli.batch.sources import open_source
from pagedcli.cli.options import ENGINE_KEYS, RUN_KEYS, SAMPLING_KEYS, ConfigFile, Flags, config_flags
from pagedcli.cli.replay import Follow, StepFormat, table_console
from pagedcli.cli.run_flags import NoIds, Overwrite, Record, RecordTokens, Resume
from pagedcli.cli.session import EXIT_ERROR_ROWS, EXIT_OK, run_job
from pagedcli.cli.terminal import say
from pagedcli.config import load_config
from pagedcli.errors import RequestError, UsageError
from pagedcli.events import Emit, Event, only_wanted
from pagedcli.inspection.live import LiveView, StepPrinter
from pagedcli.inspection.names import NamedRequest, unknown_request
from pagedcli.inspection.trace_writer import TraceWriter

_VIEW = "View"


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def trace(
    prompts: Annotated[str, typer.Argument(metavar="PROMPTS.jsonl", help="Input file (also .gz).")],
    *,
    record: Record = None,
    record_tokens: RecordTokens = False,
    no_ids: NoIds = False,
    follow: Follow = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Print only the tables of step N.", rich_help_panel=_VIEW, show_default=False),
    ] = None,
    no_live: Annotated[
        bool, typer.Option("--no-live", help="Print the tables of every step.", rich_help_panel=_VIEW)
    ] = False,
    paused: Annotated[
        bool, typer.Option("--paused", help="Start paused at the first step.", rich_help_panel=_VIEW)
    ] = False,
    output_file: Annotated[
        str | None,
        typer.Option(
            "-o", "--output-file", help="Write the rows to this file. Default: discard them.", show_default=False
        ),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    config: ConfigFile = None,
    format_: Annotated[
        StepFormat, typer.Option("--format", help="Format for --step and --no-live.", rich_help_panel=_VIEW)
    ] = StepFormat.TABLE,
    flags: Flags,
) -> None:
    """Generate with a live view of the KV cache: block pool, sequences, hit rates, events.

    On a terminal: space pauses, . runs one step, + and - change the speed, q stops after the step. Without a terminal
    it prints plain lines. Step tables go to stdout, the live view to stderr. Takes the flags of generate.

    \b
    Examples:
      pagedcli trace prompts.jsonl
      pagedcli trace prompts.jsonl --num-gpu-blocks-override 64 --record run.jsonl.zst
      pagedcli trace prompts.jsonl --no-live | less
      pagedcli trace prompts.jsonl --step 12 --format json | jq .sequences
    """  # fmt: skip
    if prompts == "-" and sys.stdin.isatty():
        raise UsageError(
            "cannot trace prompts typed on a terminal: the view needs the keyboard", hint="pass a JSONL file"
        )
    if paused and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError("--paused needs a terminal, whose keys run the steps", hint="omit it")
    as_tables = no_live or step is not None or format_ is StepFormat.JSON
    output = Path(output_file if output_file is not None else os.devnull)
    if output_file == "-":
        raise UsageError("-o - would mix rows with the view", hint="pass a file, or use pagedcli generate --record")
    job = Job(load_config(config, flags), prompts, output, resume=resume, overwrite=overwrite, record=record)
    job.check_files()
    if follow is not None:
        _check_named(follow, job)
    request = None if follow is None else NamedRequest(follow)
    as_json = format_ is StepFormat.JSON
    printer = StepPrinter(table_console(), follow=request, only_step=step, as_json=as_json) if as_tables else None
    view = printer or LiveView(Console(stderr=True), follow=request, paused=paused)
    code = _run(job, view, record_tokens=record_tokens, record_ids=not no_ids)
    if request is not None and code in (EXIT_OK, EXIT_ERROR_ROWS):
        request.check("this run")
    raise typer.Exit(code)


def _check_named(name: str, job: Job) -> None:
    """Raises: UsageError if no row of the input has this id or index. An input that is read once is not checked."""
    lines, known = open_source(job.input_name, job.columns), []
    if lines.is_live or name.startswith("seq:"):
        return
    for line in lines:
        with suppress(RequestError):  # an error row when it is served
            row_id = read_head(decode_line(line.content), line.index, line.number, job.columns).id
            if name == str(row_id) or name.partition("/")[0] == str(line.index):
                return
            known.append(str(line.index if row_id is None else row_id))
    raise unknown_request(name, known, job.input_name)


def _run(job: Job, view: StepPrinter | LiveView, *, record_tokens: bool, record_ids: bool) -> int:
    """Generate with a view, and record a trace if the job names a file. Returns the exit code."""
    observers: list[Emit] = [view.on_event]
    with ExitStack() as stack:
        writer = None
        if job.record is not None:
            writer = stack.enter_context(TraceWriter(job.record, overwrite=job.overwrite, resume=job.resume))
            observers.insert(0, only_wanted(writer, tokens=record_tokens, row_ids=record_ids))
        if isinstance(view, LiveView):
            stack.enter_context(view)

        def emit(event: Event) -> None:
            for observer in observers:
                observer(event)

        code = run_job(job, emit=emit, trace_tokens=record_tokens, terminal_is_taken=isinstance(view, LiveView))
    if writer is not None and writer.path.exists():
        say(f"trace: {writer.path}; view it with: pagedcli replay {job.record}")
    if isinstance(view, StepPrinter) and view.only_step is not None and not view.num_printed:
        raise UsageError(f"there is no step {view.only_step}: the last one was {view.moment.state.step_number}")
    return code
