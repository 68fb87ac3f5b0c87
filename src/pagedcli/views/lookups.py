"""The result of explain.py for one prefix lookup, and totals over many, as numbers and text."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pagedcli.events import PrefixLookedUp
from pagedcli.printable import plural

Reason = Literal[
    "all_hit", "evicted", "unfindable", "in_flight", "not_seen_before", "shorter_than_block", "no_shared_prefix",
    "different_salt", "no_full_block", "caching_off", "hash_collision", "not_known",
]  # fmt: skip

REASON_WORDS: dict[Reason, str] = {
    "all_hit": "every full block was cached",
    "evicted": "the content had been cached, but was evicted",
    "unfindable": "the content is in the pool, but the block indexed under its hash was evicted",
    "in_flight": "another running sequence was still computing the same block",
    "not_seen_before": "the next block had never been computed before",
    "shorter_than_block": "the shared prefix is shorter than a block",
    "no_shared_prefix": "no cached block matches the start of this prompt",
    "different_salt": "the same tokens are cached under another cache_salt",
    "no_full_block": "the prompt is shorter than a block",
    "caching_off": "prefix caching is off",
    "hash_collision": "the block with this hash holds other tokens",
    "not_known": "the sequence ended before it reached the missing block",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from the most similar earlier sequence."""

    num_shared_tokens: int
    other_seq_id: int
    other_label: str  # what a person calls its request
    other_salted: bool
    shared_tail: tuple[int, ...]  # the last shared tokens
    own_next: tuple[int, ...]  # what follows here, empty at the end
    other_next: tuple[int, ...]  # what follows there


@dataclass(slots=True)
class Lookup:
    """One prefix lookup and the outcome for each of its full blocks."""

    step: int | None
    seq_id: int
    request_id: str
    row_id: str | None  # the user's own id
    salted: bool
    own: bool  # repeats its own request: after a preemption, or as another sample
    event: PrefixLookedUp
    block_size: int
    reason: Reason = "not_known"
    evicted_step: int | None = None  # when the first missing block was evicted
    num_more_blocks: int | None = None  # by which the pool must at least grow to keep it, all else unchanged; lru
    num_evicted: int = 0  # missing blocks that were cached before the lookup
    num_in_flight: int = 0  # missing blocks that another sequence computed first, after the lookup
    num_first: int = 0  # missing blocks that had never been computed
    num_late: int = 0  # missing blocks reused from another sequence while the prompt was prefilled in chunks
    late_tokens_hit: int = 0  # tokens that this saved
    divergence: Divergence | None = None

    @property
    def label(self) -> str:
        """What a person calls its request, as SeqState.label."""
        return self.request_id if self.row_id is None else self.row_id

    @property
    def kind(self) -> str:
        """`first`, or `own` for one that repeats its own request."""
        return "own" if self.own else "first"

    @property
    def num_unknown(self) -> int:
        """Missing blocks that the sequence never computed."""
        return self.event.blocks_asked - self.num_shared_blocks - self.num_first

    @property
    def num_shared_blocks(self) -> int:
        """Leading blocks also computed by others, earlier or at the same time."""
        return self.event.blocks_hit + self.num_evicted + self.num_in_flight + self.num_late

    @property
    def tokens_hit(self) -> int:
        """Tokens hit, at the lookup and later."""
        return self.event.tokens_hit + self.late_tokens_hit

    @property
    def num_shared_tokens(self) -> int:
        """The longest prefix shared with anything earlier, as far as the trace shows."""
        if self.event.shared_tokens is not None:
            return self.event.shared_tokens
        at_lookup = self.event.blocks_hit * self.block_size + self.event.partial_tokens
        exact = self.divergence.num_shared_tokens if self.divergence is not None else 0
        return max(self.num_shared_blocks * self.block_size, at_lookup, exact)

    @property
    def num_further_tokens(self) -> int:
        """Shared tokens after the shared blocks, under the same cache_salt."""
        split, shared = self.divergence, self.num_shared_blocks * self.block_size
        same_salt = split is not None and not (self.salted or split.other_salted)
        exact = split.num_shared_tokens if split is not None and same_salt else 0
        return max(0, self.event.blocks_hit * self.block_size + self.event.partial_tokens - shared, exact - shared)

    @property
    def ideal_tokens_hit(self) -> int:
        """Tokens hit by an unlimited cache in which every block is computed once."""
        return min(self.num_shared_blocks * self.block_size, self.event.num_tokens - 1)

    def num_lost_tokens(self) -> int:
        """Tokens computed although an unlimited cache would have found them."""
        return self.ideal_tokens_hit - self.tokens_hit

    def why(self) -> str:
        """The reason as text, with numbers."""
        event, words = self.event, REASON_WORDS[self.reason]
        if self.num_late:
            later = "was" if self.late_tokens_hit == 1 else "were"
            words += f"; {plural(self.late_tokens_hit, 'token')} {later} reused later from another sequence"
        if self.reason == "all_hit":
            if event.tokens_hit < event.blocks_hit * self.block_size:
                return f"{words}; the last token is always computed: its logits give the next token"
            return words
        if self.reason == "evicted":
            more = self.num_more_blocks
            would = "" if more is None else f"; keeping it would take at least {plural(more, 'more block')}"
            return f"{words} at step {self.evicted_step}{would}"
        if self.reason in ("not_seen_before", "shorter_than_block") and event.partial_tokens:
            return f"{words}: {plural(event.partial_tokens, 'more token')} shared, a block is {self.block_size}"
        if self.reason == "no_shared_prefix" and self.salted:
            return f"{words} (under its cache_salt)"
        return words


@dataclass(slots=True)
class Totals:
    """Outcomes of the tokens of all lookups of one kind; the parts add up to num_tokens."""

    num_lookups: int = 0
    num_tokens: int = 0
    hit: int = 0
    late_hit: int = 0  # reused while another sequence computed them
    evicted: int = 0  # cached before, evicted
    in_flight: int = 0  # computed twice at the same time
    first_seen: int = 0  # never computed before
    first_seen_shared: int = 0  # subset of first_seen: shared with something earlier, but not as a full block
    last_block: int = 0  # after the last full block
    last_block_shared: int = 0  # subset of last_block: shared with something earlier
    last_token: int = 0  # of fully cached prompts
    caching_off: int = 0
    not_known: int = 0
    ideal: int = 0  # hits of an unlimited cache with every block computed once; not one of the parts
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
        return f"all of {plural(split.num_shared_tokens, 'token')} match request {split.other_label}"
    return (
        f"first divergence at token {split.num_shared_tokens}: earlier {shown(split.other_next)} "
        f"(request {split.other_label}) vs prompt {shown(split.own_next)}"
    )
