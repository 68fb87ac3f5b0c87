"""The law of eviction: which cached block goes, computed again by the policy of the run. A part of check.py.

`lru` is the order of the free list, which laws.py checks. `next-use` follows the tokens of the waiting requests, which
a trace need not have: its choices are not computed again.
"""

from pagedcli.core.eviction import EvictionPolicy, make_policy, sees_queue
from pagedcli.core.prefixes import Prefix
from pagedcli.events import (
    BlockEvicted,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    EngineStarted,
    StepFailed,
    WindowPassed,
)
from pagedcli.trace.dispatch import View
from pagedcli.trace.laws import refuse
from pagedcli.trace.state import PoolState

UNCHECKED = "which blocks {} chose to evict was not checked: that follows from the tokens of waiting requests"


class EvictionLaws(View[PoolState]):
    """Tells the policy what happens to full blocks, as the block pool does, and compares its choices."""

    _policy: EvictionPolicy | None = None

    def on_engine_started(self, event: EngineStarted, state: PoolState) -> None:
        self._policy = None if sees_queue(event.eviction) else make_policy(event.eviction)

    def on_blocks_filled(self, event: BlocksFilled, state: PoolState) -> None:
        for block_id in event.block_ids:
            self._filled(block_id, state)

    def on_blocks_reused(self, event: BlocksReused, state: PoolState) -> None:
        if self._policy is not None:
            for block_id in event.block_ids:
                if block_id is not None:
                    self._policy.hit(block_id)

    def on_blocks_released(self, event: BlocksReleased, state: PoolState) -> None:
        self._released(event.block_ids, state)

    def on_window_passed(self, event: WindowPassed, state: PoolState) -> None:
        self._released(event.block_ids, state)

    def on_block_evicted(self, event: BlockEvicted, state: PoolState) -> None:
        if self._policy is not None and (chosen := self._policy.choose()) != event.block_id:
            assert state.engine is not None
            refuse(event, f"block {event.block_id} was evicted, but {state.engine.eviction} evicts block {chosen}")

    def on_step_failed(self, event: StepFailed, state: PoolState) -> None:
        if self._policy is None:
            return
        self._policy.clear()
        for block_id in event.cached_block_ids:
            self._filled(block_id, state)
            self._policy.freed(block_id, _findable(block_id, state))

    def _filled(self, block_id: int, state: PoolState) -> None:
        if self._policy is not None and (prefix := _findable(block_id, state)) is not None:
            self._policy.filled(prefix)

    def _released(self, block_ids: tuple[int, ...], state: PoolState) -> None:
        if self._policy is None:
            return
        for block_id in block_ids:
            if state.ref_counts[block_id] == 0 and state.hashes[block_id] is not None:
                self._policy.freed(block_id, _findable(block_id, state))


def _findable(block_id: int, state: PoolState) -> Prefix | None:
    """The content of a full block, of which policies only look at the hashes; None if lookups find an equal block."""
    block_hash, parent_hash = state.hashes[block_id], state.parent_hashes[block_id]
    if block_hash is None or state.hash_to_block_id.get(block_hash) != block_id:
        return None
    parent = None if parent_hash is None else Prefix(b"", None, lambda tokens, before: parent_hash)
    return Prefix(b"", parent, lambda tokens, before: block_hash)
