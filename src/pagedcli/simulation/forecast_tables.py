"""A forecast as tables: what a run will take, and what for. Used by `plan`."""

from collections.abc import Sequence
from math import hypot
from typing import Any

from pagedcli.planning.step_time import StepTime
from pagedcli.printable import duration_text, percent_text, plural
from pagedcli.show.tables import Column, Table, percent
from pagedcli.simulation.forecast import Forecast

PART_NAMES = {
    "prompts": "prompts",
    "generation": "generated tokens",
    "attention": "attention to earlier tokens",
    "sampling": "sampling",
    "memory": "first use of KV blocks: memory from the system",
    "rows": "rows: reading, text and writing",
}


def forecast_row(found: Forecast, step_time: StepTime | None) -> dict[str, Any]:
    """For JSON. Times are in seconds; None: there is no calibration."""
    low, high = time_range(found, step_time)
    return {
        "seconds": found.seconds,
        "seconds_low": low,
        "seconds_high": high,
        "tokens_per_s": found.tokens_per_s,
        "first_row_s": found.first_row_s,
        "requests": found.num_requests,
        "prompt_tokens": found.num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
        "hit_rate": found.hit_rate,
        "computed_tokens": found.num_computed_tokens,
        "generated_tokens": found.num_generated_tokens,
        "steps": found.num_steps,
        "preemptions": found.num_preemptions,
        "recomputed_tokens": found.num_recomputed_tokens,
        "kv_blocks_peak": found.peak_used_blocks,
        "seconds_by_part": found.parts,
        "simulated_share": found.share,
    }


def time_range(found: Forecast, step_time: StepTime | None) -> tuple[float | None, float | None]:
    """The shortest and the longest time of 19 of 20 such runs."""
    if found.seconds is None or step_time is None:
        return None, None
    least_s, most_s, error = found.seconds - found.fewer_s, found.seconds + found.more_s, found.sample_error
    low_s, high_s = step_time.likely(least_s)[0], step_time.likely(most_s)[1]
    low_s = least_s - hypot(least_s - low_s, least_s * error / (1 + error))
    return max(0.0, low_s), most_s + hypot(high_s - most_s, most_s * error)


def forecast_table(
    found: Forecast, step_time: StepTime | None, *, num_blocks: int, source: str, notes: Sequence[str]
) -> Table:
    """What the run will be. `source` says where times come from."""
    low, high = time_range(found, step_time)
    values: list[tuple[str, str]] = []
    if found.seconds is not None and low is not None and high is not None:
        values += [
            ("time", f"{duration_text(found.seconds)} ({duration_text(low)} to {duration_text(high)})"),
            ("first row after", duration_text(found.first_row_s or 0.0)),
            ("generated tokens per second", f"{found.tokens_per_s or 0:,.0f}"),
        ]
    share = found.peak_used_blocks / num_blocks
    values += [
        ("steps", f"{found.num_steps:,}"),
        ("prompt tokens found in the cache", f"{found.num_cached_tokens:,} ({percent_text(found.hit_rate)})"),
        ("KV blocks at the peak", f"{found.peak_used_blocks:,} of {num_blocks:,} ({percent_text(share)})"),
        ("preemptions", f"{found.num_preemptions:,}, {plural(found.num_recomputed_tokens, 'token')} computed again"),
    ]
    notes = ["the real scheduler with the settings that generate uses here, without the model", *notes]
    notes.append(
        f"time: {source}"
        if found.seconds is None
        else f"time: {source}; that of the summary of generate, without loading"
    )
    if step_time is not None and step_time.disturbed:
        taken = percent_text(step_time.disturbed)
        notes.append(f"other work took {taken} of the processor meanwhile: a later plan without it measures again")
    if found.num_refused:
        notes.append(f"{plural(found.num_refused, 'request')} that the pool cannot hold: left out")
    if found.share < 1:
        simulated = percent_text(found.share)
        notes.append(f"simulated: {simulated} of the work, from all over the file; the rest is assumed to be like it")
    rows = [{"what": what, "value": value} for what, value in values]
    return Table("expected_run", "Expected run", [Column("what", "what"), Column("value", "expected")], rows, notes)


def parts_table(found: Forecast) -> Table:
    """Where the time goes."""
    total = found.seconds or 1.0
    rows = [
        {"part": name, "what": PART_NAMES[name], "seconds": seconds, "share": seconds / total}
        for name, seconds in sorted(found.parts.items(), key=lambda part: -part[1])
    ]
    columns = [
        Column("what", "part"),
        Column("seconds", "time", duration_text),
        Column("share", "share", percent),
    ]
    return Table("expected_parts", "Where the time goes", columns, rows)
