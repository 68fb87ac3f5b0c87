"""The prefix lookups of a run, and what became of the blocks that each one missed: a view of PoolState.

`answers.why` says in words what it finds. Needs no tokens; with tokens recorded it also finds where prompts diverge.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.prefixes import TOKEN_BYTES, TokenTree, token_bytes, token_ids_of
from pagedcli.events import PrefixLookedUp
from pagedcli.records import computed
from pagedcli.trace.dispatch import View
from pagedcli.trace.fold import EventSource, fold
from pagedcli.trace.state import PoolState
from pagedcli.trace.tokens import TokenView
from pagedcli.views.rows import Label, ShownRow

Reason = Literal[
    "all_hit", "evicted", "cleared", "restarted", "unfindable", "in_flight", "not_seen_before", "shorter_than_block",
    "no_shared_prefix", "different_salt", "no_full_block", "caching_off", "hash_collision", "not_known",
    "no_snapshot",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where a prompt first differs from the most similar earlier sequence."""

    num_shared_tokens: int
    other_seq_id: int
    other_label: str  # what a person calls its request
    other_salted: bool
    shared_tail: tuple[int, ...]  # the last shared tokens
    own_next: tuple[int, ...]  # what follows here, empty at the end
    other_next: tuple[int, ...]  # what follows there
    has_ids: bool = True  # whether these are token ids; else digests, which only tell that they differ


_CONTEXT = 8  # tokens kept on each side of a divergence


class EarlierSequences:
    """Sequences by their beginnings: the finder of the most similar earlier one."""

    def __init__(self) -> None:
        self._tree = TokenTree()
        self._known: dict[int, tuple[bytes, str, bool]] = {}  # tokens, label of the request, and whether it has a salt

    def add(self, seq_id: int, tokens: bytes, label: str, *, salted: bool) -> None:
        self._tree.add(tokens, seq_id)
        self._known[seq_id] = (tokens, label, salted)

    def diverge(self, tokens: bytes, *, has_ids: bool = True) -> FirstDifference | None:
        """Where a sequence leaves the first of the earlier ones with the longest common beginning. `has_ids`: whether
        its tokens are ids, not digests."""
        if not self._known:
            return None
        found = self._tree.find(tokens)
        seq_id = next(iter(self._known)) if found.owner is None else found.owner
        other, label, salted = self._known[seq_id]
        place, around = found.num_tokens * TOKEN_BYTES, _CONTEXT * TOKEN_BYTES
        return FirstDifference(
            num_shared_tokens=found.num_tokens,
            other_seq_id=seq_id,
            other_label=label,
            other_salted=salted,
            shared_tail=tuple(token_ids_of(tokens[max(0, place - around) : place])),
            own_next=tuple(token_ids_of(tokens[place : place + around])),
            other_next=tuple(token_ids_of(other[place : place + around])),
            has_ids=has_ids,
        )


Content = TypeVar("Content")


class Ghosts(Generic[Content]):
    """Contents that were evicted and are not back, in the order of their evictions."""

    def __init__(self) -> None:
        self._of: dict[Content, tuple[int, int | None, int | None]] = {}  # place in the order, step, block
        self._places = array("Q")  # rising
        self._num_places = 0

    def add(self, content: Content, step: int | None, block_id: int | None = None) -> bool:
        """The content has left the cache. Returns whether it was there."""
        if content in self._of:
            return False
        self._of[content] = self._num_places, step, block_id
        self._places.append(self._num_places)
        self._num_places += 1
        return True

    def drop(self, content: Content) -> None:
        """The content is back, if it was away."""
        ghost = self._of.pop(content, None)
        if ghost is not None:
            del self._places[bisect_left(self._places, ghost[0])]

    def find(self, content: Content) -> tuple[int | None, int | None, int] | None:
        """The step and block of its eviction, and how many contents have left since, it included, and are not back:
        an LRU cache with as many more blocks would still have it. None: it is no ghost."""
        ghost = self._of.get(content)
        if ghost is None:
            return None
        place, step, block_id = ghost
        return step, block_id, 1 + len(self._places) - bisect_right(self._places, place)


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
    # leading tokens whose K and V are cached, of a model with recurrent state, which allowed less; None: other models
    kv_tokens: int | None = None
    reason: Reason = "not_known"
    evicted_step: int | None = None  # step in which the first missing block was evicted, or dropped otherwise
    evicted_block_id: int | None = None
    evicted_for: str | None = None  # what a person calls the request that needed its room
    wanted_step: int | None = None  # step of the last lookup that missed the same block
    num_more_blocks: int | None = None  # the least growth of the pool that keeps it, all else unchanged; lru
    num_evicted: int = 0  # missing blocks that were cached before the lookup
    num_in_flight: int = 0  # missing blocks that another sequence computed first, after the lookup
    num_first: int = 0  # missing blocks that had never been computed
    num_vetoed: int = 0  # missing blocks whose K and V were cached, but after the last snapshot
    num_late: int = 0  # missing blocks reused from another sequence while the prompt was prefilled in chunks
    late_tokens_hit: int = 0  # tokens that this saved
    divergence: FirstDifference | None = None
    salt: str | None = None  # number of its cache_salt; None: it has none, or the trace does not name it
    unit: str = "step"  # what steps are counts of: messages, of a server's events

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
        return self.event.blocks_hit + self.num_vetoed + self.num_evicted + self.num_in_flight + self.num_late

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
        """Tokens hit by an unlimited cache in which every block is computed once, and by a prefix store."""
        # the last token is always computed; of a server's prompts it is not known
        most = self.event.num_tokens - (self.unit == "step")
        return min(self.num_shared_blocks * self.block_size, most)

    @property
    def disk_tokens(self) -> int:
        """The part of the tokens hit that was read from a prefix store for it."""
        return 0 if self.event.disk_tokens is UNSET else self.event.disk_tokens

    def num_lost_tokens(self) -> int:
        """Tokens computed although an unlimited cache would have found them."""
        return max(0, self.ideal_tokens_hit - self.tokens_hit)


@dataclass(slots=True)
class Totals:
    """Outcomes of the tokens of all lookups of one kind; the parts add up to num_tokens."""

    num_lookups: int = 0
    num_tokens: int = 0
    hit: int = 0  # tokens found in memory
    disk_hit: int = 0  # tokens read from a prefix store
    late_hit: int = 0  # reused while another sequence computed them
    vetoed: int = 0  # K and V cached, but no snapshot of the recurrent state
    evicted: int = 0  # cached before, evicted
    in_flight: int = 0  # computed twice at the same time
    first_seen: int = 0  # never computed before
    first_seen_shared: int = 0  # subset of first_seen: shared with something earlier, but not as a full block
    last_block: int = 0  # tokens after the last full block
    last_block_shared: int = 0  # subset of last_block: shared with something earlier
    last_token: int = 0  # the last tokens of fully cached prompts
    caching_off: int = 0
    not_known: int = 0
    ideal: int = 0  # hits of an unlimited cache with every block computed once; not one of the parts
    reasons: Counter[Reason] = field(default_factory=Counter)

    @property
    def num_found(self) -> int:
        """Tokens that were not computed: hits in memory and on disk, and later ones."""
        return self.hit + self.disk_hit + self.late_hit

    def add(self, lookup: Lookup) -> None:
        event, size = lookup.event, lookup.block_size
        self.num_lookups += 1
        self.num_tokens += event.num_tokens
        self.reasons[lookup.reason] += 1
        if lookup.reason == "caching_off":
            self.caching_off += event.num_tokens
            return
        self.hit += event.tokens_hit - lookup.disk_tokens
        self.disk_hit += lookup.disk_tokens
        self.late_hit += lookup.late_tokens_hit
        self.last_token += event.blocks_hit * size - event.tokens_hit
        self.last_block += event.num_tokens - event.blocks_asked * size
        self.vetoed += lookup.num_vetoed * size
        self.evicted += lookup.num_evicted * size
        self.in_flight += (lookup.num_in_flight + lookup.num_late) * size - lookup.late_tokens_hit
        self.first_seen += lookup.num_first * size
        self.not_known += lookup.num_unknown * size
        self.ideal += lookup.ideal_tokens_hit
        if lookup.num_shared_blocks == event.blocks_asked:
            self.last_block_shared += min(lookup.num_further_tokens, event.num_tokens - event.blocks_asked * size)
        elif lookup.num_first:
            self.first_seen_shared += min(lookup.num_further_tokens, size)


class SnapshotRow(ShownRow):
    """A snapshot of recurrent state, and what it was good for."""

    USES: ClassVar = {
        "json": "step seq_id label num_tokens reason num_hits tokens_hit dropped_step why",
        "table": "step seq_id label num_tokens why num_hits tokens_hit dropped_step",
    }

    step: Annotated[int | None, "made in step"]
    seq_id: Annotated[int, "by seq"]
    label: Label
    num_tokens: Annotated[int, "after tokens"]
    reason: ev.SnapshotReason
    num_hits: int
    tokens_hit: int
    dropped_step: Annotated[int | None, "dropped in step"]
    why: Annotated[str, "because of"] = computed(lambda row: ev.SNAPSHOT_WORDS[row.reason])

    def __init__(self, event: ev.CheckpointMade | ev.CheckpointRestored, label: str, step: int | None) -> None:
        super().__init__(event)
        self.step, self.label = step, label
        self.num_hits = self.tokens_hit = 0  # lookups that continued from it, and the tokens that this saved
        self.dropped_step: int | None = None  # None: it was never dropped


# parts of Totals that an unlimited cache would have found -> what became of these tokens
LOSS_WORDS = {
    "evicted": "evicted before reuse",
    "in_flight": "computed by two sequences at once",
    "vetoed": "cached without a snapshot of the recurrent state",
}


def totals_of(lookups: Iterable[Lookup], *, own: bool) -> Totals:
    """Totals of the requests' first lookups, or of those that repeat their own request (SeqState.repeats)."""
    totals = Totals()
    for lookup in lookups:
        if lookup.own == own:
            totals.add(lookup)
    return totals


def longest_shared_prefix(lookups: Iterable[Lookup]) -> int:
    """Tokens, over all first lookups."""
    return max((lookup.num_shared_tokens for lookup in lookups if not lookup.own), default=0)


class Explainer(TokenView):
    """Collects every lookup, and every snapshot of recurrent state. Call `finish` after the last event."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups: list[Lookup] = []
        self.snapshots: list[SnapshotRow] = []
        self.block_size = 0
        self.num_failed_steps = 0
        self.num_lost_blocks = 0  # full ones whose content a failed step left uncertain
        self._salts: dict[int, str] = {}  # seq_id -> its salt
        self._part = ""  # part of a resumed run: each numbers its salts on its own
        self._forget_cache()

    def _forget_cache(self) -> None:
        # each sequence's lookups with blocks still to be computed, and when each was
        self._pending: dict[int, list[tuple[int, Lookup]]] = {}
        self._snapshot_in: dict[int, SnapshotRow] = {}  # the snapshots by slot
        self._first_seen: dict[int, tuple[int, int]] = {}  # hash -> event number and sequence that first filled it
        self._num_copies: dict[int, int] = {}  # hash -> blocks that hold it
        self._ghosts: Ghosts[int] = Ghosts()  # by hash
        self._evicted: list[int] = []  # hashes of the blocks that are evicted for the next allocation
        self._culprits: dict[int, str] = {}  # hash -> label of the request that its block was evicted for
        self._missed: dict[int, list[Lookup]] = {}  # hash -> lookups that missed it after its eviction
        self._earlier = EarlierSequences()  # sequences with tokens: all of them so far
        self._hashes: dict[int, tuple[int | None, ...]] = {}  # hashes of the blocks of finished sequences with tokens

    def finish(self) -> None:
        """Settle the lookups whose blocks were never computed."""
        for seq_id in list(self._pending):
            self._settle(seq_id)

    # ------------------------------------------------------------------ events

    def on_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        """Another part of a resumed run: it starts with an empty cache."""
        super().on_engine_started(event, state)
        self._part = f" of part {event.part}" if event.part > 1 else ""
        self.finish()
        self._forget_cache()

    def on_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        super().on_request_added(event, state)
        self.block_size = state.block_size
        if event.salt is not UNSET:
            self._salts[event.seq_id] = f"{event.salt}{self._part}"

    def on_checkpoint_made(self, event: ev.CheckpointMade | ev.CheckpointRestored, state: PoolState) -> None:
        use = SnapshotRow(event, state.seqs[event.seq_id].label, state.step_number)
        self._snapshot_in[event.slot_id] = use
        self.snapshots.append(use)

    on_checkpoint_restored = on_checkpoint_made

    def on_checkpoint_looked_up(self, event: ev.CheckpointLookedUp, state: PoolState) -> None:
        if event.slot_id is not None:
            use = self._snapshot_in[event.slot_id]
            use.num_hits += 1
            use.tokens_hit += event.checkpoint_tokens

    def on_checkpoint_dropped(self, event: ev.CheckpointDropped, state: PoolState) -> None:
        self._snapshot_in.pop(event.slot_id).dropped_step = state.step_number

    def on_states_recovered(self, event: ev.StatesRecovered, state: PoolState) -> None:
        for slot_id in self._snapshot_in.keys() - set(event.idle_slot_ids):
            self._snapshot_in.pop(slot_id).dropped_step = state.step_number

    def on_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        if event.reason == "continued":
            self._taken_over(event)
            return
        seq = state.seqs[event.seq_id]
        own, ids = seq.repeats, (seq.seq_id, seq.request_id, seq.row_id)
        lookup = Lookup(state.step_number, *ids, seq.salted, own, event, state.block_size)
        lookup.salt = self._salts.get(event.seq_id)
        if state.slots is not None and state.slots.lookup is not None:
            lookup.kv_tokens = state.slots.lookup.cached_tokens
        self.lookups.append(lookup)
        if not own and event.seq_id in self._token_ids:
            tokens = token_bytes(self._token_ids[event.seq_id])
            lookup.divergence = self._earlier.diverge(tokens)
            self._earlier.add(seq.seq_id, tokens, seq.label, salted=seq.salted)
        if event.miss_reason is None:
            lookup.reason = "all_hit"
        elif event.miss_reason != "no_match":
            lookup.reason = event.miss_reason
        else:
            self._pending.setdefault(event.seq_id, []).append((state.num_events, lookup))
            self._explain_miss(lookup, state)

    def _explain_miss(self, lookup: Lookup, state: PoolState) -> None:
        """The reason for a miss, if it is already known at the lookup."""
        missing = lookup.event.missing_hash
        assert missing is not None, "a lookup that missed names the hash"
        if lookup.kv_tokens is not None and lookup.kv_tokens > lookup.event.tokens_hit:
            lookup.reason = "no_snapshot"
        elif missing in state.hash_to_block_id:
            lookup.reason = "hash_collision"
        elif self._num_copies.get(missing):
            lookup.reason = "unfindable"
        elif (ghost := self._ghosts.find(missing)) is not None:
            lookup.reason = "evicted"
            lookup.evicted_step, lookup.evicted_block_id, num_since = ghost
            lookup.evicted_for = self._culprits.get(missing)
            missed = self._missed.setdefault(missing, [])
            missed.append(lookup)
            for each in missed:
                each.wanted_step = lookup.step
            if state.engine is not None and state.engine.eviction == "lru":
                # a pool with m more blocks still holds the m contents evicted last, and those displaced by copies
                num_displaced = state.num_full_blocks - len(state.hash_to_block_id)
                lookup.num_more_blocks = max(1, num_since - num_displaced)
        elif self._is_cached_under_another_salt(lookup, state):
            lookup.reason = "different_salt"

    def _taken_over(self, event: ev.PrefixLookedUp) -> None:
        for _, lookup in self._pending.get(event.seq_id, ())[-1:]:
            lookup.num_late += event.blocks_hit
            lookup.late_tokens_hit += event.tokens_hit
            if lookup.reason == "not_known" and lookup.num_first == 0:
                lookup.reason = "in_flight"
        self._drop_complete(event.seq_id)

    def on_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        """Settle, after a preemption, the sequence's earlier lookup, whoever has computed its blocks since."""
        table = state.seqs[event.seq_id].block_table
        if self._pending.get(event.seq_id):
            for index, block_id in enumerate(event.block_ids, len(table) - len(event.block_ids)):
                block_hash = None if block_id is None else state.hashes[block_id]
                if block_hash is not None and index % state.num_groups == 0:
                    self._learn(event.seq_id, index // state.num_groups, block_hash)
            self._drop_complete(event.seq_id)

    def on_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        first = state.seqs[event.seq_id].place_of(event.block_ids)
        for index, block_hash in enumerate(event.hashes, first):
            self._arrived(block_hash, event.seq_id, state)
            if index % state.num_groups == 0:
                self._learn(event.seq_id, index // state.num_groups, block_hash)
        self._drop_complete(event.seq_id)

    def on_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        self.on_blocks_allocated(event, state)
        for _, _, block_hash, _ in event.blocks:
            self._arrived(block_hash, event.seq_id, state)

    def _arrived(self, block_hash: int, seq_id: int, state: PoolState) -> None:
        """A block has this content from now on."""
        self._first_seen.setdefault(block_hash, (state.num_events, seq_id))
        self._num_copies[block_hash] = self._num_copies.get(block_hash, 0) + 1
        self._ghosts.drop(block_hash)
        self._missed.pop(block_hash, None)

    def on_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        self._num_copies[event.hash] -= 1
        if not self._num_copies[event.hash]:
            del self._num_copies[event.hash]
        if event.hash not in state.hash_to_block_id and self._ghosts.add(event.hash, state.step_number, event.block_id):
            self._evicted.append(event.hash)

    def on_blocks_allocated(self, event: ev.BlocksAllocated | ev.BlocksRestored, state: PoolState) -> None:
        """The sequence that takes the blocks is the one that they were evicted for, in older traces, too."""
        self._culprits |= dict.fromkeys(self._evicted, state.seqs[event.seq_id].label)
        self._evicted = []

    def on_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        """What the step left uncertain was never in the cache: who computes it next is the first."""
        kept = Counter(state.hashes[block_id] for block_id in event.cached_block_ids)
        self.num_failed_steps += 1
        self.num_lost_blocks += sum(self._num_copies.values()) - kept.total()
        for block_hash in self._num_copies.keys() - kept.keys():
            del self._first_seen[block_hash]
        self._num_copies = {block_hash: count for block_hash, count in kept.items() if block_hash is not None}

    def on_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        self._settle(event.seq_id)
        self._salts.pop(event.seq_id, None)
        token_ids = self._token_ids.get(event.seq_id)
        if token_ids is not None:
            seq = state.finished[event.seq_id]
            self._hashes[event.seq_id] = _hashes(seq.block_table, state)
            if event.num_output_tokens:
                self._earlier.add(seq.seq_id, token_bytes(token_ids), seq.label, salted=seq.salted)
        super().on_request_finished(event, state)

    # ------------------------------------------------------------------ parts

    def _learn(self, seq_id: int, index: int, block_hash: int) -> None:
        """Settle a missed block that is now in the cache: who computed it first, and when."""
        for since, lookup in self._pending.get(seq_id, ()):
            event = lookup.event
            if index != lookup.num_shared_blocks + lookup.num_first or index >= event.blocks_asked:
                continue
            seen, by_seq_id = self._first_seen[block_hash]
            if lookup.kv_tokens is not None and index * lookup.block_size < lookup.kv_tokens:
                lookup.num_vetoed += 1
            elif seen < since:
                lookup.num_evicted += 1
            elif by_seq_id == seq_id:
                lookup.num_first += 1
            else:
                lookup.num_in_flight += 1
                if index == event.first_miss and lookup.reason == "not_known":
                    lookup.reason = "in_flight"

    def _drop_complete(self, seq_id: int) -> None:
        pending = self._pending.get(seq_id)
        if pending is not None and all(lookup.num_unknown == 0 for _, lookup in pending):
            self._settle(seq_id)

    def _settle(self, seq_id: int) -> None:
        """The reason for a miss once it is clear that no other sequence computed the block."""
        for _, lookup in self._pending.pop(seq_id, ()):
            if lookup.reason != "not_known":
                continue
            if lookup.event.blocks_hit:
                lookup.reason = "not_seen_before"
            elif lookup.event.partial_tokens:
                lookup.reason = "shorter_than_block"
            elif lookup.num_first:
                lookup.reason = "no_shared_prefix"

    def _is_cached_under_another_salt(self, lookup: Lookup, state: PoolState) -> bool:
        """Whether the same tokens are cached now under another hash, i.e. with another salt."""
        event, twin = lookup.event, lookup.divergence
        index = event.blocks_hit
        if twin is None or not (lookup.salted or twin.other_salted):
            return False
        if twin.num_shared_tokens < (index + 1) * self.block_size:
            return False
        other = state.seqs.get(twin.other_seq_id)
        hashes = self._hashes.get(twin.other_seq_id, ())
        if other is not None:
            hashes = _hashes(other.block_table, state)
        found = hashes[index] if index < len(hashes) else None
        return found is not None and found != event.missing_hash and found in state.hash_to_block_id


def _hashes(block_table: list[int | None], state: PoolState) -> tuple[int | None, ...]:
    """Hashes of the blocks of a sequence's first group."""
    return tuple(None if each is None else state.hashes[each] for each in block_table[:: state.num_groups])


def explain_trace(source: EventSource, *views: View) -> tuple[Explainer, PoolState]:
    """Fold a whole trace, also into other views. Raises TraceError like the source, or where the trace contradicts
    itself."""
    explainer = Explainer()
    state = fold(source, explainer, *views)
    explainer.finish()
    return explainer, state
