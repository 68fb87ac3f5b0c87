"""Reads the /metrics of vLLM or SGLang: requests, usage, queries and hits, each with its time window."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from pagedcli.errors import UsageError
from pagedcli.printable import one_line
from pagedcli.process import Closes
from pagedcli.records import Means, number
from pagedcli.remote import Remote, ServerError, checked_url, shown_url

_EVERY_S = 2.0
MetricKind = Literal["gauge", "counter"]

# key: description, gauge or counter, and the names of its samples, of which a server has one
_FIGURES: dict[str, tuple[str, MetricKind, str]] = {
    "running": ("requests running", "gauge", "vllm:num_requests_running sglang:num_running_reqs"),
    "waiting": ("requests waiting", "gauge", "vllm:num_requests_waiting sglang:num_queue_reqs"),
    "usage": (
        "KV cache usage, 1 = full", "gauge", "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc sglang:token_usage",
    ),
    "queries": (
        "prompt tokens looked up", "counter",
        "vllm:prefix_cache_queries_total vllm:gpu_prefix_cache_queries_total sglang:prompt_tokens_total",
    ),
    "hits": (
        "prompt tokens hit", "counter",
        "vllm:prefix_cache_hits_total vllm:gpu_prefix_cache_hits_total sglang:cached_tokens_total",
    ),
    "preemptions": ("preemptions", "counter", "vllm:num_preemptions_total"),
}  # fmt: skip
_KEYS = {name: key for key, (_, _, names) in _FIGURES.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure over all engines of the server; usage is the maximum."""

    key: str
    meaning: Annotated[str, "the server says"]
    window: str  # now, since the server started, since attach started
    value: Annotated[float, number, Means("", "that of what the server says")]


class Metrics:
    """The figures of two readings: the first, taken when attach started, and the last."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def read(self, text: str) -> None:
        """Add a reading in Prometheus' text format. Raises: ValueError if it is malformed."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = _KEYS.get(sample.name)
                if key is None:
                    continue
                together = max if key == "usage" else float.__add__
                values[key] = together(values[key], float(sample.value)) if key in values else float(sample.value)
        self._last = values
        for key, value in values.items():
            # a restarted server counts from 0 again
            self._first[key] = min(self._first.get(key, value), value)

    def growth(self, key: str) -> float:
        """What a counter has gained since attach started."""
        return self._last.get(key, 0.0) - self._first.get(key, 0.0)

    @property
    def silence(self) -> str:
        """Why no event may have come although the server works; empty if it has computed no prompt."""
        num_new = self.growth("queries") - self.growth("hits")
        if num_new <= 0:
            return ""
        return (
            f"the server has computed {num_new:,.0f} prompt tokens since attach started, but no event came: it"
            " publishes none (enable_kv_cache_events), or not there (vLLM binds tcp://*:PORT and ipc:///PATH; to"
            " any other address it connects, and nothing listens), a firewall is between, or --topic is another one"
        )

    def figures(self) -> Iterator[Metric]:
        """All figures that the server provides, in a fixed order."""
        for key, (meaning, kind, _) in _FIGURES.items():
            if key not in self._last:
                continue
            if kind == "gauge":
                yield Metric(key, meaning, "now", self._last[key])
            else:
                yield Metric(key, meaning, "since the server started", self._last[key])
                yield Metric(key, meaning, "since attach started", self.growth(key))
        for window, first in (("since the server started", {}), ("since attach started", self._first)):
            queries, hits = (self._last.get(key, 0.0) - first.get(key, 0.0) for key in ("queries", "hits"))
            if queries > 0:
                yield Metric("hit_rate", "hit rate, in tokens", window, hits / queries)


class Scraper(Closes):
    """Reads /metrics every few seconds, in a thread: a slow server must not block the view."""

    def __init__(self, url: str, *, timeout_s: float = 3.0) -> None:
        """Raises: UsageError for what is not a URL, or where prometheus_client, an optional dependency, is missing."""
        if find_spec("prometheus_client") is None:
            raise UsageError(
                "--metrics needs prometheus_client, which is not installed", hint="pip install 'pagedcli[attach]'"
            )
        self.metrics = Metrics()
        self.problem: str | None = None  # why the last reading failed
        self._url = checked_url(url, example="http://localhost:8000/metrics", has_query=True)
        self._timeout_s = timeout_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.read_now()
            if self._closing.wait(_EVERY_S):
                return

    def read_now(self) -> None:
        """Take one reading; an error is kept in `problem`."""
        try:
            self.metrics.read(asyncio.run(self._content()).decode())
        except ServerError as error:
            self.problem = f"no metrics: {one_line(error.message)}"
        except (ValueError, KeyError, IndexError, TypeError):  # prometheus_client checks little
            self.problem = f"no metrics: {shown_url(self._url)} is not a page of metrics"
        else:
            self.problem = None

    async def _content(self) -> bytes:
        async with Remote(self._url, timeout_s=self._timeout_s) as remote, remote.exchange("GET") as response:
            return await remote.read(response)

    def close(self) -> None:
        """Take a last reading and stop."""
        self._closing.set()
        self._thread.join(self._timeout_s)
        self.read_now()
