"""The tables of `pagedcli simulate`, and its self-contained HTML page: hit rate by pool size, where the misses go."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from pagedcli.core.eviction import POLICIES
from pagedcli.core.limits import Limits
from pagedcli.printable import one_line, plural
from pagedcli.records import Bytes, Means, columns_of, count, percent, size
from pagedcli.show import pages
from pagedcli.show.curve import curve_lines
from pagedcli.show.drawing import Area, Drawn, Picture, Shape, Swatch, draw, legend
from pagedcli.show.tables import Format, Quantity, Table, quantities, table
from pagedcli.simulation.caches import PARTS, LruCurve
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import Schedule
from pagedcli.simulation.sweep import Sweep, SweepPoint


def facts(sweep: Sweep, block_size: int, block_bytes: int | None) -> dict[str, Any]:
    """What JSON says about the whole trace."""
    workload, curve = sweep.workload, sweep.curve
    blocks, tokens = curve.ceiling
    return {
        "format": workload.format,
        "num_requests": len(workload.requests),
        "num_bad_lines": workload.num_bad,
        "bad_lines": [{"place": bad.place, "reason": bad.reason} for bad in workload.bad_lines],
        "notes": workload.notes,
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": sum(request.num_output_tokens or 1 for request in workload.requests),
        "block_size": block_size,
        "block_bytes": block_bytes,
        "num_blocks": len(sweep.accesses.blocks),
        "num_unique_blocks": sweep.num_unique_blocks,
        "windows": list(sweep.windows),
        "warmup": sweep.warmup,
        "unlimited_hit_rate_blocks": _rate(blocks, curve.num_blocks),
        "unlimited_hit_rate_tokens": _rate(tokens, curve.num_tokens),
    }


def share(value: float) -> str:
    """21.3 %, or `50 times` of a pool that is far larger than what it is compared with."""
    return percent(value) if value < 10 else f"{value:,.0f} times"


def seconds(value: float) -> str:
    """12.3 s"""
    return f"{value:,.1f} s"


Hits = Annotated[float | None, percent]


class Checkpoints:
    """A checkpoint policy, and what it finds."""

    checkpoints: str
    tokens_hit: int
    hit_rate: Hits


class AnswerRow:
    """A sentence."""

    answer: str


class Point:
    """A pool and a policy, and the run with them. The title names what counts without a unit of its own are."""

    pool_blocks: Annotated[int, "pool", Means("", "blocks")]
    pool_share: Annotated[float | None, "share", share]
    pool_bytes: Annotated[Bytes, "memory"]
    policy: str
    hit_rate_tokens: Annotated[Hits, "tokens"]
    hit_rate_blocks: Annotated[Hits, "blocks"]
    lru_unscheduled_hit_rate_tokens: Annotated[Hits, "LRU"]
    clairvoyant_hit_rate_tokens: Annotated[Hits, "best"]
    mean_waiting_s: Annotated[float | None, "waiting", seconds]
    mean_waiting_steps: Annotated[float | None, "waiting", count, Means("", "steps")]
    num_preemptions: Annotated[int, "preempted", Means("", "times")]
    total_s: Annotated[float, "run", seconds]
    num_refused: Annotated[int, Means("", "requests")]


class Misses:
    """The parts of a prompt's tokens, see caches.PARTS."""

    pool_blocks: Annotated[int, "pool blocks"]
    policy: str
    hit_share: Annotated[Hits, "hit"]
    in_flight_share: Annotated[Hits, "in flight"]
    policy_share: Annotated[Hits, "eviction"]
    capacity_share: Annotated[Hits, "capacity"]
    cold_share: Annotated[Hits, "cold"]
    short_share: Annotated[Hits, "short"]


PART_NAMES = {name: columns_of(Misses)[f"{name}_share"].header for name in PARTS}


def trace_table(workload: Workload, sweep: Sweep) -> Table:
    """What is in the trace."""
    num_outputs = sum(request.num_output_tokens or 1 for request in workload.requests)
    span_s = (workload.requests[-1].arrival_s or 0.0) if workload.has_times else None
    blocks, tokens = sweep.curve.ceiling
    in_blocks, in_tokens = _rate(blocks, sweep.curve.num_blocks) or 0, _rate(tokens, sweep.curve.num_tokens) or 0
    hits = f"{percent(in_tokens)} of tokens, {percent(in_blocks)} of blocks"

    def number(name: str, what: str, value: int, unit: str) -> Quantity:
        return Quantity(name, what, value, unit, count(value))

    values = [
        number("num_requests", "requests", len(workload.requests), "requests"),
        *([] if span_s is None else [Quantity("span_s", "time span", span_s, "s", f"{span_s:,.0f} s")]),
        number("num_prompt_tokens", "prompt tokens", workload.num_prompt_tokens, "tokens"),
        number("num_output_tokens", "output tokens", num_outputs, "tokens"),
        number("num_blocks", "full blocks looked up", len(sweep.accesses.blocks), "blocks"),
        number("num_unique_blocks", "unique blocks", sweep.num_unique_blocks, "blocks"),
        Quantity("hit_rate", "hit rate without limit", in_tokens, "share of tokens", hits, {"of_blocks": in_blocks}),
    ]
    notes = [f"bad line {bad.place}: {bad.reason}" for bad in workload.bad_lines[:5]]
    if workload.num_bad > 5:
        notes.append(f"and {workload.num_bad - 5:,} more bad lines; --format json lists the first ones")
    return quantities("trace", f"Trace ({workload.format})", values, notes=[*notes, *workload.notes])


def point_row(point: SweepPoint, sweep: Sweep) -> dict[str, Any]:
    """One row of JSON: a pool size and a policy."""
    blocks, tokens = sweep.lru(point.num_blocks)
    row: dict[str, Any] = {
        "pool_blocks": point.num_blocks,
        "pool_share": _rate(point.num_blocks, sweep.num_unique_blocks),
        "policy": point.policy,
        "hit_rate_blocks": _rate(*point.hit_blocks),
        "hit_rate_tokens": _rate(*point.hit_tokens),
        "lru_unscheduled_hit_rate_blocks": _rate(blocks, sweep.curve.num_blocks),
        "lru_unscheduled_hit_rate_tokens": _rate(tokens, sweep.curve.num_tokens),
        "clairvoyant_hit_rate_tokens": _rate(*sweep.best(point.num_blocks)),
        "tokens": point.parts,
    }
    run = point.run
    if run is not None:
        waited = np.asarray(run.waited_steps)[run.served()]
        waited_s = np.asarray(run.waited_s)[run.served()]
        row |= {
            "num_refused": run.num_refused,
            "refusals": run.refusals,
            "num_steps": run.facts.num_steps,
            "mean_waiting_steps": float(waited.mean()) if len(waited) else None,
            "p95_waiting_steps": float(np.percentile(waited, 95)) if len(waited) else None,
            "mean_waiting_s": float(waited_s.mean()) if len(waited) else None,
            "num_preemptions": run.facts.num_preemptions,
            "num_recomputed_tokens": run.facts.num_recomputed_tokens,
            "num_generated_tokens": run.facts.num_generated_tokens,
            "peak_used_blocks": run.facts.peak_used_blocks,
            "total_s": run.total_s,
        }
    return row


def checkpoint_table(points: dict[str, SweepPoint], sweep: Sweep, limits: Limits) -> Table:
    """What each checkpoint policy finds, next to what attention alone would find in a cache without limit."""
    hits, tokens = sweep.curve.ceiling[1], sweep.curve.num_tokens
    rows = [
        {"checkpoints": name, "tokens_hit": point.hit_tokens[0], "hit_rate": point.hit_rate}
        for name, point in points.items()
    ]
    rows.append({"checkpoints": "bound", "tokens_hit": hits, "hit_rate": hits / max(1, tokens)})
    notes = [
        f"{plural(limits.num_state_slots or 0, 'slot')} of recurrent state; branches: where waiting prompts differ;"
        " end: at the end of each prompt; bound: a cache without limit of a model without such state",
    ]
    num_blocks = next(iter(points.values())).num_blocks
    title = f"Checkpoints, with {plural(num_blocks, 'block')}"
    return table(Checkpoints, "checkpoints", title, rows, notes=notes)


def answer_table(sentences: Sequence[str], format: Format) -> Table:
    """What it means: lines of text, in CSV rows."""
    rows = [{"answer": sentence} for sentence in sentences]
    if format is Format.CSV:
        return table(AnswerRow, "answers", "Answers", rows)
    return table(AnswerRow, "answers", "Answers", [], notes=sentences)


def pool_table(points: Sequence[SweepPoint], sweep: Sweep, schedule: Schedule | None, block_bytes: int | None) -> Table:
    """Hit rates, waiting and preemptions of every pool and policy."""
    rows = [point_row(point, sweep) for point in points]
    hits = "tokens, blocks: hits of the prompts' tokens and full blocks, when they are first computed; "
    hits += f"the first {sweep.warmup:.0%} of the requests fill the cache uncounted" if sweep.warmup else "no warm-up"
    if block_bytes is None:
        pool, notes = "pool_share", ["share: of the distinct blocks of all prompts", hits]
    else:
        pool, notes = "pool_bytes", ["memory: of K and V in these blocks", hits]
        rows = [{**row, "pool_bytes": row["pool_blocks"] * block_bytes} for row in rows]
    columns = ["pool_blocks", pool, "policy", "hit_rate_tokens", "hit_rate_blocks"]
    title = "Hit rates without running requests (pool: blocks)"
    if schedule is None:
        columns.append("clairvoyant_hit_rate_tokens")
        notes.append("best: tokens that hit with the clairvoyant, whose evictions are the best possible")
    else:
        timed = schedule.step_time is not None
        units = f"pool: blocks{'' if timed else ', waiting: steps'}, preempted: times"
        title = f"Hit rates of simulated runs ({units})"
        waiting = "mean_waiting_s" if timed else "mean_waiting_steps"
        columns += ["lru_unscheduled_hit_rate_tokens", "clairvoyant_hit_rate_tokens", waiting, "num_preemptions"]
        if timed and schedule.speed is None:
            columns.append("total_s")
            notes.append("run: until the last request has ended, all being there from the start")
        if any(point.run is not None and point.run.num_refused for point in points):
            columns.append("num_refused")
            notes.append("refused: requests that never fit into the pool; they count nowhere else")
        notes += [
            "LRU, best: tokens that hit in the same pool without running requests: under LRU, and with the clairvoyant,"
            " whose evictions are the best possible",
            f"waiting: mean {'time' if timed else 'steps'} from arrival to the first step that computes a request;"
            " preempted: in the whole run",
        ]
    if sweep.has_windows:
        notes.append(
            f"the layers form {len(sweep.windows)} groups, each with blocks of its own; best: an upper bound, as if"
            " layers with a window needed no blocks"
        )
    return table(Point, "pools", title, rows, " ".join(columns), notes=notes)


def curve_tables(curve: LruCurve, sizes: Sequence[int], num_unique: int, block_bytes: int | None) -> list[Table]:
    """The hit rate of LRU without running requests, drawn in characters over pools of any size; empty if there are no
    hits. `sizes`: pools that are shown elsewhere, in blocks; `num_unique`: distinct blocks of all prompts."""
    if not curve.ceiling[1]:
        return []

    def share_at(num_blocks: float) -> float:
        return curve.hits_at(int(num_blocks))[1] / max(1, curve.num_tokens)

    def label(num_blocks: float) -> str:
        memory = "" if block_bytes is None else f" ({size(int(num_blocks) * block_bytes)})"
        return f"{plural(int(num_blocks), 'block')}{memory}"

    lines = curve_lines(share_at, *_pool_range(sizes, num_unique), label=label)
    return [table(AnswerRow, "curve", "Hit rate of the prompts' tokens by pool size, LRU without running requests", [],
                  notes=lines)]  # fmt: skip


def _pool_range(sizes: Sequence[int], num_unique: int) -> tuple[int, int]:
    """The smallest and the largest pool of a chart, in blocks."""
    first = min([*sizes, max(1, num_unique // 200)])
    return first, max([*sizes, num_unique, 2 * first])


def miss_table(points: Sequence[SweepPoint]) -> Table:
    """Where the tokens of the prompts went."""
    rows = []
    for point in points:
        total = sum(point.parts.values())
        shares = {f"{name}_share": _rate(tokens, total) for name, tokens in point.parts.items()}
        rows.append({"pool_blocks": point.num_blocks, "policy": point.policy, **shares})
    notes = ["shares of the prompts' tokens, adding up to 100 %; each token counts where it first fits, left to right"]
    notes += [f"{PART_NAMES[name]}: {PARTS[name]}" for name in PARTS if any(name in point.parts for point in points)]
    return table(Misses, "misses", "Where the prompts' tokens went", rows, notes=notes)


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None


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
    parts = pages.legend((pages.legend_part(part), PART_NAMES[part]) for part in PARTS)
    body = [
        f"<p>{plural(len(sweep.workload.requests), 'request')}, {sweep.workload.num_prompt_tokens:,} prompt tokens,"
        f" {sweep.num_unique_blocks:,} unique blocks of {plural(sweep.accesses.block_size, 'token')}</p>",
        pages.section("Hit rate by pool size", _chart(sweep, points, block_bytes), pages.legend(_chart_items(points))),
        pages.section("Where the prompts' tokens went", _bars(points), parts),
        pages.section("Answers", f"<ul>{items}</ul>"),
        *map(pages.as_html, tables),
    ]
    title = f"pagedcli simulate: {', '.join(one_line(Path(name).name) for name in names)}"
    return pages.html_page(title, "\n".join(body))


def hit_rate_picture(sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None, shape: Shape) -> Picture:
    """The chart of the page as a picture of its own."""

    def body(area: Area) -> Drawn:
        items = [(_swatch(drawing), meaning) for drawing, meaning in _chart_items(points)]
        key_height = legend(area, items)[1] + area.font
        height = 0.7 * area.width if area.height is None else area.height - key_height
        scale = area.font / 14  # the chart's labels are drawn for this size
        known_bytes = None if shape is Shape.COLUMN else block_bytes  # no room for these labels
        svg = _chart(sweep, points, known_bytes, width=round(area.width / scale), height=round(height / scale))
        place = f'<svg x="{area.x}" y="{area.y}" width="{area.width}" height="{height:.1f}" '
        chart = f'<g class="muted" font-size="13">{svg.replace("<svg ", place, 1)}</g>'
        key, _ = legend(Area(area.x, area.y + height, area.width, None, area.font), items)
        return [chart, *key], height + key_height

    caption = (
        f"Share of the {sweep.curve.num_tokens:,} prompt tokens of {plural(len(sweep.workload.requests), 'request')}"
        f" that a cache of so many blocks of {plural(sweep.accesses.block_size, 'token')} finds; they have"
        f" {sweep.num_unique_blocks:,} different blocks."
    )
    return draw("Hit rate by pool size", caption, body, shape)


def _swatch(drawing: str) -> Swatch:
    """A drawing of pages.legend as a swatch."""
    return lambda x, y, size: f'<g transform="translate({x:.1f} {y:.1f}) scale({size / 18:.2f})">{drawing}</g>'


def _chart(
    sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None, *, width: int = 1000, height: int = 380
) -> str:
    """Pool size on a logarithmic axis against the share of the prompts' tokens that hit."""
    sizes = sorted({point.num_blocks for point in points})
    first, last = _pool_range(sizes, sweep.num_unique_blocks)
    num_tokens = max(1, sweep.curve.num_tokens)
    ceiling = sweep.curve.ceiling[1] / num_tokens
    top = max(0.1, math.ceil(max([ceiling, *(point.hit_rate for point in points)]) * 10 + 0.2) / 10)
    chart = pages.LineChart((first, last), top, log_x=True, width=width, height=height)
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


def _chart_items(points: Sequence[SweepPoint]) -> list[tuple[str, str]]:
    policies = [policy for policy in POLICIES if any(point.policy == policy for point in points)]
    run = "" if points[0].run is None else ", simulated run"
    return [
        (pages.legend_line("curve"), "LRU without running requests"),
        (pages.legend_line("best"), "clairvoyant (Belady's rule), without running requests"),
        *((pages.legend_marker(list(POLICIES).index(policy)), f"{policy}{run}") for policy in policies),
    ]
