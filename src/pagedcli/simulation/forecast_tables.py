"""A forecast as tables: what a run will take, and what for. Used by `plan`."""

from collections.abc import Sequence
from typing import Annotated, Any

from pagedcli.answers.time import Forecast
from pagedcli.printable import duration_text, percent_text, plural
from pagedcli.records import Share
from pagedcli.show.tables import Quantity, Table, quantities, table

PART_NAMES = {
    "prompts": "prompts",
    "generation": "generated tokens",
    "attention": "attention to earlier tokens",
    "rows": "rows: reading, text and writing",
}


def forecast_row(found: Forecast) -> dict[str, Any]:
    """For JSON. Times are in seconds; None: there is no calibration."""
    return {
        "seconds": found.seconds,
        "seconds_low": found.low,
        "seconds_high": found.high,
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


def forecast_table(found: Forecast, *, num_blocks: int, source: str, notes: Sequence[str]) -> Table:
    """What the run will be. `source` says where times come from."""
    values: list[Quantity] = []
    if found.seconds is not None and found.in_words is not None:
        first_s, rate, ends = (
            found.first_row_s or 0.0,
            found.tokens_per_s or 0.0,
            {"low": found.low, "high": found.high},
        )
        values += [
            Quantity("seconds", "time", found.seconds, "s", found.in_words, ends),
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
