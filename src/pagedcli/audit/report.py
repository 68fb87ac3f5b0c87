"""An audit as tables, as JSON and as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from pagedcli.audit.audit import Audit, exit_code
from pagedcli.audit.plan import CHECKS, Probe
from pagedcli.audit.restart import RESTART_STEPS
from pagedcli.audit.run import ProbeOutcome, Seen
from pagedcli.audit.shrink import Case
from pagedcli.audit.verdicts import Status, Verdict
from pagedcli.printable import one_line, plural, seconds_text
from pagedcli.records import Seconds
from pagedcli.show import pages
from pagedcli.show.tables import Table, table

_SURVEY_REQUESTS = 20
_CHART_TOKENS = 300  # longer prompts leave no room for the steps of the law


def verdict_table(audit: Audit) -> Table:
    """One sentence per check."""
    title = f"Audit of {audit.client.shown}"
    return table(Verdict, "verdicts", title, audit.verdicts(), "status check text", notes=notes(audit))


def tables(audit: Audit, *, in_full: bool) -> list[Table]:
    """The verdicts; `in_full`: with every pair and every request."""
    found, evidence = [verdict_table(audit)], audit.evidence
    if in_full and evidence is not None:
        outcomes = [*evidence.outcomes, *evidence.recalled]
        found += [pair_table(outcomes, evidence.noise().tolerance), lookup_table(evidence.seen)]
    return found


def notes(audit: Audit) -> list[str]:
    """What was asked, and what could not be."""
    budget, evidence = audit.client.budget, audit.evidence
    lines = [f"{plural(budget.num_requests, 'request')}, {budget.num_tokens:,} tokens, {seconds_text(audit.seconds)}"]
    if evidence is None:
        return [*lines, "stopped before anything was measured"]
    lines += [one_line(note) for note in evidence.survey.notes]
    if num_others := evidence.survey.runner.num_other_lengths:
        lines.append(f"{plural(num_others, 'pair')} not compared: the server saw prompts of other lengths")
    return lines


def facts(audit: Audit, *, was_interrupted: bool) -> dict[str, Any]:
    """What was asked, spent and measured: the JSON object without its tables."""
    evidence, budget = audit.evidence, audit.client.budget
    document: dict[str, Any] = {
        "url": audit.client.shown, "exit_code": exit_code(audit.verdicts()), "interrupted": was_interrupted,
        "num_requests": budget.num_requests, "num_tokens": budget.num_tokens, "seconds": round(audit.seconds, 3),
        "files": [str(path) for path in audit.files],
    }  # fmt: skip
    if evidence is not None:
        target, noise = evidence.survey.target, evidence.noise()
        document |= {
            "model": audit.client.secrets.without(evidence.survey.runner.endpoint.model),
            "cached_tokens_field": evidence.survey.cached_field,
            "unit_tokens": target.unit, "shortest_cached_prefix_tokens": target.smallest or None,
            "bypass": target.bypass, "salts_isolate": target.isolates, "has_logprobs": target.has_logprobs,
            "noise": noise.largest, "tolerance": noise.tolerance, "not_finished": evidence.not_run,
        }  # fmt: skip
    return document


@dataclass(frozen=True, slots=True)
class _PairRow:
    number: Annotated[int, "probe"]
    check: str
    prompt_tokens: int | None
    cached_tokens: Annotated[int | None, "cached tokens"]
    difference: Annotated[float | None, "{:.2g}".format]
    position: Annotated[int | None, "first other token"]
    differs: bool | None


def pair_table(outcomes: Sequence[ProbeOutcome], tolerance: float) -> Table:
    rows = [
        _PairRow(
            outcome.number, outcome.probe.check, warm.num_prompt, warm.num_cached, found.distance, found.position,
            found.exceeds(tolerance) if pair.must_agree else None,
        )
        for outcome in outcomes
        for pair, found in outcome.compared()
        for warm in (outcome.seen[pair.warm].answer,)
    ]  # fmt: skip
    note = "difference: largest of a log-probability after equal tokens"
    return table(_PairRow, "pairs", "Pairs", rows, notes=[note])


@dataclass(frozen=True, slots=True)
class _LookupRow:
    check: str
    prompt_tokens: int | None
    shared_tokens: Annotated[int, "shared tokens"]
    cached_tokens: Annotated[int | None, "cached tokens"]
    time_s: Annotated[Seconds, "time"]


def lookup_table(seen: Sequence[Seen]) -> Table:
    """Every request: what it shared, what was reported, and its time."""
    rows = [
        _LookupRow(each.check, each.answer.num_prompt, each.num_shared, each.answer.num_cached, each.answer.seen_s)
        for each in seen
    ]
    note = "time: to the first token of streams, else to the whole answer"
    return table(_LookupRow, "lookups", "Requests", rows, notes=[note])


@dataclass(frozen=True, slots=True)
class _PlanRow:
    check: str
    requests: int
    tokens: Annotated[int, "tokens at most"] | UnsetType
    lengths: Annotated[str, "prompt tokens"] | UnsetType
    meaning: Annotated[str, "what is compared"]


def plan_table(probes: Sequence[Probe], notes: Sequence[str]) -> Table:
    """What a run would send."""
    rows = [_PlanRow("survey", _SURVEY_REQUESTS, UNSET, UNSET, "block size, log-probabilities, salts; an estimate")]
    meanings = RESTART_STEPS | {check: asked.meaning for check, asked in CHECKS.items()}
    for check, meaning in meanings.items():
        chosen = [probe for probe in probes if probe.check == check]
        if chosen:
            lengths = sorted({probe.length for probe in chosen})
            shown = ", ".join(map(str, lengths if len(lengths) <= 4 else [*lengths[:2], "...", lengths[-1]]))
            num_requests = sum(len(probe.asks()) for probe in chosen)
            rows.append(_PlanRow(check, num_requests, sum(probe.num_tokens() for probe in chosen), shown, meaning))
    return table(_PlanRow, "plan", "Plan", rows, notes=notes)


@dataclass(frozen=True, slots=True)
class _ReplayRow:
    check: str
    length: Annotated[int, "prompt tokens"]
    text: Annotated[str, "result"]
    num_failing: Annotated[int, "failing probes"]
    num_probes: int


def replay_table(case: Case, name: str, num_failing: int, num_probes: int, largest: float) -> Table:
    """How many probes of a failing pair that was sent again fail."""
    more = f"more than {case.tolerance:.2g} counts as different"
    text = f"{num_failing} of {num_probes} fail, by up to {largest:.2g} ({more})"
    row = _ReplayRow(case.check, case.length, text, num_failing, num_probes)
    return table(_ReplayRow, "replay", f"Replay of {one_line(name)}", [row], "check length text")


def page(audit: Audit) -> bytes:
    evidence = audit.evidence
    parts = [f"<p>{escape(summary(audit.verdicts()))}</p>", pages.as_html(verdict_table(audit))]
    if evidence is not None:
        parts += [
            _chart(evidence.seen, evidence.survey.target.unit),
            pages.as_html(pair_table(evidence.outcomes, evidence.noise().tolerance)),
            pages.as_html(lookup_table(evidence.seen)),
        ]
    return pages.html_page(f"Audit of {audit.client.shown}", "\n".join(parts))


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
