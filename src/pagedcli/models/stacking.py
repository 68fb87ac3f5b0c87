"""Stacks checkpoint tensors to the decoder's: used by every source of weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pagedcli.attention.base import dtype_name
from pagedcli.models.parameters import Parameter


def kept_dtype(parameter: Parameter, dtype: torch.dtype) -> torch.dtype | None:
    """The parameter's dtype in memory in a model of `dtype`; None: that of the checkpoint."""
    name = parameter.kept_dtype(dtype_name(dtype))
    return None if name is None else getattr(torch, name)


def stacked(parts: Iterator[Tensor], parameter: Parameter, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """The parts, stacked. A single matrix that needs no conversion stays in the mapped file: it is only read, so a
    model that packs its weights never holds two copies."""
    if len(parameter.shapes) == 1 and not parameter.stored.converts:
        return next(parts).to(device=device, dtype=dtype)
    if len(parameter.shapes) == 1 and len(parameter.shape) == 2:
        part = next(parts)
        if part.dtype == dtype and part.device == device and part.is_contiguous():
            return part
        parts = iter((part,))
    target = torch.empty(parameter.shape, dtype=dtype, device=device)
    place = 0
    for part in parts:
        target.narrow(parameter.dim, place, part.shape[parameter.dim]).copy_(part)
        place += part.shape[parameter.dim]
    return target
