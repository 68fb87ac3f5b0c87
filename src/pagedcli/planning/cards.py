"""Rooflines, and well-known GPUs for `--gpu NAME`: capability, and memory as the driver reports it.

The memory is accurate to about 1 %: driver, ECC and partitions change it. `--gpu-memory` takes the exact number of a
machine.
"""

import re
from typing import NamedTuple

from pagedcli.errors import UsageError

_GIB = 2**30


class Roofline(NamedTuple):
    """What bounds a kernel: the rate at which memory is read, and the rate of arithmetic."""

    read_bytes_per_s: float
    flop_per_s: float  # two operations per multiply-add

    def seconds(self, num_bytes: float, num_flops: float) -> float:
        """The shortest time for reading these bytes and computing these operations at once."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.flop_per_s)


class Card(NamedTuple):
    """What decisions depend on."""

    total_bytes: int
    capability: tuple[int, int]  # CUDA compute capability


CARDS = {
    "t4": Card(int(14.6 * _GIB), (7, 5)),
    "l4": Card(int(22.0 * _GIB), (8, 9)),
    "a10": Card(int(22.1 * _GIB), (8, 6)),
    "v100-16gb": Card(int(15.8 * _GIB), (7, 0)),
    "v100-32gb": Card(int(31.7 * _GIB), (7, 0)),
    "a100-40gb": Card(int(39.4 * _GIB), (8, 0)),
    "a100-80gb": Card(int(79.2 * _GIB), (8, 0)),
    "a800-80gb": Card(int(79.2 * _GIB), (8, 0)),
    "a6000": Card(int(47.4 * _GIB), (8, 6)),
    "l40s": Card(int(44.4 * _GIB), (8, 9)),
    "h100-80gb": Card(int(79.2 * _GIB), (9, 0)),
    "h100-94gb": Card(int(93.0 * _GIB), (9, 0)),
    "h20-96gb": Card(int(95.0 * _GIB), (9, 0)),
    "h200": Card(int(139.8 * _GIB), (9, 0)),
    "b200": Card(int(178.4 * _GIB), (10, 0)),
    "rtx3060": Card(int(11.7 * _GIB), (8, 6)),
    "rtx3090": Card(int(23.6 * _GIB), (8, 6)),
    "rtx4070-laptop": Card(int(7.7 * _GIB), (8, 9)),
    "rtx4080": Card(int(15.7 * _GIB), (8, 9)),
    "rtx4090": Card(int(23.5 * _GIB), (8, 9)),
    "rtx5090": Card(int(31.4 * _GIB), (12, 0)),
}


def find_card(name: str) -> Card:
    """A GPU by name. 'RTX 4090' means 'rtx4090'; 'a100' means the smallest A100.

    Raises: UsageError with the known names.
    """
    wanted = _plain(name)
    exact = [found for card, found in CARDS.items() if _plain(card) == wanted]
    variants = [found for card, found in CARDS.items() if _plain(card.split("-")[0]) == wanted]
    if not exact and not variants:
        hint = "give its memory instead, for example --gpu-memory 24GiB"
        raise UsageError(f"unknown GPU {name!r}; known: {', '.join(CARDS)}", hint=hint)
    return min(exact or variants)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
