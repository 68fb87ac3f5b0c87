"""Many pools and policies over one workload: simulated runs, and what caches without running requests would do."""

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
from pagedcli.printable import plural
from pagedcli.simulation.accesses import Accesses, Ints, num_warmup
from pagedcli.simulation.bounds import clairvoyant_hits
from pagedcli.simulation.misses import CacheBounds, split
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import RunResult, Schedule, known_ahead, simulate
from pagedcli.simulation.stack_distance import NEVER, LruCurve, hits_per_request, lru_curve, stack_distances
from pagedcli.simulation.unscheduled import tokens_of_hits, unscheduled_hits

DEFAULT_POOLS = "5%,10%,25%,50%,100%"
MOST_BLOCKS = 2**24  # of a simulated pool: each takes about 200 bytes


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
        self.windows = windows  # of each group of layers
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

    def rate(self, accesses: Accesses, num_blocks: int, policy: Eviction, known: Ints | None) -> float:
        """Share of the prompts' tokens that hit without running requests, of these accesses to the workload."""
        if policy == "lru" and not self.has_windows:
            curve = lru_curve(accesses, stack_distances(accesses), self.warmup)
            return curve.hits_at(num_blocks)[1] / max(1, curve.num_tokens)
        hits = unscheduled_hits(accesses, num_blocks, policy, known, windows=self.windows, chunk=self._chunk)
        first = num_warmup(accesses.num_requests, self.warmup)
        tokens = int(tokens_of_hits(accesses, hits)[first:].sum())
        return tokens / max(1, int(accesses.prompt_tokens[first:].sum()))

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
        total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.distances <= num_blocks)])
        hits: Ints = total[self.accesses.starts[1:]] - total[self.accesses.starts[:-1]]
        return hits

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
