"""What this machine would give a model, from config.json, arithmetic and the memory that is free right now.

Used by `plan` and `profile-memory`; loads no weights.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcli.config import BUILTIN_MODEL, EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.kvcache.budget import ITEMSIZE, MemoryBudget, MemoryTerms, ModelSizes, StepShape

if TYPE_CHECKING:
    from pagedcli.models.spec import ModelSpec

# the flags that such an answer depends on
MACHINE_KEYS = tuple(
    f"engine.{name}"
    for name in (
        "model",
        "revision",
        "dtype",
        "trust_remote_code",
        "device",
        "block_size",
        "kv_cache_dtype",
        "num_gpu_blocks_override",
        "kv_cache_memory",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
    )
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine would give the model, from arithmetic and what is free right now."""

    device: str
    terms: MemoryTerms
    block_size: int
    block_bytes: int
    num_blocks: int
    reason: str  # what sets num_blocks, or why it is 0


def model_folder(engine: EngineConfig) -> Path:
    """The folder of the model; a config.json stands for its folder."""
    from pagedcli.engine.plan import model_folder as folder_of

    path = Path(engine.model)
    if engine.model != BUILTIN_MODEL and path.name == "config.json" and path.is_file():
        return path.parent
    return folder_of(engine, weights=False)


def model_spec(folder: Path, engine: EngineConfig) -> "ModelSpec | None":
    """The model in a folder; None for a folder without config.json, as a tokenizer's own."""
    from pagedcli.models.reading import read_spec

    if not (folder / "config.json").is_file():
        return None
    return read_spec(folder, trust_remote_code=engine.trust_remote_code)


def max_model_len(engine: EngineConfig, spec: "ModelSpec") -> int:
    """Tokens of prompt and output together."""
    from pagedcli.engine.plan import resolve_max_model_len

    return resolve_max_model_len(engine, spec)


def model_sizes(engine: EngineConfig, spec: "ModelSpec") -> ModelSizes:
    """The numbers of a spec that memory depends on; of one rank's share with tensor parallelism."""
    from pagedcli.layers.parallel import ParallelContext
    from pagedcli.models.sharding import shard_spec

    num_ranks = engine.tensor_parallel_size
    own = shard_spec(spec, ParallelContext(0, num_ranks))
    sizes = {item.name: getattr(own, item.name) for item in fields(ModelSizes)}
    return ModelSizes(**{**sizes, "vocab_size": -(-spec.vocab_size // num_ranks)})


def model_dtype(engine: EngineConfig, spec: "ModelSpec") -> str:
    """Dtype of weights and activations by name."""
    dtype = spec.dtype if engine.dtype == "auto" else engine.dtype
    if dtype not in ITEMSIZE:
        raise ConfigError(f"dtype {dtype!r} of the model is not supported", hint="use --dtype bfloat16")
    return dtype


def kv_dtype(engine: EngineConfig, dtype: str, device: str) -> str:
    """Dtype of the KV cache by name, for a model that computes in `dtype` on a device of the type `device`.

    Raises: ConfigError as the engine would there.
    """
    import torch

    from pagedcli.attention.base import dtype_name
    from pagedcli.engine.plan import DTYPES, resolve_kv_dtype

    return dtype_name(resolve_kv_dtype(engine.kv_cache_dtype, DTYPES[dtype], torch.device(device)))


def largest_step(engine: EngineConfig, device_type: str, length: int) -> StepShape:
    """The step that sets the activation peak on a device of this type."""
    from pagedcli.engine.plan import resolve_max_num_batched_tokens

    return StepShape.largest(resolve_max_num_batched_tokens(engine, device_type), engine.max_num_seqs, length)


def expect_machine(engine: EngineConfig, spec: "ModelSpec") -> Machine | None:
    """What this machine would give the model, without loading it. None for a model whose weights are not predicted."""
    if spec.is_fallback:
        return None
    import torch

    from pagedcli.engine.memory import host_memory
    from pagedcli.engine.plan import resolve_device

    device, sizes, dtype = resolve_device(engine.device), model_sizes(engine, spec), model_dtype(engine, spec)
    itemsize = ITEMSIZE[dtype]
    length = max_model_len(engine, spec)
    on_gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if on_gpu else reversed(host_memory())
    terms = MemoryTerms(
        total=total,
        reserve=total - int(total * engine.gpu_memory_utilization) if on_gpu else 0,
        others=total - free,
        weights=sizes.num_parameters * itemsize,
        activations=sizes.activation_bytes(largest_step(engine, device.type, length), itemsize, native=not on_gpu),
    )
    budget = budget_of(terms, engine.gpu_memory_utilization)
    block_bytes = sizes.block_bytes(engine.block_size, kv_dtype(engine, dtype, device.type))
    num_blocks, reason = fit_blocks(engine, block_bytes, length, budget if on_gpu else None)
    return Machine(str(device), terms, engine.block_size, block_bytes, num_blocks, reason)


def budget_of(terms: MemoryTerms, utilization: float) -> MemoryBudget:
    """The engine's view of the same terms."""
    return MemoryBudget(
        total=terms.total,
        utilization=utilization,
        used=terms.others + terms.runtime + terms.weights,
        peak=terms.weights + terms.activations,
        current=terms.weights,
        graphs=terms.graphs,
    )


def fit_blocks(engine: EngineConfig, block_bytes: int, length: int, budget: MemoryBudget | None) -> tuple[int, str]:
    """Blocks in the pool as the engine would choose them, 0 if none fits, and what set the number."""
    from pagedcli.engine.plan import choose_num_blocks

    try:
        return choose_num_blocks(engine, block_bytes=block_bytes, max_model_len=length, budget=budget)
    except ConfigError as error:
        return 0, error.message
