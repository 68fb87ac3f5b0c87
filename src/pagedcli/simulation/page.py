"""One self-contained HTML page of a sweep: hit rate by pool size, where the misses go, and the tables."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pagedcli.core.eviction import POLICIES
from pagedcli.printable import one_line, plural
from pagedcli.show import pages
from pagedcli.show.tables import Table, percent, size
from pagedcli.simulation.misses import PARTS
from pagedcli.simulation.sweep import Sweep, SweepPoint
from pagedcli.simulation.tables import PART_NAMES

_CURVE_POINTS = 300


def render_page(
    names: Sequence[str],
    sweep: Sweep,
    points: Sequence[SweepPoint],
    sentences: Sequence[str],
    tables: Sequence[Table],
    block_bytes: int | None,
) -> bytes:
    """The page, in UTF-8."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    body = [
        f"<p>{plural(len(sweep.workload.requests), 'request')}, {sweep.workload.num_prompt_tokens:,} prompt tokens,"
        f" {sweep.num_unique_blocks:,} unique blocks of {plural(sweep.accesses.block_size, 'token')}</p>",
        pages.section("Hit rate by pool size", _chart(sweep, points, block_bytes), _chart_legend(points)),
        pages.section("Where the prompts' tokens went", _bars(points), _part_legend()),
        pages.section("Answers", f"<ul>{items}</ul>"),
        *map(pages.as_html, tables),
    ]
    title = f"pagedcli simulate: {', '.join(one_line(Path(name).name) for name in names)}"
    return pages.html_page(title, "\n".join(body))


def _chart(sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None) -> str:
    """Pool size on a logarithmic axis against the share of the prompts' tokens that hit."""
    sizes = sorted({point.num_blocks for point in points})
    first = min([*sizes, max(1, sweep.num_unique_blocks // 200)])
    last = max([*sizes, sweep.num_unique_blocks, 2 * first])
    num_tokens = max(1, sweep.curve.num_tokens)
    ceiling = sweep.curve.ceiling[1] / num_tokens
    top = max(0.1, math.ceil(max([ceiling, *(point.hit_rate for point in points)]) * 10 + 0.2) / 10)
    chart = pages.LineChart((first, last), top, log_x=True)
    step = 0.05 if top <= 0.4 else 0.1
    y_ticks = [(place * step, f"{place * step:.0%}") for place in range(round(top / step) + 1)]
    memory = (lambda tick: ()) if block_bytes is None else (lambda tick: (size(tick * block_bytes),))
    parts = [
        *chart.axes([(tick, (f"{tick:,}", *memory(tick))) for tick in pages.log_ticks(first, last)], y_ticks),
        *([chart.x_label("pool size in blocks")] if block_bytes is None else []),
        chart.level(ceiling, f"without limit: {percent(ceiling)}"),
        chart.line(_lru_curve(sweep, sizes, first, last)),
        chart.line([(each, sweep.best(each)[0] / max(1, sweep.best(each)[1])) for each in sizes], "best"),
    ]
    for point in reversed(points):  # lru on top: another policy often hits as much
        title = f"{point.policy}, {plural(point.num_blocks, 'block')}: {percent(point.hit_rate)}"
        parts.append(chart.point(point.num_blocks, point.hit_rate, list(POLICIES).index(point.policy), title))
    return chart.svg(parts, "Hit rate of the prompts' tokens by pool size; the figures are in the table below")


def _lru_curve(sweep: Sweep, sizes: Sequence[int], first: int, last: int) -> list[tuple[float, float]]:
    """LRU at every size. With windows, at the sizes of the points: there is no curve in one pass."""
    curve = sweep.curve
    if sweep.has_windows:
        return [(num_blocks, sweep.lru(num_blocks)[1] / max(1, curve.num_tokens)) for num_blocks in sizes]
    places = [first * (last / first) ** (index / _CURVE_POINTS) for index in range(_CURVE_POINTS + 1)]
    return [(place, curve.hits_at(int(place))[1] / max(1, curve.num_tokens)) for place in places]


def _bars(points: Sequence[SweepPoint]) -> str:
    """A bar per pool and policy, split by part."""
    rows = []
    for point in points:
        total = max(1, sum(point.parts.values()))
        parts = [
            (name, tokens / total, f"{PART_NAMES[name]}: {percent(tokens / total)} ({plural(tokens, 'token')})")
            for name, tokens in point.parts.items()
        ]
        rows.append(pages.Bar(f"{plural(point.num_blocks, 'block')}, {point.policy}", parts))
    return pages.bars(rows, "Shares of the prompts' tokens by cause; the figures are in the table below")


def _chart_legend(points: Sequence[SweepPoint]) -> str:
    policies = [policy for policy in POLICIES if any(point.policy == policy for point in points)]
    run = "" if points[0].run is None else ", simulated run"
    return pages.legend(
        [
            (pages.legend_line("curve"), "LRU without running requests"),
            (pages.legend_line("best"), "clairvoyant (Belady's rule), without running requests"),
            *((pages.legend_marker(list(POLICIES).index(policy)), f"{policy}{run}") for policy in policies),
        ]
    )


def _part_legend() -> str:
    return pages.legend((pages.legend_part(part), PART_NAMES[part]) for part in PARTS)
