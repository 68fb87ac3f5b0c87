"""All laws of a whole trace: those of a pool (laws.py), and those that the state does not depend on, which come after
them: an event of an unknown sequence does not reach these.

Used by `pagedcli trace --check` and by the engine's tests. They restate no policy: what is admitted, preempted or
evicted, and why a sequence waits, is not decided again. They say what must hold whatever is decided: conservation,
prefix identity, that content in the pool is found, the order of the queue and of the sequences in a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

import pagedcli.events as ev
from pagedcli.core.prefixes import SeenPrefixes, compute_hash, num_equal
from pagedcli.errors import TraceError
from pagedcli.trace.fold import EventSource, Fold
from pagedcli.trace.laws import LawBook, Laws, PoolLaws, refuse, tables_of
from pagedcli.trace.seq_state import SeqState
from pagedcli.trace.slot_laws import DraftLaws, SlotLaws
from pagedcli.trace.state import PoolState

UNCHECKED = "which blocks {} chose to evict was not checked: every choice among the free cached ones is lawful"
# what happens while no step runs: requests come, and are aborted
_BETWEEN_STEPS = (
    ev.EngineStarted, ev.StateSlotsMade, ev.RequestAdded, ev.RequestRefused, ev.RequestFinished, ev.BlocksReleased,
    ev.StateSlotsReleased, ev.StepStarted,
)  # fmt: skip
_CLOCK_SLACK_NS = 1_000_000_000  # a process may be suspended between reading the clocks of a step and of its parts


@dataclass(frozen=True, slots=True)
class CheckedTrace:
    """The result for a trace without a violation."""

    num_events: int
    num_steps: int
    state: PoolState  # final state
    notes: tuple[str, ...]


def check_trace(source: EventSource) -> CheckedTrace:
    """Fold a trace and verify every law. Raises TraceError with the location of the first violation."""
    checker = TraceChecker()
    for _ in checker.steps(source):
        pass
    return checker.result(source.notes)


class TraceChecker(Fold):
    """A fold that raises TraceError at the first event that breaks any law."""

    def __init__(self) -> None:
        prefixes = PrefixLaws()
        laws = Laws(PoolLaws(), SlotLaws(), prefixes, SequenceLaws(), QueueLaws(prefixes), DraftLaws())
        super().__init__(PoolState(), laws=laws)

    def result(self, notes: Iterable[str]) -> CheckedTrace:
        """The result. A trace may end within a step, as that of a killed run does."""
        state, notes = self.state, list(notes)
        if state.engine is None:
            raise TraceError("no events: not a trace")
        step = state.step
        if step is not None and step.end_ns is None:
            notes.append(f"ends within step {step.step}: the run was cut off")
        elif state.seqs:
            notes.append(f"ends with {len(state.seqs)} unfinished sequences: the run was cut off")
        if state.engine.eviction != "lru":
            notes.append(UNCHECKED.format(state.engine.eviction))
        return CheckedTrace(state.num_events, 0 if step is None else step.step + 1, state, tuple(notes))


class PrefixLaws(LawBook):
    """Identity of prefixes: lookups, hits, hashes and tokens, where these are recorded."""

    def start(self) -> None:
        self._lookups: dict[int, ev.PrefixLookedUp] = {}  # the latest of each running sequence
        self._chains: dict[int, list[int]] = {}  # hashes of the full blocks of live sequences, where tokens are known
        self._followers: dict[int | None, dict[int, None]] = {}  # full blocks by the hash of the chain before them
        self._token_ids: dict[int, list[int]] = {}  # seq_id -> tokens of live sequences, where recorded
        self._block_tokens: dict[int, tuple[int, ...]] = {}  # block_id -> tokens of full blocks, where recorded
        self._before_restored: dict[int, int | None] = {}  # seq_id -> num_found before blocks were restored for it
        self._seen: SeenPrefixes | None = SeenPrefixes()  # None: not all of them are known

    def chain(self, seq: SeqState, state: PoolState) -> list[int] | None:
        """Hashes of the full blocks of a sequence, in the order of its block table. None without recorded tokens or
        with a salt (never recorded)."""
        token_ids = self._token_ids.get(seq.seq_id)
        if token_ids is None or seq.salted:
            return None
        chain = self._chains.setdefault(seq.seq_id, [])
        size, num_groups = state.block_size, state.num_groups
        for start in range(len(chain) // num_groups * size, len(token_ids) // size * size, size):
            for _ in range(num_groups):
                chain.append(compute_hash(token_ids[start : start + size], chain[-1] if chain else None))
        return chain

    def num_found(
        self, seq: SeqState, state: PoolState, first: int | None = None, *, blocks_alone: bool = False
    ) -> int | None:
        """The longest beginning of a sequence, in full spans, at which it can continue: in each group of layers the
        blocks that later tokens see are in the pool, and of a model with recurrent state there is a snapshot that
        this step can read, if not of `blocks_alone`. With `first` all blocks from that span on. None without recorded
        tokens or with a salt."""
        chain, tables, num_groups = self.chain(seq, state), tables_of(state), state.num_groups
        slots = None if blocks_alone else state.slots
        if chain is None or not state.started.enable_prefix_caching:
            return None if chain is None else 0
        begin = longest = first or 0
        cached_since = [begin] * num_groups
        for span in range(begin, seq.num_asked(state.block_size, seq.num_tokens)):
            hashes = chain[span * num_groups : (span + 1) * num_groups]
            for group, each in enumerate(hashes):
                if each not in state.hash_to_block_id:
                    cached_since[group] = span + 1
                    if tables.windows[group] is None:
                        return longest - begin
            end = (span + 1) * state.block_size
            num_computed = min(end, seq.num_tokens - 1)
            seen = [tables.first_kept(group, num_computed) if first is None else first for group in range(num_groups)]
            if all(since <= needed for since, needed in zip(cached_since, seen, strict=True)) and (
                slots is None or (end < seq.num_tokens and slots.is_readable(hashes[-1], state.step_number))
            ):
                longest = span + 1
        return longest - begin

    def before_checkpoint_looked_up(self, event: ev.CheckpointLookedUp, state: PoolState) -> None:
        found = self.num_found(state.seqs[event.seq_id], state, blocks_alone=True)
        if found is not None and event.cached_tokens != found * state.block_size:
            refuse(event, f"{found} blocks of seq {event.seq_id} are in the pool, not {event.cached_tokens} tokens")

    def before_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        seq, engine = state.seqs[event.seq_id], state.started
        if event.num_tokens != seq.num_tokens:
            refuse(event, f"seq {seq.seq_id} has {seq.num_tokens} tokens, not {event.num_tokens}")
        if event.reason != "continued" and (event.reason == "resumed") != (seq.num_preemptions > 0):
            refuse(event, f"{event.reason}, but seq {seq.seq_id} was preempted {seq.num_preemptions} times")
        first = seq.num_computed_tokens // engine.block_size if event.reason == "continued" else 0
        if event.first_miss != (first + event.blocks_hit if event.blocks_hit < event.blocks_asked else None):
            refuse(
                event, f"hit {event.blocks_hit} of {event.blocks_asked} blocks, but first miss is {event.first_miss}"
            )
        missed = "no_match" if event.blocks_hit < event.blocks_asked else None
        full = missed if event.blocks_asked else "no_full_block"
        expected = full if engine.enable_prefix_caching else "caching_off"
        if event.miss_reason != expected:
            refuse(event, f"miss reason {event.miss_reason}, where it is {expected}")
        if not engine.enable_prefix_caching and event.blocks_hit:
            refuse(event, "a hit without prefix caching")
        if (event.missing_hash is not None) != (event.miss_reason == "no_match"):
            refuse(event, f"miss reason {event.miss_reason} with missing hash {event.missing_hash}")
        if not 0 <= event.partial_tokens <= engine.block_size:
            refuse(event, f"{event.partial_tokens} partial tokens in a block of {engine.block_size}")
        found = self.num_found(seq, state, first if event.reason == "continued" else None)
        self._check_disk(event, self._before_restored.pop(event.seq_id, UNSET), engine.block_size)
        if event.vetoed_by is not UNSET and (state.slots is None or event.vetoed_by != "state"):
            refuse(event, f"vetoed by {event.vetoed_by}, a kind of cache that the engine does not have")
        if found is not None and event.blocks_hit != found:
            refuse(event, f"{found} blocks of seq {seq.seq_id} are in the pool, not {event.blocks_hit}")
        self._check_prefix(event, seq, first + event.blocks_hit, state)
        if event.reason == "new" and not seq.sample_index:
            self._check_shared(event, seq, state)
        self._lookups[event.seq_id] = event

    @staticmethod
    def _check_disk(event: ev.PrefixLookedUp, before: int | UnsetType | None, size: int) -> None:
        """Check the part of a hit that was read for it. `before`: spans that were in the pool before anything was;
        UNSET: nothing was; None: without recorded tokens, or with a salt."""
        if before is UNSET:
            most = least = 0
        elif before is None:
            least, most = 0, event.tokens_hit
        else:
            least = most = event.tokens_hit - min(before * size, event.num_tokens - 1)
        if event.disk_tokens is UNSET and before is not UNSET:
            refuse(event, "blocks were read from a store, but no tokens")
        if event.disk_tokens is not UNSET and not least <= event.disk_tokens <= most:
            refuse(event, f"{event.disk_tokens} tokens read from a store, where {most} can be")

    def _check_shared(self, event: ev.PrefixLookedUp, seq: SeqState, state: PoolState) -> None:
        """Check how many tokens earlier sequences share: exactly where all tokens are recorded and there is no salt."""
        token_ids = self._token_ids.get(event.seq_id)
        if token_ids is None or seq.salted:
            self._seen = None if token_ids is None else self._seen
            expected = None
        else:
            expected = None if self._seen is None else self._seen.add(token_ids)
        size, from_disk = state.block_size, 0 if event.disk_tokens is UNSET else event.disk_tokens
        found, least = event.shared_tokens, (event.blocks_hit * size - from_disk) // size * size
        if found is None:
            return
        if expected is not None:
            expected = max(expected, least)
        if found != expected if expected is not None else not least <= found <= event.num_tokens:
            refuse(event, f"{found} tokens shared with earlier sequences, where {expected or least} are")

    def _check_prefix(self, event: ev.PrefixLookedUp, seq: SeqState, end: int, state: PoolState) -> None:
        """Check the block after the last hit against the tokens, where they are recorded."""
        chain, size, index = self.chain(seq, state), state.block_size, end * state.num_groups
        if chain is None:
            return
        if event.missing_hash is not None:
            span = chain[index : index + state.num_groups]
            missing = next((each for each in span if each not in state.hash_to_block_id), span[0])
            if event.missing_hash not in ([missing] if state.finds_copies else span):
                refuse(event, f"block {end} of seq {seq.seq_id} has hash {missing}")
        wanted = self._token_ids[seq.seq_id][end * size : (end + 1) * size]
        followers = self._followers.get(chain[index - 1] if end else None, ())
        longest = max((num_equal(wanted, self._block_tokens[block_id]) for block_id in followers), default=0)
        if event.partial_tokens != longest:
            refuse(event, f"{longest} further tokens match a cached block, not {event.partial_tokens}")

    def before_blocks_reused(self, event: ev.BlocksReused, state: PoolState) -> None:
        token_ids, size = self._token_ids.get(event.seq_id), state.block_size
        if token_ids is None:
            return
        for index, block_id in enumerate(event.block_ids, len(state.seqs[event.seq_id].block_table)):
            held, span = None if block_id is None else self._block_tokens.get(block_id), index // state.num_groups
            if held is not None and held != tuple(token_ids[span * size : (span + 1) * size]):
                refuse(event, f"block {block_id} holds other tokens than seq {event.seq_id} at block {span}")

    def before_blocks_restored(self, event: ev.BlocksRestored | ev.CheckpointRestored, state: PoolState) -> None:
        if event.seq_id not in self._before_restored:
            self._before_restored[event.seq_id] = self.num_found(state.seqs[event.seq_id], state)

    def before_checkpoint_restored(self, event: ev.CheckpointRestored, state: PoolState) -> None:
        self.before_blocks_restored(event, state)
        chain = self.chain(state.seqs[event.seq_id], state)
        end = event.num_tokens // state.block_size * state.num_groups
        if chain is not None and chain[end - 1] != event.hash:
            refuse(event, f"the chain of seq {event.seq_id} has another hash after {event.num_tokens} tokens")

    def after_blocks_restored(self, event: ev.BlocksRestored, state: PoolState) -> None:
        seq = state.seqs[event.seq_id]
        chain = self.chain(seq, state)
        if chain is not None and list(event.hashes) != chain[: len(event.hashes)]:
            refuse(event, f"the chain of seq {seq.seq_id} has other hashes")
        for index, block_id, *_ in event.blocks:
            self._hold(event, seq, index, block_id, state)

    def after_blocks_filled(self, event: ev.BlocksFilled, state: PoolState) -> None:
        if not state.started.enable_prefix_caching:
            refuse(event, "a block was hashed without prefix caching")
        seq, lookup = state.seqs[event.seq_id], self._lookups.get(event.seq_id)
        first = seq.block_table.index(event.block_ids[0])
        for index, block_id in enumerate(event.block_ids, first):
            self._hold(event, seq, index, block_id, state)
        if lookup is not None and lookup.first_miss is not None:
            place = lookup.first_miss * state.num_groups - first
            missed = event.hashes[place : place + state.num_groups] if place >= 0 else ()
            if missed and lookup.missing_hash not in missed:
                refuse(event, f"block {event.block_ids[place]} was looked up under hash {lookup.missing_hash}")

    def _hold(self, event: ev.Event, seq: SeqState, index: int, block_id: int, state: PoolState) -> None:
        """A block holds the full span of a sequence at this place of its table. Checks its hash, where tokens are
        recorded; that of the first block depends on the salt, too."""
        token_ids, size = self._token_ids.get(seq.seq_id), state.block_size
        if token_ids is None:
            return
        span, parent_hash = index // state.num_groups, state.parent_hashes[block_id]
        tokens = self._block_tokens[block_id] = tuple(token_ids[span * size : (span + 1) * size])
        if index or not seq.salted:
            self._followers.setdefault(parent_hash, {})[block_id] = None
            if compute_hash(tokens, parent_hash) != state.hashes[block_id]:
                refuse(event, f"the tokens of block {block_id} have another hash")

    def before_block_evicted(self, event: ev.BlockEvicted, state: PoolState) -> None:
        followers = self._followers.get(state.parent_hashes[event.block_id])
        if followers is not None:
            followers.pop(event.block_id, None)
        if state.finds_copies and state.hash_to_block_id.get(event.hash) == event.block_id:
            copies = (block_id for copies in state.copies.values() for block_id in copies)
            free = next((block_id for block_id in copies if not state.ref_counts[block_id]), None)
            if free is not None:
                refuse(event, f"block {free}, a copy that no lookup finds, is evicted first")

    def before_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        if event.token_ids is not None:
            if len(event.token_ids) != event.num_prompt_tokens:
                refuse(event, f"{len(event.token_ids)} token ids for {event.num_prompt_tokens} prompt tokens")
            self._token_ids[event.seq_id] = list(event.token_ids)

    def before_draft_checked(self, event: ev.DraftChecked, state: PoolState) -> None:
        known = self._token_ids.get(event.seq_id)
        if (event.token_ids is None) != (known is None) or len(event.token_ids or ()) != event.num_accepted * (
            known is not None
        ):
            refuse(event, f"the tokens {event.token_ids} of {event.num_accepted} right guesses")
        if event.token_ids is not None and known is not None:
            known += event.token_ids

    def before_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        if event.token_ids is not None:
            if len(event.token_ids) != len(event.seq_ids):
                refuse(event, f"{len(event.token_ids)} tokens for {len(event.seq_ids)} sequences")
            for seq_id, token_id in zip(event.seq_ids, event.token_ids, strict=True):
                if seq_id in self._token_ids:
                    self._token_ids[seq_id].append(token_id)

    def after_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        self._lookups.pop(event.seq_id, None)
        self._chains.pop(event.seq_id, None)
        if state.seqs[event.seq_id].num_context_tokens is not None:
            return  # a continuation has its own tokens
        if event.parent_seq_id in self._token_ids and event.seq_id in self._token_ids:
            self._token_ids[event.seq_id] = self._token_ids[event.parent_seq_id].copy()

    def after_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq, token_ids = state.finished[event.seq_id], self._token_ids.pop(event.seq_id, None)
        if event.reason == "error" or token_ids is None:
            self._seen = None  # a sequence whose callback failed is not remembered
        elif self._seen is not None and event.reason != "abort" and not seq.salted:
            self._seen.add(token_ids if event.reason == "score" else token_ids[:-1])
        self._lookups.pop(event.seq_id, None)
        self._chains.pop(event.seq_id, None)

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._lookups.clear()
        cached = set(event.cached_block_ids)
        for followers in self._followers.values():
            for block_id in followers.keys() - cached:
                del followers[block_id]


class SequenceLaws(LawBook):
    """Samples and beams of a request belong together, and each sequence keeps its place in the order of a step."""

    def start(self) -> None:
        self._num_salts = 0
        self._requests: dict[str, list[ev.RequestAdded]] = {}  # the sequences so far of each request, by its id
        self._starts: dict[int, int] = {}  # running sequences in the order in which they were started
        self._num_starts = 0

    def before_request_added(self, event: ev.RequestAdded, state: PoolState) -> None:
        if event.salt is not UNSET:
            if not event.salted or not 1 <= event.salt <= self._num_salts + 1:
                refuse(event, f"salt {event.salt} of a request, after {self._num_salts} earlier ones")
            self._num_salts = max(self._num_salts, event.salt)
        if not event.sample_index:
            earlier = self._requests.get(event.request_id, ())
            if any(each.seq_id in state.seqs for each in earlier):
                refuse(event, f"request {event.request_id!r} has not finished, and begins again")
            self._requests[event.request_id] = [event]
            return
        samples = self._requests.get(event.request_id, [])
        if event.sample_index != len(samples) or samples[0].salted != event.salted:
            refuse(event, f"sample {event.sample_index} of a request with {len(samples)} earlier ones")
        same = ["salt", "row_id", "max_new_tokens", "beam_width", "num_context_tokens"]
        for name in same if event.max_new_tokens == 0 else (*same, "num_prompt_tokens", "token_ids"):
            if getattr(event, name) != getattr(samples[0], name):
                refuse(event, f"{name} is {getattr(event, name)!r}, of its first sample {getattr(samples[0], name)!r}")
        if event.beam_width is not None and event.sample_index >= event.beam_width:
            refuse(event, f"beam {event.sample_index} of a search of {event.beam_width} beams")
        samples.append(event)

    def before_prefix_looked_up(self, event: ev.PrefixLookedUp, state: PoolState) -> None:
        if event.reason != "continued":
            self._start(event.seq_id)

    def before_sequence_forked(self, event: ev.SequenceForked, state: PoolState) -> None:
        if state.seqs[event.parent_seq_id].request_id != state.seqs[event.seq_id].request_id:
            refuse(event, f"seq {event.seq_id} is no sample of the request of seq {event.parent_seq_id}")
        if event.seq_id not in self._starts:
            self._start(event.seq_id)

    def _start(self, seq_id: int) -> None:
        self._num_starts += 1
        self._starts[seq_id] = self._num_starts

    def _stop(self, event: ev.RequestPreempted | ev.RequestFinished, state: PoolState) -> None:
        self._starts.pop(event.seq_id, None)

    before_request_preempted = after_request_finished = _stop

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self._starts.clear()

    def before_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        self.before_step_scheduled(event, state)
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            is_alone = len(self._requests[seq.request_id]) < 2
            if is_alone and seq.beam_width not in (None, 1) and seq.num_output_tokens:
                refuse(event, f"seq {seq_id} generates alone, as no search of {seq.beam_width} beams does")

    def before_step_scheduled(self, event: ev.StepScheduled | ev.TokensSampled, state: PoolState) -> None:
        """Sequences are computed and sampled in the order in which they were started; the beams of a search, which are
        computed when the first of them has its turn, stand apart."""
        last = 0
        for seq_id in event.seq_ids:
            if state.seqs[seq_id].beam_width is not None:
                continue
            place = self._starts.get(seq_id, 0)
            if place < last:
                refuse(event, f"seq {seq_id} was started before the one that it follows")
            last = place


class QueueLaws(LawBook):
    """The order of the queue, the engine's limits, and what a step leaves behind."""

    def __init__(self, prefixes: PrefixLaws) -> None:
        self._prefixes = prefixes
        self._last_ns = 0

    def start(self) -> None:
        self._just_sampled: set[int] = set()  # sequences, in this step
        self._unreleased: set[int] = set()  # finished sequences that still hold blocks
        self._released: tuple[int, ...] = ()  # blocks of the last BlocksReleased
        self._in_step = False

    def check_order(self, event: ev.Event) -> None:
        if not self._in_step and not isinstance(event, _BETWEEN_STEPS):
            refuse(event, "comes while no step runs")
        if isinstance(event, ev.StepStarted | ev.StepFinished | ev.StepFailed):
            self._in_step = isinstance(event, ev.StepStarted)

    def before_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        seq = state.seqs[event.seq_id]
        scores = seq.num_context_tokens is not None
        if event.reason in ("stop", "length", "score") and scores != (event.reason == "score"):
            refuse(event, f"seq {event.seq_id} has {'' if scores else 'no '}targets, but ended by {event.reason}")
        if event.reason == "length" and event.num_output_tokens != seq.max_new_tokens:
            refuse(event, f"seq {event.seq_id} ended by length, but not at its {seq.max_new_tokens} new tokens")
        # logits that are no numbers give no token, and a callback fails after one
        may_be_either = scores or event.reason == "error"
        if not may_be_either and (event.reason == "abort") == (event.seq_id in self._just_sampled):
            got = f"got {'a' if event.reason == 'abort' else 'no'} token in this step"
            refuse(event, f"seq {event.seq_id} ended by {event.reason}, but {got}")

    def after_request_finished(self, event: ev.RequestFinished, state: PoolState) -> None:
        if state.finished[event.seq_id].block_table:
            self._unreleased.add(event.seq_id)

    def after_blocks_released(self, event: ev.BlocksReleased, state: PoolState) -> None:
        self._released = event.block_ids
        self._unreleased.discard(event.seq_id)

    def before_request_preempted(self, event: ev.RequestPreempted, state: PoolState) -> None:
        for_seq = state.seqs.get(event.for_seq_id)
        if for_seq is None:
            refuse(event, f"for seq {event.for_seq_id}, which is not running")
        # its next token takes a block per group where its table ends, and a copy of a partial block that is shared
        place = for_seq.num_computed_tokens // state.block_size * state.num_groups
        block_id = for_seq.block_table[place] if place < len(for_seq.block_table) else None
        is_shared = block_id is not None and state.ref_counts[block_id] + (block_id in self._released) > 1
        is_partial = block_id is not None and state.hashes[block_id] is None
        needed = state.num_groups if block_id is None or (is_partial and is_shared) else 0
        is_held = place <= len(for_seq.block_table)
        if event.num_blocks_needed != needed or not is_held or not (needed or state.slots):
            refuse(event, f"the next token of seq {event.for_seq_id} needs {needed} blocks")

    def before_request_waiting(self, event: ev.RequestWaiting, state: PoolState) -> None:
        waiting, seq, running = state.waiting(), state.seqs[event.seq_id], state.running()
        completes = seq.beam_width is not None and any(each.request_id == seq.request_id for each in running)
        if not waiting or (waiting[0] is not seq and not completes):
            refuse(event, f"seq {event.seq_id} is not the first of the waiting queue")
        if event.num_free_blocks != state.num_free_blocks:
            refuse(event, f"{state.num_free_blocks} blocks are free, not {event.num_free_blocks}")
        if state.step is not None and (state.step.waiting is not None or state.step.scheduled):
            refuse(event, "comes once in a step, before what the step computes")
        num_rows, slots = sum(each.num_rows for each in running), state.slots
        claims = {
            "free_blocks": event.num_blocks_needed > state.num_free_blocks,
            "min_prefill_tokens": state.started.min_prefill_tokens > 0 and bool(running),
            "max_num_seqs": num_rows + seq.num_rows > state.started.max_num_seqs,
            "state_slots": slots is not None and not slots.empty and not slots.idle,
            "checkpoint": slots is not None,
        }
        if not claims.get(event.reason, True):
            refuse(event, f"seq {event.seq_id} need not wait for {event.reason}")
        self._check_needed(event, state)

    def _check_needed(self, event: ev.RequestWaiting, state: PoolState) -> None:
        """Check the number of blocks needed: the sequence's, minus its prefix blocks in use. Exact with tokens."""
        seq, engine, tables = state.seqs[event.seq_id], state.started, tables_of(state)
        total = tables.num_entries(seq.num_tokens)
        if tables.has_windows:
            total = tables.most_blocks(seq.num_tokens, engine.chunked_prefill_size or engine.max_num_batched_tokens)
        in_use, found = 0, self._prefixes.num_found(seq, state)
        if found is not None and not tables.has_windows:
            chain, index = self._prefixes.chain(seq, state) or [], state.hash_to_block_id
            in_use = sum(state.ref_counts[index[each]] > 0 for each in chain[: found * state.num_groups])
        is_known = found is not None or tables.has_windows or not engine.enable_prefix_caching
        least = total - (in_use if is_known else min(total, state.num_used_blocks))
        if not least <= event.num_blocks_needed <= total - in_use:
            refuse(event, f"needs {least} to {total - in_use} blocks, not {event.num_blocks_needed}")

    # ------------------------------------------------------------------ steps

    def before_step_started(self, event: ev.StepStarted | ev.StepFinished | ev.StepFailed, state: PoolState) -> None:
        if event.time_ns < self._last_ns:
            refuse(event, f"time {event.time_ns} is before {self._last_ns}")
        self._last_ns = event.time_ns
        self._just_sampled.clear()

    def before_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        engine, num_new = state.started, sum(event.num_new_tokens)
        if state.step is not None and state.step.scheduled:
            refuse(event, "a second time in one step")
        for seq in state.running():
            if seq.num_computed_tokens == seq.num_tokens and seq.num_context_tokens is None:
                refuse(event, f"seq {seq.seq_id} had all tokens computed, but got no new one")
        if num_new > engine.max_num_batched_tokens:
            refuse(event, f"{num_new} tokens in one step, the budget is {engine.max_num_batched_tokens}")
        chunk_size = engine.chunked_prefill_size
        if chunk_size is not None and max(event.num_new_tokens, default=0) > chunk_size:
            refuse(event, f"a chunk is larger than {chunk_size} tokens")

    def after_step_scheduled(self, event: ev.StepScheduled, state: PoolState) -> None:
        engine, size, tables = state.started, state.block_size, tables_of(state)
        chunk_size = engine.chunked_prefill_size or engine.max_num_batched_tokens
        num_running = state.num_running
        scheduled = set(event.seq_ids)
        num_kept = sum(seq.keeps_context and seq.seq_id not in scheduled for seq in state.running())
        if num_running - num_kept > engine.max_num_seqs:
            refuse(event, f"{num_running - num_kept} sequences run, the limit is {engine.max_num_seqs}")
        if event.num_waiting != len(state.seqs) - num_running:
            refuse(event, f"{len(state.seqs) - num_running} sequences wait, not {event.num_waiting}")
        if (event.num_waiting > 0) != (state.step is not None and state.step.waiting is not None):
            refuse(event, f"{event.num_waiting} sequences wait, and no reason is given, or one without need")
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            num_tokens = seq.num_computed_tokens + seq.num_drafted_tokens
            if tables.num_entries(num_tokens) != len(seq.block_table):
                refuse(event, f"seq {seq_id}: {num_tokens} tokens in {len(seq.block_table)} blocks")
            if len(seq.held_block_ids) > tables.most_blocks(num_tokens, chunk_size):
                refuse(event, f"seq {seq_id} holds {len(seq.held_block_ids)} blocks, some that no later token sees")
            num_full = seq.num_computed_tokens // size if engine.enable_prefix_caching else 0
            for index in (num_full - 1, num_full):  # the last full one and the one being filled
                block_ids = (
                    seq.block_table[index * tables.num_groups : (index + 1) * tables.num_groups] if index >= 0 else []
                )
                for block_id in block_ids:
                    if block_id is not None and (state.hashes[block_id] is not None) != (index < num_full):
                        refuse(event, f"block {block_id} is not {'full' if index < num_full else 'partial'}")

    def after_tokens_sampled(self, event: ev.TokensSampled, state: PoolState) -> None:
        self._just_sampled.update(event.seq_ids)
        for seq_id in event.seq_ids:
            seq = state.seqs[seq_id]
            if seq.num_output_tokens > seq.max_new_tokens:
                refuse(event, f"seq {seq_id} has {seq.num_output_tokens} new tokens of {seq.max_new_tokens}")

    def before_step_finished(self, event: ev.StepFinished, state: PoolState) -> None:
        self.before_step_started(event, state)
        step = state.step
        assert step is not None, "a step is running"
        parts_ns = event.schedule_ns + event.forward_ns + event.sample_ns + event.observer_ns
        if parts_ns > event.time_ns - step.start_ns + _CLOCK_SLACK_NS:
            refuse(event, f"its parts last {parts_ns:,} ns, the step {event.time_ns - step.start_ns:,} ns")
        if not step.scheduled:
            refuse(event, "the step was not scheduled")
        if self._unreleased:
            refuse(event, f"finished sequences {sorted(self._unreleased)} still hold blocks")

    def before_step_failed(self, event: ev.StepFailed, state: PoolState) -> None:
        self.before_step_started(event, state)
        self._unreleased.clear()
