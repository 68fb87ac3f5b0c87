"""`pagedcli generate`: a JSONL file of prompts in, one JSON row per prompt out."""

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from pagedcli.batch.job import Job
from pagedcli.cli.options import ENGINE_KEYS, RUN_KEYS, SAMPLING_KEYS, ConfigFile, Flags, ShowConfig, config_flags
from pagedcli.cli.session import parse_shard, run_job
from pagedcli.cli.summary import config_document, config_rows
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import UsageError
from pagedcli.events import Emit, Event

_FILES, _INSPECTION, _CLUSTER = "Files", "Inspection", "Many workers (docs/distributed.md)"


class ShownFormat(StrEnum):
    """The values of --format, for --show-config and --dry-run."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"
    YAML = "yaml"


@config_flags(*ENGINE_KEYS, *SAMPLING_KEYS, *RUN_KEYS)
def generate(
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS.jsonl",
            help="Input file or folder; .gz is decompressed, .parquet is a table, - is stdin.",
            show_default=False,
        ),
    ] = None,
    *,
    input_file: Annotated[
        str | None,
        typer.Option("-i", "--input-file", help="The same as an option.", rich_help_panel=_FILES, show_default=False),
    ] = None,
    output_file: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output-file",
            help="Output file. Default: -, which is stdout.",
            rich_help_panel=_FILES,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped.", rich_help_panel=_FILES)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew, and replace files that exist.", rich_help_panel=_FILES)
    ] = False,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Only every n-th row, beginning with the i-th.", rich_help_panel=_FILES)
    ] = "1/1",
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.prom",
            help="Keep the run's counters in this file, for Prometheus.",
            rich_help_panel=_INSPECTION,
            show_default=False,
        ),
    ] = None,
    summary_json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the summary of the run to this file.",
            rich_help_panel=_INSPECTION,
            show_default=False,
        ),
    ] = None,
    dump_kv: Annotated[
        bool,
        typer.Option(
            "--dump-kv",
            help="Print block tables, ref counts and prefix hits of each step.",
            rich_help_panel=_INSPECTION,
        ),
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.jsonl",
            help="Write every event of the KV cache to a trace file.",
            rich_help_panel=_INSPECTION,
            show_default=False,
        ),
    ] = None,
    record_tokens: Annotated[
        bool,
        typer.Option(
            "--record-tokens",
            help="Put token ids into the trace. They are private otherwise.",
            rich_help_panel=_INSPECTION,
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the file would do to the KV cache (see pagedcli plan).")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Run on workers of a local Ray cluster; -o is a folder of parts.", rich_help_panel=_CLUSTER
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The same on a cluster that runs, for example 'auto'.",
            rich_help_panel=_CLUSTER,
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Engines, one per worker.", rich_help_panel=_CLUSTER)
    ] = 2,
    config: ConfigFile = None,
    show_config: ShowConfig = False,
    format_: Annotated[
        ShownFormat, typer.Option("--format", help="Of --show-config and --dry-run; yaml of --show-config only.")
    ] = ShownFormat.TABLE,
    flags: Flags,
) -> None:
    """Generate from a JSONL file of prompts.

    Each line is {"prompt": "..."}, {"prompt": [token ids]}, {"messages": [...]} or an OpenAI batch line, and may bring
    its own max_tokens, temperature, stop, seed, n, logprobs, ... A line that cannot be served becomes a row with an
    error. Rows go to stdout or to the file given with -o, everything else to stderr.

    \b
    Examples:
      pagedcli generate prompts.jsonl -o out.jsonl
      pagedcli generate prompts.jsonl -m Qwen/Qwen3-0.6B --max-tokens 64
      cat prompts.jsonl | pagedcli generate - | jq -r .text
      pagedcli generate prompts.jsonl -o out.jsonl --resume     (after Ctrl-C)

    Exit codes: 0 all rows are good, 1 fatal error, 2 wrong usage or configuration, 3 finished with error rows,
    130 interrupted.
    """  # fmt: skip
    loaded = load_config(config, flags)
    if show_config:
        _show_config(loaded, format_)
        return
    if dry_run:
        raise typer.Exit(_dry_run(prompts or input_file, loaded, format_))
    if ray or ray_address is not None:
        if output_file in (None, "-"):
            raise UsageError("--ray writes a folder of parts: name it with -o")
        if record is not None or metrics is not None or dump_kv or shard != "1/1":
            raise UsageError("--ray has no --record, --dump-kv, --metrics and --shard")
        from pagedcli.cli.cluster import ClusterJob, run_cluster_job

        cluster_job = ClusterJob(
            loaded,
            _input_name(prompts, input_file),
            Path(str(output_file)),
            ray_address,
            workers,
            resume=resume,
            overwrite=overwrite,
            summary_json=summary_json,
        )
        raise typer.Exit(run_cluster_job(cluster_job))
    job = _job(
        _input_name(prompts, input_file),
        output_file,
        loaded,
        resume=resume,
        overwrite=overwrite,
        shard=parse_shard(shard),
        metrics=metrics,
        summary_json=summary_json,
        record=record,
    )
    job.check_files()
    with ExitStack() as stack:
        emit = _observers(stack, job, dump_kv=dump_kv, record=record)
        code = run_job(job, emit=emit, trace_tokens=record_tokens, terminal_is_taken=dump_kv)
    raise typer.Exit(code)


def _input_name(prompts: str | None, input_file: str | None) -> str:
    if prompts is not None and input_file is not None:
        raise UsageError(f"two inputs are given: {prompts} and -i {input_file}")
    input_name = prompts if prompts is not None else input_file
    if input_name is None:
        raise UsageError("no prompts are given", hint="name a JSONL file, or - for stdin; see pagedcli generate --help")
    return input_name


def _job(input_name: str, output_file: str | None, loaded: LoadedConfig, **fields: Any) -> Job:
    output = None if output_file in (None, "-") else Path(str(output_file))
    return Job(loaded, input_name, output, **fields)


def _observers(stack: ExitStack, job: Job, *, dump_kv: bool, record: Path | None) -> Emit | None:
    """Who gets the engine's events; None if nobody asked."""
    observers: list[Emit] = []
    if record is not None:
        from pagedcli.inspection.trace_writer import TraceWriter

        observers.append(stack.enter_context(TraceWriter(record, overwrite=job.overwrite, resume=job.resume)))
    if dump_kv:
        from rich.console import Console

        from pagedcli.inspection.live import StepPrinter

        # rows own stdout unless they go to a file
        observers.append(StepPrinter(Console(stderr=job.output is None)).on_event)
    if not observers:
        return None

    def emit(event: Event) -> None:
        for observer in observers:
            observer(event)

    return emit


def _dry_run(input_name: str | None, loaded: LoadedConfig, format_: ShownFormat) -> int:
    from pagedcli.cli.plan import run_plan
    from pagedcli.cli.tables import Format

    if input_name is None:
        raise UsageError("no prompts are given", hint="name a JSONL file, or - for stdin")
    if format_ is ShownFormat.YAML:
        raise UsageError("--dry-run has no --format yaml", hint="use table, json, csv or md")
    return run_plan(loaded, input_name, format_=Format(format_))


def _show_config(loaded: LoadedConfig, format_: ShownFormat) -> None:
    """The effective configuration on stdout."""
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
