"""A forecast as tables: what a run will take, and what for. Used by `plan`."""

from collections.abc import Sequence
from math import hypot
from typing import Annotated, Any

from pagedcli.planning.step_time import StepTime
from pagedcli.printable import duration_text, expected_text, percent_text, plural
from pagedcli.records import Share
from pagedcli.show.tables import Quantity, Table, quantities, table
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


def time_text(found: Forecast, step_time: StepTime | None) -> str | None:
    """The time of the run and its range; None: there is no calibration."""
    low, high = time_range(found, step_time)
    if found.seconds is None or low is None or high is None:
        return None
    return expected_text(found.seconds, low, high)


def forecast_table(
    found: Forecast, step_time: StepTime | None, *, num_blocks: int, source: str, notes: Sequence[str]
) -> Table:
    """What the run will be. `source` says where times come from."""
    low, high = time_range(found, step_time)
    values: list[Quantity] = []
    if found.seconds is not None and low is not None and high is not None:
        first_s, rate = found.first_row_s or 0.0, found.tokens_per_s or 0.0
        time = time_text(found, step_time) or ""
        values += [
            Quantity("seconds", "time", found.seconds, "s", time, {"low": low, "high": high}),
            Quantity("first_row_s", "first row after", first_s, "s", duration_text(first_s)),
            Quantity("tokens_per_s", "generated tokens per second", rate, "tokens/s", f"{rate:,.0f}"),
        ]
    share, peak = found.peak_used_blocks / num_blocks, found.peak_used_blocks
    cached, again = found.num_cached_tokens, found.num_recomputed_tokens
    values += [
        Quantity("steps", "steps", found.num_steps, "steps", f"{found.num_steps:,}"),
        Quantity(
            "cached_tokens", "prompt tokens found in the cache", cached, "tokens",
            f"{cached:,} ({percent_text(found.hit_rate)})", {"share": found.hit_rate},
        ),
        Quantity(
            "kv_blocks_peak", "KV blocks at the peak", peak, "blocks",
            f"{peak:,} of {num_blocks:,} ({percent_text(share)})", {"share": share},
        ),
        Quantity(
            "preemptions", "preemptions", found.num_preemptions, "sequences",
            f"{found.num_preemptions:,}" + (f", {plural(again, 'token')} computed again" if again else ""),
            {"recomputed_tokens": again},
        ),
    ]  # fmt: skip
    notes = ["the real scheduler with the settings that generate uses here, without the model", *notes]
    notes.append(
        f"time: {source}"
        if found.seconds is None
        else f"time: without loading, as in the summary of generate; {source}"
    )
    if step_time is not None and step_time.disturbed:
        taken = percent_text(step_time.disturbed)
        notes.append(f"other work took {taken} of the processor meanwhile: a later plan without it measures again")
    if found.num_refused:
        notes.append(f"{plural(found.num_refused, 'request')} that the pool cannot hold: left out")
    if found.share < 1:
        simulated = percent_text(found.share)
        notes.append(f"simulated: {simulated} of the work, from all over the file; the rest is assumed to be like it")
    return quantities("expected_run", "Expected run", values, header="expected", notes=notes)


class Part:
    """What the time of a run is for."""

    what: Annotated[str, "part"]
    seconds: Annotated[float, "time", duration_text]
    share: Share


def parts_table(found: Forecast) -> Table:
    """Where the time goes."""
    total = found.seconds or 1.0
    rows = [
        {"part": name, "what": PART_NAMES[name], "seconds": seconds, "share": seconds / total}
        for name, seconds in sorted(found.parts.items(), key=lambda part: -part[1])
    ]
    return table(Part, "expected_parts", "Where the time goes", rows)
