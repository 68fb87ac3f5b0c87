"""The figures of a state under plain keys, for --format json and the tables."""

from collections.abc import Callable
from typing import Any

from pagedcli.kvevents.branches import Shape
from pagedcli.kvevents.fold import KVState
from pagedcli.kvevents.tree import Cause, PrefixTree
from pagedcli.printable import plural

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
