"""Turns a scheduled step into one PagedBatch, runs the model and returns the logits that the sampler needs.

Used by LLMEngine. Owns the KV cache tensor and the persistent block tables; knows no tokens' meaning and no files.
"""

import numpy as np
import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.engine.scheduler import ScheduledStep
from pagedcli.engine.sequence import Sequence
from pagedcli.models.base import CausalLM


class ModelRunner:
    """Runs steps on one device."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        *,
        device: torch.device,
        kv_dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        spec = model.spec
        self.model = model
        self.device = device
        self.block_size = block_size
        layer_shape = backend.kv_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        # [2, L, N, ...]; not cleared: no backend may read a slot that no sequence owns
        self.kv_cache = torch.empty((2, spec.num_layers, *layer_shape), dtype=kv_dtype, device=device)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    @torch.inference_mode()
    def execute(self, work: ScheduledStep) -> tuple[Tensor, list[Sequence]]:
        """Run one step. Returns logits [R, V] and the R sequences that get a token, those whose last token this
        step computes. Changes the KV cache only."""
        for source, copy in work.copies:
            self.kv_cache[:, :, copy] = self.kv_cache[:, :, source]
        input_ids, positions, batch = self._build(work)
        hidden = self.model.forward(input_ids, positions, batch, self.kv_cache)
        sampled, rows = [], []
        for seq, num_new, end in zip(work.seqs, work.num_new_tokens, batch.cu_q_host[1:], strict=True):
            if seq.num_computed_tokens + num_new == len(seq.token_ids):
                sampled.append(seq)
                rows.append(end - 1)
        if len(rows) < hidden.shape[0]:
            hidden = hidden[torch.tensor(rows, dtype=torch.long, device=self.device)]
        return self.model.compute_logits(hidden), sampled

    def _build(self, work: ScheduledStep) -> tuple[Tensor, Tensor, PagedBatch]:
        seqs = work.seqs
        self._sync_tables(seqs)
        rows = np.array([seq.row for seq in seqs], dtype=np.int64)
        computed = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        new = np.array(work.num_new_tokens, dtype=np.int64)
        total = computed + new
        cu_q = np.zeros(len(seqs) + 1, dtype=np.int32)
        np.cumsum(new, out=cu_q[1:])
        num_tokens = int(cu_q[-1])
        cached = np.array([seq.num_cached_tokens for seq in seqs], dtype=np.int64)
        if num_tokens == len(seqs):
            input_ids = np.array([seq.token_ids[seq.num_computed_tokens] for seq in seqs], dtype=np.int64)
            positions, token_rows = computed, rows
        else:
            chunks = [
                seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + num_new]
                for seq, num_new in zip(seqs, work.num_new_tokens, strict=True)
            ]
            input_ids = np.fromiter((token for chunk in chunks for token in chunk), dtype=np.int64, count=num_tokens)
            positions = np.arange(num_tokens) + np.repeat(computed - cu_q[:-1], new)
            token_rows, cached = np.repeat(rows, new), np.repeat(cached, new)
        slots = self._tables[token_rows, positions // self.block_size] * self.block_size + positions % self.block_size
        slots = np.where(positions < cached, -1, slots).astype(np.int32)  # shared blocks hold it already
        max_total = int(total.max())
        block_table = self._tables[rows, : -(-max_total // self.block_size)]
        batch = PagedBatch(
            cu_q=self._to_device(cu_q),
            num_tokens=self._to_device(total.astype(np.int32)),
            block_table=self._to_device(block_table),
            slots=self._to_device(slots),
            max_new=int(new.max()),
            max_total=max_total,
            cu_q_host=cu_q.tolist(),
            num_tokens_host=total.tolist(),
        )
        return self._to_device(input_ids), self._to_device(positions), batch

    def _sync_tables(self, seqs: list[Sequence]) -> None:
        """Bring the persistent rows up to date: only entries that were added or replaced since the last step."""
        for seq in seqs:
            end = len(seq.block_table)
            if seq.synced_blocks < end:
                self._tables[seq.row, seq.synced_blocks : end] = seq.block_table[seq.synced_blocks :]
                seq.synced_blocks = end

    def _to_device(self, values: "np.ndarray[tuple[int, ...], np.dtype[np.integer]]") -> Tensor:
        return torch.from_numpy(values).to(self.device)
