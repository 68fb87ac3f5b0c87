"""A decoder's tensors, made of those of a checkpoint: used by every source of weights."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from pagedcli.models.tensors import Parameter
from pagedcli.printable import plural


class UnreadTensors(MutableMapping[str, Tensor]):
    """The tensors of a decoder by their keys. Each is made when it is asked for and not kept, so that a model which
    packs its weights one after the other never has two copies of all in memory."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self._reads = dict(reads)

    def __getitem__(self, key: str) -> Tensor:
        """Raises: ModelError for one that is damaged."""
        return self._reads[key]()

    def __setitem__(self, key: str, tensor: Tensor) -> None:
        self._reads[key] = lambda: tensor

    def __delitem__(self, key: str) -> None:
        del self._reads[key]

    def discard(self, key: str) -> None:
        """Leave a tensor unread, if there is one."""
        self._reads.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._reads  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def kept_dtype(parameter: Parameter, dtype: torch.dtype) -> torch.dtype | None:
    """The parameter's dtype in memory in a model of `dtype`; None: that of the checkpoint."""
    name = parameter.dtype or parameter.stored.dtype
    return getattr(torch, name) if name is not None else dtype if parameter.stored.converts else None


def stacked(parts: Iterator[Tensor], parameter: Parameter, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """The parts, stacked. A single matrix that needs no conversion stays in the mapped file: it is only read."""
    if len(parameter.shapes) == 1:
        is_matrix, converts = len(parameter.shape) == 2, parameter.stored.converts
        whole = next(parts).to(device=device, dtype=dtype, copy=converts and not is_matrix)
        return whole.contiguous() if converts else whole
    target = torch.empty(parameter.shape, dtype=dtype, device=device)
    place = 0
    for part in parts:
        target.narrow(parameter.dim, place, part.shape[parameter.dim]).copy_(part)
        place += part.shape[parameter.dim]
    return target


def not_read(count: int, where: str, why: str) -> str:
    """The note on tensors of a checkpoint or a file that are left out."""
    return f"{plural(count, 'tensor')} of the {where} {'is' if count == 1 else 'are'} not read, {why}"


def and_others(names: list[str]) -> str:
    """What follows the first of some names, e.g. " (and 2 more)"; empty if it is the only one."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
