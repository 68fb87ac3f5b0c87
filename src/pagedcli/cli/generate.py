"""`pagedcli generate`: a JSONL file of prompts in, one JSON row per prompt out."""

from contextlib import ExitStack
from pathlib import Path

import msgspec
import typer

from pagedcli.batch.job import Job
from pagedcli.cli.options import ENGINE_KEYS, RUN_KEYS, SAMPLING_KEYS, ConfigFile, Flags, ShowConfig, config_flags
from pagedcli.cli.run_flags import (
    DryRun,
    DumpKv,
    InputFile,
    KVEvents,
    Metrics,
    NoIds,
    OutputFile,
    Overwrite,
    Prompts,
    Ray,
    RayAddress,
    Record,
    RecordTokens,
    Resume,
    Shard,
    Shown,
    ShownFormat,
    SummaryJson,
    Verify,
    Workers,
)
from pagedcli.cli.session import parse_shard, run_job
from pagedcli.cli.summary import config_document, config_rows
from pagedcli.cli.terminal import say
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import UsageError
from pagedcli.events import Emit, Event, only_wanted


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def generate(
    prompts: Prompts = None,
    *,
    input_file: InputFile = None,
    output_file: OutputFile = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    shard: Shard = "1/1",
    metrics: Metrics = None,
    summary_json: SummaryJson = None,
    verify: Verify = 0,
    dump_kv: DumpKv = False,
    record: Record = None,
    record_tokens: RecordTokens = False,
    no_ids: NoIds = False,
    kv_events: KVEvents = None,
    dry_run: DryRun = False,
    ray: Ray = False,
    ray_address: RayAddress = None,
    workers: Workers = 2,
    config: ConfigFile = None,
    show_config: ShowConfig = False,
    format_: Shown = ShownFormat.TABLE,
    flags: Flags,
) -> None:
    """Generate from a JSONL file of prompts.

    Each line is {"prompt": "..."}, {"prompt": [token ids]}, {"messages": [...]} or an OpenAI batch line, and may set
    its own max_tokens, temperature, stop, seed, n, logprobs, ... An invalid line becomes an error row.
    Rows go to stdout or to the file given with -o, everything else to stderr.

    \b
    Examples:
      pagedcli generate prompts.jsonl -o out.jsonl
      pagedcli generate prompts.jsonl -m Qwen/Qwen3-0.6B --max-tokens 64
      cat prompts.jsonl | pagedcli generate - | jq -r .text
      pagedcli generate prompts.jsonl -o out.jsonl --resume     (after Ctrl-C)
      pagedcli generate data.jsonl --field question --id-field qid --keep label -o out.jsonl
      pagedcli generate prompts.jsonl -o out.jsonl --verify 20  (20 rows once more at the end, each alone)

    Exit codes: 0 success, 1 fatal error or --verify found a difference, 2 wrong usage, 3 error rows, 130 interrupted.
    """  # fmt: skip
    loaded = load_config(config, flags)
    if show_config:
        _show_config(loaded, format_)
        return
    if dry_run:
        raise typer.Exit(_dry_run(prompts or input_file, loaded, format_))
    job = Job(
        loaded,
        _input_name(prompts, input_file),
        None if output_file in (None, "-") else Path(str(output_file)),
        resume=resume,
        overwrite=overwrite,
        shard=parse_shard(shard),
        metrics=metrics,
        summary_json=summary_json,
        record=record,
        num_verified=verify,
    )
    if ray or ray_address is not None:
        raise typer.Exit(_run_on_cluster(job, ray_address, workers, unsupported=dump_kv or kv_events is not None))
    job.check_files()
    with ExitStack() as stack:
        emit = _observers(
            stack, job, dump_kv=dump_kv, record_tokens=record_tokens, record_ids=not no_ids, kv_events=kv_events
        )
        trace_tokens = record_tokens or kv_events is not None
        code = run_job(job, emit=emit, trace_tokens=trace_tokens, terminal_is_taken=dump_kv)
    raise typer.Exit(code)


def _run_on_cluster(job: Job, address: str | None, workers: int, *, unsupported: bool) -> int:
    from pagedcli.cli.cluster import ClusterJob, run_cluster_job

    if job.output is None:
        raise UsageError("--ray writes a folder of parts: specify it with -o")
    if job.record is not None or job.metrics is not None or unsupported or job.shard != (0, 1) or job.num_verified:
        raise UsageError(
            "--ray cannot be combined with --record, --dump-kv, --kv-events, --metrics, --shard or --verify"
        )
    run = job.loaded.config.run
    if run.order != "input" or run.reorder != "none" or run.read_ahead is not None:
        raise UsageError(
            "--ray cannot be combined with --order, --reorder or --read-ahead: it groups rows by prefix itself"
        )
    cluster_job = ClusterJob(
        job.loaded,
        job.input_name,
        job.output,
        address,
        workers,
        resume=job.resume,
        overwrite=job.overwrite,
        summary_json=job.summary_json,
    )
    return run_cluster_job(cluster_job)


def _input_name(prompts: str | None, input_file: str | None) -> str:
    if prompts is not None and input_file is not None:
        raise UsageError(f"two inputs given: {prompts} and -i {input_file}")
    input_name = prompts if prompts is not None else input_file
    if input_name is None:
        raise UsageError("no prompts given", hint="pass a JSONL file, or - for stdin; see pagedcli generate --help")
    return input_name


def _observers(
    stack: ExitStack, job: Job, *, dump_kv: bool, record_tokens: bool, record_ids: bool, kv_events: str | None
) -> Emit | None:
    """Where the engine's events go; None: nowhere."""
    observers: list[Emit] = []
    if job.record is not None:
        from pagedcli.inspection.trace_writer import TraceWriter

        writer = stack.enter_context(TraceWriter(job.record, overwrite=job.overwrite, resume=job.resume))
        observers.append(only_wanted(writer, tokens=record_tokens, row_ids=record_ids))
    if dump_kv:
        from rich.console import Console

        from pagedcli.inspection.printers import StepPrinter

        # stdout is for rows unless they go to a file
        observers.append(StepPrinter(Console(stderr=job.output is None)).on_event)
    if kv_events is not None:
        observers.append(_publisher(stack, kv_events))
    if not observers:
        return None

    def emit(event: Event) -> None:
        for observer in observers:
            observer(event)

    return emit


def _publisher(stack: ExitStack, endpoint: str) -> Emit:
    from pagedcli.inspection.fold import Fold
    from pagedcli.inspection.state import PoolState
    from pagedcli.kvevents.publisher import KVEventPublisher
    from pagedcli.kvevents.sockets import PublisherSocket

    socket = stack.enter_context(PublisherSocket(endpoint))
    say(
        f"KV events: {socket.endpoint}, replay {socket.replay_endpoint};"
        " anyone who connects can read the prompts' token ids"
    )
    return Fold(PoolState(), KVEventPublisher(socket.send))


def _dry_run(input_name: str | None, loaded: LoadedConfig, format_: ShownFormat) -> int:
    from pagedcli.cli.plan import run_plan
    from pagedcli.cli.tables import Format

    if input_name is None:
        raise UsageError("no prompts given", hint="pass a JSONL file, or - for stdin")
    if format_ is ShownFormat.YAML:
        raise UsageError("--dry-run does not support --format yaml", hint="use table, json, csv or md")
    return run_plan(loaded, input_name, format_=Format(format_))


def _show_config(loaded: LoadedConfig, format_: ShownFormat) -> None:
    """Print the effective configuration on stdout."""
    if format_ is ShownFormat.JSON:
        document = {"config": config_document(loaded), "sources": loaded.sources}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    elif format_ is ShownFormat.YAML:
        import yaml

        print(yaml.safe_dump(config_document(loaded), sort_keys=False, allow_unicode=True), end="")
    else:
        from pagedcli.cli.tables import Column, Format, Table, print_tables

        columns = [Column("key", "key"), Column("value", "value"), Column("from", "from")]
        print_tables([Table("config", "Effective configuration", columns, config_rows(loaded))], Format(format_))
