"""Drives the real scheduler and block manager without a model: sampled tokens come from a rule. No torch."""

from pagedcli.engine.scheduler import Scheduler
from pagedcli.engine.sequence import Sequence
from pagedcli.events import SCHEMA_VERSION, EngineStarted, StepFinished, StepStarted
from pagedcli.kvcache.block_manager import BlockManager
from pagedcli.sampling_params import SamplingParams


class Simulation:
    """A scheduler with its block pool. `step()` schedules, counts the tokens as computed and appends one token to each
    sequence whose last token was computed, as the engine does; forks requests with n > 1 after their prompt."""

    def __init__(self, num_blocks, block_size=2, *, emit=None, caching=True, trace_tokens=False, check=True, **limits):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **limits}
        self.manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching, emit=emit)
        self.scheduler = Scheduler(self.manager, emit=emit, trace_tokens=trace_tokens, **limits)
        self.emit = emit
        self.num_steps = 0
        self.seqs = []
        self._check = check
        if emit is not None:
            emit(
                EngineStarted(
                    schema_version=SCHEMA_VERSION,
                    pagedcli_version="simulation",
                    time_ns=0,
                    model="none",
                    device="none",
                    dtype="float32",
                    backend="none",
                    refused=(),
                    num_blocks=num_blocks,
                    block_size=block_size,
                    block_bytes=block_size * 4,
                    max_model_len=num_blocks * block_size,
                    max_num_seqs=limits["max_num_seqs"],
                    max_num_batched_tokens=limits["max_num_batched_tokens"],
                    chunked_prefill_size=limits.get("chunked_prefill_size"),
                    enable_prefix_caching=caching,
                )
            )

    def add(self, token_ids, max_new_tokens=3, *, n=1, cache_salt=None):
        seq = self._sequence(token_ids, SamplingParams(n=n), max_new_tokens, 0, cache_salt)
        self.scheduler.add(seq)
        return seq

    def _sequence(self, token_ids, params, max_new_tokens, sample_index, cache_salt):
        seq = Sequence(
            len(self.seqs),
            f"request-{len(self.seqs)}",
            list(token_ids),
            params,
            max_new_tokens=max_new_tokens,
            sample_index=sample_index,
            cache_salt=cache_salt,
        )
        self.seqs.append(seq)
        return seq

    def step(self):
        step = self.num_steps
        self.num_steps += 1
        if self.emit is not None:
            self.emit(StepStarted(step, step * 1000))
        work = self.scheduler.schedule(step)
        sampled = []
        for seq, num_new in zip(work.seqs, work.num_new_tokens, strict=True):
            seq.num_computed_tokens += num_new
            if seq.num_computed_tokens == seq.num_tokens:
                sampled.append(seq)
        for parent in list(sampled):
            if parent.params.n > 1 and parent.sample_index == 0 and parent.num_output_tokens == 0:
                for index in range(1, parent.params.n):
                    prompt = parent.token_ids[: parent.num_prompt_tokens]
                    child = self._sequence(prompt, parent.params, parent.max_new_tokens, index, parent.cache_salt)
                    if self.scheduler.fork(parent, child):
                        sampled.append(child)
        for seq in sampled:
            seq.append_token((sum(seq.token_ids) + seq.sample_index + len(seq.token_ids)) % 5)
        self.scheduler.report_sampled(sampled)
        self.scheduler.finish([seq for seq in sampled if seq.finish_reason is not None])
        if self.emit is not None:
            self.emit(StepFinished(step, step * 1000 + 999, 1, 1, 1, 0))
        if self._check:
            self.manager.check(self.scheduler.running)
        return work

    def run(self, max_steps=100_000):
        while self.scheduler.has_unfinished:
            assert self.num_steps < max_steps, "the scheduler makes no progress"
            self.step()
        return self
