"""Memory of well-known GPUs, for `--gpu NAME`: what the driver reports as total, which is less than the box says.

Good to about 1 %: driver, ECC and partitions change it. `--gpu-memory` takes the exact number of a machine.
"""

import re

from pagedcli.errors import UsageError

_GIB = 2**30
CARDS = {  # name -> total memory in bytes
    "t4": int(14.6 * _GIB),
    "l4": int(22.0 * _GIB),
    "a10": int(22.1 * _GIB),
    "v100-16gb": int(15.8 * _GIB),
    "v100-32gb": int(31.7 * _GIB),
    "a100-40gb": int(39.4 * _GIB),
    "a100-80gb": int(79.2 * _GIB),
    "a800-80gb": int(79.2 * _GIB),
    "a6000": int(47.4 * _GIB),
    "l40s": int(44.4 * _GIB),
    "h100-80gb": int(79.2 * _GIB),
    "h100-94gb": int(93.0 * _GIB),
    "h20-96gb": int(95.0 * _GIB),
    "h200": int(139.8 * _GIB),
    "b200": int(178.4 * _GIB),
    "rtx3060": int(11.7 * _GIB),
    "rtx3090": int(23.6 * _GIB),
    "rtx4070-laptop": int(7.7 * _GIB),
    "rtx4080": int(15.7 * _GIB),
    "rtx4090": int(23.5 * _GIB),
    "rtx5090": int(31.4 * _GIB),
}


def card_memory(name: str) -> int:
    """Total bytes of a card. 'RTX 4090' is 'rtx4090', and 'a100' the only or the smallest A100.

    Raises: UsageError with the known names.
    """
    wanted = _plain(name)
    exact = [size for card, size in CARDS.items() if _plain(card) == wanted]
    variants = [size for card, size in CARDS.items() if _plain(card.split("-")[0]) == wanted]
    if not exact and not variants:
        raise UsageError(
            f"no card {name!r} in the table; known: {', '.join(CARDS)}",
            hint="give its memory instead, for example --gpu-memory 24GiB",
        )
    return min(exact or variants)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
