"""Distributed runs: rows grouped by prefix, one engine per Ray actor, parts that `pagedcli merge` joins.

from pagedcli.distributed import PagedBatchGenerator
"""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.distributed import leases, merge, queue, ray_job, worker
    from pagedcli.distributed.generator import PagedBatchGenerator
else:
    __getattr__ = modules_of(__name__, PagedBatchGenerator="generator")

__all__ = ["PagedBatchGenerator", "leases", "merge", "queue", "ray_job", "worker"]
