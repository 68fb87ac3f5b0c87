"""The block manager of a model that also has layers with recurrent state: blocks for attention, slots for the state.

Used by the scheduler in place of BlockManager. A hit is the longest boundary of blocks at which attention finds its
blocks in the cache and a checkpoint of the state exists.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.core.block_manager import BlockManager, CacheUser, PrefixHit
from pagedcli.core.checkpoints import CheckpointPlan, CheckpointPolicy
from pagedcli.core.limits import Limits
from pagedcli.core.state_slots import StateSlots
from pagedcli.events import CheckpointLookedUp, Emit, WaitingReason


@dataclass(frozen=True, slots=True)
class HybridHit(PrefixHit):
    """The cached part of a sequence, which ends at a checkpoint."""

    slot_id: int | None = None  # of the checkpoint; None: no hit
    num_cached_spans: int = 0  # leading spans whose K and V are cached in all groups of layers


class HybridManager(BlockManager):
    """Owns blocks and state slots."""

    def __init__(self, num_blocks: int, limits: Limits, emit: Emit | None = None) -> None:
        super().__init__(num_blocks, **_of_limits(limits), emit=emit)
        assert limits.num_state_slots, "a model with recurrent state has slots"
        policy = CheckpointPolicy.named(limits.checkpoints if limits.enable_prefix_caching else "none")
        self.plan = CheckpointPlan(policy, self.block_size, self.num_groups)
        self.states = StateSlots(limits.num_state_slots, is_expected=self.plan.is_expected, emit=emit)
        self._kept: list[tuple[CacheUser, int]] = []  # sequences whose step of now makes a checkpoint, after which span

    # ------------------------------------------------------------------ questions

    def lookup(self, seq: CacheUser) -> HybridHit:
        """The longest cached beginning of the sequence that ends at a checkpoint."""
        found = super().lookup(seq)
        most = min(found.num_spans, self.plan.last_readable(seq))
        ends = [span for span in range(1, most + 1) if self._checkpoint(seq, span) is not None]
        block_ids = found.block_ids[: ends[-1] * self.num_groups] if ends else ()
        if ends and self.has_windows:  # of a shorter beginning, later tokens see other blocks
            block_ids = tuple(self._seen_blocks(seq, ends))
        num_spans = len(block_ids) // self.num_groups
        return HybridHit(
            block_ids=block_ids,
            num_free=sum(self.blocks[each].ref_count == 0 for each in block_ids if each is not None),
            num_spans=num_spans,
            num_asked=found.num_asked,
            slot_id=self._checkpoint(seq, num_spans) if num_spans else None,
            num_cached_spans=found.num_spans,
        )

    def why_wait(self, seq: CacheUser, hit: PrefixHit) -> WaitingReason | None:
        """Why a sequence that has room for its blocks should not start now."""
        if self.plan.is_coming(seq, hit.num_spans):
            return "checkpoint"
        return None if self.states.num_available else "state_slots"

    def can_write(self, seqs: Sequence[CacheUser]) -> bool:
        """Whether there are slots for the next step of all these sequences."""
        if len(seqs) == 1:
            return self.states.can_write(seqs[0])
        needed = sum(not self.states.writes_in_place(seq) for seq in seqs)
        return needed <= self.states.num_available

    def next_chunk(self, seq: CacheUser, num_computed: int, num_new_tokens: int) -> int:
        """How many of the next tokens to compute in one step, so that it ends at the first checkpoint to make."""
        size = self.block_size
        if self.plan.policy.kind == "none":
            return num_new_tokens
        self._extend_prefixes(seq, len(seq.token_ids) // size)
        stops = self.plan.stops(seq, num_computed // size)
        spans = [span for span in stops if self.states.find(self.plan.prefix(seq, span)) is None]
        self.plan.announce(seq, spans)
        return min(num_new_tokens, spans[0] * size - num_computed) if spans else num_new_tokens

    # ------------------------------------------------------------------ the queue

    def expect(self, seq: CacheUser, *, first: bool = False) -> None:
        super().expect(seq, first=first)
        if self.plan.policy.kind != "none":
            self._extend_prefixes(seq, len(seq.token_ids) // self.block_size)
            self.plan.expect(seq)

    def forget(self, seq: CacheUser) -> None:
        super().forget(seq)
        self.plan.forget(seq)

    # ------------------------------------------------------------------ changes

    def allocate(
        self, seq: CacheUser, hit: PrefixHit, num_new_tokens: int, *, num_shared_tokens: int | None = None
    ) -> None:
        assert isinstance(hit, HybridHit)
        if hit.slot_id is not None:
            self.states.read(seq, hit.slot_id)
        if self._emit is not None:
            size = self.block_size
            cached, computed = hit.num_cached_spans * size, hit.num_spans * size
            self._emit(CheckpointLookedUp(seq.seq_id, cached, computed, hit.slot_id))
        super().allocate(seq, hit, num_new_tokens, num_shared_tokens=num_shared_tokens)

    def reuse_more(self, seq: CacheUser) -> int:
        """None: the state of a sequence belongs to the tokens that it has computed itself."""
        return 0

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        super().fork(parent, child)
        self.states.fork(parent, child)

    def deallocate(self, seq: CacheUser) -> int:
        self.plan.withdraw(seq)
        self.states.release(seq)
        return super().deallocate(seq)

    def _grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        super()._grow(seq, num_new_tokens)
        if not num_new_tokens:
            return
        self.states.advance(seq)
        num_tokens = seq.num_computed_tokens + num_new_tokens
        span, rest = divmod(num_tokens, self.block_size)
        if not rest and self.plan.is_stop(seq, span):
            self.states.keep(seq, self.plan.prefix(seq, span), num_tokens, self.plan.policy.reason)
            self._kept.append((seq, span))

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        super().begin_step()
        self.states.begin_step()
        kept, self._kept = self._kept, []
        for seq, span in kept:
            self.plan.passed(seq, span)

    def confirm_filled(self, *, latest: bool) -> None:
        super().confirm_filled(latest=latest)
        self.states.confirm(latest=latest)

    def recover(self, seqs: Iterable[CacheUser]) -> tuple[int, ...]:
        cached = super().recover(seqs)
        self.states.recover()
        self.plan.clear()
        self._kept = []
        return cached

    # ------------------------------------------------------------------ parts

    def _checkpoint(self, seq: CacheUser, span: int) -> int | None:
        return self.states.find_written(self.plan.prefix(seq, span))

    def check(self, seqs: list[CacheUser] | None = None) -> None:
        super().check(seqs)
        self.states.check(seqs)


def make_manager(num_blocks: int, limits: Limits, emit: Emit | None = None) -> BlockManager:
    """The block manager of an engine."""
    if limits.has_states:
        return HybridManager(num_blocks, limits, emit)
    return BlockManager(num_blocks, **_of_limits(limits), emit=emit)


def _of_limits(limits: Limits) -> dict[str, Any]:
    """What a BlockManager takes from the limits."""
    names = ("block_size", "windows", "enable_prefix_caching", "eviction")
    return {name: getattr(limits, name) for name in names}
