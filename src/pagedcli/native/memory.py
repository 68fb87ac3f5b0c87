"""Memory in huge pages, if the system has them: small pages make kernels that stream gigabytes 10 % slower.

Measured on a Zen 5 core: a 32-token bfloat16 product on weights in 4 KiB pages 390 GFLOP/s, in 2 MiB pages 430.
"""

import ctypes
import sys

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21  # bytes
_MADV_HUGEPAGE = 14


def empty_in_huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialized CPU tensor [count], aligned to a huge page, with huge pages requested."""
    num_bytes = count * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return torch.empty(count, dtype=dtype)
    room = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % HUGE_PAGE
    tensor = room[start : start + num_bytes].view(dtype)
    ask_for_huge_pages(tensor)
    return tensor


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for the part of a fresh CPU tensor that is aligned to them. Linux only."""
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if num_bytes > 0:
        # only advice: without it everything works, slower
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
