"""A mixture of experts: which experts each token goes to, and their results summed, every expert's tokens in one call.

Source: Shazeer et al., Outrageously Large Neural Networks, ICLR 2017; Fedus et al., Switch Transformers, 2021.
"""

from collections.abc import Callable, Sequence

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


def weighted_sum(x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], weights: Tensor, chosen: Tensor) -> Tensor:
    """For each token the weighted sum of its experts' results, added in the order of the experts.

    Shapes:  x [T, E]; weights, chosen [T, K] of route; returns [T, E].
    """
    out = torch.zeros_like(x)
    order = chosen.flatten().argsort(stable=True)
    rows, weights = order // chosen.shape[1], weights.flatten()[order, None]
    start = 0
    for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(experts)).tolist()):
        if count:
            part = slice(start, start + count)
            out.index_add_(0, rows[part], experts[expert](x[rows[part]]).mul_(weights[part]))
            start += count
    return out
