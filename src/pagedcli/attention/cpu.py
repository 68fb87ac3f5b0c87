"""Paged attention on the CPU by the project's own C++ kernel: reads pages in place, near memory bandwidth.

A token's result is bitwise independent of the rest of the batch, of chunking and of the number of threads, also with
an int8 cache: the tokens of a step read their own K and V back from it, like all others.
"""

import ctypes

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, AttentionSpec, Capabilities, LayerKV, PagedBatch, Sinks
from pagedcli.attention.layer import AttentionLayer
from pagedcli.errors import BackendError
from pagedcli.native import NativeLibrary, load_library
from pagedcli.native.structs import DTYPE_CODES, bind

SCALE_BYTES = 4  # one float32 per token and head of an int8 cache
MAX_INT8_HEAD_DIM = 1024  # see MAX_INT8_HEAD in native/paged_cache.h


class _StepWork:
    """One step's work items, allocated and freed by the library. Keeps the tensors it points into alive."""

    def __init__(self, library: ctypes.CDLL, address: int, tensors: tuple[Tensor, ...]) -> None:
        self._library = library
        self.address = address
        self._tensors = tensors

    def __del__(self) -> None:
        self._library.paged_work_free(self.address)


class CpuAttention(AttentionBackend):
    """The native kernel. K and V cache: [N, G, S, D], each head in an internal order.

    With AttentionLayer.value_dim each head is in the order of D, and V is read out of K.
    With kv_dtype int8 the cache is bytes [N, G, S, D + 4]: the elements, then a float32 scale per token and head.
    """

    name = "cpu"
    capabilities = Capabilities(
        dtypes=frozenset(DTYPE_CODES),
        kv_dtypes=frozenset({torch.int8}),
        windows=True,
        soft_cap=True,
        sinks=True,
        latents=True,
        negative_scale=False,
        batch_invariant=True,
        native_step=True,
        strided_blocks=True,
    )

    def __init__(self, spec: AttentionSpec, library: NativeLibrary) -> None:
        self.notes = library.notes
        self._library = bind(library.functions)
        self._spec = spec
        self._kv_dtype = spec.kv_dtype or spec.dtype
        self._scale_bytes = SCALE_BYTES if self._kv_dtype == torch.int8 else 0
        sizes = (spec.block_size, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        # check_cache fills in the two zeros
        is_int8, value_dim = self._kv_dtype == torch.int8, spec.value_dim or 0
        self._geometry = (ctypes.c_int64 * 8)(0, *sizes, is_int8, 0, value_dim)
        self.geometry_address = ctypes.addressof(self._geometry)

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim + self._scale_bytes)

    def prepare(self, batch: PagedBatch) -> None:
        cu_q, num_tokens = batch.cu_q.contiguous(), batch.num_tokens.contiguous()
        table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
        address = self._library.paged_work_new(
            self.geometry_address,
            num_tokens.shape[0],
            cu_q.data_ptr(),
            num_tokens.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            batch.window or 0,
            torch.get_num_threads(),
        )
        batch.work = _StepWork(self._library, address, (cu_q, num_tokens, table))

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        self.check_cache(kv)
        k, v = _dense_rows(k), _dense_rows(v)
        strides = (ctypes.c_int64 * 4)(k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        slots = slots.contiguous()
        self._library.paged_write(
            DTYPE_CODES[self._spec.dtype],
            self.geometry_address,
            k.shape[0],
            torch.get_num_threads(),
            k.data_ptr(),
            v.data_ptr(),
            ctypes.addressof(strides),
            *(cache.data_ptr() for cache in kv),
            slots.data_ptr(),
        )

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        if batch.work is None:
            self.prepare(batch)
        self.check_cache(kv)
        q = _dense_rows(q)
        out = q.new_empty((*q.shape[:2], layer.value_dim or q.shape[2]))
        failed = self._library.paged_attend(
            DTYPE_CODES[self._spec.dtype],
            self.geometry_address,
            batch.work.address,
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            *(cache.data_ptr() for cache in kv),
            out.data_ptr(),
            layer.scale,
            layer.soft_cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        if failed:
            raise BackendError(f"a block table names a block outside the cache of {kv[0].shape[0]} blocks")
        return out

    def check_cache(self, kv: LayerKV) -> None:
        """Catch wrong shapes here: the library trusts its pointers."""
        spec, dtype = self._spec, self._kv_dtype
        inside = self.kv_shape(0, spec.block_size, spec.num_kv_heads, spec.head_dim)[1:]
        for cache in kv:
            if cache.shape[1:] != inside or cache.dtype != dtype or not cache[:1].is_contiguous():
                raise BackendError(f"the cache is {cache.dtype} {tuple(cache.shape)}, not {dtype} [N, *{inside}]")
        self._geometry[0], self._geometry[6] = kv[0].shape[0], kv[0].stride(0)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def check(spec: AttentionSpec) -> type[CpuAttention]:
    """Raises BackendError off the CPU, and for an int8 cache with heads too long to sum exactly."""
    if spec.device.type != "cpu":
        raise BackendError(f"runs on a CPU, not on {spec.device}")
    if spec.kv_dtype == torch.int8 and spec.head_dim > MAX_INT8_HEAD_DIM:
        raise BackendError(
            f"supports an int8 KV cache for head_dim up to {MAX_INT8_HEAD_DIM}, not {spec.head_dim}",
            hint="use --kv-cache-dtype auto",
        )
    return CpuAttention


def load(spec: AttentionSpec) -> CpuAttention:
    """The native backend. Raises BackendError without a compiler, and for what check refuses."""
    return check(spec)(spec, load_library())
