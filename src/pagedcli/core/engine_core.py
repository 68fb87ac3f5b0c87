"""The engine core: token ids in, token ids out, one step at a time. It schedules; an Executor computes.

Used by LLMEngine, by simulations and by tests; needs no torch. See executor.py for the Executor protocol.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any

from pagedcli.core.admission import admit
from pagedcli.core.block_manager import BlockManager
from pagedcli.core.cache_counters import CacheCounters
from pagedcli.core.executor import Executor, StepTokens
from pagedcli.core.forks import Forks
from pagedcli.core.in_flight import StepClock, StepInFlight, TimedEmit
from pagedcli.core.outputs import EngineStats, Request, RequestOutput
from pagedcli.core.plan import Plan, started
from pagedcli.core.sampling_input import SamplingInput
from pagedcli.core.scheduler import ScheduledStep, Scheduler
from pagedcli.core.sequence import Guide, Sequence, SequenceStatus, StopChecker
from pagedcli.core.step_input import StepBuilder
from pagedcli.errors import RequestError
from pagedcli.events import (
    Emit,
    RequestRefused,
    StepFailed,
    StepFinished,
    StepStarted,
)
from pagedcli.sampling_params import SamplingParams, seed_for


class EngineCore:
    """Continuous batching over one paged KV cache.

    `emit` receives every change as an event (see pagedcli.events); with None no event is built. With `trace_tokens`
    the events include token ids, which are private by default. `clock_ns` is the clock of all times, in events and
    outputs: a simulation passes its own, an application one that stands still while the run is paused.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        *,
        emit: Emit | None = None,
        trace_tokens: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.plan = plan
        self.executor = executor
        self.clock_ns = clock_ns
        self._emit = None if emit is None else TimedEmit(emit, clock_ns)
        self.limits = limits = plan.limits
        self.block_manager = BlockManager(
            plan.num_blocks,
            limits.block_size,
            windows=limits.windows,
            enable_prefix_caching=limits.enable_prefix_caching,
            eviction=limits.eviction,
            emit=self._emit,
        )
        self.scheduler = Scheduler(limits, self.block_manager, trace_tokens=trace_tokens, emit=self._emit)
        self._forks = Forks(self.scheduler)
        self.runs_ahead = plan.runs_ahead
        self.stats = EngineStats(cache=CacheCounters(limits.block_size))
        self._builder = StepBuilder(limits)
        self._in_flight: StepInFlight | None = None
        self._requests: dict[str, Request] = {}
        self._finished: list[RequestOutput] = []  # not yet returned by step
        self._next_seq_id = 0
        self._num_added = 0
        if self._emit is not None:
            self._emit(started(plan))

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
    ) -> None:
        """Queue a request. May be called between any two steps.

        `row_id` is the user's own id, which the events carry. `cache_salt`: the request shares cached blocks only with
        requests of the same salt. `make_stop_checker` is called once per sample and returns a function that receives
        each new token and detects stop strings; `make_guide` returns the guide that restricts the next token.
        Raises: RequestError if it can never be served; nothing has changed in that case.
        """
        try:
            if request_id in self._requests:
                raise RequestError("duplicate_request_id", f"request id {request_id!r} is in use")
            max_new_tokens = admit(self.limits, prompt_token_ids, params)
        except RequestError as error:
            if self._emit is not None:
                self._emit(RequestRefused(request_id, error.code, error.message, row_id))
            raise
        self._num_added += 1
        if params.prompt_logprobs is not None:  # every prompt token is computed: cached blocks have no logits
            cache_salt = f"{cache_salt or ''} prompt_logprobs {self._next_seq_id}"
        seq = self._new_sequence(
            request_id,
            list(prompt_token_ids),
            params,
            max_new_tokens=max_new_tokens,
            seed=seed_for(self.plan.seed, self._num_added) if params.seed is None else params.seed,
            eos_token_ids=frozenset() if params.ignore_eos else self.plan.eos_token_ids,
            cache_salt=cache_salt,
            stop_checker=make_stop_checker() if make_stop_checker is not None else None,
            guide=make_guide() if make_guide is not None else None,
            arrived_s=self._now_s(),
            row_id=row_id,
        )
        num_seqs = 1 if seq.is_beam else params.n  # beams are counted as they start
        self._requests[request_id] = Request([seq], num_seqs, make_stop_checker, make_guide)
        self._forks.expect(seq)
        self.scheduler.add(seq)

    def has_unfinished_requests(self) -> bool:
        """Whether step has something to do or to return."""
        return self.scheduler.has_unfinished or bool(self._finished)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

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

    def step(self) -> list[RequestOutput]:
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
            self._recover(step)
            raise
        finished, self._finished = self._finished, []
        return finished

    def _step(self, step: int) -> None:
        observed, clock = self._observer_ns(), StepClock(self.clock_ns, self._observer_ns)
        if self._emit is not None:
            self._emit(StepStarted(step, self.clock_ns()))
        self.block_manager.begin_step()
        earlier, self._in_flight = self._in_flight, None
        if earlier is not None and earlier.has_beams:
            self._commit(earlier, this_step=False)
            earlier = None
            clock.add_to("sample_ns")
        work = self.scheduler.schedule(step, report=False)
        clock.add_to("schedule_ns")
        launched: StepInFlight | None = None
        if earlier is not None:
            if work.seqs and self._may_run_ahead(work):
                launched = self._launch(work, earlier)
                self.stats.num_steps_ahead += 1
                clock.add_to("forward_ns")
            self._commit(earlier, this_step=False)
            clock.add_to("sample_ns")
            if launched is None:
                work.drop_ended()
            self.block_manager.fill_known()
        self.scheduler.report_scheduled(step, work)
        if launched is None and work.seqs:
            launched = self._launch(work, None)
            clock.add_to("forward_ns")
        if launched is not None and not self.runs_ahead:
            self._commit(launched, this_step=True)
            launched = None
            clock.add_to("sample_ns")
        if launched is not None:
            for seq in launched.seqs:
                seq.num_pending_tokens += 1
        self._in_flight = launched
        self._count(work, clock)
        if self._emit is not None:
            times = (clock.schedule_ns, clock.forward_ns, clock.sample_ns, self._observer_ns() - observed)
            self._emit(StepFinished(step, self.clock_ns(), *times))

    def _may_run_ahead(self, work: ScheduledStep) -> bool:
        """Whether the step can be launched before the pending tokens are read."""
        for seq in work.seqs:
            if seq.depends_on_tokens and seq.num_pending_tokens:
                return False
            if self._forks.will_fork(seq):
                return False  # observers must see the step before its forks
        return True

    def _launch(self, work: ScheduledStep, earlier: StepInFlight | None) -> StepInFlight:
        """Start the step on the device. `earlier` is the step in flight, whose tokens have not been read."""
        now_s = self._now_s()
        step, seqs = self._builder.build(work, None if earlier is None else earlier.rows)
        for seq in work.changed:  # among them all that start
            if seq.admitted_s is None:
                seq.admitted_s = now_s
                self.stats.cache.admit(seq)
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            if seq.most_computed_tokens > seq.num_computed_tokens:
                self.stats.num_recomputed_tokens += seq.count_recomputed(num_new)
            seq.num_computed_tokens += num_new
        seqs, logits_rows = self._fork(seqs)
        tokens = self.executor.launch(step, SamplingInput.of(seqs, logits_rows))
        used = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        self.stats.peak_used_blocks = max(self.stats.peak_used_blocks, used)
        scored = {} if step.prompt_rows is None else {seq.seq_id: seq for seq in work.seqs}
        return StepInFlight(seqs, tokens, scored)

    def _commit(self, step: StepInFlight, *, this_step: bool) -> None:
        """Read the tokens of a launched step, append them, and end what ends with them. `this_step`: it is the one
        that was scheduled last."""
        tokens = step.tokens.read()
        self.block_manager.confirm_filled(this_step=this_step)
        if not this_step:
            for seq in step.seqs:
                seq.num_pending_tokens -= 1
        for found in tokens.prompt_logprobs:
            step.scored[found.seq_id].add_prompt_logprobs(found.first, found.logprobs)
        sampled: list[Sequence] = []
        ended: list[Sequence] = []
        try:
            self._append(step.seqs, tokens, sampled, ended)
        finally:  # a stop checker or a guide may raise: what came before it counts
            self.stats.num_generated_tokens += len(sampled)
            self.scheduler.report_sampled(sampled)
            self._end(ended)

    def _append(self, seqs: list[Sequence], tokens: StepTokens, sampled: list[Sequence], ended: list[Sequence]) -> None:
        """Append the tokens to their sequences; adds to `sampled` and `ended`."""
        now_s, logprobs, candidates = self._now_s(), tokens.logprobs, tokens.candidates
        searches: dict[str, Request] = {}  # whose beams got their candidates
        for row, (seq, token_id) in enumerate(zip(seqs, tokens.token_ids, strict=True)):
            if seq.finish_reason is not None:  # it had ended before this step was launched, or has been aborted since
                self.stats.num_discarded_tokens += 1
                continue
            if seq.first_token_s is None:
                seq.first_token_s = now_s
                if seq.sample_index == 0:
                    self.stats.num_prompt_tokens += seq.num_prompt_tokens
                    self.stats.num_cached_tokens += seq.num_cached_prompt_tokens
            if token_id is None:
                seq.finished_s = now_s
                ended += self._fail(seq, RequestError("invalid_logits", "the model returned NaN logits"))
                continue
            if candidates and row in candidates:
                seq.candidates = candidates[row]
                searches[seq.request_id] = self._requests[seq.request_id]
                continue
            if logprobs and row in logprobs:
                seq.logprobs.append(logprobs[row])
            sampled.append(seq)
            try:
                seq.append_token(token_id)
            except BaseException as error:
                seq.finished_s = now_s
                ended += self._fail(seq, RequestError("callback_failed", f"{type(error).__name__}: {error}"))
                raise
            if seq.finish_reason is not None:
                seq.finished_s = now_s
                ended.append(seq)
        for request in searches.values():
            if request.error is None:
                beams = self._forks.advance_beams(request, now_s, self._new_sequence)
                sampled += beams
                if beams[0].finish_reason is not None:
                    ended += beams

    def _fail(self, seq: Sequence, error: RequestError) -> list[Sequence]:
        """End all samples of a sequence's request with an error. Returns those that had not ended."""
        request = self._requests[seq.request_id]
        request.error = error
        unfinished = [sample for sample in request.seqs if sample.finish_reason is None]
        for sample in unfinished:
            sample.finish_reason, sample.finished_s = "error", seq.finished_s
        return unfinished

    def _end(self, ended: list[Sequence]) -> None:
        """Release the blocks of ended sequences, and keep the output of requests that are now complete."""
        self.scheduler.finish(ended)
        for seq in ended:
            self.stats.cache.finish(seq)
            request = self._requests[seq.request_id]
            request.num_unfinished -= 1
            if not request.num_unfinished:
                self._complete(seq.request_id)

    def _complete(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        self._forks.forget(request)
        self._finished.append(request.output())
        self.stats.num_requests_finished += 1

    # ------------------------------------------------------------------ parts

    def _fork(self, sampled: list[Sequence]) -> tuple[list[Sequence], list[int] | None]:
        return self._forks.fork_samples(self._requests, sampled, self._new_sequence)

    def _recover(self, step: int) -> None:
        """Rebuild a consistent state after a step that raised, perhaps in the middle of a change."""
        self._in_flight = None
        seqs = [seq for request in self._requests.values() for seq in request.seqs]
        unfinished = [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]
        cached_block_ids = self.block_manager.recover(self.scheduler.running)
        requeued = self.scheduler.requeue(unfinished)
        self.stats.num_steps += 1
        if self._emit is not None:
            seq_ids = tuple(seq.seq_id for seq in requeued)
            self._emit(StepFailed(step, self.clock_ns(), seq_ids, cached_block_ids))
        self.scheduler.finish([seq for seq in unfinished if seq.finish_reason is not None])
        for request_id, request in list(self._requests.items()):
            request.count_unfinished()
            if not request.num_unfinished:
                self._complete(request_id)

    def _new_sequence(self, request_id: str, token_ids: list[int], params: SamplingParams, **fields: Any) -> Sequence:
        seq = Sequence(self._next_seq_id, request_id, token_ids, params, **fields)
        self._next_seq_id += 1
        return seq

    def _count(self, work: ScheduledStep, clock: StepClock) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_preemptions += work.num_preempted
        stats.num_evictions = self.block_manager.num_evictions
        stats.cache.count_step(work.blocked, self.scheduler, step_ns=clock.total_ns)
        stats.schedule_ns += clock.schedule_ns
        stats.forward_ns += clock.forward_ns
        stats.sample_ns += clock.sample_ns

    def _now_s(self) -> float:
        return self.clock_ns() * 1e-9

    def _observer_ns(self) -> int:
        return 0 if self._emit is None else self._emit.num_ns
