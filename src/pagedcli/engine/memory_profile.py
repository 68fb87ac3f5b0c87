"""Profiles of memory: of a GPU described by numbers, and of this machine with the model loaded and measured.

Used by `pagedcli profile-memory`, which shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import msgspec
import torch

from pagedcli.config import EngineConfig, parse_bytes
from pagedcli.engine.decide import Decisions, choose_num_blocks, decide, model_folder
from pagedcli.engine.forecast import Forecast, forecast_pool, loading_peak, mapped_weights, model_sizes, predict_terms
from pagedcli.engine.llm_engine import LLMEngine
from pagedcli.engine.machine import available_memory, described_gpu, this_machine
from pagedcli.engine.memory import host_peak, measure_terms, other_holders, reset_host_peak, step_blocks
from pagedcli.errors import ConfigError, UsageError
from pagedcli.kvcache.budget import MemoryTerms, ModelSizes
from pagedcli.kvcache.cards import find_card
from pagedcli.models.reading import read_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine with a model on it, measured, predicted or both."""

    config: EngineConfig
    decided: Decisions
    sizes: ModelSizes
    device: str
    measured: MemoryTerms | None
    predicted: MemoryTerms | None  # None: a model that runs through transformers
    num_blocks: int
    reason: str  # why num_blocks is what it is
    hint: str | None = None  # what to do if no block fits
    notes: Mapping[str, str]  # term -> a note for the user
    holders: str = ""  # the other processes that use most memory
    measured_loading: int | None = None  # peak bytes of this process while loading; None: not on a CPU
    predicted_loading: int | None = None

    @property
    def terms(self) -> MemoryTerms:
        """The measured terms, else the predicted ones."""
        terms = self.measured or self.predicted
        assert terms is not None, "a profile is measured or predicted"
        return terms


# ---------------------------------------------------------------------- a GPU described by numbers


@dataclass(frozen=True, slots=True)
class DescribedGpu:
    """Parsed bytes; None where not given."""

    name: str
    total: int
    capability: tuple[int, int]
    used: int | None = None
    peak: int | None = None
    current: int | None = None


def read_described(gpu: str | None, gpu_memory: str | None, **parts: str | None) -> DescribedGpu | None:
    """The GPU that flags describe; None if they describe none. Raises: UsageError."""
    given = [f"--{name}" for name, value in parts.items() if value is not None]
    if gpu is not None and gpu_memory is not None:
        raise UsageError("--gpu and --gpu-memory exclude each other")
    if gpu is None and gpu_memory is None:
        if given:
            raise UsageError(f"{given[0]} describes another machine and needs --gpu or --gpu-memory as well")
        return None
    if (parts["peak"] is None) != (parts["current"] is None):
        raise UsageError("--peak and --current belong together: the activations are their difference")
    numbers = {name: None if value is None else parse_bytes(value) for name, value in parts.items()}
    if gpu is not None:
        card = find_card(gpu)
        described = DescribedGpu(gpu, card.total_bytes, card.capability, **numbers)
    else:  # only its memory is known: assume a recent GPU
        described = DescribedGpu("the described GPU", parse_bytes(gpu_memory or ""), (9, 0), **numbers)
    if described.peak is not None and described.current is not None and described.peak < described.current:
        raise UsageError("--peak is below --current")
    return described


def profile_described(config: EngineConfig, given: DescribedGpu) -> Profile:
    """What the model would get on a described GPU. Raises: PagedcliError."""
    spec = read_spec(model_folder(config, weights=False), trust_remote_code=config.trust_remote_code)
    machine = described_gpu(
        given.total, name=given.name, capability=given.capability, num_gpus=config.tensor_parallel_size
    )
    decided = decide(msgspec.structs.replace(config, device="cuda"), spec, machine)
    if spec.is_fallback and given.current is None:
        raise UsageError(
            f"the memory of {spec.architecture} is not predicted", hint="give --used, --peak and --current as well"
        )
    predicted = predict_terms(config, spec, decided, machine)
    notes = {"activations": "predicted", "weights": "predicted", "graphs": "predicted"}
    weights, activations = predicted.weights, predicted.activations
    if given.peak is not None and given.current is not None:
        weights, activations = given.current, given.peak - given.current
        notes |= {"activations": "--peak minus --current", "weights": "--current: all memory of this process"}
    notes["others"] = "none given (--used)" if given.used is None else "--used minus the model"
    notes["runtime"] = "CUDA context, assumed" if given.used is None else "counted in --used"
    terms = MemoryTerms(
        total=given.total,
        reserve=predicted.reserve,
        others=0 if given.used is None else max(0, given.used - weights),
        runtime=predicted.runtime if given.used is None else 0,
        weights=weights,
        activations=activations,
        graphs=predicted.graphs if given.peak is None else 0,  # the given numbers describe the whole machine
    )
    pool = forecast_pool(config, decided, terms)
    return Profile(
        config=config,
        decided=decided,
        sizes=model_sizes(config, spec),
        device=f"{given.name}, described by flags",
        measured=None,
        predicted=terms,
        num_blocks=pool.num_blocks,
        reason=pool.reason,
        hint=pool.hint,
        notes=notes,
    )


# ---------------------------------------------------------------------- this machine


def profile_here(config: EngineConfig) -> Profile:
    """Load the model, run the largest step and measure. Raises: PagedcliError."""
    folder = model_folder(config)
    spec = read_spec(folder, trust_remote_code=config.trust_remote_code)
    machine = this_machine(free_memory=True)
    decided = decide(config, spec, machine)
    on_cpu = decided.device.type == "cpu"
    predicted = predict_terms(config, spec, decided, machine) if not spec.is_fallback else None
    if on_cpu:
        reset_host_peak()
    loaded = _load(config, decided)
    measured_loading = host_peak() if on_cpu else None
    measured = measure_terms(
        loaded.runner,
        loaded.plan,
        decided.largest_step,
        mapped_weights=mapped_weights(config, spec, decided),
        expected_activations=predicted.activations if predicted is not None else 0,
    )
    loaded.close()
    if predicted is not None:  # the other terms cannot be predicted independently
        own = {name: getattr(predicted, name) for name in ("weights", "activations", "graphs")}
        predicted = MemoryTerms(**{item.name: getattr(measured, item.name) for item in fields(MemoryTerms)} | own)
    pool = _pool(config, decided, measured, loaded)
    holders = ", ".join(map(str, other_holders(decided.device)))
    return Profile(
        config=config,
        decided=decided,
        sizes=model_sizes(config, spec),
        device=loaded.plan.device,
        measured=measured,
        predicted=predicted,
        num_blocks=pool.num_blocks,
        reason=pool.reason,
        hint=pool.hint,
        notes=_notes_here(on_cpu, holders),
        holders=holders,
        measured_loading=measured_loading,
        predicted_loading=loading_peak(config, spec, decided, folder) if on_cpu and predicted is not None else None,
    )


def _pool(config: EngineConfig, decided: Decisions, measured: MemoryTerms, loaded: LLMEngine) -> Forecast:
    """The pool that the engine would get: on a CPU from free memory, on a GPU from its budget."""
    try:
        num_blocks, reason = choose_num_blocks(config, decided, available=available_memory(), budget=loaded.plan.budget)
    except ConfigError as error:
        return Forecast(measured, 0, error.message, error.hint)
    return Forecast(measured, num_blocks, reason, None)


def _load(config: EngineConfig, decided: Decisions) -> LLMEngine:
    """The engine with a pool just large enough for the largest step."""
    if config.tensor_parallel_size > 1 and decided.device.type == "cpu":
        raise UsageError(
            f"memory is measured for one CPU process, not for {config.tensor_parallel_size}",
            hint="use --tensor-parallel-size 1",
        )
    num_blocks = step_blocks(decided.largest_step, config.block_size)
    try:
        return LLMEngine(msgspec.structs.replace(config, num_gpu_blocks_override=num_blocks))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no room for the model and its largest step: {str(error).partition('. ')[0]}",
            hint="end other processes on it, or lower --max-num-batched-tokens",
        ) from error


def _notes_here(on_cpu: bool, holders: str) -> dict[str, str]:
    if on_cpu:
        return {
            "others": f"largest: {holders}" if holders else "",
            "runtime": "Python, torch and this program",
            "activations": "growth of the process",
        }
    unnamed = "none that the driver names; they would count as runtime"
    return {"others": holders or unnamed, "runtime": "CUDA context and buffers"}
