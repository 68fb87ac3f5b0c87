"""The tables of `pagedcli simulate`, and its picture of the hit rate by pool size."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from pagedcli.answers.hits import Hits, PoolHits
from pagedcli.core.eviction import POLICIES
from pagedcli.core.plan import Plan
from pagedcli.printable import percent_text, plural
from pagedcli.records import Bytes, Means, Seconds, count, percent, size
from pagedcli.show import pages
from pagedcli.show.curve import curve_lines
from pagedcli.show.drawing import Area, Drawn, Picture, Shape, Swatch, draw, legend
from pagedcli.show.tables import Table, table
from pagedcli.simulation.caches import Accesses, best_hits
from pagedcli.simulation.requests import Requests
from pagedcli.simulation.run import Schedule

_MOST_BAD = 5  # bad lines that are named
Rate = Annotated[float | None, percent]


class Point:
    """A pool and a policy, and the run with them. The title names what counts without a unit of its own are."""

    pool_blocks: Annotated[int, "pool", Means("", "blocks")]
    pool_share: Annotated[float | None, "share", percent]
    pool_bytes: Annotated[Bytes, "memory"]
    policy: str
    hit_rate_tokens: Annotated[Rate, "token hits"]
    hit_rate_blocks: Annotated[Rate, "block hits"]
    clairvoyant_hit_rate_tokens: Annotated[Rate, "optimal"]
    mean_waiting_steps: Annotated[float | None, "waiting", count, Means("", "steps")]
    mean_waiting_s: Annotated[Seconds | None, "waiting"]
    num_preemptions: Annotated[int, "preempted", Means("", "times")]
    total_s: Annotated[Seconds, "run"]
    num_refused: Annotated[int, "refused", Means("", "requests")]


class TraceCount:
    """A count of a trace; of a curve in characters there are only notes."""

    what: str
    value: Annotated[float, count]


_TRACE = {
    "num_requests": "requests",
    "span_s": "seconds from the first to the last",
    "num_prompt_tokens": "prompt tokens",
    "num_output_tokens": "output tokens",
    "num_blocks": "full blocks of the prompts",
    "num_unique_blocks": "distinct blocks",
}


def trace_table(facts: dict[str, Any]) -> Table:
    """What is in the trace, of the facts that JSON has."""
    rows = [{"what": what, "value": facts[key]} for key, what in _TRACE.items() if facts[key] is not None]
    return table(TraceCount, "trace", f"Trace ({facts['format']})", rows)


def pool_row(
    found: PoolHits, accesses: Accesses, windows: Sequence[int | None], warmup: float, *, is_timed: bool
) -> dict[str, Any]:
    """One row of JSON: a pool size and a policy. With windows `best` is an upper bound, as if their layers needed no
    blocks."""
    most = found.num_blocks // windows.count(None) if None in windows else max(1, accesses.num_unique)
    row: dict[str, Any] = {
        "pool_blocks": found.num_blocks,
        "pool_share": _rate(found.num_blocks, accesses.num_unique * len(windows)),
        "policy": found.policy,
        "hit_rate_blocks": _rate(*found.blocks),
        "hit_rate_tokens": _rate(*found.tokens),
        "num_cached_tokens": found.tokens[0],
        "clairvoyant_hit_rate_tokens": _rate(*best_hits(accesses, most, warmup)),
    }
    if (run := found.run) is not None:
        waited = np.asarray(run.waited_s)[run.served()]
        unit = "s" if is_timed else "steps"
        row |= {
            "num_refused": run.num_refused,
            "refusals": run.refusals,
            "num_steps": run.facts.num_steps,
            f"mean_waiting_{unit}": float(waited.mean()) if len(waited) else None,
            f"p95_waiting_{unit}": float(np.percentile(waited, 95)) if len(waited) else None,
            "num_preemptions": run.facts.num_preemptions,
            "num_recomputed_tokens": run.facts.num_recomputed_tokens,
            "num_generated_tokens": run.facts.num_generated_tokens,
            "peak_used_blocks": run.facts.peak_used_blocks,
            f"total_{unit}": run.total_s,
        }
    return row


def pool_table(
    rows: list[dict[str, Any]], schedule: Schedule | None, block_bytes: int | None, notes: Sequence[str]
) -> Table:
    """Hit rates, waiting and preemptions of every pool and policy."""
    if block_bytes is None:
        pool, explained = "pool_share", "share: of the distinct blocks of all prompts"
    else:
        pool, explained = "pool_bytes", "memory: of K and V in these blocks"
        rows = [{**row, "pool_bytes": row["pool_blocks"] * block_bytes} for row in rows]
    told = [
        f"{explained}; token hits, block hits: of the prompts' tokens and full blocks; optimal: token hits of the best"
        " possible evictions, without running requests"
    ]
    columns = ["pool_blocks", pool, "policy", "hit_rate_tokens", "hit_rate_blocks", "clairvoyant_hit_rate_tokens"]
    title = "Hit rates without running requests (pool: blocks)"
    if schedule is not None:
        timed = schedule.step_time is not None
        units = "pool: blocks" if timed else "pool: blocks, waiting: steps"
        title = f"Hit rates of simulated runs ({units})"
        columns += ["mean_waiting_s" if timed else "mean_waiting_steps", "num_preemptions"]
        columns += ["total_s"] if timed and schedule.speed is None else []
        columns += ["num_refused"] if any(row["num_refused"] for row in rows) else []
        what = "time" if timed else "steps"
        told.append(f"waiting: mean {what} from arrival to the first step that computes a request")
    return table(Point, "pools", title, rows, " ".join(columns), notes=[*told, *notes])


def pools_notes(requests: Requests, found: Hits, windows: tuple[int | None, ...], warmup: float) -> list[str]:
    """What a reader of the table has to know of this trace and these runs."""
    notes = [f"bad line {bad.place}: {bad.reason}" for bad in requests.bad_lines[:_MOST_BAD]]
    if requests.num_bad > _MOST_BAD:
        notes.append(f"and {requests.num_bad - _MOST_BAD:,} more bad lines; --format json lists the first ones")
    ideal = percent_text(found.ideal_hit_rate)
    if ideal != percent_text(found.unlimited.hit_rate):
        notes.append(f"if requests came one at a time, an unlimited cache would find {ideal}")
    if warmup:
        notes.append(f"the first {warmup:.0%} of the requests fill the cache uncounted")
    if any(window is not None for window in windows):
        notes.append(
            f"the layers form {len(windows)} groups, each with blocks of its own; optimal: an upper bound, as if layers"
            " with a window needed no blocks"
        )
    return [*notes, *requests.notes]


def simulation_facts(
    requests: Requests, accesses: Accesses, plan: Plan, found: Hits, block_bytes: int | None
) -> dict[str, Any]:
    """What JSON says besides the pools."""
    return {
        "format": requests.format,
        "num_requests": len(requests.requests),
        "num_bad_lines": requests.num_bad,
        "bad_lines": [{"place": bad.place, "reason": bad.reason} for bad in requests.bad_lines],
        "notes": requests.notes,
        "num_prompt_tokens": requests.num_prompt_tokens,
        "num_output_tokens": sum(request.num_output_tokens or 1 for request in requests.requests),
        "span_s": requests.requests[-1].arrival_s,
        "block_size": plan.limits.block_size,
        "block_bytes": block_bytes,
        "num_blocks": len(accesses.blocks),
        "num_unique_blocks": accesses.num_unique * len(plan.limits.groups),
        "windows": list(plan.limits.windows),
        "ideal_hit_rate": found.ideal_hit_rate,
        "unlimited_hit_rate": found.unlimited.hit_rate,
        "enough": found.document(),
        "tried": [{"num_blocks": each.num_blocks, "hit_rate": each.hit_rate} for each in found.tried],
    }


def curve_table(found: Hits, block_bytes: int | None) -> Table:
    """The hit rate over pools of any size, drawn in characters: of each size that of the next smaller pool tried."""

    def percent_at(num_blocks: float) -> float:
        return [100 * each.hit_rate for each in found.tried if each.num_blocks <= num_blocks][-1]

    def label(num_blocks: float) -> str:
        memory = "" if block_bytes is None else f" ({size(int(num_blocks) * block_bytes)})"
        return f"{plural(int(num_blocks), 'block')}{memory}"

    lines = curve_lines({"#": percent_at}, *_pool_range(found), unit="%", label=label)
    title = f"Hit rate of the prompts' tokens by pool size, {found.here.policy}"
    return table(TraceCount, "curve", title, [], notes=lines)


def _pool_range(found: Hits, shown: Sequence[int] = ()) -> tuple[int, int]:
    """The smallest and the largest pool of a chart, in blocks."""
    first = min(each.num_blocks for each in found.tried)
    return first, max(2 * first, 2 * found.enough.num_blocks, found.here.num_blocks, *shown)


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def hit_rate_picture(found: Hits, rows: Sequence[dict[str, Any]], facts: dict[str, Any], shape: Shape) -> Picture:
    """Hit rate by pool size. `rows`: what pool_row makes of the pools that are marked; `facts`: of the trace."""

    def body(area: Area) -> Drawn:
        items = [(_swatch(drawing), meaning) for drawing, meaning in _chart_items(rows)]
        key_height = legend(area, items)[1] + area.font
        height = 0.7 * area.width if area.height is None else area.height - key_height
        scale = area.font / 14  # the chart's labels are drawn for this size
        known_bytes = None if shape is Shape.COLUMN else facts["block_bytes"]  # no room for these labels
        svg = _chart(found, rows, known_bytes, width=round(area.width / scale), height=round(height / scale))
        place = f'<svg x="{area.x}" y="{area.y}" width="{area.width}" height="{height:.1f}" '
        chart = f'<g class="muted" font-size="13">{svg.replace("<svg ", place, 1)}</g>'
        key, _ = legend(Area(area.x, area.y + height, area.width, None, area.font), items)
        return [chart, *key], height + key_height

    caption = (
        f"Share of the {facts['num_prompt_tokens']:,} prompt tokens of {plural(facts['num_requests'], 'request')} that"
        f" a cache of N blocks of {plural(facts['block_size'], 'token')} finds; they have"
        f" {facts['num_unique_blocks']:,} different blocks."
    )
    return draw("Hit rate by pool size", caption, body, shape)


def _swatch(drawing: str) -> Swatch:
    """A drawing of pages.legend as a swatch."""
    return lambda x, y, size: f'<g transform="translate({x:.1f} {y:.1f}) scale({size / 18:.2f})">{drawing}</g>'


def _chart(found: Hits, rows: Sequence[dict[str, Any]], block_bytes: int | None, *, width: int, height: int) -> str:
    """Pool size on a logarithmic axis against the share of the prompts' tokens that hit."""
    first, last = _pool_range(found, [row["pool_blocks"] for row in rows])
    unlimited = found.unlimited.hit_rate
    rates = [row["hit_rate_tokens"] or 0.0 for row in rows]
    top = max(0.1, math.ceil(max(unlimited, *rates) * 10 + 0.2) / 10)
    chart = pages.LineChart((first, last), top, log_x=True, width=width, height=height)
    step = 0.05 if top <= 0.4 else 0.1
    y_ticks = [(place * step, f"{place * step:.0%}") for place in range(round(top / step) + 1)]
    memory = (lambda tick: ()) if block_bytes is None else (lambda tick: (size(tick * block_bytes),))
    best = {row["pool_blocks"]: row["clairvoyant_hit_rate_tokens"] or 0.0 for row in rows}
    parts = [
        *chart.axes([(tick, (f"{tick:,}", *memory(tick))) for tick in pages.log_ticks(first, last)], y_ticks),
        *([chart.x_label("pool size in blocks")] if block_bytes is None else []),
        chart.level(unlimited, f"without limit: {percent(unlimited)}"),
        chart.line([(each.num_blocks, each.hit_rate) for each in found.tried if each.num_blocks <= last]),
        chart.line(list(best.items()), "best"),
    ]
    for row, rate in reversed([*zip(rows, rates, strict=True)]):  # lru on top: another policy often hits as much
        title = f"{row['policy']}, {plural(row['pool_blocks'], 'block')}: {percent(rate)}"
        parts.append(chart.point(row["pool_blocks"], rate, list(POLICIES).index(row["policy"]), title))
    return chart.svg(parts, "Hit rate of the prompts' tokens by pool size")


def _chart_items(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    policies = [policy for policy in POLICIES if any(row["policy"] == policy for row in rows)]
    return [
        (pages.legend_line("curve"), f"{rows[0]['policy']}, all pools tried"),
        (pages.legend_line("best"), "clairvoyant (Belady's rule), without running requests"),
        *((pages.legend_marker(list(POLICIES).index(policy)), policy) for policy in policies),
    ]
