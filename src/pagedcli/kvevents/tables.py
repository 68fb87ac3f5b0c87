"""The figures of a KV event state under plain keys, and its tables, for `attach` and for recordings."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import (
    Cause,
    CurvePoint,
    Decode,
    Node,
    PrefixTree,
    Shape,
    branch_label,
    largest_branches,
    near_twins,
    token_ids,
)
from pagedcli.printable import plural
from pagedcli.show.tables import Column, Format, Table, count, decimal, percent, print_tables, text

if TYPE_CHECKING:
    from pagedcli.kvevents.scrape import Scraper


Row = dict[str, Any]
ShapeOf = Callable[[PrefixTree], Shape]
CAUSES: dict[Cause, str] = {
    "evicted": "evicted to make room for other blocks",
    "cleared": "the whole cache was reset",
    "restarted": "the publisher restarted with an empty cache",
}
_MEDIUM_CLASSES = {"GPU": "GPU", "DEVICE": "GPU", "CPU": "CPU", "HOST": "CPU", "MEMORY": "CPU"}


def medium_class(medium: str) -> str:
    """GPU, CPU or storage."""
    return next((name for start, name in _MEDIUM_CLASSES.items() if medium.startswith(start)), "storage")


def facts(state: KVState) -> Row:
    """Counts over all publishers. Blocks are counted per cache group; a rate or a median of nothing is null."""
    stored_rate, removed_rate = state.rates()
    again = {cause: sum(tree.num_again[cause] for tree in state.trees) for cause in CAUSES}
    checks = [publisher.sequence for publisher in state.publishers.values()]
    start, end = state.first_time_s, state.time_s
    return {
        "num_messages": state.num_messages,
        "num_batches": state.num_batches,
        "num_events": state.num_events,
        "num_stored_blocks": state.total("num_stored"),
        "num_removed_blocks": state.total("num_removed"),
        "num_unique_blocks": state.total("num_unique"),
        "num_blocks_stored_again": sum(again.values()),
        **{f"num_blocks_stored_again_{cause}": count for cause, count in again.items()},
        "num_blocks_stored_again_alone": state.num_again_alone,
        "num_tokens_computed_twice": state.total("num_tokens_again"),
        "num_more_copies": state.total("num_more_copies"),
        "num_resident_blocks": state.num_resident,
        "num_resident_tokens": num_resident_tokens(state),
        "peak_resident_blocks": state.history.peak_resident,
        "num_cleared": state.num_cleared,
        "median_lifetime_s": state.median_of("lifetimes_s"),
        "median_pause_s": state.median_of("pauses_s"),
        "stored_blocks_per_s": stored_rate,
        "removed_blocks_per_s": removed_rate,
        "duration_s": None if start is None or end is None else end - start,
        "num_gaps": sum(check.num_gaps for check in checks),
        "num_missed_messages": sum(check.num_missed for check in checks),
        "num_repeated_messages": sum(check.num_repeated for check in checks),
        "num_reconnects": state.num_reconnects,
        "num_restarts": sum(check.num_restarts for check in checks),
        "num_malformed": state.num_malformed,
        "num_unknown_removals": state.total("num_unknown_removals"),
        "num_forgotten_blocks": state.history.num_forgotten,
        "num_blocks_over_limit": state.total("num_refused"),
        "unknown_event_types": dict(state.unknown_types),
        "unknown_fields": dict(state.unknown_fields),
        "field_values": {f"{name}={value}": count for (name, value), count in state.field_values.items()},
        "first_sequence_numbers": {p.name: p.sequence.first_seq for p in state.publishers.values()},
        "notes": list(state.notes),
    }


def num_resident_tokens(state: KVState) -> int:
    """Tokens with KV in some cache group: per publisher, the group with the most."""
    return sum(
        max((sum(node.num_tokens for node in tree.resident()) for tree in publisher.trees.values()), default=0)
        for publisher in state.publishers.values()
    )


def cache_rows(state: KVState, shape_of: ShapeOf = Shape) -> list[Row]:
    """Per publisher, cache group and medium: copies and the depth of the tree."""
    rows = []
    for publisher in state.publishers.values():
        for group, tree in publisher.trees.items():
            shape = shape_of(tree)
            for medium in sorted(tree.copies.keys() | tree.capacity.keys()) or ["GPU"]:
                copies = tree.copies.get(medium, {})
                rows.append(
                    {
                        "publisher": publisher.name, "rank": publisher.rank, "group": group,
                        "kind": publisher.spec_kinds.get(group), "medium": medium, "class": medium_class(medium),
                        "num_blocks": len(copies), "num_copies": sum(copies.values()),
                        "num_tokens": sum(tree.nodes[block_hash].num_tokens for block_hash in copies),
                        "capacity_blocks": tree.capacity.get(medium), "num_prompts": len(shape.roots),
                        "max_depth_blocks": shape.max_depth, "num_orphans": shape.num_orphans,
                        "num_vetoed_blocks": tree.num_vetoed,
                    }
                )  # fmt: skip
    return rows


def lora_rows(state: KVState) -> list[Row]:
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
    return [{"lora": lora or "none", "num_blocks": row[0], "num_tokens": row[1]} for lora, row in ordered]


def churn_rows(state: KVState) -> list[Row]:
    """Blocks stored again, by what had removed them."""
    rows = []
    for cause, meaning in CAUSES.items():
        count = sum(tree.num_again[cause] for tree in state.trees)
        rows.append({"cause": cause, "num_blocks": count, "meaning": meaning})
    return rows


def limits(state: KVState) -> list[str]:
    """What the events cannot show, and what was missing from them."""
    said = ["KV events have no block ids, no reference counts and no requests: hits are not visible, only misses"]
    for publisher in state.publishers.values():
        check = publisher.sequence
        if check.first_seq:
            said.append(f"{publisher.name}: what happened before message {check.first_seq:,} is unknown")
        if check.num_missed:
            said.append(
                f"{publisher.name}: {plural(check.num_missed, 'message')} missing in "
                f"{plural(check.num_gaps, 'gap')}; blocks "
                "removed in them still look resident"
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


_MOST_BRANCHES = 12
_MOST_TWINS = 8
_MOST_TREES = 8
_MOST_CACHES = 50

_FIGURES = {
    "duration_s": "seconds watched",
    "num_batches": "batches",
    "num_events": "events",
    "num_resident_blocks": "blocks resident now",
    "num_resident_tokens": "tokens resident now",
    "peak_resident_blocks": "blocks resident at most",
    "num_unique_blocks": "different blocks",
    "num_stored_blocks": "blocks stored",
    "num_removed_blocks": "blocks removed",
    "num_blocks_stored_again": "blocks stored again after removal (churn)",
    "num_tokens_computed_twice": "tokens computed twice for that",
    "num_blocks_stored_again_alone": "of these blocks, stored alone: may be answers generated again",
    "median_pause_s": "seconds they were gone, median",
    "median_lifetime_s": "seconds a block stays, median of the last evicted",
    "num_gaps": "gaps in the stream",
    "num_restarts": "restarts of a publisher",
    "num_reconnects": "connections lost and made again",
    "num_malformed": "malformed messages or events",
    "num_unknown_removals": "removals of blocks never seen",
}
_ALWAYS = ("num_batches", "num_resident_blocks", "peak_resident_blocks", "num_stored_blocks", "num_removed_blocks",
           "num_blocks_stored_again", "num_gaps")  # fmt: skip


def summary_tables(state: KVState, decode: Decode | None, *, with_gone: bool = False) -> list[Table]:
    """All tables of a summary; empty ones are left out. with_gone: near twins among all blocks ever seen."""
    shape_of = cache(Shape)
    tables = [
        _figures_table(state),
        _caches_table(cache_rows(state, shape_of)),
        _lora_table(lora_rows(state)),
        branches_table(state, decode, shape_of),
        churn_table(state),
        twins_table(state, decode, shape_of if not with_gone else partial(Shape, with_gone=True)),
        _unknown_table(state),
    ]
    return [table for table in tables if table.rows]


def print_summary(tables: list[Table], state: KVState, format_: Format) -> None:
    """Print the tables; JSON has the figures as plain keys instead of a table."""
    if format_ is Format.JSON:
        tables = [table for table in tables if table.key != "figures"]
    print_tables(tables, format_, facts={**facts(state), "limits": limits(state)})


def _figures_table(state: KVState) -> Table:
    values = facts(state)
    rows = [
        {"figure": label, "value": values[key]} for key, label in _FIGURES.items() if values[key] or (key in _ALWAYS)
    ]
    columns = [Column("figure", "figure"), Column("value", "value", _number)]
    return Table("figures", "KV events", columns, rows, [*limits(state), *_oddities(state)])


def _number(value: float) -> str:
    return decimal(value) if isinstance(value, float) else count(value)


def _oddities(state: KVState) -> list[str]:
    """The last notes, without those that limits() covers."""
    return [f"note: {note}" for note in list(state.notes)[-5:] if "is not known" not in note]


def _caches_table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        Column("publisher", "publisher"), Column("group", "group"), Column("kind", "kind"), Column("medium", "medium"),
        Column("num_blocks", "blocks", count), Column("num_copies", "copies", count),
        Column("num_tokens", "tokens", count), Column("capacity_blocks", "of blocks", count),
        Column("num_prompts", "roots", count), Column("max_depth_blocks", "depth", count),
    ]  # fmt: skip
    vetoed = {(row["publisher"], row["group"]): row["num_vetoed_blocks"] for row in rows if row["num_vetoed_blocks"]}
    notes = [
        f"group {group} vetoed hits: {plural(num_blocks, 'block')} that another group still had "
        f"{'was' if num_blocks == 1 else 'were'} computed again, as group {group} did not have them"
        for (_, group), num_blocks in vetoed.items()
    ]
    return Table("caches", "Resident, by cache group and medium", columns, rows, notes, max_shown=_MOST_CACHES)


def _lora_table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        Column("lora", "LoRA adapter"), Column("num_blocks", "blocks", count), Column("num_tokens", "tokens", count)
    ]  # fmt: skip
    return Table("loras", "Resident, by LoRA adapter", columns, rows)


def churn_table(state: KVState) -> Table:
    rows = churn_rows(state)
    columns = [Column("cause", "removed"), Column("num_blocks", "blocks", count), Column("meaning", "meaning")]
    happened = any(row["num_blocks"] for row in rows)
    return Table("churn", "Churn: blocks removed and stored again", columns, rows if happened else [])


def branches_table(state: KVState, decode: Decode | None, shape_of: ShapeOf = Shape) -> Table:
    rows = [row for tree in _largest_trees(state) for row in _branch_rows(shape_of(tree), decode)]
    columns = [
        Column("branch", "prefix"), Column("depth", "at block", count), Column("num_run_blocks", "run", count),
        Column("num_children", "forks", count), Column("num_blocks", "blocks below", count),
        Column("num_tokens", "tokens below", count), Column("share", "share", percent),
    ]  # fmt: skip
    title = "Largest subtrees: runs of blocks without a fork, each below the one it continues"
    return Table("branches", title, columns, rows)


def _largest_trees(state: KVState) -> list[PrefixTree]:
    return sorted(state.trees, key=lambda tree: -len(tree.nodes))[:_MOST_TREES]


def _branch_rows(shape: Shape, decode: Decode | None) -> Iterable[dict[str, Any]]:
    total = sum(shape.num_tokens[node.hash] for node in shape.roots)
    for branch in largest_branches(shape, _MOST_BRANCHES):
        yield {
            "branch": "  " * min(branch.level, 8) + branch_label(branch, decode), "level": branch.level,
            "depth": branch.depth, "num_run_blocks": len(branch.nodes), "num_children": branch.num_children,
            "num_blocks": branch.num_blocks, "num_tokens": branch.num_tokens, "lora": branch.nodes[0].lora,
            "share": branch.num_tokens / total if total else None,
        }  # fmt: skip


def twins_table(state: KVState, decode: Decode | None, shape_of: ShapeOf = Shape) -> Table:
    """Where near twins part, with a tokenizer as text. Empty unless tokens, or digests of them, were kept."""
    rows = []
    for tree in _largest_trees(state):
        for twins in near_twins(shape_of(tree), _MOST_TWINS):
            row: dict[str, Any] = {
                "place": twins.num_prefix_tokens + twins.num_equal, "num_equal": twins.num_equal,
                "num_tokens": twins.num_tokens,
            }  # fmt: skip
            if decode is not None:
                row["first"] = _text_around(twins.first, twins.num_equal, decode)
                row["second"] = _text_around(twins.second, twins.num_equal, decode)
            rows.append(row)
    columns = [
        Column("place", "part at token", count), Column("num_equal", "equal in the block", count),
        Column("num_tokens", "tokens after it", count),
    ]  # fmt: skip
    if decode is not None:
        columns += [Column("first", "one"), Column("second", "other")]
    return Table("twins", "Near twins: prompts that part inside a block", columns, rows)


def _text_around(node: Node, place: int, decode: Decode) -> str:
    """A few tokens on each side of a place in a block."""
    return f"...{decode(tuple(token_ids([node])[max(0, place - 8) : place + 5]))!r}"


def _unknown_table(state: KVState) -> Table:
    rows = [{"name": name, "kind": "event type", "count": number} for name, number in state.unknown_types.items()]
    rows += [{"name": name, "kind": "field", "count": number} for name, number in state.unknown_fields.items()]
    columns = [Column("name", "not known"), Column("kind", "kind", text), Column("count", "times", count)]
    return Table("unknown", "Event types and fields that this pagedcli does not know", columns, rows)


def curve_table(points: list[CurvePoint], state: KVState) -> Table:
    rows = [
        {
            "num_more_blocks": point.num_more_blocks, "num_blocks_kept": point.num_blocks_kept,
            "num_prompt_blocks_kept": point.num_prompt_blocks_kept, "num_tokens_kept": point.num_tokens_kept,
            "share": point.num_blocks_kept / points[-1].num_blocks_kept,
        }
        for point in points
    ]  # fmt: skip
    columns = [
        Column("num_more_blocks", "more blocks", count), Column("num_blocks_kept", "blocks kept", count),
        Column("num_prompt_blocks_kept", "of prompts", count),
        Column("num_tokens_kept", "tokens not computed again", count), Column("share", "of all evicted", percent),
    ]  # fmt: skip
    most = plural(state.history.peak_resident, "block")
    notes = [f"lower bounds, if it evicts in the same order; this cache held at most {most}"]
    if any(point.num_alone_kept for point in points):
        notes.append("of prompts: without blocks that came back alone, as answers do that are generated again")
    return Table("larger_cache", "What a larger cache would have kept", columns, rows, notes)


def metrics_table(scraper: "Scraper") -> Table:
    """The server's own figures, each with its window."""
    rows = [
        {"key": figure.key, "meaning": figure.meaning, "window": figure.window, "value": figure.value}
        for figure in scraper.metrics.figures()
    ]
    columns = [Column("meaning", "the server says"), Column("window", "window"), Column("value", "value", decimal)]
    notes = [scraper.problem] if scraper.problem is not None else []
    return Table("metrics", "The server's own figures", columns, rows, notes)
