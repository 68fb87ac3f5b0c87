"""From a configuration to a runner that is ready: device, backend, weights, measured memory, KV cache, CUDA graphs.

Used by LLMEngine and by every worker of a tensor-parallel group, in lockstep.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pagedcli.answers.fits import fits, would_fit
from pagedcli.attention.base import AttentionBackend, named_dtype
from pagedcli.attention.select import load_backend
from pagedcli.config import EngineConfig
from pagedcli.core.cache import pool_bytes
from pagedcli.core.plan import Plan
from pagedcli.core.sequence import Sequence
from pagedcli.core.steps import ScheduledStep
from pagedcli.errors import ConfigError, shortage
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM, DecoderRequest
from pagedcli.models.hub import adapter_folder, model_folder
from pagedcli.models.loading import load_decoder
from pagedcli.models.reading import read_spec
from pagedcli.native.system import limit_threads
from pagedcli.planning.decide import decide
from pagedcli.planning.decision import Decision, choose_pool
from pagedcli.planning.machine import available_memory, this_machine
from pagedcli.printable import plural
from pagedcli.records import size
from pagedcli.runner.device_state import RunnerSpec
from pagedcli.runner.memory import graph_bytes, measure_device, other_holders
from pagedcli.runner.model_runner import ModelRunner
from pagedcli.runner.weight_cache import WeightCache
from pagedcli.sampling_params import SamplingParams

LARGEST = 448.0  # largest number of e4m3
MARGIN = 2.0  # values larger than the probe's saturate
NUM_TOKENS = 256  # length of the probe


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded model and its plan."""

    model_path: Path
    decision: Decision
    model: CausalLM  # this rank's part
    plan: Plan  # the plan with its pool
    runner: ModelRunner


def load_engine(
    config: EngineConfig,
    *,
    parallel: ParallelContext = SINGLE,
    on_weights: Callable[[], None] = lambda: None,
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> LoadedEngine:
    """Load what a configuration asks for, or one rank's part of it.

    `on_weights` is called once the weights are loaded, before anything runs; `agree` receives the number of blocks, or
    of slots of recurrent state, that fit here and returns the number that all ranks use.
    Raises:  ConfigError, ModelError, BackendError.
    """
    path = model_folder(config)
    spec = read_spec(path, trust_remote_code=config.trust_remote_code)
    decision = decide(config, spec, this_machine(), rank=parallel.rank)
    if (refusal := decision.weights_refusal()) is not None:
        raise ConfigError(refusal, hint=would_fit(fits(decision)))
    plan, device, dtype = decision.plan, decision.attention.device, decision.attention.dtype
    if plan.on_cpu:
        limit_threads()
    else:
        torch.cuda.set_device(device)  # Triton launches on the current device
    backend = load_backend(plan.backend, decision.attention)
    model, notes = _load_model(config, decision, path, backend, parallel)
    on_weights()
    kv_dtype = named_dtype(plan.kv_dtype)
    runner_spec = RunnerSpec(model, backend, parallel, device, kv_dtype, plan.limits, dtype)
    scales = None
    if kv_dtype == torch.float8_e4m3fn:  # other caches are not quantized, or have a scale per token and head
        scales = kv_scales(runner_spec, dtype)
    step = f"a step of {plural(plan.limits.max_num_batched_tokens, 'token')}"
    with _room_for(step, device, "lower --max-num-batched-tokens"):
        memory = measure_device(runner_spec, config.gpu_memory_utilization)
    if memory is not None and plan.no_graphs is None:
        memory = replace(memory, graphs=graph_bytes(runner_spec), measured=memory.measured | {"graphs"})
    pool = choose_pool(config, plan, available=available_memory(), terms=memory)
    num_slots = None if pool.num_state_slots is None else agree(pool.num_state_slots)
    pool = replace(pool, num_blocks=agree(pool.num_blocks), num_state_slots=num_slots)
    limits = plan.limits.with_pool(pool.num_blocks, num_state_slots=num_slots)
    cache = f"a KV cache of {size(pool_bytes(limits, plan.block_bytes))} ({pool.reason})"
    with _room_for(cache, device, "lower --kv-cache-memory or --num-kvcache-blocks"):
        runner = ModelRunner(replace(runner_spec, limits=limits))
    if plan.no_graphs is None:
        runner.make_graphs(capture=True)
    plan = replace(
        plan, limits=limits, pool=pool, weight_bytes=model.weight_bytes, memory=memory, kv_scales=scales, notes=notes
    )
    return LoadedEngine(path, decision, model, plan, runner)


def _load_model(
    config: EngineConfig, decision: Decision, path: Path, backend: AttentionBackend, parallel: ParallelContext
) -> tuple[CausalLM, tuple[str, ...]]:
    """The model, or this rank's part of it, and what a user should know of it."""
    plan, device = decision.plan, decision.attention.device
    packed = WeightCache(config, decision, path)
    with _room_for("the weights", device, "use --quantization int8 or int4, or a smaller model"):
        request = DecoderRequest(
            path=path,
            spec=decision.spec.within(plan.limits.max_model_len),
            backend=backend,
            weight_format=decision.weights,
            dtype=decision.attention.dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
            adapter=adapter_folder(config),
            trust_remote_code=config.trust_remote_code,
            max_model_len=plan.limits.max_model_len,
            parallel=parallel,
            packed=packed.layers,
        )
        model = load_decoder(plan.decoder, request)
    packed.keep()
    return model, model.notes + packed.notes


@contextmanager
def _room_for(what: str, device: torch.device, hint: str) -> Iterator[None]:
    """Raises: ConfigError with who holds the device's memory, if it has run out; `hint` lowers that of the host."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        holders = ", ".join(map(str, other_holders(device))) or "none that the driver names"
        raise ConfigError(
            f"{device} has no room for {what}: {free / 2**30:,.2f} of {total / 2**30:,.2f} GiB are free;"
            f" other processes: {holders}",
            hint="end other processes on it, or lower --gpu-memory-utilization or --max-num-batched-tokens",
        ) from error
    except (MemoryError, OSError, RuntimeError) as error:
        raise shortage(error, what, hint) or error from error


def kv_scales(spec: RunnerSpec, dtype: torch.dtype) -> tuple[float, float]:
    """Scales of K and V in an fp8 cache, from a run over fixed random tokens in a cache of this dtype: the same on all
    ranks, and independent of any request.

    e4m3 covers 2^-9 ... 448, with 4 significant bits from 2^-6 up. It is a floating-point format, so one scale for all
    of K and one for all of V are nearly as accurate as one per head, and free in the kernels.

    Changes: spec.model.attention_layers.
    """
    model, limits = spec.model, spec.limits
    num_tokens = min(NUM_TOKENS, limits.max_model_len)  # the model has no more positions
    num_blocks = limits.tables.num_entries(num_tokens)
    limits = replace(limits.with_pool(num_blocks, 1), max_model_len=num_tokens)
    runner = ModelRunner(replace(spec, kv_dtype=dtype, limits=limits))
    runner.kv_cache.zero_()
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, num_tokens).tolist()
    seq = Sequence(0, "probe", tokens, SamplingParams(), max_new_tokens=1)
    seq.row, seq.block_table = 0, list(range(num_blocks))
    runner.execute(ScheduledStep([seq], [num_tokens]))
    largest = spec.parallel.largest(runner.kv_cache.abs().flatten(1).amax(1).float())
    k_scale, v_scale = (max(value, 1e-6) * MARGIN / LARGEST for value in largest.tolist())
    model.attention_layers = tuple(replace(layer, k_scale=k_scale, v_scale=v_scale) for layer in model.attention_layers)
    return k_scale, v_scale
