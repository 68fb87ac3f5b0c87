"""What an engine keeps of its sequences: blocks of tokens, and other kinds next to them, such as slots of state.

Used by the scheduler, which knows no kind; needs neither torch nor the engine. To add a kind, write its class and its
entry in KINDS.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pagedcli.core.block_manager import BlockManager, CacheUser, PrefixHit
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.states import StateKind
from pagedcli.events import Emit, WaitingReason

if TYPE_CHECKING:
    from pagedcli.core.store import PrefixStore


class CacheKind(Protocol):
    """Something that is kept of each sequence next to its blocks.

    A step asks can_grow before it calls grow; what is grown lasts until the end of the last block of these tokens.
    """

    name: str  # lookups that it vetoes are recorded with this name

    @classmethod
    def is_needed(cls, limits: Limits) -> bool:
        """Whether the model of an engine with these limits needs it."""

    @classmethod
    def bytes(cls, limits: Limits) -> int:
        """Memory that it takes next to the blocks of a pool."""

    @classmethod
    def make(cls, limits: Limits, blocks: BlockManager, emit: Emit | None) -> "CacheKind":
        """The kind of an engine."""

    def boundaries(self, seq: CacheUser, most: int) -> Collection[int]:
        """After how many full spans, at most `most`, a new sequence with these tokens can continue; 0 always may."""

    def why_wait(self, seq: CacheUser, hit: PrefixHit) -> WaitingReason | None:
        """Why a sequence that has room for its blocks should not start now."""

    def next_stop(self, seq: CacheUser, num_computed: int, num_new_tokens: int) -> int:
        """How many of the next tokens to compute in one step: all, or those up to where something is to be kept."""

    def can_grow(self, seqs: Sequence[CacheUser]) -> bool:
        """Whether there is room for the next step of all these sequences."""

    def can_fork(self, parent: CacheUser, *, is_last: bool) -> bool:
        """Whether there is room for the next step of a fork. `is_last`: the parent ends then."""

    def stored(self, seq: CacheUser, most: int, store: "PrefixStore") -> Collection[int]:
        """After how many full spans, at most `most`, the store has what a sequence with these tokens continues with."""

    def restore(self, seq: CacheUser, num_spans: int, store: "PrefixStore") -> bool:
        """Bring from the store what a sequence continues with after so many spans, unless it is here. Returns False if
        it could not be read; then the store has it no longer."""

    def offer(self, seq: CacheUser, hit: PrefixHit, store: "PrefixStore") -> None:
        """A sequence has started after its hit: what it found is for the store, too."""

    def allocate(self, seq: CacheUser, hit: PrefixHit) -> None:
        """A sequence starts after its hit. Its blocks come next."""

    def grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        """A step computes the next tokens of a sequence, which has its blocks."""

    def add_draft(self, seq: CacheUser) -> None:
        """The scheduled step of a sequence checks guesses, too: keep what it has before them, if there is room."""

    def take_draft(self, seq: CacheUser, num_drafted: int, num_accepted: int) -> int:
        """So many guesses of a sequence were right. Returns how many of its last tokens its next step has to compute
        once more."""

    def release(self, seq: CacheUser) -> None:
        """A sequence ends or is preempted. Its blocks go next."""

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        """A new sequence of equal tokens shares what its parent has."""

    def recover(self) -> None:
        """A step raised: release everything, drop what may be unwritten, and forget the queue."""

    def expect(self, seq: CacheUser) -> None:
        """A sequence joined the waiting queue; its prefixes are hashed."""

    def forget(self, seq: CacheUser) -> None:
        """A sequence left the waiting queue."""

    def begin_step(self) -> None:
        """The step before has been launched."""

    def confirm(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too."""

    def count(self, facts: RunFacts) -> None:
        """Write what it counts into the facts of the run."""

    def check(self, seqs: list[CacheUser] | None) -> None:
        """Verify every invariant; given the sequences, also that they explain what is held."""


KINDS: dict[str, type[CacheKind]] = {StateKind.name: StateKind}


class Cache:
    """Blocks and other kinds side by side. A hit is the longest beginning after which all of them can continue."""

    store: "PrefixStore | None" = None  # blocks of earlier processes; None: none is used

    def __init__(self, blocks: BlockManager, others: Iterable[CacheKind] = ()) -> None:
        self.blocks = blocks
        self.others = tuple(others)

    # ------------------------------------------------------------------ questions

    def lookup(self, seq: CacheUser) -> PrefixHit:
        """The longest beginning of the sequence that every kind has, and the kind that allows least of what the blocks
        have. Changes nothing but that more of the sequence may be hashed."""
        hit = self.blocks.lookup(seq)
        if not self.others:
            return hit
        own = {kind.name: {0, *kind.boundaries(seq, hit.num_spans)} for kind in self.others}
        found = self.blocks.shortened(seq, hit, set.intersection(*own.values()))
        if found.num_spans == hit.num_spans:
            return found
        return replace(found, vetoed_by=min(own, key=lambda name: max(own[name])))

    def why_wait(self, seq: CacheUser, hit: PrefixHit) -> WaitingReason | None:
        """Why a sequence that has room for its blocks should not start now."""
        return next((reason for kind in self.others if (reason := kind.why_wait(seq, hit)) is not None), None)

    def can_grow(self, seqs: Sequence[CacheUser]) -> bool:
        """Whether there is room for the next step of all these sequences, blocks apart."""
        return not self.others or all(kind.can_grow(seqs) for kind in self.others)

    def can_fork(self, parent: CacheUser, *, is_last: bool) -> bool:
        """Whether there is room for the next step of a fork, blocks apart. `is_last`: the parent ends then."""
        return all(kind.can_fork(parent, is_last=is_last) for kind in self.others)

    def next_chunk(self, seq: CacheUser, num_computed: int, num_new_tokens: int) -> int:
        """How many of the next tokens to compute in one step, so that it ends where a kind has to keep something."""
        if not self.others:
            return num_new_tokens
        if self.blocks.enable_prefix_caching:
            self.blocks.extend_prefixes(seq)
        return min(kind.next_stop(seq, num_computed, num_new_tokens) for kind in self.others)

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser, *, first: bool = False) -> None:
        """A sequence joined the waiting queue at its back, or as its first one."""
        self.blocks.expect(seq, first=first)
        if self.others and self.blocks.enable_prefix_caching:
            self.blocks.extend_prefixes(seq)
            for kind in self.others:
                kind.expect(seq)

    def forget(self, seq: CacheUser) -> None:
        """A sequence left the waiting queue."""
        self.blocks.forget(seq)
        for kind in self.others:
            kind.forget(seq)

    # ------------------------------------------------------------------ changes

    def restore(self, seq: CacheUser, hit: PrefixHit) -> PrefixHit:
        """Bring what the store has after a hit into free blocks. Returns the hit that the sequence has then."""
        blocks, store = self.blocks, self.store
        if store is None:
            return hit
        num_before = blocks.num_computed_after(seq, hit)
        while hit.num_spans < hit.num_asked:
            found = store.found(seq, hit.num_asked * blocks.num_groups)
            indices, num_spans = blocks.missing_entries(seq, found, self._ends(seq, hit.num_asked, store))
            if num_spans <= hit.num_spans:
                break
            if indices:
                contents = store.read(seq, indices)
                if contents is None:
                    continue
                blocks.restore(seq, dict(zip(indices, contents, strict=True)), store.place_in_memory)
            is_whole = all(kind.restore(seq, num_spans, store) for kind in self.others)
            hit = self.lookup(seq)
            if is_whole:
                break
        return replace(hit, num_disk_tokens=blocks.num_computed_after(seq, hit) - num_before)

    def _ends(self, seq: CacheUser, most: int, store: "PrefixStore") -> set[int] | None:
        """After how many spans all other kinds can continue, with what the store has; None: any number."""
        own = ({*kind.boundaries(seq, most), *kind.stored(seq, most, store)} for kind in self.others)
        return set.intersection(*own) if self.others else None

    def offer(self, seq: CacheUser, hit: PrefixHit) -> None:
        """A sequence has started after its hit: what it found is for the store, if there is one."""
        if self.store is not None:
            self.store.offer(seq, hit.block_ids, self.blocks.is_written)
            for kind in self.others:
                kind.offer(seq, hit, self.store)

    def allocate(
        self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int, *, num_shared_tokens: int | None = None
    ) -> None:
        """Start a sequence after its hit, with room for num_new_tokens more: see BlockManager.allocate."""
        for kind in self.others:
            kind.allocate(seq, hit)
        self.blocks.allocate(seq, hit, num_new_tokens, num_shared_tokens=num_shared_tokens)
        for kind in self.others:
            kind.forget(seq)
        self._grow_others(seq, num_new_tokens)

    def reuse_more(self, seq: CacheUser) -> int:
        """Share blocks that others have filled meanwhile: see BlockManager.reuse_more. Other kinds belong to the tokens
        that the sequence has computed itself, so with them there are none."""
        return 0 if self.others else self.blocks.reuse_more(seq)

    def grow(self, seq: CacheUser, num_new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for the next tokens of a running sequence: see BlockManager.may_append."""
        copies = self.blocks.may_append(seq, num_new_tokens)
        if self.others:
            self._grow_others(seq, num_new_tokens)
        return copies

    def _grow_others(self, seq: CacheUser, num_new_tokens: int) -> None:
        if num_new_tokens:
            for kind in self.others:
                kind.grow(seq, num_new_tokens)

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        """Share what the parent has with a new sequence of equal tokens."""
        self.blocks.fork(parent, child)
        for kind in self.others:
            kind.fork(parent, child)

    def add_draft(self, seq: CacheUser) -> None:
        """The scheduled step of a sequence checks guesses, for which it has blocks."""
        for kind in self.others:
            kind.add_draft(seq)

    def take_draft(
        self, seq: CacheUser, num_drafted: int, num_accepted: int, token_ids: tuple[int, ...] | None
    ) -> None:
        """So many guesses of a sequence were right: see BlockManager.keep_accepted."""
        again = [kind.take_draft(seq, num_drafted, num_accepted) for kind in self.others]
        num_again = max(again, default=0)
        self.blocks.keep_accepted(seq, num_drafted, num_accepted, token_ids, num_again=num_again)
        seq.num_behind_tokens = num_again

    def release(self, seq: CacheUser) -> int:
        """Release what a sequence has. Returns how many blocks became free."""
        for kind in self.others:
            kind.release(seq)
        return self.blocks.deallocate(seq)

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """What is kept from now on belongs to the next step."""
        self.blocks.begin_step()
        for kind in self.others:
            kind.begin_step()

    def confirm(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too: what they wrote is known to be written."""
        self.blocks.confirm_filled(latest=latest)
        for kind in self.others:
            kind.confirm(latest=latest)

    def recover(self, seqs: Iterable[CacheUser]) -> tuple[int, ...]:
        """Release everything after a step that raised: see BlockManager.recover."""
        cached = self.blocks.recover(seqs)
        for kind in self.others:
            kind.recover()
        return cached

    def count(self, facts: RunFacts) -> None:
        """Write what the kinds count into the facts of the run."""
        facts.num_evictions = self.blocks.pool.num_evictions
        for kind in self.others:
            kind.count(facts)

    def check(self, seqs: list[CacheUser] | None = None) -> None:
        """Verify every invariant; given the sequences, also that they explain what is held."""
        self.blocks.check(seqs)
        for kind in self.others:
            kind.check(seqs)


def make_cache(num_blocks: int, limits: Limits, emit: Emit | None = None) -> Cache:
    """The cache of an engine."""
    blocks = BlockManager(
        num_blocks,
        limits.block_size,
        windows=limits.windows,
        enable_prefix_caching=limits.enable_prefix_caching,
        eviction=limits.eviction,
        emit=emit,
    )
    return Cache(blocks, [KINDS[name].make(limits, blocks, emit) for name in kinds_of(limits)])


def kinds_of(limits: Limits) -> tuple[str, ...]:
    """Names of the kinds that an engine has next to its blocks."""
    return tuple(name for name, kind in KINDS.items() if kind.is_needed(limits))


def pool_bytes(limits: Limits, block_bytes: int) -> int:
    """Bytes of all blocks, and of what other kinds keep next to them."""
    return (limits.num_blocks or 0) * block_bytes + sum(KINDS[name].bytes(limits) for name in kinds_of(limits))
