"""From a configuration to a runner that is ready: device, backend, weights, measured memory, KV cache, CUDA graphs.

Used by LLMEngine and by every worker of a tensor-parallel group, in lockstep.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedcli.attention.base import AttentionBackend, dtype_name
from pagedcli.attention.select import load_backend
from pagedcli.config import EngineConfig
from pagedcli.core.budget import MemoryBudget
from pagedcli.core.plan import Plan
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM
from pagedcli.models.loading import load_model
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.native.threads import limit_threads
from pagedcli.planning.decide import Decisions, choose_num_blocks, decide, model_folder
from pagedcli.planning.fitting import weights_refusal
from pagedcli.planning.forecast import predict_terms
from pagedcli.planning.machine import available_memory, this_machine
from pagedcli.runner.kv_scales import kv_scales
from pagedcli.runner.memory import graph_bytes, measure_budget
from pagedcli.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model and the decisions behind it."""

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
    """Load what a configuration asks for, or one rank's part of it.

    `on_weights` is called once the weights are loaded, before anything runs; `agree` receives the number of blocks
    that fit here and returns the number that all ranks use.
    Raises:  ConfigError, ModelError, BackendError.
    """
    path = model_folder(config)
    spec = read_spec(path, trust_remote_code=config.trust_remote_code)
    machine = this_machine()
    decided = decide(config, spec, machine, rank=parallel.rank)
    if not spec.is_fallback:
        refusal = weights_refusal(config, spec, predict_terms(config, spec, decided, machine), machine)
        if refusal is not None:
            raise refusal
    if decided.device.type == "cpu":
        limit_threads()
    else:
        torch.cuda.set_device(decided.device)  # Triton launches on the current device
    backend = load_backend(decided.backend, decided.attention)
    model = load_model(
        path,
        spec,
        backend=backend,
        dtype=decided.dtype,
        device=decided.device,
        load_format=config.load_format,
        quantization=config.quantization,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        max_model_len=decided.max_model_len,
        parallel=parallel,
        decoder=decided.decoder,
    )
    on_weights()
    scales = None
    if decided.kv_dtype == torch.float8_e4m3fn:  # other caches are not quantized, or have a scale per token and head
        scales = kv_scales(
            model,
            backend,
            device=decided.device,
            dtype=decided.dtype,
            block_size=config.block_size,
            max_model_len=decided.max_model_len,
            parallel=parallel,
        )
    budget = _measure(config, model, backend, decided, parallel)
    num_blocks, reason = choose_num_blocks(config, decided, available=available_memory(), budget=budget)
    num_blocks = agree(num_blocks)
    runner = ModelRunner(
        model,
        backend,
        device=decided.device,
        kv_dtype=decided.kv_dtype,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=decided.max_model_len,
        parallel=parallel,
    )
    if decided.no_graphs is None:
        runner.make_graphs(capture=True)
    plan = _plan(config, spec, decided, num_blocks, reason, model.weight_bytes, budget, scales)
    return LoadedEngine(path, spec, model, plan, runner)


def _plan(
    config: EngineConfig,
    spec: ModelSpec,
    decided: Decisions,
    num_blocks: int,
    reason: str,
    weight_bytes: int,
    budget: MemoryBudget | None,
    scales: tuple[float, float] | None,
) -> Plan:
    """What was decided and what was measured."""
    return Plan(
        model=config.model,
        device=str(decided.device),
        dtype=dtype_name(decided.dtype),
        backend=decided.backend,
        refused=decided.refused,
        block_size=config.block_size,
        block_bytes=decided.block_bytes,
        num_blocks=num_blocks,
        num_blocks_reason=reason,
        max_model_len=decided.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=decided.max_num_batched_tokens,
        weight_bytes=weight_bytes,
        budget=budget,
        graph_sizes=decided.graph_sizes,
        no_graphs=decided.no_graphs,
        kv_dtype=dtype_name(decided.kv_dtype),
        kv_scales=scales,
        vocab_size=spec.vocab_size,
        eos_token_ids=frozenset(spec.eos_token_ids),
        chunked_prefill_size=config.chunked_prefill_size,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction=config.eviction,
        preemption_policy=config.preemption_policy,
        runs_ahead=decided.runs_ahead,
        seed=config.seed,
        windows=decided.table_shape.windows,
    )


def _measure(
    config: EngineConfig, model: CausalLM, backend: AttentionBackend, decided: Decisions, parallel: ParallelContext
) -> MemoryBudget | None:
    """The memory terms of a CUDA device, graphs included; None on a CPU."""
    arguments = (config, model, backend, decided.device, decided.kv_dtype, decided.max_model_len, parallel)
    budget = measure_budget(*arguments)
    if budget is None or decided.no_graphs is not None:
        return budget
    return replace(budget, graphs=graph_bytes(*arguments))
