"""The engine: requests of token ids in, tokens out, one step at a time. It sees only integers.

Used by batch and by the Python door; knows no files, no text and no terminal.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any

import torch
import xxhash

from pagedcli import __version__
from pagedcli.attention.select import select_backend
from pagedcli.config import EngineConfig
from pagedcli.engine.memory import measure_budget
from pagedcli.engine.model_runner import ModelRunner
from pagedcli.engine.outputs import EngineStats, Request, RequestOutput
from pagedcli.engine.plan import (
    Plan,
    choose_num_blocks,
    model_folder,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from pagedcli.engine.sampler import sample
from pagedcli.engine.scheduler import ScheduledStep, Scheduler
from pagedcli.engine.sequence import Sequence, StopChecker
from pagedcli.errors import RequestError
from pagedcli.events import SCHEMA_VERSION, Emit, EngineStarted, Event, RequestRefused, StepFinished, StepStarted
from pagedcli.kvcache.block_manager import BlockManager
from pagedcli.kvcache.budget import block_bytes, blocks_for
from pagedcli.models.base import load_model
from pagedcli.models.spec import read_spec
from pagedcli.sampling_params import SamplingParams


class LLMEngine:
    """Continuous batching over one paged KV cache.

    `emit` is told every change as an event (see pagedcli.events); None costs nothing. With `trace_tokens` the events
    hold token ids, which are private by default.
    """

    def __init__(self, config: EngineConfig, *, emit: Emit | None = None, trace_tokens: bool = False) -> None:
        self.config = config
        self._observer_ns = 0
        self._emit = None if emit is None else self._timed(emit)
        path = model_folder(config)
        self.spec = read_spec(path, trust_remote_code=config.trust_remote_code)
        self.model_path = path
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, self.spec)
        max_model_len = resolve_max_model_len(config, self.spec)
        spec = self.spec
        selection = select_backend(
            config.attention_backend,
            device=device,
            dtype=dtype,
            block_size=config.block_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        self.model = load_model(
            path,
            spec,
            backend=selection.backend,
            dtype=dtype,
            device=device,
            load_format=config.load_format,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            max_model_len=max_model_len,
        )
        bytes_per_block = block_bytes(
            num_layers=spec.num_layers,
            block_size=config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            itemsize=dtype.itemsize,
        )
        budget = measure_budget(config, self.model, selection.backend, device, dtype, max_model_len)
        num_blocks, reason = choose_num_blocks(
            config, block_bytes=bytes_per_block, max_model_len=max_model_len, budget=budget
        )
        self.plan = Plan(
            model=config.model,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            backend=selection.backend.name,
            refused=selection.refused,
            block_size=config.block_size,
            block_bytes=bytes_per_block,
            num_blocks=num_blocks,
            num_blocks_reason=reason,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            weight_bytes=self.model.weight_bytes,
            budget=budget,
        )
        self.runner = ModelRunner(
            self.model,
            selection.backend,
            device=device,
            kv_dtype=dtype,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
        self.block_manager = BlockManager(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching, emit=self._emit
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill_size=config.chunked_prefill_size,
            preemption_policy=config.preemption_policy,
            trace_tokens=trace_tokens,
            emit=self._emit,
        )
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
    ) -> None:
        """Queue a request.

        `cache_salt`: the request shares cached blocks only with others of the same salt. `make_stop_checker` is
        called once per sample for a function that is told each new token and finds stop strings.
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
            seed=self._seed(params),
            eos_token_ids=frozenset(() if params.ignore_eos else self.spec.eos_token_ids),
            cache_salt=cache_salt,
            stop_checker=make_stop_checker() if make_stop_checker is not None else None,
            arrived_s=time.perf_counter(),
        )
        self._requests[request_id] = Request([seq], params.n, make_stop_checker)
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

    # ------------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the requests that finished with it."""
        step = self.stats.num_steps
        observed = self._observer_ns
        start_ns = time.perf_counter_ns()
        if self._emit is not None:
            self._emit(StepStarted(step, time.monotonic_ns()))
        work = self.scheduler.schedule(step)
        schedule_ns = time.perf_counter_ns() - start_ns - (self._observer_ns - observed)
        forward_ns = sample_ns = 0
        finished: list[RequestOutput] = []
        if work.seqs:
            start_ns = time.perf_counter_ns()
            logits, sampled = self.runner.execute(work)
            forward_ns = time.perf_counter_ns() - start_ns
            observed_before, start_ns = self._observer_ns, time.perf_counter_ns()
            finished = self._commit(work, logits, sampled)
            sample_ns = time.perf_counter_ns() - start_ns - (self._observer_ns - observed_before)
        self._count(work, schedule_ns, forward_ns, sample_ns)
        if self._emit is not None:
            observer_ns = self._observer_ns - observed
            self._emit(StepFinished(step, time.monotonic_ns(), schedule_ns, forward_ns, sample_ns, observer_ns))
        return finished

    def _commit(self, work: ScheduledStep, logits: torch.Tensor, sampled: list[Sequence]) -> list[RequestOutput]:
        """Append the sampled tokens, start forks, and collect what ended."""
        used = self.block_manager.num_blocks - self.block_manager.num_free_blocks
        self.stats.peak_used_blocks = max(self.stats.peak_used_blocks, used)
        now = time.perf_counter()
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            if seq.admitted_s is None:
                seq.admitted_s = now
            seq.num_computed_tokens += num_new
        logits, sampled = self._fork(logits, sampled)
        with torch.inference_mode():
            token_ids = sample(logits, sampled)
        now = time.perf_counter()
        ended: list[Sequence] = []
        for seq, token_id in zip(sampled, token_ids, strict=True):
            if seq.first_token_s is None:
                seq.first_token_s = now
                if seq.sample_index == 0:
                    self.stats.num_prompt_tokens += seq.num_prompt_tokens
                    self.stats.num_cached_tokens += seq.num_cached_prompt_tokens
            seq.append_token(token_id)
            if seq.finish_reason is not None:
                seq.finished_s = now
                ended.append(seq)
        self.stats.num_generated_tokens += len(sampled)
        self.scheduler.report_sampled(sampled)
        self.scheduler.finish(ended)
        return [output for seq in ended if (output := self._finish_sample(seq)) is not None]

    def _fork(self, logits: torch.Tensor, sampled: list[Sequence]) -> tuple[torch.Tensor, list[Sequence]]:
        """Start the other samples of requests whose prompt was just computed; they share its logits."""
        parents = [
            (row, seq)
            for row, seq in enumerate(sampled)
            if seq.params.n > 1 and seq.sample_index == 0 and len(self._requests[seq.request_id].seqs) == 1
        ]
        if not parents:
            return logits, sampled
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
                    arrived_s=parent.arrived_s,
                )
                child.admitted_s = parent.admitted_s
                request.seqs.append(child)
                if self.scheduler.fork(parent, child):
                    sampled.append(child)
                    rows.append(row)
        return logits[torch.tensor(rows, device=logits.device)], sampled

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

    def _seed(self, params: SamplingParams) -> int:
        """The request's own seed, or one from the engine's seed and the request's number."""
        if params.seed is not None:
            return params.seed
        return xxhash.xxh64_intdigest(f"{self.config.seed}:{self._num_added}".encode()) >> 1

    def _count(self, work: ScheduledStep, schedule_ns: int, forward_ns: int, sample_ns: int) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_preemptions += work.num_preempted
        stats.schedule_ns += schedule_ns
        stats.forward_ns += forward_ns
        stats.sample_ns += sample_ns

    def _timed(self, emit: Emit) -> Emit:
        """An emit that adds up the time spent in observers."""

        def timed(event: Event) -> None:
            start_ns = time.perf_counter_ns()
            emit(event)
            self._observer_ns += time.perf_counter_ns() - start_ns

        return timed

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
