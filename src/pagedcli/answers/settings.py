"""A run that cures are about, and the settings of it that they change: one table. A setting is values of configuration
keys; flags are printed from them. Used by `answers.cures`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pagedcli.answers.time import Forecast, in_prefix_order
from pagedcli.config_keys import flag_name
from pagedcli.core.budget import blocks_for
from pagedcli.core.eviction import POLICIES
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import BLOCK_SIZES, SMALLEST_RECOMMENDED
from pagedcli.core.snapshots import POLICIES as SNAPSHOTS
from pagedcli.planning.step_time import StepTime, step_time_named
from pagedcli.printable import byte_text, plural
from pagedcli.simulation.requests import Request, Requests, largest_output
from pagedcli.simulation.run import Schedule, recorded_plan
from pagedcli.trace.state import PoolState

CACHING, ORDER = "engine.enable_prefix_caching", "run.reorder"
BLOCK_SIZE, POOL = "engine.block_size", "engine.num_kvcache_blocks"
Changes = Mapping[str, Any]
"""Configuration keys with other values. They belong together."""


def flags_of(changes: Changes) -> list[str]:
    """The flags that set these keys."""
    words = []
    for key, value in changes.items():
        words.append(flag_name(key))
        words += [] if value is True else [str(value)]
    return words


@dataclass(frozen=True, slots=True)
class Subject:
    """A run: its requests in the order in which they come, and the engine that serves them."""

    workload: Requests
    plan: Plan  # the plan with its pool
    reorder: str = "none"  # order of the run, if the requests are in the order of the file
    may_reorder: bool = True  # whether --reorder can be tried
    read_ahead: int | None = None
    step_time: StepTime | None = None  # None: settings are compared by the tokens that are computed
    left_out: float = 0.0  # work of more requests like these, see forecast
    arrivals: Schedule | None = None  # arrivals of the requests; None: all are there from the start

    @property
    def limits(self) -> Limits:
        return self.plan.limits

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks or 0

    @property
    def in_order(self) -> Requests:
        """The requests in the order in which the run starts them."""
        if self.reorder == "none":
            return self.workload
        return replace(self.workload, requests=in_prefix_order(self.workload.requests))

    @property
    def schedule(self) -> Schedule:
        """When its requests come; no steps are timed."""
        return self.arrivals or Schedule(read_ahead=self.read_ahead)

    @property
    def has_tokens(self) -> bool:
        return self.workload.hash_size is None

    def is_tight(self, limits: Limits) -> bool:
        """Whether blocks may run out, so that the size of the pool matters."""
        return sum(_blocks_of(request, limits) for request in self.workload.requests) > (limits.num_blocks or 0)

    def changed(self, key: str, value: Any) -> "Subject":
        """The run with another value of a configuration key. Another size of blocks keeps the memory."""
        plan, limits = self.plan, self.limits
        if key == ORDER:
            return replace(self, reorder=value)
        if key == POOL:
            limits = replace(limits, num_blocks=value)
        elif key == BLOCK_SIZE:
            num_blocks = self.num_blocks * limits.block_size // value
            plan = replace(plan, block_bytes=plan.block_bytes * value // limits.block_size)
            limits = replace(limits, block_size=value, num_blocks=num_blocks)
        else:
            limits = replace(limits, **{key.partition(".")[2]: value})
        return replace(self, plan=replace(plan, limits=limits))


def recorded_subject(workload: Requests, state: PoolState) -> Subject | None:
    """A recorded run, with the pool at its end; None of beam searches, which are not simulated."""
    if workload.num_left_out:
        return None
    return Subject(workload, recorded_plan(state), may_reorder=in_order(workload), step_time=timed_of(state))


def timed_of(state: PoolState) -> StepTime | None:
    """The time of a recorded run's steps, if the machine that made it is this one, and has been calibrated."""
    name = state.started.step_times
    return None if name is None else step_time_named(name)


def in_order(workload: Requests) -> bool:
    """Whether the rows were started in the order of their file."""
    numbers = [int(each.request_id.partition("/")[0]) for each in workload.requests if each.request_id[:1].isdecimal()]
    return all(before <= after for before, after in pairwise(numbers))


def _blocks_of(request: Request, limits: Limits) -> int:
    """Blocks of a request if it shares none and releases none."""
    num_tokens = request.num_prompt_tokens + largest_output(request)
    return request.num_samples * blocks_for(num_tokens, limits.block_size) * len(limits.groups)


# ---------------------------------------------------------------------- what can be changed


@dataclass(frozen=True, slots=True)
class Knob:
    """A configuration key that a cure changes."""

    name: str
    key: str
    values: Callable[[Subject, Forecast], Iterable[Any]]  # values to try, for a run that went as in this forecast
    cost: str = ""  # what it costs, in words; empty: nothing
    cost_of_more: str | None = None  # cost of a larger value than that of the run; None: the same
    needs_caching: bool = False
    keeps_pool: bool = False  # the pool would change with it where its size is not given
    is_timed: bool = False  # changes the speed of a step: only `plan --tune` tries it, in runs in turns


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


def _checkpoints(subject: Subject, _: Forecast) -> list[str]:
    limits = subject.limits
    return [name for name in SNAPSHOTS if name not in ("none", limits.checkpoints)] if limits.has_states else []


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


# the kinds of settings, the cheapest first
KINDS = (
    Knob("caching", CACHING, lambda subject, _: [] if subject.limits.enable_prefix_caching else [True]),
    Knob("policy", "engine.eviction", _other_policies, needs_caching=True),
    Knob("order", ORDER, _orders, "rows start in another order", needs_caching=True),
    Knob("checkpoints", "engine.checkpoints", _checkpoints, needs_caching=True),
    Knob("block size", BLOCK_SIZE, _smaller_blocks, "more blocks to read", needs_caching=True, keeps_pool=True,
         is_timed=True),
    Knob("preemption", "engine.preemption_policy", _preemption_policies),
    Knob("step tokens", "engine.max_num_batched_tokens", _step_tokens, "more steps", "later tokens while prompts run",
         keeps_pool=True, is_timed=True),
    Knob("chunk", "engine.chunked_prefill_size", _chunks, "more steps", is_timed=True),
    Knob("sequences", "engine.max_num_seqs", _num_seqs, "later first tokens", "slower tokens of each row",
         keeps_pool=True, is_timed=True),
    Knob("pool", POOL, lambda subject, _: []),  # the one that answers.hits finds
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One change of a run's settings."""

    kind: Knob
    changes: dict[str, Any]  # configuration key -> value; they belong together
    subject: Subject  # the run with it
    cost: str  # what it costs, in words; empty: nothing

    @classmethod
    def of(cls, kind: Knob, subject: Subject, value: Any) -> "Setting":
        """The change of a key to another value. If blocks may run out and the pool's size would follow from the key,
        that size is set, too: one that the user gave would otherwise stay."""
        changed, changes = subject.changed(kind.key, value), {kind.key: value}
        pools = (changed.limits, replace(changed.limits, num_blocks=subject.num_blocks))
        if kind.keeps_pool and any(map(subject.is_tight, pools)):
            changes[POOL] = changed.num_blocks
        cost = kind.cost
        if kind.key == POOL:
            more = value - subject.num_blocks
            num_bytes = more * subject.plan.block_bytes
            what = f"{byte_text(num_bytes)} more memory" if num_bytes else f"{plural(more, 'block')} more"
            cost = f"it takes {what}"
        elif kind.cost_of_more is not None and value >= getattr(subject.limits, kind.key.partition(".")[2]):
            cost = kind.cost_of_more
        return cls(kind, changes, changed, cost)

    @property
    def text(self) -> str:
        return " ".join(flags_of(self.changes))
