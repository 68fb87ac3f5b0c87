"""Paged attention by flash-attn: version 3 (any block size, sm_90) or 2 (block size a multiple of 256)."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionSpec, Capabilities, LayerKV, PagedBatch, Sinks
from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import BackendError

# Requirements of every FlashAttention kernel.
FLASH_CAPABILITIES = Capabilities(
    dtypes=frozenset({torch.float16, torch.bfloat16}), head_dim_multiple=8, max_head_dim=256
)
NEEDED = frozenset({"softmax_scale", "causal", "window_size"})
NEEDED_3 = NEEDED | {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"}
NEEDED_2 = NEEDED | {"cache_seqlens", "block_table"}
NEEDED_2_VARLEN = NEEDED | {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table"}


class Flash3Attention(ReferenceAttention):
    """FlashAttention-3. K and V cache, and the writing of it, are the reference's: [N, S, G, D]."""

    name = "flash"
    capabilities = replace(FLASH_CAPABILITIES, windows=True)

    def __init__(self, with_kvcache: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        out: Tensor = self._with_kvcache(
            q,
            *kv,
            cache_seqlens=batch.num_tokens,
            page_table=batch.block_table,
            cu_seqlens_q=batch.cu_q,
            max_seqlen_q=batch.max_new,
            **_options(layer),
        )
        return out


class Flash2Attention(ReferenceAttention):
    """FlashAttention-2. K and V cache, and the writing of it, are the reference's: [N, S, G, D]."""

    name = "flash"
    capabilities = replace(FLASH_CAPABILITIES, block_size_multiple=256, windows=True)

    def __init__(self, with_kvcache: Callable[..., Any], varlen: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache
        self._varlen = varlen

    def prepare(self, batch: PagedBatch) -> None:
        batch.work = torch.zeros_like(batch.cu_q)  # starts of the sequences' keys, as if they were contiguous
        torch.cumsum(batch.num_tokens, 0, dtype=torch.int32, out=batch.work[1:])

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        if batch.max_new == 1 and q.shape[0] == batch.num_tokens.shape[0]:
            # Pure decode has its own function, which splits long contexts; splits with ragged queries are wrong.
            out: Tensor = self._with_kvcache(
                q.unsqueeze(1), *kv, cache_seqlens=batch.num_tokens, block_table=batch.block_table, **_options(layer)
            )
            return out.squeeze(1)
        if batch.work is None:
            self.prepare(batch)
        ragged: Tensor = self._varlen(
            q,
            *kv,
            cu_seqlens_q=batch.cu_q,
            cu_seqlens_k=batch.work,
            max_seqlen_q=batch.max_new,
            max_seqlen_k=batch.max_total,
            block_table=batch.block_table,
            **_options(layer),
        )
        return ragged


def _options(layer: AttentionLayer) -> dict[str, Any]:
    """window_size: how many tokens before and after its own a query sees; -1: all. `causal` hides what is after it."""
    window = (-1, -1) if layer.window is None else (layer.window - 1, 0)
    return {"softmax_scale": layer.scale, "causal": True, "window_size": window}


def flash3_backend(interface: Any) -> Flash3Attention:
    """From the module flash_attn_interface. Raises BackendError if its functions are not the ones we know."""
    _check(interface.flash_attn_with_kvcache, NEEDED_3)
    return Flash3Attention(interface.flash_attn_with_kvcache)


def flash2_backend(package: Any) -> Flash2Attention:
    """From the package flash_attn. Raises BackendError if its functions are not the ones we know."""
    _check(package.flash_attn_with_kvcache, NEEDED_2)
    _check(package.flash_attn_varlen_func, NEEDED_2_VARLEN)
    return Flash2Attention(package.flash_attn_with_kvcache, package.flash_attn_varlen_func)


def check(spec: AttentionSpec) -> type[Flash3Attention] | type[Flash2Attention]:
    """The version that would serve the spec if installed. Raises BackendError if the device supports neither."""
    if spec.device.type != "cuda":
        raise BackendError(f"runs on a CUDA device, not on {spec.device}")
    if (spec.capability or (0, 0)) < (8, 0):
        raise BackendError("needs compute capability 8.0 or newer")
    return Flash3Attention if spec.capability == (9, 0) else Flash2Attention


def load(spec: AttentionSpec) -> Flash3Attention | Flash2Attention:
    """Version 3 if installed on an sm_90 device, else version 2. Raises BackendError with the reason."""
    if check(spec) is Flash3Attention:
        interface = _import("flash_attn_interface")
        if interface is not None:
            return flash3_backend(interface)
    package = _import("flash_attn")
    if package is None:
        raise BackendError(
            "flash-attn is not installed", hint="pip install 'pagedcli[flash-attn]' (builds from source)"
        )
    return flash2_backend(package)


def _check(function: Callable[..., Any], needed: frozenset[str]) -> None:
    if missing := sorted(needed - inspect.signature(function).parameters.keys()):
        raise BackendError(f"{function.__name__} of the installed flash-attn does not take {', '.join(missing)}")


def _import(name: str) -> Any:
    """The module, or None if it is not installed. Raises BackendError if it is installed but fails to load."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # built for another torch: undefined symbols
        raise BackendError(f"{name} is installed but fails to load: {error}") from error
