"""Recurrent state as a kind of cache: slots for the states of sequences, and checkpoints in them.

See core.cache for the protocol, core.state_slots for the slots and core.checkpoints for the plan of checkpoints.
"""

from collections.abc import Sequence
from typing import Self

from pagedcli.core.block_manager import BlockManager, CacheUser, PrefixHit
from pagedcli.core.checkpoints import CheckpointPlan, CheckpointPolicy
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.state_slots import StateSlots
from pagedcli.events import CheckpointLookedUp, Emit, WaitingReason


class StateKind:
    """The slots of an engine whose model has layers with recurrent state. A prefix continues at a checkpoint."""

    name = "state"

    def __init__(self, limits: Limits, num_groups: int, emit: Emit | None) -> None:
        assert limits.num_state_slots, "a model with recurrent state has slots"
        policy = CheckpointPolicy.named(limits.checkpoints if limits.enable_prefix_caching else "none")
        self.plan = CheckpointPlan(policy, limits.block_size, num_groups)
        self.slots = StateSlots(limits.num_state_slots, is_expected=self.plan.is_expected, emit=emit)
        self._block_size = limits.block_size
        self._kept: list[tuple[CacheUser, int]] = []  # sequences whose step of now makes a checkpoint, after which span
        self._emit = emit

    @classmethod
    def make(cls, limits: Limits, blocks: BlockManager, emit: Emit | None) -> Self | None:
        return cls(limits, blocks.num_groups, emit) if limits.has_states else None

    @classmethod
    def bytes(cls, limits: Limits) -> int:
        return (limits.num_state_slots or 0) * limits.state_bytes

    def boundaries(self, seq: CacheUser, most: int) -> list[int]:
        spans = range(1, min(most, self.plan.last_readable(seq)) + 1)
        return [span for span in spans if self._checkpoint(seq, span) is not None]

    def why_wait(self, seq: CacheUser, hit: PrefixHit) -> WaitingReason | None:
        if self.plan.is_coming(seq, hit.num_spans):
            return "checkpoint"
        return None if self.slots.num_available else "state_slots"

    def can_grow(self, seqs: Sequence[CacheUser]) -> bool:
        if len(seqs) == 1:
            return self.slots.can_write(seqs[0])
        needed = sum(not self.slots.writes_in_place(seq) for seq in seqs)
        return needed <= self.slots.num_available

    def next_stop(self, seq: CacheUser, num_computed: int, num_new_tokens: int) -> int:
        """The step ends at the first checkpoint to make."""
        size = self._block_size
        if self.plan.policy.kind == "none":
            return num_new_tokens
        stops = self.plan.stops(seq, num_computed // size)
        spans = [span for span in stops if self.slots.find(self.plan.prefix(seq, span)) is None]
        self.plan.announce(seq, spans)
        return min(num_new_tokens, spans[0] * size - num_computed) if spans else num_new_tokens

    def expect(self, seq: CacheUser) -> None:
        if self.plan.policy.kind != "none":
            self.plan.expect(seq)

    def forget(self, seq: CacheUser) -> None:
        self.plan.forget(seq)

    def allocate(self, seq: CacheUser, hit: PrefixHit) -> None:
        slot_id = self._checkpoint(seq, hit.num_spans) if hit.num_spans else None
        if slot_id is not None:
            self.slots.read(seq, slot_id)
        if self._emit is not None:
            cached, computed = hit.num_cached_spans * self._block_size, hit.num_spans * self._block_size
            self._emit(CheckpointLookedUp(seq.seq_id, cached, computed, slot_id))

    def grow(self, seq: CacheUser, num_new_tokens: int) -> None:
        self.slots.advance(seq)
        num_tokens = seq.num_computed_tokens + num_new_tokens
        span, rest = divmod(num_tokens, self._block_size)
        if not rest and self.plan.is_stop(seq, span):
            self.slots.keep(seq, self.plan.prefix(seq, span), num_tokens, self.plan.policy.reason)
            self._kept.append((seq, span))

    def release(self, seq: CacheUser) -> None:
        self.plan.withdraw(seq)
        self.slots.release(seq)

    def fork(self, parent: CacheUser, child: CacheUser) -> None:
        self.slots.fork(parent, child)

    def begin_step(self) -> None:
        self.slots.begin_step()
        kept, self._kept = self._kept, []
        for seq, span in kept:
            self.plan.passed(seq, span)

    def confirm(self, *, latest: bool) -> None:
        self.slots.confirm(latest=latest)

    def recover(self) -> None:
        self.slots.recover()
        self.plan.clear()
        self._kept = []

    def count(self, facts: RunFacts) -> None:
        slots = self.slots
        facts.peak_used_state_slots = max(facts.peak_used_state_slots, slots.num_held)
        facts.num_checkpoints, facts.num_dropped_checkpoints = slots.num_made, slots.num_dropped
        facts.num_checkpoint_hits = slots.num_read

    def check(self, seqs: list[CacheUser] | None) -> None:
        self.slots.check(seqs)

    def _checkpoint(self, seq: CacheUser, span: int) -> int | None:
        return self.slots.find_written(self.plan.prefix(seq, span))
