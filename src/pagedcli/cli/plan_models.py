"""`plan -m A -m B`: which of several models is fastest on this machine for a prompt file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pagedcli.printable import duration_text, expected_text
from pagedcli.records import Bytes, count
from pagedcli.show.tables import Format, Table, print_tables, table

if TYPE_CHECKING:
    from pagedcli.planning.decision import Decision


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model, and what the file takes with it. Absent: not known, or the model does not run here."""

    model: str
    fits: bool | None
    load_s: Annotated[float | None, "load", duration_text] = None
    seconds: Annotated[float | None, "run", duration_text] = None
    seconds_low: Annotated[float | None, "at least", duration_text] = None
    seconds_high: Annotated[float | None, "at most", duration_text] = None
    tokens_per_s: Annotated[float | None, "tokens/s", count] = None
    memory_bytes: Annotated[Bytes | None, "memory"] = None  # peak: weights, KV cache, the largest step, runtime
    num_bad_rows: Annotated[int | None, "bad rows"] = None
    reason: Annotated[str | None, "why not"] = None  # why it does not run, or has no time

    @property
    def order(self) -> tuple[bool, float]:
        """Best first: what runs, by its time."""
        return self.fits is False, float("inf") if self.seconds is None else self.seconds


def memory_of(decision: "Decision") -> int | None:
    """Bytes that a run takes, with its KV cache; None: not predicted."""
    plan, terms = decision.expected_plan, decision.terms
    if plan.pool is None:
        return None
    cache = plan.pool.num_blocks * plan.block_bytes + plan.pool.state_bytes(plan.limits)
    return terms.runtime + terms.weights + terms.activations + terms.graphs + cache


def print_models(rows: Sequence[ModelRow], input_name: str, format_: Format) -> None:
    """Write the table, the fastest model first."""
    ordered = sorted(rows, key=lambda row: row.order)
    found = models_table(ordered, input_name, in_full=format_ is Format.CSV)
    print_tables([found], format_, facts={"fastest": ordered[0].model if ordered[0].seconds else None})


def models_table(ordered: Sequence[ModelRow], input_name: str, *, in_full: bool = False) -> Table:
    """The models in this order, under the answer; `in_full`: with each number in a column of its own."""
    best = ordered[0]
    if best.seconds is None:
        title = f"No time is known for {input_name} with any of these models"
    else:
        title = f"Fastest here: {best.model}, {_time_text(best)} for {input_name}"
        near = [
            row.model
            for row in ordered[1:]
            if row.seconds_low is not None and row.seconds_low < (best.seconds_high or 0.0)
        ]
        if near:
            title += f"; not certain: the times of {', '.join(near)} overlap with it"
        if unknown := [row.model for row in ordered if row.seconds is None and row.fits is not False]:
            title += f"; no time is known of {', '.join(unknown)}"
    notes = [
        "run: the time in the summary of generate, without loading; load: as it took for the calibration",
        "tokens/s: generated tokens per second of the run; memory: weights, KV cache, the largest step and the runtime",
    ]
    if in_full:
        return table(ModelRow, "models", title, [asdict(row) for row in ordered])
    columns = "model fits load_s seconds tokens_per_s memory_bytes"
    columns += " num_bad_rows" if any(row.num_bad_rows for row in ordered) else ""
    columns += " reason" if any(row.reason for row in ordered) else ""
    found = table(ModelRow, "models", title, [asdict(row) for row in ordered], columns, notes=notes)
    times = [{**row, "seconds": _time_text(each)} for row, each in zip(found.rows, ordered, strict=True)]
    shown = [replace(each, show=str) if each.key == "seconds" else each for each in found.columns]
    return replace(found, columns=shown, texts=times)


def _time_text(row: ModelRow) -> str | None:
    if row.seconds is None or row.seconds_low is None or row.seconds_high is None:
        return None
    return expected_text(row.seconds, row.seconds_low, row.seconds_high)
