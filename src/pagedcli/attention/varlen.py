"""Paged attention by torch's own torch.nn.attention.varlen.varlen_attn (FlashAttention inside torch, CUDA only).

Detected by its signature, not by torch's version: it takes a block table only since 2.12.
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
# Requirements of every FlashAttention kernel.
FLASH_CAPABILITIES = Capabilities(
    dtypes=frozenset({torch.float16, torch.bfloat16}), head_dim_multiple=8, max_head_dim=256
)
NEEDED = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})


class VarlenAttention(ReferenceAttention):
    """torch's varlen_attn over pages. K and V cache: [N, S, G, D], written as by the reference."""

    name = "varlen"
    capabilities = replace(FLASH_CAPABILITIES, block_size_multiple=PAGE_MULTIPLE, batch_invariant=True)  # num_splits=1

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def prepare(self, batch: PagedBatch) -> None:
        batch.work = varlen_arguments(batch)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        layer: AttentionLayer,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if batch.work is None:
            self.prepare(batch)
        grouped = q.shape[1] != k_cache.shape[2]
        out: Tensor = self._function(q, k_cache, v_cache, **batch.work, scale=layer.scale, enable_gqa=grouped)
        return out


def varlen_arguments(batch: PagedBatch) -> dict[str, Any]:
    """The arguments of varlen_attn that describe a step, the same for all layers."""
    return {
        "cu_seq_q": batch.cu_q,
        "cu_seq_k": cumulative_lengths(batch),
        "max_q": batch.max_new,
        "max_k": batch.max_total,
        # A single query sees every key, so decode needs no mask; torch uses its grouped-head path only without one.
        "window_size": (-1, -1) if batch.max_new == 1 else (-1, 0),
        "seqused_k": batch.num_tokens,
        "block_table": batch.block_table,
        # Split keys, pages and ragged queries together leave rows unwritten: https://github.com/pytorch/pytorch/issues/194167
        "num_splits": 1,
    }


def cumulative_lengths(batch: PagedBatch) -> Tensor:
    """[B+1] int32: where each sequence's keys would start if they were contiguous."""
    starts = torch.zeros_like(batch.cu_q)
    torch.cumsum(batch.num_tokens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def missing_parameters(function: Callable[..., Any], needed: frozenset[str]) -> list[str]:
    """Which of the needed parameters a function does not have, in alphabetical order."""
    return sorted(needed - inspect.signature(function).parameters.keys())


def check_flash_device(spec: AttentionSpec) -> None:
    """Raises BackendError for a device without FlashAttention kernels."""
    if spec.device.type != "cuda":
        raise BackendError(f"runs on a CUDA device, not on {spec.device}")
    if (spec.capability or (0, 0)) < (8, 0):
        raise BackendError("needs compute capability 8.0 or newer")


def check(spec: AttentionSpec) -> type[VarlenAttention]:
    """Raises BackendError if the device does not support it."""
    check_flash_device(spec)
    return VarlenAttention


def load(spec: AttentionSpec) -> VarlenAttention:
    """The varlen backend. Raises BackendError if torch or the device does not support it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendError(
            f"torch {torch.__version__} has no varlen_attn", hint="install torch 2.12 or newer"
        ) from error
    missing = missing_parameters(varlen_attn, NEEDED)
    if missing:
        raise BackendError(f"varlen_attn of torch {torch.__version__} does not take {', '.join(missing)}")
    return check(spec)(varlen_attn)
