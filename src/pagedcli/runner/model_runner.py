"""Runs steps on one device: copies inputs, runs model and sampler, copies tokens back. Never waits for the device.

Used by LLMEngine, and by each worker of a tensor-parallel group. Owns the state of its device (device_state.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pagedcli.attention.base import LateTokens
from pagedcli.core.budget import blocks_for
from pagedcli.core.sampling_input import Ints, SamplingInput
from pagedcli.core.sequence import Sequence
from pagedcli.core.snapshots import HeldSlots
from pagedcli.core.step_input import StepBuilder, StepInput
from pagedcli.core.steps import ScheduledStep
from pagedcli.runner.cuda_graphs import DecodeGraphs
from pagedcli.runner.device_state import DeviceState, RunnerSpec
from pagedcli.runner.sampler import KeptTokens, PromptScores, SampledTokens, sample_tokens, score_prompts


class _Tables(NamedTuple):
    """The block tables of some rows."""

    rows: Ints
    max_total: int  # tokens of a sequence for which they are wide enough
    tables: tuple[Tensor, ...]  # see DeviceState.tables_of


class ModelRunner:
    """Runs steps on one device."""

    def __init__(self, spec: RunnerSpec) -> None:
        self.model = spec.model
        self.parallel = spec.parallel
        self.limits = spec.limits
        self.state = DeviceState.allocate(spec)
        self.graphs: DecodeGraphs | None = None
        self._tables: _Tables | None = None  # tables of the last step, unless entries have changed since
        self._kept_tokens = KeptTokens(self.state.tables.shape[0], self.state.upload)

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def kv_cache(self) -> Tensor:
        """K and V of all layers [2, P, N, ...], see AttentionBackend.cache_shape."""
        return self.state.kv_cache

    def make_graphs(self, *, capture: bool) -> None:
        """Serve decode steps with CUDA graphs from now on; see DecodeGraphs."""
        max_model_len = self.limits.max_model_len
        self.graphs = DecodeGraphs(self.model, self.state, self.parallel, max_model_len=max_model_len, capture=capture)

    @torch.inference_mode()
    def launch(self, step: StepInput, sampling: SamplingInput) -> SampledTokens:
        """Start one step without waiting. Returns its tokens, which are still on their way to the host.

        Changes: the KV cache; last_tokens, from which the next step takes ids that the host has not read.
        """
        self._use_device()
        logits, scores = self._logits(step, sampling, plain=sampling.is_plain)
        if logits is None:
            # a copy, as the next step overwrites last_tokens while these may still be on their way to the host
            return SampledTokens(self.state.last_tokens[: step.num_seqs].clone(), sampling)
        return self._sample(logits, scores, sampling)

    @torch.inference_mode()
    def launch_model(self, step: StepInput) -> Callable[[SamplingInput], SampledTokens]:
        """Start the model's part of a step. Returns what samples its tokens."""
        self._use_device()
        logits, scores = self._logits(step, None, plain=False)
        assert logits is not None, "no graph samples it"
        return partial(torch.inference_mode()(self._sample), logits, scores)

    def _sample(self, logits: Tensor, scores: PromptScores | None, sampling: SamplingInput) -> SampledTokens:
        sampled = sample_tokens(logits, sampling, self.state.upload, self._kept_tokens)
        sampled.prompt_scores = scores
        self.parallel.broadcast(self.state.last_tokens[: sampled.num_tokens].copy_(sampled.token_ids))
        return sampled

    @torch.inference_mode()
    def follow(self, step: StepInput | None, *, num_sampled: int | None, plain: bool) -> None:
        """Take part in a step on another rank: run its part of the model, if a step is given, and receive the tokens
        that rank 0 samples, if any."""
        self._use_device()
        in_graph = step is not None and self._logits(step, None, plain=plain)[0] is None
        if num_sampled is not None and not in_graph:
            self.parallel.broadcast(self.state.last_tokens[:num_sampled])

    def _use_device(self) -> None:
        """Make the GPU this thread's current one: Triton launches there, and steps may run in another thread than the
        one that loaded the model."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _logits(
        self, step: StepInput, sampling: SamplingInput | None, *, plain: bool
    ) -> tuple[Tensor | None, PromptScores | None]:
        """Logits [R, V], or None if a graph has already sampled the tokens; and the scores of prompts, if wanted."""
        if step.table_index.shape[0]:
            self._tables = None
        if step.prompt_rows is not None:  # Every rank takes part: logits of a group are gathered.
            hidden, rows = self._hidden(step), step.prompt_rows
            scores = score_prompts(hidden, self.model.compute_logits, rows, self.state.upload)
            [sampled] = self.state.upload([rows.sampled])
            return self.model.compute_logits(hidden.index_select(0, sampled)), scores
        if self.graphs is None or not self.graphs.serves(step):
            return self.model.compute_logits(self._hidden(step)), None
        # anything else, such as several samples from one row, is sampled outside the graph
        hidden = self.graphs.run(step, sampling if plain else None)
        return (None if plain else self.model.compute_logits(hidden)), None

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        """Logits [R, V] of one step."""
        return self.model.compute_logits(self._hidden(step))

    def _hidden(self, step: StepInput) -> Tensor:
        """Hidden states [R, E] of the rows that get logits."""
        arrays = [step.input_ids, step.positions, step.slots, step.cu_q, step.num_tokens, step.table_rows]
        wanted = (step.source_rows, step.state_reads, step.state_writes, step.state_ends)
        optional = [array for array in wanted if array is not None]
        self.state.update_tables(step)
        for source, copy in step.copies:
            self.kv_cache[:, :, copy].copy_(self.kv_cache[:, :, source])
        input_ids, positions, slots, cu_q, num_tokens, table_rows, *rest = self.state.upload([*arrays, *optional])
        if step.source_rows is not None:
            input_ids = self.state.resolve_ids(input_ids, rest.pop(0))
        batch = self.state.batch(
            self._tables_of(step, table_rows),
            slots,
            max_total=step.max_total,
            cu_q=cu_q,
            num_tokens=num_tokens,
            max_new=step.max_new,
            cu_q_host=step.cu_q.tolist(),
            num_tokens_host=step.num_tokens.tolist(),
            late=LateTokens.of(step.cu_q, step.logits_rows, self.state.upload),
            state_reads=rest.pop(0) if step.state_reads is not None else None,
            state_writes=rest.pop(0) if step.state_writes is not None else None,
            state_ends=rest.pop(0) if step.state_ends is not None else None,
        )
        hidden = self.model.forward(input_ids, positions, batch, self.kv_cache)
        if batch.late is not None and hidden.shape[0] != batch.late.wanted.shape[0]:
            hidden = hidden.index_select(0, batch.late.rows)
        return hidden

    def _tables_of(self, step: StepInput, table_rows: Tensor) -> tuple[Tensor, ...]:
        """The block tables of a step: while the same sequences decode within their blocks, those of the step before."""
        kept = self._tables
        if kept is None or kept.rows is not step.table_rows or kept.max_total < step.max_total:
            most = blocks_for(step.max_total, self.limits.block_size) * self.limits.block_size
            self._tables = kept = _Tables(step.table_rows, most, self.state.tables_of(table_rows, step.max_total))
        return kept.tables

    def execute(self, work: ScheduledStep, *, every_token: bool = False) -> tuple[Tensor, list[Sequence]]:
        """Logits [R, V] of a step built from its sequences alone, and the R sequences that would get a token. For
        measurements on an idle runner: block tables are sent whole. `every_token`: the last layer computes all tokens,
        as where a prompt is scored; the logits are those of the last one."""
        work.changed = work.seqs
        for place, seq in enumerate(work.seqs):
            seq.synced_blocks = 0
            if self.state.num_state_slots:
                seq.state = HeldSlots(write=min(place, self.state.num_state_slots))
        step, sampled = StepBuilder(self.limits).build(work)
        if every_token:
            return self._last_logits(step), sampled
        return self.forward(step), sampled

    @torch.inference_mode()
    def _last_logits(self, step: StepInput) -> Tensor:
        return self.model.compute_logits(self._hidden(replace(step, logits_rows=None))[-1:])
