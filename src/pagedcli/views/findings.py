"""What a run says about its KV cache, in words: what was found, what was lost where, and the one change that would help
most. Computed from counts only. Used by the summaries of `generate` and `trace` and by the report's first screen.
"""

from dataclasses import dataclass

from pagedcli.core.facts import RunFacts
from pagedcli.printable import percent_text, plural, seconds_text

WORTH_SAYING = 0.01  # share of all computed tokens from which a change is worth recommending
WAITING_WORDS = {
    "max_num_seqs": "sequence limit",
    "token_budget": "token budget",
    "free_blocks": "free blocks",
    "preemption": "room for a preempting sequence",
}


@dataclass(frozen=True, slots=True)
class Losses:
    """What only the events of a run show: why tokens were computed although they were shared. Tokens, unless another
    unit is named; of first prefix lookups."""

    num_evicted: int  # cached before, evicted by the time of the lookup
    num_in_flight: int  # computed by two sequences at the same time
    num_more_blocks: int | None = None  # by which the pool must at least grow to keep what was evicted
    num_enough_blocks: int | None = None  # a pool in which nothing could have been preempted


@dataclass(frozen=True, slots=True)
class Findings:
    """A run's facts, and what else is known of it."""

    facts: RunFacts
    losses: Losses | None = None  # None: the engine's own counts, without events
    is_reordered: bool = False  # --reorder prefix

    def lost(self) -> list[tuple[int, str]]:
        """Shared tokens that were computed again, and why, largest first."""
        in_flight, evicted = "in flight in another sequence at the lookup", "evicted before their next use"
        losses, facts = self.losses, self.facts
        known = [(facts.num_partial_tokens, "shared, but less than a block")]
        if losses is not None:
            known += [(losses.num_evicted, evicted), (losses.num_in_flight, in_flight)]
        else:
            either = "evicted, or in flight in another sequence" if facts.num_evictions else in_flight
            known.append((facts.num_ideal_tokens - facts.num_cached_tokens, either))
        return sorted(((count, words) for count, words in known if count), reverse=True)

    @property
    def most_evicted(self) -> int:
        """Tokens lost to eviction; an upper bound without events."""
        if self.losses is not None:
            return self.losses.num_evicted
        facts = self.facts
        return facts.num_ideal_tokens - facts.num_cached_tokens if facts.num_evictions else 0

    @property
    def waiting_s(self) -> float:
        """Seconds, of all sequences and for all reasons."""
        return sum(self.facts.waiting_s.values())


@dataclass(frozen=True, slots=True)
class Advice:
    """The change that would help most."""

    setting: str | None  # the flag to change; None: nothing to change
    text: str


def finding_lines(findings: Findings) -> list[tuple[str, str]]:
    """Label and text of each line of a summary."""
    facts = findings.facts
    lines = []
    if facts.prefix_caching and facts.num_prompt_tokens:
        lines.append(("prefixes", _prefix_text(findings)))
        if findings.lost():
            lines.append(("lost", ", ".join(f"{plural(count, 'token')} {words}" for count, words in findings.lost())))
    if facts.mean_waste is not None and facts.peak_waste is not None:
        mean, peak = percent_text(facts.mean_waste), percent_text(facts.peak_waste)
        lines.append(("waste", f"{mean} of the slots in use held no token (mean of the steps; peak {peak})"))
    if findings.waiting_s:
        lines.append(("waiting", _waiting_text(findings)))
    lines.append(("to change", advice(findings).text))
    return lines


def story(findings: Findings, elapsed_s: float) -> list[str]:
    """Three sentences: what ran, what the cache did, what to change."""
    facts = findings.facts
    ran = (
        f"{plural(facts.num_sequences, 'sequence')} generated {plural(facts.num_generated_tokens, 'token')} in "
        f"{plural(facts.num_steps, 'step')} and {seconds_text(elapsed_s)}, with at most "
        f"{percent_text(facts.peak_used_blocks / facts.num_blocks)} of the pool in use"
    )
    cache = "Prefix caching was off"
    if facts.prefix_caching:
        cache = "No prefix was looked up"
        if facts.num_prompt_tokens:
            found = percent_text(facts.num_cached_tokens / facts.num_prompt_tokens)
            ideal = percent_text(facts.num_ideal_tokens / facts.num_prompt_tokens)
            lost = ", ".join(f"{_were(count)} {words}" for count, words in findings.lost())
            cache = f"The prefix cache found {found} of the prompt tokens, an unlimited one would have found {ideal}"
            cache += f" ({lost})" if lost else ""
    again = ""
    if facts.num_preemptions:
        again = (
            f"; {_were(facts.num_recomputed_tokens)} computed again after {plural(facts.num_preemptions, 'preemption')}"
        )
    return [f"{ran}.", f"{cache}{again}.", f"To change: {advice(findings).text}."]


def _were(num_tokens: int) -> str:
    return f"{plural(num_tokens, 'token')} {'was' if num_tokens == 1 else 'were'}"


def _prefix_text(findings: Findings) -> str:
    facts = findings.facts
    blocks = plural(facts.longest_shared // facts.block_size, "block")
    return (
        f"longest shared {plural(facts.longest_shared, 'token')} = {blocks} of {facts.block_size}; "
        f"found {percent_text(facts.num_cached_tokens / facts.num_prompt_tokens)}, "
        f"ceiling {percent_text(facts.num_ideal_tokens / facts.num_prompt_tokens)} of the prompt tokens "
        f"({_ideal_cache(findings)})"
    )


def _ideal_cache(findings: Findings) -> str:
    facts = findings.facts
    return "unlimited cache" if facts.ideal_of is None else f"cache of the newest {plural(facts.ideal_of, 'token')}"


def _waiting_text(findings: Findings) -> str:
    facts = findings.facts
    total = findings.waiting_s
    reasons = sorted(facts.waiting_s.items(), key=lambda item: -item[1])
    why = ", ".join(f"{percent_text(part / total)} {WAITING_WORDS[reason]}" for reason, part in reasons if part)
    mean = seconds_text(total / max(1, facts.num_sequences))
    return f"{seconds_text(total)} over all sequences, mean {mean}: {why}"


# ---------------------------------------------------------------------- the one change


def advice(findings: Findings) -> Advice:
    """The change that would have saved most tokens; without one, what the sequences waited for."""
    facts = findings.facts
    if not facts.prefix_caching:
        return Advice("--enable-prefix-caching", "prefix caching is off: pagedcli plan shows what it would find")
    saved, found = max([_block_size(findings), _pool(findings), _order(findings)], key=lambda pair: pair[0])
    if found is not None and saved >= WORTH_SAYING * max(1, facts.num_computed_tokens):
        return found
    return _limits(findings) or Advice(None, _nothing_text(findings))


def _share(findings: Findings, saved: int) -> str:
    facts = findings.facts
    return f"{plural(saved, 'token')} ({percent_text(saved / max(1, facts.num_computed_tokens))} of all computed)"


def _block_size(findings: Findings) -> tuple[int, Advice | None]:
    """The largest block size that brings nine tenths of the best gain: larger blocks mean shorter tables."""
    facts = findings.facts
    most = max(facts.gains.values(), default=0)
    enough = [size for size, gain in facts.gains.items() if gain >= 0.9 * most]
    if most <= 0:
        return 0, None
    size = max(enough)
    gain = _share(findings, facts.gains[size])
    text = f"--block-size {size} instead of {facts.block_size} would find up to {gain} more in the cache"
    return facts.gains[size], Advice("--block-size", text)


def _pool(findings: Findings) -> tuple[int, Advice | None]:
    facts = findings.facts
    saved = findings.most_evicted + facts.num_recomputed_tokens
    if not saved:
        return 0, None
    parts = []
    if findings.most_evicted:
        more = None if findings.losses is None else findings.losses.num_more_blocks
        least = "" if more is None else f" (to keep them takes at least {facts.num_blocks + more:,} blocks)"
        parts.append(f"{findings.most_evicted:,} evicted before their next use{least}")
    if facts.num_recomputed_tokens:
        enough = None if findings.losses is None else findings.losses.num_enough_blocks
        most = "" if enough is None else f" (with {enough:,} blocks nothing is preempted)"
        parts.append(f"{facts.num_recomputed_tokens:,} computed again after preemptions{most}")
    pool = f"a pool of more than {facts.num_blocks:,} blocks"
    text = f"{pool} would save up to {_share(findings, saved)}: {' and '.join(parts)}"
    return saved, Advice("--num-gpu-blocks-override", text)


def _order(findings: Findings) -> tuple[int, Advice | None]:
    """Rows with a common prefix one after another use it before it is evicted, without more memory."""
    facts = findings.facts
    evicted = findings.most_evicted
    if findings.is_reordered or not evicted or facts.num_recomputed_tokens > evicted // 10:
        return 0, None
    order = "--reorder prefix, which starts rows with a common prefix one after another,"
    text = f"{order} would find up to {_share(findings, evicted)} before they are evicted"
    return evicted + facts.num_recomputed_tokens + 1, Advice("--reorder", text)  # before a larger pool


def _limits(findings: Findings) -> Advice | None:
    """A limit that made sequences wait for most of the time while blocks were free."""
    facts = findings.facts
    total = findings.waiting_s
    if total <= facts.running_ns * 1e-9 or facts.peak_used_blocks > 0.8 * facts.num_blocks:
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


def _nothing_text(findings: Findings) -> str:
    facts = findings.facts
    if not facts.num_prompt_tokens:
        return "nothing: no request was admitted"
    missing = facts.num_ideal_tokens - facts.num_cached_tokens
    if missing <= 0 and not facts.num_preemptions:
        found = "every shared block" if facts.ideal_of is None else f"all that a {_ideal_cache(findings)} shares"
        return f"nothing: {found} was found and nothing was preempted"
    return f"nothing that saves {percent_text(WORTH_SAYING)} of the computed tokens"
