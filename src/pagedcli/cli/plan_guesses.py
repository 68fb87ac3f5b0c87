"""What `plan` says about guessing tokens ahead: whether it can pay on this machine, and what it would save."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from pagedcli.printable import duration_text

if TYPE_CHECKING:
    from pagedcli.core.plan import Plan
    from pagedcli.planning.decision import Decision
    from pagedcli.planning.step_time import StepTime
    from pagedcli.simulation.forecast import Forecast


def guess_note(
    decision: "Decision",
    step_time: "StepTime | None",
    found: "Forecast",
    *,
    knows_answers: bool,
    forecast: "Callable[[Plan], Forecast]",
) -> str | None:
    """A note for the forecast of a run; None: there is nothing to say. `knows_answers`: the tokens of its answers are
    known, so that it shows how many of them would be guessed; `forecast`: of the same run with another plan."""
    from pagedcli.planning.decide import decide
    from pagedcli.planning.step_time import why_rows_are_dear

    asked = decision.config.speculation
    if decision.plan.speculation == "mtp":
        return "speculation: mtp; how many of its guesses are right shows only the run: counted as if there were none"
    guessing = decide(
        msgspec.structs.replace(decision.config, speculation="auto"), decision.spec, decision.machine
    ).plan
    if guessing.no_drafts is not None:
        return None if asked == "off" else f"speculation: off, as {guessing.no_drafts}"
    if step_time is None:
        return None
    if (why := why_rows_are_dear(step_time)) is not None:
        return f"{why}: --speculation auto guesses no tokens here"
    if not knows_answers:
        return None
    plan = replace(decision.expected_plan, speculation="auto")
    with_guesses = found if decision.expected_plan.speculation == "auto" else forecast(plan)
    without = found if asked == "off" else forecast(replace(plan, speculation="off"))
    if not with_guesses.seconds or not without.seconds:
        return None
    gain = without.seconds / with_guesses.seconds
    return f"--speculation auto: {duration_text(with_guesses.seconds)}, {gain:.2f} times as fast, by these answers"
