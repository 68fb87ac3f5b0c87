"""The fold: events in, the exact block pool out. Every view of a trace stands on PoolState.

Used by all of inspection; knows no engine and no torch. An event that is impossible in the state it meets is a
TraceError.
"""

import copy
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from pagedcli.errors import TraceError
from pagedcli.events import (
    SCHEMA_VERSION,
    AnyEvent,
    BlockCopied,
    BlockEvicted,
    BlocksAllocated,
    BlocksFilled,
    BlocksReleased,
    BlocksReused,
    EngineStarted,
    Event,
    PrefixLookedUp,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    RequestWaiting,
    SequenceForked,
    StepFinished,
    StepScheduled,
    StepStarted,
    TokensSampled,
)
from pagedcli.inspection.ledger import BlockLedger
from pagedcli.inspection.records import SeqState, StepRecord


class PoolState(BlockLedger):
    """The engine's ledgers, rebuilt from its events. `apply` is the only way to change it."""

    def __init__(self) -> None:
        super().__init__(0)
        self.engine: EngineStarted | None = None
        self.seqs: dict[int, SeqState] = {}  # waiting and running, in order of arrival
        self.finished: dict[int, SeqState] = {}
        self.refused: list[RequestRefused] = []
        self.step: StepRecord | None = None  # the current one, or the last
        self.num_events = 0
        # what must come next, and in the middle of what: some changes take several events
        self._due: tuple[tuple[type[Event], ...], str] | None = None
        self._evicted: set[int] = set()  # not yet taken by BlocksAllocated
        self._hole: tuple[int, int, int] | None = None  # (seq_id, index, block_id) that BlockCopied fills
        self._lookup: PrefixLookedUp | None = None  # its hits are claimed next
        self.num_just_freed = 0  # blocks that the last BlocksReleased made free
        self._queue_head = 0  # place of the foremost waiting sequence
        self._handlers = self._bind()

    def _bind(self) -> dict[type[Event], Callable[[Any], None]]:
        return {event_type: getattr(self, f"_{event_type.__struct_config__.tag}") for event_type in get_args(AnyEvent)}

    # ------------------------------------------------------------------ questions

    @property
    def block_size(self) -> int:
        """Tokens per block, 0 before the engine started."""
        return 0 if self.engine is None else self.engine.block_size

    @property
    def step_number(self) -> int | None:
        return None if self.step is None else self.step.step

    def seq(self, seq_id: int) -> SeqState | None:
        return self.seqs.get(seq_id) or self.finished.get(seq_id)

    def running(self) -> list[SeqState]:
        return [seq for seq in self.seqs.values() if seq.running]

    def waiting(self) -> list[SeqState]:
        """In order of the queue."""
        return sorted((seq for seq in self.seqs.values() if not seq.running), key=lambda seq: seq.queue_place)

    def num_unfilled_slots(self) -> int:
        """Slots of blocks in use that hold no token (yet): the cost of whole blocks."""
        seen: set[int] = set()
        unfilled = 0
        for seq in self.seqs.values():
            for index in range(seq.num_computed_tokens // self.block_size, len(seq.block_table)):
                block_id = seq.block_table[index]
                if block_id not in seen and self.hashes[block_id] is None:
                    seen.add(block_id)
                    unfilled += self.block_size - max(0, seq.num_computed_tokens - index * self.block_size)
        return unfilled

    def copy(self) -> "PoolState":
        """A snapshot that later events do not change."""
        other = copy.copy(self)
        self._copy_ledger(other)
        other.seqs = {seq_id: seq.copy() for seq_id, seq in self.seqs.items()}
        other.finished = self.finished.copy()  # a finished sequence changes no more
        other.refused = self.refused.copy()
        other._evicted = self._evicted.copy()
        other.step = None if self.step is None else self.step.copy()
        other._handlers = other._bind()
        return other

    # ------------------------------------------------------------------ the fold

    def apply(self, event: Event) -> None:
        """Take in the next event. Raises TraceError if it is impossible in this state; the state is then unusable."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TraceError(f"{type(event).__name__} is not an event of schema version {SCHEMA_VERSION}")
        if self.engine is None and type(event) is not EngineStarted:
            self._fail(event, "comes before engine_started, which must be the first record")
        due, self._due = self._due, None
        if due is not None and type(event) not in due[0]:
            self._fail(event, f"comes where {due[1]}")
        handler(event)
        self.num_events += 1

    def _engine_started(self, event: EngineStarted) -> None:
        if self.engine is not None:
            self._fail(event, "a second start in one trace")
        if event.num_blocks < 1 or event.block_size < 1:
            self._fail(event, f"a pool of {event.num_blocks} blocks of {event.block_size} tokens")
        self.engine = event
        BlockLedger.__init__(self, event.num_blocks)

    def _request_added(self, event: RequestAdded) -> None:
        if self.seq(event.seq_id) is not None:
            self._fail(event, f"seq {event.seq_id} exists already")
        self.seqs[event.seq_id] = SeqState(
            seq_id=event.seq_id,
            request_id=event.request_id,
            sample_index=event.sample_index,
            num_prompt_tokens=event.num_prompt_tokens,
            max_new_tokens=event.max_new_tokens,
            salted=event.salted,
            added_step=self.step_number,
            queue_place=event.seq_id if event.sample_index == 0 else self._front_place(),
        )

    def _request_refused(self, event: RequestRefused) -> None:
        self.refused.append(event)

    def _prefix_looked_up(self, event: PrefixLookedUp) -> None:
        seq = self._live(event, event.seq_id)
        size = self.block_size
        continued = event.reason == "continued"
        if continued != seq.running or (seq.block_table and not continued):
            self._fail(event, f"{event.reason}, but seq {seq.seq_id} is {seq.status} with blocks {seq.block_table}")
        first = seq.num_computed_tokens // size if continued else 0
        asked = event.num_tokens // size - first
        if event.blocks_asked != asked or not continued <= event.blocks_hit <= asked:
            self._fail(event, f"{event.blocks_hit} hits of {event.blocks_asked} blocks, where {asked} can be asked for")
        num_computed = min((first + event.blocks_hit) * size, event.num_tokens - 1)
        before = seq.num_computed_tokens if continued else 0
        if event.tokens_hit != num_computed - before or (continued and event.tokens_hit < 1):
            self._fail(event, f"{event.blocks_hit} blocks from block {first} on are not {event.tokens_hit} tokens hit")
        if event.blocks_hit:
            claim = f"seq {seq.seq_id} claims the {event.blocks_hit} blocks of its lookup"
            drops = continued and first < len(seq.block_table)  # its partial block gives way first
            self._due = (BlocksReleased if drops else BlocksReused,), claim
            self._lookup = event
        seq.status = "prefill"
        seq.num_computed_tokens = num_computed
        seq.num_cached_tokens = num_computed if not continued else seq.num_cached_tokens + event.tokens_hit
        if seq.admitted_step is None:
            seq.admitted_step = self.step_number
        if self.step is not None:
            self.step.lookups.append(event)

    def _blocks_reused(self, event: BlocksReused) -> None:
        seq = self._live(event, event.seq_id)
        lookup, self._lookup = self._lookup, None
        if lookup is None or lookup.seq_id != event.seq_id or lookup.blocks_hit != len(event.block_ids):
            self._fail(event, f"no lookup of seq {event.seq_id} that hit {len(event.block_ids)} blocks comes before")
        table = seq.block_table
        parent_hash = self.hashes[table[-1]] if table else None
        for block_id in event.block_ids:
            block_hash = self.hashes[self._block(event, block_id)]
            if block_hash is None or self.hash_to_block_id.get(block_hash) != block_id:
                self._fail(event, f"block {block_id} cannot be found under a hash")
            if table and self.parent_hashes[block_id] != parent_hash:
                self._fail(event, f"block {block_id} does not follow block {table[-1]} in its chain")
            parent_hash = block_hash
            self.hold(block_id)
            table.append(block_id)

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        seq = self._live(event, event.seq_id)
        for block_id in event.block_ids:
            oldest = next(iter(self.free_block_ids), None)
            if oldest != block_id:
                self._fail(event, f"block {block_id} was taken, but the oldest free block is {oldest}")
            if self.hashes[block_id] is not None:
                self._fail(event, f"block {block_id} still holds cached content")
            self._evicted.discard(block_id)
            self.hold(block_id)
        if self._evicted:
            self._fail(event, f"evicted blocks {sorted(self._evicted)} were not taken")
        seq.block_table.extend(event.block_ids)
        if self.step is not None:
            self.step.num_allocated += len(event.block_ids)

    def _block_evicted(self, event: BlockEvicted) -> None:
        block_id = self._block(event, event.block_id)
        if block_id not in self.free_block_ids:
            self._fail(event, f"block {block_id} is in use")
        if self.hashes[block_id] != event.hash:
            self._fail(event, f"block {block_id} holds hash {self.hashes[block_id]}")
        self.evict(block_id, event.hash)
        self._evicted.add(block_id)
        self._due = (BlockEvicted, BlocksAllocated), f"evicted blocks {sorted(self._evicted)} are allocated"
        if self.step is not None:
            self.step.num_evicted += 1

    def _blocks_filled(self, event: BlocksFilled) -> None:
        seq = self._live(event, event.seq_id)
        if len(event.block_ids) != len(event.hashes):
            self._fail(event, "as many hashes as blocks are needed")
        table = seq.block_table
        # the blocks of one event lie side by side in the table
        index = table.index(event.block_ids[0]) if event.block_ids and event.block_ids[0] in table else len(table)
        for block_id, block_hash in zip(event.block_ids, event.hashes, strict=True):
            if index >= len(table) or table[index] != block_id:
                self._fail(event, f"block {block_id} is not next in the block table")
            if self.hashes[block_id] is not None:
                self._fail(event, f"block {block_id} is full already")
            if self.ref_counts[block_id] != 1:
                self._fail(event, f"partial block {block_id} is shared and cannot be written")
            parent_hash = self.hashes[table[index - 1]] if index else None
            if index > 0 and parent_hash is None:
                self._fail(event, f"the block before block {block_id} is partial")
            self.mark_full(block_id, block_hash, parent_hash, seq.seq_id)
            index += 1

    def _blocks_released(self, event: BlocksReleased) -> None:
        seq = self._live(event, event.seq_id, finished_too=True)
        table, block_ids = seq.block_table, event.block_ids
        if self._lookup is not None:
            if block_ids != tuple(table[-1:]) or self._lookup.seq_id != seq.seq_id:
                self._fail(event, f"blocks {list(block_ids)} are not the last one of the block table {table}")
            table.pop()
            self._due = (BlocksReused,), f"seq {seq.seq_id} claims the blocks of its lookup"
        elif block_ids == tuple(reversed(table)):
            seq.block_table = []
            if seq.running:
                self._due = (RequestPreempted,), f"seq {seq.seq_id}, which released its blocks, should be preempted"
        elif len(block_ids) == 1 and block_ids[0] in table:
            index = table.index(block_ids[0])
            self._hole = (seq.seq_id, index, table.pop(index))
            self._due = (BlockCopied,), f"block {block_ids[0]} of seq {seq.seq_id} is replaced by its copy"
        else:
            self._fail(event, f"blocks {list(block_ids)} are not the block table {table} from its tail")
        self.num_just_freed = sum(self.let_go(block_id) for block_id in block_ids)

    def _block_copied(self, event: BlockCopied) -> None:
        seq = self._live(event, event.seq_id)
        hole, self._hole = self._hole, None
        if hole is None or hole[0] != seq.seq_id or hole[2] != event.source_block_id:
            self._fail(event, f"block {event.source_block_id} was not released before")
        last = seq.block_table[-1] if seq.block_table else None
        if last != event.copy_block_id:
            self._fail(event, f"block {event.copy_block_id} was not allocated before")
        if self.hashes[event.source_block_id] is not None:
            self._fail(event, "only a partial block is copied")
        seq.block_table.insert(hole[1], seq.block_table.pop())

    def _sequence_forked(self, event: SequenceForked) -> None:
        parent = self._live(event, event.parent_seq_id)
        child = self._live(event, event.seq_id)
        if event.block_ids != tuple(parent.block_table):
            self._fail(event, f"the parent's block table is {parent.block_table}")
        if event.num_computed_tokens != parent.num_computed_tokens:
            self._fail(
                event, f"the parent has {parent.num_computed_tokens} computed tokens, not {event.num_computed_tokens}"
            )
        if child.block_table:
            self._fail(event, f"seq {child.seq_id} has blocks already")
        for block_id in event.block_ids:
            self.hold(block_id)
        child.block_table = list(event.block_ids)
        child.num_computed_tokens = child.most_computed_tokens = event.num_computed_tokens
        child.parent_seq_id = event.parent_seq_id
        child.status = "decode"
        if child.admitted_step is None:
            child.admitted_step = self.step_number

    def _request_preempted(self, event: RequestPreempted) -> None:
        seq = self._live(event, event.seq_id)
        if not seq.running:
            self._fail(event, f"seq {seq.seq_id} is {seq.status}, not running")
        if event.num_tokens_dropped != seq.num_computed_tokens:
            self._fail(
                event, f"seq {seq.seq_id} had {seq.num_computed_tokens} computed tokens, not {event.num_tokens_dropped}"
            )
        if event.num_blocks_freed != self.num_just_freed:
            self._fail(event, f"{self.num_just_freed} blocks became free, not {event.num_blocks_freed}")
        if seq.block_table:
            self._fail(event, f"seq {seq.seq_id} still has blocks {seq.block_table}")
        seq.status = "preempted"
        seq.queue_place = self._front_place()
        seq.num_preemptions += 1
        seq.num_computed_tokens = 0
        if self.step is not None:
            self.step.preemptions.append(event)

    def _request_waiting(self, event: RequestWaiting) -> None:
        seq = self._live(event, event.seq_id)
        if seq.running:
            self._fail(event, f"seq {seq.seq_id} is running")
        if self.step is not None:
            self.step.waiting = event

    def _step_started(self, event: StepStarted) -> None:
        if self.step is not None and event.step != self.step.step + 1:
            self._fail(event, f"step {event.step} comes after step {self.step_number}")
        if self.step is not None and self.step.end_ns is None:
            self._fail(event, "the step before has not finished")
        self.step = StepRecord(event.step, event.time_ns)

    def _step_scheduled(self, event: StepScheduled) -> None:
        step = self._current(event, event.step)
        if len(event.seq_ids) != len(event.num_new_tokens):
            self._fail(event, "as many counts as sequences are needed")
        for seq_id, num_new_tokens in zip(event.seq_ids, event.num_new_tokens, strict=True):
            seq = self._live(event, seq_id)
            if not seq.running:
                self._fail(event, f"seq {seq_id} is {seq.status}, not running")
            num_computed = seq.num_computed_tokens + num_new_tokens
            if num_new_tokens < 1 or num_computed > seq.num_tokens:
                left = seq.num_tokens - seq.num_computed_tokens
                self._fail(event, f"{num_new_tokens} new tokens of seq {seq_id}, which has {left} left to compute")
            seq.num_recomputed_tokens += max(0, min(num_computed, seq.most_computed_tokens) - seq.num_computed_tokens)
            seq.most_computed_tokens = max(seq.most_computed_tokens, num_computed)
            seq.num_computed_tokens = num_computed
        step.seq_ids, step.num_new_tokens, step.num_waiting = event.seq_ids, event.num_new_tokens, event.num_waiting

    def _tokens_sampled(self, event: TokensSampled) -> None:
        for seq_id in event.seq_ids:
            seq = self._live(event, seq_id)
            if not seq.running or seq.num_computed_tokens != seq.num_tokens:
                self._fail(
                    event,
                    f"seq {seq_id} ({seq.status}) has {seq.num_computed_tokens} of {seq.num_tokens} tokens computed",
                )
            seq.num_output_tokens += 1
            seq.status = "decode"
            if seq.first_token_step is None:
                seq.first_token_step = self.step_number
        if self.step is not None:
            self.step.num_sampled += len(event.seq_ids)

    def _request_finished(self, event: RequestFinished) -> None:
        seq = self._live(event, event.seq_id)
        if event.num_output_tokens != seq.num_output_tokens:
            self._fail(
                event, f"seq {seq.seq_id} has {seq.num_output_tokens} output tokens, not {event.num_output_tokens}"
            )
        seq.status = "finished"
        seq.finish_reason = event.reason
        seq.finished_step = self.step_number
        self.finished[seq.seq_id] = self.seqs.pop(seq.seq_id)
        if self.step is not None:
            self.step.num_finished += 1

    def _step_finished(self, event: StepFinished) -> None:
        step = self._current(event, event.step)
        step.end_ns = event.time_ns
        step.schedule_ns, step.forward_ns = event.schedule_ns, event.forward_ns
        step.sample_ns, step.observer_ns = event.sample_ns, event.observer_ns

    # ------------------------------------------------------------------ parts

    def _front_place(self) -> int:
        """A place before all others of the waiting queue."""
        self._queue_head -= 1
        return self._queue_head

    def _block(self, event: Event, block_id: int) -> int:
        if not 0 <= block_id < len(self.ref_counts):
            self._fail(event, f"there is no block {block_id} in a pool of {self.num_blocks}")
        return block_id

    def _live(self, event: Event, seq_id: int, *, finished_too: bool = False) -> SeqState:
        seq = self.seqs.get(seq_id) or (self.finished.get(seq_id) if finished_too else None)
        if seq is None:
            self._fail(event, f"seq {seq_id} is {'finished' if seq_id in self.finished else 'unknown'}")
        return seq

    def _current(self, event: Event, step: int) -> StepRecord:
        if self.step is None or self.step.step != step or self.step.end_ns is not None:
            self._fail(event, f"step {step} is not the one that runs")
        return self.step

    def _fail(self, event: Event, what: str) -> NoReturn:
        raise TraceError(f"{event.__struct_config__.tag}: {what}")
