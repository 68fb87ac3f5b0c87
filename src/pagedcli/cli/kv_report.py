"""One self-contained HTML page of a recording of KV events: residency and churn through time, and the tables."""

from collections.abc import Sequence
from pathlib import Path

from pagedcli.cli.kv_recording import fold_with_curve, kv_decoder, open_capture
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.reuse import curve
from pagedcli.kvevents.tables import curve_table, summary_tables
from pagedcli.printable import one_line
from pagedcli.show.tables import as_html, html_page

_MOST_POINTS = 600
_WIDTH, _HEIGHT = 1000, 160

_STYLE = """\
  :root { color-scheme: light dark; }
  body { max-width: 1100px; margin: 0 auto; padding: 20px; font: 15px/1.5 system-ui, sans-serif; }
  h1 { font-size: 22px; } h2 { font-size: 16px; margin: 26px 0 4px; }
  table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
  th, td { text-align: left; padding: 3px 10px; border-bottom: 1px solid #8884; white-space: pre; }
  td.n, th.n { text-align: right; }
  svg { width: 100%; border: 1px solid #8884; border-radius: 6px; }
  polyline { fill: none; stroke: #1f5fbf; stroke-width: 2; vector-effect: non-scaling-stroke; }
  p { margin: 4px 0; color: #777; } div { overflow-x: auto; }
"""


def capture_page(path: Path, model: str | None) -> bytes:
    """The HTML page of a recording; prefixes as text if a model is given and tokens were recorded."""
    reader = open_capture(path, model)
    decode = None if model is None else kv_decoder(model)
    state, watchers = fold_with_curve(reader)
    tables = [*summary_tables(state, decode, with_gone=True), curve_table(curve(watchers), state)]
    history = residency(CaptureReader(path))
    chart = _chart(history) if history else ""
    body = "\n".join([chart, *(as_html(table) for table in tables if table.rows)])
    return html_page(f"KV events of {one_line(path.name)}", _STYLE, body)


def residency(reader: CaptureReader) -> list[tuple[float, int]]:
    """(seconds, blocks resident) after each message that has a time; of many, evenly chosen ones and the peak."""
    state, rows = KVState(reader.sources), []
    for frames, time_s, source in reader:
        state.take(frames, time_s, source)
        if time_s is not None:
            rows.append((time_s, state.num_resident))
    if len(rows) <= _MOST_POINTS:
        return rows
    peak = max(range(len(rows)), key=lambda place: rows[place][1])
    chosen = {round(i * (len(rows) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)} | {peak}
    return [rows[place] for place in sorted(chosen)]


def _chart(history: Sequence[tuple[float, int]]) -> str:
    start, end = history[0][0], history[-1][0]
    top = max(num_blocks for _, num_blocks in history) or 1
    points = " ".join(
        f"{_WIDTH * (time_s - start) / ((end - start) or 1):.1f},{_HEIGHT - (_HEIGHT - 8) * num_blocks / top:.1f}"
        for time_s, num_blocks in history
    )
    return (
        f"<h2>Blocks resident</h2><p>at most {top:,}, over {end - start:,.1f} seconds</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" height="{_HEIGHT}" role="img" '
        f'aria-label="Blocks resident"><polyline points="{points}"/></svg>'
    )
