"""A moment of a run as printed tables: one step in full, or the summary of the run.

Used by printers.py. Only these two files and panels.py import rich.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedcli.printable import one_line, plural
from pagedcli.show.panels import block_ids_text, hit_lines, percent, pool_line, why_waiting, work_lines
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment
from pagedcli.views.words import lookup_outcome


def _one_line_histogram(state: PoolState) -> str:
    counts = ", ".join(f"{ref}: {count:,}" for ref, count in state.ref_count_histogram().items())
    return f"blocks by ref count  {counts or 'none in use'}"


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
    console.print(hit_lines(moment))
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
    console.print(hit_lines(moment))
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
            "out": f"{seq.num_output_tokens}/{seq.max_new_tokens}", "blocks": str(len(seq.held_block_ids)),
            "of pool": percent(len(seq.held_block_ids) / state.num_blocks),
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
