"""The tables of `plan`: a file's rows, lengths, shared prefixes, block sizes and pools, in full and in short, and what
its run will take, and what for."""

from collections.abc import Sequence
from typing import Annotated, Any

from pagedcli.answers.fits import Fit, fit_in_words, groups_and_states
from pagedcli.answers.hits import NEARLY, Hits
from pagedcli.answers.survey import MAX_LISTED, PromptScan
from pagedcli.answers.time import Forecast
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.plan import Plan
from pagedcli.planning.prompt_survey import UNIT, PromptSurvey
from pagedcli.printable import duration_text, percent_text, plural
from pagedcli.records import LEFT, Share, count
from pagedcli.show.tables import ALL_HINT, Fact, Table, table

_MAX_SHOWN = 10
_MOST_END_CHARS = 32  # characters shown of each end of a shared text
_MOST_END_TOKENS = 64  # tokens decoded of each end


def full_tables(scan: PromptScan, fit: Fit | None) -> list[Table]:
    """Everything that one pass over a file has found."""
    tables = [_rows_table(scan), *([_bad_table(scan)] if scan.num_bad else [])]
    if scan.plan.num_prompts:
        lengths = table(LengthRow, "lengths", "Lengths", scan.plan.length_rows())
        tables += [lengths, _shared_table(scan), _block_size_table(scan.plan)]
        if fit is not None:
            notes = filter(None, [groups_and_states(fit)])
            tables.append(table(Fact, "fit", "Fits here", [Fact("the model", fit_in_words(fit))], notes=[*notes]))
    return tables


def file_table(
    scan: PromptScan, fit: Fit | None, run: Forecast | None, pools: Hits | None, doubts: Sequence[str]
) -> Table:
    """A file in a few lines. `pools`: what other pools find; `doubts`: what makes the expected run unsure."""
    survey, rows = scan.plan, list[Fact]()
    for shared in survey.shared_prompts()[:1]:
        more = shared.num_prompts - len(shared.rows)
        lines = ", ".join(map(str, dict.fromkeys(shared.rows))) + (f" and {more:,} more" if more else "")
        prompts = f"{plural(shared.num_prompts, 'prompt')}: their first {plural(len(shared.token_ids), 'token')}"
        rows.append(Fact("sharing most", f"{prompts} (lines {lines})"))
    if survey.num_prompts:
        lengths = survey.length_rows()[0]
        mean = f"mean {lengths['mean']:,.0f}, median {lengths['p50']:,}, longest {lengths['max']:,}"
        rates = [f"{row['block_size']}: {percent_text(row['hit_rate'])}" for row in survey.block_size_rows()]
        rows += [
            Fact("longest shared prefix", plural(survey.longest_shared_tokens(), "token")),
            Fact("unlimited cache, by block size", ", ".join(rates)),
            Fact("tokens of a prompt", mean),
        ]
    if fit is not None:
        rows.append(Fact("fits here", fit_in_words(fit)))
    if run is not None:
        preempted = f", {plural(run.num_preemptions, 'preemption')}" if run.num_preemptions else ""
        rows.append(Fact("KV blocks at the peak", f"{run.peak_used_blocks:,}{preempted}"))
    if pools is not None and pools.unlimited.hit_rate > NEARLY:
        rows.append(Fact("within 1 point of unlimited", plural(pools.enough.num_blocks, "block")))
    return table(Fact, "file", "The file", rows, notes=[*doubts, ALL_HINT])


def survey_facts(scan: PromptScan, fit: Fit | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "num_rows": scan.num_rows,
        "num_valid_rows": scan.num_valid,
        "num_bad_rows": scan.num_bad,
        "bad_row_codes": dict(scan.bad_codes),
        "ignored_fields": scan.ignored,
        **({"scores": dict(scan.scores)} if scan.scores else {}),
        "num_repeated_prompts": scan.plan.num_repeated,
        "num_prompt_tokens": scan.plan.prompt_tokens,
        "num_output_tokens": scan.plan.output_tokens,
        "longest_shared_prefix_tokens": scan.plan.longest_shared_tokens(),
    }
    if fit is not None:
        names = "device block_size block_bytes num_kvcache_blocks num_kvcache_tokens num_kvcache_blocks_reason"
        facts |= {name: getattr(fit, name) for name in names.split()}
    return facts


class Tally:
    """A count of rows."""

    what: str
    rows: int


class BadRow:
    """A row that a run would refuse."""

    line: Annotated[int, str, LEFT]
    id: str | None
    code: str
    message: Annotated[str, "what is wrong"]


class LengthRow:
    """Lengths of all prompts, in tokens."""

    what: Annotated[str, "of"]
    mean: Annotated[float | None, "mean tokens", count]
    min: Annotated[int | None, "min tokens"]
    p50: Annotated[int | None, "p50 tokens"]
    p95: Annotated[int | None, "p95 tokens"]
    max: Annotated[int | None, "max tokens"]
    total: Annotated[int, "total tokens"]


class SharedPrefix:
    """A prefix that several prompts begin with, these prompts, and its text."""

    num_tokens: int
    num_prompts: int
    saved_tokens: int
    lines: Annotated[list[int], "first lines", lambda lines: ", ".join(map(str, lines))]
    num_more_prompts: Annotated[int, "more prompts"]
    text: Annotated[str, lambda text: f'"{text}"', LEFT]


class AtBlockSize:
    """The whole file with an unlimited cache at a block size."""

    block_size: int
    hit_rate: Share
    hit_tokens: Annotated[int, "cached tokens"]
    waste: Share
    num_blocks: int
    num_slots: int


def _rows_table(scan: PromptScan) -> Table:
    rows = {"rows": scan.num_rows, "valid": scan.num_valid}
    rows |= {f"bad: {code}": num_rows for code, num_rows in scan.bad_codes.most_common()}
    rows["prompt equal to an earlier one"] = scan.plan.num_repeated
    if scan.num_deduplicated:
        rows["with the answers of an earlier one, left out"] = scan.num_deduplicated
    notes = []
    if scores := scan.scores:
        rows |= {"with scores": scores["num_rows"], "continuations of these": scores["num_continuations"]}
        notes.append(
            f"scores compute {scores['tokens_shared']:,} tokens: {scores['tokens_alone']:,} if each continuation were "
            f"computed alone, {scores['tokens_by_row']:,} with each context computed once, less where contexts share a "
            "cached prefix"
        )
    if scan.max_model_len is None:
        notes.append("no config.json in the tokenizer's folder: length limits and memory are not checked")
    return table(Tally, "rows", "Rows", [{"what": what, "rows": number} for what, number in rows.items()], notes=notes)


def _bad_table(scan: PromptScan) -> Table:
    more = scan.num_bad - min(_MAX_SHOWN, len(scan.bad_rows))
    notes = [f"and {more:,} more; --format json lists the first {MAX_LISTED:,}"] if more else []
    return table(BadRow, "bad_rows", "Bad rows", scan.bad_rows, notes=notes, max_shown=_MAX_SHOWN)


def _shared_table(scan: PromptScan) -> Table:
    rows = [
        {
            "num_tokens": len(shared.token_ids),
            "num_prompts": shared.num_prompts,
            "saved_tokens": (shared.num_prompts - 1) * len(shared.token_ids),
            "lines": list(dict.fromkeys(shared.rows)),
            "num_more_prompts": shared.num_prompts - len(shared.rows),
            "text": _both_ends(scan.tokenizer, shared.token_ids),
        }
        for shared in scan.plan.shared_prompts()
    ]
    notes = [f"tokens in this table are rounded down to a multiple of {UNIT}: 23 shows as 16"] if rows else []
    notes.append(_shared_in_words(scan.plan.longest_shared_tokens()))
    return table(SharedPrefix, "shared_prefixes", "Shared prefixes that save most", rows, notes=notes)


def _both_ends(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of the tokens, of a long one only the beginning and the end. Part of a character is left out."""
    ends = [token_ids]
    if len(token_ids) > 2 * _MOST_END_TOKENS:
        ends = [token_ids[:_MOST_END_TOKENS], token_ids[-_MOST_END_TOKENS:]]
    texts = [tokenizer.decode(end, skip_special_tokens=False).strip("\ufffd") for end in ends]
    if len(texts) == 1 and len(texts[0]) <= 2 * _MOST_END_CHARS:
        return texts[0]
    return f"{texts[0][:_MOST_END_CHARS]} … {texts[-1][-_MOST_END_CHARS:]}"


def _shared_in_words(tokens: int) -> str:
    if tokens < UNIT:
        return f"no two prompts share their first {UNIT} tokens: prefix caching has no benefit"
    parts = ", ".join(f"{tokens // size} of {size}" for size in (16, 64, 256))
    return f"longest shared prefix: {plural(tokens, 'token')}; full blocks: {parts}"


def _block_size_table(survey: PromptSurvey) -> Table:
    notes = [
        "hit rate: cached / prompt tokens of the whole file with an unlimited cache; the last token is never cached",
        "waste: unfilled slots / slots of all rows at full length; blocks, slots: whole file, shared ones counted once",
    ]
    return table(AtBlockSize, "block_sizes", "Ideal hit rate and waste", survey.block_size_rows(), notes=notes)


def engine_table(title: str, found: Plan | str) -> Table:
    """One choice that determines speed per row, or why the engine cannot start."""
    if isinstance(found, str):
        return table(Fact, "engine", title, [Fact("error", found)])
    rows = [Fact("attention", found.backend), *(Fact("not used", reason) for reason in found.refused)]
    rows += [Fact("dtype", found.dtype), Fact("KV cache", found.kv_dtype)]
    notes = found.notes
    if found.kv_scales is None and "float8" in found.kv_dtype:
        notes += ("the scales of the fp8 cache are measured at startup",)
    elif found.kv_scales is not None:
        k_scale, v_scale = found.kv_scales
        rows.append(Fact("KV scales", f"K {k_scale:.4g}, V {v_scale:.4g}"))
    sizes = ", ".join(map(str, found.graph_sizes))
    rows.append(Fact("CUDA graphs", f"batch sizes {sizes}" if sizes else f"none: {found.no_graphs}"))
    return table(Fact, "engine", title, [*rows, *(Fact("note", note) for note in notes)])


# ---------------------------------------------------------------------- the expected run

_PART_NAMES = {
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


def run_tables(found: Forecast, num_blocks: int, source: str, notes: Sequence[str]) -> list[Table]:
    """What the run will be, and where its time goes. `source` says where times come from."""
    rows = list[Fact]()
    if found.seconds is not None and found.in_words is not None:
        rows += [
            Fact("time", found.in_words),
            Fact("first row after", duration_text(found.first_row_s or 0.0)),
            Fact("generated tokens per second", f"{found.tokens_per_s or 0.0:,.0f}"),
        ]
    peak, again = found.peak_used_blocks, found.num_recomputed_tokens
    rows += [
        Fact("steps", f"{found.num_steps:,}"),
        Fact("prompt tokens from the cache", f"{found.num_cached_tokens:,} ({percent_text(found.hit_rate)})"),
        Fact("KV blocks at the peak", f"{peak:,} of {num_blocks:,} ({percent_text(peak / num_blocks)})"),
        Fact("preemptions", f"{found.num_preemptions:,}" + f", {plural(again, 'token')} recomputed" * bool(again)),
    ]
    notes = ["the real scheduler with the settings that generate uses here, without the model", *notes]
    without = "" if found.seconds is None else "without loading, as in the summary of generate; "
    notes.append(f"time: {without}{source}")
    if found.num_refused:
        notes.append(f"{plural(found.num_refused, 'request')} that the pool cannot hold: left out")
    if found.share < 1:
        simulated = percent_text(found.share)
        notes.append(f"simulated: {simulated} of the work, from all over the file; the rest is assumed to be like it")
    tables = [table(Fact, "expected_run", "Expected run", rows, headers={"value": "expected"}, notes=notes)]
    if found.seconds is not None:
        tables.append(_parts_table(found))
    return tables


class Part:
    """What the time of a run is for."""

    what: Annotated[str, "part"]
    seconds: Annotated[float, "time", duration_text]
    share: Share


def _parts_table(found: Forecast) -> Table:
    total = found.seconds or 1.0
    rows = [
        {"part": name, "what": _PART_NAMES[name], "seconds": seconds, "share": seconds / total}
        for name, seconds in sorted(found.parts.items(), key=lambda part: -part[1])
    ]
    return table(Part, "expected_parts", "Where the time goes", rows)
