"""What `pagedcli diff` says: what changed most for the user, what each difference changes, which prompts differ."""

from typing import Annotated, Any

from pagedcli.printable import capitalized, duration_text, one_line
from pagedcli.show.tables import Table, table
from pagedcli.simulation.difference import CAUSES, Comparison

MOST_LISTED = 20
_LEAST_S, _LEAST_SHARE = 0.5, 0.05  # seconds, and share of the time, by which runs differ by more than chance


def whole(value: float) -> str:
    """`+1,234`, `-65` or `0`: a change."""
    return f"{round(value):+,}" if round(value) else "0"


def points(share: float) -> str:
    """`-65` for a share of -0.651"""
    return whole(100 * share)


class CauseRow:
    """What one difference changes alone, and what is left."""

    cause: Annotated[str, lambda name: CAUSES[name]]
    detail: Annotated[str, "before -> after"]
    hit_rate: Annotated[float, "hits, points", points]
    computed_tokens: Annotated[float, "computed tokens", whole]
    preemptions: Annotated[float, whole]


class PromptRow:
    """A prompt that only one run has, or that has another text."""

    change: str
    label: str
    tokens_before: Annotated[int | None, "tokens before"]
    tokens_after: Annotated[int | None, "tokens after"]


def sentence(found: Comparison) -> str:
    """What changed most for the user, and why."""
    before, after = (100 * float(each["hit_rate"]) for each in found.measured)
    said = f"hits are {after:.0f} % in both runs"
    if round(before) != round(after):
        said = f"hits {'rose' if after > before else 'fell'} from {before:.0f} % to {after:.0f} %"
    first_s, last_s = (side.seconds for side in found.sides)
    if first_s is not None and last_s is not None and abs(last_s - first_s) > max(_LEAST_S, _LEAST_SHARE * first_s):
        said = f"the later run took {duration_text(last_s)} instead of {duration_text(first_s)}, and {said}"
    said = capitalized(said)
    words = {each: CAUSES[each] + f" ({found.details[each]})" * (each in found.differing) for each in found.parts}
    largest = sorted(found.parts, key=lambda cause: -abs(found.parts[cause]["hit_rate"]))
    parts = [(words[cause], points(float(found.parts[cause]["hit_rate"]))) for cause in largest]
    if shown := [f"{cause} {part}" for cause, part in parts if part != "0"]:
        return f"{said}: {', '.join(shown)} points."
    if without := [words[cause] for cause in found.parts if cause in found.differing]:
        return f"{said}; without effect on them: {', '.join(without)}."
    return f"{said}: nothing{'' if found.no_prompts is None else ' that can be compared'} differs."


def causes_table(found: Comparison) -> Table:
    """What differs, with what each changes. Measures that nothing changed are left out."""
    rows = [
        {"cause": cause, "detail": found.details[cause], **{name: float(value) for name, value in part.items()}}
        for cause, part in found.parts.items()
    ]
    changed = [name for name in ("computed_tokens", "preemptions") if any(row[name] for row in rows)]
    notes = ["each cause alone: the earlier run with this one difference, simulated"] if rows else []
    if found.no_prompts is not None:
        notes.append(f"prompts, outputs and order are not compared: {found.no_prompts}")
    columns = " ".join(["cause", "hit_rate", *changed, "detail"])
    return table(CauseRow, "causes", "Why it changed", rows, columns, notes=notes, wrapped_at=140)


def prompts_table(found: Comparison) -> Table:
    rows: list[dict[str, Any]] = [
        {"change": "another text", "label": one_line(one.label), "tokens_before": one.num_prompt_tokens,
         "tokens_after": other.num_prompt_tokens}
        for one, other in found.pairs.changed
    ]  # fmt: skip
    for side, (change, key) in enumerate((("only before", "tokens_before"), ("only after", "tokens_after"))):
        blank = {"change": change, "tokens_before": None, "tokens_after": None}
        alone = found.pairs.alone(side)
        rows += [{**blank, "label": one_line(each.label), key: each.num_prompt_tokens} for each in alone]
    notes = [f"the first {MOST_LISTED} of {len(rows):,}; --format json lists all"] if len(rows) > MOST_LISTED else []
    return table(PromptRow, "prompts", "Prompts that differ", rows, max_shown=MOST_LISTED, notes=notes)


def facts(found: Comparison) -> dict[str, Any]:
    """What JSON says about the whole."""
    before, after = (
        {"name": side.name, "seconds": side.seconds, **{name: float(value) for name, value in measured.items()}}
        for side, measured in zip(found.sides, found.measured, strict=True)
    )
    changes = {name: float(value) for name, value in found.change.items()}
    return {"before": before, "after": after, "changes": changes}
