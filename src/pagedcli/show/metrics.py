"""A run's counters as a text file for Prometheus (node_exporter's textfile collector), rewritten during the run."""

import time
from pathlib import Path

from pagedcli.batch.stats import BatchStats, LogHistogram, figures
from pagedcli.errors import UsageError
from pagedcli.files import whole_file
from pagedcli.show.terminal import say

_WRITE_EVERY_S = 1.0


class MetricsFile:
    """Receives the counters after each step and atomically rewrites the file about once a second.

    Raises: UsageError if the first write fails; later failures are reported once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_s = 0.0
        self._failed = False
        try:
            self._replace(BatchStats())
        except OSError as error:
            raise UsageError(f"cannot write the metrics {path}: {error.strerror}") from error

    def update(self, stats: BatchStats, *, now: bool = False) -> None:
        if self._failed or (time.monotonic() < self._next_s and not now):
            return
        self._next_s = time.monotonic() + _WRITE_EVERY_S
        try:
            self._replace(stats)
        except OSError as error:
            self._failed = True
            say(f"note: metrics stopped, cannot write {self._path}: {error.strerror}")

    def _replace(self, stats: BatchStats) -> None:
        with whole_file(self._path, overwrite=True, durable=False) as file:
            file.write(metrics_text(stats).encode())


def metrics_text(stats: BatchStats) -> str:
    """The counters in Prometheus' text format, version 0.0.4."""
    num_failed = stats.num_finished_failed
    rows = {'{status="ok"}': stats.num_finished - num_failed, '{status="failed"}': num_failed}
    errors = {f'{{code="{code}"}}': count for code, count in sorted(stats.error_codes.items())}
    families: list[tuple[str, str, str, dict[str, int] | float]] = [
        ("counter", "rows_total", "Rows of the output, including those of a resumed journal.", rows),
        ("counter", "row_errors_total", "Error rows of this process by code.", errors),
    ]
    for figure in figures(stats):
        if figure.metric is not None and figure.value is not None:
            kind = "counter" if figure.is_counter else "gauge"
            families.append((kind, figure.metric, figure.label, round(figure.value, 3)))
    if stats.num_rows is not None:
        families.append(("gauge", "rows_expected", "Rows expected in the output.", stats.num_rows))
    lines = [line for family in families for line in _family(*family)]
    lines += _summary("time_to_first_token_seconds", "From admission of a row to its first token.", stats.ttft)
    lines += _summary("time_in_queue_seconds", "The part of TTFT before the row's first step.", stats.queued)
    lines += _summary("time_per_output_token_seconds", "Mean time between a row's output tokens.", stats.tpot)
    return "\n".join(lines) + "\n"


def _family(kind: str, name: str, help_: str, values: dict[str, int] | float) -> list[str]:
    samples = values if isinstance(values, dict) else {"": values}
    head = [f"# HELP pagedcli_{name} {help_}", f"# TYPE pagedcli_{name} {kind}"]
    return head + [f"pagedcli_{name}{labels} {value}" for labels, value in samples.items()]


def _summary(name: str, help_: str, histogram: LogHistogram) -> list[str]:
    """Quantiles and the number of rows."""
    values = {percent / 100: histogram.percentile(percent) for percent in (50, 95, 99)}
    samples = [
        f'pagedcli_{name}{{quantile="{share}"}} {value:.6f}' for share, value in values.items() if value is not None
    ]
    head = [f"# HELP pagedcli_{name} {help_}", f"# TYPE pagedcli_{name} summary"]
    return [*head, *samples, f"pagedcli_{name}_count {histogram.num_values}"]
