"""A run while it goes: the progress line, and the counters as a text file for Prometheus (node_exporter's textfile
collector), rewritten during the run.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from pagedcli.batch.stats import BatchStats, LogHistogram, figures
from pagedcli.core.facts import RunFacts
from pagedcli.files import whole_file, writing
from pagedcli.printable import duration_text, plural
from pagedcli.show.terminal import say

_WINDOW_S = 10.0  # rates are averaged over this time
_REDRAW_EVERY_S = 0.1
_LINE_EVERY_S = 5.0
TimeLeft = Callable[[BatchStats], float | None]
"""Seconds until a run ends; None: not known."""


class ProgressView:
    """A context manager that shows progress. This one shows nothing: rows on the same terminal are the progress."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, stats: BatchStats) -> None: ...


def progress_view(*, quiet_terminal: bool, time_left: TimeLeft | None = None) -> ProgressView:
    """The right view for stderr. `quiet_terminal`: other output goes to the same terminal. `time_left` None: rows are
    assumed to take the same time each."""
    time_left = time_left or average_pace
    if sys.stderr.isatty():
        return ProgressView() if quiet_terminal else _LiveProgress(time_left)
    return _Progress(time_left)


def rows_text(stats: BatchStats) -> str:
    """`412/1,000 rows, 3 failed`"""
    rows = plural(stats.num_finished if stats.num_rows is None else stats.num_rows, "row")
    done = rows if stats.num_rows is None else f"{stats.num_finished:,}/{rows}"
    return done + (f", {stats.num_finished_failed:,} failed" if stats.num_finished_failed else "")


def average_pace(stats: BatchStats) -> float | None:
    """The seconds left, if the other rows take as long as those that are done."""
    if stats.num_rows is None or not stats.num_done:
        return None
    return (stats.num_rows - stats.num_finished) * stats.elapsed_s / stats.num_done


def _left(left_s: float | None) -> list[str]:
    """The time left in words; nothing if it is unknown."""
    return [] if left_s is None else [f"{duration_text(max(1.0, left_s))} left"]


class _Progress(ProgressView):
    """Shows the run again when the last time is long enough ago."""

    every_s = first_after_s = _LINE_EVERY_S

    def __init__(self, time_left: TimeLeft) -> None:
        self._time_left = time_left
        # time, tokens of prompts and continuations that were found or computed, generated tokens
        self._points: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        self._next_s = time.monotonic() + self.first_after_s

    def update(self, stats: BatchStats) -> None:
        now, facts = time.monotonic(), stats.facts
        self._points.append((now, facts.num_cached_tokens + facts.num_computed_given, facts.num_generated_tokens))
        while now - self._points[0][0] > _WINDOW_S and len(self._points) > 2:
            self._points.popleft()
        if now >= self._next_s:
            self._next_s = now + self.every_s
            self.show(stats)

    def details(self, facts: RunFacts) -> list[str]:
        """Speeds over the last seconds, cache use and scheduling, briefly."""
        (first_s, *first), (last_s, *last) = self._points[0], self._points[-1]
        rates = [(num - before) / max(last_s - first_s, 1e-9) for before, num in zip(first, last, strict=True)]
        parts = [f"prompt {rates[0]:,.0f} tok/s", f"generated {rates[1]:,.0f} tok/s"]
        parts.append(f"KV {100 * facts.num_used_blocks / max(facts.num_blocks, 1):.0f} %")
        parts.append(f"hits {100 * facts.hit_rate:.0f} %")
        if facts.num_preemptions:
            parts.append(f"preempted {facts.num_preemptions:,}")
        return parts

    def show(self, stats: BatchStats) -> None:
        """A whole line, for logs."""
        say(", ".join([rows_text(stats), *self.details(stats.facts), *_left(self._time_left(stats))]))


class _LiveProgress(_Progress):
    """Two lines at the bottom of a terminal, redrawn at most ten times a second."""

    every_s, first_after_s = _REDRAW_EVERY_S, 0.0

    def __init__(self, time_left: TimeLeft) -> None:
        from rich import console, live

        super().__init__(time_left)
        self._live: Any = live.Live(console=console.Console(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, stats: BatchStats) -> None:
        self._live.update(self._render(stats), refresh=True)

    def _render(self, stats: BatchStats) -> Any:
        from rich import console, progress_bar, table, text

        line = table.Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        bar = progress_bar.ProgressBar(
            total=stats.num_rows or None, completed=stats.num_finished, pulse=stats.num_rows is None
        )
        line.add_row(rows_text(stats), bar, *_left(self._time_left(stats)))
        details = text.Text(" · ".join(self.details(stats.facts)), no_wrap=True, overflow="ellipsis")
        return console.Group(line, details)


_WRITE_EVERY_S = 1.0


class MetricsFile:
    """Receives the counters after each step and atomically rewrites the file about once a second.

    Raises: UsageError if the first write fails; later failures are reported once.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._path = path
        self._model = model
        self._next_s = 0.0
        self._failed = False
        with writing(f"the metrics {path}"):
            self._replace(BatchStats())

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
            file.write(metrics_text(stats, self._model).encode())


def metrics_text(stats: BatchStats, model: str) -> str:
    """The counters in Prometheus' text format, version 0.0.4; once more under the names of OpenTelemetry."""
    num_failed = stats.num_finished_failed
    rows = {'{status="ok"}': stats.num_finished - num_failed, '{status="failed"}': num_failed}
    errors = {f'{{code="{code}"}}': count for code, count in sorted(stats.error_codes.items())}
    families: list[tuple[str, str, str, dict[str, int] | float]] = [
        ("counter", "rows_total", "Rows of the output, including those of a resumed journal.", rows),
        ("counter", "row_errors_total", "Error rows of this process by code.", errors),
    ]
    if drafted := stats.facts.drafted:
        right = {source: stats.facts.accepted[source] for source in drafted}
        for name, help_, counts in (
            ("drafted_tokens_total", "Draft tokens verified, by where they came from.", drafted),
            ("accepted_tokens_total", "Of these, accepted ones.", right),
        ):
            families.append(("counter", name, help_, {f'{{source="{each}"}}': count for each, count in counts.items()}))
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
    return "\n".join([*lines, *_otel_lines(stats, model)]) + "\n"


# Names and bounds of the OpenTelemetry conventions for generative AI: their dots are underscores in Prometheus.
# https://github.com/open-telemetry/semantic-conventions-genai
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_REQUEST_S = tuple(0.01 * 2**place for place in range(14))


def _otel_lines(stats: BatchStats, model: str) -> list[str]:
    name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'gen_ai_operation_name="text_completion",gen_ai_request_model="{name}"'
    facts, lines = stats.facts, []
    for attribute, help_, value in (
        ("gen_ai.usage.input_tokens", "Prompt tokens of started requests.", facts.num_prompt_tokens),
        ("gen_ai.usage.output_tokens", "Tokens generated.", facts.num_generated_tokens),
        ("gen_ai.usage.cache_read.input_tokens", "Prompt tokens found in the prefix cache.", facts.num_cached_tokens),
    ):
        metric = attribute.replace(".", "_") + "_total"
        lines += [f"# HELP {metric} {attribute}: {help_}", f"# TYPE {metric} counter", f"{metric}{{{labels}}} {value}"]
    for attribute, help_, histogram, bounds in (
        ("gen_ai.server.request.duration", "From admission to the last token.", stats.duration, _REQUEST_S),
        ("gen_ai.server.time_to_first_token", "From admission to the first token.", stats.ttft, _FIRST_TOKEN_S),
        ("gen_ai.server.time_per_output_token", "Mean time between output tokens.", stats.tpot, _TOKEN_S),
    ):
        metric = attribute.replace(".", "_") + "_seconds"
        lines += [f"# HELP {metric} {attribute}: {help_}", f"# TYPE {metric} histogram"]
        lines += [f'{metric}_bucket{{{labels},le="{bound:g}"}} {histogram.num_up_to(bound)}' for bound in bounds]
        lines.append(f'{metric}_bucket{{{labels},le="+Inf"}} {histogram.num_values}')
        lines.append(f"{metric}_sum{{{labels}}} {histogram.total:.6f}")
        lines.append(f"{metric}_count{{{labels}}} {histogram.num_values}")
    return lines


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
