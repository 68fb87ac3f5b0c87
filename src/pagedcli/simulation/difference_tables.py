"""What `pagedcli diff` says: the answer in a sentence, the causes, what differs in the prompts, and who lost most."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from pagedcli.printable import one_line, percent_text, seconds_text
from pagedcli.records import RIGHT, Means, number
from pagedcli.show import pages
from pagedcli.show.tables import Table, table
from pagedcli.simulation.causes import CAUSES, MOST_AVERAGED, Measures
from pagedcli.simulation.difference import Comparison, parted_at
from pagedcli.simulation.requests import TraceRequest
from pagedcli.views.explain import Decode

MOST_LISTED = 20
UNEXPLAINED = "unexplained"
_CONTEXT = 8  # tokens shown on each side of the place where two prompts part
_SHOWN: dict[str, Callable[[float], str]] = {"hit_rate": percent_text, "seconds": seconds_text}
_WORDS = {
    "hit_rate": "hit rate",
    "computed_tokens": "computed tokens",
    "preemptions": "preemptions",
    "peak_used_blocks": "peak of used blocks",
    "steps": "steps",
    "seconds": "time",
}


_SAME = "the same"


def points(share: float) -> str:
    """+1.3 for a share of 0.013"""
    if not share:
        return "0"
    return f"{100 * share:+.1f}" if abs(share) >= 5e-4 else f"{100 * share:+.2g}"


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(round(value, 2))


def signed_seconds(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + seconds_text(abs(seconds)) if seconds else "0"


@dataclass(frozen=True, slots=True)
class CauseRow:
    """The part of one cause in the change of each measure. None: not visible."""

    cause: Annotated[str, lambda name: CAUSES.get(name, name), Means("what differs; the parts add up to the change")]
    detail: Annotated[str, "before -> after"]
    visible: bool
    change: Annotated[float | None, "hit rate, points", points]
    computed_tokens: Annotated[float | None, "computed tokens", signed]
    preemptions: Annotated[float | None, signed] | UnsetType
    peak_used_blocks: Annotated[float | None, "peak blocks", signed] | UnsetType
    steps: Annotated[float | None, signed] | UnsetType
    seconds: Annotated[float | None, "time", signed_seconds] | UnsetType


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt that only one run has, or that has another text."""

    change: str
    label: str
    tokens_before: Annotated[int | None, "tokens before"]
    tokens_after: Annotated[int | None, "tokens after"]
    parted_at: Annotated[int | None, "equal until token"]
    text: Annotated[str | None, "what follows there: before | after"]


@dataclass(frozen=True, slots=True)
class LossRow:
    """A prompt that found fewer tokens than before."""

    label: str
    num_prompt_tokens: Annotated[int, "prompt tokens"]
    hit_before: Annotated[int, "tokens hit before"]
    hit_after: Annotated[int, "tokens hit after"]
    lost: Annotated[int, "tokens lost"]
    why: Annotated[str, "why it found no more"] | UnsetType = UNSET
    parted: Annotated[str | None, "where it parted"] | UnsetType = UNSET


def sentence(found: Comparison) -> str:
    """The answer: how the hit rate changed, and why."""
    before, after = (float(each["hit_rate"]) for each in found.measured)
    change = found.change["hit_rate"]
    if not change:
        begin = f"The hit rate is {percent_text(after)} in both"
    else:
        verb = "rose" if change > 0 else "fell"
        begin = f"The hit rate {verb} from {percent_text(before)} to {percent_text(after)}"
        begin += f" ({points(float(change))} points)"
    rest = found.unexplained.get("hit_rate", Fraction(0))
    named = sorted(((part["hit_rate"], cause) for cause, part in found.parts.items()), key=lambda each: -abs(each[0]))
    parts = [f"{CAUSES[cause]} ({found.details[cause]}) {points(float(share))}" for share, cause in named if share]
    parts += [f"{UNEXPLAINED} {points(float(rest))}"] if rest else []
    if parts:
        return f"{begin}: {', '.join(parts)}."
    without = [f"{CAUSES[cause]} ({found.details[cause]})" for _, cause in named]
    if without:
        return f"{begin}; without effect on it: {', '.join(without)}."
    what = "nothing that the recordings show differs" if found.hidden else "nothing differs"
    return f"{begin}: {what}."


def cause_rows(found: Comparison) -> list[CauseRow]:
    """Every cause that was looked at, and what no cause explains."""
    none = dict.fromkeys(found.simulated[0], Fraction(0))
    rows = []
    for cause in CAUSES:
        if cause in found.hidden:
            rows.append(_cause_row(cause, f"not visible: {found.hidden[cause]}", None, found))
        else:
            rows.append(_cause_row(cause, found.details[cause] or _SAME, found.parts.get(cause, none), found))
    return [*rows, _cause_row(UNEXPLAINED, "recorded, less simulated", found.unexplained, found)]


def _cause_row(cause: str, detail: str, part: Measures | None, found: Comparison) -> CauseRow:
    def value(name: str) -> Any:
        if name not in found.simulated[0]:
            return UNSET
        return None if part is None else float(part[name])

    others = {name: value(name) for name in _WORDS if name != "hit_rate"}
    return CauseRow(cause, detail, part is not None, value("hit_rate"), **others)


def causes_table(found: Comparison, *, in_full: bool = False) -> Table:
    """Every cause. Those that are none here, and measures that nothing changed, are left out, unless `in_full`."""
    rows = cause_rows(found)
    same = [] if in_full else [row for row in rows if row.detail == _SAME]
    rows = [row for row in rows if row not in same]
    averaged = len(found.differing) <= MOST_AVERAGED
    how = "means over all orders of swapping them" if averaged else "in this order, one after the other"
    notes = [f"each part: one thing swapped at a time in the simulator, {how}; the parts add up to the change"]
    if same:
        notes.append(f"not the cause: {', '.join(CAUSES[row.cause] for row in same)}")
    measures = [name for name in _WORDS if name != "hit_rate" and (in_full or any(getattr(row, name) for row in rows))]
    columns = " ".join(["cause", "change", *measures, "detail"])
    title = "Why it changed"
    return table(CauseRow, "causes", title, rows, columns, notes=notes, wrapped_at=140)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A line of the table of measures."""

    what: str
    before: Annotated[str, RIGHT]
    after: Annotated[str, RIGHT]
    change: Annotated[str, RIGHT]


def measures_table(found: Comparison) -> Table:
    """What both runs did."""
    rows = []
    for name, change in found.change.items():
        before, after = (_SHOWN.get(name, number)(float(each[name])) for each in found.measured)
        moved = signed(float(change))
        if name == "hit_rate":
            moved = f"{points(float(change))} points"
        elif name == "seconds":
            moved = signed_seconds(float(change))
        rows.append(_Shown(_WORDS[name], before, after, moved))
    return table(_Shown, "measures", "What changed", rows)


def prompts_table(found: Comparison, decode: Decode | None) -> Table:
    """Prompts that differ."""
    pairs, size = found.pairs, found.sides[0].limits.block_size
    rows = []
    for before, after in pairs.changed:
        place = parted_at(before, after, size)
        text = _parted_text(before, after, place, decode)
        rows.append(PromptRow("another text", one_line(after.label), before.num_prompt_tokens,
                              after.num_prompt_tokens, place, text))  # fmt: skip
    rows += [PromptRow("only before", one_line(each.label), each.num_prompt_tokens, None, None, None)
             for each in pairs.alone(0)]  # fmt: skip
    rows += [PromptRow("only after", one_line(each.label), None, each.num_prompt_tokens, None, None)
             for each in pairs.alone(1)]  # fmt: skip
    notes = [f"the first {MOST_LISTED} of {len(rows):,}; --format json lists all"] if len(rows) > MOST_LISTED else []
    return table(PromptRow, "prompts", "Prompts that differ", rows, max_shown=MOST_LISTED, notes=notes)


def _parted_text(before: TraceRequest, after: TraceRequest, place: int | None, decode: Decode | None) -> str | None:
    if place is None or before.token_ids is None or after.token_ids is None:
        return None
    shown = []
    for request in (before, after):
        assert request.token_ids is not None, "looked at above"
        ids = tuple(request.token_ids[place : place + _CONTEXT])
        shown.append("(its end)" if not ids else repr(decode(ids)) if decode is not None else str(list(ids)))
    return " | ".join(shown)


def losses_table(found: Comparison, why: Mapping[str, tuple[str, str | None]]) -> Table:
    """The prompts that lost most. `why`: for requests of the later run the lookup's outcome, and where it parted."""
    rows = []
    for place, partner in enumerate(found.pairs.partners[0]):
        if partner is None or found.sides[0].hits is None or found.sides[1].hits is None:
            continue
        request = found.sides[1].requests[partner]
        hits = found.sides[0].hits.get(place), found.sides[1].hits.get(partner)
        if hits[0] is None or hits[1] is None or hits[0] <= hits[1]:
            continue
        words, parted = why.get(request.request_id, (UNSET, UNSET))
        rows.append(LossRow(one_line(request.label), request.num_prompt_tokens, hits[0], hits[1], hits[0] - hits[1],
                            words, parted))  # fmt: skip
    rows.sort(key=lambda row: -row.lost)
    rows = rows[:MOST_LISTED]
    notes = [f"{row.label}: {row.parted}" for row in rows[:5] if row.parted is not UNSET and row.parted is not None]
    columns = "label num_prompt_tokens hit_before hit_after lost why"
    return table(LossRow, "requests", "Prompts that lost most", rows, columns, notes=notes, wrapped_at=140)


def facts(found: Comparison) -> dict[str, Any]:
    """What JSON says about the whole."""
    return {
        "answer": sentence(found),
        "change": float(found.change["hit_rate"]),
        "before": {"name": found.sides[0].name, **_floats(found.measured[0])},
        "after": {"name": found.sides[1].name, **_floats(found.measured[1])},
        "changes": _floats(found.change),
        "simulated_before": _floats(found.simulated[0]),
        "simulated_after": _floats(found.simulated[1]),
        "num_runs": found.num_runs,
    }


def _floats(measures: Measures) -> dict[str, float]:
    return {name: float(value) for name, value in measures.items()}


def page(found: Comparison, tables: list[Table]) -> bytes:
    """The page: the answer, a bar for each cause, and the tables."""
    names = " and ".join(one_line(side.name) for side in found.sides)
    parts = [(CAUSES.get(row.cause, row.cause), row.change or 0.0) for row in cause_rows(found) if row.change]
    chart = pages.section("Parts of the change of the hit rate", _bars(parts)) if parts else ""
    body = [f"<p><strong>{escape(sentence(found))}</strong></p>", chart, *map(pages.as_html, tables)]
    return pages.html_page(f"pagedcli diff: {names}", "\n".join(body))


_LEFT, _WIDTH, _ROW = 330, 1000, 30  # room for the labels, and the size of the drawing


def _bars(parts: list[tuple[str, float]]) -> str:
    """Losses to the left of a line, gains to the right."""
    largest = max(abs(share) for _, share in parts)
    half = (_WIDTH - _LEFT) / 2 - 60
    middle, lines = _LEFT + (_WIDTH - _LEFT) / 2, []
    for place, (label, share) in enumerate(parts):
        y, length = place * _ROW, half * abs(share) / largest
        x = middle if share > 0 else middle - length
        text, anchor = (middle + length + 6, "start") if share > 0 else (middle - length - 6, "end")
        lines.append(f'<text x="0" y="{y + 16}">{escape(label)}</text>')
        lines.append(
            f'<rect class="series{0 if share > 0 else 1}" x="{x:.1f}" y="{y + 2}" width="{length:.1f}" height="20"/>'
        )
        lines.append(f'<text x="{text:.1f}" y="{y + 16}" text-anchor="{anchor}">{escape(points(share))}</text>')
    lines.append(f'<line class="grid" x1="{middle}" x2="{middle}" y1="0" y2="{len(parts) * _ROW}"/>')
    return pages.svg(_WIDTH, len(parts) * _ROW, lines, "Points of hit rate of each cause, as in the table below")
