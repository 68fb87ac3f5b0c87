"""What `pagedcli diff` says: the answer in a sentence, what each difference changes, and the prompts that differ."""

from dataclasses import dataclass
from html import escape
from typing import Annotated, Any

from pagedcli.printable import one_line, percent_text
from pagedcli.records import number
from pagedcli.show import pages
from pagedcli.show.tables import Table, table
from pagedcli.simulation.difference import CAUSES, Comparison, Measures, parted_at
from pagedcli.simulation.requests import Request
from pagedcli.views.explain import Decode

MOST_LISTED = 20
_CONTEXT = 8  # tokens shown on each side of the place where two prompts part


def points(share: float) -> str:
    """+1.3 for a share of 0.013"""
    if not share:
        return "0"
    return f"{100 * share:+.1f}" if abs(share) >= 5e-4 else f"{100 * share:+.2g}"


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(round(value, 2))


class CauseRow:
    """What one difference changes alone, and what is left."""

    cause: Annotated[str, lambda name: CAUSES[name]]
    detail: Annotated[str, "before -> after"]
    hit_rate: Annotated[float, "hit rate, points", points]
    computed_tokens: Annotated[float, "computed tokens", signed]
    preemptions: Annotated[float, signed]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt that only one run has, or that has another text."""

    change: str
    label: str
    tokens_before: Annotated[int | None, "tokens before"]
    tokens_after: Annotated[int | None, "tokens after"]
    parted_at: Annotated[int | None, "equal until token"]
    text: Annotated[str | None, "what follows there: before | after"]


def sentence(found: Comparison) -> str:
    """The answer: how the hit rate changed, and why."""
    before, after = (float(each["hit_rate"]) for each in found.measured)
    begin = f"The hit rate is {percent_text(after)} in both"
    if change := float(found.change["hit_rate"]):
        verb = "rose" if change > 0 else "fell"
        begin = f"The hit rate {verb} from {percent_text(before)} to {percent_text(after)} ({points(change)} points)"
    named = sorted(found.parts, key=lambda cause: -abs(found.parts[cause]["hit_rate"]))
    words = {
        cause: f"{CAUSES[cause]} ({found.details[cause]})" if cause not in ("together", "unexplained") else cause
        for cause in named
    }
    if parts := [f"{words[each]} {points(float(rate))}" for each in named if (rate := found.parts[each]["hit_rate"])]:
        return f"{begin}: {', '.join(parts)}."
    if without := [words[cause] for cause in named if cause != "unexplained"]:
        return f"{begin}; without effect on it: {', '.join(without)}."
    return f"{begin}: nothing{'' if found.no_prompts is None else ' that can be compared'} differs."


def causes_table(found: Comparison) -> Table:
    """What differs, with what each changes alone. Measures that nothing changed are left out."""
    rows = [{"cause": cause, "detail": found.details[cause], **_floats(part)} for cause, part in found.parts.items()]
    others = [name for name in ("computed_tokens", "preemptions") if any(row[name] for row in rows)]
    notes = ["each alone: the earlier run with this one difference, in the simulator"]
    if found.no_prompts is not None:
        notes.append(f"prompts, outputs and order are not compared: {found.no_prompts}")
    columns = " ".join(["cause", "hit_rate", *others, "detail"])
    return table(CauseRow, "causes", "Why it changed", rows, columns, notes=notes, wrapped_at=140)


def prompts_table(found: Comparison, decode: Decode | None) -> Table:
    """Prompts that differ."""
    pairs, rows = found.pairs, []
    pairs_of: dict[str, list[tuple[Request | None, Request | None]]] = {
        "another text": [*pairs.changed],
        "only before": [(each, None) for each in pairs.alone(0)],
        "only after": [(None, each) for each in pairs.alone(1)],
    }
    for change, both in ((change, both) for change, each in pairs_of.items() for both in each):
        known = [each for each in both if each is not None]
        lengths = [None if each is None else each.num_prompt_tokens for each in both]
        place = parted_at(known[0], known[1], found.sides[0].limits.block_size) if len(known) == 2 else None
        has_text = place is not None and all(each.token_ids is not None for each in known)
        text = " | ".join(_text_at(place or 0, each, decode) for each in known) if has_text else None
        rows.append(PromptRow(change, one_line(known[0].label), lengths[0], lengths[1], place, text))
    notes = [f"the first {MOST_LISTED} of {len(rows):,}; --format json lists all"] if len(rows) > MOST_LISTED else []
    return table(PromptRow, "prompts", "Prompts that differ", rows, max_shown=MOST_LISTED, notes=notes)


def _text_at(place: int, request: Request, decode: Decode | None) -> str:
    ids = (request.token_ids or ())[place : place + _CONTEXT]
    return "(its end)" if not ids else str(list(ids)) if decode is None else repr(decode(tuple(ids)))


def facts(found: Comparison) -> dict[str, Any]:
    """What JSON says about the whole."""
    return {
        "answer": sentence(found),
        "before": {"name": found.sides[0].name, **_floats(found.measured[0])},
        "after": {"name": found.sides[1].name, **_floats(found.measured[1])},
        "changes": _floats(found.change),
    }


def _floats(measures: Measures) -> dict[str, float]:
    return {name: float(value) for name, value in measures.items()}


def page(found: Comparison, tables: list[Table]) -> bytes:
    """The page: the answer and the tables."""
    names = " and ".join(one_line(side.name) for side in found.sides)
    body = [f"<p><strong>{escape(sentence(found))}</strong></p>", *map(pages.as_html, tables)]
    return pages.html_page(f"pagedcli diff: {names}", "\n".join(body))
