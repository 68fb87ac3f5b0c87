"""From a configuration to a runner that is ready: device, backend, weights, measured memory, KV cache, CUDA graphs.

Used by LLMEngine and by every worker of a tensor-parallel group, in lockstep.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedcli.attention.base import named_dtype
from pagedcli.attention.select import load_backend
from pagedcli.config import EngineConfig
from pagedcli.core.plan import Plan
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM
from pagedcli.models.loading import load_model
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import ModelSpec
from pagedcli.native.system import limit_threads
from pagedcli.planning.decide import attention_spec, choose_num_blocks, decide, model_folder
from pagedcli.planning.machine import available_memory, this_machine
from pagedcli.planning.memory import predict_terms, weights_refusal
from pagedcli.runner.kv_scales import kv_scales
from pagedcli.runner.memory import graph_bytes, measure_device
from pagedcli.runner.model_runner import ModelRunner, RunnerSpec


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model and its plan."""

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
    plan = decide(config, spec, machine, rank=parallel.rank)
    if not spec.is_fallback:
        refusal = weights_refusal(config, spec, predict_terms(config, spec, plan, machine), machine)
        if refusal is not None:
            raise refusal
    attention = attention_spec(config, spec, machine, rank=parallel.rank)
    device, dtype = attention.device, attention.dtype
    if plan.on_cpu:
        limit_threads()
    else:
        torch.cuda.set_device(device)  # Triton launches on the current device
    backend = load_backend(plan.backend, attention)
    model = load_model(
        path,
        spec,
        backend=backend,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        quantization=config.quantization,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        max_model_len=plan.limits.max_model_len,
        parallel=parallel,
        decoder=plan.decoder,
    )
    on_weights()
    kv_dtype = named_dtype(plan.kv_dtype)
    runner_spec = RunnerSpec(model, backend, parallel, device, kv_dtype, plan.limits)
    scales = None
    if kv_dtype == torch.float8_e4m3fn:  # other caches are not quantized, or have a scale per token and head
        scales = kv_scales(runner_spec, dtype)
    memory = measure_device(runner_spec, config.gpu_memory_utilization)
    if memory is not None and plan.no_graphs is None:
        memory = replace(memory, graphs=graph_bytes(runner_spec), measured=memory.measured | {"graphs"})
    num_blocks, reason = choose_num_blocks(config, plan, available=available_memory(), terms=memory)
    limits = replace(plan.limits, num_blocks=agree(num_blocks))
    runner = ModelRunner(replace(runner_spec, limits=limits))
    if plan.no_graphs is None:
        runner.make_graphs(capture=True)
    plan = replace(
        plan,
        limits=limits,
        num_blocks_reason=reason,
        weight_bytes=model.weight_bytes,
        memory=memory,
        kv_scales=scales,
        notes=model.notes,
    )
    return LoadedEngine(path, spec, model, plan, runner)
