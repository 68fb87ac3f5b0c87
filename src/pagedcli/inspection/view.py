"""How a moment of a run looks in a terminal: as a full screen, or as the tables of one step.

Used by live.py and player.py. Only these files and panels.py import rich.
"""

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from pagedcli.inspection.moment import Moment
from pagedcli.inspection.panels import (
    PoolMap,
    block_ids_text,
    histogram_table,
    hits_table,
    percent,
    pool_line,
    sequence_table,
    why_waiting,
    work_lines,
)
from pagedcli.inspection.state import PoolState
from pagedcli.inspection.words import lookup_outcome, plural
from pagedcli.printable import one_line

# ---------------------------------------------------------------------- the whole screen


class MomentScreen:
    """A full screen, sized to the terminal: head line, pool map, sequences, statistics, last events, keys."""

    def __init__(self, moment: Moment, *, title: str, keys: str, note: str = "") -> None:
        self._moment = moment
        self._title = one_line(title)
        self._keys = keys
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        if self._moment.state.engine is None:
            yield Text("waiting for the engine to start ...")
            return
        root = Layout()
        head = Layout(self._head(), size=1)
        foot = Layout(Text(self._keys, "reverse", no_wrap=True, overflow="ellipsis"), size=1)
        body = Layout()
        root.split_column(head, body, foot)
        (self._split_wide if width >= 150 and height >= 30 else self._split_narrow)(body, width, height - 2)
        yield from console.render(root, options.update(height=height))

    def _head(self) -> Text:
        moment = self._moment
        state, rate = moment.state, moment.stats.tokens_per_s
        return Text.assemble(
            (f" {self._title} ", "bold reverse"),
            (f" {self._note} " if self._note else "", "bold yellow"),
            f" step {'-' if state.step is None else state.step.step}  {len(state.running())} running  "
            f"{len(state.waiting())} waiting  {len(state.finished):,} done  "
            + (f"{len(state.refused):,} refused  " if state.refused else ""),
            (f"{rate:,.0f} tok/s" if rate is not None else "- tok/s"),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _split_narrow(self, body: Layout, width: int, height: int) -> None:
        moment = self._moment
        num_map = min(max(6, height // 3), -(-moment.state.num_blocks // width) + 3)
        num_events = max(4, height // 6)
        figures: list[RenderableType] = [hits_table(moment)]
        num_figures = 4
        if height >= 30:
            work = work_lines(moment)
            figures.append(work)
            num_figures += len(work.wrap(Console(width=width), width))
        figures.append(Text(_one_line_histogram(moment.state), no_wrap=True, overflow="ellipsis"))
        num_seqs = max(4, height - num_map - num_events - num_figures)
        body.split_column(
            Layout(_Section("block pool", PoolMap(moment)), size=num_map),
            Layout(_Section("sequences", sequence_table(moment, width=width, most=num_seqs - 3)), size=num_seqs),
            Layout(Group(*figures), size=num_figures),
            Layout(_Section("last events", _events(moment, num_events - 1)), size=num_events),
        )

    def _split_wide(self, body: Layout, width: int, height: int) -> None:
        moment = self._moment
        side = max(70, width * 2 // 5)
        left, right, gap = Layout(), Layout(size=side), Layout(Text(" "), size=2)
        body.split_row(left, gap, right)
        num_map = min(max(8, height // 2), -(-moment.state.num_blocks // (width - side - 2)) + 3)
        num_seqs = height - num_map
        left.split_column(
            Layout(_Section("block pool", PoolMap(moment)), size=num_map),
            Layout(_Section("sequences", sequence_table(moment, width=width - side - 2, most=num_seqs - 3))),
        )
        work = work_lines(moment)
        num_figures = 5 + len(work.wrap(Console(width=side), side))
        num_refs = 2 + max(1, min(height // 4, len(moment.state.ref_count_histogram())))
        right.split_column(
            Layout(Group(_rule("figures"), hits_table(moment), work), size=num_figures),
            Layout(_Section("ref counts", histogram_table(moment.state, width=side, most=num_refs - 2)), size=num_refs),
            Layout(_Section("last events", _events(moment, height - num_figures - num_refs - 1))),
        )


class _Section:
    """A title line above a renderable that fills the rest of the height."""

    def __init__(self, title: str, content: RenderableType) -> None:
        self._title, self._content = title, content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _rule(self._title)
        height = None if options.height is None else max(1, options.height - 1)
        yield from console.render(self._content, options.update(height=height))


def _rule(title: str) -> Text:
    return Text(f"── {title} " + "─" * 400, "dim", no_wrap=True, overflow="crop")


def _events(moment: Moment, most: int) -> Text:
    return Text("\n".join(moment.last_words(max(1, most))), no_wrap=True, overflow="ellipsis")


def _one_line_histogram(state: PoolState) -> str:
    counts = ", ".join(f"{ref}: {count:,}" for ref, count in state.ref_count_histogram().items())
    return f"blocks by ref count  {counts or 'none in use'}"


# ---------------------------------------------------------------------- tables of one step


def print_step_tables(moment: Moment, console: Console) -> None:
    """Print a moment in full: sequences with block tables, lookups of the step, ref counts, hit rates, pool."""
    state = moment.state
    step = state.step
    title = "before the first step" if step is None else f"step {step.step}"
    console.print(Text(f"── {title}, as its forward pass sees the cache", "bold"))
    if state.seqs:
        console.print(_full_sequence_table(moment, wide=console.width >= 110))
    if step is not None and step.lookups:
        console.print(_lookup_table(state))
    console.print(pool_line(state))
    console.print(Text(_one_line_histogram(state)))
    console.print(hits_table(moment))
    for line in moment.last_words(50, of_step=state.step_number):
        console.print(Text(line, "dim"))
    console.print()


def print_summary(moment: Moment, console: Console) -> None:
    """Print the current pool and the statistics of the run."""
    state = moment.state
    if state.seqs:
        rest = f", {plural(len(state.seqs), 'sequence')} unfinished"
    elif state.num_used_blocks:
        rest = f", idle: LEAK, {plural(state.num_used_blocks, 'block')} in use without a sequence"
    else:
        rest = ", idle: nothing is in use, ok"
    console.print(Text(f"── after step {'-' if state.step is None else state.step.step}{rest}", "bold"))
    console.print(pool_line(state))
    console.print(hits_table(moment))
    console.print(work_lines(moment))


def _full_sequence_table(moment: Moment, *, wide: bool) -> Table:
    """Every sequence, or the followed ones; columns implied by others are omitted if space is short."""
    state, step = moment.state, moment.state.step
    new_tokens = dict(zip(step.seq_ids, step.num_new_tokens, strict=True)) if step is not None else {}
    rows = []
    for place, seq in enumerate(state.waiting() + state.running()):
        if moment.follow is not None and seq.seq_id not in moment.follow_seq_ids:
            continue
        row = {
            "seq": str(seq.seq_id), "request": one_line(seq.label), "state": seq.status,
            "new": str(new_tokens.get(seq.seq_id, 0)), "cached": str(seq.num_cached_tokens),
            "tokens": f"{seq.num_computed_tokens}/{seq.num_tokens}",
            "out": f"{seq.num_output_tokens}/{seq.max_new_tokens}", "blocks": str(len(seq.block_table)),
            "of pool": percent(len(seq.block_table) / state.num_blocks),
            "block table (×: ref count) / why it waits": block_ids_text(state, seq.block_table)
            if seq.running
            else why_waiting(state, seq, place),
        }  # fmt: skip
        rows.append({name: cell for name, cell in row.items() if wide or name not in ("cached", "blocks", "of pool")})
    rows.sort(key=lambda row: row["state"] not in ("prefill", "decode"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0] if rows else ():
        is_text = name in ("request", "state") or name.startswith("block table")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not name.startswith("block table"))
    for row in rows:
        table.add_row(*row.values())
    return table


def _lookup_table(state: PoolState) -> Table:
    assert state.step is not None
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("lookup of seq", "reason", "blocks asked", "blocks hit", "tokens hit", "first miss", "outcome"):
        table.add_column(name, justify="left" if name in ("reason", "outcome") else "right")
    for lookup in state.step.lookups:
        table.add_row(
            str(lookup.seq_id), lookup.reason, str(lookup.blocks_asked), str(lookup.blocks_hit), str(lookup.tokens_hit),
            "-" if lookup.first_miss is None else f"block {lookup.first_miss}", lookup_outcome(lookup),
        )  # fmt: skip
    return table
