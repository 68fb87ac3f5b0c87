"""Profiles of memory: of a machine described by numbers, and of this one with the model loaded and measured.

Used by `pagedcli profile-memory`, which shows them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from pagedcli.config import EngineConfig, parse_bytes
from pagedcli.core.budget import Terms
from pagedcli.core.plan import Plan, Pool
from pagedcli.errors import UsageError
from pagedcli.models.hub import weight_files
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.cards import find_card
from pagedcli.planning.decide import decide, fits, model_folder
from pagedcli.planning.decision import Decision, Fit
from pagedcli.planning.machine import Machine, available_memory, described_gpu, described_host, this_machine
from pagedcli.records import size
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.runner.memory import host_peak, measure_terms, other_holders, reset_host_peak, step_blocks

_PREDICTED = dict.fromkeys(("weights", "activations", "graphs", "runtime"), "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine with a model on it."""

    config: EngineConfig
    plan: Plan
    spec: ModelSpec  # one rank's part
    device: str
    terms: Terms  # measured where the model was loaded
    forecast: Terms | None  # next to the measured terms; None: nothing was measured, or transformers runs the model
    pool: Pool
    notes: Mapping[str, str]  # term -> a note for the user
    fits: tuple[Fit, ...] = ()  # what else could be chosen; empty: a model that runs through transformers
    holders: str = ""  # the other processes that use most memory
    measured_loading: int | None = None  # peak bytes of this process while loading; None: not on a CPU
    predicted_loading: int | None = None


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

    def machine(self, num_gpus: int) -> Machine:
        if self.capability is None:
            return described_host(self.total)
        return described_gpu(self.total, name=self.name, capability=self.capability, num_gpus=num_gpus)


def read_described(
    gpu: str | None, gpu_memory: str | None, memory: str | None, **parts: str | None
) -> Described | None:
    """The machine that flags describe; None if they describe none. Raises: UsageError."""
    given = [f"--{name}" for name, value in parts.items() if value is not None]
    if sum(value is not None for value in (gpu, gpu_memory, memory)) > 1:
        raise UsageError("--gpu, --gpu-memory and --memory exclude each other")
    if gpu is None and gpu_memory is None and memory is None:
        if given:
            raise UsageError(f"{given[0]} describes another machine and needs --gpu, --gpu-memory or --memory as well")
        return None
    if parts["used"] is not None and parts["others"] is not None:
        raise UsageError("--used, which counts the model, and --others, which does not, exclude each other")
    if (parts["peak"] is None) != (parts["current"] is None):
        raise UsageError("--peak and --current belong together: the activations are their difference")
    numbers = {name: None if value is None else parse_bytes(value) for name, value in parts.items()}
    if gpu is not None:
        card = find_card(gpu, hint="give its memory instead, for example --gpu-memory 24GiB")
        described = Described(gpu, card.total_bytes, card.capability, **numbers)
    elif gpu_memory is not None:  # only its memory is known: assume a recent GPU
        described = Described("the described GPU", parse_bytes(gpu_memory), (9, 0), **numbers)
    else:
        described = Described("a machine without a GPU", parse_bytes(memory or ""), None, **numbers)
    if described.peak is not None and described.current is not None and described.peak < described.current:
        raise UsageError("--peak is below --current")
    return described


def profile_described(config: EngineConfig, given: Described) -> Profile:
    """What the model would get on a described machine. Raises: PagedcliError."""
    spec = read_spec(model_folder(config, weights=False), trust_remote_code=config.trust_remote_code)
    machine = given.machine(config.tensor_parallel_size)
    config = msgspec.structs.replace(config, device="cpu" if given.capability is None else "cuda")
    decision = decide(config, spec, machine)
    if spec.is_fallback and given.current is None:
        raise UsageError(
            f"the memory of {spec.architecture} is not predicted", hint="give --used, --peak and --current as well"
        )
    predicted = decision.terms
    notes = dict(_PREDICTED)
    weights, activations = predicted.weights, predicted.activations
    if given.peak is not None and given.current is not None:
        weights, activations = given.current, given.peak - given.current
        notes |= {"activations": "--peak minus --current", "weights": "--current: all memory of this process"}
    others = given.others or 0
    notes["others"] = "none given (--others)" if given.others is None else "--others"
    if given.used is not None:
        others = max(0, given.used - weights)
        notes["others"] = f"--used minus {size(min(given.used, weights))} of this model"
    process = "Python and torch" if given.capability is None else "CUDA context"
    notes["runtime"] = f"{process}, assumed" if given.used is None else "counted in --used"
    terms = Terms(
        total=given.total,
        reserve=predicted.reserve,
        others=others,
        runtime=predicted.runtime if given.used is None else 0,
        weights=weights,
        activations=activations,
        graphs=predicted.graphs if given.peak is None else 0,  # the given numbers describe the whole machine
    )
    return Profile(
        config=config,
        plan=decision.plan,
        spec=decision.own,
        device=f"{given.name}, described by flags",
        terms=terms,
        forecast=None,
        pool=decision.pool_within(terms),
        notes=notes,
        fits=() if given.current is not None else tuple(fits(decision, others=others, runtime=terms.runtime)),
    )


# ---------------------------------------------------------------------- this machine


def profile_here(config: EngineConfig, say: Callable[[str], None]) -> Profile:
    """Load the model, run the largest step and measure; only predict if there are no weights or they do not fit.
    `say` receives what is being done. Raises: PagedcliError."""
    folder = model_folder(config)
    spec = read_spec(folder, trust_remote_code=config.trust_remote_code)
    decision = decide(config, spec, this_machine(free_memory=True))
    plan, on_cpu = decision.plan, decision.plan.on_cpu
    predicted = None if spec.is_fallback else decision.terms
    holders = ", ".join(map(str, other_holders(torch.device(plan.device))))
    profile = partial(Profile, config=config, plan=plan, spec=decision.own)
    found = () if predicted is None else tuple(fits(decision))
    if predicted is not None and (why := _why_not_measured(decision, folder)):
        say(f"{why}: predicting")
        return profile(
            device=plan.device,
            terms=predicted,
            forecast=None,
            pool=decision.pool_within(predicted),
            notes={**_PREDICTED, "others": holders},
            fits=found,
        )
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
    pool = decision.pool_within(loaded.plan.memory or terms, available=available_memory())
    return profile(
        device=loaded.plan.device,
        terms=terms,
        forecast=predicted and _compared(terms, predicted),
        pool=pool,
        notes=_notes_here(on_cpu, holders),
        fits=(Fit(found[0].plan, terms, pool), *found[1:]) if found else (),
        holders=holders,
        measured_loading=measured_loading,
        predicted_loading=decision.loading_peak(folder) if on_cpu and predicted is not None else None,
    )


def _compared(terms: Terms, predicted: Terms) -> Terms:
    """The measured terms, with those in their place that are predicted independently."""
    own = {name: getattr(predicted, name) for name in ("weights", "activations", "graphs")}
    return replace(terms, **own, measured=terms.measured - own.keys())


def _why_not_measured(decision: Decision, folder: Path) -> str | None:
    if decision.config.load_format != "dummy" and not weight_files(folder):
        return decision.weights_refusal or f"{folder} has no weights"
    return decision.weights_refusal


def _load(config: EngineConfig, plan: Plan) -> LLMEngine:
    """The engine with a pool just large enough for the largest step."""
    if config.tensor_parallel_size > 1 and plan.on_cpu:
        raise UsageError(
            f"memory is measured for one CPU process, not for {config.tensor_parallel_size}",
            hint="use --tensor-parallel-size 1",
        )
    num_blocks = step_blocks(plan.limits.largest_step, plan.limits.tables)
    return LLMEngine(msgspec.structs.replace(config, num_gpu_blocks_override=num_blocks))


def _notes_here(on_cpu: bool, holders: str) -> dict[str, str]:
    if on_cpu:
        return {
            "others": f"largest: {holders}" if holders else "",
            "runtime": "Python, torch and this program",
            "activations": "growth of the process",
        }
    unnamed = "none that the driver names; they would count as runtime"
    return {"others": holders or unnamed, "runtime": "CUDA context and buffers"}
