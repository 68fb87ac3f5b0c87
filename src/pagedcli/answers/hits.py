"""How much a prefix cache finds: in a pool, in pools of other sizes and without a limit; and which pool is as good.

By the real scheduler and block manager. Read by `simulate`, `plan` and cures.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from pagedcli.config import parse_bytes
from pagedcli.core.budget import blocks_for
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan
from pagedcli.errors import ConfigError, UsageError
from pagedcli.events import Emit, Eviction
from pagedcli.printable import byte_text, percent_text, plural
from pagedcli.simulation.caches import Accesses, LruCurve, accesses_of, lru_curve
from pagedcli.simulation.requests import Requests
from pagedcli.simulation.run import RunResult, Schedule, simulate

NEARLY = 0.01  # a hit rate within a point of the one without limit is as good
MOST_BLOCKS = 2**24  # blocks of a simulated pool: each takes about 200 bytes
_FINE = 64  # the smallest pool is found to within this part of it
_MOST_DRAWN = 300  # points of a curve
PartOf = tuple[int, int]  # a part, and the whole


class OutOfTimeError(Exception):
    """The time for simulated runs is over."""


@dataclass(frozen=True, slots=True)
class PoolHits:
    """What one pool finds of the prompts when they are first computed."""

    num_blocks: int
    policy: Eviction
    tokens: PartOf  # tokens found, of all prompt tokens of the requests that are served
    blocks: PartOf  # blocks found, of all full blocks of these prompts
    run: RunResult | None = None  # None: by stack distances

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens."""
        return self.tokens[0] / max(1, self.tokens[1])

    @property
    def num_refused(self) -> int:
        """Requests that never fit into the pool."""
        return 0 if self.run is None else self.run.num_refused


@dataclass(frozen=True, slots=True)
class Hits:
    """What a cache finds of these requests at each size, under one eviction policy."""

    here: PoolHits  # the pool of the plan
    unlimited: PoolHits  # a pool in which nothing is ever evicted
    ideal_hit_rate: float  # share of the prompt tokens without a limit, if requests came one at a time
    enough: PoolHits  # the smallest pool within NEARLY of the unlimited one that refuses no more requests
    tried: tuple[PoolHits, ...]  # every pool that was simulated, the smallest first
    doubt: str | None = None  # why smaller pools than `enough` may do, in words; None: a tenth less does not

    def document(self) -> dict[str, Any]:
        """The pool that is as good, for JSON."""
        return {"num_blocks": self.enough.num_blocks, "hit_rate": self.enough.hit_rate, "doubt": self.doubt}


def hits(
    requests: Requests,
    plan: Plan,
    schedule: Schedule | None = None,
    *,
    known: Iterable[PoolHits] = (),
    accesses: Accesses | None = None,
    warmup: float = 0.0,
    search_s: float | None = None,
    observe: Callable[[int, int], None] | None = None,
) -> Hits:
    """Simulate the requests in the plan's pool, in one without limit, and in as many as it takes to find the smallest
    one that is as good.

    `known`: pools that have been simulated. `search_s`: seconds of processor time after which the search for a smaller
    pool ends. `observe` receives the pool and the number of finished requests after each step; an OutOfTimeError that
    it raises ends the search. Raises: OutOfTimeError before the run without limit has ended.
    """
    limits, tried = plan.limits, {each.num_blocks: each for each in known}
    accesses = accesses_of(requests, limits.block_size) if accesses is None else accesses
    curve, deadline_s = lru_curve(accesses, warmup), float("inf")

    def find(num_blocks: int) -> PoolHits:
        def check(num_done: int) -> None:
            if observe is not None:
                observe(num_blocks, num_done)
            if time.thread_time() > deadline_s:
                raise OutOfTimeError

        if num_blocks not in tried:
            tried[num_blocks] = found_in(requests, plan, num_blocks, schedule, warmup=warmup, observe=check)
        return tried[num_blocks]

    least = least_pool(requests, limits)
    unlimited, here = find(_without_limit(requests, accesses, limits, least)), find(limits.num_blocks or least)
    if search_s is not None:
        deadline_s = time.thread_time() + search_s
    doubt = None
    try:
        _search(lambda num: _is_enough(find(num), unlimited), least, tried, _guesses(curve, unlimited, limits))
    except OutOfTimeError:
        doubt = "smaller pools were not all tried, to save time"
    good = [each for each in tried.values() if _is_enough(each, unlimited)]
    enough = min(good, key=lambda each: each.num_blocks)
    pools = tuple(tried[num_blocks] for num_blocks in sorted(tried))
    return Hits(here, unlimited, curve.ceiling[1] / max(1, curve.num_tokens), enough, pools, doubt)


def hits_one_at_a_time(curve: LruCurve, num_blocks: int) -> Hits:
    """Find the hits by stack distances: exact for LRU and requests that come one at a time and generate nothing."""

    def find(size: int) -> PoolHits:
        blocks, tokens = curve.hits_at(size)
        return PoolHits(size, "lru", (tokens, curve.num_tokens), (blocks, curve.num_blocks))

    unlimited = find(int(curve.sizes[-1]) if len(curve.sizes) else 1)
    here, enough = find(num_blocks), find(curve.size_for(unlimited.tokens[0] - NEARLY * curve.num_tokens))
    drawn = curve.sizes[:: max(1, len(curve.sizes) // _MOST_DRAWN)].tolist()
    pools = (*map(find, drawn), unlimited)
    return Hits(here, unlimited, unlimited.hit_rate, enough, pools, "LRU alone, without the blocks of running requests")


def found_in(
    requests: Requests,
    plan: Plan,
    num_blocks: int,
    schedule: Schedule | None = None,
    *,
    warmup: float = 0.0,
    emit: Emit | None = None,
    observe: Callable[[int], None] | None = None,
) -> PoolHits:
    """Simulate a run with another pool than the plan's. `warmup`: share of the requests that is not counted."""
    plan = replace(plan, limits=replace(plan.limits, num_blocks=num_blocks))
    run = simulate(requests, plan, schedule, emit=emit, observe=observe)
    return PoolHits(num_blocks, plan.limits.eviction, run.hit_tokens(warmup), run.hit_blocks(warmup), run)


def least_pool(requests: Requests, limits: Limits) -> int:
    """Blocks of the smallest pool that refuses no request which a larger one serves."""
    lengths = [
        each.num_positions
        for each in requests.requests
        if each.num_positions + (each.continuations is None) <= limits.max_model_len
    ]
    return max(1, limits.tables.most_blocks(max(lengths, default=0), limits.chunk_size))


def hits_in_words(found: Hits, block_bytes: int | None = None) -> str:
    """What the plan's pool finds, and which one finds as much as one without limit: the first line of `simulate`."""
    here, enough, unlimited = found.here, found.enough, found.unlimited
    if not unlimited.tokens[1]:
        return "No request can be served, whatever the size of the pool."

    def pool(each: PoolHits) -> str:
        return plural(each.num_blocks, "block") + (
            f" ({byte_text(each.num_blocks * block_bytes)})" if block_bytes else ""
        )

    def finds(each: PoolHits) -> str:
        return f"{pool(each)} {'finds' if each.num_blocks == 1 else 'find'} {percent_text(each.hit_rate)}"

    def as_much(each: PoolHits) -> str:
        if percent_text(each.hit_rate) == (rate := percent_text(unlimited.hit_rate)):
            return "as much as an unlimited cache"
        return f"within 1 point of the {rate} of an unlimited cache"

    doubt = "" if found.doubt is None else f" ({found.doubt})"
    num_refused = here.num_refused - unlimited.num_refused
    first = f"{finds(here)} of the prompt tokens"
    if num_refused > 0:
        first = f"{plural(num_refused, 'request')} {'does' if num_refused == 1 else 'do'} not fit into {pool(here)}"
    if unlimited.hit_rate <= NEARLY:
        all_fit = f"; all fit into {pool(enough)}" if num_refused > 0 else ""
        most = percent_text(unlimited.hit_rate)
        return (
            f"{first}{all_fit}; the prompts share almost nothing as they are: an unlimited cache finds {most}{doubt}."
        )
    if enough.num_blocks == here.num_blocks:
        return f"{first}, {as_much(here)}{doubt}."
    if _is_enough(here, unlimited):
        return f"{first}, {as_much(here)}; {pool(enough)} would do{doubt}."
    return f"{first}; {finds(enough)}, {as_much(enough)}{doubt}."


def _is_enough(found: PoolHits, unlimited: PoolHits) -> bool:
    return found.num_refused <= unlimited.num_refused and found.hit_rate >= unlimited.hit_rate - NEARLY


def a_tenth_less(num_blocks: int) -> int:
    """The next smaller pool to try: where this one is enough, it should not be."""
    return num_blocks - max(1, num_blocks // 10)


def _search(is_enough: Callable[[int], bool], least: int, tried: Iterable[int], guesses: Iterable[int]) -> None:
    """Try pools until the smallest one that is enough is known, to within a part, and a tenth less is known not to be.
    Runs with a scheduler are not monotone: where a tenth less is enough after all, the search starts again below it."""
    floor = low = least - 1  # refuses a request
    high = min(num for num in list(tried) if num > low and is_enough(num))
    low = max(low, *(num for num in tried if num < high), 0)
    for guess in guesses:
        if low < guess < high:
            low, high = (low, guess) if is_enough(guess) else (guess, high)
    while True:
        while high - low > max(1, high // _FINE):
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        fewer = a_tenth_less(high)
        if fewer <= floor or not is_enough(fewer):
            return
        low, high = floor, fewer


def _guesses(curve: LruCurve, unlimited: PoolHits, limits: Limits) -> list[int]:
    """Pools to begin with: what LRU alone would need, and the same with room for the requests that run at once."""
    cached = curve.size_for(unlimited.tokens[0] - NEARLY * unlimited.tokens[1]) * len(limits.groups)
    running = 0 if unlimited.run is None else unlimited.run.facts.peak_used_blocks
    return [cached + running, cached]


def _without_limit(requests: Requests, accesses: Accesses, limits: Limits, least: int) -> int:
    """Blocks of a pool in which no content is ever evicted: of all prompts, of everything that is generated, and copies
    in the sequences that run at once, which are evicted before content is."""
    num_sequences = own = 0
    for each in requests.requests:
        num = each.num_samples if each.continuations is None else len(each.continuations)
        num_sequences += num
        own += num * (blocks_for(each.num_positions - each.num_context_tokens, limits.block_size) + 2)
    copies = min(num_sequences, limits.max_num_seqs) * least
    return min(MOST_BLOCKS, accesses.num_unique * len(limits.groups) + own * len(limits.groups) + copies)


def parse_pool(text: str, num_unique: int, block_bytes: int | None) -> int:
    """'4096', '5%' of the unique blocks, or '8GiB' with a model's bytes per block. Raises: UsageError."""
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
