"""Asynchronous copies of small arrays between host and device: one per step each way.

Used by the model runner and the sampler. On a CPU nothing is copied.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
_ALIGNMENT = 16  # bytes, of every array in a packed buffer
_NUM_BUFFERS = 16  # a step takes a few, and two steps may be in flight


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

    def __call__(self, arrays: Items[Array], *, into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device, each with its dtype and shape.

        `into` is a uint8 tensor on the device to copy into, at offsets that depend on the sizes alone; by default
        new memory is allocated.
        """
        if self.device.type == "cpu" and into is None:
            return [torch.from_numpy(array) for array in arrays]
        if self.device.type == "cpu":
            assert into is not None
            _pack(arrays, into.numpy())
            return unpack(into, arrays)
        size = packed_size(arrays)
        buffer, event = self._take(size)
        event.synchronize()
        _pack(arrays, buffer.numpy())
        if into is None:
            into = torch.empty(size, dtype=torch.uint8, device=self.device)
        into[:size].copy_(buffer[:size], non_blocking=True)
        event.record()
        return unpack(into, arrays)

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
