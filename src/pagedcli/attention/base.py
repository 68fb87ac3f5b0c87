"""The contract between models and attention backends: PagedBatch, Capabilities, AttentionBackend and the shape letters.

Shape letters, everywhere: T new tokens, B sequences, N blocks, S tokens per block, W blocks per table, H query heads,
G key/value heads, D head size, L layers, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.layer import AttentionLayer, Heads, KvHeads


def dtype_name(dtype: torch.dtype) -> str:
    """'bfloat16' for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for 'bfloat16'."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    return dtype


LayerKV = tuple[Tensor, Tensor]  # K and V cache of a layer, of the backend's kv_shape
Sinks = Tensor | None  # [H] float32, see AttentionBackend.attend
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class LateTokens:
    """The new tokens of each sequence from the first one on whose hidden state is wanted. They alone go beyond the last
    layer that keeps K and V or a state (ModelSpec.last_keeper): there nobody looks at the others."""

    tokens: Tensor  # [R'] int64, rows of the step, ascending
    cu_q: Tensor  # [B+1] int32, see PagedBatch
    wanted: Tensor  # [R] int64, which of them are wanted, ascending
    cu_q_host: list[int]  # cu_q on the host

    @classmethod
    def of(cls, cu_q: Array, rows: Array | None, upload: Callable[[list[Array]], list[Tensor]]) -> "LateTokens | None":
        """The late tokens of a step whose wanted hidden states are `rows` [R], ascending; None: all are wanted.

        By numpy: torch would start threads for it, which then wait for more work in the way of the decoder's own."""
        if rows is None or len(rows) == cu_q[-1]:
            return None
        ends = cu_q[1:].astype(np.int64)
        firsts = np.append(rows, ends[-1:])[np.searchsorted(rows, cu_q[:-1])]  # beyond its end where it wants none
        counts = np.maximum(ends - firsts, 0)  # late tokens of each sequence
        late_ends = counts.cumsum()
        tokens = np.arange(counts.sum()) + np.repeat(ends - late_ends, counts)
        cu_late = np.concatenate(([0], late_ends)).astype(np.int32)
        late, starts, wanted = upload([tokens, cu_late, np.searchsorted(tokens, rows)])
        return cls(late, starts, wanted, cu_late.tolist())

    @property
    def rows(self) -> Tensor:
        """[R] int64, ascending: the new tokens whose hidden states are wanted."""
        return self.tokens.index_select(0, self.wanted)


@dataclass(slots=True)
class PagedBatch:
    """One step's batch: for each sequence, new tokens after cached tokens. Covers whole prompts, chunks and decode.

    The new tokens of sequence b are rows cu_q[b] ... cu_q[b+1]-1 of q and have the positions
    num_tokens[b] - (cu_q[b+1] - cu_q[b]) ... num_tokens[b]-1. Position p of sequence b lives in slot
    block_table[b, p // S] * S + p % S. Entries of block_table past ceil(num_tokens[b] / S) are undefined, and so are
    cache slots that no sequence owns: a backend must never let them into a result (0 x NaN is NaN). With a window,
    entries before the block of the first token that a new token sees are undefined, too.
    """

    cu_q: Tensor  # [B+1] int32, 0 first
    num_tokens: Tensor  # [B] int32, tokens in the cache after this step, >= 1
    block_table: Tensor  # [B, W] int32
    slots: Tensor  # [T] int32, where K and V of each new token go; -1: already there, do not write
    max_new: int  # largest number of new tokens of a sequence, on the host
    max_total: int  # largest num_tokens, on the host
    window: int | None = None  # AttentionLayer.window of all layers that attend with this batch, which have equal heads
    others: "tuple[PagedBatch, ...]" = ()  # the same step in the model's other groups of layers (core.groups)
    cu_q_host: list[int] = field(default_factory=list)  # cu_q on the host
    num_tokens_host: list[int] = field(default_factory=list)  # num_tokens on the host
    work: Any = None  # result of the backend's prepare() for this step, shared by all layers
    late: LateTokens | None = None  # None: the hidden states of all new tokens are wanted
    # for recurrent layers, see StepInput
    state_reads: Tensor | None = None  # [B] int32, slot of each sequence's state before the step; -1: starts from zero
    state_writes: Tensor | None = None  # [B] int32, slot of its state after the step
    state_ends: Tensor | None = None  # [B] int32, rows up to the last one that it sees; None: cu_q[1:]
    states: tuple[tuple[Tensor, ...], ...] = ()  # pools [slots + 1, ...] of each recurrent layer

    def of_late(self) -> "PagedBatch":
        """Restrict the batch to its late tokens, over the same cache."""
        assert self.late is not None, "not all hidden states are wanted"
        starts = self.late.cu_q_host
        return replace(
            self,
            cu_q=self.late.cu_q,
            cu_q_host=starts,
            slots=self.slots.index_select(0, self.late.tokens),
            max_new=max(end - start for start, end in pairwise(starts)),
            work=None,
        )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model and a cache require of a backend.

    Each backend module has `check(spec) -> type[AttentionBackend]`, which needs neither the device nor its software,
    and `load(spec) -> AttentionBackend`. Both raise BackendError with the reason if the device cannot run it; select.py
    refuses what Capabilities rule out.
    """

    device: torch.device
    dtype: torch.dtype  # dtype of q, k and v
    block_size: int  # S, tokens
    num_heads: int  # H, a multiple of num_kv_heads
    num_kv_heads: int  # G
    head_dim: int  # D
    kv_dtype: torch.dtype | None = None  # dtype of the cache; None: `dtype`. See Capabilities.kv_dtypes
    layers: frozenset[AttentionLayer] = frozenset()  # the different ones of the model
    capability: tuple[int, int] | None = None  # compute capability of a CUDA device
    kernels: str = "auto"  # EngineConfig.gpu_kernels

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def value_dim(self) -> int | None:
        """AttentionLayer.value_dim, which all layers have in common."""
        return next((layer.value_dim for layer in self.layers), None)

    @property
    def parts(self) -> "tuple[AttentionSpec, ...]":
        """One spec for each kind of heads, where layers differ in them; otherwise only this one."""
        kinds = sorted({layer.heads for layer in self.layers if layer.heads is not None})
        return tuple(
            replace(
                self,
                **heads._asdict(),
                layers=frozenset(replace(layer, heads=None) for layer in self.layers if layer.heads == heads),
            )
            for heads in kinds
        ) or (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend supports and guarantees: select.py refuses the rest, the conformance test checks it."""

    dtypes: frozenset[torch.dtype]  # possible dtypes of q, k and v
    kv_dtypes: frozenset[torch.dtype] = frozenset()  # further dtypes of the cache
    block_size_multiple: int = 1  # block_size must be a multiple of this
    head_dim_multiple: int = 1  # D must be a multiple of this
    max_head_dim: int | None = None  # the largest D
    max_group: int | None = None  # the most query heads per key/value head
    windows: bool = False  # AttentionLayer.window
    soft_cap: bool = False  # AttentionLayer.soft_cap
    sinks: bool = False  # AttentionLayer.sinks
    latents: bool = False  # AttentionLayer.value_dim
    negative_scale: bool = True  # AttentionLayer.scale below 0
    strided_blocks: bool = False  # a layer's blocks may lie apart in memory
    batch_invariant: bool = False  # a token's result does not depend, in any bit, on the rest of the batch
    graph_safe: bool = False  # a step of one token per sequence can be captured in a CUDA graph
    native_step: bool = False  # a decoder can attend within its own native call, see geometry_address
    fused_store: bool = False  # layers.triton_layers.rotate_and_store fills this cache: [N, G, S, D]


class AttentionBackend(Protocol):
    """Writes new K and V into the paged cache and attends over it. All backends compute the same function."""

    name: str
    capabilities: Capabilities
    kernels: str = "auto"  # AttentionSpec.kernels of a backend that has several
    # Address of the cache's description (native/paged_cache.h), for a decoder that attends within its own native call
    # with the address of batch.work. None: the backend has none.
    geometry_address: int | None = None

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's K cache (V has the same): any layout whose first dimension is the block, [N, ...],
        with S * G * D elements per block."""

    def of(self, layer: AttentionLayer) -> "AttentionBackend":
        """The backend of a layer, where layers differ in their heads; of all others this one."""
        return self

    def cache_shape(self, groups: Sequence[tuple[int, KvHeads]], num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of a model's cache, [2, P, N, ...]: K and V of as many layers as have a block in common. `groups`: how
        many those are in each group, and their heads."""
        [heads] = {heads for _, heads in groups}
        return (2, max(count for count, _ in groups), *self.kv_shape(num_blocks, block_size, *heads))

    def layer_caches(self, kv_cache: Tensor, num_layers: int, heads: KvHeads | None) -> list[LayerKV]:
        """K and V cache of each layer of a group: views of cache_shape's tensor, whose first dimension is 1 where V is
        a part of K. `heads`: of the group, if it names any."""
        return list(zip(kv_cache[0, :num_layers].unbind(0), kv_cache[-1, :num_layers].unbind(0), strict=True))

    def check_cache(self, kv: LayerKV) -> None:
        """Raises BackendError unless they have this backend's shape and dtype, which later calls rely on."""
        return

    def reserve(self, num_seqs: int, max_total: int) -> None:
        """Allocate what steps of so many sequences of up to max_total tokens need, before memory is profiled."""
        return

    def prepare(self, batch: PagedBatch) -> None:
        """Called once per step before the first layer; may set batch.work."""
        return

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        """Store K and V of the new tokens.

        Shapes:  k, v [T, G, D] (rows may be strided), the same tensor where V is a part of K; slots [T] int32.
        Changes: the cache at every slot that is not -1.
        """

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        """Causal attention of the step's new tokens over the paged cache.

        Shapes:  q [T, H, D]; kv of its dtype and device, the same tensor twice with layer.value_dim;
                 returns [T, H, D], or [T, H, value_dim].
                 sinks [H] float32, given if layer.sinks: a score in the denominator of the head's softmax, as if of a
                 token whose V is zero. It is neither scaled nor capped.
        Units:   lengths are in tokens.
        Changes: nothing. K and V of the new tokens must already be in the cache (see write).
        The window of the layer is that of the batch.
        Source:  Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023; sinks:
                 Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024, as in gpt-oss.
        """
