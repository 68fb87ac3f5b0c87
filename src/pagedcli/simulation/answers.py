"""What a sweep means, in sentences: how much memory, what doubling it gains, and what else would help."""

from collections.abc import Callable, Sequence

import numpy as np

from pagedcli.core.prefixes import WINDOW_ROWS, WINDOW_TOKENS
from pagedcli.events import Eviction
from pagedcli.printable import byte_text, percent_text, plural
from pagedcli.simulation.accesses import Accesses, Ints, accesses_of
from pagedcli.simulation.stack_distance import LruCurve, lru_curve, stack_distances
from pagedcli.simulation.sweep import Sweep, SweepPoint

SHARES = (0.90, 0.95, 0.99)
_MOST_ACCESSES = 2**22  # of an LRU curve at another block size
_MOST_REPLAYED = 2**17  # accesses of a workload that is run again, block by block: a few seconds
_NOTABLE = 0.001  # a gain of less than 0.1 points is none


Known = Callable[[Ints, Eviction], Ints | None]
"""What next-use knows of requests with prompts of these lengths: see unscheduled_hits."""


def answers(
    sweep: Sweep, points: Sequence[SweepPoint], block_bytes: int | None, known: Known = lambda tokens, policy: None
) -> list[str]:
    """The sentences below the tables."""
    if not sweep.curve.ceiling[1]:
        return ["No prompt repeats the beginning of an earlier one by a full block: a prefix cache has no benefit."]
    pools = sorted({point.num_blocks for point in points})
    policy = _answered_policy(sweep, [point for point in points if point.num_blocks == pools[0]])
    return [
        _ceiling(sweep, block_bytes),
        *_doubling(sweep, pools, points),
        *_in_use(points),
        *_policies(points),
        *_reordering(sweep, pools[0], policy, known),
        *_block_sizes(sweep, pools[0], policy, known),
    ]


def _answered_policy(sweep: Sweep, points: Sequence[SweepPoint]) -> Eviction:
    """The policy that the answers are for: the best of these points; lru if the trace is too large to be run again."""
    if len(sweep.accesses.blocks) > _MOST_REPLAYED:
        return "lru"
    return max(points, key=lambda point: point.hit_tokens[0] / max(1, point.hit_tokens[1])).policy


def _ceiling(sweep: Sweep, block_bytes: int | None) -> str:
    curve = sweep.curve
    without_limit = f"Without a limit {_percent(curve.ceiling[1], curve)} of the prompts' tokens hit."
    if sweep.has_windows:
        return without_limit
    sizes = [curve.size_for(share) or 0 for share in SHARES]
    texts = [f"{size:,}" if block_bytes is None else f"{size:,} ({byte_text(size * block_bytes)})" for size in sizes]
    shares = " / ".join(f"{100 * share:.0f}" for share in SHARES)
    blocks = "block" if sizes[-1] == 1 else "blocks"
    return f"{without_limit} LRU without running requests gets {shares} % of that with {' / '.join(texts)} {blocks}."


def _doubling(sweep: Sweep, pools: Sequence[int], points: Sequence[SweepPoint]) -> list[str]:
    gains, curve = [], sweep.curve
    for size in pools:
        before, after = sweep.lru(size)[1], sweep.lru(2 * size)[1]
        if after - before >= _NOTABLE * curve.num_tokens:
            gains.append(f"from {_percent(before, curve)} to {_percent(after, curve)} at {plural(size, 'block')}")
    if gains:
        return [f"Doubling the memory raises the hit rate {', '.join(gains)} (LRU without running requests)."]
    sentence = "Doubling any of these pools raises the hit rate by less than 0.1 points (LRU without running requests)"
    if any(point.run is not None and point.run.num_preemptions for point in points):
        return [f"{sentence}, but it also saves preemptions."]
    return [f"{sentence}."]


def _in_use(points: Sequence[SweepPoint]) -> list[str]:
    runs = [point.run for point in points if point.run is not None]
    most = max((run.peak_used_blocks for run in runs), default=0)
    if not most:
        return []
    sentences = [f"Running requests use up to {plural(most, 'block')} at once; the rest of a pool is the cache."]
    preempted = [run for run in runs if run.num_preemptions]
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


def _reordering(sweep: Sweep, pool: int, policy: Eviction, known: Known) -> list[str]:
    if sweep.has_windows and len(sweep.accesses.blocks) > _MOST_REPLAYED:
        return []
    accesses = reordered(sweep.accesses, prefix_order(sweep.accesses))
    before, after = (
        sweep.rate(each, pool, policy, known(each.prompt_tokens, policy)) for each in (sweep.accesses, accesses)
    )
    where = f"at {plural(pool, 'block')} ({policy} without running requests)"
    if after - before < _NOTABLE:
        return [f"Sorting by prefix (--reorder prefix) gains nothing {where}: {percent_text(after)}."]
    rise = f"from {percent_text(before)} to {percent_text(after)}"
    return [f"Sorting by prefix (--reorder prefix) raises the hit rate {rise} {where}."]


def prefix_order(accesses: Accesses) -> Ints:
    """[R] the requests in the order of generate --reorder prefix: sorted within windows of the input."""
    blocks, starts = accesses.blocks.tolist(), accesses.starts.tolist()
    order: list[int] = []
    window: list[int] = []
    num_tokens = 0
    for request in range(accesses.num_requests):
        window.append(request)
        num_tokens += int(accesses.prompt_tokens[request])
        if len(window) >= WINDOW_ROWS or num_tokens >= WINDOW_TOKENS or request == accesses.num_requests - 1:
            order += sorted(window, key=lambda each: blocks[starts[each] : starts[each + 1]])
            window, num_tokens = [], 0
    return np.array(order, dtype=np.int64)


def reordered(accesses: Accesses, order: Ints) -> Accesses:
    """The same requests in another order."""
    lengths = np.diff(accesses.starts)[order]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    index = np.repeat(accesses.starts[order] - starts[:-1], lengths) + np.arange(int(starts[-1]))
    return Accesses(
        accesses.blocks[index],
        starts,
        accesses.tokens[index],
        accesses.prompt_tokens[order],
        accesses.full_tokens[order],
        accesses.block_size,
    )


def _block_sizes(sweep: Sweep, pool: int, policy: Eviction, known: Known) -> list[str]:
    """Other block sizes with the same memory."""
    has_curve = policy == "lru" and not sweep.has_windows
    size, most = sweep.accesses.block_size, _MOST_ACCESSES if has_curve else _MOST_REPLAYED
    others = [each for each in (size, size // 4, size // 2, 2 * size) if each >= 1]
    texts = []
    for other in others:
        if other != size and len(sweep.accesses.blocks) * size // other > most:
            continue
        accesses = sweep.accesses if other == size else accesses_of(sweep.workload, other)
        curve = lru_curve(accesses, stack_distances(accesses), sweep.warmup)
        rate = sweep.rate(accesses, pool * size // other, policy, known(accesses.prompt_tokens, policy))
        texts.append(f"{other:,}: {percent_text(rate)}, {_percent(curve.ceiling[1], curve)}")
    if len(texts) < 2:
        return []
    return [
        f"Hit rates by block size, with the memory of {plural(pool, 'block')} of {size:,} ({policy} without running"
        f" requests) and without a limit: {'; '.join(texts)}."
    ]


def _percent(tokens: int, curve: LruCurve) -> str:
    return percent_text(tokens / max(1, curve.num_tokens))
