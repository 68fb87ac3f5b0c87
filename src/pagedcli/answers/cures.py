"""What to change about a run or a prompt file: text moved, sorted or normalized, one cache_salt, the block size, the
pool, the order, the eviction policy. Each cure is the simulated run of the changed requests or limits, and only what is
sure to save a hundredth of the computed tokens is one.

Printed by `generate`, `trace`, `plan`, `simulate`, `explain` and `diff`. `tune` also finds what only timing tells, in
turns with runs as they are.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

from pagedcli.answers.divergence import Divergence, divergences
from pagedcli.answers.hits import Hits, OutOfTimeError, hits
from pagedcli.answers.settings import BLOCK_SIZE, CACHING, KINDS, POOL, Changes, Knob, Setting, Subject, flags_of
from pagedcli.answers.time import Forecast
from pagedcli.answers.time import time as forecast
from pagedcli.answers.turns import Turns
from pagedcli.batch.tokenizer import Tokenizer
from pagedcli.core.limits import Limits
from pagedcli.planning.prompt_sample import PromptSample
from pagedcli.printable import capitalized, duration_text, percent_text

CURES_S = 30.0  # seconds of trials in commands that only look at a run
MOST = 3
WORTH_SAYING = 0.01  # share of the computed tokens, or of the time, from which a change is recommended
LEAST_TIMED_S = 2.0  # seconds of a run: of shorter ones no time is told or compared
_MOST_SETTINGS = 2
_LEAST_TUNED = 0.03  # share of the time: a calibration does not tell smaller differences
_MOST_TIMED = 2  # settings that are timed
_AS_GOOD = 0.001  # gains that differ by less are equal, and the cheaper change is preferred


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """What to change, what it gives and what it costs."""

    kind: str  # the change of text (move, sort, normalize), `one salt`, or the kind of setting
    text: str  # all of it in one or two sentences
    flags: list[str]  # empty for a change of the prompts
    hit_rate: float  # share of the prompts' tokens, as it is
    hit_rate_after: float
    saved_tokens_share: float | None = None  # share of all computed tokens; None: not simulated
    saved_seconds: float | None = None  # None: the time of steps is not known, or the run is short


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and the run with it."""

    setting: Setting
    run: Forecast
    gain: float  # share of the computed tokens that it saves
    is_sure: bool  # whether it saves tokens, takes no more time, and refuses no request more


class Trials:
    """Runs of a subject with other settings or requests, for at most `budget_s` seconds of processor time. `base`: the
    run as it is; None: it has not been simulated yet. `found`: what pools of other sizes find, if that is known."""

    def __init__(
        self, subject: Subject, base: Forecast | None = None, budget_s: float | None = None, found: Hits | None = None
    ) -> None:
        self.subject, self.base, self.found = subject, base, found
        self.tried: list[Trial] = []
        self._runs: dict[tuple[Limits, str], Forecast] = {}
        self._deadline_s = inf if budget_s is None else time.thread_time() + budget_s  # seconds on the thread's clock

    @property
    def as_it_is(self) -> Forecast:
        """Raises: OutOfTimeError."""
        self.base = self.base or self.run(self.subject)
        return self.base

    def run(self, subject: Subject) -> Forecast:
        """Raises: OutOfTimeError."""
        key = subject.limits, subject.reorder
        if subject.workload is not self.subject.workload:
            return self._forecast(subject)
        if key not in self._runs:
            self._runs[key] = self._forecast(subject)
        return self._runs[key]

    def _forecast(self, subject: Subject) -> Forecast:
        return forecast(
            subject.workload,
            subject.plan,
            subject.step_time,
            reorder=subject.reorder,
            read_ahead=subject.read_ahead,
            observe=self._check_time,
            left_out=subject.left_out,
            arrivals=subject.arrivals,
        )

    def _check_time(self, num_done: int) -> None:
        if time.thread_time() > self._deadline_s:
            raise OutOfTimeError

    def try_out(self, setting: Setting) -> Trial:
        found, base = self.run(setting.subject), self.as_it_is
        gain = 1 - found.num_computed_tokens / max(base.num_computed_tokens, 1)
        is_sure = found.num_refused <= base.num_refused and (saved_s(base, found) or 0.0) >= 0
        return Trial(setting, found, gain, is_sure)

    def explore(self, kinds: Iterable[Knob]) -> None:
        """Try the settings of these kinds. Raises: OutOfTimeError."""
        for kind in kinds:
            if kind.needs_caching and not self.subject.limits.enable_prefix_caching:
                continue
            values = self._pools() if kind.key == POOL else kind.values(self.subject, self.as_it_is)
            self.tried += [self.try_out(Setting.of(kind, self.subject, value)) for value in values]

    def _pools(self) -> list[int]:
        """The pool that is enough; where no larger one finds more, but requests are preempted, one that holds them."""
        subject, now = self.subject, self.subject.num_blocks
        if not subject.is_tight(subject.limits):
            return []
        found = self.found or hits(
            subject.in_order, subject.plan, subject.schedule, observe=lambda _, num: self._check_time(num)
        )
        used = found.unlimited.run.facts.peak_used_blocks if found.unlimited.run else 0
        sizes = [found.enough.num_blocks, *([used] if self.as_it_is.num_preemptions else [])]
        return [num_blocks for num_blocks in sizes if num_blocks > now][:1]

    def best(self) -> list[Trial]:
        """The sure ones, best first; of equally good ones the cheapest."""
        order = {kind: place for place, kind in enumerate(KINDS)}
        sure = [trial for trial in self.tried if trial.is_sure and trial.gain >= WORTH_SAYING]
        return sorted(sure, key=lambda each: (-round(each.gain / _AS_GOOD), order.get(each.setting.kind, 0)))


def cures(
    subject: Subject | None,
    *,
    prompts: PromptSample | None = None,
    tokenizer: Tokenizer | None = None,
    block_size: int = 0,
    rates_in_file: Mapping[int, float] = MappingProxyType({}),
    base: Forecast | None = None,
    found: Hits | None = None,
    budget_s: float | None = None,
) -> list[Cure]:
    """What to change, the text of the prompts first. `subject`: None if nothing can be simulated, as of beam searches
    or without a model; then text is judged for `block_size` and an unlimited cache. `prompts`: those of the file or
    run; None: the requests of the subject. `rates_in_file`: see divergences. `base`: the run as it is, if it has been
    simulated; `found`: what pools of other sizes find, if that is known."""
    if subject is not None and prompts is None and subject.has_tokens:
        prompts = PromptSample.of(subject.workload.prompts())
    trials = None
    if subject is not None and subject.workload.requests:
        trials = Trials(subject, base, budget_s, found)
    cured = list[Cure]()
    if prompts is not None and prompts.num_seen:
        size = block_size if subject is None else subject.limits.block_size
        causes = divergences(prompts, size, tokenizer, rates_in_file=rates_in_file)
        cured = _text_cures(causes, size, prompts, trials)
    return [*cured, *_setting_cures(trials)][:MOST]


def _text_cures(causes: list[Divergence], block_size: int, prompts: PromptSample, trials: Trials | None) -> list[Cure]:
    """Each change of the prompts that is sure to raise hits, after those before it."""
    is_off = trials is not None and not trials.subject.limits.enable_prefix_caching
    run, cured, now = trials is not None and _simulated(trials, prompts, causes), list[Cure](), None
    for place, cause in enumerate(causes):
        before, after, is_bound = cause.rates
        of, share, seconds = " in an unlimited cache", None, None
        if cause.is_sample and cause.rate_in_file is None:
            of = " of the drawn prompts in an unlimited cache"
        if run and trials is not None:
            try:
                was = trials.as_it_is if now is None else now
                now = trials.run(_changed(trials.subject, causes[: place + 1]))
            except OutOfTimeError:
                run = False
            else:
                if now.num_refused > was.num_refused or now.hit_rate - was.hit_rate < WORTH_SAYING:
                    continue
                before, after, is_bound, of = was.hit_rate, now.hit_rate, False, ""
                share, seconds = 1 - now.num_computed_tokens / max(1, was.num_computed_tokens), saved_s(was, now)
        to_do = f"with --enable-prefix-caching, {cause.to_do}" if is_off else cause.to_do
        gain = f"raises hits{of} from {percent_text(before)} to {'at least ' * is_bound}{percent_text(after)}"
        saved = "" if not seconds or seconds < 0 else f" and saves about {duration_text(seconds)}"
        finding = ("after that, " if cured else "") + cause.finding(block_size)
        cured.append(
            Cure(
                kind=cause.action,
                text=f"{capitalized(finding)}. {capitalized(to_do)} {gain}{saved}.",
                flags=["--block-size", str(cause.block_size)] if cause.action == "block size" else [],
                hit_rate=before,
                hit_rate_after=after,
                saved_tokens_share=share,
                saved_seconds=seconds,
            )
        )
    return cured


def _simulated(trials: Trials, prompts: PromptSample, causes: list[Divergence]) -> bool:
    """Whether all changed prompts can be simulated: they are all that the run has, and none is scored."""
    requests, kept = trials.subject.workload.requests, prompts.prompts
    return (
        bool(causes)
        and not trials.subject.left_out
        and len(requests) == len(kept) == prompts.num_seen
        and all(
            each.continuations is None and each.token_ids is not None and array("q", prompt.token_ids) == each.token_ids
            for each, prompt in zip(requests, kept, strict=True)
        )
    )


def _changed(subject: Subject, causes: list[Divergence]) -> Subject:
    """The run with prefix caching and after these changes."""
    subject, last = subject.changed(CACHING, True), causes[-1]
    if last.action == "block size":
        subject = subject.changed(BLOCK_SIZE, last.block_size)
    is_salted = all(each.action != "one salt" for each in causes)
    requests = [
        replace(
            request,
            token_ids=array("q", ids),
            num_prompt_tokens=len(ids),
            cache_salt=request.cache_salt if is_salted else None,
        )
        for request, ids in zip(subject.workload.requests, last.changed, strict=True)
    ]
    return replace(subject, workload=replace(subject.workload, requests=requests))


def _setting_cures(trials: Trials | None) -> list[Cure]:
    """The best setting, and the best one of another kind."""
    if trials is None:
        return []
    try:
        if not trials.as_it_is.num_requests:  # nothing fits into the pool, whatever the setting
            return []
        trials.explore([kind for kind in KINDS if not kind.is_timed])
    except OutOfTimeError:
        pass
    best: dict[Knob, Trial] = {}
    for trial in trials.best():
        best.setdefault(trial.setting.kind, trial)
    return [_setting_cure(trials.as_it_is, trial) for trial in [*best.values()][:_MOST_SETTINGS]]


def _setting_cure(before: Forecast, trial: Trial) -> Cure:
    after, setting, seconds = trial.run, trial.setting, saved_s(before, trial.run)
    effects = [f"{percent_text(trial.gain)} fewer tokens are computed"]
    if percent_text(before.hit_rate) != percent_text(after.hit_rate):
        effects.insert(0, f"hits rise from {percent_text(before.hit_rate)} to {percent_text(after.hit_rate)}")
    if before.num_preemptions > after.num_preemptions:
        effects.append(f"preemptions fall from {before.num_preemptions:,} to {after.num_preemptions:,}")
    if seconds:
        effects.append(f"about {duration_text(seconds)} are saved")
    cost = f"; {setting.cost}" if setting.cost else ""
    return Cure(
        kind=setting.kind.name,
        text=f"With {setting.text}, {' and '.join(effects)}{cost}.",
        flags=flags_of(setting.changes),
        hit_rate=before.hit_rate,
        hit_rate_after=after.hit_rate,
        saved_tokens_share=trial.gain,
        saved_seconds=seconds,
    )


def saved_s(before: Forecast, after: Forecast) -> float | None:
    """Seconds that a run takes less; None: steps are not timed, or the run is short."""
    if before.seconds is None or after.seconds is None or before.seconds < LEAST_TIMED_S:
        return None
    return before.seconds - after.seconds


# ---------------------------------------------------------------------- with runs in turns


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best change that the simulator is sure of, and the best one after it of those that only timing tells."""

    exact: Trial | None
    is_timed: bool  # whether the run is long enough, and its steps have been timed
    timed: Setting | None = None
    turns: Turns | None = None  # runs with the second change and without it

    @property
    def changes(self) -> Changes:
        """Configuration keys with their values."""
        found = [*([] if self.exact is None else [self.exact.setting]), *([] if self.timed is None else [self.timed])]
        return {key: value for setting in found for key, value in setting.changes.items()}


def tune(
    subject: Subject,
    time_in_turns: Callable[[Changes, Changes, float], Turns | None],
    *,
    base: Forecast,
    fixed: frozenset[str],
    budget_s: float,
) -> Tuned | None:
    """The best change by simulation, then of the settings that change the speed of steps the one that is faster beyond
    doubt. `time_in_turns` times the run with the changes before and after, within a number of seconds; `base`: the run
    as it is; `fixed`: keys that stay as they are. None: simulating takes longer than `budget_s`, the seconds of each
    part."""
    trials = Trials(subject, base, budget_s)
    is_timed = base.seconds is not None and base.seconds >= LEAST_TIMED_S
    exact: Trial | None = None
    candidates: dict[Knob, tuple[float, Setting]] = {}  # what the one of each kind that may gain most takes, in seconds
    try:
        trials.explore([kind for kind in KINDS if not kind.is_timed and kind.key not in fixed | {POOL}])
        exact = next(iter(trials.best()), None)
        if exact is not None:
            trials.subject, trials.base, trials.tried = exact.setting.subject, exact.run, []
        if is_timed:
            trials.explore([kind for kind in KINDS if kind.is_timed and kind.key not in fixed])
    except OutOfTimeError:
        return None
    for trial in trials.tried if is_timed else []:
        now_s, then_s = trials.as_it_is.seconds or 0.0, trial.run.seconds or 0.0
        is_served = trial.run.num_refused <= trials.as_it_is.num_refused
        if trial.setting.kind.is_timed and is_served and then_s <= (1 + _LEAST_TUNED) * now_s:
            best = candidates.get(trial.setting.kind)
            if best is None or then_s < best[0]:
                candidates[trial.setting.kind] = then_s, trial.setting
    before, found = {} if exact is None else exact.setting.changes, Tuned(exact, is_timed)
    chosen = sorted(candidates.values(), key=lambda each: each[0])[:_MOST_TIMED]
    for _, setting in chosen:
        turns = time_in_turns(before, {**before, **setting.changes}, budget_s / len(chosen))
        if turns is not None and turns.is_sure and turns.gain > (found.turns.gain if found.turns else WORTH_SAYING):
            found = replace(found, timed=setting, turns=turns)
    return found
