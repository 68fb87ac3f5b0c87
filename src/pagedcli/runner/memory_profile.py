"""How a model fits on a machine described by numbers, and on this one, with the model loaded and measured.

Used by `pagedcli profile-memory`, which shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import torch

from pagedcli.answers.fits import Fit
from pagedcli.config import EngineConfig, parse_bytes
from pagedcli.core.plan import Plan
from pagedcli.errors import UsageError
from pagedcli.models.hub import model_folder, weight_files
from pagedcli.models.reading import read_spec
from pagedcli.planning.cards import find_card
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import available_memory, described_gpu, described_host, this_machine
from pagedcli.records import size
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.memory import host_peak, measure_terms, other_holders, reset_host_peak, step_blocks

_INDEPENDENT = ("weights", "activations", "graphs")  # terms that are predicted without a measurement
_PREDICTED = dict.fromkeys(("weights", "activations", "graphs", "runtime"), "predicted")


# ---------------------------------------------------------------------- a machine described by numbers


@dataclass(frozen=True, slots=True)
class Described:
    """Parsed bytes; None where not given."""

    name: str
    total: int
    capability: tuple[int, int] | None  # CUDA compute capability; None: there is no GPU
    used: int | None = None
    others: int | None = None
    peak: int | None = None
    current: int | None = None


def read_described(
    gpu: str | None, gpu_memory: str | None, memory: str | None, **parts: str | None
) -> Described | None:
    """The machine that flags describe; None if they describe none. Raises: UsageError."""
    given = [f"--{name}" for name, value in parts.items() if value is not None]
    named = [value for value in (gpu, gpu_memory, memory) if value is not None]
    if len(named) > 1:
        raise UsageError("--gpu, --gpu-memory and --memory exclude each other")
    if not named:
        if given:
            raise UsageError(f"{given[0]} describes another machine and needs --gpu, --gpu-memory or --memory as well")
        return None
    if parts["used"] is not None and parts["others"] is not None:
        raise UsageError("--used, which counts the model, and --others, which does not, exclude each other")
    if (parts["peak"] is None) != (parts["current"] is None):
        raise UsageError("--peak and --current belong together: the activations are their difference")
    numbers = {name: None if value is None else parse_bytes(value) for name, value in parts.items()}
    if (numbers["peak"] or 0) < (numbers["current"] or 0):
        raise UsageError("--peak is below --current")
    if gpu is not None:
        card = find_card(gpu)
        return Described(gpu, card.total_bytes, card.capability, **numbers)
    if gpu_memory is not None:  # only its memory is known: assume a recent GPU
        return Described("the described GPU", parse_bytes(gpu_memory), (9, 0), **numbers)
    return Described("a machine without a GPU", parse_bytes(named[0]), None, **numbers)


def profile_described(config: EngineConfig, given: Described) -> Fit:
    """What the model would get on a described machine. Raises: PagedcliError."""
    spec = read_spec(model_folder(config, weights=False), trust_remote_code=config.trust_remote_code)
    machine, device = described_host(given.total), "cpu"
    if given.capability is not None:
        num_gpus, device = config.tensor_parallel_size, "cuda"
        machine = described_gpu(given.total, name=given.name, capability=given.capability, num_gpus=num_gpus)
    decision = decide(msgspec.structs.replace(config, device=device), spec, machine)
    if spec.is_fallback and given.current is None:
        raise UsageError(
            f"the memory of {spec.architecture} is not predicted", hint="give --used, --peak and --current as well"
        )
    terms, notes = replace(decision.terms, others=given.others or 0), dict(_PREDICTED)
    if given.peak is not None and given.current is not None:
        # the given numbers describe the whole machine, graphs included
        terms = replace(terms, weights=given.current, activations=given.peak - given.current, graphs=0)
        notes |= {"activations": "--peak minus --current", "weights": "--current: all memory of this process"}
    notes["others"] = "none given (--others)" if given.others is None else "--others"
    notes["runtime"] = f"{'Python and torch' if given.capability is None else 'CUDA context'}, assumed"
    if given.used is not None:
        terms = replace(terms, others=max(0, given.used - terms.weights), runtime=0)
        notes["others"] = f"--used minus {size(min(given.used, terms.weights))} of this model"
        notes["runtime"] = "counted in --used"
    return Fit(
        decision,
        terms,
        decision.pool_within(terms),
        device=f"{given.name}, described by flags",
        notes=notes,
        known={"others": terms.others, "runtime": terms.runtime} if given.current is None else None,
    )


# ---------------------------------------------------------------------- this machine


def profile_here(config: EngineConfig, say: Callable[[str], None]) -> Fit:
    """Load the model, run the largest step and measure; only predict if there are no weights or they do not fit.
    `say` receives what is being done. Raises: PagedcliError."""
    folder = model_folder(config)
    spec = read_spec(folder, trust_remote_code=config.trust_remote_code)
    decision = decide(config, spec, this_machine(free_memory=True))
    plan, on_cpu = decision.plan, decision.plan.on_cpu
    predicted = None if spec.is_fallback else decision.terms
    holders = ", ".join(map(str, other_holders(torch.device(plan.device))))
    why = decision.weights_refusal()
    if why is None and config.load_format != "dummy" and not weight_files(folder):
        why = f"{folder} has no weights"
    if predicted is not None and why is not None:
        say(f"{why}: predicting")
        notes = {**_PREDICTED, "others": holders}
        return Fit(decision, predicted, decision.pool_within(predicted), notes=notes, known={})
    say(f"loading {config.model} and running the largest step")
    if on_cpu:
        reset_host_peak()
    with _load(config, plan) as loaded:
        measured_loading = host_peak() if on_cpu else None
        terms = measure_terms(
            loaded.runner,
            loaded.plan,
            plan.limits.largest_step,
            mapped_weights=decision.mapped_weights,
            expected_activations=predicted.activations if predicted is not None else 0,
        )
    notes = {"others": holders or "none that the driver names; they would count as runtime"}
    if on_cpu:
        notes |= {"others": f"largest: {holders}" if holders else "", "activations": "growth of the process"}
    notes["runtime"] = "Python, torch and this program" if on_cpu else "CUDA context and buffers"
    return Fit(
        decision,
        terms,
        decision.pool_within(loaded.plan.memory or terms, available=available_memory()),
        forecast=predicted and replace(terms, **{name: getattr(predicted, name) for name in _INDEPENDENT}),
        notes=notes,
        known=None if predicted is None else {},
        loading_peaks=(measured_loading, decision.loading_peak(folder) if on_cpu and predicted is not None else None),
    )


def _load(config: EngineConfig, plan: Plan) -> LLMEngine:
    """The engine with a pool just large enough for the largest step."""
    if config.tensor_parallel_size > 1 and plan.on_cpu:
        raise UsageError(
            f"memory is measured for one CPU process, not for {config.tensor_parallel_size}",
            hint="use --tensor-parallel-size 1",
        )
    num_blocks = step_blocks(plan.limits.largest_step, plan.limits.tables)
    return LLMEngine(msgspec.structs.replace(config, num_kvcache_blocks=num_blocks))
