"""Why each prefix lookup hit or missed, and what the best possible cache would have saved.

Used by `pagedcli explain` and the report. Needs no tokens; with tokens recorded it also finds where prompts diverge.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pagedcli.events import (
    BlockEvicted,
    BlocksFilled,
    EngineStarted,
    Event,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    TokensSampled,
)
from pagedcli.inspection.dispatch import View
from pagedcli.inspection.fold import EventSource, fold
from pagedcli.inspection.state import PoolState

Reason = Literal[
    "all_hit", "evicted", "in_flight", "not_seen_before", "shorter_than_block", "no_shared_prefix", "different_salt",
    "no_full_block", "caching_off", "hash_collision", "not_known",
]  # fmt: skip

REASON_WORDS: dict[Reason, str] = {
    "all_hit": "every full block was cached",
    "evicted": "the content was cached before, but evicted",
    "in_flight": "another running sequence was just computing the same block",
    "not_seen_before": "the next block had never been computed before",
    "shorter_than_block": "a prefix is shared, but it is shorter than a block",
    "no_shared_prefix": "no cached block begins like this prompt",
    "different_salt": "the same tokens are cached under another cache_salt",
    "no_full_block": "the prompt is shorter than a block",
    "caching_off": "prefix caching is off",
    "hash_collision": "the block of this hash holds other tokens",
    "not_known": "the run ended before it showed",
}
_CONTEXT = 8  # tokens kept on each side of a divergence


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
    num_more_blocks: int | None = None  # a pool larger by so many would have kept it
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
            would = "" if more is None else f"; would have hit with {more:,} more block{'s' if more != 1 else ''}"
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
    last_block: int = 0  # behind the last full block
    less_than_block: int = 0  # shared with something before, but not as a whole block; not a part
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
        self.less_than_block += max(0, lookup.num_shared_tokens - lookup.num_shared_blocks * size)


def explain_trace(source: EventSource) -> tuple["Explainer", PoolState]:
    """Fold a whole trace. Raises TraceError like the source, or where the trace contradicts itself."""
    explainer = Explainer()
    state = fold(source, explainer)
    explainer.finish()
    return explainer, state


def divergence_text(split: Divergence, decode: Callable[[tuple[int, ...]], str] | None) -> str:
    """`first divergence at token 3: cached "... b c" vs prompt "... b d"`; token ids where they cannot be decoded."""

    def shown(token_ids: tuple[int, ...]) -> str:
        ids = split.shared_tail + token_ids
        text = str(list(ids)) if decode is None else f'"{decode(ids)}"'
        return text if token_ids else f"{text} (its end)"

    if not split.own_next and not split.other_next:
        return f"all {split.num_shared_tokens} tokens are those of request {split.other_request_id}"
    return (
        f"first divergence at token {split.num_shared_tokens}: cached {shown(split.other_next)} "
        f"(request {split.other_request_id}) vs prompt {shown(split.own_next)}"
    )


class Explainer(View[PoolState]):
    """Collects every lookup. Call `finish` after the last event."""

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self.block_size = 0
        self._num_events = 0
        self._open: dict[int, tuple[int, Lookup]] = {}  # by sequence: when it looked up; blocks still to be computed
        self._first_seen: dict[int, int] = {}  # hash -> event number when it was first filled
        self._ghosts: dict[int, tuple[int, int | None]] = {}  # hash -> place in _evictions, step
        self._evictions = _AliveCounter()
        self._requests: dict[int, tuple[str, bool]] = {}  # of live sequences: id, salted
        self._token_ids: dict[int, list[int]] = {}  # of live sequences, if recorded
        self._earlier: list[tuple[tuple[int, ...], int, str, bool]] = []  # tokens seen before, sorted

    def apply(self, event: Event, state: PoolState) -> None:
        """Take in an event that the state has."""
        self._num_events += 1
        super().apply(event, state)

    def finish(self) -> None:
        """Settle the lookups whose blocks were never computed."""
        for seq_id in list(self._open):
            self._settle(seq_id)

    def totals(self, *, own: bool) -> Totals:
        """Of the requests' first lookups, or of those that repeat their own request (SeqState.repeats)."""
        totals = Totals()
        for lookup in self.lookups:
            if lookup.own == own:
                totals.add(lookup)
        return totals

    def longest_shared_prefix(self) -> int:
        """Tokens, over all first lookups."""
        return max((lookup.num_shared_tokens for lookup in self.lookups if not lookup.own), default=0)

    # ------------------------------------------------------------------ events

    def on_engine_started(self, event: EngineStarted, state: PoolState) -> None:
        """A further part of a resumed run: its cache begins empty, so nothing earlier was ever in it."""
        self.finish()
        self._first_seen, self._ghosts, self._evictions, self._earlier = {}, {}, _AliveCounter(), []

    def on_request_added(self, event: RequestAdded, state: PoolState) -> None:
        self.block_size = state.block_size
        self._requests[event.seq_id] = event.request_id, event.salted
        if event.token_ids is not None:
            self._token_ids[event.seq_id] = list(event.token_ids)

    def on_prefix_looked_up(self, event: PrefixLookedUp, state: PoolState) -> None:
        if event.reason == "continued":
            self._taken_over(event)
            return
        request_id, salted = self._requests[event.seq_id]
        own = state.seqs[event.seq_id].repeats
        lookup = Lookup(state.step_number, event.seq_id, request_id, salted, own, event, state.block_size)
        self.lookups.append(lookup)
        if not own and event.seq_id in self._token_ids:
            token_ids = tuple(self._token_ids[event.seq_id])
            lookup.divergence = self._diverge(token_ids)
            self._remember(token_ids, event.seq_id)
        if event.miss_reason is None:
            lookup.reason = "all_hit"
        elif event.miss_reason != "no_match":
            lookup.reason = event.miss_reason
        else:
            assert event.missing_hash is not None
            self._open[event.seq_id] = self._num_events, lookup
            if event.missing_hash in state.hash_to_block_id:
                lookup.reason = "hash_collision"
            elif (ghost := self._ghosts.get(event.missing_hash)) is not None:
                lookup.reason = "evicted"
                lookup.evicted_step = ghost[1]
                # an LRU pool larger by m blocks still holds the m contents evicted last
                lookup.num_more_blocks = 1 + self._evictions.count_after(ghost[0])

    def _taken_over(self, event: PrefixLookedUp) -> None:
        _, lookup = self._open.get(event.seq_id, (0, None))
        if lookup is None:
            return
        lookup.num_late += event.blocks_hit
        lookup.late_tokens_hit += event.tokens_hit
        if lookup.reason == "not_known" and lookup.num_first == 0:
            lookup.reason = "in_flight"
        if lookup.num_unknown == 0:
            self._settle(event.seq_id)

    def on_blocks_filled(self, event: BlocksFilled, state: PoolState) -> None:
        since, lookup = self._open.get(event.seq_id, (0, None))
        index = state.seqs[event.seq_id].block_table.index(event.block_ids[0])
        for block_hash in event.hashes:
            if lookup is not None and lookup.event.blocks_hit <= index < lookup.event.blocks_asked:
                first = self._first_seen.get(block_hash)
                if first is None:
                    lookup.num_first += 1
                elif first < since:
                    lookup.num_evicted += 1
                else:
                    lookup.num_in_flight += 1
                    if index == lookup.event.first_miss and lookup.reason == "not_known":
                        lookup.reason = "in_flight"
            self._first_seen.setdefault(block_hash, self._num_events)
            ghost = self._ghosts.pop(block_hash, None)
            if ghost is not None:
                self._evictions.remove(ghost[0])
            index += 1
        if lookup is not None and lookup.num_unknown == 0:
            self._settle(event.seq_id)

    def on_block_evicted(self, event: BlockEvicted, state: PoolState) -> None:
        if event.hash not in state.hash_to_block_id and event.hash not in self._ghosts:
            self._ghosts[event.hash] = self._evictions.append(), state.step_number

    def on_tokens_sampled(self, event: TokensSampled, state: PoolState) -> None:
        for seq_id, token_id in zip(event.seq_ids, event.token_ids or (), strict=False):
            if seq_id in self._token_ids:
                self._token_ids[seq_id].append(token_id)

    def on_request_preempted(self, event: RequestPreempted, state: PoolState) -> None:
        self._settle(event.seq_id)

    def on_request_finished(self, event: RequestFinished, state: PoolState) -> None:
        self._settle(event.seq_id)
        token_ids = self._token_ids.pop(event.seq_id, None)
        if token_ids is not None and event.num_output_tokens:
            self._remember(tuple(token_ids), event.seq_id)
        del self._requests[event.seq_id]

    # ------------------------------------------------------------------ parts

    def _settle(self, seq_id: int) -> None:
        """The reason of a miss by exclusion, once it is clear that nobody else computed the block."""
        _, lookup = self._open.pop(seq_id, (0, None))
        if lookup is None or lookup.reason != "not_known":
            return
        event, twin = lookup.event, lookup.divergence
        salted = twin is not None and (lookup.salted or twin.other_salted)
        if salted and twin is not None and twin.num_shared_tokens >= (event.blocks_hit + 1) * self.block_size:
            lookup.reason = "different_salt"
        elif event.blocks_hit:
            lookup.reason = "not_seen_before"
        elif event.partial_tokens:
            lookup.reason = "shorter_than_block"
        elif lookup.num_first:
            lookup.reason = "no_shared_prefix"

    def _diverge(self, token_ids: tuple[int, ...]) -> Divergence | None:
        """Compare with the earlier sequence of the longest common prefix: a neighbour in sorted order."""
        place = bisect_left(self._earlier, (token_ids, -1, "", False))
        neighbours = self._earlier[max(0, place - 1) : place + 1]
        if not neighbours:
            return None
        shared, (other, seq_id, request_id, salted) = max(
            ((_num_shared(token_ids, entry[0]), entry) for entry in neighbours), key=lambda pair: pair[0]
        )
        return Divergence(
            num_shared_tokens=shared,
            other_seq_id=seq_id,
            other_request_id=request_id,
            other_salted=salted,
            shared_tail=token_ids[max(0, shared - _CONTEXT) : shared],
            own_next=token_ids[shared : shared + _CONTEXT],
            other_next=other[shared : shared + _CONTEXT],
        )

    def _remember(self, token_ids: tuple[int, ...], seq_id: int) -> None:
        entry = (token_ids, seq_id, *self._requests[seq_id])
        self._earlier.insert(bisect_left(self._earlier, entry), entry)


def _num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class _AliveCounter:
    """Counts in O(log n) the entries appended after a given one and not removed since (a Fenwick tree)."""

    def __init__(self) -> None:
        self._tree = [0]
        self._num_alive = 0

    def append(self) -> int:
        """The place of a new entry."""
        place = len(self._tree)
        total, below = 1, place - 1
        while below > place - (place & -place):
            total += self._tree[below]
            below -= below & -below
        self._tree.append(total)
        self._num_alive += 1
        return place

    def remove(self, place: int) -> None:
        self._num_alive -= 1
        while place < len(self._tree):
            self._tree[place] -= 1
            place += place & -place

    def count_after(self, place: int) -> int:
        alive = self._num_alive
        while place > 0:
            alive -= self._tree[place]
            place -= place & -place
        return alive
