"""The flags of `pagedcli simulate`, apart from those of the configuration."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pagedcli.cli.options import ConfigFile, FormatOption, option
from pagedcli.cli.picture import ShapeOption, ThemeOption
from pagedcli.core.eviction import POLICIES
from pagedcli.show.tables import Format
from pagedcli.simulation.formats import format_names

_trace, _pools, _time, _output = (
    partial(option, panel=panel) for panel in ("Trace", "Pools", "Arrival and time", "Output")
)
_FORMATS_HELP = f"{', '.join(format_names())}. Default: found by the keys of the first line."
_POOL_HELP = (
    "Pool sizes: blocks, % of the unique blocks, or bytes with -m, e.g. 5%,4096,8GiB. Default: 5%,10%,25%,50%,100%,"
    " without those too small for the longest request."
)
_PARTIAL_HELP = "Count hits on a prompt's last, partial block, as kvcache-simulator does (with --no-schedule)."
_SPEED_HELP = "Replay the arrival times of the trace X times as fast. Default: all arrive at once."
_CALIBRATED_HELP = "Use the step times that `plan` measured for the model (-m) on this machine."
_PICTURE_HELP = "Also draw the hit rate by pool size, as .svg or .png."
_ALL_HELP = "Also show the trace, the hit rate at every pool size, and the settings tried."
_RECORD_HELP = "Record the run's events, for trace and explain (one pool and policy)."
_POLICIES_HELP = f"Eviction policies: {', '.join(POLICIES)}. Default: lru, or that of the recorded run."


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The flags of `simulate` itself."""

    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="Trace files (also .gz, .zst), a prompt file, or a recorded run."),
    ]
    trace_format: Annotated[str | None, _trace("--trace-format", help=_FORMATS_HELP, metavar="NAME")] = None
    hash_size: Annotated[int | None, _trace(help="Tokens per hash. Default: the format's.", metavar="N", min=1)] = None
    output_tokens: Annotated[
        str | None, _trace(help="Output length of every request, or a range to draw from.", metavar="N|A-B")
    ] = None
    outputs: Annotated[
        str | None, _trace(help="Take output lengths (and tokens) from an earlier run.", metavar="OUT.jsonl")
    ] = None
    pool: Annotated[str | None, _pools(help=_POOL_HELP, metavar="LIST")] = None
    policy: Annotated[str | None, _pools(help=_POLICIES_HELP, metavar="LIST")] = None
    warmup: Annotated[
        float, _pools(help="Share of requests at the start that fill the cache uncounted.", metavar="X", min=0, max=1)
    ] = 0.0
    no_schedule: Annotated[
        bool, _pools("--no-schedule", help="Skip the scheduler: one request at a time, as in LRU scripts. Fast.")
    ] = False
    partial_blocks: Annotated[bool, _pools("--partial-blocks", help=_PARTIAL_HELP)] = False
    speed: Annotated[float | None, _time(help=_SPEED_HELP, metavar="X", min=1e-6, max=1e9)] = None
    step_ms: Annotated[
        float | None, _time(help="Duration of every step in milliseconds.", metavar="MS", min=0.001, max=1e6)
    ] = None
    calibrated: Annotated[bool, _time("--calibrated", help=_CALIBRATED_HELP)] = False
    all_: Annotated[bool, _output("--all", help=_ALL_HELP)] = False
    picture: Annotated[Path | None, _output("--picture", help=_PICTURE_HELP, metavar="FILE")] = None
    shape: ShapeOption = None
    theme: ThemeOption = None
    record: Annotated[Path | None, _output(help=_RECORD_HELP, metavar="TRACE.jsonl[.zst]")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False
    config: ConfigFile = None
    format_: FormatOption = Format.TABLE
