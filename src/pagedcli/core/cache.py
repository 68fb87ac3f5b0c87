"""What an engine keeps of its sequences: blocks of tokens and, for models with recurrent state, slots of state.

Used by the scheduler; needs neither torch nor the engine.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedcli.core.block_manager import BlockManager
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.prefix_lookup import PrefixHit
from pagedcli.core.snapshots import StateUser
from pagedcli.core.states import StatePool
from pagedcli.events import Emit

if TYPE_CHECKING:
    from pagedcli.core.store import PrefixStore


class Cache:
    """Blocks and slots of state. A hit is the longest beginning after which both can continue."""

    store: "PrefixStore | None" = None  # blocks of earlier processes; None: none is used

    def __init__(self, blocks: BlockManager, states: StatePool | None = None) -> None:
        self.blocks = blocks
        self.states = states  # None: the model has no recurrent state

    # ------------------------------------------------------------------ questions

    def lookup(self, seq: StateUser) -> PrefixHit:
        """The longest cached beginning of the sequence, and whether its state allows less than its blocks. May hash
        more of the sequence; changes nothing else."""
        hit = self.blocks.lookup(seq)
        if self.states is None:
            return hit
        found = self.blocks.shortened(seq, hit, {0, *self.states.boundaries(seq, hit.num_spans)})
        return found if found.num_spans == hit.num_spans else replace(found, vetoed_by="state")

    def next_chunk(self, seq: StateUser, num_computed: int, num_new_tokens: int) -> int:
        """How many of the next tokens to compute in one step, so that it ends where a snapshot is to be made."""
        if self.states is None:
            return num_new_tokens
        if self.blocks.enable_prefix_caching:
            self.blocks.extend_prefixes(seq)
        return self.states.next_stop(seq, num_computed, num_new_tokens)

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: StateUser, *, first: bool = False) -> None:
        """A sequence joined the waiting queue at its back, or as its first one."""
        self.blocks.expect(seq, first=first)
        if self.states is not None and self.blocks.enable_prefix_caching:
            self.blocks.extend_prefixes(seq)
            self.states.expect(seq)

    def forget(self, seq: StateUser) -> None:
        """A sequence left the waiting queue."""
        self.blocks.forget(seq)
        if self.states is not None:
            self.states.forget(seq)

    # ------------------------------------------------------------------ changes

    def restore(self, seq: StateUser, hit: PrefixHit) -> PrefixHit:
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
            is_whole = self.states is None or self.states.restore(seq, num_spans, store)
            hit = self.lookup(seq)
            if is_whole:
                break
        return replace(hit, num_disk_tokens=blocks.num_computed_after(seq, hit) - num_before)

    def _ends(self, seq: StateUser, most: int, store: "PrefixStore") -> set[int] | None:
        """After how many spans the state can continue, with what the store has; None: any number."""
        states = self.states
        return None if states is None else {*states.boundaries(seq, most), *states.stored(seq, most, store)}

    def offer(self, seq: StateUser, hit: PrefixHit) -> None:
        """A sequence has started after its hit: what it found is for the store, if there is one."""
        if self.store is not None:
            self.store.offer(seq, hit.block_ids, self.blocks.is_written)
            if self.states is not None:
                self.states.offer(seq, hit, self.store)

    def allocate(
        self, seq: StateUser, hit: PrefixHit, num_new_tokens: int, *, num_shared_tokens: int | None = None
    ) -> None:
        """Start a sequence after its hit, with room for num_new_tokens more: see BlockManager.allocate."""
        if self.states is not None:
            self.states.allocate(seq, hit)
        self.blocks.allocate(seq, hit, num_new_tokens, num_shared_tokens=num_shared_tokens)
        if self.states is not None:
            self.states.forget(seq)
            if num_new_tokens:
                self.states.grow(seq, num_new_tokens)

    def reuse_more(self, seq: StateUser) -> int:
        """Share blocks that others have filled meanwhile: see BlockManager.reuse_more. A state is that of the tokens
        that the sequence has computed itself, so with states there are none."""
        return 0 if self.states is not None else self.blocks.reuse_more(seq)

    def grow(self, seq: StateUser, num_new_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for the next tokens of a running sequence: see BlockManager.may_append."""
        copies = self.blocks.may_append(seq, num_new_tokens)
        if self.states is not None and num_new_tokens:
            self.states.grow(seq, num_new_tokens)
        return copies

    def fork(self, parent: StateUser, child: StateUser) -> None:
        """Share what the parent has with a new sequence of equal tokens."""
        self.blocks.fork(parent, child)
        if self.states is not None:
            self.states.fork(parent, child)

    def take_draft(
        self, seq: StateUser, num_drafted: int, num_accepted: int, token_ids: tuple[int, ...] | None
    ) -> None:
        """Keep the accepted tokens of a draft: see BlockManager.keep_accepted."""
        num_again = 0 if self.states is None else self.states.take_draft(seq, num_drafted, num_accepted)
        self.blocks.keep_accepted(seq, num_drafted, num_accepted, token_ids, num_again=num_again)

    def release(self, seq: StateUser) -> int:
        """Release what a sequence has. Returns how many blocks became free."""
        if self.states is not None:
            self.states.release(seq)
        return self.blocks.deallocate(seq)

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """What is kept from now on belongs to the next step."""
        self.blocks.begin_step()
        if self.states is not None:
            self.states.begin_step()

    def confirm(self, *, latest: bool) -> None:
        """All steps but the latest have run, or with `latest` that one, too: what they wrote is known to be written."""
        self.blocks.confirm_filled(latest=latest)
        if self.states is not None:
            self.states.confirm(latest=latest)

    def recover(self, seqs: Iterable[StateUser]) -> tuple[int, ...]:
        """Release everything after a step that raised: see BlockManager.recover."""
        cached = self.blocks.recover(seqs)
        if self.states is not None:
            self.states.recover()
        return cached

    def count(self, facts: RunFacts) -> None:
        """Write the counts of blocks and slots into the facts of the run."""
        facts.num_evictions = self.blocks.pool.num_evictions
        if self.states is not None:
            self.states.count(facts)

    def check(self, seqs: list[StateUser] | None = None) -> None:
        """Verify every invariant; given the sequences, also that they explain what is held."""
        self.blocks.check(seqs)
        if self.states is not None:
            self.states.check(seqs)


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
    return Cache(blocks, StatePool(limits, blocks.num_groups, emit) if limits.has_states else None)


def pool_bytes(limits: Limits, block_bytes: int) -> int:
    """Bytes of all blocks and of all slots of state."""
    return (limits.num_blocks or 0) * block_bytes + (limits.num_state_slots or 0) * limits.state_bytes
