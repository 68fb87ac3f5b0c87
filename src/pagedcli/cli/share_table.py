"""How workers would share a prompt file, as `plan --workers` shows it."""

from pagedcli.cli.tables import Column, Table, count, decimal, percent
from pagedcli.distributed.partition import SharePlan, facts


def share_table(shares: SharePlan, num_workers: int) -> Table:
    """One row per way of distribution."""
    rows = [{"way": name, **facts(each)} for name, each in shares.ways(num_workers).items()]
    columns = [
        Column("way", "rows"),
        Column("num_computed_tokens", "prompt tokens computed", count),
        Column("hit_rate", "hit rate", percent),
        Column("max_over_mean", "max / mean", decimal),
    ]
    notes = [
        f"under prefix caches of block size {shares.keys.block_size} that never evict, one per worker; generate --ray"
        " groups by prefix",
        "max / mean: tokens that the busiest worker computes and generates at most, over the mean of all workers",
    ]
    return Table("workers", f"{num_workers} workers", columns, rows, notes)
