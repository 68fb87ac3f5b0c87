"""A mixture of experts: which experts each token goes to, and their results summed, every expert's tokens in one call.

Source: Shazeer et al., Outrageously Large Neural Networks, ICLR 2017; Fedus et al., Switch Transformers, 2021.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor


def route(logits: Tensor, num_per_token: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token and their weights; probabilities are in float32, as in transformers.

    Shapes:  logits [T, X] of the router; returns weights [T, K] in the dtype of the logits, experts [T, K] int64.
    """
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(num_per_token, dim=-1)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def weighted_sum(experts: Sequence[Callable[[Tensor], Tensor]], x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """For each token the weighted sum of its experts' results, added in the order of the experts.

    Shapes:  x [T, E]; weights, chosen [T, K] of route; returns [T, E].
    """
    chosen, weights, order = by_expert(chosen, weights)
    inputs = x.index_select(0, order // chosen.shape[1])
    results = torch.empty_like(inputs)
    start = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()):
        if count:
            part = slice(start, start + count)
            results[part] = experts[expert](inputs[part])
            start += count
    return summed(results * weights.flatten()[order, None], order, chosen.shape[1])


def by_expert(chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The choices of each token in the order of the experts, with their weights, and the order [T * K] in which all
    choices, flattened, are sorted by expert."""
    chosen, places = chosen.sort(-1)
    return chosen, weights.gather(1, places), chosen.flatten().argsort(stable=True)


def summed(results: Tensor, order: Tensor, num_per_token: int) -> Tensor:
    """Each token's results added, from rows sorted by expert. index_add_ would do it, but on a CPU it starts all its
    threads for a single row. Shapes: results [T * K, E], order [T * K] of by_expert; returns [T, E]."""
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))
    num_tokens, width = order.shape[0] // num_per_token, results.shape[1]
    return reduce(torch.add, results.index_select(0, places).view(num_tokens, num_per_token, width).unbind(1))
