"""What the adviser found, as verdicts."""

from pagedcli.printable import plural
from pagedcli.simulation.advice import Advice, Trial
from pagedcli.verdicts import Verdict


def advice_verdicts(advice: Advice, *, or_nothing: bool = True, not_looked_at: str | None = None) -> list[Verdict]:
    """The best settings; if there is none, that there is nothing to change, unless something else has been found.
    `not_looked_at`: by those who looked for something else."""
    left = "; ".join(filter(None, [not_looked_at, advice.not_tried])) or None
    found = [_of_trial(advice, trial, left) for trial in advice.best]
    if found or not or_nothing or advice.base is None:
        return found
    num_untimed = advice.num_untimed
    num_tried = len(advice.trials) - num_untimed
    tried = plural(num_tried, "other setting") if num_tried else "no other setting"
    untimed = f"{plural(num_untimed, 'setting')} not timed here (plan --measure)" if num_untimed else None
    return [
        Verdict(
            finding="nothing to change",
            measure="time" if advice.by_time else "computed tokens",
            certainty=f"{tried} tried in the simulator",
            not_looked_at="; ".join(filter(None, [left, untimed])) or None,
        )
    ]


def _of_trial(advice: Advice, trial: Trial, not_looked_at: str | None) -> Verdict:
    exact = "simulated" if advice.by_time else "exact by simulation"
    details = [exact if trial.turns is None else f"{trial.turns.text}, timed in turns", *advice.effects(trial)]
    if trial.setting.cost:
        details.append(f"costs {trial.setting.cost}")
    return Verdict(
        finding=f"with {trial.setting.text}",
        measure="time" if advice.by_time else "to compute",
        after=trial.gain,
        certainty="; ".join(details),
        not_looked_at=not_looked_at,
    )
