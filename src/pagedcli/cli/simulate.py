"""`pagedcli simulate`: the real scheduler on a trace, at many pool sizes, without a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedcli.cli.options import ConfigFile, Flags, config_flags
from pagedcli.cli.prompt_scan import PROMPT_KEYS
from pagedcli.cli.tables import Format, FormatOption, print_tables
from pagedcli.config import LoadedConfig, load_config
from pagedcli.errors import UsageError
from pagedcli.files import check_files

if TYPE_CHECKING:
    from pagedcli.events import EngineStarted
    from pagedcli.simulation.requests import Workload

KEYS = (
    "engine.model", "engine.block_size", "engine.max_model_len", "engine.max_num_seqs",
    "engine.max_num_batched_tokens", "engine.chunked_prefill_size", "engine.preemption_policy",
)  # fmt: skip
EXIT_BAD_ROWS = 3
_STEP_TOKENS = 2048
_TRACE, _POOLS, _TIME = "Trace", "Pools", "Arrival and time"


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

Record = Annotated[
    Path | None,
    _option("--record", panel=_POOLS, metavar="TRACE.jsonl[.zst]", help="Record the events of the run (one pool)."),
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
    warmup: Warmup = 0.0,
    no_schedule: NoSchedule = False,
    partial_blocks: PartialBlocks = False,
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
      pagedcli simulate conversation_trace.jsonl --pool 1%,5%,4096 --format json
      pagedcli simulate conversation_trace.jsonl --no-schedule --warmup 0.5 --partial-blocks
      pagedcli simulate prompts.jsonl --outputs out.jsonl --pool 100,200

    Exit codes: 0 all lines are good, 1 no line is, 2 wrong usage or configuration, 3 some lines are bad.
    """  # fmt: skip
    if partial_blocks and not no_schedule:
        raise UsageError("--partial-blocks needs --no-schedule: the engine shares full blocks only")
    check_files({"the trace": Path(traces[0])}, {"--record": record}, overwrite=overwrite)
    loaded = load_config(config, flags)
    workload, recorded = _read(loaded, traces, trace_format, hash_size, outputs)
    if output_tokens is not None:
        from pagedcli.simulation.prompts import set_output_lengths

        set_output_lengths(workload, output_tokens)
    raise typer.Exit(
        _simulate(
            loaded,
            workload,
            recorded,
            pool,
            warmup=warmup,
            scheduled=not no_schedule,
            partial_blocks=partial_blocks,
            record=record,
            format_=format_,
        )
    )


def _read(
    loaded: LoadedConfig, traces: list[str], trace_format: str | None, hash_size: int | None, outputs: str | None
) -> "tuple[Workload, EngineStarted | None]":
    from pagedcli.simulation.prompts import read_outputs
    from pagedcli.simulation.sources import read_workload

    earlier = None if outputs is None else read_outputs(outputs)

    def read_prompts(name: str) -> "Workload":
        from pagedcli.batch.columns import Columns
        from pagedcli.batch.job import batch_options
        from pagedcli.batch.tokenizer import Tokenizer
        from pagedcli.cli.prompt_scan import prompt_model
        from pagedcli.engine.admission import AdmissionLimits
        from pagedcli.engine.decide import resolve_max_model_len
        from pagedcli.simulation import prompts
        from pagedcli.simulation.requests import MAX_TOKENS

        folder, spec = prompt_model(loaded, None)
        columns = Columns.of(loaded.config.run)
        max_model_len = MAX_TOKENS if spec is None else resolve_max_model_len(loaded.config.engine, spec)
        limits = AdmissionLimits(
            max_model_len, loaded.config.engine.block_size, None, None if spec is None else spec.vocab_size
        )
        tokenizer = Tokenizer(folder, chat_template=loaded.config.run.chat_template)
        return prompts.read_prompts(name, tokenizer, batch_options(loaded, columns), limits, earlier)

    return read_workload(traces, read_prompts, format_name=trace_format, hash_size=hash_size)


def _simulate(
    loaded: LoadedConfig,
    workload: "Workload",
    recorded: "EngineStarted | None",
    pool: str | None,
    *,
    warmup: float,
    scheduled: bool,
    partial_blocks: bool,
    record: Path | None,
    format_: Format,
) -> int:
    from dataclasses import replace

    from pagedcli.cli import simulate_tables as tables
    from pagedcli.inspection.trace_writer import TraceWriter
    from pagedcli.simulation.accesses import accesses_of
    from pagedcli.simulation.run import Schedule, plan_for
    from pagedcli.simulation.sweep import DEFAULT_POOLS, Sweep, parse_pools, points

    engine = loaded.config.engine
    block_size = _block_size(loaded, workload, recorded)
    sweep = Sweep(workload, accesses_of(workload, block_size, partial_blocks=partial_blocks), warmup=warmup)
    if pool is None and recorded is not None:
        pool = str(recorded.num_blocks)
    pools = parse_pools(pool or DEFAULT_POOLS, sweep.accesses.num_unique, None, block_size)
    plan = plan_for(
        workload,
        num_blocks=pools[0],
        block_size=block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens or max(_STEP_TOKENS, engine.max_num_seqs),
    )
    plan = replace(plan, chunked_prefill_size=engine.chunked_prefill_size, preemption_policy=engine.preemption_policy)
    schedule = Schedule() if scheduled else None
    if record is not None:
        if len(pools) > 1 or schedule is None:
            raise UsageError("--record needs one pool and a scheduled run", hint="for example --pool 4096")
        with TraceWriter(record, overwrite=True) as writer:
            found = points(sweep, plan, pools, ["lru"], schedule, emit=writer)
    else:
        found = points(sweep, plan, pools, ["lru"], schedule)
    print_tables(
        [tables.trace_table(workload, sweep), tables.pool_table(found, sweep), tables.miss_table(found)],
        format_,
        facts=tables.facts(sweep, block_size),
    )
    return EXIT_BAD_ROWS if workload.num_bad else 0


def _block_size(loaded: LoadedConfig, workload: "Workload", recorded: "EngineStarted | None") -> int:
    """What the user says; otherwise that of the recorded run, of the trace's hashes, or the default."""
    if "engine.block_size" in loaded.sources:
        return loaded.config.engine.block_size
    if recorded is not None:
        return recorded.block_size
    return workload.hash_size or loaded.config.engine.block_size
