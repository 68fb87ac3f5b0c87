"""Many machines: rows grouped by prefix, one engine per actor of a Ray cluster, parts that `pagedcli merge` joins.

from pagedcli.distributed import PagedBatchGenerator
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedcli.distributed.generator import PagedBatchGenerator

__all__ = ["PagedBatchGenerator"]


def __getattr__(name: str) -> Any:
    # the generator pulls in torch: the planner of shares, which is in this package as well, needs none
    if name == "PagedBatchGenerator":
        from pagedcli.distributed.generator import PagedBatchGenerator

        return PagedBatchGenerator
    raise AttributeError(f"module 'pagedcli.distributed' has no attribute {name!r}")
