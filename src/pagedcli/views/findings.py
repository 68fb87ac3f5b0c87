"""What a run says about its KV cache, in words: what was found, what was lost where, and the one change that would help
most. Computed from counts only. Used by the summaries of `generate` and `trace` and by the report's first screen.
"""

from dataclasses import dataclass, field, replace

from pagedcli.printable import percent_text, plural, seconds_text

WORTH_SAYING = 0.01  # share of all computed tokens from which a change is worth recommending
WAITING_WORDS = {
    "max_num_seqs": "sequence limit",
    "token_budget": "token budget",
    "free_blocks": "free blocks",
    "preemption": "room for a preempting sequence",
}


@dataclass(slots=True)
class RunFacts:
    """Counts of a run, from its events or from the engine's counters. Tokens, unless another unit is named; None: not
    counted."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    prefix_caching: bool = True
    is_reordered: bool = False  # --reorder prefix
    num_steps: int = 0
    elapsed_s: float = 0.0
    # first prefix lookups of requests
    num_looked_up: int = 0
    num_hit: int = 0
    num_ideal: int = 0  # hits of an unlimited cache in which every block is computed once
    ideal_of: int | None = None  # num_ideal is that of a cache of this many of the newest tokens; None: unlimited
    num_evicted: int | None = None  # lost: cached before, evicted by the time of the lookup
    num_in_flight: int | None = None  # lost: computed by two sequences at the same time
    num_partial: int | None = None  # shared, but less than a block
    longest_shared: int = 0
    gains: dict[int, int] = field(default_factory=dict)  # smaller block size -> tokens by which num_ideal grows
    num_more_blocks: int | None = None  # by which the pool must at least grow to keep what was evicted
    # work
    num_generated: int = 0
    num_computed: int = 0  # by the model, recomputed ones included
    num_recomputed: int = 0
    num_preemptions: int = 0
    num_enough_blocks: int | None = None  # a pool in which nothing could have been preempted
    # memory
    mean_waste: float | None = None  # share of the slots in use that held no token, over the steps
    peak_waste: float | None = None
    peak_used_blocks: int = 0
    # waiting
    num_sequences: int = 0
    waiting_s: dict[str, float] = field(default_factory=dict)  # by reason, summed over sequences
    running_s: float = 0.0  # summed over sequences

    @property
    def all_waiting_s(self) -> float:
        return sum(self.waiting_s.values())

    def lost(self) -> list[tuple[int, str]]:
        """Shared tokens that were computed again, and why, largest first."""
        known = [
            (self.num_evicted, "evicted before their next use"),
            (self.num_in_flight, "in flight in another sequence at the lookup"),
            (self.num_partial, "shared, but less than a block"),
        ]
        if self.num_evicted is None:
            known.append((self.most_evicted, "evicted, or in flight in another sequence"))
        return sorted(((count, words) for count, words in known if count), reverse=True)

    @property
    def most_evicted(self) -> int:
        """Lost to eviction; an upper bound if it was not counted."""
        return max(0, self.num_ideal - self.num_hit) if self.num_evicted is None else self.num_evicted


def with_shared_prefixes(facts: RunFacts, counted: RunFacts) -> RunFacts:
    """Facts from events, with the prefixes shared below a block from the engine's counters: without the tokens, events
    show only those that some full block contains."""
    longest = max(facts.longest_shared, counted.longest_shared)
    return replace(facts, longest_shared=longest, gains=counted.gains, is_reordered=counted.is_reordered)


@dataclass(frozen=True, slots=True)
class Advice:
    """The change that would help most."""

    setting: str | None  # the flag to change; None: nothing to change
    text: str


def finding_lines(facts: RunFacts) -> list[tuple[str, str]]:
    """Label and text of each line of a summary."""
    lines = []
    if facts.prefix_caching and facts.num_looked_up:
        lines.append(("prefixes", _prefix_text(facts)))
        if facts.lost():
            lines.append(("lost", ", ".join(f"{plural(count, 'token')} {words}" for count, words in facts.lost())))
    if facts.mean_waste is not None and facts.peak_waste is not None:
        mean, peak = percent_text(facts.mean_waste), percent_text(facts.peak_waste)
        lines.append(("waste", f"{mean} of the slots in use held no token (mean of the steps; peak {peak})"))
    if facts.all_waiting_s:
        lines.append(("waiting", _waiting_text(facts)))
    lines.append(("to change", advice(facts).text))
    return lines


def story(facts: RunFacts) -> list[str]:
    """Three sentences: what ran, what the cache did, what to change."""
    ran = (
        f"{plural(facts.num_sequences, 'sequence')} generated {plural(facts.num_generated, 'token')} in "
        f"{plural(facts.num_steps, 'step')} and {seconds_text(facts.elapsed_s)}, with at most "
        f"{percent_text(facts.peak_used_blocks / facts.num_blocks)} of the pool in use"
    )
    cache = "Prefix caching was off"
    if facts.prefix_caching:
        cache = "No prefix was looked up"
        if facts.num_looked_up:
            found = percent_text(facts.num_hit / facts.num_looked_up)
            ideal = percent_text(facts.num_ideal / facts.num_looked_up)
            lost = ", ".join(f"{plural(count, 'token')} were {words}" for count, words in facts.lost())
            cache = f"The prefix cache found {found} of the prompt tokens, an unlimited one would have found {ideal}"
            cache += f" ({lost})" if lost else ""
    again = ""
    if facts.num_preemptions:
        again = (
            f"; {plural(facts.num_recomputed, 'token')} were computed again "
            f"after {plural(facts.num_preemptions, 'preemption')}"
        )
    return [f"{ran}.", f"{cache}{again}.", f"To change: {advice(facts).text}."]


def _prefix_text(facts: RunFacts) -> str:
    blocks = plural(facts.longest_shared // facts.block_size, "block")
    return (
        f"longest shared {plural(facts.longest_shared, 'token')} = {blocks} of {facts.block_size}; "
        f"found {percent_text(facts.num_hit / facts.num_looked_up)}, "
        f"ceiling {percent_text(facts.num_ideal / facts.num_looked_up)} of the prompt tokens ({_ideal_cache(facts)})"
    )


def _ideal_cache(facts: RunFacts) -> str:
    return "unlimited cache" if facts.ideal_of is None else f"cache of the newest {plural(facts.ideal_of, 'token')}"


def _waiting_text(facts: RunFacts) -> str:
    total = facts.all_waiting_s
    reasons = sorted(facts.waiting_s.items(), key=lambda item: -item[1])
    why = ", ".join(f"{percent_text(part / total)} {WAITING_WORDS[reason]}" for reason, part in reasons if part)
    mean = seconds_text(total / max(1, facts.num_sequences))
    return f"{seconds_text(total)} over all sequences, mean {mean}: {why}"


# ---------------------------------------------------------------------- the one change


def advice(facts: RunFacts) -> Advice:
    """The change that would have saved most tokens; without one, what the sequences waited for."""
    if not facts.prefix_caching:
        return Advice("--enable-prefix-caching", "prefix caching is off: pagedcli plan shows what it would find")
    saved, found = max([_block_size(facts), _pool(facts), _order(facts)], key=lambda pair: pair[0])
    if found is not None and saved >= WORTH_SAYING * max(1, facts.num_computed):
        return found
    return _limits(facts) or Advice(None, _nothing_text(facts))


def _share(facts: RunFacts, saved: int) -> str:
    return f"{plural(saved, 'token')} ({percent_text(saved / max(1, facts.num_computed))} of all computed)"


def _block_size(facts: RunFacts) -> tuple[int, Advice | None]:
    """The largest block size that brings nine tenths of the best gain: larger blocks mean shorter tables."""
    most = max(facts.gains.values(), default=0)
    enough = [size for size, gain in facts.gains.items() if gain >= 0.9 * most]
    if most <= 0:
        return 0, None
    size = max(enough)
    gain = _share(facts, facts.gains[size])
    text = f"--block-size {size} instead of {facts.block_size} would find up to {gain} more in the cache"
    return facts.gains[size], Advice("--block-size", text)


def _pool(facts: RunFacts) -> tuple[int, Advice | None]:
    saved = facts.most_evicted + facts.num_recomputed
    if not saved:
        return 0, None
    parts = []
    if facts.most_evicted:
        more = facts.num_more_blocks
        least = "" if more is None else f" (to keep them takes at least {facts.num_blocks + more:,} blocks)"
        parts.append(f"{facts.most_evicted:,} evicted before their next use{least}")
    if facts.num_recomputed:
        enough = facts.num_enough_blocks
        most = "" if enough is None else f" (with {enough:,} blocks nothing is preempted)"
        parts.append(f"{facts.num_recomputed:,} computed again after preemptions{most}")
    pool = f"a pool of more than {facts.num_blocks:,} blocks"
    text = f"{pool} would save up to {_share(facts, saved)}: {' and '.join(parts)}"
    return saved, Advice("--num-gpu-blocks-override", text)


def _order(facts: RunFacts) -> tuple[int, Advice | None]:
    """Rows with a common prefix one after another use it before it is evicted, without more memory."""
    evicted = facts.most_evicted
    if facts.is_reordered or not evicted or facts.num_recomputed > evicted // 10:
        return 0, None
    order = "--reorder prefix, which starts rows with a common prefix one after another,"
    text = f"{order} would find up to {_share(facts, evicted)} before they are evicted"
    return evicted + facts.num_recomputed + 1, Advice("--reorder", text)  # before a larger pool


def _limits(facts: RunFacts) -> Advice | None:
    """A limit that made sequences wait for most of the time while blocks were free."""
    total = facts.all_waiting_s
    if total <= facts.running_s or facts.peak_used_blocks > 0.8 * facts.num_blocks:
        return None
    reason, longest = max(facts.waiting_s.items(), key=lambda item: item[1])
    flags = {"max_num_seqs": "--max-num-seqs", "token_budget": "--max-num-batched-tokens"}
    if reason not in flags or longest < 0.5 * total:
        return None
    text = (
        f"a higher {flags[reason]}: sequences waited {seconds_text(longest)} for the {WAITING_WORDS[reason]}, "
        f"and at most {percent_text(facts.peak_used_blocks / facts.num_blocks)} of the pool was in use"
    )
    return Advice(flags[reason], text)


def _nothing_text(facts: RunFacts) -> str:
    if not facts.num_looked_up:
        return "nothing: no request was admitted"
    missing = facts.num_ideal - facts.num_hit
    if missing <= 0 and not facts.num_preemptions:
        found = "every shared block" if facts.ideal_of is None else f"all that a {_ideal_cache(facts)} shares"
        return f"nothing: {found} was found and nothing was preempted"
    return f"nothing that saves {percent_text(WORTH_SAYING)} of the computed tokens"
