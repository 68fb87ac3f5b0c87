"""What to change about a run: other settings, each tried on the same requests with the real scheduler, and the best.

The one adviser of `generate`, `trace`, `plan`, `simulate`, `explain` and `report`: for the same requests and limits all
of them give the same answer. What it promises is what a run with the advised settings does: pools, policies and orders
are exact by simulation. Settings that change the speed of a step are advised only where runs with them, timed in turns
with runs without them, were faster beyond doubt, see `turns`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.planning.step_time import StepTime, step_time_named
from pagedcli.printable import duration_text, percent_text, plural
from pagedcli.simulation.forecast import Forecast, forecast
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.settings import KINDS, POOL, Kind, Setting, Subject, flags_of
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
_MOST_TIMED = 2  # settings that one command times
NOT_TIMED = "not timed here"
_HOW_TIMED = "plan --measure times the most promising ones"
_POOL_STEPS = 8  # the recommended pool is the smallest one to within this part of the present one
_AS_GOOD = 0.001  # gains that differ by less are equal, and the cheaper change is preferred
_MOST_ROUNDS = 6  # changes that are combined


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and the run with it."""

    setting: Setting
    forecast: Forecast
    gain: float  # share of the time, or of the computed tokens, that it saves; expected, if it is not certain
    is_certain: bool  # whether the gain is exact by simulation, or timed beyond doubt
    first_use_s: float = 0.0  # seconds of it for memory that is used for the first time, more than in the run
    turns: Turns | None = None  # None: not timed

    @property
    def may_be_timed(self) -> bool:
        """Whether runs in turns could still tell what it gains."""
        return not self.is_certain and (self.turns is None or not self.turns.is_decided)

    def timed(self, turns: Turns) -> "Trial":
        """What runs in turns say of it."""
        return replace(self, turns=turns, gain=turns.gain, is_certain=turns.is_sure)

    @property
    def cost(self) -> str:
        if not self.is_certain:
            return NOT_TIMED if self.turns is None else self.turns.text
        memory = f"memory used for the first time: {duration_text(self.first_use_s)}"
        return "; ".join(filter(None, [self.setting.cost, memory if self.first_use_s > 0 else ""]))


@dataclass(frozen=True, slots=True)
class Advice:
    """What was tried, best first, and what to change."""

    base: Forecast | None = None  # the run as it is; None: not simulated
    trials: tuple[Trial, ...] = ()
    by_time: bool = False
    not_tried: str | None = None  # what was left out, and why
    is_short: bool = False  # the run takes less than LEAST_TIMED_S: runs in turns would tell nothing

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

    def value(self, key: str, default: Any) -> Any:
        """The advised value of a configuration key."""
        return next((each.setting.changes[key] for each in self.best if key in each.setting.changes), default)

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
        num_untimed, is_sure = self.num_untimed, all(trial.is_certain for trial in self.trials)
        num_tried = len(self.trials) - num_untimed
        tried = f"{plural(num_tried, 'other setting')} tried in the simulator" if num_tried else "none could be tried"
        how = "this run is too short for it" if self.is_short else "plan --measure"
        untimed = f"{plural(num_untimed, 'setting')} that only timing tells ({how})" if num_untimed else None
        return [
            Verdict(
                finding="nothing to change" if is_sure else "no other setting is sure to be better",
                measure=measure,
                certainty=tried if self.trials else "no other setting would matter",
                not_looked_at="; ".join(filter(None, [left, untimed])) or None,
            )
        ]

    def text(self) -> str:
        """What to change, in words."""
        return " ".join(paragraph(self.verdicts()))

    def _verdict(self, trial: Trial) -> Verdict:
        low, high = (None, None) if trial.turns is None else trial.turns.interval
        how = "timed in turns" if trial.turns else "simulated" if self.by_time else "exact by simulation"
        details = [how, *self.effects(trial)]
        if trial.setting.cost:
            details.append(f"costs {trial.setting.cost}")
        return Verdict(
            finding=f"with {trial.setting.text}",
            measure="time" if self.by_time else "to compute",
            after=trial.gain,
            low=low,
            high=high,
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
    def num_untimed(self) -> int:
        """Settings of which only runs in turns would tell."""
        return sum(trial.may_be_timed and trial.turns is None for trial in self.trials)

    @property
    def notes(self) -> list[str]:
        """How sure the gains are."""
        is_exact = any(trial.is_certain and trial.turns is None for trial in self.trials)
        num_untimed = self.num_untimed
        exact = ["pools, policies and orders: tokens, hits and preemptions are exact, by simulation"]
        how = f"a run under {LEAST_TIMED_S:.0f} s is too short" if self.is_short else _HOW_TIMED
        untimed = [f"{plural(num_untimed, 'setting')} {NOT_TIMED}: {how}"]
        return exact * is_exact + untimed * (num_untimed > 0)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "advice": self.text(),
            "advised_flag": self.flag,
            "advised": [{"flags": flags_of(each.setting.changes), **_trial_row(each)} for each in self.best],
        }


def _trial_row(trial: Trial) -> dict[str, Any]:
    row = _row(trial.setting.text, trial.cost, trial.forecast, trial.gain)
    if not trial.setting.kind.is_timed and trial.is_certain:
        return row
    low, high = (None, None) if trial.turns is None or trial.turns.is_short else trial.turns.interval
    return {
        **row,
        "seconds": None,
        "saved": trial.gain if trial.is_certain else None,
        "saved_low": low,
        "saved_high": high,
    }


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
            calibration=state.started.step_times,
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


def in_order(workload: Workload) -> bool:
    """Whether the rows were started in the order of their file."""
    numbers = [int(each.request_id.partition("/")[0]) for each in workload.requests if each.request_id[:1].isdecimal()]
    return all(before <= after for before, after in pairwise(numbers))


# ---------------------------------------------------------------------- the search


class OutOfTimeError(Exception):
    """The time for trials is over."""


def advise(subject: Subject, *, base: Forecast | None = None, budget_s: float | None = None) -> Advice:
    """Try other settings, for at most `budget_s` seconds of processor time; the best that change the speed of steps are
    then timed, if that is wanted. `base`: the run as it is, if it has been simulated."""
    if not subject.workload.requests:
        return Advice(not_tried="no request was served")
    deadline_s = None if budget_s is None else time.thread_time() + budget_s
    reasons, search = [], _Search(subject, deadline_s, None if base is None else base.without_text)
    try:
        search.start()
        if not search.run_as_it_is.num_requests:  # nothing takes no time, whatever the setting
            return Advice(not_tried=f"no request fits into the pool of {plural(subject.num_blocks, 'block')}")
        search.explore()
    except OutOfTimeError:
        if not search.trials:
            longer = f"; pagedcli explain takes up to {ADVICE_S:.0f} s" if (budget_s or 0.0) < ADVICE_S else ""
            return Advice(not_tried=f"trying other settings takes over {budget_s:.1f} s{longer}")
        reasons.append(f"the rest, as trials end after {budget_s:.1f} s")
    if not subject.has_tokens and subject.limits.enable_prefix_caching:
        recorded = " (--record-tokens)" if subject.workload.format == "pagedcli" else ""
        reasons.append(f"another order, which needs the tokens{recorded}")
    if subject.time_in_turns is not None and not search.by_time:
        short = f"a run under {LEAST_TIMED_S:.0f} s is too short for that"
        why = short if subject.step_time is not None else "there is no calibration"
        reasons.append(f"settings that change the time of a step, as {why}")
    search.time_the_best()
    is_short = subject.step_time is not None and not search.by_time
    return Advice(search.base, tuple(search.sorted()), search.by_time, "; ".join(reasons) or None, is_short)


@dataclass(slots=True)
class _Search:
    subject: Subject
    deadline_s: float | None
    base: Forecast | None = None
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
            self._runs[key] = found.without_text  # so that commands agree that do not know which prompts were text
        return self._runs[key]

    def _check_time(self, num_done: int) -> None:
        if self.deadline_s is not None and time.thread_time() > self.deadline_s:
            raise OutOfTimeError

    def try_out(self, setting: Setting) -> Trial:
        found, base = self.run(setting.subject), self.run_as_it_is
        gain = 1 - _score(found) / max(_score(base), 1e-12)
        if found.num_refused > base.num_refused:
            gain = -1.0  # some rows would be refused
        more_s = found.parts.get("memory", 0.0) - base.parts.get("memory", 0.0)
        is_shown = setting.kind.key == POOL and more_s > _AS_GOOD * (base.seconds or 0.0)
        # Less time for as many tokens is only what a calibration says of steps of other sizes.
        fewest = (1 - WORTH_SAYING) * base.num_computed_tokens
        is_exact = not self.by_time or gain <= 0 or found.num_computed_tokens <= fewest
        is_certain = is_exact and not setting.kind.is_timed
        trial = Trial(setting, found, gain, is_certain, more_s if is_shown else 0.0)
        turns = self.subject.kept_turns(setting.changes) if self.by_time and not is_certain else None
        return trial if turns is None else trial.timed(turns)

    def explore(self, *, without: frozenset[str] = frozenset()) -> None:
        """Try all settings but those of some keys. Raises: OutOfTimeError."""
        subject = self.subject
        for kind in KINDS:
            is_possible = subject.limits.enable_prefix_caching or not kind.needs_caching
            if not is_possible or kind.key in without:
                continue
            for value in kind.values(subject, self.run_as_it_is):
                setting = Setting.of(kind, subject, value)
                if kind.is_timed and not self._may_be_timed(setting):
                    continue
                trial = self.try_out(setting)
                if kind.key == POOL:
                    trial = self._smallest_as_good(kind, trial)
                self.trials.append(trial)

    def _may_be_timed(self, setting: Setting) -> bool:
        """Whether a setting that changes the speed of steps has been timed, or is timed or listed without that."""
        subject = self.subject
        if subject.lists_untimed or (self.by_time and subject.time_in_turns is not None):
            return True
        return self.by_time and subject.kept_turns(setting.changes) is not None

    def _smallest_as_good(self, kind: Kind, largest: Trial) -> Trial:
        """The smallest pool that is as good as the largest one."""
        found, low = largest, self.subject.num_blocks
        high = found.setting.subject.num_blocks
        try:
            while largest.gain >= WORTH_SAYING and high - low > max(1, self.subject.num_blocks // _POOL_STEPS):
                middle = (low + high) // 2
                trial = self.try_out(Setting.of(kind, self.subject, middle))
                if trial.gain > largest.gain - _AS_GOOD / 2:
                    found, high = trial, middle
                else:
                    low = middle
        except OutOfTimeError:  # what has been tried counts
            self.trials.append(found)
            raise
        return found

    def time_the_best(self) -> None:
        """Time the settings in turns that may gain most, but for those of which that is known."""
        time_in_turns = self.subject.time_in_turns
        if time_in_turns is None or not self.by_time:
            return
        expected = [trial for trial in self.sorted() if trial.may_be_timed and trial.gain >= -_LEAST_TUNED]
        expected = expected[:_MOST_TIMED]
        for trial in expected:
            turns = time_in_turns(self.subject, trial.setting.changes, self.subject.measure_s / len(expected))
            if turns is not None:
                self.trials[self.trials.index(trial)] = trial.timed(turns)

    def sorted(self) -> list[Trial]:
        """Best first, then what is not certain; of equally good ones the cheapest."""
        served = [trial for trial in self.trials if trial.gain > -1.0]
        return sorted(
            served, key=lambda each: (not each.is_certain, -round(each.gain / _AS_GOOD), KINDS.index(each.setting.kind))
        )


def _score(run: Forecast) -> float:
    """What is compared: seconds, or tokens that the model computes."""
    return run.num_computed_tokens if run.seconds is None else run.seconds


def enough_blocks(subject: Subject, own: Forecast | None, *, budget_s: float | None = None) -> int | None:
    """The smallest pool, to within an eighth, in which the run computes as few tokens and preempts as little as in its
    own (`own`: that run, if it has been simulated). None: the time was not enough."""
    search = _Search(subject, None if budget_s is None else time.thread_time() + budget_s)
    try:
        own = own or search.run(subject)
        low, high = 0, subject.plan.num_blocks
        while high - low > max(1, high // _POOL_STEPS):
            middle = (low + high) // 2
            found = search.run(subject.changed(POOL, middle))
            is_enough = (
                found.num_refused == own.num_refused
                and found.num_preemptions <= own.num_preemptions
                and found.num_computed_tokens <= own.num_computed_tokens * (1 + _AS_GOOD)
            )
            low, high = (low, middle) if is_enough else (middle, high)
    except OutOfTimeError:
        return None
    return high


# ---------------------------------------------------------------------- several changes at once


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best settings found by changing one after the other."""

    base: Forecast
    found: Forecast
    changes: dict[str, Any]  # configuration key -> value
    by_time: bool
    turns: Turns | None = None  # None: no setting changes the speed of steps

    @property
    def gain(self) -> float:
        return 1 - _score(self.found) / max(_score(self.base), 1e-12) if self.turns is None else self.turns.gain


def tune(
    subject: Subject,
    *,
    base: Forecast | None = None,
    fixed: frozenset[str] = frozenset(),
    budget_s: float | None = None,
) -> Tuned | None:
    """Change what gains most, then look again, until nothing gains enough; settings that change the speed of steps are
    kept only if runs in turns are faster with them beyond doubt. `base`: the run as it is, if it has been simulated.
    `fixed`: keys that stay as they are. None: the time was not enough for the first round."""
    subject = replace(subject, lists_untimed=False)
    deadline_s = None if budget_s is None else time.thread_time() + budget_s
    search = _Search(subject, deadline_s, None if base is None else base.without_text)
    changes: dict[str, Any] = {}
    is_sure = True
    try:
        search.start()
    except OutOfTimeError:
        return None
    first = found = search.run_as_it_is
    least = _LEAST_TUNED if search.by_time else WORTH_SAYING
    for trial in _rounds(search, fixed | {POOL}, least):
        changes |= trial.setting.changes
        is_sure &= trial.is_certain
        found, now = trial.forecast, trial.setting.subject
        if POOL in changes:
            changes[POOL] = now.num_blocks
    tuned = Tuned(first, found, changes, search.by_time)
    if subject.time_in_turns is None or is_sure:
        return tuned
    turns = subject.kept_turns(changes)
    if turns is None or not turns.is_decided:
        turns = subject.time_in_turns(subject, changes, subject.measure_s)
    if turns is None or not turns.is_sure or turns.gain < WORTH_SAYING:
        return tune(replace(subject, time_in_turns=None), base=base, fixed=fixed, budget_s=budget_s)
    return replace(tuned, turns=turns)


def _rounds(search: _Search, fixed: frozenset[str], least: float) -> Iterator[Trial]:
    """The best change, then the best one after it, while one gains at least so much."""
    num_left = _MOST_ROUNDS
    while num_left:
        num_left -= 1
        try:
            search.explore(without=fixed)
        except OutOfTimeError:  # what has been tried counts
            num_left = 0
        may_time = search.subject.time_in_turns is not None
        tried = [trial for trial in search.sorted() if trial.is_certain or (trial.may_be_timed and may_time)]
        best = max(tried, key=lambda trial: trial.gain, default=None)
        if best is None or best.gain < least:
            return
        yield best
        search.subject, search.base, search.trials = best.setting.subject, best.forecast, []
