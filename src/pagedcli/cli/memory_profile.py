"""Profiles of memory: of a machine described by numbers, and of this one with the model loaded and measured.

Used by `pagedcli profile-memory`, which shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import msgspec

from pagedcli.cli.machine import (
    budget_of,
    fit_blocks,
    kv_dtype,
    largest_step,
    max_model_len,
    model_dtype,
    model_folder,
    model_sizes,
)
from pagedcli.cli.terminal import say
from pagedcli.config import EngineConfig, parse_bytes
from pagedcli.errors import ConfigError, UsageError
from pagedcli.kvcache.budget import ITEMSIZE, MemoryTerms, StepShape
from pagedcli.kvcache.cards import card_memory

if TYPE_CHECKING:
    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.models.spec import ModelSpec

_CUDA_CONTEXT = 512 * 2**20  # bytes; what an idle CUDA process takes on recent cards, good to a factor of two


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A machine with a model on it, measured, predicted or both."""

    engine: EngineConfig
    spec: "ModelSpec"
    device: str
    dtype: str  # of weights and activations
    kv_dtype: str
    measured: MemoryTerms | None
    predicted: MemoryTerms | None  # None: a model whose code is not ours
    block_bytes: int
    num_blocks: int
    reason: str  # what set num_blocks
    step: StepShape
    max_model_len: int
    notes: Mapping[str, str]  # term -> what a person should know about it
    holders: str = ""  # other processes with most memory

    @property
    def terms(self) -> MemoryTerms:
        """The measured terms, else the predicted ones."""
        terms = self.measured or self.predicted
        assert terms is not None, "a profile is measured or predicted"
        return terms


# ---------------------------------------------------------------------- a machine described by numbers


@dataclass(frozen=True, slots=True)
class Described:
    """Bytes as given; None where not."""

    total: int
    used: int | None
    peak: int | None
    current: int | None


def read_described(gpu: str | None, gpu_memory: str | None, **parts: str | None) -> Described | None:
    given = [f"--{name}" for name, value in parts.items() if value is not None]
    if gpu is not None and gpu_memory is not None:
        raise UsageError("--gpu and --gpu-memory exclude each other")
    if gpu is None and gpu_memory is None:
        if given:
            raise UsageError(f"{given[0]} describes another machine, which needs --gpu or --gpu-memory, too")
        return None
    if (parts["peak"] is None) != (parts["current"] is None):
        raise UsageError("--peak and --current belong together: the activations are their difference")
    total = card_memory(gpu) if gpu is not None else parse_bytes(gpu_memory or "")
    described = Described(total, **{k: None if v is None else parse_bytes(v) for k, v in parts.items()})
    if described.peak is not None and described.current is not None and described.peak < described.current:
        raise UsageError("--peak is below --current")
    return described


def profile_described(engine: EngineConfig, given: Described) -> Profile:
    from pagedcli.models.reading import read_spec

    spec = read_spec(model_folder(engine), trust_remote_code=engine.trust_remote_code)
    length, dtype = max_model_len(engine, spec), model_dtype(engine, spec)
    cache_dtype = _described_kv_dtype(engine, dtype)
    step, sizes, itemsize = largest_step(engine, "cuda", length), model_sizes(engine, spec), ITEMSIZE[dtype]
    if spec.is_fallback and given.current is None:
        raise UsageError(
            f"the memory of {spec.architecture} is not predicted", hint="give --used, --peak and --current as well"
        )
    notes = {"activations": "predicted", "weights": "predicted"}
    weights, activations = sizes.num_parameters * itemsize, sizes.activation_bytes(step, itemsize)
    if given.peak is not None and given.current is not None:
        weights, activations = given.current, given.peak - given.current
        notes = {"activations": "--peak minus --current", "weights": "--current: all that this process holds"}
    others = 0 if given.used is None else max(0, given.used - weights)
    notes["others"] = "none given (--used)" if given.used is None else "--used minus the model"
    notes["runtime"] = "CUDA context, assumed" if given.used is None else "counted in --used"
    terms = MemoryTerms(
        total=given.total,
        reserve=given.total - int(given.total * engine.gpu_memory_utilization),
        others=others,
        runtime=_CUDA_CONTEXT if given.used is None else 0,
        weights=weights,
        activations=activations,
    )
    block_bytes = sizes.block_bytes(engine.block_size, cache_dtype)
    num_blocks, reason = fit_blocks(engine, block_bytes, length, budget_of(terms, engine.gpu_memory_utilization))
    return Profile(
        engine=engine,
        spec=spec,
        device="described by flags",
        dtype=dtype,
        kv_dtype=cache_dtype,
        measured=None,
        predicted=terms,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        reason=reason,
        step=step,
        max_model_len=length,
        notes=notes,
    )


def _described_kv_dtype(engine: EngineConfig, dtype: str) -> str:
    """The KV dtype of a card that need not be here and so cannot be asked: fp8 is taken as served."""
    return "float8_e4m3fn" if engine.kv_cache_dtype == "fp8" else kv_dtype(engine, dtype, "cuda")


# ---------------------------------------------------------------------- this machine


def profile_here(engine: EngineConfig) -> Profile:
    """Load the model, run the largest step and measure."""
    from pagedcli.engine.memory import measure_terms, other_holders
    from pagedcli.engine.plan import resolve_device
    from pagedcli.models.reading import read_spec

    length = max_model_len(engine, read_spec(model_folder(engine), trust_remote_code=engine.trust_remote_code))
    step = largest_step(engine, resolve_device(engine.device).type, length)
    loaded = _load(engine, step)
    plan, spec, device = loaded.plan, loaded.spec, loaded.runner.device
    sizes, itemsize = model_sizes(engine, spec), ITEMSIZE[plan.dtype]
    expected = {
        "weights": sizes.num_parameters * itemsize,
        "activations": sizes.activation_bytes(step, itemsize, native=device.type == "cpu"),
    }
    measured = measure_terms(loaded.runner, plan, step, expected_activations=expected["activations"])
    loaded.close()
    given = {item.name: getattr(measured, item.name) for item in fields(MemoryTerms)}
    num_blocks, reason = fit_blocks(engine, plan.block_bytes, length, plan.budget)
    holders = [str(holder) for holder in other_holders(device)]
    return Profile(
        engine=engine,
        spec=spec,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        measured=measured,
        predicted=MemoryTerms(**given | expected) if not spec.is_fallback else None,
        block_bytes=plan.block_bytes,
        num_blocks=num_blocks,
        reason=reason,
        step=step,
        max_model_len=length,
        notes=_notes_here(plan.device, holders),
        holders=", ".join(holders),
    )


def _load(engine: EngineConfig, step: StepShape) -> "LLMEngine":
    """The engine with a pool just large enough for the largest step."""
    import torch

    from pagedcli.engine.llm_engine import LLMEngine
    from pagedcli.engine.memory import step_blocks
    from pagedcli.engine.plan import resolve_device

    if engine.tensor_parallel_size > 1 and resolve_device(engine.device).type == "cpu":
        raise UsageError(
            f"memory is measured for one CPU process, not for {engine.tensor_parallel_size}",
            hint="use --tensor-parallel-size 1",
        )
    say(f"loading {engine.model} and running the largest step")
    try:
        return LLMEngine(msgspec.structs.replace(engine, num_gpu_blocks_override=step_blocks(step, engine.block_size)))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no room for the model and its largest step: {str(error).partition('. ')[0]}",
            hint="end other processes on it, or lower --max-num-batched-tokens",
        ) from error


def _notes_here(device: str, holders: list[str]) -> dict[str, str]:
    if device == "cpu":
        return {
            "others": ("largest: " if holders else "") + ", ".join(holders),
            "runtime": "Python, torch and this program",
            "activations": "growth of the process",
        }
    unnamed = "none that the driver names; they would count as runtime"
    return {"others": ", ".join(holders) or unnamed, "runtime": "CUDA context and buffers"}
