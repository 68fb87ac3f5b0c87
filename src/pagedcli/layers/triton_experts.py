"""A mixture of experts on a GPU: all experts of a layer in two launches, each expert's rows together.

Imported only where triton is installed. Its twin is layers.experts.weighted_sum. Nothing here waits for the device, so
a CUDA graph can hold it.
"""

from typing import Any

import torch
from torch import Tensor

from pagedcli.layers import triton_products as kernels
from pagedcli.layers.experts import by_expert, summed
from pagedcli.layers.quantized import Weight
from pagedcli.layers.triton_weights import KernelWeight, kernel_weight


class GroupedExperts:
    """Gated MLPs with silu, of equal sizes. Keeps its own copy of their weights, in the format in which they are."""

    __slots__ = ("_down", "_gate_up", "nbytes")

    def __init__(self, gate_up: list[Weight], down: list[Weight]) -> None:
        """Shapes: gate_up [2I, E], gate first, and down [E, I] of each expert. Both lists are emptied.

        Raises: ModelError if the formats of gate_up differ, or those of down.
        """
        self._gate_up, self._down = kernel_weight(gate_up), kernel_weight(down)
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Arguments and result of layers.experts.weighted_sum."""
        num_experts, num_picked = self._down.numbers.shape[0], chosen.shape[1]
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


def experts_constants(weight: KernelWeight, block_t: int, *, gated: bool) -> dict[str, Any]:
    """Compile-time values of experts_kernel."""
    num_experts = weight.numbers.shape[0]
    flags = {"GATED": gated, "ORDERED": weight.order is not None}
    sizes = {"X": num_experts, "NUMBERS": weight.numbers[0].numel(), "BLOCK_X": 1 << num_experts.bit_length()}
    # with 64 inputs per step some variants spill registers
    return weight.constants | flags | sizes | {"BLOCK_T": block_t, "BLOCK_N": 64, "BLOCK_K": 32}


def _product(
    x: Tensor,
    weight: KernelWeight,
    rows: Tensor,
    factor: Tensor | None,
    starts: Tensor,
    tiles: Tensor,
    num_tiles: int,
    block_t: int,
) -> Tensor:
    """The rows of x times their experts' weights, times `factor`; without it silu(gate) * up."""
    gated = factor is None
    num_out = weight.num_out // 2 if gated else weight.num_out
    out = x.new_empty((rows.shape[0], num_out))
    constants = experts_constants(weight, block_t, gated=gated)
    grid = (-(-num_out // constants["BLOCK_N"]), num_tiles)
    if rows.shape[0]:
        order = rows if weight.order is None else weight.order
        arguments = (x, *weight.pointers, order, rows, x if factor is None else factor, starts, tiles, out)
        kernels.experts_kernel[grid](*arguments, **constants, num_warps=4, num_stages=3)
    return out


def _block_t(num_results: int, num_experts: int) -> int:
    """Results per tile: as many as an expert has on average, within what a product takes."""
    mean = num_results // num_experts
    return 16 if mean <= 16 else 32 if mean <= 32 else 64


def _firsts(counts: Tensor) -> Tensor:
    """[X + 1] int32: the sum of the counts before each expert, and of all."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
