"""The engine: requests of token ids in, tokens out, one step at a time. It sees only integers.

Used by batch and by the Python door; knows no files, no text and no terminal.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any

from pagedcli import __version__
from pagedcli.config import EngineConfig
from pagedcli.engine.in_flight import Executor, StepClock, StepInFlight, TimedEmit
from pagedcli.engine.loading import load_engine
from pagedcli.engine.outputs import EngineStats, Request, RequestOutput
from pagedcli.engine.sampler import SamplingBatch, depends_on_tokens
from pagedcli.engine.scheduler import ScheduledStep, Scheduler
from pagedcli.engine.sequence import Guide, Sequence, StopChecker
from pagedcli.engine.step_input import StepBuilder
from pagedcli.engine.tensor_parallel import WorkerGroup
from pagedcli.errors import RequestError
from pagedcli.events import SCHEMA_VERSION, Emit, EngineStarted, RequestRefused, StepFinished, StepStarted
from pagedcli.kvcache.block_manager import BlockManager
from pagedcli.kvcache.budget import blocks_for
from pagedcli.sampling_params import SamplingParams, seed_for


class LLMEngine:
    """Continuous batching over one paged KV cache.

    `emit` is told every change as an event (see pagedcli.events); None costs nothing. With `trace_tokens` the events
    hold token ids, which are private by default.
    """

    def __init__(self, config: EngineConfig, *, emit: Emit | None = None, trace_tokens: bool = False) -> None:
        self.config = config
        self._emit = None if emit is None else TimedEmit(emit)
        self._group = WorkerGroup(config) if config.tensor_parallel_size > 1 else None
        loaded = self._group.load() if self._group is not None else load_engine(config)
        self.spec, self.model, self.model_path = loaded.spec, loaded.model, loaded.model_path
        self.plan, self.runner = loaded.plan, loaded.runner
        self._executor: Executor = self._group or self.runner
        self.block_manager = BlockManager(
            self.plan.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching, emit=self._emit
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.plan.max_num_batched_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            preemption_policy=config.preemption_policy,
            trace_tokens=trace_tokens,
            emit=self._emit,
        )
        self._builder = StepBuilder(
            max_num_seqs=config.max_num_seqs, max_model_len=self.plan.max_model_len, block_size=config.block_size
        )
        self.runs_ahead = self.plan.runs_ahead
        self._in_flight: StepInFlight | None = None
        self.stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._next_seq_id = 0
        self._num_added = 0
        if self._emit is not None:
            self._emit(self._started())

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        make_stop_checker: Callable[[], StopChecker] | None = None,
        make_guide: Callable[[], Guide] | None = None,
    ) -> None:
        """Queue a request.

        `cache_salt`: the request shares cached blocks only with others of the same salt. `make_stop_checker` is
        called once per sample for a function that is told each new token and finds stop strings; `make_guide` for
        what decides which tokens may come next.
        Raises: RequestError if it can never be served; nothing has changed then.
        """
        try:
            max_new_tokens = self._validate(request_id, prompt_token_ids, params)
        except RequestError as error:
            if self._emit is not None:
                self._emit(RequestRefused(request_id, error.code, error.message))
            raise
        self._num_added += 1
        seq = self._new_sequence(
            request_id,
            list(prompt_token_ids),
            params,
            max_new_tokens=max_new_tokens,
            seed=seed_for(self.config.seed, self._num_added) if params.seed is None else params.seed,
            eos_token_ids=frozenset(() if params.ignore_eos else self.spec.eos_token_ids),
            cache_salt=cache_salt,
            stop_checker=make_stop_checker() if make_stop_checker is not None else None,
            guide=make_guide() if make_guide is not None else None,
            arrived_s=time.perf_counter(),
        )
        self._requests[request_id] = Request([seq], params.n, make_stop_checker, make_guide)
        self.scheduler.add(seq)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def abort(self, request_id: str) -> None:
        """Drop a request and release its blocks. Unknown or finished requests are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        unfinished = [seq for seq in request.seqs if seq.finish_reason is None]
        for seq in unfinished:
            seq.finish_reason = "abort"
        self.scheduler.finish(unfinished)

    def close(self) -> None:
        """End the processes of a tensor-parallel group; the engine cannot be used any more. Also done at its end."""
        if self._group is not None:
            self._group.close()

    # ------------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Launch one step and read one. Returns the requests that finished with the tokens that were read.

        In order, both are the same step. One step ahead (`async_scheduling`), the step that is read is the one
        before, so that the device never waits for the host; where the next tokens depend on the last ones by more
        than their number, that one is read first.
        """
        step, observed, clock = self.stats.num_steps, self._observer_ns(), StepClock(self._observer_ns)
        if self._emit is not None:
            self._emit(StepStarted(step, time.monotonic_ns()))
        work = self.scheduler.schedule(step, report=False)
        clock.add_to("schedule_ns")
        earlier, self._in_flight = self._in_flight, None
        launched: StepInFlight | None = None
        finished: list[RequestOutput] = []
        if earlier is not None:
            if work.seqs and self._may_run_ahead(work):
                launched = self._launch(work, earlier)
                self.stats.num_steps_ahead += 1
                clock.add_to("forward_ns")
            finished = self._commit(earlier)
            clock.add_to("sample_ns")
            if launched is None:
                self._settle(work)
        self.scheduler.report_scheduled(step, work)
        if launched is None and work.seqs:
            launched = self._launch(work, None)
            clock.add_to("forward_ns")
        if launched is not None and not self.runs_ahead:
            finished += self._commit(launched)
            launched = None
            clock.add_to("sample_ns")
        self._in_flight = launched
        self._count(work, clock)
        if self._emit is not None:
            times = (clock.schedule_ns, clock.forward_ns, clock.sample_ns, self._observer_ns() - observed)
            self._emit(StepFinished(step, time.monotonic_ns(), *times))
        return finished

    def _may_run_ahead(self, work: ScheduledStep) -> bool:
        """Whether the step can be launched before the tokens of the step in flight are known."""
        for seq in work.seqs:
            if seq.num_pending_tokens and depends_on_tokens(seq):
                return False
            if seq.params.n > 1 and self._will_fork(seq):
                return False  # so that observers learn of the step before they learn of its forks
        return True

    def _settle(self, work: ScheduledStep) -> None:
        """Bring work that was scheduled before the last tokens were known up to date with them."""
        work.drop_ended()
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            self.block_manager.fill_known(seq, seq.num_computed_tokens + num_new)

    def _launch(self, work: ScheduledStep, earlier: StepInFlight | None) -> StepInFlight:
        """Start the step on the device. `earlier` is the step in flight, whose tokens are not known yet."""
        now = time.perf_counter()
        step, seqs = self._builder.build(work, None if earlier is None else earlier.rows)
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            if seq.admitted_s is None:
                seq.admitted_s = now
            seq.num_computed_tokens += num_new
        seqs, logits_rows = self._fork(seqs)
        sampling = SamplingBatch.of(seqs, logits_rows)
        tokens = self._executor.launch(step, sampling)
        for seq in seqs:
            seq.num_pending_tokens += 1
        used = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        self.stats.peak_used_blocks = max(self.stats.peak_used_blocks, used)
        return StepInFlight(sampling, tokens)

    def _commit(self, step: StepInFlight) -> list[RequestOutput]:
        """Read the tokens of a launched step, append them, and collect what ended."""
        self._executor.wait(step.tokens)
        token_ids = step.tokens.read(step.sampling)
        now = time.perf_counter()
        sampled: list[Sequence] = []
        ended: list[Sequence] = []
        for seq, token_id in zip(step.sampling.seqs, token_ids, strict=True):
            if seq.finish_reason is not None:  # it had ended when this step was launched, or was aborted since
                self.stats.num_discarded_tokens += 1
                continue
            if seq.first_token_s is None:
                seq.first_token_s = now
                if seq.sample_index == 0:
                    self.stats.num_prompt_tokens += seq.num_prompt_tokens
                    self.stats.num_cached_tokens += seq.num_cached_prompt_tokens
            seq.num_pending_tokens -= 1
            seq.append_token(token_id)
            sampled.append(seq)
            if seq.finish_reason is not None:
                seq.finished_s = now
                ended.append(seq)
        self.stats.num_generated_tokens += len(sampled)
        self.scheduler.report_sampled(sampled)
        for seq in sampled:
            if seq.finish_reason is None:
                self.block_manager.fill_known(seq, seq.num_computed_tokens)
        self.scheduler.finish(ended)
        return [output for seq in ended if (output := self._finish_sample(seq)) is not None]

    def _will_fork(self, seq: Sequence) -> bool:
        """Whether the other samples of the sequence's request are still to be started, behind its prompt."""
        return seq.params.n > 1 and seq.sample_index == 0 and len(self._requests[seq.request_id].seqs) == 1

    def _fork(self, sampled: list[Sequence]) -> tuple[list[Sequence], list[int] | None]:
        """Start the other samples of requests whose prompt this step computes; they share its logits.

        Returns all sequences that get a token and the row of the logits of each, None if each has its own.
        """
        parents = [(row, seq) for row, seq in enumerate(sampled) if self._will_fork(seq)]
        if not parents:
            return sampled, None
        rows, sampled = list(range(len(sampled))), list(sampled)
        for row, parent in parents:
            request = self._requests[parent.request_id]
            for sample_index in range(1, parent.params.n):
                child = self._new_sequence(
                    parent.request_id,
                    parent.token_ids[: parent.num_prompt_tokens],
                    parent.params,
                    max_new_tokens=parent.max_new_tokens,
                    seed=parent.seed,
                    sample_index=sample_index,
                    eos_token_ids=parent.eos_token_ids,
                    cache_salt=parent.cache_salt,
                    stop_checker=request.make_stop_checker() if request.make_stop_checker is not None else None,
                    guide=request.make_guide() if request.make_guide is not None else None,
                    arrived_s=parent.arrived_s,
                )
                child.admitted_s = parent.admitted_s
                request.seqs.append(child)
                if self.scheduler.fork(parent, child):
                    sampled.append(child)
                    rows.append(row)
        return sampled, rows

    def _finish_sample(self, seq: Sequence) -> RequestOutput | None:
        """The output of the request, if this was its last sample."""
        request = self._requests[seq.request_id]
        request.num_unfinished -= 1
        if request.num_unfinished:
            return None
        del self._requests[seq.request_id]
        output = request.output()
        self.stats.num_requests_finished += 1
        self.stats.num_recomputed_tokens += output.metrics.num_recomputed_tokens
        return output

    # ------------------------------------------------------------------ parts

    def _validate(self, request_id: str, prompt_token_ids: Ids[int], params: SamplingParams) -> int:
        """The number of tokens the request may generate."""
        num_prompt, plan = len(prompt_token_ids), self.plan
        if request_id in self._requests:
            raise RequestError("duplicate_request_id", f"request id {request_id!r} is in use")
        if num_prompt == 0:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= self.spec.vocab_size:
            wrong = next(t for t in prompt_token_ids if not 0 <= t < self.spec.vocab_size)
            last = self.spec.vocab_size - 1
            raise RequestError("invalid_token_id", f"token id {wrong} is not in the vocabulary (0 to {last})")
        # the last generated token is never written to the cache
        room = min(plan.max_model_len - num_prompt, plan.num_slots - num_prompt + 1)
        max_new_tokens = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if num_prompt + max_new_tokens > plan.max_model_len:
            raise RequestError(
                "context_length_exceeded",
                f"{num_prompt} prompt tokens and {max_new_tokens} to generate are over the model length of "
                f"{plan.max_model_len}",
                hint="shorten the prompt, lower max_tokens or raise --max-model-len",
            )
        needed = blocks_for(num_prompt + max_new_tokens - 1, plan.block_size)
        if needed > plan.num_blocks:
            raise RequestError(
                "kv_cache_exceeded",
                f"needs {needed:,} blocks of {plan.block_size} tokens, the pool has {plan.num_blocks:,}",
                hint="lower max_tokens, or enlarge the pool with --kv-cache-memory or --num-gpu-blocks-override",
            )
        for token_id in params.logit_bias or ():
            if not 0 <= token_id < self.spec.vocab_size:
                raise RequestError("invalid_token_id", f"logit_bias names {token_id}, which is not in the vocabulary")
        return max_new_tokens

    def _new_sequence(self, request_id: str, token_ids: list[int], params: SamplingParams, **fields: Any) -> Sequence:
        seq = Sequence(self._next_seq_id, request_id, token_ids, params, **fields)
        self._next_seq_id += 1
        return seq

    def _count(self, work: ScheduledStep, clock: StepClock) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_preemptions += work.num_preempted
        stats.schedule_ns += clock.schedule_ns
        stats.forward_ns += clock.forward_ns
        stats.sample_ns += clock.sample_ns

    def _observer_ns(self) -> int:
        return 0 if self._emit is None else self._emit.num_ns

    def _started(self) -> EngineStarted:
        plan = self.plan
        return EngineStarted(
            schema_version=SCHEMA_VERSION,
            pagedcli_version=__version__,
            time_ns=time.time_ns(),
            model=plan.model,
            device=plan.device,
            dtype=plan.dtype,
            backend=plan.backend,
            refused=plan.refused,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            block_bytes=plan.block_bytes,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            chunked_prefill_size=self.config.chunked_prefill_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
