"""What to change about a run: other settings, each tried on the same requests with the real scheduler, and the best.

The one adviser of `generate`, `trace`, `plan`, `simulate`, `explain` and `report`: for the same requests and limits all
of them give the same answer. What it promises is what a run with the advised flags does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagedcli.core.budget import blocks_for
from pagedcli.core.eviction import POLICIES
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import BLOCK_SIZES, SMALLEST_RECOMMENDED
from pagedcli.planning.step_time import Calibrations, StepTime, calibrations_named
from pagedcli.printable import byte_text, percent_text, plural
from pagedcli.simulation.forecast import Forecast, forecast
from pagedcli.simulation.requests import TraceRequest, Workload, largest_output
from pagedcli.simulation.run import Schedule
from pagedcli.simulation.sources import RecordedRequests
from pagedcli.trace.files import TraceReader
from pagedcli.trace.fold import fold
from pagedcli.trace.state import PoolState

ADVICE_S = 30.0  # seconds of trials in commands that only look at a run
WORTH_SAYING = 0.01  # share of the computed tokens, or of the time, from which a change is recommended
_MOST_POOLS = 4  # the largest pool that is tried, in pools of the run
_POOL_STEPS = 8  # the recommended pool is the smallest one to within this part of the present one
_AS_GOOD = 0.001  # gains that differ by less are equal, and the cheaper change is preferred
_CHUNKS = (128, 512)  # tokens
_POOL_FLAG = "--num-gpu-blocks-override"
# from cheap to expensive
KINDS = (
    "caching", "policy", "order", "block size", "preemption", "step tokens", "chunk", "sequences", "pool", "KV dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OtherKV:
    """The engine with another type of the KV cache, which rounds differently: tried only where the user allows it."""

    name: str  # value of --kv-cache-dtype
    block_bytes: int
    step_time: StepTime | None  # its own: attention reads other bytes


@dataclass(frozen=True, slots=True)
class Subject:
    """A run: its requests in the order in which they come, and the engine that serves them."""

    workload: Workload
    plan: Plan  # with the pool
    reorder: str = "none"  # of the run, if the requests are in the order of the file
    may_reorder: bool = True  # whether --reorder can be tried
    read_ahead: int | None = None
    timed: Calibrations | None = None  # None: settings are compared by the tokens that are computed
    left_out: float = 0.0  # work of more requests like these, see forecast
    arrivals: Schedule | None = None  # when requests arrive; None: all are there from the start
    largest_pool: int = 0  # blocks: pools up to this are tried, if that is more than _MOST_POOLS
    other_kv: OtherKV | None = None

    @property
    def limits(self) -> Limits:
        return self.plan.limits

    @property
    def step_time(self) -> StepTime | None:
        return None if self.timed is None else self.timed.own

    @property
    def smaller_blocks(self) -> list[int]:
        """Sizes that can be tried, the largest first, as larger blocks mean shorter tables. Tokens."""
        hash_size = self.workload.hash_size
        sizes = [size for size in BLOCK_SIZES if self.smallest_block <= size < self.limits.block_size]
        return [size for size in reversed(sizes) if hash_size is None or not size % hash_size]

    @property
    def has_tokens(self) -> bool:
        return self.workload.hash_size is None

    @property
    def smallest_block(self) -> int:
        """Tokens: the GPU kernels support no blocks below 16."""
        return BLOCK_SIZES[0] if self.plan.on_cpu else SMALLEST_RECOMMENDED

    def is_tight(self, limits: Limits) -> bool:
        """Whether blocks may run out, so that the size of the pool matters."""
        num_blocks = sum(_blocks_of(request, limits) for request in self.workload.requests)
        return num_blocks > (limits.num_blocks or 0)


def _blocks_of(request: TraceRequest, limits: Limits) -> int:
    """Blocks of a request if it shares none and releases none."""
    num_tokens = request.num_prompt_tokens + largest_output(request)
    return request.num_samples * blocks_for(num_tokens, limits.block_size) * len(limits.groups)


@dataclass(frozen=True, slots=True)
class Setting:
    """One change of a run's settings."""

    kind: str  # of KINDS
    flags: tuple[tuple[str, str], ...]  # flag and value; they belong together
    limits: Limits
    reorder: str
    cost: str = ""  # in words; empty: nothing
    timed: Calibrations | None = None  # of its steps, if they are others; None: those of the run
    block_bytes: int | None = None  # of a block of as many tokens, if that is another

    @property
    def text(self) -> str:
        return " ".join(f"{flag} {value}".rstrip() for flag, value in self.flags)


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and the run with it."""

    setting: Setting
    forecast: Forecast
    gain: float  # share of the time, or of the computed tokens, that it saves


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
        worthy = [trial for trial in self.trials if trial.gain >= WORTH_SAYING]
        others = [trial for trial in worthy if trial.setting.kind != worthy[0].setting.kind]
        return tuple(worthy[:1] + others[:1])

    @property
    def flag(self) -> str | None:
        """The first flag of the best change."""
        return self.best[0].setting.flags[0][0] if self.best else None

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
            parts.append(f"{percent_text(trial.gain)} less time")
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
        rows = [_row("as it is", "", self.base, 0.0)]
        return rows + [_row(each.setting.text, each.setting.cost, each.forecast, each.gain) for each in self.trials]

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            "advice": "; or ".join(self.sentences()),
            "advised_flag": self.flag,
            "advised": [
                {"flags": [text for pair in each.setting.flags for text in pair if text],
                 **_row(each.setting.text, each.setting.cost, each.forecast, each.gain)}
                for each in self.best
            ],
        }  # fmt: skip


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
        subject = Subject(workload, recorded_plan(state), may_reorder=in_order(workload), timed=timed_of(state))
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


def timed_of(state: PoolState) -> Calibrations | None:
    """The time of a recorded run's steps, if the machine that made it is this one, and has been calibrated."""
    name = state.started.step_times
    return None if name is None else calibrations_named(name)


def in_order(workload: Workload) -> bool:
    """Whether the rows were started in the order of their file."""
    numbers = [int(each.request_id.partition("/")[0]) for each in workload.requests if each.request_id[:1].isdecimal()]
    return all(before <= after for before, after in pairwise(numbers))


# ---------------------------------------------------------------------- the search


class OutOfTimeError(Exception):
    """The time for trials is over."""


def advise(
    subject: Subject, *, base: Forecast | None = None, budget_s: float | None = None, kinds: tuple[str, ...] = KINDS
) -> Advice:
    """Try other settings of these kinds, for at most `budget_s` seconds of processor time. `base`: the run as it is,
    if it has been simulated."""
    if not subject.workload.requests:
        return Advice(not_tried="no request was served")
    search = _Search(subject, None if budget_s is None else time.thread_time() + budget_s, base)
    reasons = []
    try:
        search.base = search.run(subject.limits, subject.reorder) if base is None else base.without_text
        if not search.base.num_requests:  # nothing takes no time, whatever the setting
            pool = plural(subject.limits.num_blocks or 0, "block")
            return Advice(not_tried=f"no request fits into the pool of {pool}")
        for setting in _settings(subject, search, kinds):
            search.add(setting)
    except OutOfTimeError:
        if not search.trials:
            longer = f"; pagedcli explain takes up to {ADVICE_S:.0f} s" if (budget_s or 0.0) < ADVICE_S else ""
            return Advice(not_tried=f"trying other settings takes over {budget_s:.1f} s{longer}")
        reasons.append(f"the rest, as trials end after {budget_s:.1f} s")
    if not subject.has_tokens and subject.limits.enable_prefix_caching:
        recorded = " (--record-tokens)" if subject.workload.format == "pagedcli" else ""
        reasons.append(f"smaller blocks and another order, which need the tokens{recorded}")
    reasons += [f"{flag}, whose steps have not been timed (pagedcli plan does)" for flag in _untimed(search)]
    return Advice(search.base, tuple(search.sorted()), subject.timed is not None, "; ".join(reasons) or None)


def _untimed(search: "_Search") -> list[str]:
    """Settings that cannot be compared by time, of smaller blocks those that would gain if steps were as fast."""
    subject = search.subject
    if subject.timed is None:
        return []
    flags = []
    for size in subject.smaller_blocks if subject.limits.enable_prefix_caching else ():
        if size not in subject.timed.by_block_size and search.may_gain(_with_blocks_of(subject, size)):
            flags.append(f"--block-size {size}")
    if subject.other_kv is not None and subject.other_kv.step_time is None:
        flags.append(f"--kv-cache-dtype {subject.other_kv.name}")
    return [" and ".join(flags)] if flags else []


@dataclass(slots=True)
class _Search:
    subject: Subject
    deadline_s: float | None
    base: Forecast | None = None
    trials: list[Trial] = field(default_factory=list)
    _runs: dict[tuple[Limits, str, StepTime | None], Forecast] = field(default_factory=dict)

    def run(self, limits: Limits, reorder: str, timed: Calibrations | None = None) -> Forecast:
        """`timed`: if it is not that of the run. Raises: OutOfTimeError."""
        subject = self.subject
        step_time = subject.step_time if timed is None else timed.own
        key = limits, reorder, step_time
        if key not in self._runs:
            found = forecast(
                subject.workload,
                replace(subject.plan, limits=limits),
                step_time,
                reorder=reorder,
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
        found = self.run(setting.limits, setting.reorder, setting.timed)
        assert self.base is not None, "the run as it is comes first"
        gain = 1 - _score(found) / max(_score(self.base), 1e-12)
        if found.num_refused > self.base.num_refused:
            gain = -1.0  # some rows would be refused
        return Trial(setting, found, gain)

    def may_gain(self, setting: Setting) -> bool:
        try:
            return self.try_out(setting).gain >= WORTH_SAYING
        except OutOfTimeError:
            return True

    def add(self, setting: Setting) -> None:
        self.trials.append(self.try_out(setting))

    def sorted(self) -> list[Trial]:
        """Best first; of equally good ones the cheapest."""
        served = [trial for trial in self.trials if trial.gain > -1.0]
        return sorted(served, key=lambda each: (-round(each.gain / _AS_GOOD), KINDS.index(each.setting.kind)))


def _score(run: Forecast) -> float:
    """What is compared: seconds, or tokens that the model computes."""
    return run.num_computed_tokens if run.seconds is None else run.seconds


def _settings(subject: Subject, search: _Search, kinds: tuple[str, ...]) -> Iterator[Setting]:
    """What to try, what promises most first."""
    limits = subject.limits
    makers: dict[str, Callable[[Subject], Iterator[Setting]]] = {
        "caching": _caching, "block size": _block_sizes, "order": _order, "policy": _policies,
        "pool": partial(_pool, search), "preemption": partial(_preemption, search), "step tokens": _step_tokens,
        "sequences": _sequences, "chunk": _chunks, "KV dtype": _kv_dtypes,
    }  # fmt: skip
    for kind, maker in makers.items():
        if kind in kinds and (limits.enable_prefix_caching or kind not in ("block size", "order", "policy")):
            yield from maker(subject)


def _caching(subject: Subject) -> Iterator[Setting]:
    if not subject.limits.enable_prefix_caching:
        limits = replace(subject.limits, enable_prefix_caching=True)
        yield Setting("caching", (("--enable-prefix-caching", ""),), limits, subject.reorder)


def _block_sizes(subject: Subject) -> Iterator[Setting]:
    """Smaller blocks in the same memory. By time only those whose steps have been timed, as they are slower."""
    timed = subject.timed
    for size in subject.smaller_blocks:
        setting = _with_blocks_of(subject, size)
        if timed is None:
            yield setting
        elif size in timed.by_block_size:
            others = {other: each for other, each in timed.by_block_size.items() if other != size}
            own = Calibrations(timed.by_block_size[size], {subject.limits.block_size: timed.own, **others})
            yield replace(setting, timed=own)


def _with_blocks_of(subject: Subject, size: int) -> Setting:
    limits = subject.limits
    smaller = replace(limits, block_size=size, num_blocks=(limits.num_blocks or 0) * limits.block_size // size)
    setting = _with_pool(subject, "block size", (("--block-size", str(size)),), smaller, "more blocks to read")
    return replace(setting, block_bytes=subject.plan.block_bytes * size // limits.block_size)


def _order(subject: Subject) -> Iterator[Setting]:
    if subject.may_reorder and subject.reorder == "none" and subject.has_tokens:
        yield Setting("order", (("--reorder", "prefix"),), subject.limits, "prefix", "rows that start in another order")


def _policies(subject: Subject) -> Iterator[Setting]:
    limits = subject.limits
    for name in POLICIES if subject.is_tight(limits) else ():
        if name != limits.eviction:
            yield Setting("policy", (("--eviction", name),), replace(limits, eviction=name), subject.reorder)


def _pool(search: _Search, subject: Subject) -> Iterator[Setting]:
    """The smallest larger pool that is as good as the largest one tried."""
    limits = subject.limits
    num_blocks = limits.num_blocks or 0
    if not subject.is_tight(limits):
        return

    def pool_of(number: int) -> Setting:
        more = (number - num_blocks) * subject.plan.block_bytes
        cost = f"{byte_text(more)} of memory" if more else f"{plural(number - num_blocks, 'block')} more"
        larger = replace(limits, num_blocks=number)
        return Setting("pool", ((_POOL_FLAG, str(number)),), larger, subject.reorder, cost)

    low, high = num_blocks, max(_MOST_POOLS * num_blocks, subject.largest_pool)
    most = search.try_out(pool_of(high)).gain
    try:
        while most >= WORTH_SAYING and high - low > max(1, num_blocks // _POOL_STEPS):
            middle = (low + high) // 2
            if search.try_out(pool_of(middle)).gain > most - _AS_GOOD / 2:
                high = middle
            else:
                low = middle
    except OutOfTimeError:  # what has been tried counts
        yield pool_of(high)
        raise
    yield pool_of(high)


def _preemption(search: _Search, subject: Subject) -> Iterator[Setting]:
    limits = subject.limits
    if search.base is not None and search.base.num_preemptions:
        for name in ("last", "largest"):
            if name != limits.preemption_policy:
                other = replace(limits, preemption_policy=name)
                yield Setting("preemption", (("--preemption-policy", name),), other, subject.reorder)


def _step_tokens(subject: Subject) -> Iterator[Setting]:
    """Only time tells these apart, as the next ones."""
    limits = subject.limits
    now = limits.max_num_batched_tokens
    for number in (now // 2, 2 * now, 4 * now) if subject.timed is not None else ():
        if number >= limits.max_num_seqs:
            cost = "later tokens while prompts run" if number > now else "more steps"
            changed = replace(limits, max_num_batched_tokens=number)
            yield _with_pool(subject, "step tokens", (("--max-num-batched-tokens", str(number)),), changed, cost)


def _sequences(subject: Subject) -> Iterator[Setting]:
    limits = subject.limits
    now = limits.max_num_seqs
    if subject.timed is None or limits.has_states:  # slots depend on the number of sequences
        return
    for number in (now // 4, now // 2, 2 * now):
        if 1 <= number <= limits.max_num_batched_tokens:
            changed = replace(limits, max_num_seqs=number)
            cost = "later first tokens" if number < now else "slower tokens of each row"
            yield _with_pool(subject, "sequences", (("--max-num-seqs", str(number)),), changed, cost)


def _chunks(subject: Subject) -> Iterator[Setting]:
    limits = subject.limits
    for number in _CHUNKS if subject.timed is not None else ():
        if number < limits.max_num_batched_tokens and number != limits.chunked_prefill_size:
            changed = replace(limits, chunked_prefill_size=number)
            yield Setting("chunk", (("--chunked-prefill-size", str(number)),), changed, subject.reorder, "more steps")


def _kv_dtypes(subject: Subject) -> Iterator[Setting]:
    """Smaller K and V: more blocks in the same memory."""
    other, limits = subject.other_kv, subject.limits
    if other is None or (subject.timed is not None and other.step_time is None):
        return
    timed = None if subject.timed is None or other.step_time is None else Calibrations(other.step_time, {})
    num_blocks = (limits.num_blocks or 0) * subject.plan.block_bytes // other.block_bytes
    setting = _with_pool(
        subject, "KV dtype", (("--kv-cache-dtype", other.name),), replace(limits, num_blocks=num_blocks),
        "other rounding: some tokens may differ",
    )  # fmt: skip
    yield replace(setting, timed=timed, block_bytes=other.block_bytes)


def _with_pool(subject: Subject, kind: str, flags: tuple[tuple[str, str], ...], limits: Limits, cost: str) -> Setting:
    """A setting that keeps the memory of the pool. Its number of blocks is part of it where they may run out, either as
    many as these or as many as the run has: a number that the user gave would stay."""
    if subject.is_tight(limits) or subject.is_tight(replace(limits, num_blocks=subject.limits.num_blocks)):
        flags = (*flags, (_POOL_FLAG, str(limits.num_blocks)))
    return Setting(kind, flags, limits, subject.reorder, cost)


def enough_blocks(subject: Subject, own: Forecast | None, *, budget_s: float | None = None) -> int | None:
    """The smallest pool, to within an eighth, in which the run computes as few tokens and preempts as little as in its
    own (`own`: that run, if it has been simulated). None: the time was not enough."""
    search = _Search(subject, None if budget_s is None else time.thread_time() + budget_s)
    try:
        own = own or search.run(subject.limits, subject.reorder)
        low, high = 0, subject.plan.num_blocks
        while high - low > max(1, high // _POOL_STEPS):
            middle = (low + high) // 2
            found = search.run(replace(subject.limits, num_blocks=middle), subject.reorder)
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
    changes: dict[str, str]  # flag -> value
    advice: Advice  # of the first round

    @property
    def gain(self) -> float:
        return 1 - _score(self.found) / max(_score(self.base), 1e-12)


def _changed(subject: Subject, setting: Setting) -> Subject:
    """The run with a setting."""
    plan, other = replace(subject.plan, limits=setting.limits), subject.other_kv
    if setting.block_bytes is not None:
        plan = replace(plan, block_bytes=setting.block_bytes)
    if setting.kind == "block size" and other is not None:
        size, before = setting.limits.block_size, subject.limits.block_size
        smaller = replace(other, block_bytes=other.block_bytes * size // before)
        other = smaller if subject.timed is None else None  # its steps were timed with the blocks of before
    other = None if setting.kind == "KV dtype" else other
    timed = setting.timed or subject.timed
    return replace(subject, plan=plan, reorder=setting.reorder, timed=timed, other_kv=other)


_MOST_ROUNDS = 6
_LEAST_TUNED = 0.03  # share of the time: of less, a calibration does not tell what is faster
_TUNED_KINDS = tuple(kind for kind in KINDS if kind != "pool")


def tune(
    subject: Subject,
    *,
    base: Forecast | None = None,
    fixed: frozenset[str] = frozenset(),
    budget_s: float | None = None,
) -> Tuned | None:
    """Change what gains most, then look again, until nothing gains enough. `base`: the run as it is, if it has been
    simulated. `fixed`: flags that stay as they are. None: the time was not enough for the first round."""
    deadline_s = None if budget_s is None else time.thread_time() + budget_s
    first: Advice | None = None
    found = base
    changes: dict[str, str] = {}
    for _ in range(_MOST_ROUNDS):
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.thread_time())
        advice = advise(subject, base=found, budget_s=left_s, kinds=_TUNED_KINDS)
        if advice.base is None:
            break
        first, found = first or advice, advice.base
        allowed = [each for each in advice.trials if each.setting.flags[0][0] not in fixed]
        if not allowed or allowed[0].gain < (_LEAST_TUNED if advice.by_time else WORTH_SAYING):
            break
        best = allowed[0]
        changes |= dict(best.setting.flags)
        if _POOL_FLAG in changes:
            changes[_POOL_FLAG] = str(best.setting.limits.num_blocks)
        found = best.forecast
        subject = _changed(subject, best.setting)
    if first is None or first.base is None or found is None:
        return None
    return Tuned(first.base, found, changes, first)
