"""Two runs side by side: which prompts are the same, what differs, and what each difference alone changes in the
simulator. Used by `pagedcli diff`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import attrgetter
from pathlib import Path

from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.printable import plural
from pagedcli.simulation.requests import Chains, Request, Requests
from pagedcli.simulation.run import recorded_plan, simulate
from pagedcli.simulation.sources import read_recorded_run
from pagedcli.views.stats import RunStats

CAUSES = {
    "prompts": "other prompts",
    "order": "another order",
    "block_size": "another block size",
    "pool": "another pool",
    "policy": "another eviction policy",
    "limits": "other limits",
    "together": "together",
    "store": "tokens read from disk",
    "unexplained": "unexplained",
}
_FIELDS = {  # limits that a cause takes from the later run
    "block_size": ("block_size",),
    "policy": ("eviction",),
    "limits": (
        "max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size", "min_prefill_tokens", "enable_prefix_caching",
        "preemption_policy", "checkpoints", "num_state_slots", "state_bytes", "groups",
    ),
}  # fmt: skip
Measures = dict[str, Fraction]
"""What a run did, by name: the hit rate, and counts."""
Key = tuple[object, ...]


def _measures(facts: RunFacts, hit: int, looked_up: int) -> Measures:
    return {
        "hit_rate": Fraction(hit, max(1, looked_up)),
        "computed_tokens": Fraction(facts.num_computed_tokens),
        "preemptions": Fraction(facts.num_preemptions),
    }


def _less(one: Measures, *others: Measures) -> Measures:
    return {name: value - sum((other[name] for other in others), Fraction(0)) for name, value in one.items()}


@dataclass(slots=True)
class Side:
    """One of the two runs."""

    name: str
    workload: Requests
    plan: Plan
    recorded: Measures | None = None  # what it did; None: it has not run
    seconds: float | None = None  # time of its steps; None: it has not run
    from_disk: Measures = field(default_factory=dict)  # what reading blocks from a prefix store changed in it

    @property
    def limits(self) -> Limits:
        return self.plan.limits

    @property
    def pool_tokens(self) -> int | None:
        return None if self.limits.num_blocks is None else self.limits.num_blocks * self.limits.block_size


# ---------------------------------------------------------------------- recorded runs


def recorded_sides(before: Path, after: Path) -> tuple[Side, Side, str | None]:
    """Two recorded runs, and why their prompts cannot be compared; None: they can. Raises: UsageError or TraceError."""
    chains = Chains()
    one, other = (_recorded_side(path, chains) for path in (before, after))
    have_tokens = one.workload.hash_size is None and other.workload.hash_size is None
    return one, other, None if have_tokens else _compare_by_hashes(one, other)


def _recorded_side(path: Path, chains: Chains) -> Side:
    stats = RunStats()
    workload, state = read_recorded_run(path, stats, chains=chains)
    facts = stats.facts
    measured, disk_tokens = _measures(facts, facts.num_cached_tokens, facts.num_prompt_tokens), facts.num_disk_tokens
    from_disk = {
        "hit_rate": Fraction(disk_tokens, max(1, facts.num_prompt_tokens)),
        "computed_tokens": Fraction(-disk_tokens),
    }
    return Side(path.name, workload, recorded_plan(state), measured, 1e-9 * facts.steps_ns, from_disk)


def _compare_by_hashes(before: Side, after: Side) -> str | None:
    """Not all tokens are recorded: the hashes of their blocks stand for the prompts of both runs. Returns why they
    cannot."""
    sides, why = (before, after), None
    hashed = [side for side in sides if side.limits.enable_prefix_caching]
    if before.limits.block_size != after.limits.block_size:
        why = "blocks of two sizes have different hashes"
    elif len(before.limits.windows) != len(after.limits.windows):
        why = "blocks of other groups of layers have different hashes"
    elif len(hashed) < 2:
        why = "a run without prefix caching has no hashes of blocks"
    for side in sides:
        side.workload.hash_size = side.limits.block_size
        for request in side.workload.requests:
            request.token_ids = request.output_ids = request.stopped = None
    named = [[(each.label, each.num_prompt_tokens) for each in side.workload.requests] for side in sides]
    if len(hashed) == 1 and named[0] == named[1]:
        for side in sides:
            side.workload.requests = hashed[0].workload.requests
            side.workload.hash_size = hashed[0].workload.hash_size
    return None if why is None else f"{why}, and a run was recorded without tokens"


# ---------------------------------------------------------------------- pairs of prompts


class Pairs:
    """The prompts of two runs, each with its partner: one of equal content, or else one with the same id.

    `partners` [2]: for each request of a side the place of its partner; None: there is none. `same`: places in the
    first run whose partner has the same content.
    """

    def __init__(self, before: Side, after: Side) -> None:
        self.requests = (before.workload.requests, after.workload.requests)
        num_before, num_after = map(len, self.requests)
        self.partners: tuple[list[int | None], list[int | None]] = ([None] * num_before, [None] * num_after)
        self.same: set[int] = set()
        size = before.workload.hash_size

        def content(request: Request) -> Key:
            if size is None:
                assert request.token_ids is not None, "without hashes there are tokens"
                return request.token_ids.tobytes(), request.cache_salt
            return request.hashes[: request.num_prompt_tokens // size].tobytes(), request.num_prompt_tokens

        def identity(request: Request) -> Key:  # the user's own id, or its number, and its place in the row
            return request.label, request.request_id.partition("/")[2]

        self._match(lambda request: (identity(request), content(request)), same=True)  # the surest first
        self._match(content, same=True)
        self._match(identity, same=False)

    def _match(self, key: Callable[[Request], Key], *, same: bool) -> None:
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

    def alone(self, side: int) -> list[Request]:
        """The prompts that only this side has."""
        return [self.requests[side][place] for place, each in enumerate(self.partners[side]) if each is None]

    @property
    def changed(self) -> list[tuple[Request, Request]]:
        """Prompts of the same id with another text."""
        return [
            (self.requests[0][place], self.requests[1][partner])
            for place, partner in enumerate(self.partners[0])
            if partner is not None and place not in self.same
        ]

    def counts(self, cause: str) -> dict[str, int]:
        """Prompts by how they differ, for the causes `prompts` and `order`."""
        first, second = self.requests
        if cause == "order":
            partners = [partner for partner in self.partners[0] if partner is not None]
            moved = sum(one != other for one, other in zip(partners, sorted(partners), strict=True))
            return {"at another place": moved}
        of = attrgetter("num_output_tokens", "output_ids", "stopped", "max_new_tokens", "num_samples", "is_random")
        return {
            "only before": len(self.alone(0)),
            "only after": len(self.alone(1)),
            "with the same id and another text": len(self.changed),
            "with another output": sum(of(first[at]) != of(second[self.partners[0][at] or 0]) for at in self.same),
        }

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


# ---------------------------------------------------------------------- what differs


class Comparison:
    """What differs between two runs, in words (`details`), and the `parts` of the change: by each difference alone, by
    all of them together beyond that, by what was read from disk, and what the simulator does not reproduce.

    `no_prompts`: why prompts cannot be compared; None: they can.
    """

    def __init__(self, before: Side, after: Side, no_prompts: str | None = None) -> None:
        self.sides, self.no_prompts, self.pairs = (before, after), no_prompts, Pairs(before, after)
        details = {cause: self._detail(cause) for cause in CAUSES}
        self.details = {cause: detail for cause, detail in details.items() if detail is not None}
        self.differing = frozenset(self.details)
        first, alone = self._run(()), {cause: self._run((cause,)) for cause in self.details}
        last = self._run(tuple(alone)) if len(alone) > 1 else next(iter(alone.values()), first)
        self.measured = (before.recorded or first, after.recorded or last)
        self.change = _less(self.measured[1], self.measured[0])
        self.parts = {cause: _less(run, first) for cause, run in alone.items()}
        self._add("together", "beyond what each changes alone", _less(_less(last, first), *self.parts.values()))
        disk = [{name: side.from_disk.get(name, Fraction(0)) for name in first} for side in self.sides]
        tokens = [-int(each["computed_tokens"]) for each in disk]
        self._add("store", f"{tokens[0]:,} -> {plural(tokens[1], 'token')}", _less(disk[1], disk[0]))
        self._add("unexplained", "recorded, less simulated", _less(self.change, *self.parts.values()))

    def _add(self, cause: str, detail: str, part: Measures) -> None:
        if any(part.values()):
            self.details[cause], self.parts[cause] = detail, part

    def _detail(self, cause: str) -> str | None:
        """What differs, in words; None: nothing."""
        if cause in ("prompts", "order"):
            counts = {} if self.no_prompts is not None else self.pairs.counts(cause)
            return ", ".join(f"{plural(count, 'prompt')} {words}" for words, count in counts.items() if count) or None
        one, other = (side.limits for side in self.sides)
        names = ["windows" if name == "groups" else name for name in _FIELDS.get(cause, ())]
        both = {f"{name} " * (len(names) > 1): (getattr(one, name), getattr(other, name)) for name in names}
        if cause == "pool" and self.sides[0].pool_tokens != self.sides[1].pool_tokens:
            both = {"blocks ": (one.num_blocks, other.num_blocks)}
        return ", ".join(f"{name}{_shown(a)} -> {_shown(b)}" for name, (a, b) in both.items() if a != b) or None

    def _run(self, later: Sequence[str]) -> Measures:
        """Measure a run with these causes as in the later run, and all else as in the earlier one."""
        prompts, order = (int(cause in later) for cause in ("prompts", "order"))
        requests = [self.pairs.requests[prompts][place] for place in self.pairs.places(prompts, order)]
        changes = {
            name: getattr(self.sides[cause in later].limits, name) for cause, names in _FIELDS.items() for name in names
        }
        first, tokens = self.sides[0], self.sides["pool" in later].pool_tokens  # kept with other blocks
        changes["num_blocks"] = None if tokens is None else max(1, tokens // changes["block_size"])
        changes["max_model_len"] = max(first.limits.max_model_len, *(side.workload.longest for side in self.sides))
        plan = replace(first.plan, limits=replace(first.limits, **changes))
        run = simulate(replace(first.workload, requests=requests), plan)
        return _measures(run.facts, *run.hit_tokens())


def _shown(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)
