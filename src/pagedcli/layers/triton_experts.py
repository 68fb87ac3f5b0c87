"""A mixture of experts on a GPU: all experts of a layer in two launches, each expert's rows together.

Imported only where triton is installed. Its twin is layers.experts.weighted_sum. Nothing here waits for the device, so
a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from pagedcli.layers import triton_kernels as kernels
from pagedcli.layers.experts import by_expert, summed


class GroupedExperts:
    """Gated MLPs with silu, of equal sizes. Keeps its own copy of their weights."""

    __slots__ = ("_down", "_gate_up", "nbytes")

    def __init__(self, gate_up: list[Tensor], down: list[Tensor]) -> None:
        """Shapes: gate_up [2I, E], gate first, and down [E, I] of each expert. Both lists are emptied."""
        self._gate_up, self._down = (_stacked(weights) for weights in (gate_up, down))
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Arguments and result of layers.experts.weighted_sum."""
        num_experts, num_picked = self._down.shape[0], chosen.shape[1]
        chosen, weights, order = by_expert(chosen, weights)
        block_t = _block_t(order.shape[0], num_experts)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(order))
        starts, tiles = _firsts(counts), _firsts((counts + block_t - 1) // block_t)
        num_tiles = min(order.shape[0], num_experts) + order.shape[0] // block_t  # at most so many
        plan = (starts, tiles, num_tiles, block_t)
        inner = _product(x, self._gate_up, (order // num_picked).int(), None, *plan)
        rows = torch.arange(order.shape[0], dtype=torch.int32, device=x.device)
        results = _product(inner, self._down, rows, weights.flatten()[order], *plan)
        return summed(results, order, num_picked)


def launch_constants(num_out: int, num_in: int, num_experts: int, block_t: int, *, gated: bool) -> dict[str, Any]:
    """Compile-time values of experts_kernel."""
    blocks = {"BLOCK_T": block_t, "BLOCK_N": 64, "BLOCK_K": 32}
    block_x = 1 << num_experts.bit_length()
    return {"X": num_experts, "N": num_out, "K": num_in, "GATED": gated, "BLOCK_X": block_x, **blocks}


def _product(
    x: Tensor,
    weight: Tensor,
    rows: Tensor,
    scale: Tensor | None,
    starts: Tensor,
    tiles: Tensor,
    num_tiles: int,
    block_t: int,
) -> Tensor:
    """The rows of x times their experts' weights [X, N, K]; without `scale` silu(gate) * up."""
    gated = scale is None
    num_experts, num_out, num_in = weight.shape
    num_out = num_out // 2 if gated else num_out
    out = x.new_empty((rows.shape[0], num_out))
    constants = launch_constants(num_out, num_in, num_experts, block_t, gated=gated)
    grid = (-(-num_out // constants["BLOCK_N"]), num_tiles)
    if rows.shape[0]:
        args = (x, weight, rows, x if scale is None else scale, starts, tiles, out)
        kernels.experts_kernel[grid](*args, **constants, num_warps=4, num_stages=3)
    return out


def _block_t(num_results: int, num_experts: int) -> int:
    """Results per tile: as many as an expert has on average, within what a product takes."""
    mean = num_results // num_experts
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def _firsts(counts: Tensor) -> Tensor:
    """[X + 1] int32: the sum of the counts before each expert, and of all."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _stacked(weights: list[Tensor]) -> Tensor:
    """[X, ...] of the tensors, each of which is dropped once it is copied."""
    out = weights[0].new_empty((len(weights), *weights[0].shape))
    for place in range(len(weights) - 1, -1, -1):
        out[place] = weights.pop()
    return out
