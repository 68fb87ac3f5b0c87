"""Tensor parallelism inside a model: this rank, and the layers that combine the ranks' partial results.

Heads, MLP and vocabulary are split; partial sums are all-reduced.
Source: Shoeybi et al., Megatron-LM, 2019.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# renamed in torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's index among the `size` ranks of the default process group. With size 1 there is no group."""

    rank: int = 0
    size: int = 1

    def part_of(self, total: int) -> tuple[int, int]:
        """Start and end of this rank's part of `total` items; all parts are equal, except those of the last ranks."""
        share = -(-total // self.size)
        return min(total, self.rank * share), min(total, (self.rank + 1) * share)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' values, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def gather_columns(self, x: Tensor, total: int) -> Tensor:
        """All ranks' columns concatenated, on every rank.

        Shapes:  x [R, C], C this rank's part_of(total); returns [R, total].
        """
        if self.size == 1:
            return x
        share = -(-total // self.size)
        part = F.pad(x, (0, share - x.shape[1])).contiguous()
        gathered = torch.empty((self.size * x.shape[0], share), dtype=x.dtype, device=x.device)
        _all_gather(gathered, part)
        return (
            gathered.view(self.size, x.shape[0], share)
            .transpose(0, 1)
            .reshape(x.shape[0], self.size * share)[:, :total]
        )


SINGLE = ParallelContext()


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    """An embedding table with its rows split over the ranks."""

    weight: Tensor
    vocab_size: int
    parallel: ParallelContext

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Shapes: input_ids [T] int64 -> [T, E]."""
        if self.parallel.size == 1:
            return F.embedding(input_ids, self.weight)
        first, end = self.parallel.part_of(self.vocab_size)
        if first == end:
            rows = self.weight.new_zeros((*input_ids.shape, self.weight.shape[1]))
        else:
            ours = (input_ids >= first) & (input_ids < end)
            rows = F.embedding((input_ids - first).where(ours, 0), self.weight) * ours[:, None]
        return self.parallel.all_reduce(rows)
