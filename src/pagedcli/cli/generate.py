"""`pagedcli generate`: a JSONL file of prompts in, one JSON row per prompt out."""

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import typer
import yaml

from pagedcli import show
from pagedcli.batch.job import Job
from pagedcli.batch.lines import file_of_prompt
from pagedcli.buckets import is_url
from pagedcli.cli.cluster import parse_workers, queue_workers, run_cluster_job
from pagedcli.cli.dump_kv import Dump, table_width
from pagedcli.cli.notify import notifying
from pagedcli.cli.options import ENGINE_KEYS, RUN_KEYS, SAMPLING_KEYS, Flags, config_flags
from pagedcli.cli.queue import run_queue_job, show_queue, work_here
from pagedcli.cli.run_flags import GenerateOptions, ShownFormat, is_prompt
from pagedcli.cli.session import parse_shard, run_job
from pagedcli.cli.show_prompt import show_prompt
from pagedcli.cli.summary import config_document, config_rows
from pagedcli.cli.urls import send_complete
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import UsageError
from pagedcli.events import Emit, only_wanted, to_all
from pagedcli.records import Column
from pagedcli.show.tables import Format, Table, print_tables
from pagedcli.show.terminal import say
from pagedcli.trace.files import TraceWriter


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def generate(options: GenerateOptions, *, flags: Flags) -> None:
    """Generate from a JSONL file of prompts, or from one prompt.

    Each line is {"prompt": "..."}, {"messages": [...]} or an OpenAI batch line, and may set max_tokens, temperature, n
    and more for itself; a bad line becomes an error row. Rows go to stdout or to -o, all else to stderr.

    \b
    Examples:
      pagedcli generate prompts.jsonl -o out.jsonl
      pagedcli generate "Once upon a time" -m Qwen/Qwen3-0.6B --max-tokens 64
      cat prompts.jsonl | pagedcli generate - | jq -r .text
      pagedcli generate prompts.jsonl -o out.jsonl --resume     (after Ctrl-C)
      pagedcli generate data.jsonl --field question --id-field qid --keep label -o out.jsonl

    Exit codes: 0 success, 1 fatal, 2 wrong usage, 3 error rows, 130 interrupted.
    """  # fmt: skip
    loaded = load_config(options.config, flags)
    if is_text := options.prompts is not None and is_prompt(options.prompts):
        options = replace(options, prompts=file_of_prompt(options.input_name))
    if options.show_config:
        _show_config(loaded, options.format_)
        return
    if options.show_prompt is not None:
        shown = _as_table("--show-prompt", options.format_)
        show_prompt(loaded, options.input_name, options.show_prompt, shown, all_tokens=options.all_)
        return
    if options.dry_run:
        raise typer.Exit(_dry_run(options.input_name, loaded, options.format_))
    if options.status:
        if options.queue is None:
            raise UsageError("--status needs --queue")
        show_queue(options.queue, _as_table("--status", options.format_))
        return
    if options.output_file == "":
        raise UsageError("the output has no name: -o ''", hint="-o takes the name of a file; - is stdout")
    dump = Dump.of(options.dump_kv, options.steps, options.every)
    dump_files = dump.named_files(overwrite=options.overwrite, resume=options.resume)
    tables_format = _tables_format(dump, options.format_)
    job = Job(
        loaded,
        options.input_name,
        None if options.output_file in (None, "-") else Path(str(options.output_file)),
        is_text=is_text,
        resume=options.resume,
        overwrite=options.overwrite,
        shard=parse_shard(options.shard),
        metrics=options.metrics,
        summary_json=options.summary_json,
        record=options.record,
        num_verified=options.verify,
        reuse=tuple(options.reuse or ()),
        others={} if dump_files is None else dump_files.paths,
    )
    with notifying(options.notify, options.input_name, str(options.output_file or "-")) as ending:
        ending.exit_code = code = _run_job(replace(job, watch=ending.observe), options, dump, dump_files, tables_format)
        send_complete()  # before the command is told that it is
    raise typer.Exit(code)


def _run_job(
    job: Job,
    options: GenerateOptions,
    dump: Dump,
    dump_files: "show.data_files.DumpFiles | None",
    tables_format: Format,
) -> int:
    """Run the job here or on a cluster, and return the exit code."""
    if options.ray or options.ray_address is not None or options.queue is not None:
        return _run_in_parts(job, options)
    job.check_files()
    with ExitStack() as stack:
        printer = _step_printer(dump, tables_format, rows_on_stdout=job.output is None) if dump.as_tables else None
        emit = to_all(*_observers(stack, options, dump_files, printer))
        tokens = options.record_tokens or options.kv_events is not None
        clock_ns = time.perf_counter_ns if printer is None else printer.clock_ns
        return run_job(
            job,
            emit=emit,
            trace_tokens=tokens,
            terminal_is_taken=dump.as_tables,
            all_figures=options.all_,
            clock_ns=clock_ns,
        )


def _run_in_parts(job: Job, options: GenerateOptions) -> int:
    what = "--ray" if options.queue is None else "--queue"
    if job.output is None:
        raise UsageError(f"{what} writes a folder of parts: specify it with -o")
    unsupported = options.dump_kv is not None or options.kv_events is not None or job.reuse
    if job.record is not None or job.metrics is not None or unsupported or job.shard != (0, 1) or job.num_verified:
        others = "--record, --dump-kv, --kv-events, --metrics, --reuse, --shard or --verify"
        raise UsageError(f"{what} cannot be combined with {others}")
    run = job.loaded.config.run
    if run.sample_rows:
        raise UsageError(f"{what} cannot be combined with run.sample_rows")
    if run.deduplicate:
        raise UsageError(f"{what} cannot be combined with --deduplicate: equal rows may be in different parts")
    if run.order != "input" or run.reorder != "none" or run.read_ahead is not None:
        raise UsageError(
            f"{what} cannot be combined with --order, --reorder or run.read_ahead: it groups rows by prefix itself"
        )
    output, workers = str(options.output_file), parse_workers(options.workers)
    if options.queue is None and not is_url(output):
        return run_cluster_job(job, job.output, options.ray_address, workers)
    url, on_cluster = options.queue or f"{output.rstrip('/')}/.queue", options.ray or options.ray_address is not None
    work = queue_workers(url, options.ray_address, workers) if on_cluster else work_here
    return run_queue_job(job, output, url, workers[1], work)


def _tables_format(dump: Dump, format_: ShownFormat) -> Format:
    """Raises: UsageError if --dump-kv cannot print it, or its flags are given without it."""
    if dump.chooses and not dump.as_tables and dump.file is None:
        raise UsageError("--steps and --every need --dump-kv")
    if dump.as_tables and format_ in ("csv", "yaml"):
        hint = "--dump-kv FILE.csv writes the tables as data" if format_ == "csv" else "use table, json or md"
        raise UsageError(f"--dump-kv does not print --format {format_}", hint=hint)
    return Format(format_) if dump.as_tables else Format.TABLE


def _step_printer(dump: Dump, format_: Format, *, rows_on_stdout: bool) -> "show.step_tables.StepPrinter":
    width = table_width(stderr=rows_on_stdout)
    console = show.step_tables.StepConsole(stderr=rows_on_stdout)
    return show.step_tables.StepPrinter(console, chosen=dump.chosen, format=format_, width=width)


def _observers(
    stack: ExitStack,
    options: GenerateOptions,
    dump_files: "show.data_files.DumpFiles | None",
    printer: "show.step_tables.StepPrinter | None",
) -> list[Emit]:
    """What prints, writes or publishes the engine's events."""
    observers: list[Emit] = [] if printer is None else [printer.on_event]
    if options.record is not None:
        writer = stack.enter_context(TraceWriter(options.record, overwrite=options.overwrite, resume=options.resume))
        observers.append(only_wanted(writer, tokens=options.record_tokens, row_ids=not options.no_ids))
    if dump_files is not None:
        observers.append(stack.enter_context(dump_files.written()))
    if options.kv_events is not None:
        observers.append(_publisher(stack, options.kv_events))
    return observers


def _publisher(stack: ExitStack, endpoint: str) -> Emit:
    from pagedcli.kvevents.sockets import PublisherSocket, publisher

    socket = stack.enter_context(PublisherSocket(endpoint))
    say(
        f"KV events: {socket.endpoint}, replay {socket.replay_endpoint};"
        " anyone who connects can read the prompts' token ids"
    )
    return publisher(socket)


def _dry_run(input_name: str, loaded: LoadedConfig, format_: ShownFormat) -> int:
    from pagedcli.cli.plan import PlanOptions, run_plan

    return run_plan(loaded, PlanOptions(input_name, no_calibrate=True, format_=_as_table("--dry-run", format_)))


def _as_table(flag: str, format_: ShownFormat) -> Format:
    if format_ == "yaml":
        raise UsageError(f"{flag} does not support --format yaml", hint="use table, json, csv or md")
    return Format(format_)


def _show_config(loaded: LoadedConfig, format_: ShownFormat) -> None:
    if format_ == "json":
        document = {"config": config_document(loaded), "sources": loaded.sources}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    elif format_ == "yaml":
        print(yaml.safe_dump(config_document(loaded), sort_keys=False, allow_unicode=True), end="")
    else:
        columns = [Column(name, name) for name in ("key", "value", "from")]
        print_tables([Table("config", "Effective configuration", columns, config_rows(loaded))], Format(format_))
