"""Flags of `generate` for files and inspection, some of them shared with `trace`; those of the configuration are in
cli.options."""

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from pagedcli.cli.dump_kv import DumpKv, Every, Steps
from pagedcli.cli.options import ConfigFile, option
from pagedcli.errors import UsageError

_file, _inspection, _cluster = (
    partial(option, panel=panel) for panel in ("Files", "Inspection", "Many machines (docs/distributed.md)")
)


ShownFormat = Literal["table", "json", "csv", "md", "yaml"]
_INPUT_HELP = "JSONL, CSV, TSV, Parquet, a folder, - (stdin), or a text."
_NAMES_FILE = re.compile(r"/|\.(jsonl?|ndjson|csv|tsv|parquet|txt|gz|zst)$", re.IGNORECASE)
_REUSE_HELP = "Take over the rows of an earlier output that asked for the same. May be repeated."
_SHARD_HELP = "Process only shard I of N: every N-th row, starting with the I-th."
_ALL_HELP = "Also print row times, cache losses and waste, and what rows waited for."
_VERIFY_HELP = "Generate N rows again at the end, each alone, and compare tokens and log-probabilities."
_NOTIFY_HELP = "Run this shell command when the run ends, even on failure. Sets PAGEDCLI_EXIT_CODE, PAGEDCLI_ROWS, ..."
_KV_EVENTS_HELP = "Publish KV-cache events in vLLM's format, e.g. on tcp://127.0.0.1:5557; replay uses the next port."
_FORMAT_HELP = "Format for --show-*, --dry-run and --dump-kv; yaml: --show-config only; csv: not for --dump-kv."
_WORKERS_HELP = "Number of workers, one engine each; 2-8: as many as the cluster has room for and parts are left for."
_QUEUE_HELP = "Share the run with all machines that name this folder or s3://, gs:// URL; -o names a folder of parts."
_STATUS_HELP = "Only show what is left of the run of --queue, who works on it, and for how long."
_SHOW_PROMPT_HELP = "Only show what the model would see of this line, its tokens, and how many the chat template adds."
_SHOW_HELP = "Show the effective configuration and the source of each value, then exit."

Resume = Annotated[bool, _file("--resume", help="Continue an interrupted run.")]
Overwrite = Annotated[bool, _file("--overwrite", help="Start over and replace existing files.")]
Record = Annotated[
    Path | None,
    _inspection("--record", help="Record all KV-cache events to a trace file.", metavar="TRACE.jsonl[.zst]"),
]
RecordTokens = Annotated[
    bool, _inspection("--record-tokens", help="Include token ids in the trace (reveals the prompts).")
]
NoIds = Annotated[bool, _inspection("--no-ids", help="Leave row ids out of the trace, e.g. if they are private.")]


def is_prompt(text: str) -> bool:
    """Whether the argument of `generate` is a prompt, not the name of its file."""
    return len(text.split()) > 1 and _NAMES_FILE.search(text) is None and not os.path.exists(text)


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The flags of `generate` itself."""

    prompts: Annotated[str | None, typer.Argument(metavar="PROMPTS.jsonl", help=_INPUT_HELP, show_default=False)] = None
    output_file: Annotated[str | None, _file("-o", "--output-file", help="Output file. Default: - (stdout).")] = None
    resume: Resume = False
    overwrite: Overwrite = False
    reuse: Annotated[list[Path] | None, _file(metavar="OLD.jsonl", help=_REUSE_HELP)] = None
    shard: Annotated[str, _file(metavar="I/N", help=_SHARD_HELP, show_default=True)] = "1/1"
    metrics: Annotated[
        Path | None, _inspection(help="Write the run's counters to this file, for Prometheus.", metavar="FILE.prom")
    ] = None
    summary_json: Annotated[
        Path | None, _inspection(help="Write the run's summary to this file.", metavar="FILE.json")
    ] = None
    all_: Annotated[bool, _inspection("--all", help=_ALL_HELP)] = False
    notify: Annotated[str | None, _inspection(help=_NOTIFY_HELP, metavar="CMD")] = None
    verify: Annotated[int, _inspection(metavar="N", min=0, help=_VERIFY_HELP, show_default=True)] = 0
    dump_kv: DumpKv = None
    steps: Steps = None
    every: Every = 1
    record: Record = None
    record_tokens: RecordTokens = False
    no_ids: NoIds = False
    kv_events: Annotated[str | None, _inspection(help=_KV_EVENTS_HELP, metavar="ENDPOINT")] = None
    show_prompt: Annotated[int | None, _inspection(metavar="LINE", min=1, help=_SHOW_PROMPT_HELP)] = None
    dry_run: Annotated[bool, _inspection("--dry-run", help="Only predict the run, as pagedcli plan does.")] = False
    ray: Annotated[bool, _cluster("--ray", help="Run on a local Ray cluster; -o names a folder of parts.")] = False
    ray_address: Annotated[
        str | None, _cluster(help="Run on an existing Ray cluster, e.g. 'auto'.", metavar="ADDRESS")
    ] = None
    workers: Annotated[str, _cluster(help=_WORKERS_HELP, metavar="N|A-B", show_default=True)] = "2"
    queue: Annotated[str | None, _cluster(help=_QUEUE_HELP, metavar="FOLDER")] = None
    status: Annotated[bool, _cluster("--status", help=_STATUS_HELP)] = False
    config: ConfigFile = None
    show_config: Annotated[bool, _inspection("--show-config", help=_SHOW_HELP)] = False
    format_: Annotated[ShownFormat, _inspection("--format", help=_FORMAT_HELP, show_default=True)] = "table"

    @property
    def input_name(self) -> str:
        """Raises: UsageError if there is none."""
        if self.prompts is None:
            raise UsageError("no prompts given", hint="pass a JSONL file, or - for stdin; see pagedcli generate --help")
        return self.prompts
