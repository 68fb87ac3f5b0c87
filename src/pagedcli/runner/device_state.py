"""What stays on a device between steps (KV cache, block tables, tokens of the last step), and copies to and from it.

Owned by one ModelRunner; its eager steps and its CUDA graphs work on the same memory.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.base import Array, AttentionBackend, PagedBatch, named_dtype
from pagedcli.core.budget import blocks_for
from pagedcli.core.limits import Limits
from pagedcli.core.step_input import StepInput
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.base import CausalLM, cache_shape
from pagedcli.models.mixers.recurrent import StateTensor
from pagedcli.native.system import ask_for_huge_pages

_ALIGNMENT = 16  # bytes, of every array in a packed buffer
_NUM_BUFFERS = 16  # a step takes a few, and two steps may be in flight


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a ModelRunner runs, and within which limits."""

    model: CausalLM  # this rank's part
    backend: AttentionBackend
    parallel: ParallelContext
    device: torch.device
    kv_dtype: torch.dtype
    limits: Limits
    dtype: torch.dtype  # dtype of the activations


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Tensors that are updated in place and never reallocated: captured graphs hold their addresses."""

    device: torch.device
    block_size: int  # tokens
    num_groups: int  # groups of layers, see core.groups
    num_state_slots: int  # slots of recurrent state; padding writes to one more, the last; 0: the model has none
    kv_cache: Tensor  # [2, P, N, ...], see AttentionBackend.cache_shape
    # Pools [num_state_slots + 1, ...] of ModelSpec.state, one tuple per recurrent layer.
    states: tuple[tuple[Tensor, ...], ...]
    tables: Tensor  # [rows, W * groups] int32, block table of each running sequence
    last_tokens: Tensor  # [Limits.most_sampled] int64, of the last launched step
    upload: "Upload"

    @classmethod
    def allocate(cls, spec: RunnerSpec) -> "DeviceState":
        """The cache is not cleared: no backend may read a slot that no sequence owns."""
        limits, device = spec.limits, spec.device
        assert limits.num_blocks is not None, "the pool has its size"
        shape = cache_shape(spec.model, spec.backend, limits.num_blocks, limits.block_size)
        kv_cache = torch.empty(shape, dtype=spec.kv_dtype, device=device)
        ask_for_huge_pages(kv_cache)
        rows, columns = limits.table_dimensions
        return cls(
            device=device,
            block_size=limits.block_size,
            num_groups=len(limits.groups),
            num_state_slots=limits.num_state_slots or 0,
            kv_cache=kv_cache,
            states=state_pools(spec.model, limits.num_state_slots or 0, spec.dtype, device),
            tables=torch.zeros((rows, columns), dtype=torch.int32, device=device),
            last_tokens=torch.zeros(limits.most_sampled, dtype=torch.int64, device=device),
            upload=Upload(device),
        )

    def update_tables(self, step: StepInput) -> None:
        """Update the block tables."""
        if step.table_index.shape[0]:
            index, values = self.upload([step.table_index, step.table_values])
            self.tables.view(-1).index_copy_(0, index, values)

    def tables_of(self, table_rows: Tensor, max_total: int) -> tuple[Tensor, ...]:
        """The block tables of these rows [B], in each group of layers, as wide as the longest sequence needs."""
        width = blocks_for(max_total, self.block_size)
        tables = self.tables[:, : width * self.num_groups].index_select(0, table_rows)
        if self.num_groups == 1:
            return (tables,)
        by_group = tables.view(-1, width, self.num_groups).permute(2, 0, 1)
        # a copy in any case: contiguous() keeps the strides of a single entry, which flash-attn refuses
        return by_group.clone(memory_format=torch.contiguous_format).unbind(0)

    def batch(self, tables: tuple[Tensor, ...], slots: Tensor, **rest: Any) -> PagedBatch:
        """The batch of the first group of layers, with those of the others.

        Shapes:  tables: see tables_of; slots [groups, T]; rest: the other fields of PagedBatch.
        """
        first, *others = (
            PagedBatch(block_table=table, slots=of_group, **rest)
            for table, of_group in zip(tables, slots.unbind(0), strict=True)
        )
        first.others, first.states = tuple(others), self.states
        return first

    def resolve_ids(self, input_ids: Tensor, source_rows: Tensor) -> Tensor:
        """The ids of a step's tokens, where some are still only on the device.

        Shapes:  input_ids, source_rows [T]; source_rows -1 keeps the id of input_ids.
        """
        # INVALID is computed as if it were 0; the result is dropped when the host reads it
        taken = self.last_tokens[source_rows.clamp(min=0)].clamp(min=0)
        return torch.where(source_rows >= 0, taken, input_ids)


def state_pools(
    model: CausalLM, num_slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, ...], ...]:
    """The pools of each recurrent layer, with one more slot for padding; activations have `dtype`. Not cleared: a slot
    is written before it is read."""

    def pool(tensor: StateTensor) -> Tensor:
        kept = dtype if tensor.dtype is None else named_dtype(tensor.dtype)
        return torch.empty((num_slots + 1, *tensor.shape), dtype=kept, device=device)

    return tuple(tuple(map(pool, state)) for state in model.spec.states)


# ---------------------------------------------------------------------- copies: one per step each way


class Upload:
    """Sends a step's arrays in one pinned buffer, by one copy that the host does not wait for.

    Pinned memory must not change while a copy reads it, so buffers rotate, and each is refilled only after its last
    copy has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0

    def __call__(self, arrays: Items[Array]) -> list[Tensor]:
        """The arrays on the device, in new memory, each with its dtype and shape."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        target = torch.empty(packed_size(arrays), dtype=torch.uint8, device=self.device)
        self.into(target, arrays)
        return unpack(target, arrays)

    def into(self, target: Tensor, arrays: Items[Array]) -> None:
        """Copy the arrays into `target`, uint8 on the device, at offsets that depend on their sizes alone."""
        if self.device.type == "cpu":
            _pack(arrays, target.numpy())
            return
        size = packed_size(arrays)
        buffer, event = self._take(size)
        event.synchronize()
        _pack(arrays, buffer.numpy())
        target[:size].copy_(buffer[:size], non_blocking=True)
        event.record()

    def _take(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        if not self._buffers:
            self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_NUM_BUFFERS)]
            self._events = [_event() for _ in range(_NUM_BUFFERS)]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if self._buffers[self._turn].shape[0] < size:
            self._events[self._turn].synchronize()
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn], self._events[self._turn]


class Download:
    """Tensors being copied to the host."""

    def __init__(self, tensors: Items[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if tensors and tensors[0].is_cuda:
            # torch's caching host allocator reuses pinned memory only after the copy has finished
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._event = _event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> list[Tensor]:
        """Wait for the copies; returns the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def packed_size(arrays: Items[Array]) -> int:
    """Bytes of the arrays in one buffer."""
    return sum(_aligned(array.nbytes) for array in arrays)


def unpack(buffer: Tensor, arrays: Items[Array]) -> list[Tensor]:
    """Views of a packed buffer with the dtypes and shapes of `arrays`."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        views.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _aligned(array.nbytes)
    return views


def _pack(arrays: Items[Array], buffer: Array) -> None:
    start = 0
    for array in arrays:
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _aligned(array.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
