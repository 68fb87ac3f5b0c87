"""Runs a workload through the engine and times it, generation only: all requests at once."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from pagedcli import runner
from pagedcli.bench.rates import MachineRates, measure_rates
from pagedcli.bench.spread import Busy, BusyWatch, Spread, worst
from pagedcli.bench.workloads import BenchWorkload, within, workload_floor
from pagedcli.config import EngineConfig, LoadedConfig
from pagedcli.core.plan import Plan
from pagedcli.core.requests import FinishedRequest
from pagedcli.printable import plural
from pagedcli.records import Share, count
from pagedcli.sampling_params import SamplingParams

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 4
_RATES_S = 2.0  # measuring the machine after a pass takes roughly this


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload. Seconds, except overhead."""

    wall_s: float
    ttft_s: float  # median of the requests, from the start of the run
    tpot_s: float | None  # median; None if every request generates one token
    num_steps: int
    schedule_ms: float  # sum over all steps
    sample_ms: float
    num_cached_tokens: int
    token_ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Several passes in one process, after a warm-up."""

    runs: list[Run]
    machines: list[MachineRates]  # rates during each run: they change with other load; empty on a GPU
    busy: list[Busy | None]  # other work during each run; None where the system does not say
    load_s: float
    warm_up_s: float
    engine: "runner.LLMEngine"  # closed

    @property
    def median(self) -> Run:
        """The run with the median wall time; of two middle ones, the faster."""
        return sorted(self.runs, key=lambda run: run.wall_s)[(len(self.runs) - 1) // 2]


def shape_folder(name: str) -> Path:
    """The folder with the config.json of a built-in shape."""
    return Path(str(files("pagedcli.assets"))) / "shapes" / name


def workload_config(loaded: LoadedConfig, workload: BenchWorkload) -> EngineConfig:
    """The configuration, with model, limits and prefix caching from the workload unless the user set them."""
    config = loaded.config.engine
    changes: dict[str, object] = {"enable_prefix_caching": workload.prefix_caching and config.enable_prefix_caching}
    if "engine.model" not in loaded.sources:
        changes |= {"model": str(shape_folder(workload.shape)), "load_format": "dummy"}
    if config.max_model_len is None:
        changes["max_model_len"] = workload.max_len
    changes["max_num_seqs"] = min(config.max_num_seqs, len(workload.prompts))
    return msgspec.structs.replace(config, **changes)


def run_workload(
    config: EngineConfig,
    workloads: list[BenchWorkload],
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    on_pass: Callable[[Run], None] = lambda run: None,
    most_s: float | None = None,
) -> Throughput:
    """Load a model and run each workload once; they share lengths, so the first also determines the warm-up.

    `on_progress` is called after each step with the share of the work that is done, `on_pass` after each pass. No pass
    but the first begins that would end later than `most_s` after the call, if the slowest one so far is a measure.
    """
    called = time.perf_counter()
    with runner.LLMEngine(config) as engine:
        loaded = time.perf_counter()
        first = workloads[0]
        other_tokens = [[token ^ 1 for token in prompt] for prompt in first.prompts[:WARM_UP_REQUESTS]]
        generate(engine, other_tokens, [min(WARM_UP_TOKENS, n) for n in first.output_lens[:WARM_UP_REQUESTS]])
        result = Throughput([], [], [], loaded - called, time.perf_counter() - loaded, engine)
        dtype = engine.decision.attention.dtype
        int8 = engine.decision.weights.rounds_activations(engine.plan.kernels, dtype.itemsize)
        rates = partial(measure_rates, dtype, int8=int8)
        before = rates() if engine.plan.on_cpu else None
        num_passes = len(workloads)

        def on_step(place: int, num_tokens: int, num_generated: int) -> None:
            on_progress((place + num_generated / num_tokens) / num_passes)

        for place, workload in enumerate(workloads):
            if place and most_s is not None:
                pass_s = max(run.wall_s for run in result.runs) + _RATES_S
                num_passes = min(num_passes, place + int((most_s - (time.perf_counter() - called)) / pass_s))
                if place >= num_passes:
                    break
            watch = BusyWatch()
            each_step = partial(on_step, place, workload.num_output_tokens)
            result.runs.append(measure(engine, workload.prompts, workload.output_lens, on_step=each_step))
            on_pass(result.runs[-1])
            result.busy.append(watch.read())
            if before is not None:
                after = rates()
                result.machines.append(after.best(before))
                before = after
        return result


def measure(
    engine: "runner.LLMEngine",
    prompts: list[list[int]],
    output_lens: list[int],
    *,
    on_step: Callable[[int], None] = lambda num: None,
) -> Run:
    """One timed pass, see generate."""
    before = copy.deepcopy(engine.stats)
    started = time.perf_counter()
    outputs = generate(engine, prompts, output_lens, on_step=on_step)
    wall_s = time.perf_counter() - started
    stats = engine.stats
    tpots = [output.metrics.tpot_s for output in outputs if output.metrics.tpot_s is not None]
    return Run(
        wall_s=wall_s,
        ttft_s=statistics.median(output.metrics.ttft_s for output in outputs),
        tpot_s=statistics.median(tpots) if tpots else None,
        num_steps=stats.num_steps - before.num_steps,
        schedule_ms=(stats.schedule_ns - before.schedule_ns) / 1e6,
        sample_ms=(stats.sample_ns - before.sample_ns) / 1e6,
        num_cached_tokens=stats.num_cached_tokens - before.num_cached_tokens,
        token_ids=[output.samples[0].token_ids for output in outputs],
    )


def generate(
    engine: "runner.LLMEngine",
    prompts: list[list[int]],
    output_lens: list[int],
    *,
    on_step: Callable[[int], None] = lambda num: None,
) -> list[FinishedRequest]:
    """Greedy generation of exactly these numbers of tokens, in the order of the prompts. `on_step` is called after each
    step with the number of tokens generated so far."""
    before = engine.stats.num_generated_tokens
    prompts = [within(prompt, engine.spec.vocab_size) for prompt in prompts]
    for i, (prompt, num_tokens) in enumerate(zip(prompts, output_lens, strict=True)):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    outputs: dict[int, FinishedRequest] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id)] = output
        on_step(engine.stats.num_generated_tokens - before)
    return [outputs[i] for i in range(len(prompts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow:
    """The figures of a workload's passes: the median of each."""

    workload: str
    num_tokens: Annotated[int, "tokens of the prompts and outputs"]
    wall_s: Annotated[float, "s"]
    output_tokens_per_s: Annotated[float, "out tok/s", count]
    ttft_ms: Annotated[float, "TTFT ms", count]
    tpot_ms: Annotated[float | None, "TPOT ms"]
    overhead_ms: Annotated[float, "engine ms/step"]
    share_of_floor: Annotated[Share | None, "of floor"]
    all_wall_s: list[float]
    total_tokens_per_s: Annotated[float, "all tok/s", count]
    steps: int
    cached_tokens: int
    load_s: Annotated[float, "load s"]
    warm_up_s: float
    busy: Busy | None
    spread: dict[str, Spread | None]
    floor_s: Annotated[float, "floor s"] | UnsetType = UNSET
    machine: MachineRates | UnsetType = UNSET


def throughput_row(result: Throughput, workload: BenchWorkload) -> WorkloadRow:
    """The share of the floor is None where other work disturbed the passes so much that it would exceed 1."""
    runs = result.runs
    machine = result.machines[runs.index(result.median)] if result.machines else None
    decision, kv_dtype = result.engine.decision, result.engine.decision.plan.kv_dtype
    floor: float | UnsetType = UNSET
    if machine is not None:
        floor = workload_floor(decision.own, decision.footprint, workload, machine.limits, kv_dtype=kv_dtype)
    walls = [run.wall_s for run in runs]
    values: dict[str, list[float | None]] = {
        "wall_s": [*walls],
        "output_tokens_per_s": [workload.num_output_tokens / wall_s for wall_s in walls],
        "ttft_ms": [run.ttft_s * 1e3 for run in runs],
        "tpot_ms": [None if run.tpot_s is None else run.tpot_s * 1e3 for run in runs],
        "overhead_ms": [(run.schedule_ms + run.sample_ms) / run.num_steps for run in runs],
        "share_of_floor": [None if floor is UNSET or floor > wall_s else floor / wall_s for wall_s in walls],
    }
    spread = {name: Spread.of(each) for name, each in values.items()}
    medians: dict[str, Any] = {name: None if each is None else each.median for name, each in spread.items()}
    num_tokens = workload.num_prompt_tokens + workload.num_output_tokens
    return WorkloadRow(
        **medians,
        workload=workload.name,
        num_tokens=num_tokens,
        all_wall_s=walls,
        total_tokens_per_s=num_tokens / medians["wall_s"],
        steps=result.median.num_steps,
        cached_tokens=result.median.num_cached_tokens,
        load_s=result.load_s,
        warm_up_s=result.warm_up_s,
        busy=worst(result.busy),
        spread=spread,
        floor_s=floor,
        machine=UNSET if machine is None else machine,
    )


def headline(row: WorkloadRow) -> str:
    """How fast a workload ran, in a sentence."""
    said = f"{row.workload}: {row.output_tokens_per_s:,.0f} tokens/s"
    spread, num_passes = row.spread["output_tokens_per_s"], len(row.all_wall_s)
    if spread is not None and num_passes > 1:
        said += f" ({spread.min:,.0f} to {spread.max:,.0f} in {num_passes} passes)"
    if row.share_of_floor is not None:
        said += f", {row.share_of_floor:.0%} of what memory and processor allow"
    return f"{said}."


def bench_notes(plan: Plan, rows: Sequence[WorkloadRow]) -> list[str]:
    """What was measured, on what machine, and what disturbed it."""
    notes = [f"{plan.dtype} on {plan.device}, attention backend {plan.backend}."]
    machines = [row.machine for row in rows if row.machine is not msgspec.UNSET]
    if machines:
        read = _range([each.read_bytes_per_s for each in machines])
        peak = _range([each.flop_per_s for each in machines])
        notes.append(
            f"Limits measured around the passes: {read} GB/s of reads and {peak} GFLOP/s of"
            f" {machines[0].instructions} on {plural(machines[0].threads, 'thread')}."
        )
    busy = worst(row.busy for row in rows)
    if busy is not None and busy.disturbs:
        notes.append(
            f"Warning: the machine was busy: other processes used {busy.others:.0%} of its processor time, the"
            f" hypervisor withheld {busy.steal:.0%}. Measure again on an idle machine."
        )
    if machines and any(row.share_of_floor is None for row in rows):
        notes.append("The share of the limits is left out: passes were faster than the limits measured around them.")
    return notes


def _range(rates: Sequence[float]) -> str:
    """The lowest and highest rate, in billions; one number if they are shown alike."""
    return " to ".join(dict.fromkeys(f"{rate / 1e9:,.0f}" for rate in (min(rates), max(rates))))
