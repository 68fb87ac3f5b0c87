"""Messages on stderr before and after a run, and the effective configuration."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pagedcli import __version__
from pagedcli.batch.run import BatchResult
from pagedcli.batch.stats import BatchStats, LogHistogram, figures
from pagedcli.config import BUILTIN_MODEL, EngineConfig, LoadedConfig
from pagedcli.core.checkpoints import CheckpointPolicy
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import MOST_DRAFTED
from pagedcli.errors import PagedcliError
from pagedcli.files import whole_file, writing
from pagedcli.printable import (
    byte_text,
    cut_reason,
    duration_text,
    expected_text,
    percent_text,
    plural,
    printable,
    seconds_text,
)
from pagedcli.show.tables import print_sentences
from pagedcli.show.terminal import discard, say, say_wrapped

if TYPE_CHECKING:
    from pagedcli.answers.cures import Cure
    from pagedcli.core.plan import Plan
    from pagedcli.core.store import StoreFacts
    from pagedcli.views.whole_run import Findings


def say_model(model: str) -> None:
    shown = "built-in demo model (choose another with -m)" if model == BUILTIN_MODEL else model
    say(f"pagedcli {__version__}, model: {shown}")


def say_refused(plan: "Plan") -> None:
    """Print why nothing faster is used."""
    for reason in plan.refused:
        say(f"  not used: {reason}")


def say_plan(plan: "Plan", config: EngineConfig) -> None:
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
            f" checkpoints: {CheckpointPolicy.named(limits.checkpoints).text}"
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


def print_told(sentences: Sequence[str], *, on_stdout: bool) -> None:
    """Print what is said of a run, on stdout unless something else is there or it is closed or full."""
    if on_stdout:
        try:
            print_sentences(sentences)
        except OSError:
            discard(sys.stdout)
        else:
            return
    for line in sentences:
        say_wrapped(line)


def say_store(facts: "StoreFacts", path: str) -> None:
    """Print what a run did with its prefix store, and why files were of no use."""
    read, written = (
        plural(num_blocks, "block") + (f" and {plural(num_states, 'state')}" if num_states else "")
        for num_blocks, num_states in (
            (facts.num_read_blocks, facts.num_read_states),
            (facts.num_written_blocks, facts.num_written_states),
        )
    )
    read_bytes, written_bytes = byte_text(facts.num_read_bytes), byte_text(facts.num_written_bytes)
    say(f"prefix store {path}: {read} read ({read_bytes}), {written} written ({written_bytes})")
    if facts.no_room is not None:
        say(f"  {facts.no_room}: nothing was removed for that")
    if facts.num_removed:
        what = plural(facts.num_removed, "file")
        say(f"  removed: {what} when the folder was opened (size, days without use, or damage)")
    for what, reasons in (("not read", facts.not_used), ("not written", facts.not_kept)):
        for why, count in reasons.most_common():
            say(f"  {what}: {plural(count, 'file')}, {why}")


def say_summary(
    result: BatchResult,
    findings: "Findings | None" = None,
    *,
    predicted: tuple[float, float, float, float] | None = None,
) -> None:
    """Print the summary of a run; given its findings, also what they say about the cache. `predicted`: after how
    many seconds its duration was first predicted, how long it was to be, and the range of that."""
    stats, facts = result.stats, result.stats.facts
    say_wrapped(f"{_outcome(result)} in {stats.elapsed_s:,.1f} s{_failures(stats)}")
    for place, (line, reason) in enumerate(stats.first_failed):
        _say_line(f"  {'' if place else 'failed':<12} line {line:,}: {cut_reason(reason)}")
    if predicted is not None and result.outcome == "complete":
        at_s, whole_s, low_s, high_s = predicted
        off = percent_text(abs(stats.elapsed_s / whole_s - 1))
        more = "more" if stats.elapsed_s >= whole_s else "less"
        whole = expected_text(whole_s, low_s, high_s)
        _say_line(f"  predicted    {whole}, {duration_text(at_s)} after the start: it took {off} {more}")
    if stats.num_resumed:
        _say_line(f"  resumed      {plural(stats.num_resumed, 'row')} from the journal; the figures below exclude them")
    if facts.num_prompt_tokens:
        generated_per_s = facts.num_generated_tokens / max(stats.elapsed_s, 1e-9)
        all_per_s = generated_per_s + facts.num_prompt_tokens / max(stats.elapsed_s, 1e-9)
        others = facts.num_generated_tokens - stats.num_row_tokens
        in_rows = f", {stats.num_row_tokens:,} of them in rows" if others else ""
        _say_line(
            f"  prompt       {plural(facts.num_prompt_tokens, 'token')}, {facts.num_cached_tokens:,} of them cached"
            f" ({100 * facts.hit_rate:.1f} % of this run's prompt tokens)"
        )
        if facts.num_disk_tokens:
            _say_line(f"  from disk    {plural(facts.num_disk_tokens, 'token')} of these, from the prefix store")
        _say_line(
            f"  generated    {plural(facts.num_generated_tokens, 'token')}{in_rows}, {generated_per_s:,.0f} tok/s"
            f" ({all_per_s:,.0f} with prompts)"
        )
        if stats.num_deduplicated:
            _say_line(
                f"  deduplicated {plural(stats.num_deduplicated, 'row')} with the answers of an equal one:"
                f" {plural(stats.num_deduplicated_tokens, 'token')} not generated again"
            )
        _say_line(
            f"  TTFT         {_percentiles(stats.ttft)}, from admission of the row, not from the start of the run"
        )
        _say_line(f"  of it queued {_percentiles(stats.queued)}, before the row's first step")
        _say_line(f"  TPOT         {_percentiles(stats.tpot)}")
        _say_line(
            f"  KV blocks    {facts.peak_used_blocks:,} of {facts.num_blocks:,} at the peak"
            f" ({100 * facts.peak_used_blocks / facts.num_blocks:.1f} %)"
        )
        if facts.num_state_slots:
            _say_line(
                f"  state slots  {facts.peak_used_state_slots:,} of {facts.num_state_slots:,} at the peak;"
                f" {plural(facts.num_checkpoints, 'checkpoint')} made, {facts.num_dropped_checkpoints:,} dropped,"
                f" {plural(facts.num_checkpoint_hits, 'sequence')} continued from one"
            )
        _say_line(
            f"  preemptions  {facts.num_preemptions:,}, {plural(facts.num_recomputed_tokens, 'token')} recomputed"
        )
        if findings is not None:
            from pagedcli.views.whole_run import finding_lines

            for label, text in finding_lines(findings):
                _say_line(f"  {label:<12} {text}")
    if stats.num_double_bos:
        prompts = plural(stats.num_double_bos, "prompt")
        what = "the tokenizer or the chat template adds one itself, so leave it out of the text"
        say_wrapped(f"note: {prompts} with two BOS tokens at the start: {what}")
    for name, count in sorted(result.ignored.items()):
        say_wrapped(f"note: {plural(count, 'line')} with the field {name!r}, which has no effect (--strict refuses it)")


def _say_line(text: str) -> None:
    """A label, in a column of its own, and its text."""
    say_wrapped(text, indent=15)


def _findings_document(findings: "Findings") -> dict[str, object]:
    """Keys of the summary's `cache`. Rates are shares of the prompt tokens."""
    facts = findings.facts
    looked_up = facts.num_prompt_tokens
    return {
        "longest_shared_prefix_tokens": facts.longest_shared,
        "ideal_hit_rate": facts.num_ideal_tokens / looked_up if looked_up else None,
        "ideal_of_newest_tokens": facts.ideal_of,
        "lost_tokens": {words: count for count, words in findings.lost()},
        "mean_waste": facts.mean_waste,
        "peak_waste": facts.peak_waste,
        "waiting_s": facts.waiting_s,
    }


def _guesses(facts: RunFacts) -> dict[str, dict[str, int]]:
    """Guessed tokens by where the guess came from, and how many of them were right."""
    return {source: {"drafted": count, "accepted": facts.accepted[source]} for source, count in facts.drafted.items()}


def write_summary(
    path: Path,
    result: BatchResult,
    findings: "Findings | None" = None,
    cures: "Sequence[Cure]" = (),
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
        "error_codes": dict(stats.error_codes),
        "ignored_fields": result.ignored,
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


def _outcome(result: BatchResult) -> str:
    num_rows = plural(result.stats.num_finished, "row")
    if result.outcome == "complete":
        return f"done: {num_rows}"
    if result.outcome == "interrupted":
        return f"interrupted after {num_rows}"
    return f"stopped by --max-errors after {num_rows}"


def _failures(stats: BatchStats) -> str:
    num_failed = stats.num_finished_failed
    if not num_failed:
        return ""
    parts = [f"{code} {count:,}" for code, count in stats.error_codes.most_common()]
    if stats.num_resumed_failed:
        parts.append(f"in the journal {stats.num_resumed_failed:,}")
    return f"; {num_failed:,} failed" + (f" ({', '.join(parts)})" if parts else "")


def _percentiles(histogram: LogHistogram) -> str:
    p50, p95 = histogram.percentile(50), histogram.percentile(95)
    if p50 is None or p95 is None:
        return "-"
    return f"p50 {seconds_text(p50)}, p95 {seconds_text(p95)}"
