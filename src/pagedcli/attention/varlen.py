"""Paged attention by torch's own torch.nn.attention.varlen.varlen_attn (FlashAttention inside torch, CUDA only).

Found by its signature, never by torch's version: only from 2.12 on does it take a block table.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionSpec, Capabilities, PagedBatch
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import BackendError

PAGE_MULTIPLE = 256  # tokens; FlashAttention-2 copies a page in tiles of up to this size
# What every FlashAttention kernel asks for.
FLASH_CAPABILITIES = Capabilities(
    dtypes=frozenset({torch.float16, torch.bfloat16}), head_dim_multiple=8, max_head_dim=256
)
NEEDED = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})


class VarlenAttention(ReferenceAttention):
    """torch's varlen_attn over pages. K and V cache, and the writing of it, are the reference's: [N, S, G, D]."""

    name = "varlen"
    capabilities = replace(FLASH_CAPABILITIES, block_size_multiple=PAGE_MULTIPLE, batch_invariant=True)  # num_splits=1

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def prepare(self, batch: PagedBatch) -> None:
        batch.work = varlen_arguments(batch)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, layer: AttentionLayer) -> Tensor:
        if batch.work is None:
            self.prepare(batch)
        grouped = q.shape[1] != k_cache.shape[2]
        out: Tensor = self._function(q, k_cache, v_cache, **batch.work, scale=layer.scale, enable_gqa=grouped)
        return out


def varlen_arguments(batch: PagedBatch) -> dict[str, Any]:
    """The arguments of varlen_attn that describe a step, equal for all its layers."""
    return {
        "cu_seq_q": batch.cu_q,
        "cu_seq_k": cumulative_lengths(batch),
        "max_q": batch.max_new,
        "max_k": batch.max_total,
        # One query sees every key, so decode needs no mask; torch takes its grouped-head path only without one.
        "window_size": (-1, -1) if batch.max_new == 1 else (-1, 0),
        "seqused_k": batch.num_tokens,
        "block_table": batch.block_table,
        # Split keys, pages and ragged queries together leave rows unwritten: https://github.com/pytorch/pytorch/issues/194167
        "num_splits": 1,
    }


def cumulative_lengths(batch: PagedBatch) -> Tensor:
    """[B+1] int32: where each sequence's keys would start if they lay one after the other."""
    starts = torch.zeros_like(batch.cu_q)
    torch.cumsum(batch.num_tokens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def missing_parameters(function: Callable[..., Any], needed: frozenset[str]) -> list[str]:
    """Which of the needed parameters a function does not have, in alphabetical order."""
    return sorted(needed - inspect.signature(function).parameters.keys())


def check_flash_device(spec: AttentionSpec) -> None:
    """Raises BackendError for a device that no FlashAttention kernel runs on."""
    if spec.device.type != "cuda":
        raise BackendError(f"runs on a CUDA device, not on {spec.device}")
    if (spec.capability or (0, 0)) < (8, 0):
        raise BackendError("needs compute capability 8.0 or newer")


def check(spec: AttentionSpec) -> type[VarlenAttention]:
    """Raises BackendError where the device does not allow it."""
    check_flash_device(spec)
    return VarlenAttention


def load(spec: AttentionSpec) -> VarlenAttention:
    """The varlen backend. Raises BackendError where torch or the device do not allow it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendError(f"torch {torch.__version__} has no varlen_attn", hint="torch 2.12 has it") from error
    missing = missing_parameters(varlen_attn, NEEDED)
    if missing:
        raise BackendError(f"varlen_attn of torch {torch.__version__} does not take {', '.join(missing)}")
    return check(spec)(varlen_attn)
