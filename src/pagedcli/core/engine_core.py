"""The engine core: token ids in, token ids out, one step at a time. It schedules; an Executor computes.

Used by LLMEngine, by simulations and by tests; needs no torch. See core.step_input for the Executor protocol.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from operator import attrgetter
from typing import Any

import numpy as np

import pagedcli.events as ev
from pagedcli.core.admission import admit, admit_scores
from pagedcli.core.beams import Candidates
from pagedcli.core.cache import Cache, make_cache
from pagedcli.core.drafts import Drafting, NgramDrafter
from pagedcli.core.facts import RunFacts
from pagedcli.core.limits import Limits
from pagedcli.core.plan import Plan, started
from pagedcli.core.prefixes import Prefix, SeenPrefixes
from pagedcli.core.requests import FinishedRequest, Forks, UnfinishedRequest
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.scoring import POOLED, SCORING, Pooling
from pagedcli.core.sequence import Guide, ScoredPart, Sequence, SequenceFacts, SequenceStatus, StopChecker
from pagedcli.core.step_input import Builder, Executor, LaunchedStep, StepBuilder, StepTokens
from pagedcli.core.steps import FORWARD, SAMPLE, SCHEDULE, ScheduledStep, StepClock, TimedEmit
from pagedcli.errors import RequestError
from pagedcli.sampling_params import SamplingParams, seed_for

_finish_reason: Callable[[Sequence], str | None] = attrgetter("finish_reason")
_guide: Callable[[Sequence], Guide | None] = attrgetter("guide")


class EngineCore:
    """Continuous batching over one paged KV cache.

    `emit` receives every change as an event (see pagedcli.events); with None no event is built. With `trace_tokens`
    the events include token ids, which are private by default. `clock_ns` is the clock of all times, in events and
    outputs: a simulation passes its own, an application one that stands still while the run is paused.
    `make_builder` makes what turns scheduled steps into the inputs of the executor, `make_cache` what gives blocks.
    `knows_tokens` False: those of prompts stand for others, so that comparing them means nothing.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        *,
        emit: ev.Emit | None = None,
        trace_tokens: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        make_builder: Callable[[Scheduler], Builder] = lambda scheduler: StepBuilder(scheduler.limits),
        knows_tokens: bool = True,
        make_cache: Callable[[int, Limits, ev.Emit | None], Cache] = make_cache,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.clock_ns = clock_ns
        self._emit = None if emit is None else TimedEmit(emit, clock_ns)
        assert plan.speculation == "off" or not plan.runs_ahead, "nothing can take drafts back there"
        self.limits = limits = plan.limits
        self.cache = make_cache(plan.num_blocks, limits, self._emit)
        self.block_manager = self.cache.blocks
        self.stats = RunFacts.of(limits)
        self.num_steps_ahead = 0  # steps launched before the tokens of the one before were read
        self.num_discarded_tokens = 0  # sampled for sequences that had already ended
        self._seen = SeenPrefixes() if limits.enable_prefix_caching and knows_tokens else None
        self.scheduler = Scheduler(
            limits,
            self.cache,
            facts=self.stats,
            seen=self._seen,
            drafting=Drafting(NgramDrafter()) if plan.speculation == "ngram" else None,
            trace_tokens=trace_tokens,
            emit=self._emit,
        )
        self._forks = Forks(self.scheduler)
        self.runs_ahead = plan.runs_ahead
        self._builder = make_builder(self.scheduler)
        self.observe_work: Callable[[ScheduledStep], None] | None = None  # receives each step before it is launched
        self._in_flight: LaunchedStep | None = None
        self._requests: dict[str, UnfinishedRequest] = {}
        self._finished: list[FinishedRequest] = []  # requests that `step` has not returned yet
        self._next_seq_id = 0
        self._num_added = 0
        if self._emit is not None:
            for event in started(plan):
                self._emit(event)

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        *,
        row_id: str | None = None,
        cache_salt: str | None = None,
        make_stop_checker: Callable[[], StopChecker] | None = None,
        make_guide: Callable[[], Guide] | None = None,
        make_prefixes: Callable[[], list[Prefix]] | None = None,
        continuations: Ids[Ids[int]] | None = None,
        pooling: Pooling | None = None,
        is_private: bool = False,
    ) -> None:
        """Queue a request. May be called between any two steps.

        `row_id` is the user's own id. `cache_salt`: the request shares cached blocks only with requests of the same
        salt. `make_stop_checker` is called once per sample and returns a function that receives each new token and
        detects stop strings; `make_guide` returns the guide that restricts the next token; `make_prefixes` the chain of
        the prompt's full blocks, if only that is known. With `continuations` nothing is generated, and `params` do not
        count: FinishedRequest.scores says how likely each is after the prompt, or has the states to pool if they are
        POOLED. `is_private`: no prefix store is used.
        Raises: RequestError if it can never be served; nothing has changed in that case.
        """
        try:
            max_new_tokens = self._admitted(request_id, prompt_token_ids, params, continuations)
        except RequestError as error:
            if self._emit is not None:
                self._emit(ev.RequestRefused(request_id, error.code, error.message, row_id))
            raise
        self._num_added += 1
        token_ids, targets = list(prompt_token_ids), None
        if continuations is not None:
            params, targets = SCORING, ScoredPart.of_context(len(token_ids), continuations, pooling)
            token_ids += [] if targets.together else continuations[0][:-1]
        if needs_all := params.prompt_logprobs is not None or pooling == "mean":  # cached blocks have neither
            cache_salt = f" prompt_logprobs {self._next_seq_id}"
        request = UnfinishedRequest(
            make_stop_checker=make_stop_checker, make_guide=make_guide, make_prefixes=make_prefixes
        )
        request.continuations = continuations
        seq = self._new_sequence(
            request_id,
            token_ids,
            params,
            **request.parts(),
            max_new_tokens=max_new_tokens,
            seed=seed_for(self.plan.seed, self._num_added) if params.seed is None else params.seed,
            eos_token_ids=frozenset() if params.ignore_eos else self.plan.eos_token_ids,
            cache_salt=cache_salt,
            targets=targets,
            is_private=is_private or needs_all,
            facts=SequenceFacts(row_id, self._now_s()),
        )
        request.seqs.append(seq)
        request.num_unfinished = 1 if seq.is_beam else params.n  # beams are counted as they start
        self._requests[request_id] = request
        self._forks.expect(seq, continuations or ())
        self.scheduler.add(seq)

    def _admitted(
        self, request_id: str, prompt: Ids[int], params: SamplingParams, continuations: Ids[Ids[int]] | None
    ) -> int:
        """Most tokens that a new request may generate. Raises: RequestError."""
        if request_id in self._requests:
            raise RequestError("duplicate_request_id", f"request id {request_id!r} is in use")
        if continuations is not POOLED and not self.limits.has_head:
            raise RequestError("no_output_layer", "the checkpoint has no output layer: it only embeds texts")
        if continuations is None:
            return admit(self.limits, prompt, params)
        admit_scores(self.limits, prompt, continuations)
        return 0

    def has_unfinished_requests(self) -> bool:
        """Whether step has something to do or to return."""
        return self.scheduler.has_unfinished or bool(self._finished)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has computed something of this request, finished ones included."""
        request = self._requests.get(request_id)
        return request is None or any(seq.facts.admitted_s is not None for seq in request.seqs)

    def abort(self, request_id: str) -> None:
        """Drop a request and release its blocks. Unknown or finished requests are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            self._finished = [output for output in self._finished if output.request_id != request_id]
            return
        unfinished = [seq for seq in request.seqs if seq.finish_reason is None]
        for seq in unfinished:
            seq.finish_reason = "abort"
        self.scheduler.finish(unfinished)
        self._forks.forget(request)

    # ------------------------------------------------------------------ the step

    def step(self) -> list[FinishedRequest]:
        """Launch one step and read one. Returns the requests that finished in the step that was read.

        Normally both are the same step. When running one step ahead (`runs_ahead`), the previous step is read after
        the next is launched, and the device never waits for the host. If scheduling needs the values of the pending
        tokens, not just their number, as for beams, the previous step is read first.

        Raises: whatever the executor, an observer, a stop checker or a guide raises. The engine stays usable: all
        running sequences are preempted, blocks that may be unwritten are dropped from the prefix cache, and the
        next step restarts the sequences, which draw the same tokens. A request whose stop checker or guide raised
        ends with an error, as its state is unknown. Finished requests are returned by the next step.
        """
        step = self.stats.num_steps
        try:
            self._step(step)
        except BaseException:
            self.stats.count_failed_step()
            try:
                self._recover(step)
            except BaseException:  # an observer's, which gets no more events
                self._recover(step)
                raise
            raise
        finished, self._finished = self._finished, []
        return finished

    def _step(self, step: int) -> None:
        clock = StepClock(self.clock_ns, self._emit)
        if self._emit is not None:
            self._emit(ev.StepStarted(step, self.clock_ns()))
        self.cache.begin_step()
        if self.cache.store is not None:
            self.cache.store.keep(self.stats.seconds_per_token)
        self._forks.start_continuations(self._requests, self._new_sequence)
        work = self._step_ahead(step, clock) if self.runs_ahead else self._step_now(step, clock)
        self._count(work, clock)
        if self._emit is not None:
            schedule_ns, forward_ns, sample_ns = clock.phases_ns
            finished = ev.StepFinished(step, self.clock_ns(), schedule_ns, forward_ns, sample_ns, clock.observer_ns)
            self._emit(finished)

    def _step_now(self, step: int, clock: StepClock) -> ScheduledStep:
        """Schedule, launch and read one step."""
        with clock.phase(SCHEDULE):
            work = self.scheduler.schedule(step)
        if work.seqs:
            with clock.phase(FORWARD):
                launched = self._launch(work)
            with clock.phase(SAMPLE):
                self._read(launched, is_latest=True)
        else:
            self._count_scheduled(work)
        return work

    def _step_ahead(self, step: int, clock: StepClock) -> ScheduledStep:
        """Launch a step, and only then read the one before, so that the device never waits for the host:

        host      schedule 2, launch 2, read 1 | schedule 3, launch 3, read 2 | ...
        device    1 .................... 2 ..................... 3 ....
        """
        earlier, self._in_flight = self._in_flight, None
        if earlier is not None and earlier.has_beams:
            # what can be scheduled depends on which beams are kept
            with clock.phase(SAMPLE):
                self._read(earlier, is_latest=False)
            earlier = None
        with clock.phase(SCHEDULE):
            work = self.scheduler.schedule(step, report=False)
        launched: LaunchedStep | None = None
        if earlier is not None:
            if work.seqs and not any(map(self._forks.will_fork, work.seqs)):  # observers see the step before its forks
                with clock.phase(FORWARD):
                    launched = self._launch(work, earlier)
                self.num_steps_ahead += 1
            with clock.phase(SAMPLE):
                self._read(earlier, is_latest=False)
            if launched is None:
                work.drop_ended()
            elif launched.sample is not None:
                with clock.phase(FORWARD):
                    launched.tokens = launched.sample(self._builder.sampling(launched.seqs, None))
            self.block_manager.fill_known()
        self.scheduler.report_scheduled(step, work)
        if launched is not None or not work.seqs:
            self._count_scheduled(work)
        else:
            with clock.phase(FORWARD):
                launched = self._launch(work)
        if launched is not None:
            for seq in launched.seqs:
                seq.num_pending_tokens += 1
        self._in_flight = launched
        return work

    def _launch(self, work: ScheduledStep, earlier: LaunchedStep | None = None) -> LaunchedStep:
        """Start a step on the device. `earlier` is the step in flight, whose tokens have not been read: with a grammar,
        sampling waits for them."""
        now_s = self._now_s()
        if self.observe_work is not None:
            self.observe_work(work)
        step, seqs = self._builder.build(work, None if earlier is None else earlier.rows)
        for seq in work.changed:  # among them all that start
            if seq.facts.admitted_s is None:
                seq.facts.admitted_s = now_s
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            if seq.facts.most_computed_tokens > seq.num_computed_tokens:
                self.stats.num_recomputed_tokens += seq.count_recomputed(num_new)
            seq.num_computed_tokens += num_new
        if work.num_behind:
            for seq in work.seqs:
                if seq.state is not None:
                    self.stats.count_again(seq.state.num_behind)
                    seq.state.num_behind = 0
        for seq in work.drafted:  # those count once they are known to be right
            seq.num_computed_tokens -= len(seq.guesses)
        if earlier is None:
            self._count_scheduled(work)
        seqs, logits_rows = self._forks.fork_samples(self._requests, seqs, self._new_sequence)
        tokens = sample = None
        if earlier is not None and any(map(_guide, seqs)):
            sample = self.executor.launch_model(step)
        else:
            tokens = self.executor.launch(step, self._builder.sampling(seqs, logits_rows))
        scored = {} if step.prompt_rows is None else {seq.seq_id: seq for seq in work.seqs}
        computed = []
        if work.scores_targets:
            computed = [seq for seq in work.seqs if seq.targets and seq.num_computed_tokens == len(seq.token_ids)]
            self._forks.count_computed(computed)
        has_beams = self.scheduler.num_grouped > 0 and any(seq.is_beam for seq in seqs)
        return LaunchedStep(seqs, tokens, scored, computed, work.drafted, has_beams, sample)

    def _read(self, step: LaunchedStep, *, is_latest: bool) -> None:
        """Read the tokens of a launched step, append them, and end what ends with them. `is_latest`: no other step has
        been scheduled since."""
        assert step.tokens is not None, "the step has been sampled"
        tokens = step.tokens.read()
        self.cache.confirm(latest=is_latest)
        if not is_latest:
            for seq in step.seqs:
                seq.num_pending_tokens -= 1
        for found in tokens.prompt_logprobs:
            step.scored[found.seq_id].add_prompt_logprobs(found.first, found.logprobs)
        for each in tokens.target_scores:
            targets = step.scored[each.seq_id].targets
            assert targets is not None, "the sequence has targets"
            targets.add(each.first, each.scores)
        sampled: list[Sequence] = []
        ended = self._take_scores(step.computed)
        try:
            self._append(step, tokens, sampled, ended)
        finally:  # a stop checker or a guide may raise: what came before it counts
            ended += self._follow_grammars(sampled)
            for seq in step.drafted:
                if seq.status is SequenceStatus.RUNNING:
                    self.scheduler.take_draft(seq, max(0, len(seq.token_ids) - 1 - seq.num_computed_tokens))
            self.stats.num_generated_tokens += len(sampled)
            self.scheduler.report_sampled(sampled)
            self._end(ended)

    def _take_scores(self, computed: list[Sequence]) -> list[Sequence]:
        """Note that these sequences have all their scores. Returns those that end with them."""
        now_s, ended = self._now_s(), []
        for seq in computed:
            if seq.finish_reason in ("abort", "error"):
                continue
            assert seq.targets is not None, "the sequence has targets"
            seq.targets.is_done = True
            seq.facts.first_token_s = seq.facts.finished_s = now_s
            if any(np.isnan(each).any() for each in seq.targets.found):
                ended += self._fail(seq, RequestError("invalid_logits", "the model returned NaN logits"))
            elif seq.finish_reason is None and not self._forks.is_kept(seq):
                seq.finish_reason = "score"
                ended.append(seq)
        return ended

    def _append(self, step: LaunchedStep, tokens: StepTokens, sampled: list[Sequence], ended: list[Sequence]) -> None:
        """Append the tokens to their sequences; adds to `sampled` and `ended`."""
        now_s, logprobs = self._now_s(), tokens.logprobs
        searches: dict[str, dict[int, Candidates]] = {}  # request_id -> seq_id of a beam -> its next tokens
        for row, seq, token_id in step.rows_that_count(tokens.token_ids):
            if seq.finish_reason is not None:  # it had ended before this step was launched, or has been aborted since
                self.num_discarded_tokens += 1
                continue
            if seq.facts.first_token_s is None:
                seq.facts.first_token_s = now_s
            if token_id is None:
                seq.facts.finished_s = now_s
                ended += self._fail(seq, RequestError("invalid_logits", "the model returned NaN logits"))
                continue
            if logprobs and row in logprobs:
                if seq.is_beam:
                    searches.setdefault(seq.request_id, {})[seq.seq_id] = logprobs[row].top
                    continue
                seq.logprobs.append(logprobs[row])
            if not sampled or sampled[-1] is not seq:
                sampled.append(seq)
            try:
                seq.append_token(token_id)
            except BaseException as error:
                seq.facts.finished_s = now_s
                ended += self._fail(seq, RequestError("callback_failed", f"{type(error).__name__}: {error}"))
                raise
            if seq.finish_reason is not None:
                seq.facts.finished_s = now_s
                ended.append(seq)
        for request_id, candidates in searches.items():
            request = self._requests[request_id]
            if request.error is None:
                beams = self._forks.advance_beams(request, candidates, now_s, self._new_sequence)
                sampled += beams
                if beams[0].finish_reason is not None:
                    ended += beams

    def _follow_grammars(self, sampled: list[Sequence]) -> list[Sequence]:
        """Find what may follow in the texts that have a grammar. Returns those that end as they are complete."""
        followed = [seq for seq in filter(_guide, sampled) if seq.finish_reason in (None, "length")]
        if not followed:
            return []
        guides = [seq.guide for seq in followed if seq.guide is not None]
        now_s, ended = self._now_s(), []
        for seq, is_complete in zip(followed, type(guides[0]).find_allowed(guides), strict=True):
            if is_complete:
                if seq.finish_reason is None:
                    seq.facts.finished_s = now_s
                    ended.append(seq)
                seq.finish_reason = "stop"
        return ended

    def _fail(self, seq: Sequence, error: RequestError) -> list[Sequence]:
        """End all samples of a sequence's request with an error. Returns those that had not ended."""
        request = self._requests[seq.request_id]
        request.error = error
        unfinished = [sample for sample in request.seqs if sample.finish_reason is None]
        for sample in unfinished:
            sample.finish_reason, sample.facts.finished_s = "error", seq.facts.finished_s
        return unfinished

    def _end(self, ended: list[Sequence]) -> None:
        """Release the blocks of ended sequences, and keep the output of requests that are now complete."""
        self.scheduler.finish(ended)
        for seq in ended:
            if self._seen is not None:
                # the last generated token was never written
                self._seen.add(seq.token_ids if seq.targets else seq.token_ids[:-1], seq.cache_salt)
            request = self._requests.get(seq.request_id)
            if request is not None:
                request.num_unfinished -= 1
                if request.has_ended:
                    self._complete(seq.request_id)

    def _complete(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._forks.forget(request)
        self._finished.append(request.output())

    # ------------------------------------------------------------------ parts

    def _recover(self, step: int) -> None:
        """Rebuild a consistent state after a step that raised, perhaps in the middle of a change."""
        self._in_flight = None
        seqs = [seq for request in self._requests.values() for seq in request.seqs]
        unfinished = [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]
        self._forks.recover()
        cached_block_ids = self.cache.recover([*self.scheduler.running, *self.scheduler.contexts])
        requeued = self.scheduler.requeue(unfinished)
        self.cache.count(self.stats)
        if self._emit is not None:
            seq_ids = tuple(seq.seq_id for seq in requeued)
            self._emit(ev.StepFailed(step, self.clock_ns(), seq_ids, cached_block_ids))
        for seq in unfinished:
            if seq.targets and seq.targets.is_done and not self._forks.is_kept(seq):  # a context whose forks wait
                seq.finish_reason = seq.finish_reason or "score"
        self.scheduler.finish([seq for seq in unfinished if seq.finish_reason is not None])
        for request_id, request in list(self._requests.items()):
            request.count_unfinished()
            if request.has_ended:
                self._complete(request_id)

    def _new_sequence(self, request_id: str, token_ids: list[int], params: SamplingParams, **fields: Any) -> Sequence:
        seq = Sequence(self._next_seq_id, request_id, token_ids, params, **fields)
        self._next_seq_id += 1
        self.stats.num_sequences += 1
        return seq

    def _count_scheduled(self, work: ScheduledStep) -> None:
        """Count what the step computes, once its tokens count as computed and what an earlier step ended is gone."""
        manager = self.block_manager
        num_new_tokens = work.num_tokens
        if any(map(_finish_reason, work.seqs)):
            pairs = zip(work.seqs, work.num_new_tokens, strict=True)
            num_new_tokens = sum([num_new for seq, num_new in pairs if seq.finish_reason is None])
        self.stats.count_scheduled(
            num_new_tokens=num_new_tokens,
            num_used_blocks=manager.num_blocks - manager.num_free_blocks,
            num_unfilled_slots=self.scheduler.num_unfilled_slots(),
            num_waiting=len(self.scheduler.waiting),
        )
        self.cache.count(self.stats)

    def _count(self, work: ScheduledStep, clock: StepClock) -> None:
        manager, stats = self.block_manager, self.stats
        self.cache.count(self.stats)
        if self._seen is not None and self._seen.has_forgotten:
            stats.ideal_of = self._seen.most_tokens
        schedule_ns, forward_ns, sample_ns = clock.phases_ns
        stats.count_step(
            blocked=work.blocked,
            num_used_blocks=manager.num_blocks - manager.num_free_blocks,
            schedule_ns=schedule_ns,
            forward_ns=forward_ns,
            sample_ns=sample_ns,
        )

    def _now_s(self) -> float:
        return self.clock_ns() * 1e-9
