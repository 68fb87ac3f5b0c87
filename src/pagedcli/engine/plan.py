"""What this machine will do with an EngineConfig: device, dtype, backend, and how many blocks fit and why."""

import os
from pathlib import Path

import torch

from pagedcli.attention.base import dtype_name
from pagedcli.attention.select import Selection, select_backend
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.kvcache.budget import MemoryBudget, blocks_for
from pagedcli.models.hub import resolve_model
from pagedcli.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert to and from e4m3
STEP_TOKENS, CPU_STEP_TOKENS = 2048, 512  # a CPU gains nothing by more, and holds the prompts of fewer at a time
LONGEST_DEFAULT = 2**20  # tokens of a request unless told otherwise: tables are built for every position
CPU_KV_BYTES = 4 * 2**30  # as vLLM's CPU backend; never more than half of what is available


def model_folder(config: EngineConfig, *, weights: bool = True) -> Path:
    """The folder of the model; a hub model is downloaded into one, its weights only if they are wanted."""
    return resolve_model(config.model, revision=config.revision, weights=weights)


def resolve_device(name: str) -> torch.device:
    """The device of a --device value, of a GPU with its number. Raises: ConfigError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"device is {name!r}, which torch does not know"
        raise ConfigError(message, hint="use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, but pagedcli runs on cpu and cuda only", hint="use --device cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"device is {name!r}, but torch {torch.__version__} sees no CUDA GPU"
        raise ConfigError(message, hint="use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} GPUs")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # torch.cuda.set_device takes no other
    return device


def resolve_dtype(name: str, spec: ModelSpec) -> torch.dtype:
    """The dtype of a --dtype value; auto is what the checkpoint says, float32 if it says nothing."""
    chosen = (spec.dtype or "float32") if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(f"dtype {chosen!r} of the model is not supported", hint=f"use --dtype {'|'.join(DTYPES)}")
    return DTYPES[chosen]


def choose_backend(
    config: EngineConfig, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Selection:
    """The attention backend of a rank. `spec` is the rank's own, with its share of the heads.

    Raises: BackendError if none runs; ConfigError for a cache that the model's implementation has not.
    """
    if kv_dtype == torch.int8 and spec.is_fallback:
        raise ConfigError(
            f"kv_cache_dtype int8 is not for {spec.architecture}, which runs through transformers",
            hint="use --kv-cache-dtype auto",
        )
    return select_backend(
        config.attention_backend,
        device=device,
        dtype=dtype,
        block_size=config.block_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=kv_dtype,
        layers=spec.attention_layers,
    )


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of a --kv-cache-dtype value for a model that computes in `dtype`. Raises: ConfigError with the reason
    why it cannot be had here."""
    if name == "auto" or DTYPES.get(name) == dtype:
        return dtype
    computes_in = dtype_name(dtype)
    if name == "int8":
        if device.type != "cpu":
            raise ConfigError(
                f"kv_cache_dtype int8 is for a CPU, not {device}",
                hint="use --kv-cache-dtype fp8 where the GPU has it, or auto"
                if device.type == "cuda"
                else "use --kv-cache-dtype auto",
            )
        return torch.int8
    if name != "fp8":
        raise ConfigError(
            f"kv_cache_dtype is {name}, but the model computes in {computes_in}",
            hint=f"use --kv-cache-dtype auto, or --dtype {name}" if name in DTYPES else "use --kv-cache-dtype auto",
        )
    if device.type != "cuda":
        raise ConfigError(
            f"kv_cache_dtype fp8 needs a CUDA GPU, not {device}",
            hint="use --kv-cache-dtype int8 or auto" if device.type == "cpu" else "use --kv-cache-dtype auto",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs compute capability 8.9; {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}",
            hint="use --kv-cache-dtype auto",
        )
    return torch.float8_e4m3fn


def runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether the engine launches each step before it reads the tokens of the last one. Where host and device are the
    same processor nothing is gained by it."""
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def resolve_max_num_batched_tokens(config: EngineConfig, device_type: str) -> int:
    """Tokens computed per step."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(config.max_num_seqs, CPU_STEP_TOKENS if device_type == "cpu" else STEP_TOKENS)


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of prompt and output together. Raises: ConfigError if the model's positions end earlier."""
    limit = spec.max_position_embeddings
    if config.max_model_len is None:
        return min(limit, LONGEST_DEFAULT)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}",
            hint=f"use --max-model-len {limit} or less",
        )
    return config.max_model_len


def choose_num_blocks(
    config: EngineConfig, *, block_bytes: int, max_model_len: int, budget: MemoryBudget | None
) -> tuple[int, str]:
    """Blocks in the pool, and what set the number. `budget` is the measured memory of a GPU, None on a CPU.

    Raises: ConfigError if no block fits, or if more are asked for than there is memory.
    """
    available = available_memory() if budget is None else budget.available
    if config.num_gpu_blocks_override is not None:
        num_blocks, reason = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory is not None:
        num_blocks, reason = config.kv_cache_memory // block_bytes, f"kv_cache_memory {config.kv_cache_memory} bytes"
    elif budget is not None:
        num_blocks, reason = budget.num_blocks(block_bytes), f"gpu_memory_utilization {budget.utilization}"
    else:
        num_bytes = min(CPU_KV_BYTES, available // 2)
        most = blocks_for(max_model_len, config.block_size) * config.max_num_seqs
        num_blocks, reason = num_bytes // block_bytes, f"{num_bytes / 2**30:.1f} GiB, the default on a CPU"
        if most < num_blocks:
            num_blocks, reason = most, "max_num_seqs x max_model_len"
    if num_blocks < 1:
        raise ConfigError(
            _no_blocks(block_bytes, reason, budget),
            hint="lower --max-num-batched-tokens or --block-size, raise --gpu-memory-utilization or --kv-cache-memory",
        )
    if num_blocks * block_bytes > available:
        raise ConfigError(
            f"{reason} asks for a KV cache of {num_blocks * block_bytes / 2**30:,.2f} GiB, but only "
            f"{max(0, available) / 2**30:,.2f} GiB of memory are available",
            hint="lower --kv-cache-memory or --num-gpu-blocks-override, or leave it out",
        )
    return num_blocks, reason


def _no_blocks(block_bytes: int, reason: str, budget: MemoryBudget | None) -> str:
    message = f"no KV block fits: one needs {block_bytes} bytes ({reason})"
    if budget is None:
        return message
    gib = 2**30
    return message + (
        f"; total {budget.total / gib:.2f} GiB x {budget.utilization} - used {budget.used / gib:.2f}"
        f" - activations {budget.activations / gib:.2f} - graphs {budget.graphs / gib:.2f}"
        f" = {budget.kv_cache / gib:.2f} GiB"
    )


def available_memory() -> int:
    """Bytes of host memory that a process can still take, cgroup limits included where they are readable."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: half of what is built in is a guess on the safe side
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        limit, current = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - current)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass
    return available
