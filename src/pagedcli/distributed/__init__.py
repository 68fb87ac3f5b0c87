"""Distributed runs: rows grouped by prefix, one engine per Ray actor, parts that `pagedcli merge` joins.

from pagedcli.distributed import PagedBatchGenerator
"""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.distributed import merge, ray_job
    from pagedcli.distributed.generator import PagedBatchGenerator
else:
    __getattr__ = modules_of(__name__, PagedBatchGenerator="generator")

__all__ = ["PagedBatchGenerator", "merge", "ray_job"]
