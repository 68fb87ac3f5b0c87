"""One self-contained HTML page of a sweep: hit rate by pool size, where the misses go, and the tables."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from pagedcli.events import Eviction
from pagedcli.printable import one_line
from pagedcli.show.tables import Table, as_html, count, html_page, percent, size
from pagedcli.simulation.misses import PARTS
from pagedcli.simulation.sweep import POLICIES, Sweep, SweepPoint
from pagedcli.simulation.tables import PART_NAMES

_WIDTH, _HEIGHT = 1000, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 14, 44  # around the plot
_CURVE_POINTS = 300
_BAR, _ROW, _LABELS = 22, 30, 190  # of the bars: height, distance, room for labels
# one marker per policy, in the order of POLICIES: shapes differ, not only colours
_MARKERS = (
    '<circle r="6"/>', '<rect x="-5.5" y="-5.5" width="11" height="11"/>', '<path d="M0-7L7 6H-7z"/>',
    '<path d="M0-8L8 0L0 8L-8 0z"/>', '<path d="M-6-6L6 6M-6 6L6-6" style="stroke-width:3.5"/>',
)  # fmt: skip

_STYLE = """\
  :root { color-scheme: light dark; --page: #f7f8fa; --card: #ffffff; --text: #17202b; --muted: #5b6775;
    --line: #dde2e8; --curve: #1f5fbf; --best: #5b6775; --p0: #1f5fbf; --p1: #c9741b; --p2: #7b3aa8; --p3: #a0522d;
    --p4: #2c7a51; --hit: #3d8b63; --in_flight: #7b3aa8; --policy: #c9741b; --capacity: #c23b3b; --cold: #aab4bf;
    --short: #d9dee4; }
  @media (prefers-color-scheme: dark) { :root { --page: #11161c; --card: #1a212a; --text: #e6ebf0; --muted: #98a5b3;
    --line: #2e3843; --curve: #7db2ff; --best: #98a5b3; --p0: #7db2ff; --p1: #e39a4a; --p2: #cf94f5; --p3: #e0a080;
    --p4: #55b384; --hit: #55b384; --in_flight: #cf94f5; --policy: #e39a4a; --capacity: #ef6b6b; --cold: #66727f;
    --short: #3c4855; } }
  body { max-width: 1100px; margin: 0 auto; padding: 20px; background: var(--page); color: var(--text);
    font: 15px/1.5 system-ui, "Noto Sans", sans-serif; }
  h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 0 0 4px; }
  section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px;
    margin: 16px 0; }
  section > div { overflow-x: auto; }
  table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
  th, td { text-align: left; padding: 3px 10px; border-bottom: 1px solid var(--line); }
  td.n, th.n { text-align: right; white-space: nowrap; }
  p { margin: 4px 0; color: var(--muted); } li { margin: 4px 0; }
  svg { width: 100%; height: auto; display: block; } text { fill: var(--muted); font-size: 13px; }
  .grid { stroke: var(--line); } .curve { fill: none; stroke: var(--curve); stroke-width: 2; }
  .best { fill: none; stroke: var(--best); stroke-width: 1.5; stroke-dasharray: 6 4; }
  .legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 6px 0; }
  .legend span { display: inline-flex; align-items: center; gap: 6px; }
  .legend svg { width: 22px; height: 16px; }
"""


def render_page(
    names: Sequence[str],
    sweep: Sweep,
    points: Sequence[SweepPoint],
    sentences: Sequence[str],
    tables: Sequence[Table],
    block_bytes: int | None,
) -> bytes:
    """The page, in UTF-8."""
    policies = [policy for policy in POLICIES if any(point.policy == policy for point in points)]
    styles = [f".m{place} {{ fill: var(--p{place}); stroke: var(--p{place}); }}" for place in range(len(POLICIES))]
    styles += [f".{part} {{ fill: var(--{part}); }}" for part in PARTS]
    chart = _Plot(sweep, points, block_bytes).svg() + _chart_legend(policies, scheduled=points[0].run is not None)
    body = [
        f"<p>{len(sweep.workload.requests):,} requests, {sweep.workload.num_prompt_tokens:,} prompt tokens,"
        f" {sweep.num_unique_blocks:,} unique blocks of {sweep.accesses.block_size:,} tokens</p>",
        f"<section><h2>Hit rate by pool size</h2>{chart}</section>",
        f"<section><h2>Where the prompts' tokens went</h2>{_bars(points)}{_part_legend()}</section>",
        _answers(sentences),
        *(f"<section>{as_html(table)}</section>" for table in tables),
    ]
    title = f"pagedcli simulate: {', '.join(one_line(Path(name).name) for name in names)}"
    return html_page(title, _STYLE + "  " + " ".join(styles), "\n".join(body))


def _answers(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<section><h2>Answers</h2><ul>{items}</ul></section>"


class _Plot:
    """The chart: pool size on a logarithmic axis against the share of the prompts' tokens that hit."""

    def __init__(self, sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None) -> None:
        self._sweep = sweep
        self._points = points
        self._block_bytes = block_bytes
        sizes = [point.num_blocks for point in points]
        self._first = min([*sizes, max(1, sweep.num_unique_blocks // 200)])
        self._last = max([*sizes, sweep.num_unique_blocks, 2 * self._first])
        tokens = max(1, sweep.curve.num_tokens)
        rates = [point.hit_tokens[0] / max(1, point.hit_tokens[1]) for point in points]
        self._top = max(0.1, math.ceil(max([sweep.curve.ceiling[1] / tokens, *rates]) * 10 + 0.2) / 10)

    def svg(self) -> str:
        lines = [*self._axes(), self._ceiling(), self._curve(), self._best(), *self._runs()]
        label = "Hit rate of the prompts' tokens by pool size; the figures are in the table below"
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(lines)}</svg>'

    def _x(self, num_blocks: float) -> float:
        share = math.log(num_blocks / self._first) / math.log(self._last / self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / self._top * (_HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> Iterator[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        step = 0.05 if self._top <= 0.4 else 0.1
        for place in range(round(self._top / step) + 1):
            y = self._y(place * step)
            yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{place * step:.0%}</text>'
        for num_blocks in _ticks(self._first, self._last):
            x = self._x(num_blocks)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{num_blocks:,}</text>'
            if self._block_bytes is not None:
                memory = size(num_blocks * self._block_bytes)
                yield f'<text x="{x:.1f}" y="{bottom + 34}" text-anchor="middle">{memory}</text>'
        if self._block_bytes is None:
            yield f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">pool size in blocks</text>'

    def _ceiling(self) -> str:
        rate = self._sweep.curve.ceiling[1] / max(1, self._sweep.curve.num_tokens)
        y = self._y(rate)
        return (
            f'<line class="best" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT + 6}" y="{y - 6:.1f}">without limit: {percent(rate)}</text>'
        )

    def _curve(self) -> str:
        """LRU at every size. With windows, at the sizes of the points: there is no curve in one pass."""
        curve, places = self._sweep.curve, []
        if self._sweep.has_windows:
            sizes = sorted({point.num_blocks for point in self._points})
            rates = {num_blocks: self._sweep.lru(num_blocks)[1] / max(1, curve.num_tokens) for num_blocks in sizes}
            ends = " ".join(f"{self._x(size):.1f},{self._y(rate):.1f}" for size, rate in rates.items())
            return f'<polyline class="curve" points="{ends}"/>'
        for index in range(_CURVE_POINTS + 1):
            num_blocks = self._first * (self._last / self._first) ** (index / _CURVE_POINTS)
            rate = curve.hits_at(int(num_blocks))[1] / max(1, curve.num_tokens)
            places.append(f"{self._x(num_blocks):.1f},{self._y(rate):.1f}")
        return f'<polyline class="curve" points="{" ".join(places)}"/>'

    def _best(self) -> str:
        places = []
        for num_blocks in sorted({point.num_blocks for point in self._points}):
            hits, tokens = self._sweep.best(num_blocks)
            places.append(f"{self._x(num_blocks):.1f},{self._y(hits / max(1, tokens)):.1f}")
        return f'<polyline class="best" points="{" ".join(places)}"/>'

    def _runs(self) -> Iterator[str]:
        for point in reversed(self._points):  # lru on top: another policy often hits as much
            rate = point.hit_tokens[0] / max(1, point.hit_tokens[1])
            marker = POLICIES.index(point.policy)
            yield (
                f'<g class="m{marker}" transform="translate({self._x(point.num_blocks):.1f} {self._y(rate):.1f})">'
                f"<title>{point.policy}, {point.num_blocks:,} blocks: {percent(rate)}</title>{_MARKERS[marker]}</g>"
            )


def _ticks(first: int, last: int) -> list[int]:
    """1, 2 and 5 times powers of ten in the range; only the powers if there are many."""
    powers = range(int(math.log10(first)), int(math.log10(last)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [tick for power in powers for factor in factors if first <= (tick := factor * 10**power) <= last]


def _bars(points: Sequence[SweepPoint]) -> str:
    """A bar per pool and policy, split by part."""
    lines = []
    for place, point in enumerate(points):
        y, x, total = place * _ROW, float(_LABELS), max(1, sum(point.parts.values()))
        lines.append(f'<text x="0" y="{y + 16}">{count(point.num_blocks)} blocks, {point.policy}</text>')
        for name, tokens in point.parts.items():
            width = (_WIDTH - _LABELS) * tokens / total
            title = f"{PART_NAMES[name]}: {percent(tokens / total)} ({tokens:,} tokens)"
            lines.append(
                f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}">'
                f"<title>{title}</title></rect>"
            )
            x += width
    label = "Shares of the prompts' tokens by cause; the figures are in the table below"
    return f'<svg viewBox="0 0 {_WIDTH} {len(points) * _ROW}" role="img" aria-label="{label}">{"".join(lines)}</svg>'


def _chart_legend(policies: Sequence[Eviction], *, scheduled: bool) -> str:
    line = '<svg viewBox="0 0 22 16"><line class="{0}" x1="0" x2="22" y1="8" y2="8"/></svg>'
    items = [
        f"<span>{line.format('curve')}LRU without running requests</span>",
        f"<span>{line.format('best')}evicting what is needed last, without running requests</span>",
    ]
    for policy in policies:
        place = POLICIES.index(policy)
        marker = f'<g class="m{place}" transform="translate(11 8)">{_MARKERS[place]}</g>'
        name = f"{policy}, real run" if scheduled else policy
        items.append(f'<span><svg viewBox="0 0 22 16">{marker}</svg>{name}</span>')
    return f'<div class="legend">{"".join(items)}</div>'


def _part_legend() -> str:
    square = '<svg viewBox="0 0 22 16"><rect class="{0}" x="3" width="16" height="16"/></svg>'
    items = "".join(f"<span>{square.format(part)}{PART_NAMES[part]}</span>" for part in PARTS)
    return f'<div class="legend">{items}</div>'
