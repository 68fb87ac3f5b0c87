"""Decides what each step computes: {sequence: number of tokens}, within the token budget, the sequence limit and the
free blocks. There are no separate prefill and decode phases. Used by EngineCore; needs no torch.
"""

import pagedcli.events as ev
from pagedcli.core.drafts import Drafting
from pagedcli.core.prefix_lookup import PrefixHit
from pagedcli.core.sequence import Sequence, SequenceStatus
from pagedcli.core.steps import ScheduledStep
from pagedcli.core.unfinished import Unfinished
from pagedcli.events import WaitingReason

MOST_HELD = 32  # steps in a row for which prompts wait for others to start with
ENOUGH_PROMPTS = 16  # prompts that take a 16th of max_num_seqs do not wait


class Scheduler(Unfinished):
    """Running sequences first, oldest first, then waiting ones in order of arrival."""

    def schedule(self, step: int, *, report: bool = True) -> ScheduledStep:
        """Choose the work of this step, allocate its blocks, and preempt where there are too few.

        The previous step's tokens may still be on the device (num_pending_tokens): only preemption needs their values,
        and waits for them. With `report` False the caller reports the work, once it knows which sequences have ended.
        """
        work = ScheduledStep()
        budget = self._schedule_running(work)
        num_running = len(self.running)
        work.blocked = self._schedule_waiting(work, budget)
        if not (work.seqs or work.num_preempted or work.waits_for_tokens) and len(self.running) == num_running:
            self._restart_group(work)
        work.scores_targets = self._num_scoring > 0
        if self._emit is not None and work.blocked is not None:
            self._report_waiting(self._next_waiting(), work.blocked)
        if self.drafting is not None and self.drafting.is_due(step, work.num_new_tokens.count(1)):
            self._schedule_drafts(step, work, self.drafting)
        if report:
            self.report_scheduled(step, work)
        return work

    def report_scheduled(self, step: int, work: ScheduledStep) -> None:
        """Report what the step computes, without sequences that ended while it was being launched."""
        if self._emit is not None:
            pairs = zip(work.seqs, work.num_new_tokens, strict=True)
            live = [(seq.seq_id, num_new) for seq, num_new in pairs if seq.finish_reason is None]
            seq_ids, num_new_tokens = zip(*live, strict=True) if live else ((), ())
            self._emit(ev.StepScheduled(step, seq_ids, num_new_tokens, len(self.waiting)))

    def _schedule_running(self, work: ScheduledStep) -> int:
        """Schedule the next tokens of every running sequence, oldest first. Returns the remaining budget.

        With a budget of 8 tokens, chunks of 4 and no free block (a is the oldest, d the youngest):

            tokens left   a 1, b 9, c 1, d 1
            scheduled     a 1: its last block has a free slot
                          b 4: a chunk, which needs a block, for which d is preempted
                          c 1; 2 tokens of the budget remain for the queue
        """
        budget, manager = self.limits.max_num_batched_tokens, self.block_manager
        for index, seq in enumerate(self.running, start=1):  # only later ones are preempted on the way
            if budget <= 0:
                break
            if seq.state is not None and (num_behind := seq.state.num_behind):  # they come before the next one
                if num_behind >= budget:
                    continue
                budget -= num_behind
                work.num_behind += num_behind
            num_pending, num_computed = seq.num_pending_tokens, seq.num_computed_tokens
            num_left = len(seq.token_ids) + num_pending - num_computed
            if not num_left or (num_pending and seq.num_output_tokens + num_pending >= seq.max_new_tokens):
                pass  # nothing is left, or a pending token is the last one
            elif num_left == 1 and num_computed < seq.num_writable_tokens and seq.group is None:  # most decodes
                if num_computed + 1 == seq.num_writable_tokens:
                    self._release_unseen(seq)
                    manager.fill_last(seq)
                work.seqs.append(seq)
                work.num_new_tokens.append(1)
                budget -= 1
            elif num_left == 1 and seq.group is not None:
                budget -= self._schedule_group(seq.group, index, budget, work)
            elif num_new := self._make_room(seq, num_left, budget, index, work):
                self._append(seq, num_new, work)
                budget -= num_new
            elif work.waits_for_tokens:
                break  # this one and the younger ones skip a step: none has a pending token then
        return budget

    def _schedule_waiting(self, work: ScheduledStep, budget: int) -> WaitingReason | None:
        """Start waiting sequences in order while everything fits. Returns why the first one left was not started."""
        if self.limits.min_prefill_tokens and self._awaits_prompts(work, budget):
            self._num_held += 1
            return "min_prefill_tokens"
        while self.waiting:
            if work.num_preempted or work.waits_for_tokens:
                return "preemption"  # it would take the blocks that were just freed
            seq = self._next_waiting()
            if self._num_rows + seq.num_rows > self.limits.max_num_seqs:
                return "max_num_seqs"
            if budget == 0:
                return "token_budget"
            start = self._start_prompt if seq.context is None else self._continue
            started = start(seq, budget, work)
            if isinstance(started, int):
                budget -= started
            elif self.running or not self._release_context():
                return started
        return None

    def _schedule_drafts(self, step: int, work: ScheduledStep, drafting: Drafting) -> None:
        """Let the step check guesses of the next tokens of its decodes, with what it leaves of the token budget, of the
        rows of logits and of the empty blocks."""
        num_tokens = work.num_tokens + work.num_behind
        num_rows = len(work.seqs) + sum([seq.num_coming_samples for seq in work.seqs])
        budget = min(self.limits.max_num_batched_tokens - num_tokens, self.limits.most_sampled - num_rows)
        drafted: list[tuple[int, int, ev.DraftSource]] = []  # seq_id, number of guesses, their source
        for place, draft in drafting.choose(step, work.seqs, budget, self.chunk_size):
            seq = work.seqs[place]
            self._release_unseen(seq)
            num_fitting = self.block_manager.make_room_for_draft(seq, len(draft.token_ids))
            if num_fitting > 0:
                seq.draft = draft._replace(token_ids=draft.token_ids[:num_fitting])
                drafted.append((seq.seq_id, num_fitting, draft.source))
                self._facts.drafted[draft.source] += num_fitting
                work.num_new_tokens[place] += num_fitting
                work.drafted.append(seq)
            work.changed.append(seq)
        if drafted:
            if self._emit is not None:
                self._emit(ev.TokensDrafted(*zip(*drafted, strict=True)))
            if self._states is not None:
                for seq in work.drafted:
                    self._states.add_draft(seq)

    def take_draft(self, seq: Sequence, num_accepted: int) -> None:
        """The draft of a sequence has been checked. So many of its tokens were right, and are among the sequence's."""
        draft, seq.draft = seq.draft, None
        assert draft is not None, "it has been checked"
        num_drafted, end = len(draft.token_ids), seq.num_computed_tokens + num_accepted
        token_ids = tuple(seq.token_ids[seq.num_computed_tokens : end]) if self._trace_tokens else None
        self.cache.take_draft(seq, num_drafted, num_accepted, token_ids)
        if self.drafting is not None:
            self.drafting.checked(seq, num_drafted, num_accepted)
        self._release_unseen(seq)  # it may have passed the end of a block, where decodes release others
        seq.synced_blocks = min(seq.synced_blocks, len(seq.block_table))
        seq.num_kept_tokens += num_accepted
        self._facts.accepted[draft.source] += num_accepted
        self._facts.num_generated_tokens += num_accepted

    def _make_room(self, seq: Sequence, num_left: int, budget: int, index: int, work: ScheduledStep) -> int:
        """How many of its `num_left` tokens a running sequence can compute, after younger ones have been preempted if
        there is no room for any. 0: it keeps its blocks and waits, as all older ones were scheduled."""
        manager = self.block_manager
        num_new = num_left if seq.group is None else num_left - 1  # the last tokens of a group are computed in one step
        if num_new > 1:
            num_new = min(num_new - self._reuse_more(seq), budget, self.chunk_size)
            num_new = self.cache.next_chunk(seq, seq.num_computed_tokens, num_new)
        self._release_unseen(seq)
        while not (can_grow := self._can_grow([seq])) or (
            manager.num_append_blocks(seq, num_new) > manager.num_free_blocks
        ):
            if can_grow and (num_fitting := self._num_fitting_tokens(seq)) > 0:
                return num_fitting
            if not self._free_blocks(seq, index, work):
                return 0
        return num_new

    def _can_grow(self, seqs: list[Sequence]) -> bool:
        """Whether there are slots of state for the next step of all these sequences."""
        return self._states is None or self._states.can_grow(seqs)

    def _free_blocks(self, for_seq: Sequence, index: int, work: ScheduledStep) -> bool:
        """Preempt one of the running sequences from `index` on, or release a context. False: there is none, or its
        tokens must be read first."""
        victim = self._victim(for_seq, index, work)
        if victim is None:
            return self._release_context()
        if victim.is_unread:
            work.waits_for_tokens = True
            return False
        self._preempt(victim, for_seq, work)
        return True

    def _append(self, seq: Sequence, num_new: int, work: ScheduledStep) -> None:
        """Schedule the next tokens of a running sequence; their blocks are free."""
        copies = self.cache.grow(seq, num_new)
        if copies:
            seq.synced_blocks = min(seq.synced_blocks, seq.block_table.index(copies[0][1]))
            work.copies += copies
        work.add(seq, num_new)

    def _schedule_group(self, group: list[Sequence], index: int, budget: int, work: ScheduledStep) -> int:
        """Schedule the next token of all sequences of a group, or of none. Called for each of them; the first call of a
        step decides. Returns how much of the budget is used."""
        manager = self.block_manager
        if any(each is group for each in work.groups):
            return 0
        work.groups.append(group)
        ready = all(
            seq.status is SequenceStatus.RUNNING and seq.num_computed_tokens == seq.num_tokens - 1 for seq in group
        )
        if not ready or len(group) > budget:
            return 0
        for seq in group:
            self._release_unseen(seq)
        while not self._can_grow(group) or manager.num_fork_blocks(group) > manager.num_free_blocks:
            needs_block = (seq for seq in group if manager.num_append_blocks(seq, 1))
            if not self._free_blocks(next(needs_block, group[0]), index, work):
                return budget if work.waits_for_tokens else 0
        for seq in group:
            self._append(seq, 1, work)
        return len(group)

    def _reuse_more(self, seq: Sequence) -> int:
        """Tokens of an unfinished prompt that other sequences have computed since its last chunk."""
        manager = self.block_manager
        num_synced = seq.num_computed_tokens // manager.block_size * manager.num_groups
        num_reused = self.cache.reuse_more(seq)
        if num_reused:
            seq.synced_blocks = min(seq.synced_blocks, num_synced)
            if not (seq.num_preemptions or seq.sample_index):
                seq.facts.num_cached_tokens += num_reused
                self._facts.num_cached_tokens += num_reused
        return num_reused

    def _num_fitting_tokens(self, seq: Sequence) -> int:
        """Tokens that fit into the sequence's own blocks and the free ones, less a copy of its last one if it needs it.
        Not above 0: none."""
        manager = self.block_manager
        num_blocks = len(seq.block_table) + manager.num_free_blocks - manager.num_append_blocks(seq, 0)
        room = num_blocks // manager.num_groups * manager.block_size
        return min(room, seq.num_tokens) - seq.num_computed_tokens

    def _victim(self, for_seq: Sequence, first: int, work: ScheduledStep) -> Sequence | None:
        """The sequence to preempt, of those not yet scheduled in this step: the others need their blocks for it. Not a
        member of the same group."""
        kept = [*work.groups, for_seq.group]
        candidates = [
            seq for seq in self.running[first:] if seq.group is None or all(seq.group is not each for each in kept)
        ]
        if self.limits.preemption_policy == "last" or not candidates:
            return candidates[-1] if candidates else None
        return max(reversed(candidates), key=lambda seq: len(seq.block_table) - seq.block_table.count(None))

    def _preempt(self, victim: Sequence, for_seq: Sequence, work: ScheduledStep) -> None:
        """Preempt a running sequence, with all others of its group: it returns to the front of the queue, and
        its tokens are recomputed later."""
        for seq in reversed(victim.group or [victim]):
            if seq.status is SequenceStatus.RUNNING:
                self._preempt_one(seq, for_seq, work)

    def _restart_group(self, work: ScheduledStep) -> None:
        """Preempt a group that has no room although nothing else runs: its sequences computed their prompt in the same
        steps, each in blocks of its own. Once these are cached, the sequences share them."""
        if not self.running or self.running[0].group is None:
            return
        self._release_context()  # it may keep the blocks that are missing
        group, manager = self.running[0].group, self.block_manager
        needs_block = (seq for seq in group if seq.row is None or manager.num_append_blocks(seq, 1))
        last = next(needs_block, group[0])
        for seq in [*(each for each in reversed(group) if each is not last), last]:
            if seq.status is SequenceStatus.RUNNING:
                self._preempt_one(seq, self.waiting[0] if seq is last else last, work)
        work.blocked = "preemption"

    def _preempt_one(self, victim: Sequence, for_seq: Sequence, work: ScheduledStep) -> None:
        manager = self.block_manager
        num_needed = manager.num_append_blocks(for_seq, 1)
        num_dropped = victim.num_computed_tokens
        self.running.remove(victim)
        victim.drop_computed()
        if victim.context is None:
            self.cache.expect(victim, first=True)
        num_freed = self.cache.release(victim)
        self._free_row(victim)
        self.waiting.appendleft(victim)
        work.num_preempted += 1
        self._facts.num_preemptions += 1
        if self._emit is not None:
            self._emit(ev.RequestPreempted(victim.seq_id, for_seq.seq_id, num_needed, num_dropped, num_freed))

    def _start_prompt(self, seq: Sequence, budget: int, work: ScheduledStep) -> int | WaitingReason:
        """Start a sequence after its hit. Returns how many of its tokens this step computes, or why it cannot start."""
        manager, hit = self.block_manager, self.cache.lookup(seq)
        # room for the whole prompt, not only its first chunk: otherwise it might stall half-way
        if manager.num_prefill_blocks(seq, hit, self.chunk_size) > manager.num_free_blocks:
            return "free_blocks"
        if self._states is not None and (reason := self._states.why_wait(seq, hit)) is not None:
            return reason
        if not seq.is_private:
            hit = self.cache.restore(seq, hit)
        num_computed = manager.num_computed_after(seq, hit)
        num_left = seq.num_tokens - num_computed
        if seq.group is not None:
            num_left -= 1  # the last tokens of a group are computed in one step
        num_new = self.cache.next_chunk(seq, num_computed, min(num_left, budget, self.chunk_size))
        self.waiting.remove(seq)
        self._allocate(seq, hit, num_new)
        self._start(seq)
        if num_new:
            work.add(seq, num_new)
        return num_new

    def _awaits_prompts(self, work: ScheduledStep, budget: int) -> bool:
        """Whether prompts that could start are held back until more can start in the same step, so that fewer steps mix
        prompts with decodes: where all running sequences decode, some prompts have to wait anyway, and those that can
        start are few and short. Sequences that have run before, and groups, are not held back."""
        if not work.seqs or len(work.seqs) != work.num_tokens or work.num_preempted or work.waits_for_tokens:
            return False
        if self._num_held >= MOST_HELD or self.num_grouped:
            return False
        manager, num_rows, num_tokens = self.block_manager, 0, 0
        least = min(self.limits.min_prefill_tokens, budget)
        most_rows, num_blocks = self.limits.max_num_seqs - self._num_rows, manager.num_free_blocks
        for seq in self.waiting:
            num_blocks -= manager.num_groups * -(-seq.num_tokens // manager.block_size)
            if num_rows + seq.num_rows > most_rows or num_blocks < 0:
                return num_rows > 0
            num_rows, num_tokens = num_rows + seq.num_rows, num_tokens + seq.num_tokens
            is_enough = num_tokens >= least or num_rows * ENOUGH_PROMPTS >= self.limits.max_num_seqs or seq.context
            if seq.num_preemptions or seq.num_rows > 1 or is_enough:
                return False
        return False

    def _allocate(self, seq: Sequence, hit: PrefixHit, num_new: int) -> None:
        """Give a sequence its hits and room for its first tokens, and count the first lookup of its request."""
        shared = None
        is_first = not (seq.num_preemptions or seq.sample_index)
        if is_first and self._seen is not None:
            # blocks of an answer that is still being generated can be found, too
            in_memory = hit.num_memory_tokens(self.limits.block_size)
            shared = max(self._seen.add(seq.token_ids, seq.cache_salt), in_memory)
        self.cache.allocate(seq, hit, num_new, num_shared_tokens=shared)
        if is_first:
            seq.facts.num_cached_tokens, seq.facts.num_disk_tokens = seq.num_computed_tokens, hit.num_disk_tokens
            self._facts.count_lookup(seq.num_tokens, hit.num_asked, seq.num_computed_tokens, shared)
            num_fresh = len(seq.block_table) - len(hit.block_ids)
            self._facts.admitted.update(shared=hit.num_held, revived=hit.num_free, fresh=num_fresh)
            if not seq.is_private:
                self._facts.num_disk_tokens += hit.num_disk_tokens or 0
                self.cache.offer(seq, hit)

    def _next_waiting(self) -> Sequence:
        """The first in the queue, but groups before all others where some of them run and wait for the rest. So only
        one group runs in part, at the end of `running`, and all others can preempt it: none waits for ever."""
        if self.num_grouped:
            for seq in self.waiting:
                if seq.group is not None and any(each.status is SequenceStatus.RUNNING for each in seq.group):
                    return seq
        return self.waiting[0]

    def _why_not_forked(self, seq: Sequence, context: Sequence) -> WaitingReason | None:
        """Why a continuation cannot start now."""
        manager, is_last = self.block_manager, _num_waiting_forks(context) == 1
        size, num_groups = manager.block_size, manager.num_groups
        needed = manager.tables.num_entries(seq.num_tokens) - len(context.block_table)
        if not is_last and context.num_tokens % size:
            needed += num_groups  # the partial block is copied
        if min(needed, manager.tables.most_blocks(seq.num_tokens, self.chunk_size)) > manager.num_free_blocks:
            return "free_blocks"
        has_slots = self._states is None or self._states.can_fork(context, is_last=is_last)
        return None if has_slots else "state_slots"

    def _continue(self, seq: Sequence, budget: int, work: ScheduledStep) -> int | WaitingReason:
        """Start a continuation from its context: see _start_prompt."""
        context = seq.context
        assert context is not None, "it continues one"
        if (reason := self._why_not_forked(seq, context)) is not None:
            return reason
        self.waiting.remove(seq)
        self.cache.fork(context, seq)
        self._start(seq)
        if not _num_waiting_forks(context):
            self._drop_context(context)
        num_left = seq.num_tokens - seq.num_computed_tokens
        num_new = self.cache.next_chunk(seq, seq.num_computed_tokens, min(num_left, budget, self.chunk_size))
        self._append(seq, num_new, work)
        return num_new

    def _report_waiting(self, seq: Sequence, reason: WaitingReason) -> None:
        assert self._emit is not None
        manager = self.block_manager
        hit = self.cache.lookup(seq)
        num_needed = manager.num_prefill_blocks(seq, hit, self.chunk_size)
        self._emit(ev.RequestWaiting(seq.seq_id, reason, num_needed, manager.num_free_blocks))


def _num_waiting_forks(context: Sequence) -> int:
    """Continuations that have not forked from the context, or have to once more."""
    return sum(seq.status is SequenceStatus.WAITING for seq in context.forks)
