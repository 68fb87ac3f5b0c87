"""Predicts the memory of an engine without loading anything, and what of a model fits into a machine.

Used by the engine before it loads weights, by `pagedcli plan`, and by `pagedcli profile-memory`, which compares the
prediction with its measurements.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from pagedcli.config import EngineConfig
from pagedcli.core.budget import ITEMSIZE, StepShape, Terms
from pagedcli.core.plan import Plan, Pool
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.footprint import Footprint, footprint, step_bytes
from pagedcli.models.formats import FORMATS
from pagedcli.models.gguf.quantization import GgufQuantization
from pagedcli.models.hub import weight_files
from pagedcli.models.loading import weight_format
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.decide import choose_pool, decide
from pagedcli.planning.machine import Machine
from pagedcli.printable import plural
from pagedcli.records import Bytes, Whole, computed, size

CUDA_CONTEXT = 512 * 2**20  # bytes of an idle CUDA process on recent cards, within a factor of two
HOST_PROCESS = 250 * 2**20  # bytes; Python with torch and the native library, measured with torch 2.13 on Linux
GRAPH_BYTES = 8 * 2**20  # bytes of one CUDA graph without its tensors, within a factor of two
EXPERT_TOKENS = 2048  # most tokens whose experts the native CPU decoder computes at a time (MOST_TOKENS in experts.cpp)
SORT_BYTES = 24  # per logit: float32 copies, sorted values with their int64 indices, and probabilities
PENALTY_BYTES = 9  # per logit: a float32 copy and the tables of penalties; the native kernels need no sort
FROM_HEAP = 32 * 2**20  # bytes; glibc takes smaller tensors from its heap, which keeps what is freed
FREED_BYTES = 8  # per logit: two float32 copies that are freed before the peak, and stay in the heap


# ---------------------------------------------------------------------- the terms


def rank_spec(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """The sizes of one rank's part, with its share of the vocabulary."""
    own = shard_spec(spec, ParallelContext(0, config.tensor_parallel_size))
    return replace(own, vocab_size=-(-spec.vocab_size // config.tensor_parallel_size))


def engine_footprint(config: EngineConfig, spec: ModelSpec, plan: Plan) -> Footprint:
    """The weights of the model as the engine keeps them; with tensor parallelism those of one rank."""
    parallel, shard = ParallelContext(0, config.tensor_parallel_size), None
    if parallel.size > 1:
        shard = partial(shard_parameters, spec=spec, parallel=parallel)
    formats = weight_format(config.quantization, spec)
    return footprint(spec, formats, plan.kernels, ITEMSIZE[plan.dtype], shard=shard)


def predict_terms(config: EngineConfig, spec: ModelSpec, plan: Plan, machine: Machine) -> Terms:
    """Every term of the device's memory, computed from the model's parameters and the machine's free memory."""
    own, itemsize = rank_spec(config, spec), ITEMSIZE[plan.dtype]
    weights, gpu = engine_footprint(config, spec, plan).num_bytes, machine.gpu(plan.device)
    activations = activation_bytes(
        own, plan.limits.largest_step, itemsize, native=plan.in_one_call, from_heap=FROM_HEAP if gpu is None else 0
    )
    if gpu is None:
        return Terms(
            total=machine.total_bytes,
            others=machine.total_bytes - machine.available_bytes,
            runtime=HOST_PROCESS,
            weights=weights,
            activations=activations,
        )
    return Terms(
        total=gpu.total_bytes,
        reserve=gpu.total_bytes - int(gpu.total_bytes * config.gpu_memory_utilization),
        others=gpu.total_bytes - gpu.free_bytes,
        runtime=CUDA_CONTEXT,
        weights=weights,
        activations=activations,
        graphs=_graph_bytes(own, plan),
    )


def _graph_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Bytes of all CUDA graphs: their nodes, and one shared memory pool for a step's tensors."""
    if not plan.graph_sizes:
        return 0
    largest, itemsize = plan.graph_sizes[-1], ITEMSIZE[plan.dtype]
    tensors = step_bytes(spec, largest, itemsize) + largest * spec.vocab_size * itemsize
    return tensors + GRAPH_BYTES * len(plan.graph_sizes)


def activation_bytes(
    spec: ModelSpec, step: StepShape, itemsize: int, *, native: bool = False, from_heap: int = 0
) -> int:
    """What a step takes on top of weights and cache, predicted from the decoder's code: with torch what is alive at the
    widest of three places (fused kernels take less), with the native CPU decoder its workspace. `from_heap`: bytes of
    the largest tensor whose memory the allocator keeps after it was freed.
    """
    hidden = step.num_tokens * itemsize * spec.hidden_size
    num_logits = step.num_seqs * spec.vocab_size
    sampling = num_logits * (itemsize + (PENALTY_BYTES if native else SORT_BYTES))
    if not native:
        if num_logits * ITEMSIZE["float32"] < from_heap:
            sampling += num_logits * FREED_BYTES
        return max(step_bytes(spec, step.num_tokens, itemsize), hidden + sampling)
    widest = spec.widest_attention
    heads = (widest.num_heads + 2 * widest.num_kv_heads) * widest.head_dim
    inner = max(widest.num_heads * widest.head_dim, spec.widest_mlp, spec.hidden_size)
    beside = spec.hidden_size if spec.layers[0].norms == "shared" else 0
    workspace = step.num_tokens * itemsize * (spec.hidden_size + heads + inner + spec.inputs_width + beside)
    if spec.experts is not None:
        rows = min(step.num_tokens, EXPERT_TOKENS) * spec.experts.num_per_token
        workspace += rows * itemsize * (spec.experts.each.width + spec.hidden_size)
    return workspace + max(hidden, sampling)


def loading_peak(config: EngineConfig, spec: ModelSpec, plan: Plan, folder: Path) -> int:
    """Peak host bytes of this process while it loads a model on a CPU: the weights and their sources. Includes pages
    of a mapped checkpoint, which the system drops when memory is short."""
    own, itemsize = engine_footprint(config, spec, plan), ITEMSIZE[plan.dtype]
    if config.load_format == "dummy":
        table = spec.vocab_size * spec.hidden_size
        return HOST_PROCESS + max(own.num_bytes, own.parameters * itemsize) + table * itemsize
    checkpoint = sum(file.stat().st_size for file in weight_files(folder))
    return HOST_PROCESS + own.num_bytes + checkpoint - mapped_weights(config, spec, plan)


def mapped_weights(config: EngineConfig, spec: ModelSpec, plan: Plan) -> int:
    """Bytes of weights that are read from the mapped checkpoint: an embedding table not shared with the packed output
    layer."""
    keeps_embedding = config.quantization is not None or not spec.tie_word_embeddings
    is_quantized = isinstance(spec.quantization, GgufQuantization)  # its embedding, too
    if config.load_format == "dummy" or spec.dtype != plan.dtype or is_quantized:
        return 0
    rows = rank_spec(config, spec).vocab_size * spec.hidden_size if keeps_embedding else 0
    inputs = spec.layer_inputs  # a second table, of the embeddings of layers
    second = inputs.vocab_size * spec.inputs_width if inputs is not None else 0
    return (rows + second) * ITEMSIZE[plan.dtype]


# ---------------------------------------------------------------------- the pool


def pool_within(config: EngineConfig, plan: Plan, terms: Terms, *, available: int | None = None) -> Pool:
    """The pool that the engine would create within these terms. `available`: bytes that are free on a CPU now, with the
    model loaded; None: what the terms leave."""
    available = terms.total - terms.used if available is None else available
    try:
        return choose_pool(config, plan, available=available, terms=None if plan.on_cpu else terms)
    except ConfigError as error:
        return Pool(0, error.message, error.hint)


def expected_pool(config: EngineConfig, spec: ModelSpec, plan: Plan, machine: Machine) -> Pool | None:
    """What the model would get on the machine; None for a model that runs through transformers."""
    if spec.is_fallback:
        return None
    terms = predict_terms(config, spec, plan, machine)
    refusal = weights_refusal(config, spec, terms, machine)
    if refusal is not None:
        return Pool(0, refusal.message, refusal.hint)
    return pool_within(config, plan, terms)


# ---------------------------------------------------------------------- what fits


def _room(num_bytes: int) -> str:
    return size(num_bytes) if num_bytes >= 0 else f"{size(-num_bytes)} too few"


class Fit:
    """One way to keep a model, and what it leaves for the KV cache. Tokens and requests: those of a pool of all memory
    that is left."""

    flags: Annotated[str, "with"]
    weight_format: str = computed(lambda fit: fit.plan.weights or fit.plan.dtype)
    kv_dtype: str = computed(lambda fit: fit.plan.kv_dtype)
    weights_bytes: Annotated[Bytes, "weights"] = computed(lambda fit: fit.terms.weights)
    room_bytes: Annotated[int, "left for KV", _room] = computed(lambda fit: fit.terms.kv_cache)
    token_bytes: Annotated[Bytes, "KV per token"]  # over all layers, as long as no window has passed the token
    num_tokens: int = computed(lambda fit: fit._block_room // fit.token_bytes)
    longest_request: int = computed(lambda fit: fit._longest_request)
    max_concurrency: Annotated[Whole, "at model length"] = computed(lambda fit: fit._max_concurrency)
    # requests of max_model_len tokens that the pool holds at once
    pool_concurrency: Whole = computed(lambda fit: fit._tables.concurrency(fit.pool.num_blocks, fit._most))

    def __init__(self, plan: Plan, terms: Terms, pool: Pool, flags: str = "as configured") -> None:
        self.plan, self.terms, self.pool, self.flags = plan, terms, pool, flags
        self.token_bytes = plan.block_bytes * len(plan.limits.groups) // plan.limits.block_size
        self._tables, self._most = plan.limits.tables, plan.limits.max_model_len
        self._block_room = max(0, terms.kv_cache - pool.state_bytes(plan.limits))

    @property
    def _longest_request(self) -> int:
        if not self._tables.has_windows:
            return min(self.num_tokens, self._most)
        num_blocks = self._block_room // self.plan.block_bytes
        return self._tables.longest(num_blocks, self.plan.limits.chunk_size, self._most)

    @property
    def _max_concurrency(self) -> float:
        if not self._tables.has_windows:
            return self.num_tokens / self._most
        return self._tables.concurrency(self._block_room // self.plan.block_bytes, self._most)


def fits(config: EngineConfig, spec: ModelSpec, machine: Machine) -> list[Fit]:
    """Every weight format and KV cache dtype that runs on the machine; those of `config` first, others by size."""
    kinds = dict.fromkeys([config.quantization, *FORMATS])
    caches = dict.fromkeys([config.kv_cache_dtype, "auto", "fp8", "int8"])
    found: dict[tuple[str, str], Fit] = {}
    for quantization in kinds:
        for cache in caches:
            changed = msgspec.structs.replace(config, quantization=quantization, kv_cache_dtype=cache)
            try:
                plan = decide(changed, spec, machine)
            except PagedcliError:  # not available on this machine: whoever asks for it is told the reason
                continue
            terms = predict_terms(changed, spec, plan, machine)
            fit = Fit(plan, terms, pool_within(changed, plan, terms), _flags(config, changed))
            found.setdefault((fit.weight_format, fit.kv_dtype), fit)
    own, *others = found.values()
    return [own, *sorted(others, key=lambda fit: (-fit.weights_bytes, -fit.token_bytes))]


def _flags(config: EngineConfig, changed: EngineConfig) -> str:
    flags = []
    if changed.quantization != config.quantization:
        flags.append(f"--quantization {changed.quantization}" if changed.quantization else "no --quantization")
    if changed.kv_cache_dtype != config.kv_cache_dtype:
        flags.append(f"--kv-cache-dtype {changed.kv_cache_dtype}")
    return " ".join(flags) or "as configured"


def weights_refusal(config: EngineConfig, spec: ModelSpec, terms: Terms, machine: Machine) -> ConfigError | None:
    """The error for weights that alone exceed the free memory; None if they fit."""
    left = terms.total - terms.reserve - terms.others  # terms.runtime may be part of the others by now
    if terms.weights <= left:
        return None
    return ConfigError(
        f"the weights of {config.model} take {size(terms.weights)}, but only {size(max(0, left))} of memory are free",
        hint=fitting_hint(fits(config, spec, machine)),
    )


def fitting_hint(found: Sequence[Fit]) -> str:
    """What to change so that the model fits, the least first."""
    for fit in found[1:]:
        if fit.room_bytes >= fit.token_bytes:
            return (
                f"{fit.flags} fits: {size(fit.weights_bytes)} of weights leave room for"
                f" {plural(fit.num_tokens, 'token')}; pagedcli profile-memory shows more"
            )
    smallest = min(found, key=lambda fit: fit.weights_bytes)
    return f"nothing fits: even {smallest.weight_format} weights take {size(smallest.weights_bytes)}"
