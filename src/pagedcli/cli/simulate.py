"""`pagedcli simulate`: the real scheduler on a trace, at many pool sizes, without a model."""

from pathlib import Path

import typer

from pagedcli.cli.options import PROMPT_KEYS, Flags, config_flags
from pagedcli.cli.picture import PictureOptions
from pagedcli.cli.simulate_flags import SimulateOptions
from pagedcli.config import load_config
from pagedcli.errors import UsageError
from pagedcli.files import TRACE, check_files

KEYS = (
    "engine.model", "engine.block_size", "engine.max_model_len", "engine.max_num_seqs",
    "engine.max_num_batched_tokens", "engine.chunked_prefill_size",
    "engine.preemption_policy", "engine.dtype",
    "engine.kv_cache_dtype", "engine.num_state_slots", "engine.checkpoints",
    "engine.trust_remote_code",
)  # fmt: skip


@config_flags(*KEYS, *PROMPT_KEYS)
def simulate(options: SimulateOptions, *, flags: Flags) -> None:
    """Simulate the KV cache on a trace: hit rates, waiting and preemptions at many pool sizes.

    Begins with the hit rate of the smallest pool, and the pool that finds as much as an unlimited cache. Runs the real
    scheduler and block manager without a model, on traces of other engines (--trace-format lists them), prompt files,
    recorded runs of pagedcli, and KV events of other engines. See docs/predict.md.

    \b
    Examples:
      pagedcli simulate conversation_trace.jsonl
      pagedcli simulate conversation_trace.jsonl --pool 1%,5%,4096 --all
      pagedcli simulate conversation_trace.jsonl --picture hits.svg
      pagedcli simulate conversation_trace.jsonl --no-schedule --warmup 0.5 --partial-blocks
      pagedcli simulate conversation_trace.jsonl --pool 10% --speed 1 --step-ms 25
      pagedcli simulate prompts.jsonl --pool 100,200 --calibrated
      pagedcli simulate prompts.jsonl --outputs out.jsonl --pool 100,200 --policy lru,next-use

    Exit codes: 0 all lines are good, 1 fatal error, 2 wrong usage or configuration, 3 some lines are bad.
    """  # fmt: skip
    if options.partial_blocks and not options.no_schedule:
        raise UsageError("--partial-blocks needs --no-schedule: the engine shares full blocks only")
    if options.warmup == 1:
        raise UsageError(f"--warmup {options.warmup} leaves no request to count", hint="for example --warmup 0.5")
    timed = options.calibrated or any(given is not None for given in (options.speed, options.step_ms))
    if options.no_schedule and timed:
        raise UsageError("--no-schedule simulates no time: --speed, --step-ms and --calibrated do not apply")
    reads = {f"the trace {name}": Path(name) for name in options.traces if name != "-"}
    drawing = PictureOptions.of_flags(options.picture, shape=options.shape, theme=options.theme)
    if drawing is not None and drawing.file.suffix == ".gif":
        raise UsageError("--picture draws one picture", hint="write .svg or .png")
    writes = {"--record": options.record, "--picture": options.picture}
    check_files(reads, writes, overwrite=options.overwrite, kinds={"--record": TRACE})
    from pagedcli.cli.simulate_job import run_simulation

    raise typer.Exit(run_simulation(load_config(options.config, flags), options, drawing))
