"""Flags of `generate` for files and inspection; those of the configuration are in cli.options."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

_FILES, _INSPECTION, _CLUSTER = "Files", "Inspection", "Distributed (docs/distributed.md)"


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
        help="Input file or folder: JSONL (also .gz) or .parquet; - reads stdin.",
        show_default=False,
    ),
]
InputFile = Annotated[str | None, _file_option("-i", "--input-file", help="Input, given as an option.")]
OutputFile = Annotated[str | None, _file_option("-o", "--output-file", help="Output file. Default: - (stdout).")]
Resume = Annotated[bool, _file_option("--resume", help="Continue an interrupted run.")]
Overwrite = Annotated[bool, _file_option("--overwrite", help="Start over and replace existing files.")]
Shard = Annotated[
    str,
    typer.Option(
        metavar="I/N", help="Process only shard I of N: every N-th row, starting with the I-th.", rich_help_panel=_FILES
    ),
]
Metrics = Annotated[
    Path | None,
    _file_option(
        "--metrics",
        help="Write the run's counters to this file, for Prometheus.",
        panel=_INSPECTION,
        metavar="FILE.prom",
    ),
]
SummaryJson = Annotated[
    Path | None,
    _file_option(
        "--summary-json", help="Write the run's summary to this file.", panel=_INSPECTION, metavar="FILE.json"
    ),
]
Verify = Annotated[
    int,
    typer.Option(
        "--verify",
        metavar="N",
        min=0,
        help="At the end generate N rows again, each alone, and compare tokens and log-probabilities.",
        rich_help_panel=_INSPECTION,
    ),
]
DumpKv = Annotated[
    bool,
    _file_option("--dump-kv", help="Print each step's block tables, ref counts and prefix hits.", panel=_INSPECTION),
]
Record = Annotated[
    Path | None,
    _file_option(
        "--record",
        help="Record all KV-cache events to a trace file.",
        panel=_INSPECTION,
        metavar="TRACE.jsonl[.zst]",
    ),
]
RecordTokens = Annotated[
    bool,
    _file_option("--record-tokens", help="Include token ids in the trace (reveals the prompts).", panel=_INSPECTION),
]
NoIds = Annotated[
    bool, _file_option("--no-ids", help="Leave the ids of the rows out of the trace (private ones).", panel=_INSPECTION)
]
KVEvents = Annotated[
    str | None,
    _file_option(
        "--kv-events",
        metavar="ENDPOINT",
        help="Publish KV-cache events in vLLM's format, e.g. on tcp://127.0.0.1:5557; replay is on the next port.",
        panel=_INSPECTION,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only predict how the file uses the KV cache (see pagedcli plan).")
]
Ray = Annotated[
    bool,
    _file_option("--ray", help="Run on a local Ray cluster; -o is a folder of parts.", panel=_CLUSTER),
]
RayAddress = Annotated[
    str | None,
    _file_option(
        "--ray-address",
        help="Run on an existing Ray cluster, e.g. 'auto'.",
        panel=_CLUSTER,
        metavar="ADDRESS",
    ),
]
Workers = Annotated[
    int,
    typer.Option("--workers", metavar="N", min=1, help="Number of workers, one engine each.", rich_help_panel=_CLUSTER),
]
Shown = Annotated[
    ShownFormat, typer.Option("--format", help="Format for --show-config and --dry-run; yaml only for --show-config.")
]
