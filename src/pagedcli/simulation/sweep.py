"""Many pools and policies over one workload: real runs, and what caches without running requests would do."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from pagedcli.config import parse_bytes
from pagedcli.engine.engine_plan import Plan
from pagedcli.errors import ConfigError, UsageError
from pagedcli.events import Emit
from pagedcli.simulation.accesses import Accesses, num_warmup
from pagedcli.simulation.misses import CacheBounds, split
from pagedcli.simulation.requests import Workload
from pagedcli.simulation.run import RunResult, Schedule, simulate
from pagedcli.simulation.stack_distance import NEVER, LruCurve, hits_per_request, lru_curve, stack_distances

DEFAULT_POOLS = "5%,10%,25%,50%,100%"
MOST_BLOCKS = 2**26  # of a simulated pool: each takes about 200 bytes


def parse_pools(text: str, num_unique: int, token_bytes: float | None, block_size: int) -> list[int]:
    """Pool sizes in blocks: '4096', '5%' of the unique blocks, or '8GiB' with a model's bytes per token.

    Raises: UsageError.
    """
    sizes = [_parse_pool(part.strip(), num_unique, token_bytes, block_size) for part in text.split(",")]
    return sorted(set(sizes))


def _parse_pool(text: str, num_unique: int, token_bytes: float | None, block_size: int) -> int:
    if re.fullmatch(r"[\d.]+\s*%", text):
        size = round(float(text.rstrip("% ")) / 100 * num_unique)
    elif text.isdecimal():
        size = int(text)
    else:
        try:
            num_bytes = parse_bytes(text)
        except ConfigError as error:
            raise UsageError(f"--pool: {text!r} is no pool size", hint="for example 4096, 5% or 8GiB") from error
        if token_bytes is None:
            raise UsageError(f"--pool {text} needs the bytes of a token: name the model with -m")
        size = int(num_bytes // (token_bytes * block_size))
    if not 1 <= size <= MOST_BLOCKS:
        raise UsageError(f"--pool: {text} is {size:,} blocks, but must be 1 to {MOST_BLOCKS:,}")
    return size


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One pool size with one policy."""

    num_blocks: int
    policy: str
    run: RunResult | None  # None: without a scheduler
    hit_blocks: tuple[int, int]  # (hit, looked up)
    hit_tokens: tuple[int, int]
    parts: dict[str, int]  # tokens by part, see misses.PARTS


class Sweep:
    """The analyses of one workload at one block size."""

    def __init__(self, workload: Workload, accesses: Accesses, *, warmup: float = 0.0) -> None:
        self.workload = workload
        self.accesses = accesses
        self.warmup = warmup
        self.distances = stack_distances(accesses)
        self.curve: LruCurve = lru_curve(accesses, self.distances, warmup)
        self._counted = np.arange(accesses.num_requests) >= num_warmup(accesses.num_requests, warmup)
        self._unlimited = hits_per_request(accesses, self.distances != NEVER)

    def unscheduled(self, num_blocks: int, policy: str) -> SweepPoint:
        """A pool without running requests."""
        bounds = self._bounds(num_blocks, policy)
        first = self.accesses.first_access(self.warmup)
        hit = self.distances[first:] <= num_blocks
        parts = split(self.accesses, bounds.policy, bounds, self._counted)
        tokens = (parts["hit"], sum(parts.values()))
        return SweepPoint(num_blocks, policy, None, (int(hit.sum()), len(hit)), tokens, parts)

    def scheduled(
        self,
        plan: Plan,
        policy: str,
        schedule: Schedule,
        observe: Callable[[int], None] | None = None,
        emit: Emit | None = None,
    ) -> SweepPoint:
        """A real run."""
        run = simulate(self.workload, plan, schedule, emit=emit, observe=observe)
        served = run.served(self.warmup)
        hits = np.maximum(np.asarray(run.cached_tokens), 0)
        parts = split(self.accesses, hits, self._bounds(plan.num_blocks, policy), served)
        return SweepPoint(plan.num_blocks, policy, run, run.hit_blocks(self.warmup), run.hit_tokens(self.warmup), parts)

    def _bounds(self, num_blocks: int, policy: str) -> CacheBounds:
        hits = hits_per_request(self.accesses, self.distances <= num_blocks)
        return CacheBounds(hits, None, self._unlimited)


def points(
    sweep: Sweep,
    plan: Plan,
    pools: Iterable[int],
    policies: Iterable[str],
    schedule: Schedule | None,
    observe: Callable[[int, str, int], None] | None = None,
    emit: Emit | None = None,
) -> list[SweepPoint]:
    """A point for every pool and policy. `schedule` None: without running requests. `observe` receives pool, policy and
    finished requests."""
    found = []
    for num_blocks in pools:
        for policy in policies:
            if schedule is None:
                found.append(sweep.unscheduled(num_blocks, policy))
                continue

            def seen(num_done: int, num_blocks: int = num_blocks, policy: str = policy) -> None:
                if observe is not None:
                    observe(num_blocks, policy, num_done)

            found.append(sweep.scheduled(replace(plan, num_blocks=num_blocks), policy, schedule, seen, emit))
    return found
