"""The flags of `generate` that are about files and inspection, not about the configuration (see cli.options)."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_FILES, _INSPECTION, _CLUSTER = "Files", "Inspection", "Many workers (docs/distributed.md)"


class ShownFormat(StrEnum):
    """The values of --format, for --show-config and --dry-run."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"
    YAML = "yaml"


def _file_option(*names: str, help: str, panel: str = _FILES, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False)


Prompts = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPTS.jsonl",
        help="Input file or folder; .gz is decompressed, .parquet is a table, - is stdin.",
        show_default=False,
    ),
]
InputFile = Annotated[str | None, _file_option("-i", "--input-file", help="The same as an option.")]
OutputFile = Annotated[str | None, _file_option("-o", "--output-file", help="Output file. Default: -, stdout.")]
Resume = Annotated[bool, _file_option("--resume", help="Continue a run that was stopped.")]
Overwrite = Annotated[bool, _file_option("--overwrite", help="Start anew, and replace files that exist.")]
Shard = Annotated[
    str, typer.Option(metavar="I/N", help="Only every n-th row, beginning with the i-th.", rich_help_panel=_FILES)
]
Metrics = Annotated[
    Path | None,
    _file_option(
        "--metrics",
        help="Keep the run's counters in this file, for Prometheus.",
        panel=_INSPECTION,
        metavar="FILE.prom",
    ),
]
SummaryJson = Annotated[
    Path | None,
    _file_option(
        "--summary-json", help="Write the summary of the run to this file.", panel=_INSPECTION, metavar="FILE.json"
    ),
]
DumpKv = Annotated[
    bool,
    _file_option("--dump-kv", help="Print block tables, ref counts and prefix hits of each step.", panel=_INSPECTION),
]
Record = Annotated[
    Path | None,
    _file_option(
        "--record",
        help="Write every event of the KV cache to a trace file.",
        panel=_INSPECTION,
        metavar="TRACE.jsonl[.zst]",
    ),
]
RecordTokens = Annotated[
    bool,
    _file_option("--record-tokens", help="Put token ids into the trace, which are private.", panel=_INSPECTION),
]
KVEvents = Annotated[
    str | None,
    _file_option(
        "--kv-events",
        metavar="ENDPOINT",
        help="Publish the prefix cache in vLLM's format, e.g. tcp://127.0.0.1:5557; replay on the next port.",
        panel=_INSPECTION,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what the file would do to the KV cache (see pagedcli plan).")
]
Ray = Annotated[
    bool,
    _file_option("--ray", help="Run on workers of a local Ray cluster; -o is a folder of parts.", panel=_CLUSTER),
]
RayAddress = Annotated[
    str | None,
    _file_option(
        "--ray-address",
        help="The same on a running cluster, for example 'auto'.",
        panel=_CLUSTER,
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int,
    typer.Option("--workers", metavar="N", min=1, help="Engines, one per worker.", rich_help_panel=_CLUSTER),
]
Shown = Annotated[
    ShownFormat, typer.Option("--format", help="Of --show-config and --dry-run; yaml of --show-config only.")
]
