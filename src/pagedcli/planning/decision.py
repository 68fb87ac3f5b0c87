"""What is known about an engine before anything is loaded: its plan, its parts, its predicted memory and pool.

Made by planning.decide. Read by runner.loading, and by `plan`, `simulate` and `profile-memory`, so that none of them
has defaults of its own.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from pagedcli import __version__
from pagedcli.attention.base import AttentionSpec
from pagedcli.config import EngineConfig
from pagedcli.core.budget import ITEMSIZE, StepShape, Terms
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan, Pool
from pagedcli.errors import BackendError, ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.footprint import Footprint, footprint, step_bytes
from pagedcli.models.formats import WeightFormat
from pagedcli.models.gguf.types import GgufQuantization
from pagedcli.models.hub import weight_files
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.native.build import library_key
from pagedcli.native.processor import processor_name
from pagedcli.native.system import usable_cores
from pagedcli.planning.machine import Machine
from pagedcli.planning.step_time import FORM, TimeKey
from pagedcli.printable import plural
from pagedcli.records import size

CUDA_CONTEXT = 512 * 2**20  # bytes of an idle CUDA process on recent cards, within a factor of two
HOST_PROCESS = 250 * 2**20  # bytes; Python with torch and the native library, measured with torch 2.13 on Linux
GRAPH_BYTES = 8 * 2**20  # bytes of one CUDA graph without its tensors, within a factor of two
EXPERT_TOKENS = 2048  # most tokens whose experts the native CPU decoder computes at a time (MOST_TOKENS in experts.cpp)
SORT_BYTES = 24  # per logit: float32 copies, sorted values with their int64 indices, and probabilities
PENALTY_BYTES = 9  # per logit: a float32 copy and the tables of penalties; the native kernels need no sort
FROM_HEAP = 32 * 2**20  # bytes; glibc takes smaller tensors from its heap, which keeps what is freed
FREED_BYTES = 8  # per logit: two float32 copies that are freed before the peak, and stay in the heap
CPU_KV_BYTES = 4 * 2**30  # vLLM's default on a CPU; never more than half of what is available
GPU_POOL_TIMES = 4  # times what all sequences can hold, for the prefix cache: each block is an object on the host
LEAST_SLOTS = 8  # slots of recurrent state: prompts branch at several depths even where few sequences run


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything about a rank of an engine that is known before anything is loaded."""

    config: EngineConfig
    machine: Machine
    spec: ModelSpec  # the whole model
    plan: Plan  # the plan without its pool, which is measured once the model is loaded
    attention: AttentionSpec  # requirements on the attention backend
    weights: WeightFormat

    @cached_property
    def own(self) -> ModelSpec:
        """The sizes of one rank's part, with its share of the vocabulary."""
        num_ranks = self.config.tensor_parallel_size
        own = shard_spec(self.spec, ParallelContext(0, num_ranks))
        return replace(own, vocab_size=-(-self.spec.vocab_size // num_ranks))

    @cached_property
    def footprint(self) -> Footprint:
        """The weights as the engine keeps them; with tensor parallelism those of one rank."""
        parallel, shard = ParallelContext(0, self.config.tensor_parallel_size), None
        if parallel.size > 1:
            shard = partial(shard_parameters, spec=self.spec, parallel=parallel)
        return footprint(self.spec, self.weights, self.plan.kernels, ITEMSIZE[self.plan.dtype], shard=shard)

    @cached_property
    def terms(self) -> Terms:
        """Every term of the device's memory, computed from the model's parameters and the machine's free memory."""
        plan, machine, itemsize = self.plan, self.machine, ITEMSIZE[self.plan.dtype]
        gpu, from_heap = machine.gpu(plan.device), FROM_HEAP if plan.on_cpu else 0
        step = plan.limits.largest_step
        activations = activation_bytes(self.own, step, itemsize, native=plan.in_one_call, from_heap=from_heap)
        if gpu is None:
            return Terms(
                total=machine.total_bytes,
                others=machine.total_bytes - machine.available_bytes,
                runtime=HOST_PROCESS,
                weights=self.footprint.num_bytes,
                activations=activations,
            )
        return Terms(
            total=gpu.total_bytes,
            reserve=gpu.total_bytes - int(gpu.total_bytes * self.config.gpu_memory_utilization),
            others=gpu.total_bytes - gpu.free_bytes,
            runtime=CUDA_CONTEXT,
            weights=self.footprint.num_bytes,
            activations=activations,
            graphs=_graph_bytes(self.own, plan),
        )

    def weights_refusal(self, terms: Terms | None = None) -> str | None:
        """Why the weights alone exceed the free memory; None if they fit, or run through transformers. `terms`: by
        default the predicted ones."""
        if self.spec.is_fallback:
            return None
        terms = terms or self.terms
        left = terms.total - terms.reserve - terms.others  # terms.runtime may be part of the others by now
        if terms.weights <= left:
            return None
        return (
            f"the weights of {self.config.model} take {size(terms.weights)}, but only {size(max(0, left))} of memory"
            " are free"
        )

    @cached_property
    def pool(self) -> Pool | None:
        """What the model would get on the machine; None for a model that runs through transformers, whose memory is not
        predicted."""
        return None if self.spec.is_fallback else self.pool_within(self.terms)

    def pool_within(self, terms: Terms, *, available: int | None = None) -> Pool:
        """The pool that the engine would create within these terms. `available`: bytes that are free on a CPU now, with
        the model loaded; None: what the terms leave."""
        if available is None:
            if (refusal := self.weights_refusal(terms)) is not None:
                missing = missing_memory(terms, self.plan.block_bytes)
                return Pool(0, refusal, missing and missing[1])
            available = terms.total - terms.used
        try:
            return choose_pool(self.config, self.plan, available=available, terms=None if self.plan.on_cpu else terms)
        except ConfigError as error:
            return Pool(0, error.message, error.hint)

    @property
    def expected_plan(self) -> Plan:
        """The plan with the pool, where it is predicted."""
        pool = self.pool
        if pool is None:
            return self.plan
        limits = replace(self.plan.limits, num_blocks=pool.num_blocks or None, num_state_slots=pool.num_state_slots)
        return replace(self.plan, limits=limits, pool=pool)

    def loading_peak(self, folder: Path) -> int:
        """Peak host bytes of this process while it loads the model on a CPU: the weights and their sources. Includes
        pages of a mapped checkpoint, which the system drops when memory is short."""
        own, spec, itemsize = self.footprint, self.spec, ITEMSIZE[self.plan.dtype]
        if self.config.load_format == "dummy":
            table = spec.vocab_size * spec.hidden_size
            return HOST_PROCESS + max(own.num_bytes, own.parameters * itemsize) + table * itemsize
        checkpoint = sum(file.stat().st_size for file in weight_files(folder))
        return HOST_PROCESS + own.num_bytes + checkpoint - self.mapped_weights

    @property
    def mapped_weights(self) -> int:
        """Bytes of weights that are read from the mapped checkpoint: an embedding table not shared with the packed
        output layer."""
        config, spec = self.config, self.spec
        is_quantized = isinstance(spec.quantization, GgufQuantization)  # its embedding, too
        if config.load_format == "dummy" or spec.dtype != self.plan.dtype or is_quantized:
            return 0
        keeps_embedding = config.quantization is not None or not spec.tie_word_embeddings
        rows = self.own.vocab_size * spec.hidden_size if keeps_embedding else 0
        inputs = spec.layer_inputs  # a second table, of the embeddings of layers
        second = inputs.vocab_size * spec.inputs_width if inputs is not None else 0
        return (rows + second) * ITEMSIZE[self.plan.dtype]

    @property
    def time_key(self) -> TimeKey:
        """What identifies the time of the plan's steps on this machine. Of the limits only the block size is part of
        it: a step of this many tokens takes as long whatever the pool."""
        spec, plan, on_gpu = self.spec, self.plan, not self.plan.on_cpu
        experts, windows = spec.experts, {mixer.window or 0 for mixer in spec.attentions}
        sizes = (
            spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.num_heads,
            spec.num_kv_heads, spec.head_dim, spec.vocab_size, sorted(windows) if any(windows) else [],
            len(spec.states), experts and (experts.num_experts, experts.num_per_token, experts.each.width),
            self.config.tensor_parallel_size,
        )  # fmt: skip
        return TimeKey(
            version=f"{__version__} {_kernels_version()} {FORM}",
            processor=torch.cuda.get_device_name(plan.device) if on_gpu else processor_name(),
            threads=0 if on_gpu else min(torch.get_num_threads(), usable_cores()),
            device=plan.device,
            model=" ".join(map(str, sizes)),
            weights=f"{plan.weights} {0 if spec.is_fallback else self.footprint.num_bytes}",
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            backend=plan.backend,
            decoder=plan.decoder if not plan.graph_sizes else f"{plan.decoder}, graphs",
            block_size=plan.limits.block_size,
        )


def _kernels_version() -> str:
    try:
        return library_key()
    except BackendError:
        return "no native kernels"


# ---------------------------------------------------------------------- the terms


def _graph_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Bytes of all CUDA graphs: their nodes, and one shared memory pool for a step's tensors."""
    if not plan.graph_sizes:
        return 0
    largest, itemsize = plan.graph_sizes[-1], ITEMSIZE[plan.dtype]
    tensors = step_bytes(spec, largest, itemsize) + largest * spec.vocab_size * ITEMSIZE["float32"]
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
    sampling = num_logits * (ITEMSIZE["float32"] + (PENALTY_BYTES if native else SORT_BYTES))
    if not native:
        if num_logits * ITEMSIZE["float32"] < from_heap:
            sampling += num_logits * FREED_BYTES
        return max(step_bytes(spec, step.num_tokens, itemsize), hidden + sampling)
    widest = spec.widest_attention
    inner = max(widest.num_heads * widest.head_dim, spec.widest_mlp, spec.hidden_size)
    beside = spec.hidden_size if spec.layers[0].norms == "shared" else 0
    workspace = step.num_tokens * itemsize * (spec.hidden_size + widest.qkv_size + inner + spec.inputs_width + beside)
    if spec.experts is not None:
        rows = min(step.num_tokens, EXPERT_TOKENS) * spec.experts.num_per_token
        workspace += rows * itemsize * (spec.experts.each.width + spec.hidden_size)
    return workspace + max(hidden, sampling)


# ---------------------------------------------------------------------- the pool


def choose_pool(config: EngineConfig, plan: Plan, *, available: int, terms: Terms | None) -> Pool:
    """The number of blocks in the pool with the reason for it, and the number of slots of recurrent state.

    `terms` are those of a GPU's memory; on a CPU they are None, and `available` is the free host memory in bytes.
    Raises: ConfigError if no block fits, or if the requested pool exceeds the memory.
    """
    block_bytes, limits, most = plan.block_bytes, plan.limits, None
    if terms is not None:
        available = terms.available
    if config.num_kvcache_blocks is not None:
        num_bytes, reason = available, "num_kvcache_blocks"
        most = config.num_kvcache_blocks
    elif config.kv_cache_memory is not None:
        num_bytes, reason = config.kv_cache_memory, f"kv_cache_memory {config.kv_cache_memory} bytes"
    elif terms is not None:
        num_bytes, reason = max(0, terms.kv_cache), f"gpu_memory_utilization {config.gpu_memory_utilization}"
    else:
        num_bytes = min(CPU_KV_BYTES, available // 2)
        reason = f"{num_bytes / 2**30:.1f} GiB, the default on a CPU"
    num_slots = choose_num_slots(config, limits, num_bytes if most is None else num_bytes - most * block_bytes)
    state_bytes = (num_slots or 0) * limits.state_bytes
    num_blocks = most if most is not None else max(0, num_bytes - state_bytes) // block_bytes
    if config.num_kvcache_blocks is None and config.kv_cache_memory is None:
        times = 1 if terms is None else GPU_POOL_TIMES
        most = times * limits.tables.most_blocks(limits.max_model_len, limits.chunk_size) * limits.max_num_seqs
        if most < num_blocks:
            num_blocks = most
            reason = "max_num_seqs x max_model_len" + (f" x {times}, for the prefix cache" if times > 1 else "")
    if num_blocks < 1:
        message = f"no KV block fits: one needs {block_bytes} bytes ({reason})"
        hint = "lower --max-num-batched-tokens or --block-size, raise --gpu-memory-utilization or --kv-cache-memory"
        missing = None if terms is None else missing_memory(terms, block_bytes)
        message, hint = missing or (message, hint)
        raise ConfigError(message, hint=hint)
    if num_blocks * block_bytes + state_bytes > available:
        states = f", {plural(num_slots, 'slot')} of recurrent state included" if num_slots else ""
        raise ConfigError(
            f"{reason} asks for a KV cache of {size(num_blocks * block_bytes + state_bytes)}{states}, but only"
            f" {size(max(0, available))} of memory are available",
            hint="lower --kv-cache-memory or --num-kvcache-blocks, or leave it out",
        )
    return Pool(num_blocks, reason, num_state_slots=num_slots)


def choose_num_slots(config: EngineConfig, limits: Limits, num_bytes: int) -> int | None:
    """Slots of recurrent state within memory for blocks and slots: two per sequence, one that it writes and one for a
    snapshot, at least LEAST_SLOTS, and at most what half of the memory holds. None: the model has none."""
    if not limits.state_bytes:
        return None
    if config.num_state_slots is not None:
        return config.num_state_slots
    return max(2, min(max(LEAST_SLOTS, 2 * limits.max_num_seqs), num_bytes // 2 // limits.state_bytes))


def missing_memory(terms: Terms, block_bytes: int) -> tuple[str, str] | None:
    """Message and hint for a device where no block fits: what uses the memory, how much is missing, what to change."""
    if terms.kv_cache >= block_bytes:
        return None
    held = {
        "other processes": terms.others,
        "kept free by gpu_memory_utilization": terms.reserve,
        "weights": terms.weights,
        "activations of the largest step": terms.activations,
        "runtime": terms.runtime,
        "CUDA graphs": terms.graphs,
    }
    ordered = sorted(((num_bytes, name) for name, num_bytes in held.items() if num_bytes > 0), reverse=True)
    parts = ", ".join(f"{name} {size(num_bytes)}" for num_bytes, name in ordered)
    missing = block_bytes - terms.kv_cache
    message = (
        f"no KV block fits: one needs {size(block_bytes)}, {size(missing)} are missing; {size(terms.total)} are used"
        f" by: {parts}"
    )
    return message, _remedy(terms, missing, ordered[0][1])


def _remedy(terms: Terms, missing: int, largest: str) -> str:
    """What to change, the most effective first."""
    ways = []
    if largest == "other processes" or terms.others >= missing:
        ways.append("end other processes on the device")
    if terms.reserve > missing:
        needed = (terms.total - terms.reserve + missing) / terms.total
        ways.append(f"--gpu-memory-utilization {min(1.0, needed + 0.005):.2f} or more")
    if terms.activations > missing:
        ways.append("a lower --max-num-batched-tokens (activations)")
    if terms.graphs > missing:
        ways.append("--enforce-eager (no CUDA graphs)")
    return ", or ".join(ways or ["a larger device, a smaller model or a narrower --dtype"])
