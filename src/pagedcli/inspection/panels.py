"""The parts of a screen: block map, sequences, statistics. Nothing depends on colour alone.

Used by view.py. Draws what Moment holds and decides nothing.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pagedcli.inspection.moment import Moment
from pagedcli.inspection.records import SeqState
from pagedcli.inspection.state import PoolState
from pagedcli.inspection.stats import ROLLING_STEPS, HitCounts, memory_use, num_recomputed_tokens, pool_counts
from pagedcli.inspection.words import plural, waiting_reason
from pagedcli.printable import one_line

# block state: glyph, ASCII fallback, style
_GLYPHS = {
    "empty": ("·", ".", "bright_black"),
    "cached": ("○", "o", "cyan"),
    "partial": ("▫", "-", "green"),
    "full": ("■", "#", "green"),
    "shared": ("S", "S", "bold magenta"),
    "followed": ("@", "@", "bold yellow"),
}
_LEGEND = {
    "empty": "empty",
    "cached": "cached, reusable",
    "partial": "filling",
    "full": "in use",
    "shared": "shared by 2-9, + more",
    "followed": "followed",
}


def percent(part: float | None) -> str:
    """`31.2 %`, or `-` where there is none."""
    return "-" if part is None else f"{100 * part:.1f} %"


def byte_size(count: int) -> str:
    """`28.0 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


# ---------------------------------------------------------------------- the block pool


class PoolMap:
    """The pool as a grid in the order of block ids. If it does not fit, each cell stands for several blocks and shows
    their most common state, or `shared` or `followed` if any of them is."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        height = max(1, (options.height or 12) - 2)  # the pool's figures and the legend stand below
        state = self._moment.state
        per_cell = max(1, -(-state.num_blocks // (width * height)))
        unicode = not options.ascii_only
        cells = self._cells(per_cell)
        for start in range(0, len(cells), width):
            for kind, shown in cells[start : start + width]:
                glyph, ascii_glyph, style = _GLYPHS[kind]
                yield Segment(shown or (glyph if unicode else ascii_glyph), Style.parse(style))
            yield Segment.line()
        yield pool_line(state)
        yield self._legend(per_cell, unicode)

    def _cells(self, per_cell: int) -> list[tuple[str, str | None]]:
        """Per cell the state and, for a single shared block, its ref_count as the glyph."""
        state, followed = self._moment.state, self._moment.followed_blocks()
        if per_cell == 1:
            return [_block_cell(state, block_id, followed) for block_id in range(state.num_blocks)]
        marked = {block_id // per_cell for block_id in followed}
        cells: list[tuple[str, str | None]] = []
        for index, start in enumerate(range(0, state.num_blocks, per_cell)):
            counts = state.ref_counts[start : start + per_cell]
            num_free = counts.count(0)
            num_exclusive = counts.count(1)
            num_unhashed = state.hashes[start : start + per_cell].count(None)
            if index in marked:
                kind = "followed"
            elif num_free + num_exclusive < len(counts):
                kind = "shared"
            elif 2 * num_free < len(counts):
                kind = "partial" if num_unhashed > num_free + num_exclusive // 2 else "full"
            else:
                kind = "empty" if 2 * num_unhashed > len(counts) else "cached"
            cells.append((kind, None))
        return cells

    def _legend(self, per_cell: int, unicode: bool) -> Text:
        text = Text(no_wrap=True, overflow="ellipsis")
        if per_cell > 1:
            text.append(f"1 cell = {per_cell:,} blocks, mostly  ", "italic")
        for kind, meaning in _LEGEND.items():
            if kind == "followed" and self._moment.follow is None:
                continue
            if kind == "shared" and per_cell > 1:
                meaning = "some are shared"
            glyph, ascii_glyph, style = _GLYPHS[kind]
            shown = "2" if kind == "shared" and per_cell == 1 else glyph if unicode else ascii_glyph
            text.append(shown, style).append(f" {meaning}  ")
        return text


def _block_cell(state: PoolState, block_id: int, followed: set[int]) -> tuple[str, str | None]:
    count = state.ref_counts[block_id]
    if block_id in followed:
        return "followed", None
    if count == 0:
        return ("empty" if state.hashes[block_id] is None else "cached"), None
    if count == 1:
        return ("partial" if state.hashes[block_id] is None else "full"), None
    return "shared", str(count) if count < 10 else "+"


def pool_line(state: PoolState) -> Text:
    counts = pool_counts(state)
    engine = state.engine
    assert engine is not None
    add_up = counts["in_use"] + counts["cached"] + counts["empty"] == counts["total"]
    return Text.assemble(
        ("in use ", "green"),
        f"{counts['in_use']:,}",
        f" ({counts['shared']:,} shared) + ",
        ("cached ", "cyan"),
        f"{counts['cached']:,} + ",
        ("empty ", "bright_black"),
        f"{counts['empty']:,} = {counts['total']:,} blocks of {engine.block_size} "
        f"({byte_size(counts['total'] * engine.block_bytes)}){'' if add_up else ': DOES NOT ADD UP'}",
        no_wrap=True,
        overflow="ellipsis",
    )


# ---------------------------------------------------------------------- sequences


def block_ids_text(state: PoolState, block_table: Sequence[int], width: int | None = None) -> str:
    """`0-3×2 7 9`: block ids in order, adjacent ids with the same ref_count as a range, ref_counts above 1 after a ×.

    Cut to a width, the middle is replaced by the number of omitted blocks: `0-3×2 …12… 9`.
    """
    runs: list[list[int]] = []  # first, last, ref_count
    for block_id in block_table:
        ref_count = state.ref_counts[block_id]
        if runs and runs[-1][1] + 1 == block_id and runs[-1][2] == ref_count:
            runs[-1][1] = block_id
        else:
            runs.append([block_id, block_id, ref_count])
    words = [_run_text(*run) for run in runs]
    text = " ".join(words)
    if width is None or len(text) <= width:
        return text
    lengths = [last - first + 1 for first, last, _ in runs]
    for num_head in range(len(words) - 2, -1, -1):
        head = "".join(word + " " for word in words[:num_head])
        text = f"{head}…{sum(lengths[num_head:-1])}… {words[-1]}"
        if len(text) <= width:
            return text
    return f"…{len(block_table)}…"


def _run_text(first: int, last: int, ref_count: int) -> str:
    ids = str(first) if first == last else f"{first} {last}" if first + 1 == last else f"{first}-{last}"
    if ref_count == 1:
        return ids
    return " ".join(f"{part}×{ref_count}" for part in ids.split())


def sequence_table(moment: Moment, *, width: int, most: int) -> Table:
    """Running sequences with their block tables, then waiting ones with the reason, up to a number of rows."""
    state = moment.state
    running, waiting = state.running(), state.waiting()
    if moment.follow is not None:
        running.sort(key=lambda seq: seq.seq_id not in moment.follow_seq_ids)
        waiting.sort(key=lambda seq: seq.seq_id not in moment.follow_seq_ids)
    num_waiting = min(len(waiting), max(1, most - len(running), most // 3))
    num_running = min(len(running), most - num_waiting)
    shown = running[:num_running] + waiting[:num_waiting]
    step = state.step
    new_tokens = dict(zip(step.seq_ids, step.num_new_tokens, strict=True)) if step is not None else {}
    rows = [_sequence_cells(seq, new_tokens) for seq in shown]
    table = Table(box=None, expand=True, pad_edge=False, header_style="bold", show_edge=False)
    columns = _SEQUENCE_COLUMNS if width >= 100 else _SEQUENCE_COLUMNS[:-1]
    room = width
    for place, name in enumerate(columns):
        column_width = min(14, max(len(name), *(cell_len(cells[place]) for cells in rows), 0))
        room -= column_width + 2
        justify: JustifyMethod = "left" if name in ("request", "state") else "right"
        table.add_column(name, justify=justify, no_wrap=True, width=column_width, overflow="ellipsis")
    table.add_column("block table (×: ref count) / why it waits", ratio=1, no_wrap=True, overflow="ellipsis")
    for seq, cells in zip(shown, rows, strict=True):
        last = (
            block_ids_text(state, seq.block_table, room) if seq.running else why_waiting(state, seq, waiting.index(seq))
        )
        table.add_row(*cells[: len(columns)], last, style="bold yellow" if seq.seq_id in moment.follow_seq_ids else "")
    if len(shown) < len(running) + len(waiting):
        table.caption = f"and {len(running) - num_running} more running, {len(waiting) - num_waiting} more waiting"
        table.caption_justify = "left"
    return table


_SEQUENCE_COLUMNS = ("seq", "request", "state", "tokens", "out", "blocks")


def _sequence_cells(seq: SeqState, new_tokens: dict[int, int]) -> tuple[str, ...]:
    plus = f" +{new_tokens[seq.seq_id]}" if seq.seq_id in new_tokens else " idle" if seq.running else ""
    return (
        str(seq.seq_id),
        one_line(seq.label),
        seq.status + plus,
        f"{seq.num_computed_tokens}/{seq.num_tokens}",
        f"{seq.num_output_tokens}/{seq.max_new_tokens}",
        str(len(seq.block_table)),
    )


def why_waiting(state: PoolState, seq: SeqState, place: int) -> str:
    """The scheduler's reason for the first in the queue, the place in the queue for the others."""
    engine, step = state.engine, state.step
    times = f" (preempted {plural(seq.num_preemptions, 'time')})" if seq.num_preemptions else ""
    if engine is not None and step is not None and step.waiting is not None and step.waiting.seq_id == seq.seq_id:
        return f"not scheduled: {waiting_reason(step.waiting, engine)}{times}"
    return (f"place {place + 1} in the queue" if place else "next in the queue") + times


# ---------------------------------------------------------------------- figures


def hits_table(moment: Moment) -> Table:
    """Prefix hit rates by window and unit; hits on a request's own blocks are separate."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("prefix hits", no_wrap=True)
    for heading in ("run: tokens", "blocks", f"last {ROLLING_STEPS} steps: tokens", "blocks"):
        table.add_column(heading, justify="right", no_wrap=True)
    run, rolling = moment.stats.run, moment.stats.rolling
    table.add_row("from other requests", *_rates(run.from_others), *_rates(rolling.from_others))
    table.add_row("own (preempted, n > 1)", *_rates(run.own), *_rates(rolling.own))
    return table


def _rates(counts: HitCounts) -> tuple[str, str]:
    return percent(counts.token_rate), percent(counts.block_rate)


def histogram_table(state: PoolState, *, width: int, most: int) -> Table:
    """Number of blocks per ref_count."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ref count", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("", no_wrap=True)
    histogram = list(state.ref_count_histogram().items())
    shown, rest = histogram[:most], histogram[most:]
    if rest:
        shown = histogram[: most - 1]
        rest = histogram[most - 1 :]
    largest = max((count for _, count in histogram), default=1)
    rows = [(str(ref_count), count) for ref_count, count in shown]
    if rest:
        rows.append((f"{rest[0][0]}-{rest[-1][0]}", sum(count for _, count in rest)))
    for label, count in rows:
        table.add_row(label, f"{count:,}", Text("▇" * max(1, count * max(4, width - 22) // largest), "green"))
    return table


def work_lines(moment: Moment) -> Text:
    """Work lost and memory saved."""
    state, stats = moment.state, moment.stats
    use = memory_use(state)
    recomputed = num_recomputed_tokens(state)
    share = recomputed / stats.num_computed_tokens if stats.num_computed_tokens else None
    others = stats.run.from_others
    lines = [
        f"hits      {others.tokens_hit:,} of {others.tokens:,} tokens looked up, "
        f"{others.blocks_hit:,} of {others.blocks_asked:,} full blocks",
        f"preempted {plural(stats.num_preemptions, 'time')}: {stats.num_dropped_tokens:,} tokens dropped, "
        f"{recomputed:,} computed again ({percent(share)} of all computed)",
        f"unfilled  {plural(use.unfilled_slots, 'slot')} of last blocks, {percent(use.unfilled_share)} of those in use"
        f" ({byte_size(use.unfilled_bytes)})",
        f"sharing   saves {plural(use.saved_blocks, 'block')} ({byte_size(use.saved_bytes)}); "
        f"duplicates so far: {stats.num_duplicate_blocks:,}",
    ]
    if stats.num_failed_steps:
        lines.append(f"failed    {plural(stats.num_failed_steps, 'step')}: what was running waited again")
    if use.contiguous_times is not None:
        lines.append(
            f"contiguous allocation for the model's length would take {byte_size(use.contiguous_bytes)}, "
            f"{use.contiguous_times:.1f} times as much"
        )
    return Text("\n".join(lines), overflow="ellipsis")
