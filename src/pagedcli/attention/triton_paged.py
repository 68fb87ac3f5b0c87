"""Paged attention in Triton: split decode over a persistent work list, paged prefill. The base on CUDA.

Needs torch 2.11 or newer and a block size that is a multiple of 16. A sequence's result does not depend on the rest of
the batch: splits and tiles are counted from its own start. Imported only where triton is installed.
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.base import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    LayerKV,
    PagedBatch,
    Sinks,
    dtype_name,
)
from pagedcli.attention.layer import AttentionLayer
from pagedcli.errors import BackendError

try:
    import triton

    from pagedcli.attention import triton_kernels as kernels
    from pagedcli.attention.triton_launch import Launcher, power_of_2, programs_per_processor, starts_early
except ImportError as error:
    raise BackendError(
        f"triton is not installed ({error})", hint="install the extra: pip install 'pagedcli[cuda]'"
    ) from error

LOG2E = 1.4426950408889634
SPLIT = 256  # tokens; the same for every batch, so that results do not depend on it
# of a decode item of more than MIN_ROWS: above, the kernel spills, and exceeds the shared memory of sm_86 and sm_89
MAX_QUERY_BYTES = 2**14
DEVICE_LIST_ITEMS = 2**13 + 2**9  # the most that a CUDA graph needs; longer work lists are counted on the host
PROGRAMS_PER_SM = 3  # programs of the decode kernel, until it is compiled


@dataclass(slots=True)
class _StepWork:
    """One step's work lists, in one buffer on the device."""

    capacity: int  # decode items
    buffer: Tensor  # int32: number of decode items | first part of each sequence | items' sequences | items' splits
    num_sequences: int
    num_parts: int  # partial results of H rows: for each new token one per split, where there are several
    has_decode: bool = False
    prefill_items: Tensor | None = None  # [2, P] int32: sequence, first new token

    @property
    def num_items(self) -> Tensor:
        return self.buffer[:1]

    @property
    def first_part(self) -> Tensor:
        return self.buffer[1 : 1 + self.num_sequences]

    @property
    def item_seq(self) -> Tensor:
        return self.buffer[1 + self.num_sequences :]

    @property
    def item_split(self) -> Tensor:
        return self.buffer[1 + self.num_sequences + self.capacity :]


@dataclass(slots=True)
class _LayerConstants:
    """What the kernels get for each layer of a kind in every step."""

    numbers: tuple[float, float, int]  # factor, cap and window of the kernels
    v_scale: float
    decode: dict[str, Any]  # compile-time values, as the next two
    combine: dict[str, Any]
    prefill: dict[str, Any]
    # of the decode kernel, which share its work: more than run side by side would be a second round of few
    programs: int | None = None  # None: it is not compiled yet


class TritonAttention(AttentionBackend):
    """The project's own CUDA kernels. K and V cache: [N, G, S, D], of equal strides; blocks may lie apart."""

    name = "triton"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
        kv_dtypes=frozenset({torch.float8_e4m3fn}),
        block_size_multiple=16,
        max_head_dim=512,
        max_group=64,
        windows=True,
        soft_cap=True,
        sinks=True,
        latents=True,
        batch_invariant=True,
        graph_safe=True,
        fused_store=True,
        strided_blocks=True,
    )

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec, self.kernels = spec, spec.kernels
        self._group = spec.num_heads // spec.num_kv_heads
        self._rows, self._block_d = _decode_shape(spec)
        self._value_dim = spec.value_dim or spec.head_dim
        self._decode, self._prefill = tile_configs(
            spec.dtype, self._block_d, _capability(spec.device), widens_cache=spec.kv_dtype not in (None, spec.dtype)
        )
        self._prefill_rows = max(self._prefill.block_m, power_of_2(self._group))
        self._upcast = interpreted() and spec.dtype == torch.bfloat16
        numbers = torch.empty(0, device=spec.device)
        self._partials = numbers, numbers, numbers.int()  # with the counters of decode_kernel
        self._outgrown: list[tuple[Tensor, ...]] = []  # a captured graph may still write there
        on_gpu = spec.device.type == "cuda"
        self._properties = torch.cuda.get_device_properties(spec.device) if on_gpu else None
        self._launch = Launcher()
        self._layers: dict[tuple[AttentionLayer, int], _LayerConstants] = {}
        self._store_constants: dict[int, dict[str, Any]] = {}  # BLOCK_STRIDE -> constants

    def kv_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, batch: PagedBatch) -> None:
        if self.kernels == "invariant" and batch.max_new * self._group > self._rows:
            batch.work = _pieces(batch, self._rows // self._group)
            self.prepare(batch.work)
            return
        num_seqs = batch.num_tokens.shape[0]
        most_items = num_seqs * most_splits(batch.max_total, batch.window)
        if most_items > DEVICE_LIST_ITEMS and batch.num_tokens_host is not None:  # few of the sequences may be long
            most_items = sum(-(-num_tokens // SPLIT) for num_tokens in batch.num_tokens_host)
        if batch.max_new == 1 and batch.slots.shape[0] == num_seqs and most_items <= DEVICE_LIST_ITEMS:
            batch.work = decode_work(batch.num_tokens, batch.max_total, batch.window)
            return
        starts = np.asarray(batch.cu_q_host or batch.cu_q.tolist())
        totals = np.asarray(batch.num_tokens_host or batch.num_tokens.tolist())
        num_new = np.diff(starts)
        decodes = (num_new > 0) & (num_new * self._group <= self._rows)
        first_seen = np.zeros_like(totals) if batch.window is None else totals - num_new + 1 - batch.window
        first_split = np.maximum(first_seen, 0) // SPLIT
        splits = np.where(decodes, -(-totals // SPLIT) - first_split, 0)
        num_items = int(splits.sum())
        item_seq = np.repeat(np.arange(num_seqs), splits)
        item_split = np.arange(num_items) - (np.cumsum(splits) - splits - first_split)[item_seq]
        parts = np.where(splits > 1, splits * num_new, 0)
        first_part = np.where(decodes, np.cumsum(parts) - parts, -1)
        lists = np.concatenate(([num_items], first_part, item_seq, item_split))
        device = batch.cu_q.device
        batch.work = _StepWork(
            capacity=num_items,
            buffer=_send(torch.from_numpy(lists.astype(np.int32)), device),
            num_sequences=num_seqs,
            num_parts=int(parts.sum()),
            has_decode=num_items > 0,
            prefill_items=self._prefill_items(num_new, decodes, device),
        )

    def _prefill_items(self, num_new: Any, decodes: Any, device: torch.device) -> Tensor | None:
        step = self._prefill_rows // self._group
        items = [
            (int(seq), token)
            for seq in np.flatnonzero((num_new > 0) & ~decodes)
            for token in reversed(range(0, int(num_new[seq]), step))  # the longest first
        ]
        return _send(torch.tensor(items, dtype=torch.int32).T.contiguous(), device) if items else None

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor, layer: AttentionLayer) -> None:
        spec = self._spec
        k, v = _dense_heads(k), _dense_heads(v)
        stride = kv[0].stride(0)
        constants = self._store_constants.get(stride)
        if constants is None:
            constants = self._store_constants[stride] = {
                "G": spec.num_kv_heads,
                "S": spec.block_size,
                "D": spec.head_dim,
                "BLOCK_STRIDE": stride,
                "BLOCK_G": power_of_2(spec.num_kv_heads),
                "BLOCK_D": power_of_2(spec.head_dim),
                "FP8": kv[0].dtype == torch.float8_e4m3fn,
            }
        strides, inverses = (k.stride(0), v.stride(0)), (1 / layer.k_scale, 1 / layer.v_scale)
        arguments = (k, v, *kv, slots, *strides, *inverses)
        self._launch(kernels.store_kvcache_kernel, (k.shape[0], 1, 1), arguments, constants, num_warps=4)

    def attend(self, q: Tensor, kv: LayerKV, batch: PagedBatch, layer: AttentionLayer, sinks: Sinks = None) -> Tensor:
        if batch.work is None:
            self.prepare(batch)
        if isinstance(batch.work, PagedBatch):
            batch = batch.work
        q = _dense_heads(q)
        out = q.new_empty((*q.shape[:2], self._value_dim))
        sinks = out if sinks is None else sinks  # not read without SINKS
        stride = kv[0].stride(0)
        of_layer = self._layers.get((layer, stride))
        if of_layer is None:
            of_layer = self._layers[layer, stride] = self._constants(layer, stride)
        if batch.work.has_decode:
            self._run_decode(q, kv, out, sinks, batch, of_layer)
        if batch.work.prefill_items is not None:
            self._run_prefill(q, kv, out, sinks, batch, of_layer)
        return out

    def _constants(self, layer: AttentionLayer, block_stride: int) -> "_LayerConstants":
        spec = self._spec
        every = {
            "H": spec.num_heads,
            "G": spec.num_kv_heads,
            "DV": self._value_dim,
            "BLOCK_D": self._block_d,
            "WINDOWED": layer.window is not None,
            "SINKS": layer.sinks,
        }
        attends = every | {
            "S": spec.block_size,
            "D": spec.head_dim,
            "BLOCK_R": max(16, power_of_2(spec.head_dim - self._value_dim or 1)),
            "BLOCK_STRIDE": block_stride,
            "UPCAST": self._upcast,
            "CAPPED": layer.soft_cap is not None,
        }
        splits = {"ROWS": self._rows, "SPLIT": SPLIT}
        decode = {"PAGES": pages_per_split(spec.block_size), "BLOCK_N": self._decode.block_n}
        prefill = {"BLOCK_M": self._prefill_rows, "TOKENS": self._prefill_rows // self._group}
        fused = spec.kernels == "fused"
        flags = {"STAGES": self._decode.num_stages, "FOLDED": fused, "DEPENDENT": fused and starts_early(spec.device)}
        return _LayerConstants(
            numbers=(layer.scale * LOG2E * layer.k_scale, (layer.soft_cap or 0.0) * LOG2E, layer.window or 0),
            v_scale=layer.v_scale,
            decode=attends | splits | decode | flags,
            combine=every | splits,
            prefill=attends | prefill | {"BLOCK_N": self._prefill.block_n, "STAGES": self._prefill.num_stages},
        )

    def _run_decode(
        self, q: Tensor, kv: LayerKV, out: Tensor, sinks: Tensor, batch: PagedBatch, of_layer: "_LayerConstants"
    ) -> None:
        work, table = batch.work, batch.block_table
        partials = self._partial_buffers(work.num_parts, work.num_sequences)
        lengths = batch.cu_q, batch.num_tokens
        items = work.item_seq, work.item_split, work.num_items
        strides, numbers = (q.stride(0), table.stride(0)), (*of_layer.numbers, of_layer.v_scale)
        arguments: tuple[Any, ...]
        arguments = (q, *kv, out, *partials, sinks, work.first_part, *items, *lengths, table, *strides, *numbers)
        num_warps = decode_warps(self._decode, self._rows, self._block_d)
        num_sms = 1 if self._properties is None else self._properties.multi_processor_count
        grid = (of_layer.programs or PROGRAMS_PER_SM * num_sms, 1, 1)
        options = {"num_warps": num_warps} | ({"launch_pdl": True} if of_layer.decode["DEPENDENT"] else {})
        compiled = self._launch(kernels.decode_kernel, grid, arguments, of_layer.decode, **options)
        if of_layer.programs is None and compiled is not None and self._properties is not None:
            of_layer.programs = num_sms * programs_per_processor(compiled, self._properties)
        if batch.max_total > SPLIT and not of_layer.decode["FOLDED"]:
            arguments = (*partials[:2], out, sinks, work.first_part, *lengths, of_layer.numbers[2])
            num_warps = 16 if self._rows * self._block_d > 2**13 else 4  # many heads of latents would spill
            grid = (work.num_sequences, self._spec.num_kv_heads, 1)
            self._launch(kernels.combine_kernel, grid, arguments, of_layer.combine, num_warps=num_warps)

    def _run_prefill(
        self, q: Tensor, kv: LayerKV, out: Tensor, sinks: Tensor, batch: PagedBatch, of_layer: "_LayerConstants"
    ) -> None:
        items, table = batch.work.prefill_items, batch.block_table
        lengths, strides = (batch.cu_q, batch.num_tokens), (q.stride(0), table.stride(0))
        numbers = (*of_layer.numbers, of_layer.v_scale)
        arguments = (q, *kv, out, sinks, items[0], items[1], *lengths, table, *strides, *numbers)
        grid = (items.shape[1], self._spec.num_kv_heads, 1)
        num_warps = self._prefill.num_warps
        self._launch(kernels.prefill_kernel, grid, arguments, of_layer.prefill, num_warps=num_warps)

    def reserve(self, num_seqs: int, max_total: int) -> None:
        """See AttentionBackend: room for partial results."""
        if max_total > SPLIT:
            self._partial_buffers(min(DEVICE_LIST_ITEMS, num_seqs * -(-max_total // SPLIT)), num_seqs)

    def _partial_buffers(self, num_parts: int, num_seqs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers for num_parts partial results, shared by all layers and kept between steps."""
        rows, counters = num_parts * self._spec.num_heads, num_seqs * self._spec.num_kv_heads
        numbers, kept, counted = self._partials
        if kept.shape[0] < rows or counted.shape[0] < counters:
            rows = max(rows, 2 * kept.shape[0]) if kept.shape[0] < rows else kept.shape[0]
            self._outgrown.append(self._partials)
            sums, stats = numbers.new_empty(rows, self._value_dim), numbers.new_empty(rows, 2)
            self._partials = sums, stats, counted.new_zeros(max(counters, counted.shape[0]))
        return self._partials


def most_splits(max_total: int, window: int | None) -> int:
    """Most splits of which a token of a sequence of up to max_total tokens sees something."""
    splits = -(-max_total // SPLIT)
    return splits if window is None else min(splits, (window - 2) // SPLIT + 2)


def decode_work(num_tokens: Tensor, max_total: int, window: int | None = None) -> _StepWork:
    """The work list of a step of one new token per sequence, built on the device: the host does not wait, and a
    captured graph builds each step's list itself.

    Shapes:  num_tokens [B] int32; max_total bounds it, and so with DEVICE_LIST_ITEMS the number of items.
    """
    num_seqs = num_tokens.shape[0]
    capacity = min(num_seqs * most_splits(max_total, window), DEVICE_LIST_ITEMS)
    splits = (num_tokens + (SPLIT - 1)) // SPLIT
    first_split = None if window is None else (num_tokens - window).clamp_(min=0) // SPLIT
    if first_split is not None:
        splits -= first_split
    ends = splits.cumsum(0, dtype=torch.int32)
    first_item = ends - splits  # also its first part
    item = torch.arange(capacity, dtype=torch.int32, device=num_tokens.device)
    item_seq = torch.searchsorted(ends, item, right=True, out_int32=True).clamp_(max=num_seqs - 1)
    before = first_item if first_split is None else first_item - first_split
    buffer = torch.cat((ends[-1:], first_item, item_seq, item - before[item_seq]))
    return _StepWork(capacity, buffer, num_seqs, num_parts=capacity if max_total > SPLIT else 0, has_decode=True)


def _pieces(batch: PagedBatch, num_tokens: int) -> PagedBatch:
    """The batch with each sequence as several of up to num_tokens new tokens, for which one kernel serves any batch."""
    starts, totals = batch.cu_q_host or batch.cu_q.tolist(), batch.num_tokens_host or batch.num_tokens.tolist()
    pieces = [  # first row, sequence, tokens after it
        (first, seq, totals[seq] - starts[seq + 1] + min(first + num_tokens, starts[seq + 1]))
        for seq in range(len(totals))
        for first in range(starts[seq], starts[seq + 1], num_tokens)
    ]
    rows, seqs, ends = (list(each) for each in zip(*pieces, strict=True))
    device, rows = batch.cu_q.device, [*rows, starts[-1]]
    cu_q, lengths, seq_ids = (_send(torch.tensor(each, dtype=torch.int32), device) for each in (rows, ends, seqs))
    return replace(
        batch, cu_q=cu_q, num_tokens=lengths, block_table=batch.block_table.index_select(0, seq_ids),
        max_new=num_tokens, cu_q_host=rows, num_tokens_host=ends, work=None,
    )  # fmt: skip


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Copy host values to the device without synchronizing."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def pages_per_split(block_size: int) -> int:
    """How many block-table entries the decode kernel loads per split: a sufficient power of two."""
    if block_size % SPLIT == 0:
        return 1
    if SPLIT % block_size == 0:
        return SPLIT // block_size
    return power_of_2(-(-SPLIT // block_size) + 1)


def interpreted() -> bool:
    """Whether triton interprets the kernels on a CPU (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def launch_problem() -> BackendError | None:
    """Why triton cannot launch kernels here, None if it can. It builds its launcher with the machine's C compiler,
    Python's headers and the driver's library; on a GPU that is tried here, as it would fail in the first step."""
    if interpreted():
        return None
    compilers = (triton.knobs.build.impl, os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    if not any(compilers):
        return BackendError(
            "triton needs a C compiler, and neither gcc nor clang is installed",
            hint="install gcc, or set the environment variable CC to a compiler",
        )
    if not torch.cuda.is_available():
        return None
    try:
        _ = triton.runtime.driver.active.utils  # about 1 s on the first run, then cached on disk
    except Exception as error:  # anything that the compiler, the linker, the loader or triton raises
        return _launcher_error(error)
    return None


def _launcher_error(error: Exception) -> BackendError:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    reason = f"triton cannot build its launcher: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not header.exists():
        return BackendError(
            f"triton cannot build its launcher: {header} is missing",
            hint="install python3-dev (python3-devel), the headers of this Python",
        )
    if "libcuda" in str(error):
        return BackendError(reason, hint="set TRITON_LIBCUDA_PATH to the folder of the driver's libcuda.so.1")
    return BackendError(reason, hint="PAGEDCLI_DEBUG=1 shows the traceback; --attention-backend sdpa needs no launcher")


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def _decode_shape(spec: AttentionSpec) -> tuple[int, int]:
    """Rows of a decode item, new tokens x group, and the padded head size."""
    rows = max(MIN_ROWS, power_of_2(spec.num_heads // spec.num_kv_heads))
    return rows, max(16, power_of_2(spec.value_dim or spec.head_dim))


def _dense_heads(x: Tensor) -> Tensor:
    """Make each token's heads contiguous; the kernels take any stride between tokens."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check(spec: AttentionSpec) -> type[TritonAttention]:
    """Raises BackendError off CUDA (unless triton interprets), on older devices, and for groups of heads too large for
    one program."""
    if spec.device.type != "cuda" and not interpreted():
        raise BackendError(f"runs on a CUDA device, not on {spec.device}")
    if spec.device.type == "cuda" and (spec.capability or (0, 0)) < (8, 0):
        raise BackendError("needs compute capability 8.0 or newer")
    rows, block_d = _decode_shape(spec)
    most = MAX_QUERY_BYTES if spec.value_dim is None else 2 * MAX_QUERY_BYTES  # see decode_warps
    if rows > MIN_ROWS and rows * block_d * spec.dtype.itemsize > most:
        group = spec.num_heads // spec.num_kv_heads
        raise BackendError(
            f"{group} query heads of {spec.head_dim} {dtype_name(spec.dtype)} per key/value head are too many"
        )
    return TritonAttention


def load(spec: AttentionSpec) -> TritonAttention:
    """The Triton backend. Raises BackendError where triton cannot launch kernels, and for what check refuses."""
    kind = check(spec)
    if problem := launch_problem():
        raise problem
    return kind(spec)


MIN_ROWS = 16  # rows of the smallest tl.dot


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiling of one kernel: rows of queries, keys per tile, warps, tiles of K and V in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (element bytes, largest padded head_dim, config). No kernel of these spills, three decode programs fit the shared
# memory of an sm_90 multiprocessor and two that of an sm_80 (tests/attention/test_triton.py). Not autotuned:
# that would slow a cold start and needs a driver.
DECODE_CONFIGS = (
    (2, 64, TileConfig(MIN_ROWS, 128, 4, 3)),
    (2, 128, TileConfig(MIN_ROWS, 64, 4, 3)),
    (2, 256, TileConfig(MIN_ROWS, 32, 4, 3)),
    (2, 512, TileConfig(MIN_ROWS, 16, 4, 3)),
    (4, 64, TileConfig(MIN_ROWS, 64, 4, 3)),
    (4, 128, TileConfig(MIN_ROWS, 32, 4, 3)),
    (4, 256, TileConfig(MIN_ROWS, 16, 4, 3)),
    (4, 512, TileConfig(MIN_ROWS, 16, 4, 2)),
)
# float32 has no tensor cores and computes longer than it loads; more tiles in flight spill registers.
PREFILL_CONFIGS = (
    (2, 64, TileConfig(128, 64, 8, 3)),
    (2, 128, TileConfig(64, 64, 8, 3)),
    (2, 256, TileConfig(64, 32, 8, 3)),
    (2, 512, TileConfig(64, 16, 8, 3)),
    (4, 64, TileConfig(32, 16, 4, 2)),
    (4, 128, TileConfig(32, 16, 8, 2)),
    (4, 256, TileConfig(16, 16, 4, 2)),
    (4, 512, TileConfig(16, 16, 4, 2)),
)
# sm_90 keeps the operands of a product in shared memory, so more rows fit its registers; not those of heads of 512.
PREFILL_CONFIGS_SM90 = (
    (2, 128, TileConfig(128, 64, 8, 3)),
    (2, 256, TileConfig(64, 32, 8, 3)),
    (2, 512, TileConfig(32, 32, 8, 2)),
    *PREFILL_CONFIGS,
)
# 99 KiB of shared memory (sm_86, sm_89, sm_12x) do not hold two tiles of K and V of such heads next to the queries.
PREFILL_CONFIGS_SMALL = (
    *PREFILL_CONFIGS[:2],
    (2, 256, TileConfig(64, 32, 8, 2)),
    (2, 512, TileConfig(64, 16, 8, 2)),
    *PREFILL_CONFIGS[4:],
)
# K and V of fp8 are widened in registers, which leave no room for 64 rows of heads of 512.
PREFILL_CONFIGS_WIDENED = (*PREFILL_CONFIGS[:3], (2, 512, TileConfig(32, 32, 8, 2)), *PREFILL_CONFIGS[4:])
ConfigTable = tuple[tuple[int, int, TileConfig], ...]


def tile_configs(
    dtype: torch.dtype, block_d: int, capability: tuple[int, int], *, widens_cache: bool = False
) -> tuple[TileConfig, TileConfig]:
    """Tiling of the decode and prefill kernels for a padded head size and compute capability. `widens_cache`: whether K
    and V are of a smaller type than the queries."""
    prefill: ConfigTable = PREFILL_CONFIGS_WIDENED if widens_cache else PREFILL_CONFIGS
    if capability == (9, 0):
        prefill = PREFILL_CONFIGS_SM90
    elif capability in ((8, 6), (8, 9)) or capability[0] == 12:
        prefill = PREFILL_CONFIGS_SMALL
    return config_for(DECODE_CONFIGS, dtype.itemsize, block_d), config_for(prefill, dtype.itemsize, block_d)


def decode_warps(config: TileConfig, rows: int, block_d: int) -> int:
    """Warps of the decode kernel: twice as many for latents of more than 16 heads, whose sums would spill."""
    return config.num_warps * (2 if rows > MIN_ROWS and rows * block_d > 2**13 else 1)


def config_for(table: ConfigTable, element_bytes: int, block_d: int) -> TileConfig:
    """The first entry of a config table for heads of that padded size."""
    return next(config for size, limit, config in table if size == element_bytes and block_d <= limit)
