"""Many pools and policies over one workload: simulated runs, what caches without running requests would do, and what it
means in sentences.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagedcli.config import parse_bytes
from pagedcli.core.eviction import POLICIES
from pagedcli.core.limits import STEP_TOKENS
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError, UsageError
from pagedcli.events import Emit, Eviction
from pagedcli.printable import byte_text, capitalized, percent_text, plural
from pagedcli.simulation.caches import (
    NEVER,
    Accesses,
    CacheBounds,
    Ints,
    LruCurve,
    clairvoyant_hits,
    hits_per_request,
    lru_curve,
    num_warmup,
    split,
    stack_distances,
    sums_before,
    tokens_of_hits,
    unscheduled_hits,
)
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import RunResult, Schedule, known_ahead, simulate

DEFAULT_POOLS = "5%,10%,25%,50%,100%"
MOST_BLOCKS = 2**24  # blocks of a simulated pool: each takes about 200 bytes


def parse_pools(text: str, num_unique: int, block_bytes: int | None) -> list[int]:
    """Pool sizes in blocks: '4096', '5%' of the unique blocks, or '8GiB' with a model's bytes per block.

    Raises: UsageError.
    """
    return sorted({_parse_pool(part.strip(), num_unique, block_bytes) for part in text.split(",")})


def _parse_pool(text: str, num_unique: int, block_bytes: int | None) -> int:
    if re.fullmatch(r"\d+(\.\d+)?\s*%", text):
        share = float(text.rstrip("% ")) / 100
        size = max(round(share * num_unique), int(share > 0))
    elif text.isdecimal():
        size = int(text)
    else:
        try:
            num_bytes = parse_bytes(text)
        except ConfigError as error:
            raise UsageError(f"--pool: {text!r} is not a pool size", hint="for example 4096, 5% or 8GiB") from error
        if block_bytes is None:
            raise UsageError(f"--pool {text} needs the bytes of a block: name the model with -m")
        size = num_bytes // block_bytes
    if not 1 <= size <= MOST_BLOCKS:
        raise UsageError(f"--pool: {text} is {plural(size, 'block')}, but must be 1 to {MOST_BLOCKS:,}")
    return size


def parse_policies(text: str) -> list[Eviction]:
    """Eviction policies by name. Raises: UsageError."""
    names = [name.strip() for name in text.split(",")]
    found = [policy for policy in POLICIES if policy in names]
    if unknown := sorted(set(names) - set(POLICIES)):
        raise UsageError(f"--policy: unknown policy {unknown[0]!r}", hint=f"known: {', '.join(POLICIES)}")
    return found


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One pool size with one policy."""

    num_blocks: int
    policy: Eviction
    run: RunResult | None  # None: without a scheduler
    hit_blocks: tuple[int, int]  # (hit, looked up)
    hit_tokens: tuple[int, int]
    parts: dict[str, int]  # tokens by part, see misses.PARTS

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that hit."""
        return self.hit_tokens[0] / max(1, self.hit_tokens[1])


class Sweep:
    """The analyses of one workload at one block size.

    `curve` is that of a model without windows. Where there are windows, pools count blocks of all groups of layers.
    """

    def __init__(
        self,
        workload: Workload,
        accesses: Accesses,
        *,
        warmup: float = 0.0,
        windows: tuple[int | None, ...] = (None,),
        chunk: int = STEP_TOKENS,
    ) -> None:
        self.workload = workload
        self.windows = windows  # one per group of layers
        self._chunk = chunk
        self.accesses = accesses
        self.warmup = warmup
        self.distances = stack_distances(accesses)
        self.curve: LruCurve = lru_curve(accesses, self.distances, warmup)
        self._counted = np.arange(accesses.num_requests) >= num_warmup(accesses.num_requests, warmup)
        self._unlimited = hits_per_request(accesses, self.distances != NEVER)
        self._clairvoyant: dict[int, Ints] = {}  # pool size -> [R] tokens
        self._lru: dict[int, tuple[int, int]] = {}  # pool size -> (blocks, tokens), with windows

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @property
    def num_unique_blocks(self) -> int:
        """Distinct blocks of all groups of layers."""
        return self.accesses.num_unique * len(self.windows)

    def lru(self, num_blocks: int) -> tuple[int, int]:
        """(blocks, tokens) that hit under LRU without running requests; blocks of each group of layers."""
        if not self.has_windows:
            return self.curve.hits_at(num_blocks)
        if num_blocks not in self._lru:
            point = self.unscheduled(num_blocks, "lru")
            self._lru[num_blocks] = (point.hit_blocks[0], point.hit_tokens[0])
        return self._lru[num_blocks]

    def clairvoyant(self, num_blocks: int) -> Ints:
        """[R] tokens that hit if the block that is needed last is evicted, without running requests. With windows an
        upper bound, as if their layers needed no blocks."""
        if num_blocks not in self._clairvoyant:
            num_full = self.windows.count(None)
            most = num_blocks // num_full if num_full else max(1, self.accesses.num_unique)
            hits = clairvoyant_hits(self.accesses.blocks.tolist(), self.accesses.starts.tolist(), most)
            self._clairvoyant[num_blocks] = tokens_of_hits(self.accesses, np.array(hits, dtype=np.int64))
        return self._clairvoyant[num_blocks]

    def best(self, num_blocks: int) -> tuple[int, int]:
        """(tokens that hit in all with the clairvoyant, tokens of the prompts)."""
        tokens = self.accesses.prompt_tokens[self._counted]
        return int(self.clairvoyant(num_blocks)[self._counted].sum()), int(tokens.sum())

    def unscheduled(self, num_blocks: int, policy: Eviction) -> SweepPoint:
        """A pool without running requests. next-use knows all of them."""
        hits = self._hits(num_blocks, policy)
        parts = split(self.accesses, tokens_of_hits(self.accesses, hits), self._bounds(num_blocks, hits), self._counted)
        blocks = (int(hits[self._counted].sum()), int(np.diff(self.accesses.starts)[self._counted].sum()))
        return SweepPoint(num_blocks, policy, None, blocks, (parts["hit"], sum(parts.values())), parts)

    def scheduled(
        self, plan: Plan, schedule: Schedule, emit: Emit | None = None, observe: Callable[[int], None] | None = None
    ) -> SweepPoint:
        """A simulated run."""
        run = simulate(self.workload, plan, schedule, emit=emit, observe=observe)
        known = known_ahead(self.accesses.prompt_tokens, plan, schedule)
        bounds = self._bounds(plan.num_blocks, self._hits(plan.num_blocks, plan.limits.eviction, known))
        hits = np.maximum(np.asarray(run.cached_tokens), 0)
        parts = split(self.accesses, hits, bounds, run.served(self.warmup))
        tokens = run.hit_tokens(self.warmup)
        return SweepPoint(plan.num_blocks, plan.limits.eviction, run, run.hit_blocks(self.warmup), tokens, parts)

    def _hits(self, num_blocks: int, policy: Eviction, known: Ints | None = None) -> Ints:
        """[R] blocks that hit without running requests."""
        if policy != "lru" or self.has_windows:
            return unscheduled_hits(self.accesses, num_blocks, policy, known, windows=self.windows, chunk=self._chunk)
        return np.diff(sums_before(self.distances <= num_blocks)[self.accesses.starts])

    def _bounds(self, num_blocks: int, policy_hits: Ints) -> CacheBounds:
        return CacheBounds(tokens_of_hits(self.accesses, policy_hits), self.clairvoyant(num_blocks), self._unlimited)


def points(
    sweep: Sweep,
    plan: Plan,
    pools: Sequence[int],
    policies: Sequence[Eviction],
    schedule: Schedule | None,
    *,
    emit: Emit | None = None,
    observe: Callable[[int, Eviction, int], None] | None = None,
) -> Iterator[SweepPoint]:
    """A point for every pool and policy. `schedule` None: without running requests. `observe` receives pool, policy and
    the number of finished requests."""
    for num_blocks in pools:
        for policy in policies:
            if schedule is None:
                yield sweep.unscheduled(num_blocks, policy)
                continue

            def finished(num_done: int, num_blocks: int = num_blocks, policy: Eviction = policy) -> None:
                if observe is not None:
                    observe(num_blocks, policy, num_done)

            limits = replace(plan.limits, num_blocks=num_blocks, eviction=policy)
            yield sweep.scheduled(replace(plan, limits=limits), schedule, emit, finished)


_SHARE = 0.99  # of the hits without limit, for which a cache is sized
_NOTABLE = 0.001  # a gain of less than 0.1 points is none
NEARLY = 0.01  # a hit rate within a point of the best is as good


def answers(sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None) -> list[str]:
    """The sentences below the tables."""
    refused = [f"{capitalized(words)}." for words in _refused(points)]
    if not sweep.curve.ceiling[1]:
        benefit = "No prompt repeats the beginning of an earlier one by a full block: a prefix cache has no benefit."
        return [*refused, benefit]
    return [*refused, _ceiling(sweep, points, block_bytes), *_in_use(points), *_policies(points)]


def enough_point(sweep: Sweep, plan: Plan, swept: Sequence[SweepPoint], schedule: Schedule | None) -> SweepPoint | None:
    """The smallest pool tried, with the first policy, that hits nearly as much as a cache without limit and refuses no
    request for want of blocks. Smaller ones than those of the sweep are tried by the size that LRU alone needs."""
    policy = swept[0].policy
    tried = [point for point in swept if point.policy == policy]
    least = sweep.curve.ceiling[1] / max(1, sweep.curve.num_tokens) - NEARLY

    def enough() -> SweepPoint | None:
        fewest = min(_num_refused(point) for point in tried)
        good = [point for point in tried if point.hit_rate >= least and _num_refused(point) == fewest]
        return min(good, key=lambda point: point.num_blocks, default=None)

    if sweep.has_windows or least <= 0:  # there is no curve in one pass, or nothing to look for
        return enough()
    num_cached = sweep.curve.size_for(least * sweep.curve.num_tokens / sweep.curve.ceiling[1]) or 1
    num_needed = (
        1 if schedule is None else plan.limits.tables.most_blocks(sweep.workload.longest, plan.limits.chunk_size)
    )
    num_used = max((point.run.facts.peak_used_blocks for point in tried if point.run is not None), default=0)
    for num_blocks in sorted({max(num_cached, num_needed), num_cached + max(num_used, num_needed)}):
        found = enough()
        if found is None or num_blocks < found.num_blocks:
            tried += points(sweep, plan, [num_blocks], [policy], schedule)
    return enough()


def _num_refused(point: SweepPoint) -> int:
    return 0 if point.run is None else point.run.num_refused


def pool_verdict(sweep: Sweep, points: Sequence[SweepPoint], enough: SweepPoint | None, block_bytes: int | None) -> str:
    """The pool that hits nearly as much as one without limit, or why there is none."""
    curve = sweep.curve
    unlimited, of_all = curve.ceiling[1] / max(1, curve.num_tokens), _percent(curve.ceiling[1], curve)
    certainty = "exact by simulation"
    if all(point.run is not None and point.run.num_refused == point.run.num_requests for point in points):
        finding = _refused(points)[0]
    elif unlimited <= NEARLY:
        benefit = "as the prompts are, a prefix cache has little benefit"
        finding = f"{benefit}: even without limit {of_all} of their tokens hit"
        certainty = "exact for this trace"
    elif enough is None:
        best = max(points, key=lambda point: point.hit_rate)
        finding = (
            f"no pool that was tried hits within 1 point of the {of_all} of a cache without limit: the best is"
            f" {plural(best.num_blocks, 'block')} with {percent_text(best.hit_rate)}"
        )
    else:
        size = enough.num_blocks
        memory = "" if block_bytes is None else f" ({byte_text(size * block_bytes)})"
        finding = (
            f"{plural(size, 'block')}{memory} {'is' if size == 1 else 'are'} enough to hit within 1 point of a cache"
            f" without limit: {percent_text(enough.hit_rate)} of the prompts' tokens, without limit {of_all}"
        )
        if enough.run is None:
            certainty = f"exact for {enough.policy.upper()} without running requests, which need blocks, too"
        else:
            certainty += f"; {plural(enough.run.facts.num_preemptions, 'preemption')}"
    return f"{capitalized(finding)} ({certainty})."


def _refused(points: Sequence[SweepPoint]) -> list[str]:
    runs = [point.run for point in points if point.run is not None and point.run.num_refused == point.run.num_requests]
    most = max((run.plan.num_blocks for run in runs), default=0)
    return [f"no request fits into a pool of {plural(most, 'block')}: name larger ones with --pool"] if most else []


def _ceiling(sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None) -> str:
    curve = sweep.curve
    without_limit = f"Without a limit {_percent(curve.ceiling[1], curve)} of the prompts' tokens hit."
    if sweep.has_windows or any(point.run is not None for point in points):
        return without_limit
    size = curve.size_for(_SHARE) or 0
    memory = "" if block_bytes is None else f" ({byte_text(size * block_bytes)})"
    enough = f"{100 * _SHARE:.0f} % of that with {plural(size, 'block')}{memory}"
    return f"{without_limit} LRU without running requests gets {enough}."


def _in_use(points: Sequence[SweepPoint]) -> list[str]:
    runs = [point.run for point in points if point.run is not None]
    most = max((run.facts.peak_used_blocks for run in runs), default=0)
    if not most:
        return []
    sentences = [f"Running requests use up to {plural(most, 'block')} at once; the rest of a pool is the cache."]
    preempted = [run for run in runs if run.facts.num_preemptions]
    if preempted:
        largest = max(run.plan.num_blocks for run in preempted)
        sentences.append(f"Requests are preempted in pools of up to {plural(largest, 'block')}.")
    return sentences


def _policies(points: Sequence[SweepPoint]) -> list[str]:
    """Where another policy beats LRU."""
    sentences = []
    for size in sorted({point.num_blocks for point in points}):
        rates = {point.policy: point.hit_tokens[0] / max(1, point.hit_tokens[1]) for point in points
                 if point.num_blocks == size}  # fmt: skip
        best = max(rates, key=lambda policy: rates[policy])
        if "lru" in rates and rates[best] - rates["lru"] >= _NOTABLE:
            gain = f"{percent_text(rates[best])} instead of {percent_text(rates['lru'])} (lru)"
            sentences.append(f"{best} gets {gain} at {plural(size, 'block')}.")
    return sentences


def _percent(tokens: int, curve: LruCurve) -> str:
    return percent_text(tokens / max(1, curve.num_tokens))
