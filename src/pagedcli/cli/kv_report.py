"""One self-contained HTML page of a recording of KV events: residency and churn through time, and the tables."""

from collections.abc import Sequence
from pathlib import Path

from pagedcli.cli.kv_recording import fold_with_curve, kv_decoder, open_capture
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tables import curve_table, summary_tables
from pagedcli.kvevents.tree import curve
from pagedcli.printable import one_line
from pagedcli.show import pages

_MOST_POINTS = 600


def capture_page(path: Path, model: str | None) -> bytes:
    """The HTML page of a recording; prefixes as text if a model is given and tokens were recorded."""
    reader = open_capture(path, model)
    decode = None if model is None else kv_decoder(model)
    state, watchers = fold_with_curve(reader)
    tables = [*summary_tables(state, decode, with_gone=True), curve_table(curve(watchers), state)]
    history = residency(CaptureReader(path))
    chart = _chart(history) if history else ""
    body = "\n".join([chart, *(pages.as_html(table) for table in tables if table.rows)])
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
