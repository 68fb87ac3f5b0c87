"""Messages on stderr before and after a run, and the effective configuration."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pagedcli import __version__, answers, views
from pagedcli.batch.requests import without_effect
from pagedcli.batch.run import BatchResult
from pagedcli.batch.stats import BatchStats, Endings, LogHistogram, figures
from pagedcli.config import BUILTIN_MODEL, EngineConfig, LoadedConfig, RunConfig
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.core.plan import Plan
from pagedcli.core.snapshots import SnapshotPolicy
from pagedcli.core.store import StoreFacts
from pagedcli.errors import PagedcliError
from pagedcli.files import whole_file, writing
from pagedcli.printable import byte_text, cut_reason, duration_text, plural, printable, refused_text, seconds_text
from pagedcli.show.terminal import say, say_wrapped


def say_model(model: str) -> None:
    shown = "built-in demo model (choose another with -m)" if model == BUILTIN_MODEL else model
    say(f"pagedcli {__version__}, model: {shown}")


def say_refused(plan: Plan) -> None:
    """Print why nothing faster is used."""
    for reason in plan.refused:
        say(f"  not used: {reason}")


def say_plan(plan: Plan, config: EngineConfig) -> None:
    """Print the plan of a configuration, and why nothing faster is used."""
    length = plan.limits.max_model_len
    say(f"plan: {plan.device}, {plan.dtype}, attention {plan.backend}, up to {plural(length, 'token')} per request")
    say_refused(plan)
    if plan.graph_sizes:
        say(f"CUDA graphs: decode steps of up to {plural(plan.graph_sizes[-1], 'sequence')}")
    elif plan.device != "cpu":
        say(f"no CUDA graphs: {plan.no_graphs}")
    assert plan.pool is not None, "an engine has one"
    pool_bytes, block_size = plan.num_blocks * plan.block_bytes, plan.limits.block_size
    say(
        f"KV cache: {plural(plan.num_blocks, 'block')} of {plural(block_size, 'token')}, {byte_text(pool_bytes)}"
        f" ({plan.pool.reason})"
    )
    limits = plan.limits
    if limits.num_state_slots:
        say(
            f"recurrent state: {plural(limits.num_state_slots, 'slot')} of {byte_text(limits.state_bytes)},"
            f" snapshots: {SnapshotPolicy.named(limits.checkpoints).text}"
        )
    if plan.no_drafts is not None:
        say(f"speculation: off, as {plan.no_drafts}")
    elif plan.speculation != "off":
        say(f"speculation: {plan.speculation}, at most {plural(MOST_DRAFTED, 'token')} at a time")
    if plan.kv_scales is not None:
        say("KV cache scales: K {:.4g}, V {:.4g}".format(*plan.kv_scales))
    if config.enable_prefix_caching:
        say(f"minimum cacheable prefix: {plural(block_size, 'token')} (one block)")
        if plan.limits.eviction != "lru":
            say(f"eviction: {plan.limits.eviction}")
    else:
        say("prefix caching is off")


def say_store(facts: StoreFacts, path: str) -> None:
    """Print what a run did with its prefix store, and why files were of no use."""
    read, written = (
        plural(num_blocks, "block") + (f" and {plural(num_states, 'state')}" if num_states else "")
        for num_blocks, num_states in (
            (facts.num_read_blocks, facts.num_read_states),
            (facts.num_written_blocks, facts.num_written_states),
        )
    )
    read_bytes, written_bytes = byte_text(facts.num_read_bytes), byte_text(facts.num_written_bytes)
    say(f"Prefix store {path}: {read} read ({read_bytes}), {written} written ({written_bytes}).")
    if facts.no_room is not None:
        say(f"  {facts.no_room}: nothing was removed for that")
    if facts.num_removed:
        what = plural(facts.num_removed, "file")
        say(f"  removed: {what} when the folder was opened (size, days without use, or damage)")
    for what, reasons in (("not read", facts.not_used), ("not written", facts.not_kept)):
        for why, count in reasons.most_common():
            say(f"  {what}: {plural(count, 'file')}, {why}")


_ENDINGS = {"complete": "", "interrupted": "Interrupted after ", "too_many_errors": "Stopped by --max-errors after "}
_ENDINGS |= {"out_of_time": "Stopped by --max-time after "}


def say_summary(result: BatchResult) -> None:
    """Print how a run went: its failed rows, its rows with their tokens, and its cache."""
    stats, facts = result.stats, result.stats.facts
    for failed in failed_rows(stats):
        say_wrapped(failed)
    rows = f"{_ENDINGS[result.outcome]}{plural(stats.num_finished, 'row')} in {run_text(stats.elapsed_s)}"
    rows += f" ({stats.num_resumed:,} of them from the journal)" if stats.num_resumed else ""
    rows += f" ({stats.num_reused:,} of them from earlier outputs)" if stats.num_reused else ""
    rows += "" if stats.num_finished_failed else ", none failed"
    rows += "".join(f", {each}" for each in _cut_short(stats.ended))
    if not facts.num_prompt_tokens:
        say_wrapped(f"{rows}.")
        return
    cached = f" ({100 * facts.hit_rate:.0f} % from the cache)" if facts.prefix_caching else ""
    rate = (facts.num_generated_tokens or facts.num_prompt_tokens) / max(stats.elapsed_s, 1e-9)
    prompts, generated = plural(facts.num_prompt_tokens, "prompt token"), f"{facts.num_generated_tokens:,} generated"
    say_wrapped(f"{rows}: {prompts}{cached}, {generated}, {rate:,.0f} tokens/s.")
    again = "no preemptions"
    if facts.num_preemptions:
        tokens = plural(facts.num_recomputed_tokens, "token")
        again = f"{plural(facts.num_preemptions, 'preemption')}, {tokens} recomputed"
    say_wrapped(f"KV cache: at most {facts.peak_used_blocks:,} of {plural(facts.num_blocks, 'block')} in use; {again}.")


def _cut_short(ended: Endings) -> list[str]:
    """How many answers were cut off and how many rows with tools made no call, where it is many."""
    num_cut, limits, num_tool_rows = ended.cut_at.total(), [*+ended.cut_at], ended.tool_rows.total()
    at = f"max_tokens {limits[0]:,}" if len(limits) == 1 and limits[0] is not None else "max_tokens or max_model_len"
    cut = f"{num_cut:,} of {plural(ended.reasons.total(), 'answer')} stopped at {at}"
    uncalled = f"{ended.tool_rows[False]:,} of {plural(num_tool_rows, 'row')} with tools made no call"
    found = [(num_cut, ended.reasons.total(), cut), (ended.tool_rows[False], num_tool_rows, uncalled)]
    return [
        text
        for number, of_all, text in found
        if number and 100 * number >= of_all and (number > 3 or 2 * number >= of_all)
    ]


def run_text(seconds: float) -> str:
    """How long a run took: `0.1 s`, `41 s`, `12 min 5 s`."""
    return f"{seconds:.1f} s" if seconds < 9.95 else duration_text(seconds)


def failed_rows(stats: BatchStats) -> list[str]:
    """How many rows failed, and the first one; empty: none did."""
    if not stats.first_failed:
        return []
    line, reason = stats.first_failed[0]
    return [refused_text(stats.num_finished_failed, stats.num_finished, line, reason, has_run=True)]


def say_figures(stats: BatchStats, findings: "views.whole_run.Findings") -> None:
    """Print the other figures of a run (--all)."""
    facts = stats.facts
    lines = [("", f"line {line:,}: {cut_reason(reason)}") for line, reason in stats.first_failed[1:]]
    if stats.error_codes:
        lines.append(("failed", ", ".join(f"{code} {count:,}" for code, count in stats.error_codes.most_common())))
    if facts.num_disk_tokens:
        lines.append(("from disk", plural(facts.num_disk_tokens, "prompt token")))
    if stats.num_deduplicated:
        not_again = f"{plural(stats.num_deduplicated_tokens, 'token')} not generated again"
        equal = plural(stats.num_deduplicated, "row")
        lines.append(("deduplicated", f"{equal} with the answers of an equal one: {not_again}"))
    lines += [
        ("TTFT", f"{_percentiles(stats.ttft)}, from admission of the row, not from the start of the run"),
        ("of it queued", f"{_percentiles(stats.queued)}, before the row's first step"),
        ("TPOT", _percentiles(stats.tpot)),
    ]
    if facts.num_state_slots:
        made, dropped = plural(facts.num_snapshots, "snapshot"), facts.num_dropped_snapshots
        continued = plural(facts.num_snapshot_hits, "sequence")
        slots = f"{facts.peak_used_state_slots:,} of {facts.num_state_slots:,} at the peak"
        lines.append(("state slots", f"{slots}; {made} made, {dropped:,} dropped, {continued} continued from one"))
    for label, text in [*lines, *views.whole_run.finding_lines(findings)]:
        say_wrapped(f"  {label:<12} {text}", indent=15)


def say_odd(result: BatchResult, run: RunConfig) -> None:
    """Print what is odd about the input of a run, and which of its numbers are calibrated."""
    if run.calibration:
        temperatures = ", ".join(f"{name} {each:.3g}" for name, each in run.calibration.items())
        say_wrapped(f"calibrated: temperatures {temperatures} change probabilities and no choice")
    if num_double := result.stats.num_double_bos:
        what = "the tokenizer or the chat template adds one itself, so leave it out of the text"
        say_wrapped(f"note: {plural(num_double, 'prompt')} with two BOS tokens at the start: {what}")
    say_ignored(result.ignored, result.first_ignored)


def say_ignored(num_lines: Mapping[str, int], first_line: Mapping[str, int]) -> None:
    """Print which fields of an input have no effect."""
    for name, count in sorted(num_lines.items()):
        first = f"line {first_line[name]:,}: " if name in first_line else ""
        say_wrapped(f"note: {first}{without_effect(name)} (in {plural(count, 'line')}; --strict refuses it)")


def _findings_document(findings: "views.whole_run.Findings") -> dict[str, object]:
    """Keys of the summary's `cache`. Rates are shares of the prompt tokens."""
    facts = findings.facts
    looked_up = facts.num_prompt_tokens
    return {
        "longest_shared_prefix_tokens": facts.longest_shared,
        "ideal_hit_rate": facts.num_ideal_tokens / looked_up if looked_up else None,
        "ideal_of_newest_tokens": facts.ideal_of,
        "admitted_blocks": dict(facts.admitted) or None,
        "lost_tokens": {words: count for count, words in findings.lost()},
        "mean_waste": facts.mean_waste,
        "peak_waste": facts.peak_waste,
        "waiting_s": facts.waiting_s,
    }


def _guesses(facts: RunFacts) -> dict[str, dict[str, int]]:
    """Draft tokens by where they came from, and how many of them were accepted."""
    return {source: {"drafted": count, "accepted": facts.accepted[source]} for source, count in facts.drafted.items()}


def write_summary(
    path: Path,
    result: BatchResult,
    findings: "views.whole_run.Findings | None" = None,
    cures: "Sequence[answers.cures.Cure]" = (),
) -> None:
    """The summary as JSON. Tokens and blocks are counts, times are in seconds; null: not measured, or not judged.

    ttft_s: from admission of a row to its first token; queued_s: the part of it before the row's first step.
    Raises: PagedcliError if the file cannot be written.
    """
    stats = result.stats
    times = {"ttft_s": stats.ttft, "queued_s": stats.queued, "tpot_s": stats.tpot}
    document = {
        "pagedcli": __version__,
        "outcome": result.outcome,
        "rows": stats.num_finished,
        "rows_failed": stats.num_finished_failed,
        "rows_resumed": stats.num_resumed,
        "rows_deduplicated": stats.num_deduplicated,
        "rows_reused": stats.num_reused,
        "error_codes": dict(stats.error_codes),
        "ignored_fields": result.ignored,
        "finish_reasons": dict(stats.ended.reasons),
        "tool_rows": stats.ended.tool_rows.total(),
        "tool_rows_without_call": stats.ended.tool_rows[False],
        **{figure.key: figure.value for figure in figures(stats)},
        **({"guesses": _guesses(stats.facts)} if stats.facts.drafted else {}),
        **{
            key: {f"p{percent}": values.percentile(percent) for percent in (50, 95, 99)}
            for key, values in times.items()
        },
        "cache": None if findings is None else _findings_document(findings),
        "cures": cures,
    }
    with writing(f"the summary {path}", PagedcliError), whole_file(path, overwrite=True) as file:
        file.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def resume_command(arguments: Iterable[str]) -> str:
    kept = [argument for argument in arguments if argument not in ("--overwrite", "--resume")]
    return shlex.join(["pagedcli", *kept, "--resume"])


def config_document(loaded: LoadedConfig) -> dict[str, dict[str, object]]:
    """Every key of the effective configuration: section -> name -> value."""
    document: dict[str, dict[str, object]] = msgspec.to_builtins(loaded.config)
    return document


def config_rows(loaded: LoadedConfig) -> list[dict[str, object]]:
    """One row per key: its value and the source of the value."""
    return [
        {
            "key": f"{section}.{name}",
            "value": printable("none" if value is None else str(value)),
            "from": printable(loaded.sources.get(f"{section}.{name}", "default")),
        }
        for section, values in config_document(loaded).items()
        for name, value in values.items()
    ]


def _percentiles(histogram: LogHistogram) -> str:
    p50, p95 = histogram.percentile(50), histogram.percentile(95)
    if p50 is None or p95 is None:
        return "-"
    return f"p50 {seconds_text(p50)}, p95 {seconds_text(p95)}"
