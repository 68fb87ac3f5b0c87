"""A moment of a run as text: figures, lines while it runs. Nothing depends on colour alone.

Draws what Moment holds and decides nothing. The tables of a step are in step_tables.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from rich.console import Console
from rich.text import Text

from pagedcli.errors import TraceError
from pagedcli.events import Event, StepFinished
from pagedcli.printable import byte_text, id_range, one_line, percent_text, plural
from pagedcli.records import Share
from pagedcli.show.tables import Table, as_text, table
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import pool_fold
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.state import PoolState
from pagedcli.views.moment import Moment
from pagedcli.views.names import NamedRequest
from pagedcli.views.state_slots import slots_line
from pagedcli.views.stats import ROLLING_STEPS, memory_use, pool_counts
from pagedcli.views.whole_run import guess_words
from pagedcli.views.words import waiting_reason


def percent(part: float | None) -> str:
    """`31.2 %`, or `-` where there is none."""
    return "-" if part is None else percent_text(part)


# ---------------------------------------------------------------------- the block pool


def pool_line(state: PoolState) -> Text:
    counts = pool_counts(state)
    add_up = counts["in_use"] + counts["cached"] + counts["empty"] == counts["total"]
    return Text.assemble(
        ("in use ", "green"),
        f"{counts['in_use']:,}",
        f" ({counts['shared']:,} shared) + ",
        ("cached ", "cyan"),
        f"{counts['cached']:,} + ",
        ("empty ", "bright_black"),
        f"{counts['empty']:,} = {plural(counts['total'], 'block')} x {plural(state.started.block_size, 'token')}"
        f"{'' if add_up else ': DOES NOT ADD UP'}",
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
    ids = id_range(first, last)
    return ids if ref_count == 1 else " ".join(f"{part}×{ref_count}" for part in ids.split())


def why_waiting(state: PoolState, seq: SeqState, place: int) -> str:
    """The scheduler's reason for the first in the queue, the place in the queue for the others."""
    engine, step = state.engine, state.step
    times = f" (preempted {plural(seq.num_preemptions, 'time')})" if seq.num_preemptions else ""
    if engine is not None and step is not None and step.waiting is not None and step.waiting.seq_id == seq.seq_id:
        return f"not scheduled: {waiting_reason(step.waiting, engine)}{times}"
    return (f"place {place + 1} in the queue" if place else "next in the queue") + times


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class _HitRates:
    hits: str
    run_tokens: Annotated[Share | None, "run: tokens"]
    run_blocks: Annotated[Share | None, "run: blocks"]
    recent_tokens: Annotated[Share | None, f"last {ROLLING_STEPS} steps: tokens"]
    recent_blocks: Annotated[Share | None, "blocks"]


def hit_table(moment: Moment, **headers: str) -> Table:
    """Prefix hit rates by window and unit; hits on a request's own blocks are separate."""
    run, recent = moment.stats.run, moment.stats.rolling
    rows = [
        _HitRates(name, now.token_rate, now.block_rate, last.token_rate, last.block_rate)
        for name, now, last in (
            ("from other requests", run.from_others, recent.from_others),
            ("own (preempted, n > 1)", run.own, recent.own),
        )
    ]
    return table(_HitRates, "hit_rates", "Prefix hits", rows, headers=headers)


def hit_lines(moment: Moment) -> Text:
    """The rows of hit_table as text, without its title and rule."""
    _, heading, _, *rows = as_text(hit_table(moment, hits="prefix hits", run_blocks="blocks")).splitlines()
    text = Text("\n".join([heading, *rows]), no_wrap=True, overflow="ellipsis")
    text.stylize("bold", 0, len(heading))
    return text


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
        f"{recomputed:,} recomputed ({percent(share)} of all computed)",
        f"unfilled  {plural(use.unfilled_slots, 'slot')} of last blocks, {percent(use.unfilled_share)} of those in use"
        f" ({byte_text(use.unfilled_bytes)})",
        f"sharing   saves {plural(use.saved_blocks, 'block')} ({byte_text(use.saved_bytes)}); "
        f"duplicates so far: {stats.num_duplicate_blocks:,}",
    ]
    if state.engine is not None and any(state.engine.windows):
        lines.append(f"windows   save {plural(use.passed_blocks, 'block')} ({byte_text(use.passed_bytes)})")
    if state.num_groups > 1:
        share = use.unused_bytes / use.used_bytes if use.used_bytes else None
        lines.append(f"groups    leave {byte_text(use.unused_bytes)} of the blocks in use unused ({percent(share)})")
    if facts.num_drafted_tokens:
        lines.append(f"drafts    {guess_words(facts)}")
    slots = slots_line(state)
    if slots is not None:
        lines.append(f"state     {slots}")
    if facts.num_failed_steps:
        lines.append(f"failed    {plural(facts.num_failed_steps, 'step')}: what was running waited again")
    if use.contiguous_times is not None:
        lines.append(
            f"contiguous allocation for the model's length would take {byte_text(use.contiguous_bytes)}, "
            f"{use.contiguous_times:.1f} times as much"
        )
    return Text("\n".join(lines), overflow="ellipsis")


def ref_counts_line(state: PoolState) -> str:
    """`blocks by ref count  1: 4, 2: 2`."""
    counts = ", ".join(f"{ref}: {count:,}" for ref, count in state.ref_count_histogram().items())
    return f"blocks by ref count  {counts or 'none in use'}"


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


class PlainView:
    """Prints a plain line for each preemption, one for the whole run every ten seconds, and a summary at the end.

    A context manager; pass its `on_event` to the engine as `emit`. It only observes: inconsistent events end the view,
    not the run. `views` fold the same events.
    """

    def __init__(self, console: Console, *views: View, follow: NamedRequest | None = None) -> None:
        self.moment = Moment(follow=follow)
        self._fold = pool_fold(self.moment, *views)
        self._console = console
        self._next_line_s = 0.0
        self._damage: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print_ending(self.moment, self._damage, self._console)

    def settled(self) -> PoolState | None:
        """The state after all events so far; None: they contradict each other."""
        return self.moment.state if self._damage is None else None

    def on_event(self, event: Event) -> None:
        if self._damage is not None:
            return
        try:
            self._fold(event)
        except TraceError as error:
            self._damage = error.message
            return
        if isinstance(event, StepFinished):
            self._print_lines()

    def _print_lines(self) -> None:
        state, now_s = self.moment.state, time.monotonic()
        assert state.step is not None
        if state.step.preemptions:
            for line in self.moment.last_words(100, of_step=state.step.step):
                if " preempt " in line:
                    self._console.print(Text(line), soft_wrap=True)
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + 10
            self._console.print(Text(self.moment.line()), soft_wrap=True)


def print_ending(moment: Moment, damage: str | None, console: Console) -> None:
    """Print the summary of a run that has made a step, and what ended its view early."""
    if moment.state.step_number is not None:
        print_summary(moment, console)
    if damage is not None:
        console.print(Text(f"the view ended early: {one_line(damage)}", "bold red"))
