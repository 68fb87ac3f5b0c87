"""The table of laws, which refuse events that are impossible in the current state, and the laws of a block
pool. Those of slots of recurrent state are in slot_laws.py.

Used by every fold of our engine's events. Laws that the state does not depend on are in check.py.
"""

from itertools import chain, islice, takewhile
from types import MethodType
from typing import Any, NoReturn

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.budget import ITEMSIZE
from pagedcli.core.eviction import POLICIES
from pagedcli.core.groups import TableShape, page_bytes, token_bytes
from pagedcli.core.limits import Limits
from pagedcli.errors import ConfigError, TraceError
from pagedcli.trace.dispatch import Handler, handlers_of
from pagedcli.trace.seq_state import SeqState, StepRecord
from pagedcli.trace.state import PoolState

MOST_BLOCKS = 1 << 23  # rebuilding a pool takes about 200 bytes per block
MOST_TOKENS = 1 << 40  # limit per sequence and per block: sums stay in 64 bits
MOST_NS = 1 << 62


def refuse(event: ev.Event, what: str) -> NoReturn:
    """Raise the TraceError for an impossible event."""
    raise TraceError(f"{event.__struct_config__.tag}: {what}")


def tables_of(state: PoolState) -> TableShape:
    """The block tables of the engine's sequences."""
    return TableShape.of(state.block_size, state.started.groups)


def _check_groups(event: ev.EngineStarted) -> None:
    """Refuse groups of layers that no model has, or whose bytes do not follow from their heads."""
    groups = event.groups
    if not groups or any(window is not None and window < 1 for window in event.windows):
        refuse(event, f"groups of layers with windows {event.windows}")
    if all(group == ev.CacheGroup(group.window) for group in groups):
        return  # simulated without a model
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) < len(layers) or any(
        not group.layers or group.layers[0] < 0 or list(group.layers) != sorted(group.layers) for group in groups
    ):
        refuse(event, f"groups of layers {[list(group.layers) for group in groups]}")
    if any(group.heads is None or min(group.heads) < 1 for group in groups):
        refuse(event, f"groups of layers with heads {[group.heads for group in groups]}")
    num_bytes = [group.token_bytes for group in groups]
    if not any(num_bytes == [token_bytes(group, dtype) for group in groups] for dtype in ITEMSIZE):
        refuse(event, f"groups of layers take {num_bytes} bytes per token, which no dtype explains")
    most = page_bytes(groups, event.block_size)
    if event.block_bytes != most:
        refuse(event, f"a block has {event.block_bytes:,} bytes, but the largest group takes {most:,}")


def live(event: Any, state: PoolState) -> SeqState:
    """The sequence of an event."""
    return live_seq(event, event.seq_id, state)


def live_seq(event: ev.Event, seq_id: int, state: PoolState) -> SeqState:
    """A sequence that waits or runs."""
    seq = state.seqs.get(seq_id)
    if seq is None:
        refuse(event, f"seq {seq_id} is {'finished' if seq_id in state.finished else 'unknown'}")
    return seq


class LawBook:
    """Laws about one subject: methods `before_<event>(event, state)`, which judge an event before the state has applied
    it, and `after_<event>(event, state)`. They raise TraceError."""

    def start(self) -> None:
        """Forget the past: an engine starts, the first one or that of another part."""

    def check_order(self, event: ev.Event) -> None:
        """Judge an event by the one before it."""


class Laws:
    """The table of all laws: event -> what is checked before it is applied, and after. A Fold calls both."""

    def __init__(self, *books: LawBook) -> None:
        self._books = books
        self._before: dict[type[ev.Event], list[Handler]] = {}
        self._after: dict[type[ev.Event], list[Handler]] = {}
        for table, prefix in ((self._before, "before_"), (self._after, "after_")):
            for book in books:
                for event_type, law in handlers_of(type(book), prefix).items():
                    table.setdefault(event_type, []).append(MethodType(law, book))

    def before(self, event: ev.Event, state: PoolState) -> None:
        """Raises TraceError if the event is impossible in this state."""
        if type(event) is ev.EngineStarted:
            for book in self._books:
                book.start()
        elif state.engine is None:
            refuse(event, "comes before engine_started, which must be the first record")
        for book in self._books:
            book.check_order(event)
        for law in self._before.get(type(event), ()):
            law(event, state)

    def after(self, event: ev.Event, state: PoolState) -> None:
        """Raises TraceError if the event has led to an impossible state."""
        for law in self._after.get(type(event), ()):
            law(event, state)


class PoolLaws(LawBook):
    """Conservation of blocks, and what the state needs to apply an event. Some changes take several events; `_due`
    holds what must follow."""

    def start(self) -> None:
        # the events that must come next, and the change in progress
        self._due: tuple[tuple[type[ev.Event], ...], str] | None = None
        # blocks not yet taken by BlocksAllocated, in order of eviction -> whether lookups found their content
        self._evicted: dict[int, bool] = {}
        self._evicted_for: int | None = None
        self._hole: tuple[int, int] | None = None  # (seq_id, block_id) that BlockCopied replaces
        self._lookup: ev.PrefixLookedUp | None = None  # its hits are claimed next
        self._fresh: tuple[int, int] | None = None  # seq_id, and the fresh blocks that its lookup says it takes next
        self._num_just_freed = 0  # blocks that the last BlocksReleased made free
        self._may_repeat = True  # the first step of a part

    def check_order(self, event: ev.Event) -> None:
        due, self._due = self._due, None
        if type(event) not in (ev.BlocksReused, ev.BlocksReleased, ev.BlockEvicted, ev.BlocksAllocated):
            self._fresh = None
        if due is not None and type(event) not in (*due[0], ev.StatesRecovered, ev.StepFailed):
            refuse(event, f"comes where {due[1]}")

    def before_engine_started(self, event: ev.EngineStarted, state: PoolState) -> None:
        if event.part != (1 if state.engine is None else state.engine.part + 1):
            refuse(event, "a second start in one trace")
        if not 1 <= event.num_blocks <= MOST_BLOCKS or not 1 <= event.block_size <= MOST_TOKENS:
            refuse(
                event,
                f"a pool of {event.num_blocks:,} blocks of {event.block_size:,} tokens; "
                f"at most {MOST_BLOCKS:,} blocks are supported",
            )
        if event.max_num_seqs > MOST_BLOCKS:
            refuse(event, f"{event.max_num_seqs:,} sequences at once; at most {MOST_BLOCKS:,} are supported")
        if event.eviction not in POLICIES:
            refuse(event, f"eviction {event.eviction!r} is unknown")
        if not 0 <= event.block_bytes <= MOST_TOKENS or not 0 <= event.max_model_len <= MOST_TOKENS:
            refuse(event, f"{event.block_bytes:,} bytes per block, {event.max_model_len:,} tokens per sequence")
        _check_groups(event)
        try:
            Limits.of(event)
        except ConfigError as error:
            refuse(event, error.message)

    def before_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        if state.seq(event.seq_id) is not None:
            refuse(event, f"seq {event.seq_id} already exists")
        context = event.num_context_tokens
        if context is not UNSET and (not 1 <= context <= event.num_prompt_tokens or event.max_new_tokens):
            refuse(event, f"seq {event.seq_id} scores what follows {context} tokens")
        least = 1 if context is UNSET else 0
        if not 1 <= event.num_prompt_tokens <= MOST_TOKENS or not least <= event.max_new_tokens <= MOST_TOKENS:
            refuse(
                event,
                f"seq {event.seq_id} has {event.num_prompt_tokens} prompt tokens "
                f"and may generate {event.max_new_tokens}",
            )

    def before_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        seq, size = live(event, state), state.block_size
        continued = event.reason == "continued"
        if continued != seq.running or (seq.block_table and not continued):
            refuse(event, f"{event.reason}, but seq {seq.seq_id} is {seq.status} with blocks {seq.block_table}")
        first = seq.num_computed_tokens // size if continued else 0
        asked = seq.num_asked(size, event.num_tokens) - first
        if event.blocks_asked != asked or not continued <= event.blocks_hit <= asked:
            refuse(event, f"{event.blocks_hit} hits of {event.blocks_asked} blocks, where {asked} can be asked for")
        num_computed = min((first + event.blocks_hit) * size, event.num_tokens - 1)
        before = seq.num_computed_tokens if continued else 0
        if event.tokens_hit != num_computed - before or (continued and event.tokens_hit < 1):
            refuse(event, f"{event.blocks_hit} blocks from block {first} on are not {event.tokens_hit} tokens hit")
        if event.blocks_hit:
            claim = f"seq {seq.seq_id} claims the {event.blocks_hit} blocks of its lookup"
            drops = continued and first * state.num_groups < len(seq.block_table)  # its partial block is released first
            self._due = (ev.BlocksReleased if drops else ev.BlocksReused,), claim
            self._lookup = event
        else:
            self._check_found(event, event, 0, 0)

    def _check_found(self, event: ev.Event, lookup: ev.PrefixLookedUp, num_found: int, num_revived: int) -> None:
        """Check the blocks that a lookup says its sequence takes, once those that were found are known. At an admission
        the fresh ones come next."""
        if (taken := lookup.blocks_taken) is None:
            return
        num_fresh = 0 if lookup.reason == "continued" else max(0, taken["fresh"])
        if taken != {"shared": num_found - num_revived, "revived": num_revived, "fresh": num_fresh}:
            refuse(event, f"{num_found} blocks were found, {num_revived} of them free: not {taken}")
        if lookup.reason != "continued":
            self._fresh = lookup.seq_id, num_fresh
        if num_fresh:
            self._due = (ev.BlockEvicted, ev.BlocksAllocated), f"seq {lookup.seq_id} takes its fresh blocks"

    def before_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        seq = live(event, state)
        lookup, self._lookup = self._lookup, None
        num_groups, ids = state.num_groups, event.block_ids
        if lookup is None or lookup.seq_id != event.seq_id or lookup.blocks_hit * num_groups != len(ids):
            refuse(event, f"no lookup of seq {event.seq_id} that hit {len(ids)} blocks comes before")
        before = seq.block_table[-1] if seq.block_table else None
        for index, block_id in enumerate(ids):
            if block_id is None:
                if lookup.reason == "continued" or not self._is_passed(index, lookup.tokens_hit, state):
                    refuse(event, f"block {index // num_groups} of seq {seq.seq_id} is still seen by later tokens")
                before = None
                continue
            block_hash = state.hashes[self._block(event, block_id, state)]
            if block_hash is None or state.hash_to_block_id.get(block_hash) != block_id:
                refuse(event, f"block {block_id} cannot be found under a hash")
            if before is not None and state.parent_hashes[block_id] != state.hashes[before]:
                refuse(event, f"block {block_id} does not follow block {before} in its chain")
            if state.block_groups[block_id] != index % num_groups:
                refuse(event, f"block {block_id} holds K and V of group {state.block_groups[block_id]} of the layers")
            before = block_id
        held = [block_id for block_id in ids if block_id is not None]
        self._check_found(event, lookup, len(held), sum(state.ref_counts[block_id] == 0 for block_id in held))

    def before_blocks_allocated(self, event: ev.BlocksAllocated, state: PoolState) -> None:
        live(event, state)
        fresh, self._fresh = self._fresh, None
        if fresh is not None and fresh[0] == event.seq_id and fresh[1] != len(event.block_ids):
            refuse(event, f"{len(event.block_ids)} fresh blocks of seq {fresh[0]}, whose lookup says {fresh[1]}")
        self._check_taken(event, state)

    def before_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        seq, count = live(event, state), len(event.block_ids)
        if seq.running or seq.block_table or not state.started.enable_prefix_caching:
            refuse(event, f"seq {seq.seq_id} ({seq.status}) looks up no prefix")
        if not count or len(event.indices) != count or len(event.hashes) != event.indices[-1] + 1:
            refuse(event, f"{count} blocks without an entry for each, and the hashes up to the last one")
        most = seq.num_asked(state.block_size, seq.num_tokens) * state.num_groups
        if list(event.indices) != sorted({index for index in event.indices if 0 <= index < most}):
            refuse(event, f"entries {list(event.indices)} of a block table of {most}")
        if any(event.hashes[index] in state.hash_to_block_id for index in event.indices):
            refuse(event, "a restored block was in the pool already")
        self._check_taken(event, state)

    def _check_taken(self, event: ev.BlocksAllocated | ev.BlocksRestored, state: PoolState) -> None:
        """Refuse blocks that are not the next free ones, or others than those evicted for them."""
        for block_id, expected in zip(event.block_ids, self._next_free(event, state), strict=True):
            if block_id != expected:
                named = "no block is free" if expected is None else f"the next free block is {expected}"
                refuse(event, f"block {block_id} was taken, but {named}")
            if state.hashes[block_id] is not None:
                refuse(event, f"block {block_id} still holds cached content")
        if self._evicted:
            not_taken = self._evicted.keys() - set(event.block_ids)
            if not_taken:
                refuse(event, f"evicted blocks {sorted(not_taken)} were not taken")
            self._evicted = {}
        if self._evicted_for not in (None, event.seq_id):
            refuse(event, f"blocks were evicted for seq {self._evicted_for}")
        self._evicted_for = None

    def before_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        block_id = self._block(event, event.block_id, state)
        if block_id not in state.free_block_ids:
            refuse(event, f"block {block_id} is in use")
        if state.hashes[block_id] is None or state.hashes[block_id] != event.hash:
            refuse(event, f"block {block_id} holds hash {state.hashes[block_id]}")
        if event.for_seq_id is not UNSET:
            if self._evicted_for not in (None, event.for_seq_id):
                refuse(event, f"another block was evicted for seq {self._evicted_for}")
            self._evicted_for = event.for_seq_id
        self._evicted[block_id] = state.hash_to_block_id.get(event.hash) == block_id
        self._due = (ev.BlockEvicted, ev.BlocksAllocated, ev.BlocksRestored), "the evicted blocks are allocated"

    def before_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        seq, block_ids = live(event, state), event.block_ids
        if not block_ids or len(block_ids) != len(event.hashes):
            refuse(event, f"{len(event.hashes)} hashes for {len(block_ids)} blocks")
        table = seq.block_table
        try:
            index = seq.place_of(block_ids)
        except ValueError:
            index = len(table)
        if tuple(table[index : index + len(block_ids)]) != block_ids:
            refuse(event, f"blocks {list(block_ids)} are not neighbours in the block table")
        before = table[index - 1] if index else None
        if before is not None and state.hashes[before] is None:
            refuse(event, f"the block before block {block_ids[0]} is partial")
        for block_id in block_ids:
            if state.hashes[block_id] is not None:
                refuse(event, f"block {block_id} is full already")
            if state.ref_counts[block_id] != 1:
                refuse(event, f"partial block {block_id} is shared and cannot be written")

    def before_blocks_released(self, event: ev.BlocksReleased, state: PoolState) -> None:
        seq = state.seqs.get(event.seq_id) or state.finished.get(event.seq_id)
        if seq is None:
            refuse(event, f"seq {event.seq_id} is unknown")
        table, block_ids = seq.block_table, event.block_ids
        if self._lookup is not None:
            if block_ids != tuple(table[-state.num_groups :]) or self._lookup.seq_id != seq.seq_id:
                refuse(event, f"blocks {list(block_ids)} are not the last one of the block table {table}")
            self._due = (ev.BlocksReused,), f"seq {seq.seq_id} claims the blocks of its lookup"
        elif block_ids and block_ids == tuple(reversed(seq.held_block_ids)):
            if seq.running:
                due = f"seq {seq.seq_id}, which released its blocks, should be preempted or forked from another"
                self._due = (ev.RequestPreempted, ev.SequenceForked), due
        elif len(block_ids) == 1 and block_ids[0] in table:
            self._hole = (seq.seq_id, block_ids[0])
            self._due = (ev.BlockCopied,), f"block {block_ids[0]} of seq {seq.seq_id} is replaced by its copy"
        else:
            refuse(event, f"blocks {list(block_ids)} are not the block table {table} from its tail")
        self._num_just_freed = sum(state.ref_counts[block_id] == 1 for block_id in block_ids)

    def before_window_passed(self, event: ev.WindowPassed, state: PoolState) -> None:
        seq = live(event, state)
        places = {block_id: index for index, block_id in enumerate(seq.block_table) if block_id is not None}
        for block_id in event.block_ids:
            if block_id not in places:
                refuse(event, f"block {block_id} is not in the block table of seq {seq.seq_id}")
            if not self._is_passed(places.pop(block_id), seq.num_computed_tokens, state):
                refuse(event, f"block {block_id} is still seen by later tokens of seq {seq.seq_id}")

    @staticmethod
    def _is_passed(index: int, num_computed: int, state: PoolState) -> bool:
        """Whether no token from number num_computed on sees an entry of a block table."""
        tables = tables_of(state)
        span, group = divmod(index, tables.num_groups)
        return span < tables.first_kept(group, num_computed)

    def before_block_copied(self, event: ev.BlockCopied, state: PoolState) -> None:
        seq = live(event, state)
        hole, self._hole = self._hole, None
        if hole != (seq.seq_id, event.source_block_id):
            refuse(event, f"block {event.source_block_id} was not released before")
        last = seq.block_table[-1] if seq.block_table else None
        if last != event.copy_block_id:
            refuse(event, f"block {event.copy_block_id} was not allocated before")
        if state.hashes[event.source_block_id] is not None:
            refuse(event, "only a partial block is copied")

    def before_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        child, parent = live(event, state), state.seqs.get(event.parent_seq_id)
        if parent is None:
            refuse(event, f"seq {event.parent_seq_id} is not live")
        if event.block_ids != tuple(parent.block_table):
            refuse(event, f"the parent's block table is {parent.block_table}")
        if event.num_computed_tokens != parent.num_computed_tokens:
            refuse(event, f"the parent has {parent.num_computed_tokens} computed tokens")
        if child.block_table or child is parent:
            refuse(event, f"seq {child.seq_id} has blocks already")

    def before_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        seq = live(event, state)
        if not seq.running:
            refuse(event, f"seq {seq.seq_id} is {seq.status}, not running")
        if event.num_tokens_dropped != seq.num_computed_tokens:
            refuse(event, f"seq {seq.seq_id} had {seq.num_computed_tokens} computed tokens")
        if event.num_blocks_freed != self._num_just_freed:
            refuse(event, f"{self._num_just_freed} blocks became free, not {event.num_blocks_freed}")
        if seq.block_table:
            refuse(event, f"seq {seq.seq_id} still has blocks {seq.block_table}")

    def before_request_waiting(self, event: ev.RequestWaiting, state: PoolState) -> None:
        if live(event, state).running:
            refuse(event, f"seq {event.seq_id} is running")

    def before_step_started(self, event: ev.StepStarted, state: PoolState) -> None:
        if not 0 <= event.time_ns <= MOST_NS or not 0 <= event.step <= MOST_TOKENS:
            refuse(event, f"step {event.step} at {event.time_ns} ns")
        # another part repeats the number of a step that the earlier run did not schedule
        repeats, self._may_repeat = self._may_repeat and event.step == state.step_number, False
        if state.step is not None and event.step != state.step.step + 1 and not repeats:
            refuse(event, f"step {event.step} comes after step {state.step_number}")
        if state.step is not None and state.step.end_ns is None:
            refuse(event, "the step before has not finished")

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        self._current(event, event.step, state)
        if len(event.seq_ids) != len(event.num_new_tokens):
            refuse(event, "the numbers of counts and sequences differ")
        if len(set(event.seq_ids)) != len(event.seq_ids):
            refuse(event, "a sequence twice in one step")
        counts = dict(zip(event.seq_ids, event.num_new_tokens, strict=True))
        are_alike = event.num_new_tokens.count(1) == len(counts)
        for seq_id in state.representatives(event.seq_ids) if are_alike else event.seq_ids:
            seq, num_new_tokens = live_seq(event, seq_id, state), counts[seq_id]
            if not seq.running:
                refuse(event, f"seq {seq_id} is {seq.status}, not running")
            left = seq.num_tokens - seq.num_computed_tokens + seq.num_drafted_tokens
            if not (left if seq.num_drafted_tokens else 1) <= num_new_tokens <= left:
                refuse(event, f"{num_new_tokens} new tokens of seq {seq_id}, which has {left} left to compute")

    def before_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        seq = live(event, state)
        if event.num_drafted != seq.num_drafted_tokens or not event.num_drafted:
            refuse(event, f"{event.num_drafted} guesses, but seq {seq.seq_id} has {seq.num_drafted_tokens}")
        if not 0 <= event.num_accepted <= event.num_drafted:
            refuse(event, f"{event.num_accepted} of {event.num_drafted} guesses were right")
        num_kept = tables_of(state).num_entries(seq.num_computed_tokens + event.num_accepted)
        if list(event.block_ids) != seq.block_table[num_kept:][::-1]:
            refuse(event, f"the blocks after those that seq {seq.seq_id} fills are {seq.block_table[num_kept:]}")

    def before_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        if len(set(event.seq_ids)) != len(event.seq_ids):
            refuse(event, "a sequence twice in one step")
        for seq_id in state.representatives(event.seq_ids):
            seq = live_seq(event, seq_id, state)
            if seq.num_drafted_tokens:
                refuse(event, f"{seq.num_drafted_tokens} guesses for seq {seq_id} have not been checked")
            if not seq.running or seq.num_computed_tokens != seq.num_tokens:
                computed = f"{seq.num_computed_tokens} of {seq.num_tokens} tokens computed"
                refuse(event, f"seq {seq_id} ({seq.status}) has {computed}")

    def before_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq = live(event, state)
        if event.num_output_tokens != seq.num_output_tokens:
            refuse(event, f"seq {seq.seq_id} has {seq.num_output_tokens} output tokens, not {event.num_output_tokens}")

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        self._current(event, event.step, state)
        times = (event.time_ns, event.schedule_ns, event.forward_ns, event.sample_ns, event.observer_ns)
        if not 0 <= min(times) <= max(times) <= MOST_NS:
            refuse(event, "a negative or absurdly long duration")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._current(event, event.step, state)
        if not 0 <= event.time_ns <= MOST_NS:
            refuse(event, f"at {event.time_ns} ns")
        cached = [self._block(event, block_id, state) for block_id in event.cached_block_ids]
        if len(set(cached)) != len(cached) or len(set(event.seq_ids)) != len(event.seq_ids):
            refuse(event, "a block or a sequence twice")
        empty = [block_id for block_id in cached if state.hashes[block_id] is None]
        if empty:
            refuse(event, f"blocks {empty} have no content that could still be cached")
        for seq_id in event.seq_ids:
            live_seq(event, seq_id, state)
        running = {seq.seq_id for seq in state.running()}.difference(event.seq_ids)
        if running:
            refuse(event, f"sequences {sorted(running)} are still running")
        self._evicted_for = None
        self._evicted, self._hole, self._lookup = {}, None, None

    # ------------------------------------------------------------------ parts

    def _next_free(self, event: ev.BlocksAllocated | ev.BlocksRestored, state: PoolState) -> list[int | None]:
        """The blocks that must be taken: empty ones in their order, then those that were evicted. With lru these are
        the first cached ones of the free list; duplicates may go earlier, as no lookup finds them."""
        count, free, evicted = len(event.block_ids), state.free_block_ids, self._evicted
        others = (block_id for block_id in free if block_id not in evicted)
        empty = takewhile(lambda block_id: state.hashes[block_id] is None, others)
        if state.started.eviction == "lru":
            oldest = (block_id for block_id in free if evicted.get(block_id, state.hashes[block_id] is not None))
            taken = (next(oldest, block_id) if was_found else block_id for block_id, was_found in evicted.items())
            blocks = list(islice(chain(empty, taken, oldest), count))
        else:
            blocks = list(islice(chain(empty, evicted), count))
        return [*blocks, *[None] * (count - len(blocks))]

    def _block(self, event: ev.Event, block_id: int, state: PoolState) -> int:
        if not 0 <= block_id < state.num_blocks:
            refuse(event, f"there is no block {block_id} in a pool of {state.num_blocks}")
        return block_id

    def _current(self, event: ev.Event, step: int, state: PoolState) -> StepRecord:
        if state.step is None or state.step.step != step or state.step.end_ns is not None:
            refuse(event, f"step {step} is not the one that runs")
        return state.step
