"""What to change about a run: other settings, each tried on the same requests with the real scheduler, and the best.

The one adviser of `generate`, `trace`, `plan`, `simulate`, `explain` and `report`: for the same requests and limits all
of them give the same answer. What it promises is what a run with the advised settings does. Settings that change the
speed of a step are advised only where a run with them has been timed in turns with one without them, see `Turns`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pagedcli.core.budget import blocks_for
from pagedcli.core.eviction import POLICIES
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import BLOCK_SIZES, SMALLEST_RECOMMENDED
from pagedcli.planning.step_time import StepTime, step_time_named
from pagedcli.printable import byte_text, duration_text, percent_text, plural
from pagedcli.simulation.forecast import Forecast, forecast
from pagedcli.simulation.requests import TraceRequest, Workload, largest_output
from pagedcli.simulation.run import Schedule
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState

ADVICE_S = 30.0  # seconds of trials in commands that only look at a run
LEAST_TIMED_S = 2.0  # seconds of a run: shorter ones are compared by the tokens that are computed
WORTH_SAYING = 0.01  # share of the computed tokens, or of the time, from which a change is recommended
_LEAST_TUNED = 0.03  # share of the time: a calibration does not tell smaller differences
_MOST_TIMED = 2  # settings that one command times
_MOST_POOLS = 4  # the largest pool that is tried, in pools of the run
_POOL_STEPS = 8  # the recommended pool is the smallest one to within this part of the present one
_AS_GOOD = 0.001  # gains that differ by less are equal, and the cheaper change is preferred
_MOST_ROUNDS = 6  # changes that are combined
CACHING, ORDER = "engine.enable_prefix_caching", "run.reorder"
BLOCK_SIZE, POOL, KV_DTYPE = "engine.block_size", "engine.num_gpu_blocks_override", "engine.kv_cache_dtype"
Changes = Mapping[str, Any]
"""Configuration keys with other values. They belong together."""


def flags_of(changes: Changes) -> list[str]:
    """The flags that set these keys."""
    words = []
    for key, value in changes.items():
        words.append("--" + key.partition(".")[2].replace("_", "-"))
        words += [] if value is True else [str(value)]
    return words


@dataclass(frozen=True, slots=True)
class Turns:
    """The same rows with the settings of a run and with others, in turns. Seconds of each pass."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Share of the time that the other settings save; 0 where passes with and without them overlap."""
        if max(self.after_s) >= min(self.before_s):
            return 0.0
        return 1 - median(self.after_s) / median(self.before_s)


@dataclass(frozen=True, slots=True)
class SmallerKV:
    """A smaller type of the KV cache. It rounds differently: tried only where the user allows it."""

    name: str  # value of kv_cache_dtype
    block_bytes: int
    own_block_bytes: int  # bytes of a block of as many tokens in the run's type


@dataclass(frozen=True, slots=True)
class Subject:
    """A run: its requests in the order in which they come, and the engine that serves them."""

    workload: Workload
    plan: Plan  # with the pool
    reorder: str = "none"  # order of the run, if the requests are in the order of the file
    may_reorder: bool = True  # whether --reorder can be tried
    read_ahead: int | None = None
    step_time: StepTime | None = None  # None: settings are compared by the tokens that are computed
    left_out: float = 0.0  # work of more requests like these, see forecast
    arrivals: Schedule | None = None  # when requests arrive; None: all are there from the start
    largest_pool: int = 0  # blocks: pools up to this are tried, if that is more than _MOST_POOLS
    smaller_kv: SmallerKV | None = None
    # times a run with other settings in turns with this one; None: settings that change the speed of steps are left out
    time_in_turns: Callable[["Subject", Changes], Turns | None] | None = None

    @property
    def limits(self) -> Limits:
        return self.plan.limits

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks or 0

    @property
    def has_tokens(self) -> bool:
        return self.workload.hash_size is None

    def is_tight(self, limits: Limits) -> bool:
        """Whether blocks may run out, so that the size of the pool matters."""
        return sum(_blocks_of(request, limits) for request in self.workload.requests) > (limits.num_blocks or 0)

    def changed(self, key: str, value: Any) -> "Subject":
        """The run with another value of a configuration key. Another type or size of blocks keeps the memory."""
        plan, limits, smaller_kv = self.plan, self.limits, self.smaller_kv
        if key == ORDER:
            return replace(self, reorder=value)
        if key == POOL:
            limits = replace(limits, num_blocks=value)
        elif key == BLOCK_SIZE:
            num_blocks = self.num_blocks * limits.block_size // value
            plan = replace(plan, block_bytes=plan.block_bytes * value // limits.block_size)
            limits = replace(limits, block_size=value, num_blocks=num_blocks)
        elif key == KV_DTYPE:
            assert smaller_kv is not None, "only this type is tried"
            num_bytes, own = smaller_kv.block_bytes, smaller_kv.own_block_bytes
            plan = replace(plan, block_bytes=plan.block_bytes * num_bytes // own)
            limits, smaller_kv = replace(limits, num_blocks=self.num_blocks * own // num_bytes), None
        else:
            limits = replace(limits, **{key.partition(".")[2]: value})
        return replace(self, plan=replace(plan, limits=limits), smaller_kv=smaller_kv)


def _blocks_of(request: TraceRequest, limits: Limits) -> int:
    """Blocks of a request if it shares none and releases none."""
    num_tokens = request.num_prompt_tokens + largest_output(request)
    return request.num_samples * blocks_for(num_tokens, limits.block_size) * len(limits.groups)


# ---------------------------------------------------------------------- what can be changed


@dataclass(frozen=True, slots=True)
class Kind:
    """A configuration key that the adviser changes."""

    name: str
    key: str
    values: Callable[[Subject, Forecast], Iterable[Any]]  # values to try, for a run that went as in this forecast
    cost: str = ""  # in words; empty: nothing
    cost_of_more: str | None = None  # cost of a larger value than that of the run; None: the same
    needs_caching: bool = False
    keeps_pool: bool = False  # the pool would change with it where its size is not given
    is_timed: bool = False  # changes the speed of a step: advised only after runs in turns


def _smaller_blocks(subject: Subject, _: Forecast) -> list[int]:
    """The largest first, as larger blocks mean shorter tables."""
    hash_size = subject.workload.hash_size
    smallest = BLOCK_SIZES[0] if subject.plan.on_cpu else SMALLEST_RECOMMENDED  # The kernels have a smallest size.
    sizes = [size for size in BLOCK_SIZES if smallest <= size < subject.limits.block_size]
    return [size for size in reversed(sizes) if hash_size is None or not size % hash_size]


def _other_policies(subject: Subject, _: Forecast) -> list[str]:
    return [name for name in POLICIES if name != subject.limits.eviction] if subject.is_tight(subject.limits) else []


def _orders(subject: Subject, _: Forecast) -> list[str]:
    return ["prefix"] if subject.may_reorder and subject.reorder == "none" and subject.has_tokens else []


def _preemption_policies(subject: Subject, base: Forecast) -> list[str]:
    return [name for name in ("last", "largest") if base.num_preemptions and name != subject.limits.preemption_policy]


def _step_tokens(subject: Subject, _: Forecast) -> list[int]:
    now, least = subject.limits.max_num_batched_tokens, subject.limits.max_num_seqs
    return [number for number in (now // 2, 2 * now, 4 * now) if number >= least]


def _chunks(subject: Subject, _: Forecast) -> list[int]:
    limits = subject.limits
    return [n for n in (128, 512) if n < limits.max_num_batched_tokens and n != limits.chunked_prefill_size]


def _num_seqs(subject: Subject, _: Forecast) -> list[int]:
    limits, now = subject.limits, subject.limits.max_num_seqs
    if limits.has_states:  # slots depend on the number of sequences
        return []
    return [number for number in (now // 4, now // 2, 2 * now) if 1 <= number <= limits.max_num_batched_tokens]


def _largest_pool(subject: Subject, _: Forecast) -> list[int]:
    most = max(_MOST_POOLS * subject.num_blocks, subject.largest_pool)
    return [most] if subject.is_tight(subject.limits) else []


# from cheap to expensive
KINDS = (
    Kind("caching", CACHING, lambda subject, _: [] if subject.limits.enable_prefix_caching else [True]),
    Kind("policy", "engine.eviction", _other_policies, needs_caching=True),
    Kind("order", ORDER, _orders, "rows that start in another order", needs_caching=True),
    Kind("block size", BLOCK_SIZE, _smaller_blocks, "more blocks to read", needs_caching=True, keeps_pool=True,
         is_timed=True),
    Kind("preemption", "engine.preemption_policy", _preemption_policies),
    Kind("step tokens", "engine.max_num_batched_tokens", _step_tokens, "more steps", "later tokens while prompts run",
         keeps_pool=True, is_timed=True),
    Kind("chunk", "engine.chunked_prefill_size", _chunks, "more steps", is_timed=True),
    Kind("sequences", "engine.max_num_seqs", _num_seqs, "later first tokens", "slower tokens of each row",
         keeps_pool=True, is_timed=True),
    Kind("pool", POOL, _largest_pool),
    Kind("KV dtype", KV_DTYPE, lambda subject, _: [] if subject.smaller_kv is None else [subject.smaller_kv.name],
         "other rounding: some tokens may differ", keeps_pool=True, is_timed=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One change of a run's settings."""

    kind: Kind
    changes: dict[str, Any]  # configuration key -> value; they belong together
    subject: Subject  # the run with it
    cost: str  # in words; empty: nothing

    @classmethod
    def of(cls, kind: Kind, subject: Subject, value: Any) -> "Setting":
        """A run with another value. The number of blocks is part of it where they may run out, either as many as then
        or as many as the run has: a number that the user gave would stay."""
        then, changes = subject.changed(kind.key, value), {kind.key: value}
        tight = (then.limits, replace(then.limits, num_blocks=subject.num_blocks))
        if kind.keeps_pool and any(map(subject.is_tight, tight)):
            changes[POOL] = then.num_blocks
        now = getattr(subject.limits, kind.key.partition(".")[2], None)
        cost = kind.cost if kind.cost_of_more is None or value < now else kind.cost_of_more
        if kind.key == POOL:
            more = value - subject.num_blocks
            num_bytes = more * subject.plan.block_bytes
            cost = f"{byte_text(num_bytes)} of memory" if num_bytes else f"{plural(more, 'block')} more"
        return cls(kind, changes, then, cost)

    @property
    def text(self) -> str:
        return " ".join(flags_of(self.changes))

    @property
    def short(self) -> str:
        """The first flag, and the blocks that the same memory then has."""
        first, *others = self.changes.items()
        blocks = f" ({plural(self.changes[POOL], 'block')})" if others else ""
        return " ".join(flags_of(dict([first]))) + blocks


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and the run with it."""

    setting: Setting
    forecast: Forecast
    gain: float  # share of the time, or of the computed tokens, that it saves
    first_use_s: float = 0.0  # seconds of it for memory that is used for the first time, more than in the run
    turns: Turns | None = None  # None: not timed

    @property
    def is_certain(self) -> bool:
        """Whether no timed run is missing."""
        return not self.setting.kind.is_timed or self.turns is not None

    @property
    def cost(self) -> str:
        memory = f"memory used for the first time: {duration_text(self.first_use_s)}"
        notes = [self.setting.cost, "" if self.is_certain else "not timed", memory if self.first_use_s > 0 else ""]
        return "; ".join(filter(None, notes))


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

    def value(self, key: str, default: Any) -> Any:
        """The advised value of a configuration key."""
        return next((each.setting.changes[key] for each in self.best if key in each.setting.changes), default)

    def sentences(self) -> list[str]:
        """One for each of the best changes, or why there is none."""
        left_out = "" if self.not_tried is None else f" (not tried: {self.not_tried})"
        if self.best:
            found = [self._sentence(trial) for trial in self.best]
            return [*found[:-1], found[-1] + left_out]
        if self.base is None or not self.trials:
            return [f"not known: {self.not_tried}" if self.not_tried else "nothing: no other setting would matter"]
        saves = f"saves {percent_text(WORTH_SAYING)} of the {'time' if self.by_time else 'computed tokens'}"
        tried = f"none of {len(self.trials)} other settings" if len(self.trials) > 1 else "the other setting tried"
        return [f"nothing: {tried} {saves if len(self.trials) > 1 else 'does not save'}{left_out}"]

    def _sentence(self, trial: Trial) -> str:
        assert self.base is not None, "gains are compared with it"
        now, then = self.base, trial.forecast
        parts = []
        if self.by_time and now.seconds is not None and then.seconds is not None:
            timed = "" if trial.turns is None else ", timed in turns"
            parts.append(f"{percent_text(trial.gain)} less time{timed}")
        else:
            saved = now.num_computed_tokens - then.num_computed_tokens
            parts.append(f"{plural(saved, 'fewer token')} to compute ({percent_text(trial.gain)})")
        if percent_text(now.hit_rate) != percent_text(then.hit_rate):
            parts.append(f"hit rate {percent_text(now.hit_rate)} -> {percent_text(then.hit_rate)}")
        if now.num_preemptions != then.num_preemptions:
            parts.append(f"preemptions {now.num_preemptions:,} -> {then.num_preemptions:,}")
        cost = f"; costs {trial.setting.cost}" if trial.setting.cost else ""
        return f"{trial.setting.text}: {', '.join(parts)}{cost}"

    def rows(self) -> list[dict[str, Any]]:
        """All that was tried, after the run as it is."""
        if self.base is None:
            return []
        return [_row("as it is", "", self.base, 0.0), *map(_trial_row, self.trials)]

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "advice": "; or ".join(self.sentences()),
            "advised_flag": self.flag,
            "advised": [{"flags": flags_of(each.setting.changes), **_trial_row(each)} for each in self.best],
        }


def _trial_row(trial: Trial) -> dict[str, Any]:
    return _row(trial.setting.text, trial.cost, trial.forecast, trial.gain)


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
        subject = Subject(workload, recorded_plan(state), may_reorder=in_order(workload), step_time=timed_of(state))
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
    then timed, where that is possible. `base`: the run as it is, if it has been simulated."""
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
    search.time_the_best()
    return Advice(search.base, tuple(search.sorted()), search.by_time, "; ".join(reasons) or None)


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
        shown_from_s = _AS_GOOD * (base.seconds or 0.0)
        return Trial(setting, found, gain, more_s if setting.kind.key == POOL and more_s > shown_from_s else 0.0)

    def explore(self, *, without: frozenset[str] = frozenset()) -> None:
        """Try all settings but those of some keys. Raises: OutOfTimeError."""
        may_time = self.by_time and self.subject.time_in_turns is not None
        for kind in KINDS:
            is_possible = self.subject.limits.enable_prefix_caching or not kind.needs_caching
            if not is_possible or kind.key in without or (kind.is_timed and not may_time):
                continue
            for value in kind.values(self.subject, self.run_as_it_is):
                trial = self.try_out(Setting.of(kind, self.subject, value))
                if kind.key == POOL:
                    trial = self._smallest_as_good(kind, trial)
                self.trials.append(trial)

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
        """Replace what is only predicted of the best settings by runs in turns."""
        if self.subject.time_in_turns is None:
            return
        uncertain = [trial for trial in self.sorted() if not trial.is_certain and trial.gain >= _LEAST_TUNED]
        for trial in uncertain[:_MOST_TIMED]:
            turns = self.subject.time_in_turns(self.subject, trial.setting.changes)
            if turns is not None:
                timed = replace(trial, turns=turns, gain=turns.gain)
                self.trials[self.trials.index(trial)] = timed

    def sorted(self) -> list[Trial]:
        """Best first; of equally good ones the cheapest."""
        served = [trial for trial in self.trials if trial.gain > -1.0]
        return sorted(served, key=lambda each: (-round(each.gain / _AS_GOOD), KINDS.index(each.setting.kind)))


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
    kept only if runs in turns are faster with them. `base`: the run as it is, if it has been simulated. `fixed`: keys
    that stay as they are. None: the time was not enough for the first round."""
    deadline_s = None if budget_s is None else time.thread_time() + budget_s
    search = _Search(subject, deadline_s, None if base is None else base.without_text)
    changes: dict[str, Any] = {}
    try:
        search.start()
    except OutOfTimeError:
        return None
    first = found = search.run_as_it_is
    least = _LEAST_TUNED if search.by_time else WORTH_SAYING
    for trial in _rounds(search, fixed | {POOL}, least):
        changes |= trial.setting.changes
        found, now = trial.forecast, trial.setting.subject
        if POOL in changes:
            changes[POOL] = now.num_blocks
    tuned = Tuned(first, found, changes, search.by_time)
    if subject.time_in_turns is None or not any(kind.is_timed and kind.key in changes for kind in KINDS):
        return tuned
    turns = subject.time_in_turns(subject, changes)
    if turns is None or turns.gain < WORTH_SAYING:
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
        best = next(iter(search.sorted()), None)
        if best is None or best.gain < least:
            return
        yield best
        search.subject, search.base, search.trials = best.setting.subject, best.forecast, []
