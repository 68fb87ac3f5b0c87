"""Decides how an engine will run, from a configuration, a model and a machine, before anything is loaded or allocated.

The only place that decides. The engine, `generate`, `plan`, `doctor`, `profile-memory` and `bench` read its Decision,
to whose plan runner.loading adds what is measured after loading.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from pagedcli.attention.base import AttentionBackend, AttentionSpec, dtype_name
from pagedcli.attention.select import choose_backend
from pagedcli.config import EngineConfig
from pagedcli.core.groups import page_bytes, sized
from pagedcli.core.limits import CPU_STEP_TOKENS, STEP_TOKENS, Limits
from pagedcli.core.plan import Kernels, Plan
from pagedcli.core.snapshots import SnapshotPolicy
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.layers.basic import fused_layers
from pagedcli.layers.linear import unpacked_note
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.base import DecoderNeeds, linear_kernels
from pagedcli.models.decoder import groups_experts
from pagedcli.models.footprint import step_bytes
from pagedcli.models.formats import AS_STORED, FORMATS, WeightFormat
from pagedcli.models.hub import resolve_model
from pagedcli.models.loading import IN_ONE_CALL, check_length, choose_decoder, weight_format
from pagedcli.models.rope import rope_notes
from pagedcli.models.sharding import shard_spec
from pagedcli.models.spec import ModelSpec, layer_groups
from pagedcli.planning.decision import Decision, rank_spec
from pagedcli.planning.machine import Gpu, Machine
from pagedcli.printable import plural
from pagedcli.records import size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert to and from e4m3
LONGEST_DEFAULT = 2**20  # default length of a request: tables are built for every position
GPU_STEP_TOKENS, LARGE_GPU_STEP_TOKENS = 8192, 16384  # default tokens per step, the second from this size on:
LARGE_GPU_BYTES = 70 * 2**30
GRAPH_PREFILL_TOKENS = 1024  # default of min_prefill_tokens with graphs: a step with prompts runs without one
LARGEST_BUCKET = 512  # sequences; in larger steps launch overhead is negligible


def decide(config: EngineConfig, spec: ModelSpec, machine: Machine, *, rank: int = 0) -> Decision:
    """How a rank of an engine will run. `spec` is that of the whole model.

    Raises: ConfigError, BackendError or ModelError for what cannot run there, with the reason.
    """
    max_model_len = resolve_max_model_len(config, spec)
    check_length(spec, max_model_len)
    whole = spec.within(max_model_len)
    own = shard_spec(whole, ParallelContext(rank, config.tensor_parallel_size))
    device = rank_device(config, machine, rank)
    gpu = machine.gpu(str(device))
    dtype = resolve_dtype(config.dtype, spec)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, gpu)
    state_bytes = own.state_bytes(dtype.itemsize)
    _check_cache(config, spec, kv_dtype)
    _check_states(config, spec, state_bytes, device, machine)
    attention = AttentionSpec(
        device=device,
        dtype=dtype,
        block_size=config.block_size,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        kv_dtype=kv_dtype,
        layers=frozenset(own.attention_layers),
        capability=gpu.capability if gpu is not None else None,
    )
    heads = (own.num_kv_heads, own.head_dim)
    groups = sized(layer_groups(own.attention_layers), heads=heads, kv_dtype=dtype_name(kv_dtype))
    choice = choose_backend(config.attention_backend, attention, is_here=machine.is_here, missing=machine.missing)
    no_graphs = why_no_graphs(config, whole, device, choice.kind)
    limits = Limits.of(
        config,
        max_model_len=max_model_len,
        max_num_batched_tokens=resolve_max_num_batched_tokens(config, whole, machine, dtype),
        min_prefill_tokens=resolve_min_prefill_tokens(config, with_graphs=no_graphs is None),
        groups=groups,
        vocab_size=spec.vocab_size,
        state_bytes=state_bytes,
    )
    stored = weight_format(config.quantization, spec)
    decoder = choose_decoder(DecoderNeeds(whole, choice.kind, stored, config.tensor_parallel_size))
    available = machine.available_bytes if gpu is None else gpu.free_bytes
    _check_tables(limits, own, itemsize=dtype.itemsize, available=available)
    kernels = linear_kernels(whole, choice.kind)
    unseen = (f"GPU: {machine.unseen_gpu}",) if config.device == "auto" and machine.unseen_gpu is not None else ()
    plan = Plan(
        limits=limits,
        model=config.model,
        device=str(device),
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(kv_dtype),
        backend=choice.name,
        refused=unseen + choice.refused,
        decoder=decoder,
        weights=None if stored is AS_STORED else stored.name,
        kernels=kernels,
        in_one_call=decoder == IN_ONE_CALL,
        block_bytes=page_bytes(groups, limits.block_size),
        # no gain where host and device are the same processor
        runs_ahead=gpu is not None if config.async_scheduling is None else config.async_scheduling,
        graph_sizes=() if no_graphs is not None else tuple(bucket_sizes(limits.max_num_seqs)),
        no_graphs=no_graphs,
        notes=_notes(whole, stored, kernels, device, dtype) + rope_notes(spec.rope, max_model_len),
        eos_token_ids=frozenset(spec.eos_token_ids),
        seed=config.seed,
    )
    _check_store(config, plan, spec, choice.kind)
    plan = _with_speculation(config, plan, spec, choice.kind)
    return Decision(config=config, machine=machine, spec=spec, plan=plan, attention=attention, weights=stored)


def _notes(
    spec: ModelSpec, stored: WeightFormat, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> tuple[str, ...]:
    """What the user should know of the linear layers."""
    notes = () if spec.is_fallback else unpacked_note(device, dtype, kernels)
    if spec.widened is not None and stored is AS_STORED:
        notes += (f"weights are {spec.widened}, widened to {dtype_name(dtype)} while loading",)
    note = stored.note(dtype_name(dtype), kernels)
    return notes if note is None else (*notes, note)


def model_folder(config: EngineConfig, *, weights: bool = True) -> Path:
    """The model's folder. A hub model is downloaded first, its weights only if they are wanted."""
    return resolve_model(config.model, revision=config.revision, weights=weights)


# ---------------------------------------------------------------------- one value each


def resolve_device(name: str, machine: Machine) -> torch.device:
    """The device of a --device value, a GPU with its index. Raises: ConfigError if it does not exist."""
    if name == "auto":
        name = "cuda" if machine.gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"device is {name!r}, which torch does not know"
        raise ConfigError(message, hint="use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, but pagedcli runs on cpu and cuda only", hint="use --device cpu")
    if device.type == "cpu" and device.index:
        raise ConfigError(f"device is {name!r}, but CPUs are not numbered", hint="use --device cpu")
    if device.type == "cuda" and not machine.gpus:
        message = f"device is {name!r}, but torch {torch.__version__} sees no CUDA GPU"
        raise ConfigError(message, hint=machine.unseen_gpu or "use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= len(machine.gpus):
        raise ConfigError(f"device is {name!r}, but there are {plural(len(machine.gpus), 'GPU')}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", machine.current_gpu)  # torch.cuda.set_device takes no other
    return device


def rank_device(config: EngineConfig, machine: Machine, rank: int = 0) -> torch.device:
    """The device of a rank: consecutive GPUs from the one that --device names.

    Raises:  ConfigError if there are fewer GPUs than ranks.
    """
    device, size = resolve_device(config.device, machine), config.tensor_parallel_size
    if size == 1 or device.type != "cuda":
        return device
    first, num_gpus = device.index or 0, len(machine.gpus)
    if first + size > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {size}, which needs GPU {first + size - 1}, but there are {num_gpus}",
            hint=f"use --tensor-parallel-size {num_gpus} or fewer",
        )
    return torch.device("cuda", first + rank)


def resolve_dtype(name: str, spec: ModelSpec) -> torch.dtype:
    """The dtype of a --dtype value; auto is the checkpoint's, or float32 if it names none."""
    chosen = (spec.dtype or "float32") if name == "auto" else name
    if chosen not in DTYPES:
        raise ConfigError(f"dtype {chosen!r} of the model is not supported", hint=f"use --dtype {'|'.join(DTYPES)}")
    return DTYPES[chosen]


def resolve_kv_dtype(name: str, dtype: torch.dtype, gpu: Gpu | None) -> torch.dtype:
    """The dtype of a --kv-cache-dtype value for a model that computes in `dtype` on a GPU, or on the CPU if None.

    Raises: ConfigError with the reason why it is not available there.
    """
    if name == "auto" or DTYPES.get(name) == dtype:
        return dtype
    if name == "int8":
        if gpu is not None:
            raise ConfigError(
                "kv_cache_dtype int8 needs a CPU, not a CUDA GPU",
                hint="use --kv-cache-dtype fp8 if the GPU supports it, or auto",
            )
        return torch.int8
    if name != "fp8":
        raise ConfigError(
            f"kv_cache_dtype is {name}, but the model computes in {dtype_name(dtype)}",
            hint=f"use --kv-cache-dtype auto, or --dtype {name}" if name in DTYPES else "use --kv-cache-dtype auto",
        )
    if gpu is None:
        raise ConfigError("kv_cache_dtype fp8 needs a CUDA GPU, not cpu", hint="use --kv-cache-dtype int8 or auto")
    if gpu.capability < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype fp8 needs compute capability 8.9; {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}",
            hint="use --kv-cache-dtype auto",
        )
    return torch.float8_e4m3fn


def resolve_max_num_batched_tokens(config: EngineConfig, spec: ModelSpec, machine: Machine, dtype: torch.dtype) -> int:
    """Tokens computed per step, the same on all ranks; `spec` is that of the whole model.

    A GPU reads all weights once per step and launches hundreds of kernels, so a step takes as many tokens as its memory
    holds easily: their activations stay within a sixteenth of it.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    ranks = range(config.tensor_parallel_size)
    cards = [card for each in ranks if (card := machine.gpu(str(rank_device(config, machine, each)))) is not None]
    if not cards:
        return max(config.max_num_seqs, CPU_STEP_TOKENS)
    gpu, spec = min(cards, key=lambda card: card.total_bytes), rank_spec(config, spec)
    num_tokens = LARGE_GPU_STEP_TOKENS if gpu.total_bytes >= LARGE_GPU_BYTES else GPU_STEP_TOKENS
    while num_tokens > STEP_TOKENS and step_bytes(spec, num_tokens, dtype.itemsize) > gpu.total_bytes // 16:
        num_tokens //= 2
    return max(config.max_num_seqs, num_tokens)


def resolve_min_prefill_tokens(config: EngineConfig, *, with_graphs: bool) -> int:
    """Prompt tokens that start together in a step of decodes. Where decodes run by captured graphs, a prompt among them
    makes the whole step wait for the launch of each kernel; elsewhere it does not matter when a prompt starts."""
    if config.min_prefill_tokens is not None:
        return config.min_prefill_tokens
    return GRAPH_PREFILL_TOKENS if with_graphs else 0


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of prompt and output together. Raises: ConfigError if the model has fewer positions."""
    limit = spec.max_position_embeddings
    if config.max_model_len is None:
        exact = spec.rope.exact_length if spec.rope is not None else None
        return min(limit, exact or LONGEST_DEFAULT)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {limit}",
            hint=f"use --max-model-len {limit} or less",
        )
    return config.max_model_len


def _check_cache(config: EngineConfig, spec: ModelSpec, kv_dtype: torch.dtype) -> None:
    """Raises: ConfigError for settings of the cache that exclude each other or the model."""
    if kv_dtype == torch.int8 and spec.is_fallback:
        raise ConfigError(
            f"kv_cache_dtype int8 is not for {spec.architecture}, which runs through transformers",
            hint="use --kv-cache-dtype auto",
        )
    if config.eviction != "lru" and not config.enable_prefix_caching:
        raise ConfigError(
            f"eviction is {config.eviction}, but without prefix caching there is nothing to evict",
            hint="leave out --eviction, or --no-enable-prefix-caching",
        )


def _check_store(config: EngineConfig, plan: Plan, spec: ModelSpec, backend: type[AttentionBackend]) -> None:
    """Raises: ConfigError for a prefix store whose blocks would not have the bits of computed ones (see
    docs/reproducibility.md), or that would never be used."""
    if config.prefix_store is None:
        for name in ("prefix_store_size", "prefix_store_days"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} is for a prefix store", hint="name its folder with --prefix-store")
        return
    if not config.prefix_store:
        raise ConfigError("prefix_store is empty", hint="name one, or leave out --prefix-store")
    hint: str | None
    if not config.enable_prefix_caching:
        why, hint = "prefix caching is off", "leave out --no-enable-prefix-caching"
    elif config.tensor_parallel_size > 1:
        why, hint = "it keeps the blocks of one rank", "use --tensor-parallel-size 1"
    elif (missing := _why_no_equal_bits(plan.device, backend, spec, plan.decoder)) is not None:
        why, hint = missing
    else:
        return
    raise ConfigError(f"prefix_store cannot be used: {why}", hint=hint or "leave out --prefix-store")


def _why_no_equal_bits(
    device: str, backend: type[AttentionBackend], spec: ModelSpec, decoder: str
) -> tuple[str, str | None] | None:
    """Why the bits of a token may depend on what else is in its step (see docs/reproducibility.md), and what to use
    instead. None: they do not."""
    if device != "cpu":
        return f"no equal bits are promised on {device}", "use --device cpu"
    if not backend.capabilities.batch_invariant:
        return f"no equal bits are promised with attention backend {backend.name}", "use --attention-backend cpu"
    if decoder != IN_ONE_CALL:
        return f"no equal bits are promised for {spec.architecture} with decoder {decoder}", None
    return None


def _with_speculation(config: EngineConfig, plan: Plan, spec: ModelSpec, backend: type[AttentionBackend]) -> Plan:
    """The plan with speculation as configured, or with the reason why it is off: where bits depend on the rest of a
    step, a draft could change the tokens."""
    if config.speculation == "off":
        return plan
    if (missing := _why_no_equal_bits(plan.device, backend, spec, plan.decoder)) is not None:
        why: str | None = missing[0]
    elif plan.runs_ahead:
        why = "async_scheduling launches a step before the tokens of the last one are known"
    elif config.tensor_parallel_size > 1:
        why = "tensor_parallel_size is more than 1"
    else:
        why = None
    return replace(plan, speculation=config.speculation if why is None else "off", no_drafts=why)


def _check_states(
    config: EngineConfig, spec: ModelSpec, state_bytes: int, device: torch.device, machine: Machine
) -> None:
    """Raises: ConfigError for settings of recurrent state that are wrong, or not for this model, or without Triton."""
    SnapshotPolicy.named(config.checkpoints)
    defaults = EngineConfig()
    for name in ("checkpoints", "num_state_slots"):
        value = getattr(config, name)
        if not state_bytes and value != getattr(defaults, name):
            raise ConfigError(
                f"{name} is {value}, but {spec.architecture} has no layers with recurrent state",
                hint=f"leave out --{name.replace('_', '-')}",
            )
    if state_bytes and device.type == "cuda" and machine.is_here and fused_layers() is None:
        raise ConfigError(
            f"{spec.architecture} has layers with recurrent state, whose kernels on {device} need Triton, which cannot"
            " run here",
            hint="`pagedcli doctor` says why; or use --device cpu",
        )


def _check_tables(limits: Limits, spec: ModelSpec, *, itemsize: int, available: int) -> None:
    """Raises: ConfigError if the tables that grow with the length of a request alone need more than `available` bytes:
    the rotary embedding of every position, and a block table per sequence."""
    ropes = {(mixer.rope, mixer.rotary_dim) for mixer in spec.attentions}
    rope_bytes = limits.max_model_len * itemsize * sum(head_dim for _, head_dim in ropes)
    block_table_bytes = limits.max_num_seqs * limits.tables.num_entries(limits.max_model_len) * 4
    if rope_bytes + block_table_bytes > available:
        needed = size(rope_bytes + block_table_bytes)
        raise ConfigError(
            f"max_model_len is {limits.max_model_len}: its tables of positions and blocks take {needed}, but only"
            f" {size(available)} are available",
            hint="lower --max-model-len or --max-num-seqs",
        )


# ---------------------------------------------------------------------- CUDA graphs


def bucket_sizes(num_seqs: int, largest: int = LARGEST_BUCKET) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, 16, then steps of at most half, and always the maximum."""
    end = min(num_seqs, largest)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size < end]
    return [*sizes, *range(320, end, 64), end]


def why_no_graphs(
    config: EngineConfig, spec: ModelSpec, device: torch.device, backend: type[AttentionBackend]
) -> str | None:
    """Why steps run without graphs; None if graphs are used."""
    if device.type != "cuda":
        return f"{device} has none"
    if config.enforce_eager:
        return "enforce_eager"
    if spec.is_fallback:
        return f"{spec.architecture} runs through transformers"
    if spec.experts is not None and not groups_experts(spec, backend):
        return "the host counts the tokens of each expert"
    if not backend.capabilities.graph_safe:
        return f"backend {backend.name} needs lengths on the host"
    return None


# ---------------------------------------------------------------------- what else could be chosen


def formats_of(decision: Decision) -> Iterator[tuple[str, Decision]]:
    """Every weight format and KV cache dtype that runs on the machine, with the flags for it."""
    config = decision.config
    for quantization in dict.fromkeys([config.quantization, *FORMATS]):
        for cache in dict.fromkeys([config.kv_cache_dtype, "auto", "fp8", "int8"]):
            flags = []
            if quantization != config.quantization:
                flags.append(f"--quantization {quantization}" if quantization else "no --quantization")
            if cache != config.kv_cache_dtype:
                flags.append(f"--kv-cache-dtype {cache}")
            changed = msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=cache)
            with suppress(PagedcliError):  # not available on this machine: whoever asks for it is told the reason
                yield " ".join(flags) or "as configured", decide(changed, decision.spec, decision.machine)
