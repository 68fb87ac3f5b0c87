"""Distributed runs: rows grouped by prefix, one engine per Ray actor, parts that `pagedcli merge` joins.

from pagedcli.distributed import PagedBatchGenerator
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedcli.distributed.generator import PagedBatchGenerator

__all__ = ["PagedBatchGenerator"]


def __getattr__(name: str) -> Any:
    # loaded lazily: the generator imports torch, which the planner in this package does not need
    if name == "PagedBatchGenerator":
        from pagedcli.distributed.generator import PagedBatchGenerator

        return PagedBatchGenerator
    raise AttributeError(f"module 'pagedcli.distributed' has no attribute {name!r}")
