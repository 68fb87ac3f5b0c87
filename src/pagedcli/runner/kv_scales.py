"""The two scales of an fp8 KV cache, set once at startup: they must not depend on any request.

e4m3 covers 2^-9 ... 448, with 4 significant bits from 2^-6 up. It is a floating-point format, so one scale for all of
K and one for all of V are nearly as accurate as one per head, and free in the kernels.
"""

from dataclasses import replace

import numpy as np
import torch

from pagedcli.attention.base import AttentionBackend
from pagedcli.core.groups import TableShape, cache_groups
from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.base import CausalLM
from pagedcli.runner.model_runner import ModelRunner
from pagedcli.sampling_params import SamplingParams

LARGEST = 448.0  # of e4m3
MARGIN = 2.0  # values larger than the probe's saturate
NUM_TOKENS = 256  # of the probe


def kv_scales(
    model: CausalLM,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    max_model_len: int,
    parallel: ParallelContext,
) -> tuple[float, float]:
    """Scales of K and V from a run over fixed random tokens, the same on all ranks. Changes: model.attention_layers."""
    num_tokens = min(NUM_TOKENS, max_model_len)  # the model has no more positions
    groups = cache_groups([layer.window for layer in model.attention_layers])
    num_blocks = TableShape.of(block_size, groups).num_entries(num_tokens)
    runner = ModelRunner(
        model,
        backend,
        device=device,
        kv_dtype=dtype,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=1,
        max_model_len=num_tokens,
        parallel=parallel,
    )
    runner.kv_cache.zero_()
    tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, num_tokens).tolist()
    seq = Sequence(0, "probe", tokens, SamplingParams(), max_new_tokens=1)
    seq.row, seq.block_table = 0, list(range(num_blocks))
    runner.execute(ScheduledStep([seq], [num_tokens]))
    largest = parallel.largest(runner.kv_cache.abs().flatten(1).amax(1).float())
    k_scale, v_scale = (max(value, 1e-6) * MARGIN / LARGEST for value in largest.tolist())
    model.attention_layers = tuple(replace(layer, k_scale=k_scale, v_scale=v_scale) for layer in model.attention_layers)
    return k_scale, v_scale
