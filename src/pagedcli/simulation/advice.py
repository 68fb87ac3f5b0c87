"""What to change about a run: other settings, each tried on the same requests with the real scheduler, and the best.

The one adviser of `generate`, `trace`, `plan`, `simulate`, `explain` and `report`: for the same requests and limits all
of them give the same answer. What it promises is what a run with the advised settings does: pools, policies and orders
are exact by simulation. Settings that change the speed of a step are tried by `plan --tune` alone, in turns with runs
without them, see `turns`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagedcli.answers.hits import Hits, OutOfTimeError, hits
from pagedcli.answers.time import Forecast
from pagedcli.answers.time import time as forecast
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.planning.step_time import StepTime, step_time_named
from pagedcli.printable import percent_text, plural
from pagedcli.simulation.requests import Requests
from pagedcli.simulation.run import Schedule
from pagedcli.simulation.settings import KINDS, POOL, Changes, Kind, Setting, Subject, flags_of
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.simulation.turns import Turns
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState
from pagedcli.verdicts import Verdict, paragraph

ADVICE_S = 30.0  # seconds of trials in commands that only look at a run
LEAST_TIMED_S = 2.0  # seconds of a run: shorter ones are compared by the tokens that are computed
WORTH_SAYING = 0.01  # share of the computed tokens, or of the time, from which a change is recommended
_LEAST_TUNED = 0.03  # share of the time: a calibration does not tell smaller differences
_MOST_TIMED = 2  # settings that are timed
_ONLY_TIMING = "only timing tells"
_AS_GOOD = 0.001  # gains that differ by less are equal, and the cheaper change is preferred


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and the run with it."""

    setting: Setting
    forecast: Forecast
    gain: float  # share of the time, or of the computed tokens, that it saves; expected, if it is not certain
    is_certain: bool  # whether the gain is exact by simulation

    @property
    def cost(self) -> str:
        return self.setting.cost if self.is_certain else _ONLY_TIMING


@dataclass(frozen=True, slots=True)
class Advice:
    """What was tried, best first, and what to change."""

    base: Forecast | None = None  # the run as it is; None: not simulated
    trials: tuple[Trial, ...] = ()
    by_time: bool = False
    not_tried: str | None = None  # what was left out, and why

    @property
    def best(self) -> tuple[Trial, ...]:
        """The best change, and the best one of another kind; none that gains less than WORTH_SAYING."""
        worthy = [trial for trial in self.trials if trial.gain >= WORTH_SAYING and trial.is_certain]
        others = [trial for trial in worthy if trial.setting.kind != worthy[0].setting.kind]
        return tuple(worthy[:1] + others[:1])

    @property
    def flag(self) -> str | None:
        """The first flag of the best change."""
        return flags_of(self.best[0].setting.changes)[0] if self.best else None

    def verdicts(self, *, or_nothing: bool = True, not_looked_at: str | None = None) -> list[Verdict]:
        """The best changes; if there is none, why not, unless something else has been found. `not_looked_at`: by those
        who looked for something else."""
        left = "; ".join(filter(None, [not_looked_at, self.not_tried])) or None
        if self.best:
            found = [self._verdict(trial) for trial in self.best]
            return [*found[:-1], replace(found[-1], not_looked_at=left)]
        if not or_nothing:
            return []
        measure = "time" if self.by_time else "to compute"
        if self.base is None:
            finding = "whether other settings are better is not known"
            why = self.not_tried or "none was tried"
            return [Verdict(finding=finding, measure=measure, certainty=why, not_looked_at=not_looked_at)]
        is_sure = all(trial.is_certain for trial in self.trials)
        tried = f"{plural(len(self.trials), 'other setting')} tried in the simulator"
        return [
            Verdict(
                finding="nothing to change" if is_sure else "no other setting is sure to be better",
                measure=measure,
                certainty=tried if self.trials else "no other setting would matter",
                not_looked_at=left,
            )
        ]

    def text(self) -> str:
        """What to change, in words."""
        return " ".join(paragraph(self.verdicts()))

    def _verdict(self, trial: Trial) -> Verdict:
        details = ["simulated" if self.by_time else "exact by simulation", *self.effects(trial)]
        if trial.setting.cost:
            details.append(f"costs {trial.setting.cost}")
        return Verdict(
            finding=f"with {trial.setting.text}",
            measure="time" if self.by_time else "to compute",
            after=trial.gain,
            certainty="; ".join(details),
        )

    def effects(self, trial: Trial) -> list[str]:
        """What a setting changes besides time and computed tokens."""
        assert self.base is not None, "it is compared with it"
        now, then = self.base, trial.forecast
        found = []
        if percent_text(now.hit_rate) != percent_text(then.hit_rate):
            found.append(f"hit rate {percent_text(now.hit_rate)} -> {percent_text(then.hit_rate)}")
        if now.num_preemptions != then.num_preemptions:
            found.append(f"preemptions {now.num_preemptions:,} -> {then.num_preemptions:,}")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """All that was tried, after the run as it is."""
        if self.base is None:
            return []
        return [_row("as it is", "", self.base, 0.0), *map(_trial_row, self.trials)]

    @property
    def notes(self) -> list[str]:
        """How sure the gains are."""
        exact = ["pools, policies and orders: tokens, hits and preemptions are exact, by simulation"]
        return exact * any(trial.is_certain for trial in self.trials)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "advice": self.text(),
            "advised_flag": self.flag,
            "advised": [{"flags": flags_of(each.setting.changes), **_trial_row(each)} for each in self.best],
        }


def _trial_row(trial: Trial) -> dict[str, Any]:
    row = _row(trial.setting.text, trial.cost, trial.forecast, trial.gain)
    return row if trial.is_certain else {**row, "seconds": None, "saved": None}


def _row(setting: str, cost: str, run: Forecast, gain: float) -> dict[str, Any]:
    return {
        "setting": setting,
        "saved": gain,
        "seconds": run.seconds,
        "num_computed_tokens": run.num_computed_tokens,
        "hit_rate": run.hit_rate,
        "num_preemptions": run.num_preemptions,
        "peak_used_blocks": run.peak_used_blocks,
        "cost": cost,
    }


class Adviser(RecordedRequests):
    """A view of a recorded run that ends in advice, so that one reading of the trace is enough."""

    def advice(self, state: PoolState, *, budget_s: float | None = None) -> Advice:
        """What to change about the run. `state`: at the end of the trace."""
        workload = self.finish()
        if not workload.requests:
            return Advice(not_tried="no request finished in this run")
        if workload.num_left_out:
            return Advice(not_tried="the run has beam searches, which are not simulated")
        subject = Subject(
            workload,
            recorded_plan(state),
            may_reorder=in_order(workload),
            step_time=timed_of(state),
        )
        return advise(subject, budget_s=budget_s)


def recorded_advice(path: Path, *, budget_s: float | None = None) -> Advice:
    """What to change about a recorded run. Raises: TraceError if the trace is damaged."""
    adviser = Adviser()
    return adviser.advice(fold(TraceReader(path), adviser), budget_s=budget_s)


def recorded_plan(state: PoolState) -> Plan:
    """The engine of a recorded run."""
    started, slots = state.started, state.slots
    limits = Limits.of(started)
    if slots is not None:
        limits = replace(
            limits, num_state_slots=slots.num_slots, state_bytes=slots.slot_bytes, checkpoints=slots.policy
        )
    return Plan(limits=limits, model=started.model, device=started.device, block_bytes=started.block_bytes)


def timed_of(state: PoolState) -> StepTime | None:
    """The time of a recorded run's steps, if the machine that made it is this one, and has been calibrated."""
    name = state.started.step_times
    return None if name is None else step_time_named(name)


def in_order(workload: Requests) -> bool:
    """Whether the rows were started in the order of their file."""
    numbers = [int(each.request_id.partition("/")[0]) for each in workload.requests if each.request_id[:1].isdecimal()]
    return all(before <= after for before, after in pairwise(numbers))


# ---------------------------------------------------------------------- the search


def advise(
    subject: Subject, *, base: Forecast | None = None, budget_s: float | None = None, found: Hits | None = None
) -> Advice:
    """Try other settings that do not change the speed of a step, for at most `budget_s` seconds of processor time.
    `base`: the run as it is, if it has been simulated; `found`: what pools of other sizes find, if that is known."""
    if not subject.workload.requests:
        return Advice(not_tried="no request was served")
    deadline_s = None if budget_s is None else time.thread_time() + budget_s
    reasons, search = [], _Search(subject, deadline_s, base, found)
    try:
        search.start()
        if not search.run_as_it_is.num_requests:  # nothing takes no time, whatever the setting
            return Advice(not_tried=f"no request fits into the pool of {plural(subject.num_blocks, 'block')}")
        search.explore([kind for kind in KINDS if not kind.is_timed])
    except OutOfTimeError:
        if not search.trials:
            longer = f"; pagedcli explain takes up to {ADVICE_S:.0f} s" if (budget_s or 0.0) < ADVICE_S else ""
            return Advice(not_tried=f"trying other settings takes over {budget_s:.1f} s{longer}")
        reasons.append(f"the rest, as trials end after {budget_s:.1f} s")
    if not subject.has_tokens and subject.limits.enable_prefix_caching:
        recorded = " (--record-tokens)" if subject.workload.format == "pagedcli" else ""
        reasons.append(f"another order, which needs the tokens{recorded}")
    return Advice(search.base, tuple(search.sorted()), search.by_time, "; ".join(reasons) or None)


@dataclass(slots=True)
class _Search:
    subject: Subject
    deadline_s: float | None
    base: Forecast | None = None
    found: Hits | None = None
    trials: list[Trial] = field(default_factory=list)
    _runs: dict[tuple[Limits, str], Forecast] = field(default_factory=dict)

    @property
    def run_as_it_is(self) -> Forecast:
        assert self.base is not None, "the run as it is comes first"
        return self.base

    @property
    def by_time(self) -> bool:
        return self.subject.step_time is not None

    def start(self) -> None:
        """Simulate the run as it is. A short one is not compared by time. Raises: OutOfTimeError."""
        self.base = self.base or self.run(self.subject)
        if self.base.seconds is not None and self.base.seconds < LEAST_TIMED_S:
            self.subject, self.base = replace(self.subject, step_time=None), replace(self.base, seconds=None)
            self._runs.clear()

    def run(self, subject: Subject) -> Forecast:
        """Raises: OutOfTimeError."""
        key = subject.limits, subject.reorder
        if key not in self._runs:
            found = forecast(
                subject.workload,
                subject.plan,
                subject.step_time,
                reorder=subject.reorder,
                read_ahead=subject.read_ahead,
                observe=self._check_time,
                left_out=subject.left_out,
                arrivals=subject.arrivals,
            )
            self._runs[key] = found
        return self._runs[key]

    def _check_time(self, num_done: int) -> None:
        if self.deadline_s is not None and time.thread_time() > self.deadline_s:
            raise OutOfTimeError

    def try_out(self, setting: Setting) -> Trial:
        found, base = self.run(setting.subject), self.run_as_it_is
        gain = 1 - _score(found) / max(_score(base), 1e-12)
        if found.num_refused > base.num_refused:
            gain = -1.0  # some rows would be refused
        # Less time for as many tokens is only what a calibration says of steps of other sizes.
        fewest = (1 - WORTH_SAYING) * base.num_computed_tokens
        is_exact = not self.by_time or gain <= 0 or found.num_computed_tokens <= fewest
        is_certain = is_exact and not setting.kind.is_timed
        return Trial(setting, found, gain, is_certain)

    def explore(self, kinds: Iterable[Kind]) -> None:
        """Try the settings of these kinds. Raises: OutOfTimeError."""
        subject = self.subject
        for kind in kinds:
            if kind.needs_caching and not subject.limits.enable_prefix_caching:
                continue
            values = self._pools() if kind.key == POOL else kind.values(subject, self.run_as_it_is)
            self.trials += [self.try_out(Setting.of(kind, subject, value)) for value in values]

    def _pools(self) -> list[int]:
        """The pool that is enough; where no larger one finds more, but requests are preempted, one that holds them."""
        subject, now = self.subject, self.subject.num_blocks
        if not subject.is_tight(subject.limits):
            return []
        schedule = subject.arrivals or Schedule(read_ahead=subject.read_ahead)
        found = self.found or hits(
            subject.in_order, subject.plan, schedule, observe=lambda _, num: self._check_time(num)
        )
        used = found.unlimited.run.facts.peak_used_blocks if found.unlimited.run else 0
        sizes = [found.enough.num_blocks, *([used] if self.run_as_it_is.num_preemptions else [])]
        return [num_blocks for num_blocks in sizes if num_blocks > now][:1]

    def sorted(self) -> list[Trial]:
        """Best first, then what is not certain; of equally good ones the cheapest."""
        served = [trial for trial in self.trials if trial.gain > -1.0]
        return sorted(
            served, key=lambda each: (not each.is_certain, -round(each.gain / _AS_GOOD), KINDS.index(each.setting.kind))
        )


def _score(run: Forecast) -> float:
    """What is compared: seconds, or tokens that the model computes."""
    return run.num_computed_tokens if run.seconds is None else run.seconds


# ---------------------------------------------------------------------- with runs in turns


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best change that the simulator is sure of, and the best one after it of those that only timing tells."""

    exact: Trial | None
    by_time: bool  # whether the run is long enough, and its steps have been timed
    timed: Trial | None = None
    turns: Turns | None = None  # runs with the second change and without it

    @property
    def changes(self) -> Changes:
        """Configuration keys with their values."""
        return {key: value for each in (self.exact, self.timed) if each for key, value in each.setting.changes.items()}


def tune(
    subject: Subject,
    time_in_turns: Callable[[Changes, Changes, float], Turns | None],
    *,
    base: Forecast,
    fixed: frozenset[str],
    budget_s: float,
) -> Tuned | None:
    """The best change by simulation, then of the settings that change the speed of steps the one that is faster beyond
    doubt. `time_in_turns` times the run with the changes before and after, within so many seconds; `base`: the run as
    it is; `fixed`: keys that stay as they are. None: simulating takes longer than `budget_s`, the seconds of each
    part."""
    search = _Search(subject, time.thread_time() + budget_s, base)
    exact: Trial | None = None
    candidates: dict[str, Trial] = {}  # the one of each kind that may gain most
    try:
        search.start()
        search.explore([kind for kind in KINDS if not kind.is_timed and kind.key not in fixed | {POOL}])
        exact = next((each for each in search.sorted() if each.is_certain and each.gain >= WORTH_SAYING), None)
        if exact is not None:
            search.subject, search.base, search.trials = exact.setting.subject, exact.forecast, []
        if search.by_time:
            search.explore([kind for kind in KINDS if kind.is_timed and kind.key not in fixed])
    except OutOfTimeError:
        return None
    for trial in search.sorted():
        if trial.setting.kind.is_timed and trial.gain >= -_LEAST_TUNED:
            candidates.setdefault(trial.setting.kind.key, trial)
    before, found = {} if exact is None else exact.setting.changes, Tuned(exact, search.by_time)
    chosen = [*candidates.values()][:_MOST_TIMED]
    for trial in chosen:
        turns = time_in_turns(before, {**before, **trial.setting.changes}, budget_s / len(chosen))
        if turns is not None and turns.is_sure and turns.gain > (found.turns.gain if found.turns else WORTH_SAYING):
            found = replace(found, timed=trial, turns=turns)
    return found
