"""From a configuration to a runner that is ready: device, backend, weights, measured memory, KV cache, CUDA graphs.

Used by LLMEngine and by every worker of a tensor-parallel group, which all do the same in step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedcli.attention.base import AttentionBackend, dtype_name
from pagedcli.config import EngineConfig
from pagedcli.engine.cuda_graphs import DecodeGraphs, bucket_sizes, graph_bytes, why_no_graphs
from pagedcli.engine.engine_plan import Plan
from pagedcli.engine.kv_scales import kv_scales
from pagedcli.engine.memory import measure_budget
from pagedcli.engine.model_runner import ModelRunner
from pagedcli.engine.plan import (
    choose_backend,
    choose_num_blocks,
    model_folder,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
    runs_ahead,
)
from pagedcli.errors import ConfigError
from pagedcli.kvcache.budget import MemoryBudget, block_bytes
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM
from pagedcli.models.loading import load_model
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.native.threads import limit_threads


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What runs, and why so."""

    model_path: Path
    spec: ModelSpec  # of the whole model
    model: CausalLM  # of this rank
    plan: Plan
    runner: ModelRunner


def load_engine(
    config: EngineConfig,
    *,
    parallel: ParallelContext = SINGLE,
    on_weights: Callable[[], None] = lambda: None,
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> LoadedEngine:
    """Load everything that a configuration asks for, or one rank's part of it.

    `on_weights` is called when the weights are there, before anything runs; `agree` gets the number of blocks that
    fit here and returns how many all ranks take.
    Raises:  ConfigError, ModelError, BackendError.
    """
    path = model_folder(config)
    spec = read_spec(path, trust_remote_code=config.trust_remote_code)
    own_spec = shard_spec(spec, parallel)
    device = rank_device(config, parallel)
    if device.type == "cpu":
        limit_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    dtype = resolve_dtype(config.dtype, spec)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    max_model_len = resolve_max_model_len(config, spec)
    selection = choose_backend(config, own_spec, device=device, dtype=dtype, kv_dtype=kv_dtype)
    model = load_model(
        path,
        spec,
        backend=selection.backend,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        quantization=config.quantization,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        max_model_len=max_model_len,
        parallel=parallel,
    )
    on_weights()
    bytes_per_block = block_bytes(
        num_layers=own_spec.num_layers,
        block_size=config.block_size,
        num_kv_heads=own_spec.num_kv_heads,
        head_dim=own_spec.head_dim,
        kv_dtype=dtype_name(kv_dtype),
    )
    scales = None
    if kv_dtype == torch.float8_e4m3fn:  # other caches hold numbers as they are, or a scale for each token and head
        scales = kv_scales(
            model,
            selection.backend,
            device=device,
            dtype=dtype,
            block_size=config.block_size,
            max_model_len=max_model_len,
            parallel=parallel,
        )
    no_graphs = why_no_graphs(config, spec, device, selection.backend)
    budget = _measure(config, model, selection.backend, device, kv_dtype, max_model_len, with_graphs=no_graphs is None)
    num_blocks, reason = choose_num_blocks(
        config, block_bytes=bytes_per_block, max_model_len=max_model_len, budget=budget
    )
    num_blocks = agree(num_blocks)
    plan = Plan(
        model=config.model,
        device=str(device),
        dtype=dtype_name(dtype),
        backend=selection.backend.name,
        refused=selection.refused,
        block_size=config.block_size,
        block_bytes=bytes_per_block,
        num_blocks=num_blocks,
        num_blocks_reason=reason,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=resolve_max_num_batched_tokens(config, device.type),
        weight_bytes=model.weight_bytes,
        budget=budget,
        graph_sizes=() if no_graphs is not None else tuple(bucket_sizes(config.max_num_seqs)),
        no_graphs=no_graphs,
        kv_dtype=dtype_name(kv_dtype),
        kv_scales=scales,
        vocab_size=spec.vocab_size,
        eos_token_ids=frozenset(spec.eos_token_ids),
        chunked_prefill_size=config.chunked_prefill_size,
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_policy=config.preemption_policy,
        runs_ahead=runs_ahead(config, device),
        seed=config.seed,
    )
    runner = ModelRunner(
        model,
        selection.backend,
        device=device,
        kv_dtype=kv_dtype,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        parallel=parallel,
    )
    if no_graphs is None:
        runner.graphs = DecodeGraphs(runner, capture=True)
    return LoadedEngine(path, spec, model, plan, runner)


def rank_device(config: EngineConfig, parallel: ParallelContext) -> torch.device:
    """The device of a rank: GPUs side by side, from the one that --device names.

    Raises:  ConfigError if there are fewer GPUs than ranks.
    """
    device = resolve_device(config.device)
    if parallel.size == 1 or device.type != "cuda":
        return device
    index, num_gpus = (device.index or 0) + parallel.rank, torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigError(
            f"tensor_parallel_size is {parallel.size}, which needs GPU {index}, but there are {num_gpus}",
            hint=f"use --tensor-parallel-size {num_gpus} or fewer",
        )
    return torch.device("cuda", index)


def _measure(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    device: torch.device,
    kv_dtype: torch.dtype,
    max_model_len: int,
    *,
    with_graphs: bool,
) -> MemoryBudget | None:
    """The memory terms of a CUDA device, graphs included; None on a CPU."""
    budget = measure_budget(config, model, backend, device, kv_dtype, max_model_len)
    if budget is None or not with_graphs:
        return budget
    return replace(budget, graphs=graph_bytes(config, model, backend, device, kv_dtype, max_model_len))
