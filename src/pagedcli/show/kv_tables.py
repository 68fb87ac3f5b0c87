"""The figures of a KV event state under plain keys, its tables and its page, for `attach` and for recordings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Annotated, Any, get_args

from pagedcli import kvevents
from pagedcli.answers.why import Reasons, why_of_server
from pagedcli.kvevents.capture import CaptureReader
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import Cause, CurvePoint, ServerTree, TreeShape, branch_label, largest_branches
from pagedcli.printable import one_line, plural
from pagedcli.records import Means, Share, number
from pagedcli.show import pages
from pagedcli.show.tables import Format, Table, print_tables, table
from pagedcli.show.why_tables import salts_tables, server_tables
from pagedcli.trace.tokens import Decode

Figures = dict[str, Any]
ShapeOf = Callable[[ServerTree], TreeShape]
_MEDIUM_CLASSES = {"GPU": "GPU", "DEVICE": "GPU", "CPU": "CPU", "HOST": "CPU", "MEMORY": "CPU"}
_MOST_BRANCHES, _MOST_TREES, _MOST_CACHES = 12, 8, 50


def medium_class(medium: str) -> str:
    """GPU, CPU or storage."""
    return next((name for start, name in _MEDIUM_CLASSES.items() if medium.startswith(start)), "storage")


def facts(state: KVState) -> Figures:
    """All figures by name, over all publishers. Blocks are counted per cache group; a rate or a median of nothing is
    None."""
    checks = [each.sequence for each in state.publishers.values()]
    again: dict[str, int] = {cause: sum(tree.num_again[cause] for tree in state.trees) for cause in get_args(Cause)}
    stored_per_s, removed_per_s = state.rates()
    return {
        "duration_s": state.seconds,
        "num_messages": state.num_messages,
        "num_batches": state.num_batches,
        "num_events": state.num_events,
        "num_resident_blocks": state.num_resident,
        "num_resident_tokens": num_resident_tokens(state),
        "peak_resident_blocks": state.history.peak_resident,
        "num_unique_blocks": state.total("num_unique"),
        "num_stored_blocks": state.total("num_stored"),
        "num_removed_blocks": state.total("num_removed"),
        "num_blocks_stored_again": sum(again.values()),
        **{f"num_blocks_stored_again_{cause}": count for cause, count in again.items()},
        "num_tokens_computed_twice": state.total("num_tokens_again"),
        "num_blocks_stored_again_alone": state.num_again_alone,
        "num_more_copies": state.total("num_more_copies"),
        "num_cleared": state.num_cleared,
        "median_pause_s": state.median_of("pauses_s"),
        "median_lifetime_s": state.median_of("lifetimes_s"),
        "stored_blocks_per_s": stored_per_s,
        "removed_blocks_per_s": removed_per_s,
        "num_gaps": sum(each.num_gaps for each in checks),
        "num_missed_messages": sum(each.num_missed for each in checks),
        "num_repeated_messages": sum(each.num_repeated for each in checks),
        "num_restarts": sum(each.num_restarts for each in checks),
        "num_reconnects": state.num_reconnects,
        "num_malformed": state.num_malformed,
        "num_unknown_removals": state.total("num_unknown_removals"),
        "num_forgotten_blocks": state.history.num_forgotten,
        "num_blocks_over_limit": state.total("num_refused"),
        "unknown_event_types": dict(state.unknown_types),
        "unknown_fields": dict(state.unknown_fields),
        "field_values": {f"{name}={value}": num for (name, value), num in state.field_values.items()},
        "first_sequence_numbers": {each.name: each.sequence.first_seq for each in state.publishers.values()},
        "notes": list(state.notes),
    }


_FIGURES = {  # those of the table, with their words
    "duration_s": "seconds watched",
    "num_batches": "batches",
    "num_events": "events",
    "num_resident_blocks": "blocks resident now",
    "num_resident_tokens": "tokens resident now",
    "peak_resident_blocks": "blocks resident at the peak",
    "num_unique_blocks": "different blocks",
    "num_stored_blocks": "blocks stored",
    "num_removed_blocks": "blocks removed",
    "num_blocks_stored_again": "blocks stored again after removal (churn)",
    "num_blocks_stored_again_evicted": "of these, evicted before",
    "num_blocks_stored_again_cleared": "of these, dropped in a reset of the cache",
    "num_blocks_stored_again_restarted": "of these, lost as the publisher restarted",
    "num_tokens_computed_twice": "tokens computed twice for that",
    "num_blocks_stored_again_alone": "of these blocks, stored alone: may be answers generated again",
    "median_pause_s": "seconds they were gone, median",
    "median_lifetime_s": "seconds a block stays, median of the last evicted",
    "num_gaps": "gaps in the stream",
    "num_restarts": "restarts of a publisher",
    "num_reconnects": "connections lost",
    "num_malformed": "malformed messages or events",
    "num_unknown_removals": "removals of blocks never seen",
}
_SHOWN_IF_0 = (
    "num_batches num_resident_blocks peak_resident_blocks num_stored_blocks num_removed_blocks num_blocks_stored_again"
    " num_gaps"
)


def num_resident_tokens(state: KVState) -> int:
    """Tokens with KV in some cache group: per publisher, the group with the most."""
    return sum(
        max((tree.num_resident_tokens for tree in publisher.trees.values()), default=0)
        for publisher in state.publishers.values()
    )


@dataclass(frozen=True, slots=True)
class CacheRow:
    """The copies of one publisher, cache group and medium, and the depth of the group's tree."""

    publisher: str
    rank: int | None
    group: str
    kind: str | None
    medium: str
    class_: str
    num_blocks: int
    num_copies: int
    num_tokens: int
    capacity_blocks: Annotated[int | None, "of blocks"]
    num_prompts: Annotated[int, "roots"]
    max_depth_blocks: Annotated[int, "depth, blocks"]
    num_orphans: int
    num_vetoed_blocks: int


def cache_rows(state: KVState, shape_of: ShapeOf = TreeShape) -> list[CacheRow]:
    rows = []
    for publisher in state.publishers.values():
        for group, tree in publisher.trees.items():
            shape = shape_of(tree)
            for medium in sorted(tree.copies.keys() | tree.capacity.keys()) or ["GPU"]:
                copies = tree.copies.get(medium, {})
                num_tokens = sum(tree.nodes[block_hash].num_tokens for block_hash in copies)
                rows.append(CacheRow(
                    publisher.name, publisher.rank, group, publisher.spec_kinds.get(group), medium,
                    medium_class(medium), len(copies), sum(copies.values()), num_tokens, tree.capacity.get(medium),
                    len(shape.roots), shape.max_depth, shape.num_orphans, tree.num_vetoed,
                ))  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class LoraRow:
    """The resident blocks of one LoRA adapter."""

    lora: Annotated[str, "LoRA adapter"]
    num_blocks: int
    num_tokens: int


def lora_rows(state: KVState) -> list[LoraRow]:
    """Resident blocks and tokens per LoRA adapter; empty if no block has one."""
    counts: dict[str | None, list[int]] = {}
    for tree in state.trees:
        for node in tree.resident():
            row = counts.setdefault(node.lora, [0, 0])
            row[0] += 1
            row[1] += node.num_tokens
    if not counts.keys() - {None}:
        return []
    ordered = sorted(counts.items(), key=lambda item: -item[1][0])
    return [LoraRow(lora or "none", *row) for lora, row in ordered]


def limits(state: KVState) -> list[str]:
    """What the events cannot show, and what was missing from them."""
    said = ["KV events have no block ids, no reference counts and no requests: hits are not visible, only misses"]
    for publisher in state.publishers.values():
        check = publisher.sequence
        if check.first_seq:
            said.append(f"{publisher.name}: what happened before message {check.first_seq:,} is unknown")
        if check.num_missed:
            said.append(
                f"{publisher.name}: {plural(check.num_missed, 'message')} missing in {plural(check.num_gaps, 'gap')};"
                " blocks removed in them still look resident"
            )
        elif not check.next_seq and state.num_batches:
            said.append(f"{publisher.name}: its messages are not numbered, so gaps cannot be seen")
    if state.num_again_alone:
        said.append(
            f"{plural(state.num_again_alone, 'block')} stored again came alone, as generated tokens do: if they belong"
            " to answers that were generated again, no cache would have saved them"
        )
    unknown = state.total("num_unknown_removals")
    if unknown:
        said.append(f"{plural(unknown, 'removal')} of blocks whose storing was never seen")
    if state.history.num_forgotten or state.total("num_refused"):
        said.append(f"more blocks than the limit ({state.history.max_blocks:,}): counts are too low")
    return said


def summary(
    state: KVState,
    decode: Decode | None,
    *,
    cures: Sequence[str] = (),
    reasons: Reasons | None = None,
    in_full: bool = False,
) -> tuple[list[str], list[Table]]:
    """The answer with what to change, and all tables of a summary; empty ones are left out.

    reasons: those of the requests in a recording. in_full: with these, and a table of larger caches.
    """
    shape_of = cache(TreeShape)
    tables = [
        _figures_table(state),
        _caches_table(cache_rows(state, shape_of)),
        table(LoraRow, "loras", "Resident, by LoRA adapter", lora_rows(state)),
        _branches_table(state, decode, shape_of),
        _unknown_table(state),
    ]
    tables = [each for each in tables if each.rows]
    if in_full:
        tables.append(_curve_table(state))
    if reasons is not None:
        tables += server_tables(reasons, decode) if in_full else salts_tables(reasons)
    return [why_of_server(state), *cures], tables


def print_summary(answer: list[str], tables: list[Table], state: KVState, format_: Format) -> None:
    """Print the answer and the tables; JSON has the figures as plain keys instead of a table."""
    is_json = format_ is Format.JSON
    tables = [each for each in tables if (each.key != "figures" if is_json else each.rows)]
    about = {**facts(state), "limits": limits(state), "answer": answer}
    print_tables(tables, format_, facts=about, story=answer)


@dataclass(frozen=True, slots=True)
class _FigureRow:
    figure: str
    value: Annotated[float, number, Means("", "that of the figure")]


def _figures_table(state: KVState) -> Table:
    values, shown = facts(state), _SHOWN_IF_0.split()
    rows = [_FigureRow(words, values[key]) for key, words in _FIGURES.items() if values[key] or key in shown]
    oddities = [f"note: {note}" for note in list(state.notes)[-5:] if "is not known" not in note]
    return table(_FigureRow, "figures", "KV events", rows, notes=[*limits(state), *oddities])


def _caches_table(rows: list[CacheRow]) -> Table:
    vetoed = {(row.publisher, row.group): row.num_vetoed_blocks for row in rows if row.num_vetoed_blocks}
    notes = [
        f"group {group} vetoed hits: {plural(num_blocks, 'block')} that another group still had "
        f"{'was' if num_blocks == 1 else 'were'} recomputed, as group {group} did not have them"
        for (_, group), num_blocks in vetoed.items()
    ]
    columns = (
        "publisher group kind medium num_blocks num_copies num_tokens capacity_blocks num_prompts max_depth_blocks"
    )
    title = "Resident, by cache group and medium"
    return table(CacheRow, "caches", title, rows, columns, notes=notes, max_shown=_MOST_CACHES)


@dataclass(frozen=True, slots=True)
class _BranchRow:
    branch: Annotated[str, "prefix"]
    level: int
    depth: Annotated[int, "at block"]
    num_run_blocks: Annotated[int, "run, blocks"]
    num_children: Annotated[int, "forks"]
    num_blocks: Annotated[int, "blocks below"]
    num_tokens: Annotated[int, "tokens below"]
    lora: str | None
    share: Share | None


def _branches_table(state: KVState, decode: Decode | None, shape_of: ShapeOf) -> Table:
    largest = sorted(state.trees, key=lambda tree: -len(tree.nodes))[:_MOST_TREES]
    rows = [
        _BranchRow(
            "  " * min(each.level, 8) + branch_label(each, decode), each.level, each.depth, len(each.nodes),
            each.num_children, each.num_blocks, each.num_tokens, each.nodes[0].lora,
            each.num_tokens / total if (total := shape_of(tree).total_tokens) else None,
        )
        for tree in largest
        for each in largest_branches(shape_of(tree), _MOST_BRANCHES)
    ]  # fmt: skip
    title = "Largest subtrees: runs of blocks without a fork, each below the one it continues"
    columns = "branch depth num_run_blocks num_children num_blocks num_tokens share"
    return table(_BranchRow, "branches", title, rows, columns)


@dataclass(frozen=True, slots=True)
class _UnknownRow:
    name: Annotated[str, "not known"]
    kind: str
    count: Annotated[int, "times"]


def _unknown_table(state: KVState) -> Table:
    found = {"event type": state.unknown_types, "field": state.unknown_fields}
    rows = [_UnknownRow(name, kind, number) for kind, names in found.items() for name, number in names.items()]
    return table(_UnknownRow, "unknown", "Event types and fields that this pagedcli does not know", rows)


def _curve_table(state: KVState) -> Table:
    points = state.curve()
    most = plural(state.history.peak_resident, "block")
    notes = [f"lower bounds, if it evicts in the same order; this cache held at most {most}"]
    if any(point.num_prompt_blocks_kept < point.num_blocks_kept for point in points):
        notes.append("of prompts: without blocks that came back alone, as answers do that are generated again")
    return table(CurvePoint, "larger_cache", "What a larger cache would have kept", points, notes=notes)


def metrics_table(scraper: "kvevents.Scraper") -> Table:
    """The server's own figures, each with its window."""
    notes = [scraper.problem] if scraper.problem is not None else []
    figures = scraper.metrics.figures()
    return table(kvevents.Metric, "metrics", "The server's own figures", figures, "meaning window value", notes=notes)


# ---------------------------------------------------------------------- through time


def message_rows(reader: CaptureReader) -> Iterator[Figures]:
    """What each message of a recording changed."""
    state = KVState(reader.sources)
    before = dict.fromkeys(("num_stored", "num_removed", "num_tokens_again"), 0)
    num_notes = 0
    for place, (frames, time_s, source) in enumerate(reader):
        state.take(frames, time_s, source)
        after = {name: state.total(name) for name in before}
        again = sum(sum(tree.num_again.values()) for tree in state.trees)
        yield {
            "message": place, "time_s": time_s, "source": source,
            "num_stored_blocks": after["num_stored"] - before["num_stored"],
            "num_removed_blocks": after["num_removed"] - before["num_removed"],
            "num_tokens_computed_twice": after["num_tokens_again"] - before["num_tokens_again"],
            "num_blocks_stored_again": again, "num_resident_blocks": state.num_resident,
            # a full list drops its oldest note for a new one: only its last one may be new
            "notes": [*state.notes][num_notes if len(state.notes) < (state.notes.maxlen or 0) else -1 :],
        }  # fmt: skip
        before, num_notes = after, len(state.notes)


def message_line(row: Figures) -> str:
    time_s = "-" if row["time_s"] is None else f"{row['time_s']:.3f} s"
    twice = f", {row['num_tokens_computed_twice']:,} tokens twice" if row["num_tokens_computed_twice"] else ""
    changes = f"stored {row['num_stored_blocks']:,}, removed {row['num_removed_blocks']:,}{twice}"
    notes = "".join(f"; {one_line(note)}" for note in row["notes"])
    return f"message {row['message']:,} at {time_s}: {changes}; resident {row['num_resident_blocks']:,}{notes}"


# ---------------------------------------------------------------------- the page

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
