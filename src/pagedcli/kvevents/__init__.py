"""The KV events of servers and of our own engine. What reads a server's /metrics is imported at its first use."""

from typing import TYPE_CHECKING

from pagedcli.later import modules_of

if TYPE_CHECKING:
    from pagedcli.kvevents.scrape import Metric, Scraper
else:
    __getattr__ = modules_of(__name__, Metric="scrape", Scraper="scrape")

__all__ = ["Metric", "Scraper"]
