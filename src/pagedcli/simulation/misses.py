"""Where the tokens of the prompts went: hits, and misses by cause. The parts add up to all tokens."""

from dataclasses import dataclass

import numpy as np

from pagedcli.simulation.accesses import Accesses, Bools, Ints

# part -> its definition, printed with the table
PARTS = {
    "hit": "found in the cache when the prompt was first computed",
    "in_flight": "the same policy without running requests would have hit: the block was still being computed, or"
    " running requests held the pool",
    "policy": "evicting what is needed last (the clairvoyant) would have hit at this pool size",
    "capacity": "a cache without limit would have hit",
    "cold": "in no earlier prompt",
    "short": "after the last full block, and the last token, which is always computed",
}


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """[R] tokens that hit without running requests at one pool size: what the misses are compared with."""

    policy: Ints  # with the policy of the run
    clairvoyant: Ints  # with the clairvoyant
    unlimited: Ints  # in a cache without limit


def split(accesses: Accesses, hits: Ints, bounds: CacheBounds, counted: Bools) -> dict[str, int]:
    """Tokens of each part. `hits` [R] are those of the run; `counted` [R] selects requests.

    Hits are the first tokens of a prompt, so each cause takes the tokens from where the one before it ends.
    """
    reached = hits
    parts = {"hit": hits}
    causes = [("in_flight", bounds.policy), ("policy", bounds.clairvoyant), ("capacity", bounds.unlimited)]
    for name, bound in [*causes, ("cold", accesses.full_tokens), ("short", accesses.prompt_tokens)]:
        parts[name] = np.maximum(bound - reached, 0)
        reached = np.maximum(reached, bound)
    return {name: int(tokens[counted].sum()) for name, tokens in parts.items()}
