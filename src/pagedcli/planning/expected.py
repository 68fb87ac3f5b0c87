"""The engine that `generate` would start here: its plan with the pool, and what identifies the time of its steps.

Read by `plan`, `simulate` and advice, so that none of them has defaults of its own.
"""

from dataclasses import replace

import torch

from pagedcli import __version__
from pagedcli.config import EngineConfig
from pagedcli.core.plan import Plan
from pagedcli.errors import BackendError
from pagedcli.models.spec import ModelSpec
from pagedcli.native.build import build_key, find_compiler
from pagedcli.native.system import usable_cores
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import Machine, processor_name
from pagedcli.planning.memory import engine_footprint, expected_pool
from pagedcli.planning.step_time import FORM, TimeKey


def expected_plan(config: EngineConfig, spec: ModelSpec, machine: Machine) -> Plan:
    """What `generate` decides on a machine, with the pool that it would create. There is no pool, and no number of
    blocks, for a model that runs through transformers: its memory is not predicted.

    Raises: ConfigError, BackendError or ModelError where `generate` would.
    """
    plan = decide(config, spec, machine)
    pool = expected_pool(config, spec, plan, machine)
    if pool is None:
        return plan
    limits = replace(plan.limits, num_blocks=pool.num_blocks or None, num_state_slots=pool.num_state_slots)
    return replace(plan, limits=limits, pool=pool)


def time_key(config: EngineConfig, spec: ModelSpec, plan: Plan) -> TimeKey:
    """What identifies the time of a plan's steps on this machine. Of the limits only the block size is part of it: a
    step of so many tokens takes as long whatever the pool."""
    on_gpu = not plan.on_cpu
    experts, windows = spec.experts, {mixer.window or 0 for mixer in spec.attentions}
    sizes = (
        spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.num_heads,
        spec.num_kv_heads, spec.head_dim, spec.vocab_size, sorted(windows) if any(windows) else [],
        len(spec.states), experts and (experts.num_experts, experts.num_per_token, experts.each.width),
        config.tensor_parallel_size,
    )  # fmt: skip
    num_bytes = 0 if spec.is_fallback else engine_footprint(config, spec, plan).num_bytes
    return TimeKey(
        version=f"{__version__} {_kernels_version()} {FORM}",
        processor=torch.cuda.get_device_name(plan.device) if on_gpu else processor_name(),
        threads=0 if on_gpu else min(torch.get_num_threads(), usable_cores()),
        device=plan.device,
        model=" ".join(map(str, sizes)),
        weights=f"{plan.weights} {num_bytes}",
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        backend=plan.backend,
        decoder=plan.decoder if not plan.graph_sizes else f"{plan.decoder}, graphs",
        block_size=plan.limits.block_size,
    )


def _kernels_version() -> str:
    try:
        return build_key(find_compiler())
    except BackendError:
        return "no native kernels"
