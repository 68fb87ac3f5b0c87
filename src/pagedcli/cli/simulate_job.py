"""One call of `pagedcli simulate`, after its flags were read: input, pools, runs, tables and page."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from pagedcli.answers.cures import CURES_S, Cure
from pagedcli.answers.hits import (
    Hits,
    PoolHits,
    found_in,
    hits,
    hits_in_words,
    hits_one_at_a_time,
    least_pool,
    parse_pool,
)
from pagedcli.answers.settings import Subject, in_order, timed_of
from pagedcli.answers.survey import prompt_model
from pagedcli.answers.time import counts_of
from pagedcli.batch.prompts import limits_without_pool, open_prompts
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.cli.cures import find_cures, print_answer
from pagedcli.cli.decoder import recorded_tokenizer
from pagedcli.cli.picture import PictureOptions, write_file
from pagedcli.cli.simulate_flags import SimulateOptions
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.core.eviction import POLICIES
from pagedcli.core.groups import page_bytes
from pagedcli.core.limits import STEP_TOKENS, Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import EXIT_BAD_ROWS, UsageError
from pagedcli.events import Eviction
from pagedcli.planning.decide import decide
from pagedcli.planning.decision import LEAST_SLOTS, Decision
from pagedcli.planning.machine import this_machine
from pagedcli.planning.step_time import StepTime, load_step_time
from pagedcli.printable import plural
from pagedcli.show.simulation_tables import (
    curve_table,
    hit_rate_picture,
    pool_row,
    pool_table,
    pools_notes,
    simulation_facts,
    trace_table,
)
from pagedcli.show.tables import Format
from pagedcli.show.terminal import ProgressLine
from pagedcli.simulation.caches import Accesses, accesses_of, lru_curve
from pagedcli.simulation.requests import Requests
from pagedcli.simulation.run import VOCAB_SIZE, Schedule, recorded_plan
from pagedcli.simulation.sources import read_outputs, read_prompts, read_workload, set_output_lengths
from pagedcli.trace.files import TraceWriter
from pagedcli.trace.state import PoolState

_SEARCH_S = 30.0  # seconds of processor time for the search of the smallest pool that is as good
_DEFAULT_POOLS = "5%,10%,25%,50%,100%"


def run_simulation(loaded: LoadedConfig, options: SimulateOptions, drawing: PictureOptions | None = None) -> int:
    """Simulate, print the answer and its tables, and draw. Returns the exit code. Raises: PagedcliError."""
    policies = [] if options.policy is None else _policies(options.policy)
    requests, recorded, tokenizer = _read(loaded, options)
    policies = policies or [recorded.started.eviction if recorded is not None else "lru"]
    is_file = recorded is None and requests.hash_size is None
    decision = _decided(loaded) if is_file or "engine.model" in loaded.sources else None
    plan = _plan(loaded, options, requests, recorded, decision)
    _check_unscheduled(loaded, options, plan, policies)
    limits, block_bytes = plan.limits, plan.block_bytes or None
    accesses = accesses_of(requests, limits.block_size, partial_blocks=options.partial_blocks)
    pools = _pools(options, recorded, requests, limits, accesses, block_bytes)
    plan = replace(plan, limits=replace(limits, num_blocks=pools[0], eviction=policies[0]))
    step_time = _step_time(recorded, decision)
    schedule = None if options.no_schedule else _schedule(loaded, options, requests, decision, step_time)
    if options.record is not None and (len(pools) * len(policies) > 1 or schedule is None):
        raise UsageError("--record needs a scheduled run of one pool and policy", hint="for example --pool 4096")
    found, points = _hits(requests, plan, schedule, pools, policies, accesses, options)
    is_timed = schedule is not None and schedule.step_time is not None
    rows = [pool_row(each, accesses, limits.windows, options.warmup, is_timed=is_timed) for each in points]
    shown = [pool_table(rows, schedule, block_bytes, pools_notes(requests, found, limits.windows, options.warmup))]
    facts = simulation_facts(requests, accesses, plan, found, block_bytes)
    cures: list[Cure] = []
    if schedule is not None and found.here.tokens[1]:
        # Cures are about the smallest pool and the first policy. Without arrivals it is judged by time where steps
        # have been timed, as other commands do.
        subject = Subject(
            requests,
            plan,
            may_reorder=in_order(requests),
            read_ahead=schedule.read_ahead,
            step_time=step_time if schedule.speed is None and options.step_ms is None else None,
            arrivals=None if schedule.speed is None else schedule,
        )
        base = counts_of(found.here.run) if subject.step_time is None and found.here.run is not None else None
        told = find_cures(subject, tokenizer=tokenizer, base=base, found=found, budget_s=CURES_S)
        cures = [each for each in told if each.kind != "pool"]  # the first line says it
    if drawing is not None:
        picture = hit_rate_picture(found, rows, facts, drawing.shape)
        write_file(drawing, iter([picture]), overwrite=True)
    if options.format_ is not Format.JSON:
        shown += [trace_table(facts), curve_table(found, block_bytes)]
        shown = shown if options.all_ else shown[:1]
    answer = hits_in_words(found, block_bytes)
    print_answer([answer], cures, shown, options.format_, facts)
    return EXIT_BAD_ROWS if requests.num_bad else 0


def _hits(
    requests: Requests,
    plan: Plan,
    schedule: Schedule | None,
    pools: list[int],
    policies: list[Eviction],
    accesses: Accesses,
    options: SimulateOptions,
) -> tuple[Hits, list[PoolHits]]:
    """What a cache finds at each size under the first policy, and in each pool under each policy."""
    if schedule is None:
        curve = lru_curve(accesses, options.warmup)
        each = [hits_one_at_a_time(curve, num_blocks) for num_blocks in pools]
        return each[0], [found.here for found in each]
    progress, num_requests = ProgressLine(line_every_s=5.0), len(requests.requests)

    def observe(policy: str, num_blocks: int, num_done: int) -> None:
        progress.show(
            lambda _: f"pool of {plural(num_blocks, 'block')}, {policy}: {num_done:,}/{plural(num_requests, 'request')}"
        )

    points, run = [], partial(found_in, requests, schedule=schedule, warmup=options.warmup)
    record, hint = options.record, "name a file that can be written, or leave out --record"
    with nullcontext() if record is None else TraceWriter(record, overwrite=True, unwritten_hint=hint) as emit:
        for num_blocks in pools:
            for policy in policies:
                with_policy = replace(plan, limits=replace(plan.limits, eviction=policy))
                show = partial(observe, policy, num_blocks)
                points.append(run(with_policy, num_blocks, emit=emit, observe=show))
    known = [point for point in points if point.policy == policies[0]]
    found = hits(
        requests, plan, schedule, known=known, accesses=accesses, warmup=options.warmup, search_s=_SEARCH_S,
        observe=partial(observe, policies[0]),
    )  # fmt: skip
    progress.close()
    return found, points


# ---------------------------------------------------------------------- input


def _read(loaded: LoadedConfig, options: SimulateOptions) -> tuple[Requests, PoolState | None, Tokenizer | None]:
    """The requests, for a recorded run the pool at its end, and the tokenizer of their tokens, where they have any."""
    outputs = None if options.outputs is None else read_outputs(options.outputs)
    tokenizer: Tokenizer | None = None

    def prompts(name: str) -> Requests:
        nonlocal tokenizer
        folder, spec = prompt_model(loaded, None)
        engine = loaded.config.engine
        opened = open_prompts(loaded, name, folder, limits_without_pool(engine, spec))
        tokenizer = opened.tokenizer
        return read_prompts(name, opened, outputs)

    requests, recorded = read_workload(
        options.traces, prompts, format_name=options.trace_format, hash_size=options.hash_size
    )
    if recorded is not None and requests.hash_size is None:
        tokenizer = recorded_tokenizer(Path(options.traces[0]), None)
    if loaded.config.run.limit is not None:
        requests.requests = requests.requests[: loaded.config.run.limit]
    if options.output_tokens is not None:
        set_output_lengths(requests, options.output_tokens)
    elif any(request.num_output_tokens is None for request in requests.requests):
        requests.notes.append("the trace has no output lengths: one token each (see --output-tokens)")
    return requests, recorded, tokenizer


def _policies(text: str) -> list[Eviction]:
    """Eviction policies by name. Raises: UsageError."""
    names = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(names) - set(POLICIES)):
        raise UsageError(f"--policy: unknown policy {unknown[0]!r}", hint=f"known: {', '.join(POLICIES)}")
    return [policy for policy in POLICIES if policy in names]


def _pools(
    options: SimulateOptions,
    recorded: PoolState | None,
    requests: Requests,
    limits: Limits,
    accesses: Accesses,
    block_bytes: int | None,
) -> list[int]:
    """The pools to simulate, in blocks, ascending; by default none that refuses a request. Raises: UsageError."""
    num_unique = max(1, accesses.num_unique * len(limits.groups))
    if options.pool is None and recorded is not None:
        return [recorded.started.num_blocks]
    text = options.pool or _DEFAULT_POOLS
    pools = {parse_pool(part.strip(), num_unique, block_bytes) for part in text.split(",")}
    if options.pool is None and not options.no_schedule:
        least = least_pool(requests, limits)
        pools = {max(least, num_blocks) for num_blocks in pools}
    return sorted(pools)


def _check_unscheduled(loaded: LoadedConfig, options: SimulateOptions, plan: Plan, policies: list[Eviction]) -> None:
    """Refuse what only a scheduler can say. Raises: UsageError."""
    if not plan.limits.has_states and "engine.checkpoints" in loaded.sources:
        raise UsageError("--checkpoints needs recurrent state", hint="name such a model (-m), or use --num-state-slots")
    left_out = "the slots of recurrent state" if plan.limits.has_states else None
    left_out = "the layers with a window" if plan.limits.tables.has_windows else left_out
    left_out = "every policy but lru" if policies != ["lru"] else left_out
    if options.no_schedule and left_out is not None:
        raise UsageError(f"--no-schedule leaves out {left_out}", hint="leave out --no-schedule")


# ---------------------------------------------------------------------- the engine


_LIMIT_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "min_prefill_tokens", "preemption_policy",
    "num_state_slots", "checkpoints",
)  # fmt: skip


def _decided(loaded: LoadedConfig) -> Decision | None:
    """The engine that `generate` starts on this machine. None for a tokenizer without a model."""
    _, spec = prompt_model(loaded, None)
    if spec is None:
        return None
    defaults = EngineConfig()  # slots are for the simulated engine, whatever the model
    without_slots = {"num_state_slots": defaults.num_state_slots, "checkpoints": defaults.checkpoints}
    return decide(msgspec.structs.replace(loaded.config.engine, **without_slots), spec, this_machine())


def _plan(
    loaded: LoadedConfig,
    options: SimulateOptions,
    requests: Requests,
    recorded: PoolState | None,
    decision: Decision | None,
) -> Plan:
    """The simulated engine: that of the recorded run, or that of the decision, with what is given changed; for traces
    of others without a model it is assumed, with a note. The layers are those of the decision, where there is one."""
    engine, sources, longest = loaded.config.engine, loaded.sources, requests.longest
    changes = {name: getattr(engine, name) for name in _LIMIT_KEYS if f"engine.{name}" in sources}
    if recorded is not None:
        plan = recorded_plan(recorded)
        block_size, longest = recorded.block_size, max(longest, plan.limits.max_model_len)
    else:
        step_tokens = max(STEP_TOKENS, engine.max_num_seqs)
        assumed = {"max_num_batched_tokens": step_tokens, "min_prefill_tokens": 0}
        limits = Limits.of(engine, **assumed) if decision is None else decision.plan.limits
        plan = Plan(limits=limits, model="simulation", device="none" if decision is None else decision.plan.device)
        block_size = requests.hash_size or engine.block_size
        if decision is None and "max_num_batched_tokens" not in changes and not options.no_schedule:
            requests.notes.append(
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
    requests: Requests,
    decision: Decision | None,
    step_time: StepTime | None,
) -> Schedule:
    if options.step_ms is not None and options.calibrated:
        raise UsageError("--step-ms and --calibrated both set the time of a step", hint="use one of them")
    if options.speed is not None:
        if not requests.has_times:
            raise UsageError("--speed: this trace has no times", hint="without --speed all requests arrive at once")
        if options.step_ms is None and not options.calibrated:
            raise UsageError("--speed needs the time of a step", hint="--step-ms 20, or --calibrated")
    read_ahead = loaded.config.run.read_ahead
    if options.step_ms is not None:
        step_ns = round(options.step_ms * 1e6)
        return Schedule(options.speed, lambda work, scheduler: step_ns, read_ahead)
    if options.calibrated:
        if step_time is None:
            model = loaded.config.engine.model if decision is not None else "the trace's model"
            hint = "pagedcli plan calibrates it" if decision is not None else "name the model with -m"
            raise UsageError(f"--calibrated: {model} has no calibration on this machine", hint=hint)
        requests.notes.append("time: step times measured on this machine; work between steps is not counted")
        return Schedule(options.speed, step_time, read_ahead)
    return Schedule(options.speed, None, read_ahead)
