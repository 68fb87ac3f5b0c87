"""Checks the fallback at load: a few tokens through the paged cache must give transformers' own logits.

This detects what no config field says: ignored positions (ALiBi), tokens mixed outside of attention (convolutions,
token shift), and state kept between steps.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.attention.reference import ReferenceAttention
from pagedcli.core.groups import cache_groups, group_size
from pagedcli.models.base import CausalLM
from pagedcli.models.fallback_refusals import refusal

_CHUNKS = ((4, 3), (2, 3))  # two sequences of 7 and 5 tokens, each computed in two steps
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}  # relative error of a token's logits
# In 16 bits a mixture of experts may route a token or two differently after rounding.
_ALLOWED_OUTLIERS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 2}


class ProbedModel(CausalLM, Protocol):
    """A model whose forward can run on a different backend."""

    def forward_through(
        self, backend: AttentionBackend, input_ids: Tensor, positions: Tensor, batch: PagedBatch, kv_cache: Tensor
    ) -> Tensor:
        """CausalLM.forward, on a cache with that backend's layout."""
        ...


@torch.inference_mode()
def own_logits(model: Any, vocab_size: int) -> Tensor:
    """Logits [12, V] of the probe by transformers' own attention, one call per sequence."""
    ids = _probe_ids(vocab_size, model.device)
    return torch.cat([model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in ids])


@torch.inference_mode()
def check_equal(paged: ProbedModel, expected: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError if the paged cache gives logits different from `expected`, the result of own_logits.

    Uses the reference backend: this tests whether the model suits a paged cache, not the kernels.
    """
    actual = _paged_logits(paged, dtype, expected.device).float()
    errors = (actual - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    num_wrong = int((~(errors <= _TOLERANCE[dtype])).sum())  # NaN counts as wrong
    if num_wrong > _ALLOWED_OUTLIERS[dtype]:
        raise refusal(
            paged.spec.architecture,
            f"gives other results there than by itself ({num_wrong} of {len(errors)} tokens differ, by up to "
            f"{errors.max().item():.2%}), so it mixes tokens outside of attention or ignores position ids",
        )


def _paged_logits(paged: ProbedModel, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same logits from both sequences together, in two steps."""
    spec, backend, block_size = paged.spec, ReferenceAttention(), 2
    ids = _probe_ids(spec.vocab_size, device)
    width = -(-max(len(sequence) for sequence in ids) // block_size)
    table = torch.arange(2 * width, dtype=torch.int32).flip(0).view(2, width)
    groups = cache_groups([layer.window for layer in paged.attention_layers])
    kv_shape = backend.kv_shape(2 * width * len(groups), block_size, spec.num_kv_heads, spec.head_dim)
    kv_cache = torch.zeros((2, group_size(groups), *kv_shape), dtype=dtype, device=device)
    rows: list[Tensor] = []
    starts = [0, 0]
    for chunk in zip(*_CHUNKS, strict=True):
        ends = [start + num_new for start, num_new in zip(starts, chunk, strict=True)]
        spans = list(zip(starts, ends, strict=True))
        tokens = torch.cat([sequence[start:end] for sequence, (start, end) in zip(ids, spans, strict=True)])
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        owners = torch.repeat_interleave(torch.arange(2), torch.tensor(chunk))
        slots = table[owners, positions // block_size] * block_size + positions % block_size
        cu_q = [0, chunk[0], sum(chunk)]
        batch = PagedBatch(
            cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
            num_tokens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slots=slots.to(device, torch.int32),
            max_new=max(chunk),
            max_total=max(ends),
            cu_q_host=cu_q,
            num_tokens_host=ends,
        )
        batch.others = tuple(_of_group(batch, group, 2 * width, block_size) for group in range(1, len(groups)))
        logits = paged.compute_logits(paged.forward_through(backend, tokens, positions.to(device), batch, kv_cache))
        rows += torch.split(logits, list(chunk))
        starts = ends
    return torch.cat(rows[0::2] + rows[1::2])  # grouped by sequence again


def _of_group(batch: PagedBatch, group: int, num_blocks: int, block_size: int) -> PagedBatch:
    """The batch of another group of layers: the same tables, further back in the cache."""
    offset = group * num_blocks
    return replace(batch, block_table=batch.block_table + offset, slots=batch.slots + offset * block_size)


def _probe_ids(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Token ids spread over the vocabulary, [7] and [5]."""
    lengths = [sum(chunks) for chunks in _CHUNKS]
    return [(torch.arange(length, device=device) * 7919 + 31 * length) % vocab_size for length in lengths]
