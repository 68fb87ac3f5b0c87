"""The tables of `pagedcli simulate`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedcli.show.tables import Column, Format, Table, count, percent, size
from pagedcli.simulation.misses import PARTS
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import Schedule
from pagedcli.simulation.stack_distance import LruCurve
from pagedcli.simulation.sweep import Sweep, SweepPoint

PART_NAMES = {name: name.replace("_", " ") for name in PARTS} | {"policy": "eviction"}


def facts(sweep: Sweep, block_size: int, block_bytes: int | None) -> dict[str, Any]:
    """What JSON says about the whole trace."""
    workload, curve = sweep.workload, sweep.curve
    blocks, tokens = curve.ceiling
    return {
        "format": workload.format,
        "num_requests": len(workload.requests),
        "num_bad_lines": workload.num_bad,
        "bad_lines": [{"place": bad.place, "reason": bad.reason} for bad in workload.bad_lines],
        "notes": workload.notes,
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": sum(request.num_output_tokens or 1 for request in workload.requests),
        "block_size": block_size,
        "block_bytes": block_bytes,
        "num_blocks": len(sweep.accesses.blocks),
        "num_unique_blocks": sweep.num_unique_blocks,
        "windows": list(sweep.windows),
        "warmup": sweep.warmup,
        "unlimited_hit_rate_blocks": _rate(blocks, curve.num_blocks),
        "unlimited_hit_rate_tokens": _rate(tokens, curve.num_tokens),
    }


def trace_table(workload: Workload, sweep: Sweep) -> Table:
    """What is in the trace."""
    outputs = [request.num_output_tokens or 1 for request in workload.requests]
    rows: list[dict[str, Any]] = [
        {"what": "requests", "value": count(len(workload.requests))},
        {"what": "prompt tokens", "value": count(workload.num_prompt_tokens)},
        {"what": "output tokens", "value": count(sum(outputs))},
        {"what": "full blocks looked up", "value": count(len(sweep.accesses.blocks))},
        {"what": "unique blocks", "value": count(sweep.num_unique_blocks)},
        {"what": "hit rate without limit", "value": _ceiling_text(sweep.curve)},
    ]
    if workload.has_times:
        rows.insert(1, {"what": "time span", "value": f"{workload.requests[-1].arrival_s:,.0f} s"})
    notes = [f"bad line {bad.place}: {bad.reason}" for bad in workload.bad_lines[:5]]
    if workload.num_bad > 5:
        notes.append(f"and {workload.num_bad - 5:,} more bad lines; --format json lists the first ones")
    return Table(
        "trace", f"Trace ({workload.format})", [Column("what", "what"), Column("value", "value", str)], rows,
        [*notes, *workload.notes],
    )  # fmt: skip


def _ceiling_text(curve: LruCurve) -> str:
    blocks, tokens = curve.ceiling
    in_blocks, in_tokens = _rate(blocks, curve.num_blocks), _rate(tokens, curve.num_tokens)
    return f"{percent(in_tokens or 0)} of tokens, {percent(in_blocks or 0)} of blocks"


def point_row(point: SweepPoint, sweep: Sweep) -> dict[str, Any]:
    """One row of JSON: a pool size and a policy."""
    blocks, tokens = sweep.lru(point.num_blocks)
    row: dict[str, Any] = {
        "pool_blocks": point.num_blocks,
        "pool_share": _rate(point.num_blocks, sweep.num_unique_blocks),
        "policy": point.policy,
        "hit_rate_blocks": _rate(*point.hit_blocks),
        "hit_rate_tokens": _rate(*point.hit_tokens),
        "lru_unscheduled_hit_rate_blocks": _rate(blocks, sweep.curve.num_blocks),
        "lru_unscheduled_hit_rate_tokens": _rate(tokens, sweep.curve.num_tokens),
        "clairvoyant_hit_rate_tokens": _rate(*sweep.best(point.num_blocks)),
        "tokens": point.parts,
    }
    run = point.run
    if run is not None:
        waited = np.asarray(run.waited_steps)[run.served()]
        waited_s = np.asarray(run.waited_s)[run.served()]
        row |= {
            "num_refused": run.num_refused,
            "refusals": run.refusals,
            "num_steps": run.num_steps,
            "mean_waiting_steps": float(waited.mean()) if len(waited) else None,
            "p95_waiting_steps": float(np.percentile(waited, 95)) if len(waited) else None,
            "mean_waiting_s": float(waited_s.mean()) if len(waited) else None,
            "num_preemptions": run.num_preemptions,
            "num_recomputed_tokens": run.num_recomputed_tokens,
            "num_generated_tokens": run.num_generated_tokens,
            "peak_used_blocks": run.peak_used_blocks,
            "total_s": run.total_s,
        }
    return row


def answer_table(sentences: Sequence[str], format: Format) -> Table:
    """What it means: lines of text, in CSV rows."""
    columns = [Column("answer", "answer", str, words=True)]
    if format is Format.CSV:
        return Table("answers", "Answers", columns, [{"answer": sentence} for sentence in sentences])
    return Table("answers", "Answers", columns, [], sentences)


def pool_table(points: Sequence[SweepPoint], sweep: Sweep, schedule: Schedule | None, block_bytes: int | None) -> Table:
    """Hit rates, waiting and preemptions of every pool and policy."""
    rows = [point_row(point, sweep) for point in points]
    columns = [
        Column("pool_blocks", "pool", count),
        Column("pool_share", "share", share),
        Column("policy", "policy"),
        Column("hit_rate_tokens", "tokens", percent),
        Column("hit_rate_blocks", "blocks", percent),
    ]
    notes = [
        "pool: in blocks; share: of the distinct blocks of all prompts",
        "tokens, blocks: hits of the prompts' tokens and full blocks, when they are first computed; "
        + _warmup_text(sweep.warmup),
    ]
    title = "Hit rates without running requests"
    if schedule is None:
        columns.append(Column("clairvoyant_hit_rate_tokens", "best", percent))
        notes.append("best: tokens that hit with the clairvoyant, whose evictions are the best possible")
    if block_bytes is not None:
        for row in rows:
            row["pool_bytes"] = row["pool_blocks"] * block_bytes
        columns[1] = Column("pool_bytes", "memory", size)
        notes[0] = "pool: in blocks; memory: of K and V in these blocks"
    if schedule is not None:
        title = "Hit rates of simulated runs"
        timed = schedule.step_time is not None
        columns += [
            Column("lru_unscheduled_hit_rate_tokens", "LRU", percent),
            Column("clairvoyant_hit_rate_tokens", "best", percent),
            Column("mean_waiting_s", "waiting", seconds) if timed else Column("mean_waiting_steps", "waiting", count),
            Column("num_preemptions", "preempted", count),
        ]
        if any(point.run is not None and point.run.num_refused for point in points):
            columns.append(Column("num_refused", "refused", count))
            notes.append("refused: requests that never fit into the pool; they count nowhere else")
        notes += [
            "LRU, best: tokens that hit in the same pool without running requests: under LRU, and with the clairvoyant,"
            " whose evictions are the best possible",
            f"waiting: mean {'time' if timed else 'steps'} from arrival to the first step that computes a request;"
            " preempted: in the whole run",
        ]
    if sweep.has_windows:
        notes.append(
            f"the layers form {len(sweep.windows)} groups, each with blocks of its own; best: an upper bound, as if"
            " layers with a window needed no blocks"
        )
    return Table("pools", title, columns, rows, notes)


def _warmup_text(warmup: float) -> str:
    return f"the first {warmup:.0%} of the requests fill the cache uncounted" if warmup else "no warm-up"


def miss_table(points: Sequence[SweepPoint]) -> Table:
    """Where the tokens of the prompts went."""
    used = [name for name in PARTS if any(name in point.parts for point in points)]
    rows = []
    for point in points:
        total = sum(point.parts.values())
        shares = {f"{name}_share": _rate(tokens, total) for name, tokens in point.parts.items()}
        rows.append({"pool_blocks": point.num_blocks, "policy": point.policy, **shares})
    columns = [Column("pool_blocks", "pool", count), Column("policy", "policy")]
    columns += [Column(f"{name}_share", PART_NAMES[name], percent) for name in used]
    notes = ["shares of the prompts' tokens, adding up to 100 %; each token counts where it first fits, left to right"]
    notes += [f"{PART_NAMES[name]}: {PARTS[name]}" for name in used]
    return Table("misses", "Where the prompts' tokens went", columns, rows, notes)


def share(value: float) -> str:
    """21.3 %, or `50 times` of a pool that is far larger than what it is compared with."""
    return percent(value) if value < 10 else f"{value:,.0f} times"


def seconds(value: float) -> str:
    """12.3 s"""
    return f"{value:,.1f} s"


def _rate(part: float, whole: float) -> float | None:
    return part / whole if whole else None
