"""One call of `pagedcli simulate`, after its flags were read: input, pools, runs, tables and page."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagedcli.answers.cures import CURES_S, Cure
from pagedcli.answers.survey import prompt_model
from pagedcli.batch.prompts import limits_without_pool, open_prompts
from pagedcli.cli.cures import find_cures, print_answer
from pagedcli.cli.decoder import recorded_tokenizer
from pagedcli.cli.picture import PictureOptions, write_file
from pagedcli.cli.simulate_flags import SimulateOptions
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.core.checkpoints import POLICIES
from pagedcli.core.groups import page_bytes
from pagedcli.core.limits import STEP_TOKENS, Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.events import Emit, Eviction
from pagedcli.planning.cards import find_card
from pagedcli.planning.decide import decide
from pagedcli.planning.decision import LEAST_SLOTS, Decision
from pagedcli.planning.floors import StepFloor
from pagedcli.planning.step_time import StepTime, load_step_time
from pagedcli.printable import plural
from pagedcli.show.pages import write_page
from pagedcli.show.tables import Format, Table
from pagedcli.show.terminal import ProgressLine
from pagedcli.simulation import tables
from pagedcli.simulation.caches import accesses_of
from pagedcli.simulation.forecast import counts_of
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import VOCAB_SIZE, RunResult, Schedule
from pagedcli.simulation.settings import Subject, in_order, recorded_plan, timed_of
from pagedcli.simulation.sources import read_outputs, read_prompts, read_workload, set_output_lengths
from pagedcli.simulation.sweep import (
    DEFAULT_POOLS,
    Sweep,
    SweepPoint,
    answers,
    enough_point,
    parse_policies,
    parse_pools,
    points,
    pool_verdict,
)
from pagedcli.trace.files import TraceWriter
from pagedcli.trace.state import PoolState

if TYPE_CHECKING:
    from pagedcli.batch.tokenizer import Tokenizer

_LEAST_CURES_S = 1.0  # seconds of processor time for other settings; otherwise as much as the runs took


def run_simulation(loaded: LoadedConfig, options: SimulateOptions, drawing: PictureOptions | None = None) -> int:
    """Simulate, and print the tables and draw. Returns the exit code. Raises: PagedcliError."""
    policies = [] if options.policy is None else parse_policies(options.policy)
    workload, recorded, tokenizer = _read(loaded, options)
    policies = policies or parse_policies("lru" if recorded is None else recorded.started.eviction)
    is_ours = workload.format == "prompts"
    decision = _decided(loaded, options) if is_ours or "engine.model" in loaded.sources else None
    plan = _plan(loaded, options, workload, recorded, decision)
    if not plan.limits.has_states and "engine.checkpoints" in loaded.sources:
        raise UsageError(
            "--checkpoints needs recurrent state", hint="name a model that has it (-m), or --num-state-slots"
        )
    if plan.limits.has_states and options.no_schedule:
        raise UsageError("--no-schedule leaves out the slots of recurrent state", hint="leave out --no-schedule")
    block_size, block_bytes = plan.limits.block_size, plan.block_bytes or None
    accesses = accesses_of(workload, block_size, partial_blocks=options.partial_blocks)
    sweep = Sweep(workload, accesses, warmup=options.warmup, windows=plan.limits.windows, chunk=plan.limits.chunk_size)
    pool = options.pool or (DEFAULT_POOLS if recorded is None else str(recorded.started.num_blocks))
    pools = parse_pools(pool, max(1, sweep.num_unique_blocks), block_bytes)
    if options.pool is None and recorded is None and not options.no_schedule:  # smaller ones would refuse requests
        least = plan.limits.tables.most_blocks(workload.longest, plan.limits.chunk_size)
        pools = sorted({max(least, num_blocks) for num_blocks in pools})
    step_time = None if options.gpu is not None else _step_time(recorded, decision)
    schedule = None if options.no_schedule else _schedule(loaded, options, workload, decision, step_time)
    if options.record is not None and (len(pools) * len(policies) > 1 or schedule is None):
        raise UsageError("--record needs a scheduled run of one pool and policy", hint="for example --pool 4096")
    started_s = time.thread_time()
    found = _run(sweep, plan, pools, policies, schedule, options.record)
    took_s = time.thread_time() - started_s
    sentences = answers(sweep, found, block_bytes)
    shown = [
        tables.trace_table(workload, sweep),
        tables.pool_table(found, sweep, schedule, block_bytes),
        *(_curve(sweep, pools, block_bytes) if options.format_ is Format.TABLE else []),
        tables.miss_table(found),
        *_checkpoint_tables(sweep, plan, pools[-1], schedule),
        tables.answer_table(sentences, options.format_),
    ]
    cures: list[Cure] = []
    if schedule is not None and found[0].run is not None:
        # Cures are about the smallest pool and the first policy. Without arrivals it is judged by time where steps
        # have been timed, as other commands do.
        is_timed = schedule.speed is None and options.step_ms is None
        subject = Subject(
            workload,
            found[0].run.plan,
            may_reorder=is_ours or (recorded is not None and in_order(workload)),
            read_ahead=schedule.read_ahead,
            step_time=step_time if is_timed else None,
            arrivals=None if schedule.speed is None else schedule,
            largest_pool=found[-1].num_blocks,
        )
        cures = _cures(subject, found[0].run, tokenizer, took_s)
    if options.output_file is not None:
        on_page = [table for table in shown if table.key not in ("answers", "curve")]  # a list and a chart there
        page = tables.render_page(options.traces, sweep, found, sentences, on_page, block_bytes)
        write_page(options.output_file, page)
    if drawing is not None:
        write_file(drawing, iter([tables.hit_rate_picture(sweep, found, block_bytes, drawing.shape)]), overwrite=True)
    facts = tables.facts(sweep, block_size, block_bytes)
    if options.format_ is Format.JSON:
        shown = [table for table in shown if table.key != "answers"]
        facts |= {"answers": sentences}
    answer = [pool_verdict(sweep, found, enough_point(sweep, plan, found, schedule), block_bytes)]
    print_answer(answer, cures, shown, options.format_, facts)
    return EXIT_BAD_ROWS if workload.num_bad else 0


# ---------------------------------------------------------------------- input


def _read(loaded: LoadedConfig, options: SimulateOptions) -> "tuple[Workload, PoolState | None, Tokenizer | None]":
    """The requests, for a recorded run the pool at its end, and the tokenizer of their tokens, where they have any."""
    outputs = None if options.outputs is None else read_outputs(options.outputs)
    tokenizer: Tokenizer | None = None

    def prompts(name: str) -> Workload:
        nonlocal tokenizer
        folder, spec = prompt_model(loaded, None)
        engine = loaded.config.engine
        opened = open_prompts(loaded, name, folder, limits_without_pool(engine, spec))
        tokenizer = opened.tokenizer
        return read_prompts(name, opened, outputs)

    workload, recorded = read_workload(
        options.traces, prompts, format_name=options.trace_format, hash_size=options.hash_size
    )
    if recorded is not None and workload.hash_size is None:
        tokenizer = recorded_tokenizer(Path(options.traces[0]), None)
    if loaded.config.run.limit is not None:
        workload.requests = workload.requests[: loaded.config.run.limit]
    if options.output_tokens is not None:
        set_output_lengths(workload, options.output_tokens)
    elif any(request.num_output_tokens is None for request in workload.requests):
        workload.notes.append("this format has no output lengths: one token each (see --output-tokens)")
    return workload, recorded, tokenizer


def _curve(sweep: Sweep, pools: list[int], block_bytes: int | None) -> list[Table]:
    """The hit rate of pools of any size. With windows there is no curve in one pass."""
    return [] if sweep.has_windows else tables.curve_tables(sweep.curve, pools, sweep.num_unique_blocks, block_bytes)


def _checkpoint_tables(sweep: Sweep, plan: Plan, num_blocks: int, schedule: Schedule | None) -> list[Table]:
    """The hit rate of each checkpoint policy in a pool, of an engine with recurrent state."""
    if not plan.limits.has_states or schedule is None:
        return []
    names = dict.fromkeys([plan.limits.checkpoints, *POLICIES])
    changes = {name: replace(plan.limits, num_blocks=num_blocks, checkpoints=name) for name in names}
    points = {name: sweep.scheduled(replace(plan, limits=limits), schedule) for name, limits in changes.items()}
    return [tables.checkpoint_table(points, sweep, plan.limits)]


# ---------------------------------------------------------------------- the engine


_LIMIT_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "min_prefill_tokens", "preemption_policy",
    "num_state_slots", "checkpoints",
)  # fmt: skip


def _decided(loaded: LoadedConfig, options: SimulateOptions) -> Decision | None:
    """The engine that `generate` starts on this machine or the named card. None for a tokenizer without a model."""
    from pagedcli.planning.machine import described_gpu, this_machine

    _, spec = prompt_model(loaded, None)
    if spec is None:
        return None
    card = None if options.gpu is None else find_card(options.gpu)
    machine = this_machine() if card is None else described_gpu(card.total_bytes, capability=card.capability)
    defaults = EngineConfig()  # slots are for the simulated engine, whatever the model
    without_slots = {"num_state_slots": defaults.num_state_slots, "checkpoints": defaults.checkpoints}
    return decide(msgspec.structs.replace(loaded.config.engine, **without_slots), spec, machine)


def _plan(
    loaded: LoadedConfig,
    options: SimulateOptions,
    workload: Workload,
    recorded: PoolState | None,
    decision: Decision | None,
) -> Plan:
    """The simulated engine: that of the recorded run, or that of the decision, with what is given changed; for traces
    of others without a model it is assumed, with a note. The layers are those of the decision, where there is one."""
    engine, sources, longest = loaded.config.engine, loaded.sources, workload.longest
    changes = {name: getattr(engine, name) for name in _LIMIT_KEYS if f"engine.{name}" in sources}
    if recorded is not None:
        plan = recorded_plan(recorded)
        block_size, longest = recorded.block_size, max(longest, plan.limits.max_model_len)
    else:
        step_tokens = max(STEP_TOKENS, engine.max_num_seqs)
        assumed = {"max_num_batched_tokens": step_tokens, "min_prefill_tokens": 0}
        limits = Limits.of(engine, **assumed) if decision is None else decision.plan.limits
        plan = Plan(limits=limits, model="simulation", device="none" if decision is None else decision.plan.device)
        block_size = workload.hash_size or engine.block_size
        if decision is None and "max_num_batched_tokens" not in changes and not options.no_schedule:
            workload.notes.append(
                f"assumed: up to {plural(engine.max_num_seqs, 'sequence')} and {plural(step_tokens, 'token')} per step"
                " (see --max-num-seqs, --max-num-batched-tokens)"
            )
        changes["vocab_size"] = VOCAB_SIZE
    if "engine.block_size" in sources:
        block_size = engine.block_size
    block_bytes = plan.block_bytes * block_size // plan.limits.block_size
    if decision is not None:
        layers = decision.plan.limits
        block_bytes = page_bytes(layers.groups, block_size)
        changes |= {"groups": layers.groups, "state_bytes": layers.state_bytes}
        if layers.has_states:  # no memory limits them: as many as an engine takes at most
            num_seqs = changes.get("max_num_seqs", plan.limits.max_num_seqs)
            changes["num_state_slots"] = engine.num_state_slots or max(LEAST_SLOTS, 2 * num_seqs)
    limits = replace(plan.limits, block_size=block_size, max_model_len=longest, **changes)
    return replace(plan, limits=limits, block_bytes=block_bytes)


def _step_time(recorded: PoolState | None, decision: Decision | None) -> StepTime | None:
    """The time of the engine's steps on this machine, if it has been calibrated."""
    if decision is not None:
        return load_step_time(decision.time_key)
    return None if recorded is None else timed_of(recorded)


def _schedule(
    loaded: LoadedConfig,
    options: SimulateOptions,
    workload: Workload,
    decision: Decision | None,
    step_time: StepTime | None,
) -> Schedule:
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
        if step_time is None:
            model = loaded.config.engine.model if decision is not None else "the trace's model"
            hint = "pagedcli plan makes one" if decision is not None else "name the model with -m"
            raise UsageError(f"--calibrated: {model} has no calibration on this machine", hint=hint)
        workload.notes.append("time: steps as measured on this machine, without what rows take outside of steps")
        return Schedule(options.speed, step_time, read_ahead)
    if options.gpu is None:
        return Schedule(options.speed, None, read_ahead)
    if decision is None or decision.spec.is_fallback:
        raise UsageError("--gpu needs a model whose config.json pagedcli reads: name it with -m")
    workload.notes.append(f"time: a forecast from the data sheet of {options.gpu}; real steps take at least as long")
    roofline, kv_dtype = find_card(options.gpu).roofline, decision.plan.kv_dtype
    floor = StepFloor.of(decision.own, decision.footprint, roofline, kv_dtype=kv_dtype)
    return Schedule(options.speed, floor, read_ahead)


def _cures(subject: Subject, run: RunResult, tokenizer: "Tokenizer | None", took_s: float) -> list[Cure]:
    """What to change about a run. For runs of our own there is as much time as in other commands, so that the answer is
    theirs; for traces as much as the sweep `took_s`."""
    budget_s = CURES_S if subject.workload.format in ("prompts", "pagedcli") else max(_LEAST_CURES_S, took_s)
    base = counts_of(run) if subject.step_time is None else None
    pool = f"In a pool of {plural(subject.num_blocks, 'block')}, "
    found = find_cures(subject, tokenizer=tokenizer, base=base, budget_s=budget_s)
    return [replace(each, text=f"{pool}{each.text[:1].lower()}{each.text[1:]}") for each in found]


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
