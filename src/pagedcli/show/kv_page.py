"""The HTML page of a recording of KV events: what is said of it, its tables, and the blocks resident over time."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import KVState
from pagedcli.printable import one_line
from pagedcli.show import pages
from pagedcli.show.tables import Table

_MOST_POINTS = 600


def kv_page(path: Path, answer: Sequence[str], tables: Sequence[Table]) -> bytes:
    """The page of a recording, of which this is said."""
    history = residency(CaptureReader(path))
    chart = _chart(history) if history else ""
    said = pages.section("Verdict", *(f"<p>{escape(one_line(line))}</p>" for line in answer))
    shown = (pages.as_html(table) for table in tables if table.rows)
    body = "\n".join([said, chart, *shown])
    return pages.html_page(f"KV events of {one_line(path.name)}", body)


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
    chart = pages.LineChart((start, end), top, height=200)
    ticks = [(start, (f"{start:,.1f} s",)), (end, (f"{end:,.1f} s",))]
    parts = [*chart.axes(ticks, [(0, "0"), (top, f"{top:,}")]), chart.line(history)]
    text = f"<p>at most {top:,}, over {end - start:,.1f} seconds</p>"
    return pages.section("Blocks resident", text, chart.svg(parts, "Blocks resident"))
