"""Measures on a GPU what the KV cache may take: one largest step on a throw-away cache before the real one."""

import torch

from pagedcli.attention.base import AttentionBackend
from pagedcli.config import EngineConfig
from pagedcli.engine.model_runner import ModelRunner
from pagedcli.engine.scheduler import ScheduledStep
from pagedcli.engine.sequence import Sequence
from pagedcli.kvcache.budget import MemoryBudget, blocks_for
from pagedcli.models.base import CausalLM
from pagedcli.sampling_params import SamplingParams


def measure_budget(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> MemoryBudget | None:
    """The terms of total x utilization - used - peak + current on a CUDA device; None on a CPU, where the pool is a
    given size. Runs the largest step that the limits allow, and frees all it took.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    current = torch.cuda.memory_allocated(device)
    peak = current + _largest_step(config, model, backend, device, dtype, max_model_len)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryBudget(
        total=total,
        utilization=config.gpu_memory_utilization,
        used=total - free,
        peak=peak,
        current=current,
    )


def _largest_step(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> int:
    """Bytes that a step of max_num_batched_tokens over max_num_seqs sequences takes beside weights and cache."""
    budget, size = config.max_num_batched_tokens, config.block_size
    num_seqs = min(config.max_num_seqs, budget)
    lengths = [min(max_model_len, budget // num_seqs + (i < budget % num_seqs)) for i in range(num_seqs)]
    num_blocks = sum(blocks_for(length, size) for length in lengths)
    runner = ModelRunner(
        model,
        backend,
        device=device,
        kv_dtype=dtype,
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
    )
    runner.kv_cache.zero_()  # every slot is owned in this step
    work, next_block = ScheduledStep(), 0
    for row, length in enumerate(lengths):
        seq = Sequence(row, str(row), [0] * length, SamplingParams(), max_new_tokens=1)
        count = blocks_for(length, size)
        seq.row, seq.block_table = row, list(range(next_block, next_block + count))
        next_block += count
        work.seqs.append(seq)
        work.num_new_tokens.append(length)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits, _ = runner.execute(work)
    logits.float().softmax(-1)  # what sampling takes
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
