"""An audit as tables, as JSON and as one HTML page."""

from collections.abc import Sequence
from html import escape
from typing import Any

from pagedcli.audit.audit import Audit, exit_code
from pagedcli.audit.plan import MEANINGS, Probe
from pagedcli.audit.run import Outcome, Seen
from pagedcli.audit.verdicts import Status, Verdict
from pagedcli.printable import one_line, plural, seconds_text
from pagedcli.show import pages
from pagedcli.show.tables import Column, Table, count

_CHART_TOKENS = 300  # longer prompts leave no room for the steps of the law


def _distance(value: float) -> str:
    return f"{value:.2g}"


def verdict_table(audit: Audit) -> Table:
    """One sentence per check."""
    columns = [Column("status", ""), Column("check", "check"), Column("text", "verdict")]
    rows = [
        {
            "status": str(each.status), "check": each.check, "text": each.text, "num_pairs": each.num_pairs,
            "num_different": each.num_different, "largest_difference": each.largest,
        }
        for each in audit.verdicts()
    ]  # fmt: skip
    return Table("verdicts", f"Audit of {one_line(audit.client.url)}", columns, rows, notes(audit))


def notes(audit: Audit) -> list[str]:
    """What was asked, and what could not be."""
    budget, evidence = audit.client.budget, audit.evidence
    lines = [f"{plural(budget.num_requests, 'request')}, {budget.num_tokens:,} tokens, {seconds_text(audit.seconds)}"]
    if evidence is None:
        return [*lines, "stopped before anything was found out"]
    lines += [one_line(note) for note in evidence.survey.notes]
    if evidence.num_other_lengths:
        lines.append(
            f"{plural(evidence.num_other_lengths, 'pair')} not compared: the server saw prompts of other lengths"
        )
    return lines


def facts(audit: Audit, *, was_interrupted: bool) -> dict[str, Any]:
    """The rest of the JSON object."""
    evidence, budget = audit.evidence, audit.client.budget
    document: dict[str, Any] = {
        "url": audit.client.url, "exit_code": exit_code(audit.verdicts()), "interrupted": was_interrupted,
        "num_requests": budget.num_requests, "num_tokens": budget.num_tokens, "seconds": round(audit.seconds, 3),
        "files": [str(path) for path in audit.files],
    }  # fmt: skip
    if evidence is not None:
        target, noise = evidence.survey.target, evidence.noise()
        document |= {
            "model": evidence.survey.endpoint.model, "cached_tokens_field": evidence.survey.cached_field,
            "unit_tokens": target.unit, "shortest_cached_prefix_tokens": target.smallest or None,
            "bypass": target.bypass, "salts_isolate": target.isolates, "has_logprobs": target.has_logprobs,
            "noise": noise.largest, "tolerance": noise.tolerance, "not_finished": evidence.not_run,
        }  # fmt: skip
    return document


def pair_table(outcomes: Sequence[Outcome], tolerance: float) -> Table:
    """Every pair that was compared."""
    columns = [
        Column("number", "probe", count), Column("check", "check"), Column("prompt_tokens", "prompt tokens", count),
        Column("cached_tokens", "cached", count), Column("difference", "difference", _distance),
        Column("position", "first other token", count), Column("differs", "differs"),
    ]  # fmt: skip
    rows = [
        {
            "number": outcome.number, "check": outcome.probe.check,
            "prompt_tokens": outcome.seen[pair.warm].answer.num_prompt,
            "cached_tokens": outcome.seen[pair.warm].answer.num_cached,
            "difference": found.distance, "position": found.position,
            "differs": found.exceeds(tolerance) if not (pair.must_differ or pair.is_control) else None,
        }
        for outcome in outcomes
        for pair, found in zip(outcome.probe.pairs, outcome.differences, strict=True)
        if found is not None
    ]  # fmt: skip
    return Table("pairs", "Pairs", columns, rows, ["difference: largest of a log-probability after equal tokens"])


def lookup_table(seen: Sequence[Seen]) -> Table:
    """Every request: what it shared, what was reported, and its time."""
    columns = [
        Column("check", "check"), Column("prompt_tokens", "prompt tokens", count),
        Column("shared_tokens", "shared", count), Column("cached_tokens", "cached", count),
        Column("time_s", "time", seconds_text),
    ]  # fmt: skip
    rows = [
        {
            "check": each.check, "prompt_tokens": each.answer.num_prompt, "shared_tokens": each.num_shared,
            "cached_tokens": each.answer.num_cached,
            "time_s": each.answer.total_s if each.answer.first_s is None else each.answer.first_s,
        }
        for each in seen
    ]  # fmt: skip
    return Table(
        "lookups", "Requests", columns, rows, ["time: to the first token of streams, else to the whole answer"]
    )


def plan_table(probes: Sequence[Probe], num_survey: int) -> Table:
    """What a run would send."""
    columns = [
        Column("check", "check"), Column("requests", "requests", count), Column("tokens", "tokens at most", count),
        Column("lengths", "prompt tokens"), Column("meaning", "what is compared"),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"check": "survey", "requests": num_survey, "meaning": "block size, log-probabilities, salts; an estimate"}
    ]
    for check, meaning in MEANINGS.items():
        chosen = [probe for probe in probes if probe.check == check]
        if not chosen:
            continue
        lengths = sorted({probe.length for probe in chosen})
        shown = ", ".join(map(str, lengths if len(lengths) <= 4 else [*lengths[:2], "...", lengths[-1]]))
        rows.append({
            "check": check, "requests": sum(len(probe.asks()) for probe in chosen),
            "tokens": sum(probe.num_tokens() for probe in chosen), "lengths": shown, "meaning": meaning,
        })  # fmt: skip
    return Table("plan", "Plan", columns, rows)


def page(audit: Audit) -> bytes:
    """The HTML page."""
    evidence = audit.evidence
    parts = [f"<p>{escape(summary(audit.verdicts()))}</p>", pages.as_html(verdict_table(audit))]
    if evidence is not None:
        parts += [
            _chart(evidence.seen, evidence.survey.target.unit),
            pages.as_html(pair_table(evidence.outcomes, evidence.noise().tolerance)),
            pages.as_html(lookup_table(evidence.seen)),
        ]
    return pages.html_page(f"Audit of {one_line(audit.client.url)}", "\n".join(parts))


def summary(verdicts: Sequence[Verdict]) -> str:
    """The result of all verdicts in one sentence."""
    num = {status: sum(each.status is status for each in verdicts) for status in Status}
    if num[Status.FAULT]:
        return f"{plural(num[Status.FAULT], 'check')} failed: do not trust this cache."
    if num[Status.UNKNOWN] or not verdicts:
        return f"Nothing wrong was found, but {plural(num[Status.UNKNOWN], 'check')} could not be determined."
    return "The cache tells the truth, as far as was asked."


def _chart(seen: Sequence[Seen], unit: int | None) -> str:
    """Cached tokens against shared ones, with the law as a line."""
    points = dict.fromkeys(
        (each.num_shared, each.answer.num_cached, each.claims_too_much(unit))
        for each in seen
        if each.answer.num_cached is not None and each.is_alone and not each.ask.is_cold
        if each.ask.after is None and each.check != "evict"
    )
    top = max([n for shared, cached, _ in points for n in (shared, cached) if n <= _CHART_TOKENS], default=0)
    if unit is None or not top:
        return ""
    chart = pages.LineChart((0, top), top)
    ticks = range(0, top + 1, max(unit, -(-top // 10 // unit) * unit))
    law = [(start + i * min(unit, top - start), start) for start in range(0, top, unit) for i in (0, 1)]
    drawing = [
        *chart.axes([(tick, [f"{tick:,}"]) for tick in ticks], [(tick, f"{tick:,}") for tick in ticks]),
        chart.x_label("tokens shared with an earlier prompt"),
        chart.line(law, "best"),
    ]
    for shared, cached, is_wrong in points:
        if max(shared, cached) <= top:
            title = f"{cached:,} cached of {shared:,} shared"
            drawing.append(chart.point(shared, cached, 1 if is_wrong else 0, title))
    words = [
        (pages.legend_marker(0), "tokens reported as cached"),
        (pages.legend_marker(1), "more than was ever sent"),
        (pages.legend_line("best"), f"floor(shared / {unit}) x {unit}"),
    ]
    svg = chart.svg(drawing, "Cached tokens against shared tokens")
    return pages.section("Cached tokens against shared tokens", pages.legend(words), svg)
