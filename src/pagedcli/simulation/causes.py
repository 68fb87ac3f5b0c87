"""The change from one run to another as a sum of causes, each measured by swapping one thing at a time."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from math import comb

from pagedcli.core.facts import RunFacts

CAUSES = {
    "prompts": "other prompts",
    "outputs": "other outputs",
    "order": "another order",
    "block_size": "another block size",
    "pool": "another pool or eviction",
    "sequences": "another number of sequences",
    "checkpoints": "checkpoints placed elsewhere",
    "engine": "other limits of a step",
    "restarts": "restarts and resets",
    "routing": "other publishers",
    "store": "tokens read from disk",
}
MOST_AVERAGED = 5  # causes whose every order of swapping is tried: 32 runs

Measures = dict[str, Fraction]
"""What a run did, by name: the hit rate, and counts."""


def counts_in(*runs: RunFacts) -> Measures:
    """The counts of these runs, one after another."""
    return {
        "computed_tokens": Fraction(sum(facts.num_computed_tokens for facts in runs)),
        "preemptions": Fraction(sum(facts.num_preemptions for facts in runs)),
        "peak_used_blocks": Fraction(max(facts.peak_used_blocks for facts in runs)),
        "steps": Fraction(sum(facts.num_steps for facts in runs)),
    }


def minus(one: Measures, other: Measures) -> Measures:
    """The difference of each measure."""
    return {name: value - other[name] for name, value in one.items()}


def num_runs(num_causes: int) -> int:
    """Runs that `shares` needs."""
    return 2**num_causes if num_causes <= MOST_AVERAGED else num_causes + 1


def shares(causes: Sequence[str], measure: Callable[[frozenset[str]], Measures]) -> dict[str, Measures]:
    """The part of each cause in the change from measure({}) to measure(all causes); the parts add up to it exactly.

    `measure` runs with these causes as in the later run. A part is the mean effect of its cause over all orders in
    which they can be swapped; of more than MOST_AVERAGED causes, the effect in the given order.

    Source: Shapley, A value for n-person games, 1953.
    """
    return {cause: _mean_effect(cause, causes, measure) for cause in causes}


def _mean_effect(cause: str, causes: Sequence[str], measure: Callable[[frozenset[str]], Measures]) -> Measures:
    part: Measures = {}
    for swapped, weight in _earlier_swaps(cause, causes):
        effect = minus(measure(swapped | {cause}), measure(swapped))
        part = {name: part.get(name, Fraction(0)) + weight * value for name, value in effect.items()}
    return part


def _earlier_swaps(cause: str, causes: Sequence[str]) -> Iterator[tuple[frozenset[str], Fraction]]:
    """What can be swapped before the cause, and the share of the orders in which that is so."""
    if len(causes) > MOST_AVERAGED:
        yield frozenset(causes[: causes.index(cause)]), Fraction(1)
        return
    others = [each for each in causes if each != cause]
    for size in range(len(causes)):
        weight = Fraction(1, len(causes) * comb(len(others), size))
        yield from ((frozenset(chosen), weight) for chosen in combinations(others, size))
