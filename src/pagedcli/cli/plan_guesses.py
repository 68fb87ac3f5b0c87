"""What `plan` says about guessing tokens ahead: whether it can pay on this machine, and what it would save."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from pagedcli.printable import duration_text, percent_text

if TYPE_CHECKING:
    from pagedcli.planning.decision import Decision
    from pagedcli.planning.head_gain import HeadGuesses
    from pagedcli.planning.step_time import StepTime
    from pagedcli.simulation.forecast import Forecast


def guess_note(
    decision: "Decision",
    step_time: "StepTime | None",
    found: "Forecast",
    *,
    knows_answers: bool,
    forecast: "Callable[..., Forecast]",
    of_head: "HeadGuesses | None" = None,
) -> str | None:
    """A note for the forecast of a run; None: there is nothing to say. `knows_answers`: the tokens of its answers are
    known, so that it shows how many of them would be guessed; `forecast`: of the same run with another plan, and
    perhaps a `decode_gain`; `of_head`: how many guesses of the model's head were right in an earlier run."""
    from pagedcli.planning.decide import decide
    from pagedcli.planning.step_time import why_rows_are_dear

    asked = decision.config.speculation
    if decision.plan.speculation == "mtp" and of_head is None:
        return (
            "speculation: mtp; how many of its guesses are right shows only a run, see --guesses: counted as if there"
            " were none"
        )
    with_auto = decide(msgspec.structs.replace(decision.config, speculation="auto"), decision.spec, decision.machine)
    guessing = with_auto.plan
    if guessing.no_drafts is not None:
        return None if asked == "off" else f"speculation: off, as {guessing.no_drafts}"
    if step_time is None:
        return None
    if (why := why_rows_are_dear(step_time)) is not None:
        return f"{why}: --speculation auto guesses no tokens here"
    if of_head is not None:
        return _head_note(with_auto, step_time, of_head, forecast)
    if not knows_answers:
        return None
    plan = replace(decision.expected_plan, speculation="auto")
    with_guesses = found if decision.expected_plan.speculation == "auto" else forecast(plan)
    without = found if asked == "off" else forecast(replace(plan, speculation="off"))
    if not with_guesses.seconds or not without.seconds:
        return None
    gain = without.seconds / with_guesses.seconds
    return f"--speculation auto: {duration_text(with_guesses.seconds)}, {gain:.2f} times as fast, by these answers"


def _head_note(
    decision: "Decision", step_time: "StepTime", of_head: "HeadGuesses", forecast: "Callable[..., Forecast]"
) -> str | None:
    from pagedcli.planning.head_gain import head_gain

    if not decision.spec.uses_head:
        return f"--guesses {of_head.name}: the model has no MTP head that --speculation auto would use"
    most = decision.plan.limits.most_sampled
    gain_of = head_gain(decision.footprint, decision.spec.num_layers, step_time, of_head.share, most)
    plan = replace(decision.expected_plan, speculation="off")
    with_head, without = forecast(plan, decode_gain=gain_of), forecast(plan)
    if not with_head.seconds or not without.seconds:
        return None
    return (
        f"--speculation auto: {duration_text(with_head.seconds)}, {without.seconds / with_head.seconds:.2f} times as"
        f" fast, if {percent_text(of_head.share)} of the head's guesses are right as in {of_head.name}"
    )
