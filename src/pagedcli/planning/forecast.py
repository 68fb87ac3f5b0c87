"""Predicts the memory of an engine from its decisions and the model's sizes, without loading anything.

Used by `pagedcli plan`, and by `pagedcli profile-memory`, which compares it with its measurements.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from pagedcli.config import EngineConfig
from pagedcli.core.budget import ITEMSIZE, MemoryBudget, MemoryTerms, ModelSizes
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import AS_STORED
from pagedcli.models.packed_formats import Checkpoint
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.sharding import shard_parameters, shard_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.planning.decide import choose_num_blocks
from pagedcli.planning.machine import Machine

CUDA_CONTEXT = 512 * 2**20  # bytes of an idle CUDA process on recent cards, within a factor of two
HOST_PROCESS = 250 * 2**20  # bytes; Python with torch and the native library, measured with torch 2.13 on Linux
GRAPH_BYTES = 8 * 2**20  # bytes of one CUDA graph without its tensors, within a factor of two


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory and the pool that a model would get on a machine."""

    terms: MemoryTerms
    num_blocks: int  # 0: none fits
    reason: str  # why num_blocks is what it is
    hint: str | None  # what to do if it is 0


def model_sizes(config: EngineConfig, spec: ModelSpec) -> ModelSizes:
    """The numbers of a spec that memory depends on; of one rank's share with tensor parallelism."""
    num_ranks = config.tensor_parallel_size
    own = shard_spec(spec, ParallelContext(0, num_ranks))
    sizes = {item.name: getattr(own, item.name) for item in fields(ModelSizes)}
    return ModelSizes(**{**sizes, "vocab_size": -(-spec.vocab_size // num_ranks)})


def predict_terms(config: EngineConfig, spec: ModelSpec, plan: Plan, machine: Machine) -> MemoryTerms:
    """Every term of the device's memory, computed from sizes and the machine's free memory."""
    sizes, itemsize = model_sizes(config, spec), ITEMSIZE[plan.dtype]
    weights = weight_bytes(config, spec, plan)
    activations = sizes.activation_bytes(plan.limits.largest_step, itemsize, native=plan.in_one_call)
    gpu = machine.gpu(plan.device)
    if gpu is None:
        return MemoryTerms(
            total=machine.total_bytes,
            others=machine.total_bytes - machine.available_bytes,
            runtime=HOST_PROCESS,
            weights=weights,
            activations=activations,
        )
    return MemoryTerms(
        total=gpu.total_bytes,
        reserve=gpu.total_bytes - int(gpu.total_bytes * config.gpu_memory_utilization),
        others=gpu.total_bytes - gpu.free_bytes,
        runtime=CUDA_CONTEXT,
        weights=weights,
        activations=activations,
        graphs=predict_graphs(sizes, plan),
    )


def weight_bytes(config: EngineConfig, spec: ModelSpec, plan: Plan) -> int:
    """Bytes of one rank's weights in memory."""
    itemsize = ITEMSIZE[plan.dtype]
    if spec.quantization is None:
        return model_sizes(config, spec).weight_bytes(itemsize, quantization=config.quantization)
    stored, rank = Checkpoint(spec.quantization), ParallelContext(0, config.tensor_parallel_size)
    total = 0
    for parameter in shard_parameters(decoder_parameters(spec, AS_STORED), spec, rank).values():
        for name, shape in parameter.kept_shapes.items():
            if parameter.layer_format is None:
                total += math.prod(shape) * itemsize
            else:
                total += stored.of(name.removesuffix(".weight")).kept_bytes(shape, itemsize, plan.kernels)
    return total


def predict_graphs(sizes: ModelSizes, plan: Plan) -> int:
    """Bytes of all CUDA graphs: their nodes, and one shared memory pool for a step's tensors."""
    if not plan.graph_sizes:
        return 0
    largest = plan.graph_sizes[-1]
    tensors = sizes.step_bytes(largest, ITEMSIZE[plan.dtype]) + sizes.logits_bytes(largest, ITEMSIZE[plan.dtype])
    return tensors + GRAPH_BYTES * len(plan.graph_sizes)


def forecast_pool(config: EngineConfig, plan: Plan, terms: MemoryTerms) -> Forecast:
    """The pool that the engine would create within these terms."""
    budget = None if plan.on_cpu else budget_of(terms, config.gpu_memory_utilization)
    available = terms.total - terms.others - terms.runtime - terms.weights
    try:
        num_blocks, reason = choose_num_blocks(config, plan, available=available, budget=budget)
    except ConfigError as error:
        return Forecast(terms, 0, error.message, error.hint)
    return Forecast(terms, num_blocks, reason, None)


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


def loading_peak(config: EngineConfig, spec: ModelSpec, plan: Plan, folder: Path) -> int:
    """Peak host bytes of this process while it loads a model on a CPU: the weights and their sources. Includes pages
    of a mapped checkpoint, which the system drops when memory is short."""
    sizes, itemsize = model_sizes(config, spec), ITEMSIZE[plan.dtype]
    weights = weight_bytes(config, spec, plan)
    if config.load_format == "dummy":
        return HOST_PROCESS + max(weights, sizes.num_parameters * itemsize) + sizes.table_bytes(itemsize)
    checkpoint = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return HOST_PROCESS + weights + checkpoint - mapped_weights(config, spec, plan)


def mapped_weights(config: EngineConfig, spec: ModelSpec, plan: Plan) -> int:
    """Bytes of weights that are read from the mapped checkpoint: an embedding table not shared with the packed output
    layer."""
    keeps_embedding = config.quantization is not None or not spec.tie_word_embeddings
    if config.load_format == "dummy" or spec.dtype != plan.dtype or not keeps_embedding:
        return 0
    return model_sizes(config, spec).table_bytes(ITEMSIZE[plan.dtype])
