"""Figures of a moment as text: the pool, block tables, hit rates, lost work. Nothing depends on colour alone.

Used by the printed tables and by the application. Draws what Moment holds and decides nothing.
"""

from collections.abc import Sequence

from rich.text import Text

from pagedcli.printable import byte_text, percent_text, plural
from pagedcli.trace.records import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment
from pagedcli.views.stats import ROLLING_STEPS, HitCounts, memory_use, pool_counts
from pagedcli.views.words import waiting_reason


def percent(part: float | None) -> str:
    """`31.2 %`, or `-` where there is none."""
    return "-" if part is None else percent_text(part)


# ---------------------------------------------------------------------- the block pool


def pool_line(state: PoolState) -> Text:
    counts = pool_counts(state)
    engine = state.started
    add_up = counts["in_use"] + counts["cached"] + counts["empty"] == counts["total"]
    return Text.assemble(
        ("in use ", "green"),
        f"{counts['in_use']:,}",
        f" ({counts['shared']:,} shared) + ",
        ("cached ", "cyan"),
        f"{counts['cached']:,} + ",
        ("empty ", "bright_black"),
        f"{counts['empty']:,} = {plural(counts['total'], 'block')} of {engine.block_size} "
        f"({byte_text(counts['total'] * engine.block_bytes)}){'' if add_up else ': DOES NOT ADD UP'}",
        no_wrap=True,
        overflow="ellipsis",
    )


# ---------------------------------------------------------------------- sequences


def block_ids_text(state: PoolState, block_table: Sequence[int | None], width: int | None = None) -> str:
    """`0-3×2 7 9`: block ids in order, adjacent ids with the same ref_count as a range, ref_counts above 1 after a ×.

    `(5 out) 7 9`: of five more blocks the window has passed the tokens.
    Cut to a width, the middle is replaced by the number of omitted blocks: `0-3×2 …12… 9`.
    """
    runs: list[list[int]] = []  # first, last, ref_count
    held = [block_id for block_id in block_table if block_id is not None]
    if len(held) < len(block_table):
        out = f"({len(block_table) - len(held)} out) "
        return out + block_ids_text(state, held, None if width is None else width - len(out))
    for block_id in held:
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


def why_waiting(state: PoolState, seq: SeqState, place: int) -> str:
    """The scheduler's reason for the first in the queue, the place in the queue for the others."""
    engine, step = state.engine, state.step
    times = f" (preempted {plural(seq.num_preemptions, 'time')})" if seq.num_preemptions else ""
    if engine is not None and step is not None and step.waiting is not None and step.waiting.seq_id == seq.seq_id:
        return f"not scheduled: {waiting_reason(step.waiting, engine)}{times}"
    return (f"place {place + 1} in the queue" if place else "next in the queue") + times


# ---------------------------------------------------------------------- figures


def hit_lines(moment: Moment) -> Text:
    """A table of prefix hit rates by window and unit; hits on a request's own blocks are separate."""
    run, rolling = moment.stats.run, moment.stats.rolling
    heading = ("prefix hits", "run: tokens", "blocks", f"last {ROLLING_STEPS} steps: tokens", "blocks")
    rows = [
        ("from other requests", *_rates(run.from_others), *_rates(rolling.from_others)),
        ("own (preempted, n > 1)", *_rates(run.own), *_rates(rolling.own)),
    ]
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heading, *rows)
    ]
    text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
    text.stylize("bold", 0, len(lines[0]))
    return text


def _rates(counts: HitCounts) -> tuple[str, str]:
    return percent(counts.token_rate), percent(counts.block_rate)


def work_lines(moment: Moment) -> Text:
    """Work lost and memory saved."""
    state, stats, facts = moment.state, moment.stats, moment.stats.facts
    use = memory_use(state)
    recomputed = facts.num_recomputed_tokens
    share = recomputed / facts.num_computed_tokens if facts.num_computed_tokens else None
    others = stats.run.from_others
    lines = [
        f"hits      {others.tokens_hit:,} of {plural(others.tokens, 'token')} looked up, "
        f"{others.blocks_hit:,} of {others.blocks_asked:,} full blocks",
        f"preempted {plural(facts.num_preemptions, 'time')}: {plural(stats.num_dropped_tokens, 'token')} dropped, "
        f"{recomputed:,} computed again ({percent(share)} of all computed)",
        f"unfilled  {plural(use.unfilled_slots, 'slot')} of last blocks, {percent(use.unfilled_share)} of those in use"
        f" ({byte_text(use.unfilled_bytes)})",
        f"sharing   saves {plural(use.saved_blocks, 'block')} ({byte_text(use.saved_bytes)}); "
        f"duplicates so far: {stats.num_duplicate_blocks:,}",
    ]
    if state.engine is not None and any(state.engine.windows):
        lines.append(f"windows   save {plural(use.passed_blocks, 'block')} ({byte_text(use.passed_bytes)})")
    if facts.num_failed_steps:
        lines.append(f"failed    {plural(facts.num_failed_steps, 'step')}: what was running waited again")
    if use.contiguous_times is not None:
        lines.append(
            f"contiguous allocation for the model's length would take {byte_text(use.contiguous_bytes)}, "
            f"{use.contiguous_times:.1f} times as much"
        )
    return Text("\n".join(lines), overflow="ellipsis")
