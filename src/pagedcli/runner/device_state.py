"""State that stays on a device between steps: the KV cache, the block tables and the tokens of the last step.

Owned by one ModelRunner; its eager steps and its CUDA graphs work on the same memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, PagedBatch
from pagedcli.core.budget import blocks_for
from pagedcli.core.groups import cache_groups, group_size
from pagedcli.core.limits import Limits
from pagedcli.core.step_input import StepInput, table_dimensions
from pagedcli.models.base import CausalLM
from pagedcli.native.system import ask_for_huge_pages
from pagedcli.runner.transfer import Upload


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Tensors that are updated in place and never reallocated: captured graphs hold their addresses."""

    device: torch.device
    block_size: int  # tokens
    num_groups: int  # of layers, see core.groups
    kv_cache: Tensor  # [2, layers of a group, N, ...]
    tables: Tensor  # [rows, W * groups] int32, block table of each running sequence
    last_tokens: Tensor  # [rows] int64, of the last launched step
    upload: Upload

    @classmethod
    def allocate(
        cls,
        model: CausalLM,
        backend: AttentionBackend,
        limits: Limits,
        *,
        device: torch.device,
        kv_dtype: torch.dtype,
    ) -> "DeviceState":
        """The cache is not cleared: no backend may read a slot that no sequence owns."""
        assert limits.num_blocks is not None, "the pool has its size"
        groups = cache_groups([layer.window for layer in model.attention_layers])
        shape = (limits.num_blocks, limits.block_size, model.spec.num_kv_heads, model.spec.head_dim)
        layer_shape = backend.kv_shape(*shape)
        kv_cache = torch.empty((2, group_size(groups), *layer_shape), dtype=kv_dtype, device=device)
        ask_for_huge_pages(kv_cache)
        rows, columns = table_dimensions(limits)
        return cls(
            device=device,
            block_size=limits.block_size,
            num_groups=len(groups),
            kv_cache=kv_cache,
            tables=torch.zeros((rows, columns), dtype=torch.int32, device=device),
            last_tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            upload=Upload(device),
        )

    def update_tables(self, step: StepInput) -> None:
        """Update the block tables."""
        if step.table_index.shape[0]:
            index, values = self.upload([step.table_index, step.table_values])
            self.tables.view(-1).index_copy_(0, index, values)

    def batch(self, table_rows: Tensor, slots: Tensor, max_total: int, **rest: Any) -> PagedBatch:
        """The batch of the first group of layers, with those of the others. Its block tables are as wide as the longest
        sequence needs.

        Shapes:  table_rows [B]; slots [groups, T]; rest: the other fields of PagedBatch.
        """
        width = blocks_for(max_total, self.block_size)
        tables = self.tables[:, : width * self.num_groups].index_select(0, table_rows)
        of_groups: tuple[Tensor, ...] = (tables,)
        if self.num_groups > 1:
            of_groups = tables.view(-1, width, self.num_groups).permute(2, 0, 1).contiguous().unbind(0)
        first, *others = (
            PagedBatch(block_table=table, slots=of_group, max_total=max_total, **rest)
            for table, of_group in zip(of_groups, slots.unbind(0), strict=True)
        )
        first.others = tuple(others)
        return first

    def resolve_ids(self, input_ids: Tensor, source_rows: Tensor) -> Tensor:
        """The ids of a step's tokens, where some are still only on the device.

        Shapes:  input_ids, source_rows [T]; source_rows -1 keeps the id of input_ids.
        """
        # INVALID is computed as if it were 0; the result is dropped when the host reads it
        taken = self.last_tokens[source_rows.clamp(min=0)].clamp(min=0)
        return torch.where(source_rows >= 0, taken, input_ids)
