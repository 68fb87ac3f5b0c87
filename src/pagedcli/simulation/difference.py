"""Two runs side by side: which prompts are the same, what differs, and how much of the change each difference explains.

Used by `pagedcli diff`. Runs of our engine are swapped through the simulator; recordings of KV events, which show no
scheduler, through an LRU cache.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter

import numpy as np

from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.core.prefixes import num_equal
from pagedcli.planning.step_time import StepTime
from pagedcli.printable import plural
from pagedcli.simulation.caches import NEVER, accesses_of, stack_distances
from pagedcli.simulation.causes import CAUSES, Measures, counts_in, num_runs, shares
from pagedcli.simulation.requests import TraceRequest, Workload
from pagedcli.simulation.run import RunResult, Schedule, simulate

_OUTPUTS = ("num_output_tokens", "output_ids", "stopped", "max_new_tokens", "num_samples", "is_random")
_POOL = ("num_blocks", "eviction")
_STATES = ("checkpoints", "num_state_slots", "state_bytes")
_ENGINE = (
    "max_num_batched_tokens", "chunked_prefill_size", "min_prefill_tokens", "enable_prefix_caching",
    "preemption_policy", "windows",
)  # fmt: skip
_ALIKE = 0.1  # pools of recordings that differ by less are not told apart


@dataclass(frozen=True, slots=True)
class Restart:
    """A cache was emptied."""

    place: int  # place before this request
    source: int = 0  # publisher


@dataclass(slots=True)
class Side:
    """One of the two runs."""

    name: str
    workload: Workload
    plan: Plan  # num_blocks is None: larger than anything that was held at once
    recorded: Measures | None = None  # what it did; None: it has not run
    restarts: list[Restart] = field(default_factory=list)
    sources: list[int] | None = None  # publisher of each request; None: there is one
    scheduled: bool = True  # False: a recording of KV events
    exact_pool: bool = True  # False: the pool is the most that was held when a block was evicted
    peak_blocks: int = 0  # most that were held at once
    hidden: dict[str, str] = field(default_factory=dict)  # causes that it does not show -> why
    step_time: StepTime | None = None
    from_disk: Measures | None = None  # what reading blocks from a prefix store changed in `recorded`; None: no store
    hits: dict[int, int] | None = None  # tokens that each request found, by its place; None: not recorded

    @property
    def requests(self) -> list[TraceRequest]:
        return self.workload.requests

    @property
    def limits(self) -> Limits:
        return self.plan.limits

    @property
    def num_sources(self) -> int:
        return 1 if self.sources is None else max(self.sources, default=0) + 1

    @property
    def pool_tokens(self) -> int | None:
        return None if self.limits.num_blocks is None else self.limits.num_blocks * self.limits.block_size


Key = tuple[object, ...]


def _content(request: TraceRequest, hash_size: int | None) -> Key:
    """Equal for equal prompts."""
    if hash_size is None:
        assert request.token_ids is not None, "without hashes there are tokens"
        return request.token_ids.tobytes(), request.cache_salt
    return request.hashes[: request.num_prompt_tokens // hash_size].tobytes(), request.num_prompt_tokens


def _identity(request: TraceRequest) -> Key:
    """The prompt's name: the user's own id, or the request's number, and its place in the row."""
    return request.label, request.request_id.partition("/")[2]


class Pairs:
    """The prompts of two runs, each with its partner: one of equal content, or else one with the same id.

    `partners` [2]: for each request of a side the place of its partner; None: there is none. `same`: places in the
    first run whose partner has the same content.
    """

    def __init__(self, before: Side, after: Side) -> None:
        self.requests = (before.requests, after.requests)
        self._outputs_of = attrgetter(*_OUTPUTS, *(() if before.scheduled else ("hashes",)))
        self.partners: tuple[list[int | None], list[int | None]] = (
            [None] * len(before.requests),
            [None] * len(after.requests),
        )
        self.same: set[int] = set()
        content = partial(_content, hash_size=before.workload.hash_size)
        self._match(lambda request: (_identity(request), content(request)), same=True)
        self._match(content, same=True)
        if before.scheduled:  # requests of a recording have no ids
            self._match(_identity, same=False)

    def _match(self, key: Callable[[TraceRequest], Key], *, same: bool) -> None:
        """Pair those that are still alone, in their order."""
        (before, after), (first, second) = self.requests, self.partners
        waiting: defaultdict[Key, deque[int]] = defaultdict(deque)
        for place, request in enumerate(before):
            if first[place] is None:
                waiting[key(request)].append(place)
        for place, request in enumerate(after):
            if second[place] is None and (found := waiting.get(key(request))):
                partner = found.popleft()
                first[partner], second[place] = place, partner
                if same:
                    self.same.add(partner)

    def alone(self, side: int) -> list[TraceRequest]:
        """The prompts that only this side has."""
        return [request for request, partner in zip(self.requests[side], self.partners[side], strict=True)
                if partner is None]  # fmt: skip

    @cached_property
    def changed(self) -> list[tuple[TraceRequest, TraceRequest]]:
        """Prompts of the same id with another text."""
        return [
            (self.requests[0][place], self.requests[1][partner])
            for place, partner in enumerate(self.partners[0])
            if partner is not None and place not in self.same
        ]

    @cached_property
    def num_moved(self) -> int:
        """Pairs that come at another place among the pairs."""
        partners = [partner for partner in self.partners[0] if partner is not None]
        return sum(one != other for one, other in zip(partners, sorted(partners), strict=True))

    @cached_property
    def num_other_outputs(self) -> int:
        return sum(
            self._outputs_of(self.requests[0][place]) != self._outputs_of(self._after(place)) for place in self.same
        )

    def _after(self, place: int) -> TraceRequest:
        partner = self.partners[0][place]
        assert partner is not None, "it has a partner of the same content"
        return self.requests[1][partner]

    def places(self, side: int, order: int) -> list[int]:
        """The places of a side's requests, in the order of one of the sides. A prompt that the other one lacks comes
        after the one that it follows in its own order."""
        partners = self.partners[side]
        if order == side:
            return list(range(len(partners)))
        keys, last = [], -1
        for place, partner in enumerate(partners):
            last = last if partner is None else partner
            keys.append((last, partner is None, place))
        return [place for _, _, place in sorted(keys)]

    def request(self, side: int, place: int, outputs: int) -> TraceRequest:
        """A request of a side, with the outputs of one of the sides if both have the same prompt."""
        request, partner = self.requests[side][place], self.partners[side][place]
        if outputs == side or partner is None or (place if side == 0 else partner) not in self.same:
            return request
        changes = dict(zip((*_OUTPUTS, "hashes"), self._outputs_of(self.requests[outputs][partner]), strict=False))
        return replace(request, **changes)


class Comparison:
    """The change between two runs, and the part of each cause. `observe` is called before each simulated run."""

    def __init__(
        self, before: Side, after: Side, observe: Callable[[int, int], None] = lambda done, all_: None
    ) -> None:
        self.sides = (before, after)
        self.hidden = before.hidden | after.hidden
        self.pairs = Pairs(before, after)
        self._align_pools()
        self.details = {cause: self._detail(cause) for cause in CAUSES}  # None: the same on both sides
        self.differing = [
            cause for cause, detail in self.details.items() if detail and cause not in self.hidden and cause != "store"
        ]
        self._observe = observe
        self._known: dict[frozenset[str], Measures] = {}
        self.parts = shares(self.differing, self.measure)
        if self.details["store"]:
            self.parts["store"] = self._part_of_store(self.measure(frozenset()))
        self.simulated = tuple(map(self.measure, (frozenset[str](), frozenset(self.differing))))
        self.measured = tuple(
            found if side.recorded is None else side.recorded
            for side, found in zip(self.sides, self.simulated, strict=True)
        )
        both = self.measured[0].keys() & self.measured[1].keys()
        self.num_runs = len(self._known)
        for side, later in zip(self.sides, (frozenset[str](), frozenset(self.differing)), strict=True):
            if side.recorded is None:
                side.hits = self._simulated_hits(later)
        self.change = {
            name: self.measured[1][name] - self.measured[0][name] for name in self.measured[0] if name in both
        }

    @property
    def unexplained(self) -> Measures:
        """The change that no cause explains: recorded less simulated."""
        return {
            name: change - sum((part[name] for part in self.parts.values()), Fraction(0))
            for name, change in self.change.items()
            if name in self.simulated[0]
        }

    def _part_of_store(self, measures: Measures) -> Measures:
        """What is read from disk is in no simulation: it comes on top of each."""
        before, after = (side.from_disk or {} for side in self.sides)
        return {name: after.get(name, Fraction(0)) - before.get(name, Fraction(0)) for name in measures}

    def _simulated_hits(self, later: frozenset[str]) -> dict[int, int]:
        """Tokens that each request of a side finds, where nothing is recorded."""
        runs = self._runs(self._segments(later), self._limits(later))
        return {place: max(0, hit) for place, hit in enumerate(hit for run in runs for hit in run.cached_tokens)}

    # ------------------------------------------------------------------ what differs

    def _align_pools(self) -> None:
        """Pools of recordings are known from below: the most blocks that were held, if one was evicted."""
        if all(side.exact_pool for side in self.sides):
            return
        known, peaks = [side.pool_tokens for side in self.sides], [side.peak_blocks for side in self.sides]
        if known == [None, None]:
            self.hidden["pool"] = f"no block was evicted: each pool has at least the {max(peaks):,} blocks that it held"
            return
        if None not in known:
            smaller, larger = sorted(each for each in known if each is not None)
            if larger - smaller > _ALIKE * larger:
                return
            if smaller < larger:
                self.hidden["pool"] = "seen from evictions, the pools differ too little to be told apart"
            most = larger
        else:
            evicting = known.index(next(each for each in known if each is not None))
            other, most = self.sides[1 - evicting], known[evicting] or 0
            if other.peak_blocks * other.limits.block_size > most * (1 + _ALIKE):
                return  # larger for certain
            self.hidden["pool"] = f"{other.name} evicted no block: its pool has at least {other.peak_blocks:,} blocks"
        for side in self.sides:
            limits = replace(side.limits, num_blocks=most // side.limits.block_size)
            side.plan = replace(side.plan, limits=limits)

    def _detail(self, cause: str) -> str | None:
        one, other = (side.limits for side in self.sides)
        match cause:
            case "prompts":
                return self._detail_of_prompts()
            case "outputs":
                return _some(self.pairs.num_other_outputs, "prompt", "with another output")
            case "order":
                return _some(self.pairs.num_moved, "prompt", "at another place")
            case "block_size":
                return _changed("", one.block_size, other.block_size, "tokens")
            case "pool":
                return self._detail_of_pool()
            case "sequences":
                return _changed("", one.max_num_seqs, other.max_num_seqs, "at once")
            case "checkpoints":
                return _all_changed(_STATES, one, other)
            case "engine":
                return _all_changed(_ENGINE, one, other)
            case "restarts":
                cuts = [self._cuts(side) for side in (0, 1)]
                return None if cuts[0] == cuts[1] else f"{len(cuts[0]):,} -> {len(cuts[1]):,}"
            case "store":
                before, after = (-int((side.from_disk or {}).get("computed_tokens", 0)) for side in self.sides)
                return _changed("", before, after, "tokens")
        return self._detail_of_routing()

    def _detail_of_prompts(self) -> str | None:
        alone = [len(self.pairs.alone(side)) for side in (0, 1)]
        parts = [
            _some(alone[0], "prompt", "only before"),
            _some(alone[1], "prompt", "only after"),
            _some(len(self.pairs.changed), "prompt", "with the same id and another text"),
        ]
        return ", ".join(part for part in parts if part) or None

    def _detail_of_pool(self) -> str | None:
        one, other = self.sides
        sizes = [f"at least {side.peak_blocks:,}" if side.limits.num_blocks is None else f"{side.limits.num_blocks:,}"
                 for side in self.sides]  # fmt: skip
        size = None if one.pool_tokens == other.pool_tokens else f"{sizes[0]} -> {sizes[1]} blocks"
        policy = _changed("", one.limits.eviction, other.limits.eviction)
        return ", ".join(part for part in (size, policy) if part) or None

    def _detail_of_routing(self) -> str | None:
        one, other = self.sides
        if one.num_sources != other.num_sources:
            return f"{one.num_sources} -> {plural(other.num_sources, 'publisher')}"
        first, second = one.sources or [], other.sources or []
        partners = enumerate(self.pairs.partners[0])
        moved = sum(p is not None and first[place] != second[p] for place, p in partners) if first and second else 0
        return _some(moved, "prompt", "sent to another publisher")

    def _cuts(self, side: int) -> list[tuple[Fraction, int]]:
        """The restarts as shares of the requests of their publisher, so that they apply to other requests, too."""
        this = self.sides[side]
        found = []
        for restart in this.restarts:
            sources = this.sources or [0] * len(this.requests)
            before = sum(source == restart.source for source in sources[: restart.place])
            found.append((Fraction(before, max(1, sources.count(restart.source))), restart.source))
        return sorted(found)

    # ------------------------------------------------------------------ runs

    def measure(self, later: frozenset[str]) -> Measures:
        """A run with these causes as in the later run, and all else as in the earlier one."""
        if later not in self._known:
            self._observe(len(self._known), num_runs(len(self.differing)))
            run = self._scheduled if self.sides[0].scheduled else self._unscheduled
            self._known[later] = run(self._segments(later), self._limits(later))
        return self._known[later]

    def _segments(self, later: frozenset[str]) -> list[list[TraceRequest]]:
        """The requests that share a cache, from one restart to the next, in order."""
        pairs = self.pairs
        prompts, order, outputs, routing, restarts = (
            int(cause in later) for cause in ("prompts", "order", "outputs", "routing", "restarts")
        )
        num_sources = self.sides[routing].num_sources
        of_source: list[list[TraceRequest]] = [[] for _ in range(num_sources)]
        for place in pairs.places(prompts, order):
            source = self._source(prompts, place, routing) % num_sources
            of_source[source].append(pairs.request(prompts, place, outputs))
        segments = []
        for source, requests in enumerate(of_source):
            cuts = [
                round(share * len(requests)) for share, each in self._cuts(restarts) if each % num_sources == source
            ]
            segments += [requests[start:end] for start, end in pairwise([0, *cuts, len(requests)])]
        return [segment for segment in segments if segment]

    def _source(self, side: int, place: int, routing: int) -> int:
        if routing != side and (partner := self.pairs.partners[side][place]) is not None:
            side, place = routing, partner
        sources = self.sides[side].sources
        return 0 if sources is None else sources[place]

    def _limits(self, later: frozenset[str]) -> Limits:
        """What each cause takes from its side. A pool keeps its tokens with another block size."""
        limits = self.sides[0].limits
        of = {cause: self.sides[cause in later].limits for cause in ("block_size", "pool", "sequences", "checkpoints",
                                                                    "engine")}  # fmt: skip
        changes = {name: getattr(of["engine"], name) for name in _ENGINE if name != "windows"}
        changes |= {name: getattr(of["checkpoints"], name) for name in _STATES}
        size, pool = of["block_size"].block_size, of["pool"]
        num_blocks = None if pool.num_blocks is None else max(1, pool.num_blocks * pool.block_size // size)
        longest = [self.sides[0].workload.longest, self.sides[1].workload.longest]
        return replace(
            limits,
            **changes,
            block_size=size,
            num_blocks=num_blocks,
            eviction=pool.eviction,
            max_num_seqs=of["sequences"].max_num_seqs,
            groups=of["engine"].groups,
            max_model_len=max(limits.max_model_len, *longest),
        )

    def _workload(self, segment: list[TraceRequest]) -> Workload:
        return replace(self.sides[0].workload, requests=segment)

    @property
    def _step_time(self) -> StepTime | None:
        return self.sides[0].step_time if self.sides[1].step_time is not None else None

    def _runs(self, segments: list[list[TraceRequest]], limits: Limits) -> list[RunResult]:
        schedule = Schedule(step_time=self._step_time)
        plan = replace(self.sides[0].plan, limits=limits)
        return [simulate(self._workload(segment), plan, schedule) for segment in segments]

    def _scheduled(self, segments: list[list[TraceRequest]], limits: Limits) -> Measures:
        runs = self._runs(segments, limits)
        hits = [run.hit_tokens() for run in runs]
        found = {
            "hit_rate": Fraction(sum(hit for hit, _ in hits), max(1, sum(looked_up for _, looked_up in hits))),
            **counts_in(*(run.facts for run in runs)),
        }
        return found if self._step_time is None else {**found, "seconds": Fraction(sum(run.total_s for run in runs))}

    def _unscheduled(self, segments: list[list[TraceRequest]], limits: Limits) -> Measures:
        """Whole chains are in the cache; looked up are the prompts."""
        num_hit = num_looked_up = num_computed = 0
        for segment in segments:
            hash_size = self.sides[0].workload.hash_size or 1
            chains = [replace(request, num_prompt_tokens=len(request.hashes) * hash_size) for request in segment]
            accesses = accesses_of(self._workload(chains), limits.block_size)
            in_prompt = np.array([request.num_prompt_tokens // limits.block_size for request in segment])
            looked_up = (
                np.arange(len(accesses.blocks)) - accesses.starts[accesses.requests] < in_prompt[accesses.requests]
            )
            distances = stack_distances(accesses)
            hit = distances < NEVER if limits.num_blocks is None else distances <= limits.num_blocks
            num_hit += int((hit & looked_up).sum())
            num_looked_up += int(looked_up.sum())
            num_computed += int((~hit).sum())
        computed = Fraction(num_computed * limits.block_size)
        return {"hit_rate": Fraction(num_hit, max(1, num_looked_up)), "computed_tokens": computed}


def parted_at(one: TraceRequest, other: TraceRequest, block_size: int) -> int | None:
    """The tokens that two prompts both begin with; with hashes whole blocks of them."""
    if one.token_ids is not None and other.token_ids is not None:
        return num_equal(one.token_ids, other.token_ids)
    return num_equal(one.hashes, other.hashes) * block_size


def _some(number: int, noun: str, rest: str) -> str | None:
    return f"{plural(number, noun)} {rest}" if number else None


def _changed(name: str, one: object, other: object, unit: str = "") -> str | None:
    if one == other:
        return None
    shown = [f"{each:,}" if type(each) is int else str(each) for each in (one, other)]
    return " ".join(part for part in (name, f"{shown[0]} -> {shown[1]}", unit) if part)


def _all_changed(names: Sequence[str], one: Limits, other: Limits) -> str | None:
    found = [_changed(name, getattr(one, name), getattr(other, name)) for name in names]
    return ", ".join(part for part in found if part) or None
