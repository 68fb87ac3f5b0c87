"""What explain.py finds out of one prefix lookup, and the totals of many, in numbers and in words."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pagedcli.events import PrefixLookedUp
from pagedcli.inspection.words import plural

Reason = Literal[
    "all_hit", "evicted", "unfindable", "in_flight", "not_seen_before", "shorter_than_block", "no_shared_prefix",
    "different_salt", "no_full_block", "caching_off", "hash_collision", "not_known",
]  # fmt: skip

REASON_WORDS: dict[Reason, str] = {
    "all_hit": "every full block was cached",
    "evicted": "the content was cached before, but evicted",
    "unfindable": "the content is in the pool, but the block under which lookups find it was evicted",
    "in_flight": "another running sequence was just computing the same block",
    "not_seen_before": "the next block had never been computed before",
    "shorter_than_block": "a prefix is shared, but it is shorter than a block",
    "no_shared_prefix": "no cached block begins like this prompt",
    "different_salt": "the same tokens are cached under another cache_salt",
    "no_full_block": "the prompt is shorter than a block",
    "caching_off": "prefix caching is off",
    "hash_collision": "the block of this hash holds other tokens",
    "not_known": "the sequence ended before it came to the missing block",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from the earlier sequence that is most like it."""

    num_shared_tokens: int
    other_seq_id: int
    other_request_id: str
    other_salted: bool
    shared_tail: tuple[int, ...]  # the last shared tokens
    own_next: tuple[int, ...]  # what follows here, empty at the end
    other_next: tuple[int, ...]  # what follows there


@dataclass(slots=True)
class Lookup:
    """One prefix lookup and what became of its full blocks."""

    step: int | None
    seq_id: int
    request_id: str
    salted: bool
    own: bool  # it repeats its own request: after a preemption, or as a further sample
    event: PrefixLookedUp
    block_size: int
    reason: Reason = "not_known"
    evicted_step: int | None = None  # when the first missing block was evicted
    num_more_blocks: int | None = (
        None  # keeping it, with all else in the same order, takes at least so many more blocks
    )
    num_evicted: int = 0  # missing blocks that were cached before the lookup
    num_in_flight: int = 0  # missing blocks that another sequence computed first, after the lookup
    num_first: int = 0  # missing blocks that nobody had computed before
    num_late: int = 0  # missing blocks taken over from another sequence while the prompt was computed in chunks
    late_tokens_hit: int = 0  # tokens that need no computing by this
    divergence: Divergence | None = None

    @property
    def kind(self) -> str:
        """`first`, or `own` for one that repeats its own request."""
        return "own" if self.own else "first"

    @property
    def num_unknown(self) -> int:
        """Missing blocks that the sequence never came to compute."""
        return self.event.blocks_asked - self.num_shared_blocks - self.num_first

    @property
    def num_shared_blocks(self) -> int:
        """Leading blocks whose content others computed before or at the same time."""
        return self.event.blocks_hit + self.num_evicted + self.num_in_flight + self.num_late

    @property
    def tokens_hit(self) -> int:
        """At the lookup and later."""
        return self.event.tokens_hit + self.late_tokens_hit

    @property
    def num_shared_tokens(self) -> int:
        """The longest prefix shared with anything before, as far as the trace shows."""
        at_lookup = self.event.blocks_hit * self.block_size + self.event.partial_tokens
        exact = self.divergence.num_shared_tokens if self.divergence is not None else 0
        return max(self.num_shared_blocks * self.block_size, at_lookup, exact)

    @property
    def num_further_tokens(self) -> int:
        """Tokens after the shared blocks that are shared, too, under the same cache_salt."""
        split, shared = self.divergence, self.num_shared_blocks * self.block_size
        same_salt = split is not None and not (self.salted or split.other_salted)
        exact = split.num_shared_tokens if split is not None and same_salt else 0
        return max(0, self.event.blocks_hit * self.block_size + self.event.partial_tokens - shared, exact - shared)

    @property
    def ideal_tokens_hit(self) -> int:
        """Tokens hit with an unlimited cache in which every block is computed only once."""
        return min(self.num_shared_blocks * self.block_size, self.event.num_tokens - 1)

    def num_lost_tokens(self) -> int:
        """Tokens computed although something before, or at the same time, began with the same ones."""
        return 0 if self.reason == "all_hit" else max(self.ideal_tokens_hit, self.num_shared_tokens) - self.tokens_hit

    def why(self) -> str:
        """The reason in words, with its numbers."""
        event, words = self.event, REASON_WORDS[self.reason]
        if self.num_late:
            words += f"; {self.late_tokens_hit:,} tokens were taken over later from another sequence"
        if self.reason == "all_hit":
            if event.tokens_hit < event.blocks_hit * self.block_size:
                return f"{words}; the last token is always computed, its logits are the next token"
            return words
        if self.reason == "evicted":
            more = self.num_more_blocks
            would = (
                ""
                if more is None
                else f"; keeping it through the same steps takes at least {plural(more, 'more block')}"
            )
            return f"{words} at step {self.evicted_step}{would}"
        if self.reason in ("not_seen_before", "shorter_than_block") and event.partial_tokens:
            return f"{words}: {event.partial_tokens} more tokens shared, a block is {self.block_size}"
        if self.reason == "no_shared_prefix" and self.salted:
            return f"{words} (under its cache_salt)"
        return words


@dataclass(slots=True)
class Totals:
    """Where the tokens of all lookups of one kind went; the parts add up to num_tokens."""

    num_lookups: int = 0
    num_tokens: int = 0
    hit: int = 0
    late_hit: int = 0  # taken over while another sequence computed them
    evicted: int = 0  # cached before, evicted
    in_flight: int = 0  # computed twice at the same time
    first_seen: int = 0  # nobody had computed them before
    first_seen_shared: int = 0  # of these, shared with something before, but not as a whole block; not a part
    last_block: int = 0  # after the last full block
    last_block_shared: int = 0  # of these, shared with something before; not a part
    last_token: int = 0  # of prompts that were cached in full
    caching_off: int = 0
    not_known: int = 0
    ideal: int = 0  # hit with an unlimited cache and every block computed once; not a part
    reasons: Counter[Reason] = field(default_factory=Counter)

    def add(self, lookup: Lookup) -> None:
        event, size = lookup.event, lookup.block_size
        self.num_lookups += 1
        self.num_tokens += event.num_tokens
        self.reasons[lookup.reason] += 1
        if lookup.reason == "caching_off":
            self.caching_off += event.num_tokens
            return
        self.hit += event.tokens_hit
        self.late_hit += lookup.late_tokens_hit
        self.last_token += event.blocks_hit * size - event.tokens_hit
        self.last_block += event.num_tokens - event.blocks_asked * size
        self.evicted += lookup.num_evicted * size
        self.in_flight += (lookup.num_in_flight + lookup.num_late) * size - lookup.late_tokens_hit
        self.first_seen += lookup.num_first * size
        self.not_known += lookup.num_unknown * size
        self.ideal += lookup.ideal_tokens_hit
        if lookup.num_shared_blocks == event.blocks_asked:
            self.last_block_shared += min(lookup.num_further_tokens, event.num_tokens - event.blocks_asked * size)
        elif lookup.num_first:
            self.first_seen_shared += min(lookup.num_further_tokens, size)


def divergence_text(split: Divergence, decode: Callable[[tuple[int, ...]], str] | None) -> str:
    """`first divergence at token 3: earlier "... b c" vs prompt "... b d"`; token ids where they cannot be decoded."""

    def shown(token_ids: tuple[int, ...]) -> str:
        ids = split.shared_tail + token_ids
        text = str(list(ids)) if decode is None else f'"{decode(ids)}"'
        return text if token_ids else f"{text} (its end)"

    if not split.own_next and not split.other_next:
        return f"all {split.num_shared_tokens} tokens are those of request {split.other_request_id}"
    return (
        f"first divergence at token {split.num_shared_tokens}: earlier {shown(split.other_next)} "
        f"(request {split.other_request_id}) vs prompt {shown(split.own_next)}"
    )
