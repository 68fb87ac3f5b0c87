"""The unfinished sequences of an engine: which wait, which run, and which keep their blocks for others.

Used by Scheduler, which decides what they compute; needs no torch.
"""

from collections import deque
from collections.abc import Callable, Sized
from itertools import takewhile
from operator import attrgetter

from msgspec import UNSET

import pagedcli.events as ev
from pagedcli.core.cache import Cache
from pagedcli.core.drafts import Drafting
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.prefixes import SeenPrefixes
from pagedcli.core.sequence import Sequence, SequenceStatus

_block_table: Callable[[Sequence], list[int | None]] = attrgetter("block_table")
_num_computed: Callable[[Sequence], int] = attrgetter("num_computed_tokens")
_guesses: Callable[[Sequence], Sized] = attrgetter("guesses")


class Unfinished:
    """Sequences, from their arrival to their end, with their rows and their place in the cache."""

    def __init__(
        self,
        limits: Limits,
        cache: Cache,
        *,
        trace_tokens: bool = False,
        facts: RunFacts | None = None,
        seen: SeenPrefixes | None = None,
        drafting: Drafting | None = None,
        emit: ev.Emit | None = None,
    ) -> None:
        self.limits = limits
        self.chunk_size = limits.chunk_size
        self.cache = cache
        self.block_manager = cache.blocks
        self._states = cache.states
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        # computed ones, oldest first, that keep their blocks until the continuations that wait have forked from them
        self.contexts: list[Sequence] = []
        self._trace_tokens = trace_tokens
        self._facts = RunFacts() if facts is None else facts
        self._seen = seen  # prompts and outputs so far; None: they are not compared
        self.drafting = drafting  # None: no tokens are guessed
        self._emit = emit
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.num_grouped = 0  # running
        self._salts: dict[str, int] = {}  # cache_salt -> its number in the events
        self._num_scoring = 0  # running, with targets
        self._num_held = 0  # steps since new prompts were held back the first time

    @property
    def _num_rows(self) -> int:
        return sum(seq.num_rows for seq in self.running) if self.num_grouped else len(self.running)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def num_unfilled_slots(self) -> int:
        """Slots of the blocks in use that hold no token: all are in the last block of a table, one in each group."""
        manager, running = self.block_manager, [*self.running, *self.contexts]
        num_groups, size = manager.num_groups, manager.block_size
        if manager.has_forks:  # several sequences may share their last blocks
            tabled = (seq for seq in running if seq.block_table)
            last = {seq.block_table[-1]: seq.num_computed_tokens + len(seq.guesses) for seq in tabled}
            return num_groups * sum([-num_tokens % size for num_tokens in last.values()])
        # counted in every step, so without a loop in Python
        num_entries, num_computed = sum(map(len, map(_block_table, running))), sum(map(_num_computed, running))
        if self.drafting is not None:
            num_computed += sum(map(len, map(_guesses, running)))
        return num_entries * size - num_computed * num_groups

    def add(self, seq: Sequence) -> None:
        """Append a new sequence to the waiting queue."""
        self.waiting.append(seq)
        self.cache.expect(seq)
        self._report_added(seq)

    def _start(self, seq: Sequence) -> None:
        self._num_held = 0
        if self.drafting is not None and seq.is_beam and not seq.num_preemptions:
            self._facts.num_undrafted += 1
        seq.status = SequenceStatus.RUNNING
        seq.row = self._free_rows.pop()
        seq.synced_blocks = seq.num_kept_tokens = 0
        self.running.append(seq)
        self.num_grouped += seq.is_beam
        self._num_scoring += seq.targets is not None

    def _free_row(self, seq: Sequence) -> None:
        assert seq.row is not None, "a running sequence has a row"
        self._free_rows.append(seq.row)
        seq.row = None
        self.num_grouped -= seq.is_beam
        self._num_scoring -= seq.targets is not None

    def _release_unseen(self, seq: Sequence) -> None:
        """Release the blocks that no later token of a sequence sees."""
        if self.block_manager.has_windows:
            self.block_manager.release_unseen(seq, seq.num_behind_tokens)

    # ------------------------------------------------------------------ forks and ends

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Run a new sample that shares all its parent's blocks. False if the sequence limit is reached: the sample then
        waits in the queue and hits the prompt in the prefix cache."""
        self._report_added(child)
        is_full = self._num_rows >= self.limits.max_num_seqs or not self.block_manager.may_fork
        if not child.is_beam and is_full:  # a group has room for all of it
            self.waiting.appendleft(child)
            self.cache.expect(child, first=True)
            return False
        self.cache.fork(parent, child)
        self._start(child)
        return True

    def replace(self, seq: Sequence, parent: Sequence) -> None:
        """Drop the blocks of a running sequence, which then shares all blocks of another of its group."""
        before, num_synced = seq.block_table, seq.synced_blocks
        self.cache.release(seq)
        self.cache.fork(parent, seq)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, seq.block_table, strict=False))
        seq.synced_blocks = min(num_synced, sum(1 for _ in same))

    def finish(self, seqs: list[Sequence]) -> None:
        """Remove ended sequences, running or waiting, and release their blocks."""
        for seq in seqs:
            assert seq.finish_reason is not None, "only ended sequences are removed"
            if self._emit is not None:
                self._emit(ev.RequestFinished(seq.seq_id, seq.finish_reason, seq.num_output_tokens))
            self.cache.release(seq)
            if seq.row is not None:
                self._free_row(seq)
            elif seq.status is SequenceStatus.RUNNING:
                self.contexts.remove(seq)
            else:
                self.waiting.remove(seq)
                self.cache.forget(seq)
            seq.status = SequenceStatus.FINISHED
            if self.drafting is not None:
                self.drafting.ended(seq)
        if seqs:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]

    def requeue(self, seqs: list[Sequence]) -> list[Sequence]:
        """Make every sequence wait, after a step that raised, perhaps in the middle of a change. `seqs` are all
        unfinished sequences; those that were running come first, oldest first, and are returned. Their blocks were
        released by Cache.recover."""
        waiting = {seq.seq_id for seq in self.waiting}
        requeued = sorted(
            (seq for seq in seqs if seq.seq_id not in waiting), key=lambda seq: (seq.facts.arrived_s, seq.seq_id)
        )
        for seq in requeued:
            seq.drop_computed()
            seq.block_table, seq.row, seq.state = [], None, None
        for seq in seqs:
            seq.drop_forks()
        self.running, self.contexts = [], []
        self.num_grouped = self._num_scoring = 0
        self.waiting.extendleft(reversed(requeued))
        for seq in self.waiting:
            self.cache.expect(seq)
        self._free_rows = list(range(self.limits.max_num_seqs - 1, -1, -1))
        return requeued

    # ------------------------------------------------------------------ contexts of continuations

    def keep_context(self, context: Sequence, forks: list[Sequence]) -> None:
        """A context has been computed: it runs no more, and its continuations wait ahead of all others, the last of
        `forks` first."""
        assert context.targets is not None, "a context is scored"
        context.targets.forks = forks
        for seq in forks:
            assert seq.targets is not None, "a continuation is scored"
            seq.targets.context = context
            self.waiting.appendleft(seq)
            self._report_added(seq)
        if context.status is SequenceStatus.RUNNING:
            self._release_unseen(context)
            self.running.remove(context)
            self._free_row(context)
            self.contexts.append(context)
        else:  # A failed step has made all sequences wait.
            self._drop_context(context)

    def _release_context(self) -> bool:
        """Release what the youngest context keeps; False if there is none. Its continuations compute its end again."""
        if not self.contexts:
            return False
        self._drop_context(self.contexts[-1])
        return True

    def _drop_context(self, context: Sequence) -> None:
        """End a context. Continuations that still wait are sequences like all others from now on."""
        context.finish_reason = "score"
        self.finish([context])
        if self._seen is not None:
            self._seen.add(context.token_ids, context.cache_salt)
        for seq in context.drop_forks():
            self.cache.expect(seq, first=True)

    # ------------------------------------------------------------------ events

    def report_sampled(self, seqs: list[Sequence]) -> None:
        """Report which sequences got a token."""
        if self._emit is not None and seqs:
            token_ids = tuple([seq.token_ids[-1] for seq in seqs]) if self._trace_tokens else None
            self._emit(ev.TokensSampled(tuple([seq.seq_id for seq in seqs]), token_ids))

    def _report_added(self, seq: Sequence) -> None:
        salt = seq.cache_salt
        if self._emit is not None:
            self._emit(
                ev.RequestAdded(
                    seq_id=seq.seq_id,
                    request_id=seq.request_id,
                    row_id=seq.facts.row_id,
                    sample_index=seq.sample_index,
                    num_prompt_tokens=seq.num_prompt_tokens,
                    max_new_tokens=seq.max_new_tokens,
                    salted=salt is not None,
                    token_ids=tuple(seq.token_ids[: seq.num_prompt_tokens]) if self._trace_tokens else None,
                    beam_width=seq.params.beam_width,
                    salt=UNSET if salt is None else self._salts.setdefault(salt, len(self._salts) + 1),
                    num_context_tokens=UNSET if seq.num_context_tokens is None else seq.num_context_tokens,
                )
            )
