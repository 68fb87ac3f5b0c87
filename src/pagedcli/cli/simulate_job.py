"""One call of `pagedcli simulate`, after its flags were read: input, pools, runs, tables and page."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pagedcli.batch.prompts import limits_without_pool, open_prompts
from pagedcli.cli.prompt_scan import prompt_model
from pagedcli.cli.simulate_flags import SimulateOptions
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.core.budget import ITEMSIZE
from pagedcli.core.groups import page_bytes, sized
from pagedcli.core.limits import STEP_TOKENS, Limits
from pagedcli.core.plan import Plan
from pagedcli.core.states import POLICIES
from pagedcli.errors import UsageError
from pagedcli.events import CacheGroup, Emit, Eviction
from pagedcli.files import whole_file
from pagedcli.models.footprint import footprint
from pagedcli.models.loading import weight_format
from pagedcli.models.spec import ModelSpec, layer_groups
from pagedcli.planning.cards import find_card
from pagedcli.planning.decide import decide
from pagedcli.planning.decision import LEAST_SLOTS, rank_spec
from pagedcli.planning.step_time import StepTime, load_step_time
from pagedcli.printable import plural
from pagedcli.show.tables import Format, Table, print_tables
from pagedcli.show.terminal import ProgressLine, say
from pagedcli.simulation import tables as tables
from pagedcli.simulation.advice import ADVICE_S, Advice, Subject, advise, in_order, recorded_plan, timed_of
from pagedcli.simulation.caches import accesses_of
from pagedcli.simulation.floors import StepFloor
from pagedcli.simulation.forecast import counts_of
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import RunResult, Schedule, plan_for
from pagedcli.simulation.sources import read_outputs, read_prompts, read_workload, set_output_lengths
from pagedcli.simulation.sweep import DEFAULT_POOLS, Sweep, SweepPoint, answers, parse_policies, parse_pools, points
from pagedcli.simulation.tables import render_page
from pagedcli.trace.files import TraceWriter
from pagedcli.trace.state import PoolState

EXIT_BAD_ROWS = 3
_LEAST_ADVICE_S = 1.0  # seconds of processor time for other settings; otherwise as much as the runs took


def run_simulation(loaded: LoadedConfig, options: SimulateOptions) -> int:
    """Simulate, and print the tables. Returns the exit code. Raises: PagedcliError."""
    policies = [] if options.policy is None else parse_policies(options.policy)
    workload, recorded = _read(loaded, options)
    policies = policies or parse_policies("lru" if recorded is None else recorded.started.eviction)
    block_size = _block_size(loaded, workload, recorded)
    decided = _decided(loaded, options) if workload.format == "prompts" else None
    model = _model(loaded, workload, decided)
    accesses = accesses_of(workload, block_size, partial_blocks=options.partial_blocks)
    plan = _plan(loaded, options, workload, recorded, decided, block_size)
    if model is not None:
        limits = _with_states(loaded, model, replace(plan.limits, groups=model.groups))
        plan = replace(plan, limits=limits, block_bytes=page_bytes(model.groups, block_size))
    if not plan.limits.has_states and "engine.checkpoints" in loaded.sources:
        raise UsageError(
            "--checkpoints needs recurrent state", hint="name a model that has it (-m), or --num-state-slots"
        )
    if plan.limits.has_states and options.no_schedule:
        raise UsageError("--no-schedule leaves out the slots of recurrent state", hint="leave out --no-schedule")
    block_bytes = plan.block_bytes or None
    sweep = Sweep(workload, accesses, warmup=options.warmup, windows=plan.limits.windows, chunk=plan.limits.chunk_size)
    pool = options.pool or (DEFAULT_POOLS if recorded is None else str(recorded.started.num_blocks))
    pools = parse_pools(pool, max(1, sweep.num_unique_blocks), block_bytes)
    schedule = _schedule(loaded, options, workload, model) if not options.no_schedule else None
    if options.record is not None and (len(pools) * len(policies) > 1 or schedule is None):
        raise UsageError("--record needs a scheduled run of one pool and policy", hint="for example --pool 4096")
    started_s = time.thread_time()
    found = _run(sweep, plan, pools, policies, schedule, options.record)
    took_s = time.thread_time() - started_s
    sentences = answers(sweep, found, block_bytes)
    shown = [
        tables.trace_table(workload, sweep),
        tables.pool_table(found, sweep, schedule, block_bytes),
        tables.miss_table(found),
        *_checkpoint_tables(sweep, plan, pools[-1], schedule),
        tables.answer_table(sentences, options.format_),
    ]
    advice = None
    if schedule is not None and found[0].run is not None:
        subject = _subject(loaded, options, workload, recorded, schedule, found)
        advice = _advice(subject, found[0].run, took_s)
        shown.append(tables.advice_table(advice, subject.limits))
    if options.output_file is not None:
        on_page = [table for table in shown if table.key != "answers"]  # those are a list there
        _write_page(options.output_file, render_page(options.traces, sweep, found, sentences, on_page, block_bytes))
    facts = tables.facts(sweep, block_size, block_bytes)
    if options.format_ is Format.JSON:
        shown = [table for table in shown if table.key != "answers"]
        facts |= {"answers": sentences, **({} if advice is None else advice.document())}
    print_tables(shown, options.format_, facts=facts)
    return EXIT_BAD_ROWS if workload.num_bad else 0


def _write_page(path: Path, page: bytes) -> None:
    try:
        with whole_file(path, overwrite=True) as file:  # checked before
            file.write(page)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    say(f"{path}: open it in a browser")


# ---------------------------------------------------------------------- input


def _read(loaded: LoadedConfig, options: SimulateOptions) -> tuple[Workload, PoolState | None]:
    outputs = None if options.outputs is None else read_outputs(options.outputs)

    def prompts(name: str) -> Workload:
        folder, spec = prompt_model(loaded, None)
        engine = loaded.config.engine
        limits = limits_without_pool(engine, spec)
        return read_prompts(name, open_prompts(loaded, name, folder, limits), outputs)

    workload, recorded = read_workload(
        options.traces, prompts, format_name=options.trace_format, hash_size=options.hash_size
    )
    if loaded.config.run.limit is not None:
        workload.requests = workload.requests[: loaded.config.run.limit]
    if options.output_tokens is not None:
        set_output_lengths(workload, options.output_tokens)
    elif any(request.num_output_tokens is None for request in workload.requests):
        workload.notes.append("this format has no output lengths: one token each (see --output-tokens)")
    return workload, recorded


def _block_size(loaded: LoadedConfig, workload: Workload, recorded: PoolState | None) -> int:
    """As given; otherwise that of the recorded run or of the trace's hashes, or the default."""
    if "engine.block_size" in loaded.sources:
        return loaded.config.engine.block_size
    if recorded is not None:
        return recorded.block_size
    return workload.hash_size or loaded.config.engine.block_size


@dataclass(frozen=True, slots=True)
class _Model:
    """What a model's config.json says about its cache."""

    spec: ModelSpec  # sizes of one rank's part
    groups: tuple[CacheGroup, ...]  # groups of layers that share blocks
    kv_dtype: str


def _model(loaded: LoadedConfig, workload: Workload, decided: Plan | None) -> _Model | None:
    """The model, if there is one that pagedcli reads: of traces only the one named. `decided`: the engine of generate,
    if that is simulated."""
    if workload.format != "prompts" and "engine.model" not in loaded.sources:
        return None
    _, spec = prompt_model(loaded, None)
    if spec is None or spec.is_fallback:
        return None
    kv_dtype = _kv_dtype(loaded) if decided is None else decided.kv_dtype
    own = rank_spec(loaded.config.engine, spec)
    groups = sized(layer_groups(own.attention_layers), heads=(own.num_kv_heads, own.head_dim), kv_dtype=kv_dtype)
    return _Model(own, groups, kv_dtype)


def _with_states(loaded: LoadedConfig, model: _Model, limits: Limits) -> Limits:
    """With the slots of a model with recurrent state: as no memory limits them, as many as an engine takes at most."""
    state_bytes = model.spec.state_bytes(ITEMSIZE[model.kv_dtype])
    if not state_bytes:
        return limits
    num_slots = loaded.config.engine.num_state_slots or max(LEAST_SLOTS, 2 * limits.max_num_seqs)
    return replace(limits, state_bytes=state_bytes, num_state_slots=num_slots)


def _checkpoint_tables(sweep: Sweep, plan: Plan, num_blocks: int, schedule: Schedule | None) -> list[Table]:
    """The hit rate of each checkpoint policy in a pool, of an engine with recurrent state."""
    if not plan.limits.has_states or schedule is None:
        return []
    names = dict.fromkeys([plan.limits.checkpoints, *POLICIES])
    changes = {name: replace(plan.limits, num_blocks=num_blocks, checkpoints=name) for name in names}
    points = {name: sweep.scheduled(replace(plan, limits=limits), schedule) for name, limits in changes.items()}
    return [tables.checkpoint_table(points, sweep, plan.limits)]


def _kv_dtype(loaded: LoadedConfig) -> str:
    """The dtype of the KV cache; 16 bits unless the configuration says otherwise."""
    engine = loaded.config.engine
    if engine.kv_cache_dtype != "auto":
        return {"fp8": "float8_e4m3fn"}.get(engine.kv_cache_dtype, engine.kv_cache_dtype)
    return "bfloat16" if engine.dtype == "auto" else engine.dtype


# ---------------------------------------------------------------------- the engine


def _plan(
    loaded: LoadedConfig,
    options: SimulateOptions,
    workload: Workload,
    recorded: PoolState | None,
    decided: Plan | None,
    block_size: int,
) -> Plan:
    """The simulated engine. What is not configured is as in the recorded run, or for a prompt file or a named model as
    generate decides on this machine or on the named card; for traces of others it is assumed, with a note."""
    if recorded is not None:
        return _recorded_plan(loaded, workload, recorded, block_size)
    engine = loaded.config.engine
    max_num_seqs, step_tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    if decided is None and step_tokens is None and "engine.model" in loaded.sources:
        decided = _decided(loaded, options)
    if step_tokens is None and decided is not None:
        step_tokens = decided.limits.max_num_batched_tokens
    least = engine.min_prefill_tokens
    if least is None:
        least = 0 if decided is None else decided.limits.min_prefill_tokens
    if step_tokens is None:
        step_tokens = max(STEP_TOKENS, max_num_seqs)
        if not options.no_schedule:
            workload.notes.append(
                f"assumed: up to {plural(max_num_seqs, 'sequence')} and {plural(step_tokens, 'token')} per step"
                " (see --max-num-seqs, --max-num-batched-tokens)"
            )
    plan = plan_for(
        workload,
        num_blocks=1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        chunked_prefill_size=engine.chunked_prefill_size,
        min_prefill_tokens=least,
        preemption_policy=engine.preemption_policy,
        num_state_slots=engine.num_state_slots,
        checkpoints=engine.checkpoints,
    )
    return plan if decided is None else replace(plan, device=decided.device)


_LIMIT_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "min_prefill_tokens", "preemption_policy",
    "num_state_slots", "checkpoints",
)  # fmt: skip


def _recorded_plan(loaded: LoadedConfig, workload: Workload, recorded: PoolState, block_size: int) -> Plan:
    """The engine of a recorded run, but for what is given."""
    plan = recorded_plan(recorded)
    engine, before = loaded.config.engine, plan.limits
    given = {name: getattr(engine, name) for name in _LIMIT_KEYS if f"engine.{name}" in loaded.sources}
    longest = max(before.max_model_len, workload.longest)
    limits = replace(before, block_size=block_size, max_model_len=longest, **given)
    return replace(plan, limits=limits, block_bytes=plan.block_bytes * block_size // before.block_size)


def _decided(loaded: LoadedConfig, options: SimulateOptions) -> Plan | None:
    """The engine that `generate` starts on this machine or the named card. None for a tokenizer without a model."""
    from pagedcli.planning.machine import described_gpu, this_machine

    _, spec = prompt_model(loaded, None)
    if spec is None:
        return None
    card = None if options.gpu is None else find_card(options.gpu)
    machine = this_machine() if card is None else described_gpu(card.total_bytes, capability=card.capability)
    return decide(_without_slots(loaded.config.engine), spec, machine).plan


def _without_slots(engine: EngineConfig) -> EngineConfig:
    """The engine of the model here: slots are for the simulated one, whatever the model."""
    return msgspec.structs.replace(engine, num_state_slots=None, checkpoints=EngineConfig().checkpoints)


def _schedule(loaded: LoadedConfig, options: SimulateOptions, workload: Workload, model: _Model | None) -> Schedule:
    if sum([options.gpu is not None, options.step_ms is not None, options.calibrated]) > 1:
        raise UsageError("--gpu, --step-ms and --calibrated all set the time of a step", hint="use one of them")
    if options.speed is not None:
        if not workload.has_times:
            raise UsageError("--speed: this trace has no times", hint="without --speed all requests arrive at once")
        if options.gpu is None and options.step_ms is None and not options.calibrated:
            raise UsageError(
                "--speed needs the time of a step", hint="--step-ms 20, --calibrated, or --gpu h200 -m MODEL"
            )
    read_ahead = loaded.config.run.read_ahead
    if options.step_ms is not None:
        step_ns = round(options.step_ms * 1e6)
        return Schedule(options.speed, lambda work, scheduler: step_ns, read_ahead)
    if options.calibrated:
        return Schedule(options.speed, _calibrated(loaded, workload), read_ahead)
    if options.gpu is None:
        return Schedule(options.speed, None, read_ahead)
    if model is None:
        raise UsageError("--gpu needs a model whose config.json pagedcli reads: name it with -m")
    weights = footprint(model.spec, weight_format(None, model.spec), "triton", ITEMSIZE[_weight_dtype(loaded)])
    workload.notes.append(f"time: a forecast from the data sheet of {options.gpu}; real steps take at least as long")
    floor = StepFloor.of(model.spec, weights, find_card(options.gpu).roofline, kv_dtype=model.kv_dtype)
    return Schedule(options.speed, floor, read_ahead)


def _calibrated(loaded: LoadedConfig, workload: Workload) -> StepTime:
    """The time of steps as `plan` has measured it here. Raises: UsageError if it has not."""
    found = _timed_here(loaded)
    if found is None:
        model = loaded.config.engine.model
        raise UsageError(f"--calibrated: {model} has no calibration on this machine", hint="pagedcli plan makes one")
    workload.notes.append("time: steps as measured on this machine, without what rows take outside of steps")
    return found


def _timed_here(loaded: LoadedConfig) -> StepTime | None:
    """The time of the model's steps as `plan` has measured it on this machine, if it has."""
    from pagedcli.planning.machine import this_machine

    engine = _without_slots(loaded.config.engine)
    _, spec = prompt_model(loaded, None)
    return None if spec is None else load_step_time(decide(engine, spec, this_machine()).time_key)


def _subject(
    loaded: LoadedConfig,
    options: SimulateOptions,
    workload: Workload,
    recorded: PoolState | None,
    schedule: Schedule,
    points: list[SweepPoint],
) -> Subject:
    """The run that advice is about: with the smallest pool and the first policy. Without arrivals it is judged by time
    where steps have been timed, as other commands do."""
    run = points[0].run
    assert run is not None, "it has a schedule"
    step_time: StepTime | None = None
    if schedule.speed is None and options.gpu is None and options.step_ms is None:
        if recorded is not None:
            step_time = timed_of(recorded)
        elif workload.format == "prompts" or "engine.model" in loaded.sources:
            step_time = _timed_here(loaded)
    return Subject(
        workload,
        run.plan,
        may_reorder=workload.format == "prompts" or (recorded is not None and in_order(workload)),
        read_ahead=schedule.read_ahead,
        step_time=step_time,
        arrivals=None if schedule.speed is None else schedule,
        largest_pool=points[-1].num_blocks,
    )


def _advice(subject: Subject, run: RunResult, took_s: float) -> Advice:
    """What to change about a run. For runs of our own there is as much time as in other commands, so that the answer is
    theirs; for traces as much as the sweep `took_s`."""
    budget_s = ADVICE_S if subject.workload.format in ("prompts", "pagedcli") else max(_LEAST_ADVICE_S, took_s)
    return advise(subject, base=counts_of(run) if subject.step_time is None else None, budget_s=budget_s)


def _weight_dtype(loaded: LoadedConfig) -> str:
    return "bfloat16" if loaded.config.engine.dtype == "auto" else loaded.config.engine.dtype


# ---------------------------------------------------------------------- runs


def _run(
    sweep: Sweep, plan: Plan, pools: list[int], policies: list[Eviction], schedule: Schedule | None, record: Path | None
) -> list[SweepPoint]:
    progress, num_requests = ProgressLine(line_every_s=5.0), len(sweep.workload.requests)

    def observe(num_blocks: int, policy: str, num_done: int) -> None:
        progress.show(
            lambda _: f"pool of {plural(num_blocks, 'block')}, {policy}: {num_done:,}/{plural(num_requests, 'request')}"
        )

    with _recording(record) as emit:
        found = list(points(sweep, plan, pools, policies, schedule, emit=emit, observe=observe))
    progress.close()
    return found


@contextmanager
def _recording(path: Path | None) -> Iterator[Emit | None]:
    if path is None:
        yield None
        return
    hint = "name a file that can be written, or leave out --record"
    with TraceWriter(path, overwrite=True, unwritten_hint=hint) as writer:
        yield writer
