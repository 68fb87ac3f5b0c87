"""`pagedcli simulate`: the real scheduler on a trace, at many pool sizes, without a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcli.cli.options import ConfigFile, Flags, config_flags
from pagedcli.cli.prompt_scan import PROMPT_KEYS
from pagedcli.cli.tables import Format, FormatOption
from pagedcli.config import load_config
from pagedcli.errors import UsageError
from pagedcli.files import check_files

KEYS = (
    "engine.model", "engine.block_size", "engine.max_model_len", "engine.max_num_seqs",
    "engine.max_num_batched_tokens", "engine.chunked_prefill_size", "engine.preemption_policy", "engine.dtype",
    "engine.kv_cache_dtype", "engine.revision", "engine.trust_remote_code", "run.read_ahead",
)  # fmt: skip
_TRACE, _POOLS, _TIME, _OUTPUT = "Trace", "Pools", "Arrival and time", "Output"


def _option(*names: str, panel: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, show_default=False, **more)


Traces = Annotated[
    list[str],
    typer.Argument(metavar="TRACE...", help="Trace files (also .gz, .zst), a prompt file, or a recorded run."),
]
TraceFormat = Annotated[
    str | None,
    _option(
        "--trace-format",
        panel=_TRACE,
        metavar="NAME",
        help="dynamo, lmcache, bailian, mooncake, kvcache-simulator, prompts, pagedcli or kv-events."
        " Default: found by the keys of the first line.",
    ),
]
HashSize = Annotated[
    int | None,
    _option("--hash-size", panel=_TRACE, metavar="N", min=1, help="Tokens per hash. Default: the format's."),
]
OutputTokens = Annotated[
    str | None,
    _option(
        "--output-tokens", panel=_TRACE, metavar="N|A-B", help="Output length of every request, or a uniform range."
    ),
]
Outputs = Annotated[
    str | None,
    _option("--outputs", panel=_TRACE, metavar="OUT.jsonl", help="Output lengths (and tokens) of an earlier run."),
]
Pool = Annotated[
    str | None,
    _option(
        "--pool",
        panel=_POOLS,
        metavar="LIST",
        help="Pool sizes: blocks, % of the unique blocks, or bytes with -m, e.g. 5%,4096,8GiB."
        " Default: 5%,10%,25%,50%,100%.",
    ),
]
Policy = Annotated[
    str,
    _option("--policy", panel=_POOLS, metavar="LIST", help="Eviction policies: lru, fifo, lfu, prefix-lru, next-use."),
]
Warmup = Annotated[
    float, _option("--warmup", panel=_POOLS, metavar="X", min=0, max=1, help="Share of requests not counted.")
]
NoSchedule = Annotated[
    bool, _option("--no-schedule", panel=_POOLS, help="Leave out running requests, as LRU scripts do. Fast.")
]
PartialBlocks = Annotated[
    bool,
    _option(
        "--partial-blocks",
        panel=_POOLS,
        help="Let a prompt's last, partial block hit, too, as kvcache-simulator does (with --no-schedule).",
    ),
]

Speed = Annotated[
    float | None,
    _option(
        "--speed",
        panel=_TIME,
        metavar="X",
        min=1e-6,
        help="Requests arrive at the times of the trace, X times as fast. Default: all at once.",
    ),
]
StepMs = Annotated[
    float | None, _option("--step-ms", panel=_TIME, metavar="MS", min=0.001, help="Milliseconds of every step.")
]
GpuName = Annotated[
    str | None,
    _option(
        "--gpu",
        panel=_TIME,
        metavar="NAME",
        help="Time steps by this card's peak rates, with -m (a folder or config.json): a bound, not a prediction.",
    ),
]
OutputFile = Annotated[
    Path | None, _option("-o", "--output-file", panel=_OUTPUT, metavar="PAGE.html", help="Also write an HTML page.")
]
Record = Annotated[
    Path | None,
    _option(
        "--record",
        panel=_OUTPUT,
        metavar="TRACE.jsonl[.zst]",
        help="Record the run's events, for replay, explain and report (one pool and policy).",
    ),
]


@config_flags(*KEYS, *PROMPT_KEYS)
def simulate(
    traces: Traces,
    *,
    trace_format: TraceFormat = None,
    hash_size: HashSize = None,
    output_tokens: OutputTokens = None,
    outputs: Outputs = None,
    pool: Pool = None,
    policy: Policy = "lru",
    warmup: Warmup = 0.0,
    no_schedule: NoSchedule = False,
    partial_blocks: PartialBlocks = False,
    speed: Speed = None,
    step_ms: StepMs = None,
    gpu: GpuName = None,
    output_file: OutputFile = None,
    record: Record = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    config: ConfigFile = None,
    format_: FormatOption = Format.TABLE,
    flags: Flags,
) -> None:
    """Simulate the KV cache on a trace: hit rates, waiting and preemptions at many pool sizes.

    Runs the real scheduler and block manager without a model, on traces of Mooncake, Bailian, Dynamo, LMCache or
    kvcache-simulator, prompt files, recorded runs of pagedcli, and KV events of other engines. See docs/simulate.md.

    \b
    Examples:
      pagedcli simulate conversation_trace.jsonl
      pagedcli simulate conversation_trace.jsonl --pool 1%,5%,4096 -o page.html
      pagedcli simulate conversation_trace.jsonl --no-schedule --warmup 0.5 --partial-blocks
      pagedcli simulate conversation_trace.jsonl --pool 10% --speed 1 --gpu h200 -m ./Qwen3-8B/config.json
      pagedcli simulate prompts.jsonl --outputs out.jsonl --pool 100,200 --policy lru,next-use

    Exit codes: 0 all lines are good, 1 fatal error, 2 wrong usage or configuration, 3 some lines are bad.
    """  # fmt: skip
    if partial_blocks and not no_schedule:
        raise UsageError("--partial-blocks needs --no-schedule: the engine shares full blocks only")
    if no_schedule and (speed is not None or step_ms is not None or gpu is not None):
        raise UsageError("--no-schedule has no time: --speed, --step-ms and --gpu do not apply")
    reads = {f"the trace {name}": Path(name) for name in traces if name != "-"}
    check_files(reads, {"--record": record, "the page": output_file}, overwrite=overwrite)
    from pagedcli.cli.simulate_job import SimulateOptions, run_simulation

    options = SimulateOptions(
        traces=traces,
        trace_format=trace_format,
        hash_size=hash_size,
        output_tokens=output_tokens,
        outputs=outputs,
        pool=pool,
        policy=policy,
        warmup=warmup,
        scheduled=not no_schedule,
        partial_blocks=partial_blocks,
        speed=speed,
        step_ms=step_ms,
        gpu=gpu,
        record=record,
        page=output_file,
        format=format_,
    )
    raise typer.Exit(run_simulation(load_config(config, flags), options))
