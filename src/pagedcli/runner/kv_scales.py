"""The two scales of an fp8 KV cache, set once at startup: they must not depend on any request.

e4m3 covers 2^-9 ... 448, with 4 significant bits from 2^-6 up. It is a floating-point format, so one scale for all of
K and one for all of V are nearly as accurate as one per head, and free in the kernels.
"""

from dataclasses import replace

import numpy as np
import torch

from pagedcli.core.scheduler import ScheduledStep
from pagedcli.core.sequence import Sequence
from pagedcli.runner.model_runner import ModelRunner, RunnerSpec
from pagedcli.sampling_params import SamplingParams

LARGEST = 448.0  # of e4m3
MARGIN = 2.0  # values larger than the probe's saturate
NUM_TOKENS = 256  # of the probe


def kv_scales(spec: RunnerSpec, dtype: torch.dtype) -> tuple[float, float]:
    """Scales of K and V from a run over fixed random tokens in a cache of this dtype, the same on all ranks.

    Changes: spec.model.attention_layers.
    """
    model, limits = spec.model, spec.limits
    num_tokens = min(NUM_TOKENS, limits.max_model_len)  # the model has no more positions
    num_blocks = limits.tables.num_entries(num_tokens)
    limits = replace(limits, num_blocks=num_blocks, max_num_seqs=1, max_model_len=num_tokens)
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
