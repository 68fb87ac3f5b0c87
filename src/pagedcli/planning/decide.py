"""Decides how an engine will run, from a configuration, a model and a machine, before anything is loaded or allocated.

The only place that decides. The engine, `generate`, `plan`, `doctor`, `profile-memory` and `bench` read its Decision,
to whose plan runner.loading adds what is measured after loading.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import torch

from pagedcli.attention.base import AttentionSpec, dtype_name
from pagedcli.attention.select import choose_backend
from pagedcli.config import EngineConfig
from pagedcli.core.groups import page_bytes, sized
from pagedcli.core.limits import CPU_STEP_TOKENS, Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.base import DecoderNeeds
from pagedcli.models.footprint import step_tokens
from pagedcli.models.formats import AS_STORED, FORMATS
from pagedcli.models.lengths import check_length, resolve_max_model_len
from pagedcli.models.loading import IN_ONE_CALL, choose_decoder, weight_format
from pagedcli.models.rope import rope_notes
from pagedcli.models.sharding import shard_spec
from pagedcli.models.spec import ModelSpec, layer_groups
from pagedcli.planning import features
from pagedcli.planning.decision import Decision
from pagedcli.planning.machine import Gpu, Machine
from pagedcli.printable import plural

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert to and from e4m3
GRAPH_PREFILL_TOKENS = 1024  # default of min_prefill_tokens with graphs: a step with prompts runs without one


def decide(config: EngineConfig, spec: ModelSpec, machine: Machine, *, rank: int = 0) -> Decision:
    """How a rank of an engine will run. `spec` is that of the whole model.

    Raises: ConfigError, BackendError or ModelError for what cannot run there, with the reason.
    """
    return _settled(config, spec, machine, rank).decision


def formats_of(decision: Decision) -> Iterator[tuple[str, Decision]]:
    """Every weight format and KV cache dtype that runs on the machine, with the flags for it."""
    config = decision.config
    settled = _settled(config, decision.spec, decision.machine)
    for quantization in dict.fromkeys([config.quantization, *FORMATS]):
        for cache in dict.fromkeys([config.kv_cache_dtype, "auto", "fp8", "int8"]):
            flags = []
            if quantization != config.quantization:
                flags.append(f"--quantization {quantization}" if quantization else "no --quantization")
            if cache != config.kv_cache_dtype:
                flags.append(f"--kv-cache-dtype {cache}")
            changed = msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=cache)
            with suppress(PagedcliError):  # not available on this machine: whoever asks for it is told the reason
                yield " ".join(flags) or "as configured", replace(settled, config=changed).decision


def _settled(config: EngineConfig, spec: ModelSpec, machine: Machine, rank: int = 0) -> "_Settled":
    devices, dtype = rank_devices(config, machine), resolve_dtype(config.dtype, spec)
    gpus = [machine.gpu(str(device)) for device in devices]
    max_model_len = resolve_max_model_len(config, spec)
    check_length(spec, max_model_len)
    whole = spec.within(max_model_len)
    own = shard_spec(whole, ParallelContext(rank, config.tensor_parallel_size))
    if (num_tokens := config.max_num_batched_tokens) is None:
        smallest = min((gpu.total_bytes for gpu in gpus if gpu is not None), default=None)
        most = CPU_STEP_TOKENS if smallest is None else step_tokens(own, dtype.itemsize, smallest)
        num_tokens = max(config.max_num_seqs, most)
    return _Settled(
        config=config,
        machine=machine,
        spec=spec,
        whole=whole,
        own=own,
        device=devices[rank],
        gpu=gpus[rank],
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=num_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class _Settled:
    """What a configuration, a model and a machine settle whatever the formats of the weights and the cache."""

    config: EngineConfig
    machine: Machine
    spec: ModelSpec
    whole: ModelSpec  # spec, as requests of max_model_len tokens see it
    own: ModelSpec  # a rank's part of it
    device: torch.device
    gpu: Gpu | None
    dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def decision(self) -> Decision:
        """The decision for the formats that the configuration names."""
        config, spec, device = self.config, self.spec, self.device
        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self.dtype, self.gpu)
        features.check_cache(config, spec, kv_dtype)
        features.check_states(config, spec, device, is_here=self.machine.is_here)
        attention, is_here = self._attention(kv_dtype), self.machine.is_here
        choice = choose_backend(config.attention_backend, attention, is_here=is_here, missing=self.machine.missing)
        weights = weight_format(config.quantization, spec)
        needs = DecoderNeeds(self.whole, choice.kind, weights, config.tensor_parallel_size)
        no_graphs = features.why_no_graphs(config, self.whole, device, choice.kind)
        limits = self._limits(dtype_name(kv_dtype), with_graphs=no_graphs is None)
        decoder, kernels = choose_decoder(needs), needs.kernels
        available = self.machine.available_bytes if self.gpu is None else self.gpu.free_bytes
        features.check_tables(limits, self.own, self.dtype.itemsize, available)
        # no gain where host and device are the same processor
        runs_ahead = self.gpu is not None if config.async_scheduling is None else config.async_scheduling
        unequal = features.why_unequal_bits(spec, device, choice.kind, decoder)
        features.check_store(config, unequal)
        no_drafts = features.why_no_drafts(config, unequal, runs_ahead=runs_ahead)
        unseen = (f"GPU: {self.machine.unseen_gpu}",) if config.device == "auto" and self.machine.unseen_gpu else ()
        plan = Plan(
            limits=limits,
            model=config.model,
            device=str(device),
            dtype=dtype_name(self.dtype),
            kv_dtype=dtype_name(kv_dtype),
            backend=choice.name,
            refused=unseen + choice.refused,
            decoder=decoder,
            weights=None if weights is AS_STORED else weights.name,
            kernels=kernels,
            in_one_call=decoder == IN_ONE_CALL,
            block_bytes=page_bytes(limits.groups, limits.block_size),
            runs_ahead=runs_ahead,
            graph_sizes=() if no_graphs is not None else tuple(features.bucket_sizes(limits.max_num_seqs)),
            no_graphs=no_graphs,
            speculation=config.speculation if no_drafts is None else "off",
            no_drafts=no_drafts,
            notes=features.notes(self.whole, weights, kernels, device, self.dtype)
            + rope_notes(spec.rope, self.max_model_len),
            eos_token_ids=frozenset(spec.eos_token_ids),
            seed=config.seed,
        )
        return Decision(config=config, machine=self.machine, spec=spec, plan=plan, attention=attention, weights=weights)

    def _attention(self, kv_dtype: torch.dtype) -> AttentionSpec:
        """The requirements on the attention backend."""
        return AttentionSpec(
            device=self.device,
            dtype=self.dtype,
            block_size=self.config.block_size,
            num_heads=self.own.num_heads,
            num_kv_heads=self.own.num_kv_heads,
            head_dim=self.own.head_dim,
            kv_dtype=kv_dtype,
            layers=frozenset(self.own.attention_layers),
            capability=self.gpu.capability if self.gpu is not None else None,
            kernels=self.config.gpu_kernels,
        )

    def _limits(self, kv_dtype: str, *, with_graphs: bool) -> Limits:
        """Where decodes run by captured graphs, a prompt among them makes the whole step wait for the launch of each
        kernel; elsewhere it does not matter when a prompt starts."""
        least, heads = self.config.min_prefill_tokens, (self.own.num_kv_heads, self.own.head_dim)
        if least is None:
            least = GRAPH_PREFILL_TOKENS if with_graphs else 0
        return Limits.of(
            self.config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            min_prefill_tokens=least,
            groups=sized(layer_groups(self.own.attention_layers), heads=heads, kv_dtype=kv_dtype),
            vocab_size=self.spec.vocab_size,
            has_head=self.spec.has_head,
            state_bytes=self.own.state_bytes(self.dtype.itemsize),
        )


def rank_devices(config: EngineConfig, machine: Machine) -> list[torch.device]:
    """The device of each rank: consecutive GPUs from the one that --device names.

    Raises:  ConfigError if there are fewer GPUs than ranks.
    """
    device, num_ranks = resolve_device(config.device, machine), config.tensor_parallel_size
    if num_ranks == 1 or device.type != "cuda":
        return [device] * num_ranks
    first, num_gpus = device.index or 0, len(machine.gpus)
    if first + num_ranks > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, which needs GPU {first + num_ranks - 1}, but there are {num_gpus}",
            hint=f"use --tensor-parallel-size {num_gpus} or fewer",
        )
    return [torch.device("cuda", first + rank) for rank in range(num_ranks)]


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
