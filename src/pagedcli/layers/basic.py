"""What a decoder computes between its matrix products, in torch, or by Triton kernels where they run: RMSNorm, rotary
embedding, activations, and the mixing of experts. Every rounding is where transformers has it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli.attention.base import AttentionBackend
from pagedcli.errors import BackendError
from pagedcli.layers.kinds import Routing


@functools.cache
def fused_layers() -> Any:
    """The module triton_layers, or None if triton cannot run (which backend selection reports)."""
    try:
        from pagedcli.attention.triton_paged import launch_problem
        from pagedcli.layers import triton_layers
    except (BackendError, ImportError):  # not installed
        return None
    return None if launch_problem() else triton_layers


def stores_in_one_pass(backend: AttentionBackend) -> bool:
    """Whether triton_layers.rotate_and_store can write the backend's cache: a CUDA backend with its layout."""
    return backend.capabilities.fused_store and fused_layers() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x scaled to a root mean square of 1 over its last dimension, times weight.

    Shapes:  x [..., E]; weight [E] or anything that broadcasts against x; returns a new tensor like x.
    """
    if x.is_cuda and weight.dim() == 1 and (fused := fused_layers()):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return cast(Tensor, fused.add_rms_norm(None, rows, weight, eps).view(x.shape))
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    if weight.dtype != x.dtype:
        return (wide * scale).mul_(weight).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x less its mean, scaled to a variance of 1, times weight, computed in float32.

    Shapes:  x [T, E]; weight float32 [E], or [2, E] of weights and biases; returns a new tensor like x.
    Source:  Ba et al., Layer Normalization, 2016.
    """
    weight, bias = (weight[0], weight[1]) if weight.dim() > 1 else (weight, None)
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    norm_added: Tensor | None = None,
    added_eps: float | None = None,
    multiplier: float = 1.0,
    factor: float = 1.0,
) -> Tensor:
    """rms_norm of residual + x, or without a weight the sum itself. `norm_added` is the weight of a norm of x, with
    `added_eps`, by default eps, and `multiplier` multiplies it, both before it is added; `factor` multiplies the sum.

    Shapes:  x, residual [T, E]; weight, norm_added [E]; returns [T, E].
    Changes: residual, which becomes the sum, and x.
    """
    if residual.is_cuda and residual.is_contiguous() and (fused := fused_layers()):
        options = {"norm_added": norm_added, "added_eps": added_eps, "multiplier": multiplier, "factor": factor}
        return cast(Tensor, fused.add_rms_norm(x.contiguous(), residual, weight, eps, **options))
    if norm_added is not None:
        x = rms_norm(x, norm_added, eps if added_eps is None else added_eps)
    residual.add_(x if multiplier == 1 else x.mul_(multiplier))
    if factor != 1:
        residual.mul_(factor)
    return residual if weight is None else rms_norm(residual, weight, eps)


def rotary_rows(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the step's tokens, as rotate expects them. Once per step, for all layers.

    Shapes:  table [P, D], D/2 cosines then D/2 sines; positions [T] int64, < P; returns cos, sin, both [T, 1, D], the
             sines of the first half negated.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of each head by the token's angles.

    Shapes:  x [T, heads, D]; cos, sin of rotary_rows; returns a new tensor like x.
    Source:  Su et al., RoFormer, 2021, in the half-split form of GPT-NeoX and Llama.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1); with the negated sines this is rotate_half
    return (x * cos).add_(swapped.mul_(sin))


def norm_all(qkv: Tensor, num_heads: int, num_kv_heads: int, weight: Tensor, eps: float) -> None:
    """rms_norm of all of q and of all of k. Changes: qkv.

    Shapes:  qkv [T, (H + 2G) * D], q heads first; weight [H + G, D].
    """
    width = weight.shape[1]
    parts = slice(num_heads * width), slice(num_heads * width, (num_heads + num_kv_heads) * width)
    for part in parts:
        qkv[:, part] = rms_norm(qkv[:, part], weight.flatten()[part], eps)


def split_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    norm: tuple[Tensor, float] | None,
    angles: tuple[Tensor, Tensor] | None,
    interleaved: bool = False,
    norms_last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the step's tokens, q and k normed and rotated, with `norms_last` rotated and normed. `interleaved`:
    the pairs (2i, 2i + 1) are rotated; q and k then hold their first elements before their second ones, which changes
    no product of the two.

    Shapes:  qkv [T, (H + 2G) * D], q heads first, or [T, (H + G) * D] where K is V; norm None or (weight [H + G, D],
             eps); angles of rotary_rows, or None: no rotation;
             returns q [T, H, D] contiguous, k and v [T, G, D] with strided rows.
    """
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, heads.shape[1] - num_kv_heads :]  # without V these are K
    if norm is not None and not norms_last:
        qk = rms_norm(qk, *norm)  # q and k in one pass
    if angles is not None:
        qk = rotate_first(qk, *angles, interleaved=interleaved)
    if norm is not None and norms_last:
        qk = rms_norm(qk, *norm)
    return qk[:, :num_heads].contiguous(), qk[:, num_heads:], v


def split_gate(qkv: Tensor, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """q, k, v as split_heads takes them, and the gates of attention's result, from rows in which a gate follows the
    query of each head.

    Shapes:  qkv [T, (2H + 2G) * D]; returns [T, (H + 2G) * D] and [T, H * D].
    Source:  Qiu et al., Gated Attention for Large Language Models, 2025.
    """
    width = 2 * num_heads * head_dim
    q, gate = qkv[:, :width].reshape(-1, num_heads, 2, head_dim).unbind(2)
    return torch.cat((q.flatten(1), qkv[:, width:]), dim=1), gate.flatten(1)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """rotate of the first R elements of each head, `interleaved` as in split_heads. Shapes: x [T, heads, D]; cos, sin
    [T, 1, R]."""
    first, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        first = torch.cat((first[..., ::2], first[..., 1::2]), dim=-1)
    rotated = rotate(first, cos, sin)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), with gate and up clamped. Source: gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _gated(name: str, formula: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The activation of a gated MLP. `name` is that of triton_layers.activate_and_mul."""

    def activate_and_mul(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
        """Shapes: gate_up [T, 2I], gate first, or with `up` [T, I] the gate alone; returns [T, I]."""
        if gate_up.is_cuda and (fused := fused_layers()):
            return cast(Tensor, fused.activate_and_mul(gate_up.contiguous(), name, up))
        gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
        return formula(gate, up)

    return activate_and_mul


def xielu(up: Tensor, numbers: Tensor) -> Tensor:
    """a up^2 + c up where up is positive, and elsewhere b (expm1(min(up, d)) - up) + c up.

    Shapes:  up [T, I]; numbers [4] float32: a, b, c, d; returns [T, I], rounded once.
    Source:  Huang, Deriving Activation Functions via Integration, 2024.
    """
    a, b, c, d = numbers.unbind()
    x = up.float()
    bend = torch.where(x > 0, a * x * x, (torch.expm1(torch.minimum(x, d)) - x) * b)
    return (bend + c * x).to(up.dtype)


# Activations by their name in config.json; those without a gate are [..., I] -> [..., I].
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("silu", "swish"), _gated("silu", lambda gate, up: F.silu(gate).mul_(up))),
    "gelu_pytorch_tanh": _gated("gelu_pytorch_tanh", lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up)),
    "clamped_silu": _gated("clamped_silu", _clamped_silu),
    "relu2": lambda up: F.relu(up).square(),  # So et al., Primer, 2021
    "ungated_gelu": lambda up: F.gelu(up, approximate="tanh"),
}


def route(
    logits: Tensor, routing: Routing, router_bias: Tensor | None = None, expert_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token with the largest scores, of equals the first, and their weights.

    A softmax is in float32.

    Shapes:  logits [T, X] of the router; router_bias [X] float32, added to scores for picking alone; expert_scales [X]
             float32 multiply the weights; returns weights [T, K] in the dtype of the logits, experts [T, K] int64.
    """
    if routing.nearness:
        return _route_among_near(logits, routing)
    scores = logits.sigmoid().float() if routing.sigmoid else logits.softmax(-1, dtype=torch.float32)
    wanted = scores if router_bias is None else scores + router_bias
    if routing.groups is not None:
        num_groups, num_kept, num_best = routing.groups
        of_groups = wanted.view(len(wanted), num_groups, -1)
        best = of_groups.topk(num_best, dim=-1).values.sum(-1)
        left_out = best.sort(stable=True, dim=-1, descending=True).indices[:, num_kept:]
        wanted = of_groups.scatter(1, left_out[..., None].expand(-1, -1, of_groups.shape[2]), -math.inf).flatten(1)
    experts = wanted.sort(stable=True, dim=-1, descending=True).indices[:, : routing.num_per_token]
    weights = scores.gather(1, experts)
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True) + routing.least_sum
    if expert_scales is not None:
        weights *= expert_scales[experts]
    return (weights * routing.scale).to(logits.dtype), experts


def _route_among_near(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Source: Liu et al., GRIN: GRadient-INformed MoE, 2024, as it is outside of training."""
    scores = logits.float()
    order = scores.sort(stable=True, dim=-1, descending=True).indices[:, : routing.num_per_token]
    left, weights = scores.clone(), []
    for place in range(routing.num_per_token):
        expert = order[:, place : place + 1]
        best = scores.gather(1, expert)
        is_far = (best - left) / left.abs().maximum(best) > routing.nearness
        weights.append(left.masked_fill(is_far, -math.inf).softmax(-1).gather(1, expert))
        left.scatter_(1, expert, -math.inf)
    return torch.cat(weights, dim=-1).to(logits.dtype), order


@dataclass(frozen=True, slots=True)
class ExpertLoop:
    """A mixture of experts that are called one after the other."""

    experts: Sequence[Callable[[Tensor], Tensor]]  # E -> E each
    routing: Routing
    router_bias: Tensor | None  # [X] float32 of route
    expert_scales: Tensor | None = None  # the same

    def __call__(self, x: Tensor, logits: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """For each token the weighted sum of its experts' results, added in their order, plus sigmoid(gate) * shared.

        Shapes:  x [T, E]; logits [T, X] of the router; shared [T, E], or None: nothing is added; gate [T, 1], or None:
                 `shared` counts in full; returns [T, E].
        """
        weights, chosen = route(logits, self.routing, self.router_bias, self.expert_scales)
        chosen, places = chosen.sort(-1)
        weights, order = weights.gather(1, places), chosen.flatten().argsort(stable=True)
        inputs = x.index_select(0, order // chosen.shape[1])
        results = torch.empty_like(inputs)
        start = 0
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(start, start + count)
                results[part] = expert(inputs[part])
                start += count
        out = _summed(results * weights.flatten()[order, None], order, chosen.shape[1])
        if shared is not None:
            out += shared if gate is None else gate.sigmoid() * shared
        return out


def _summed(results: Tensor, order: Tensor, num_per_token: int) -> Tensor:
    """Each token's results added, from rows in an order. index_add_ would do it, but on a CPU it starts all its
    threads for a single row. Shapes: results [T * K, E], order [T * K]; returns [T, E]."""
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))
    num_tokens, width = order.shape[0] // num_per_token, results.shape[1]
    return reduce(torch.add, results.index_select(0, places).view(num_tokens, num_per_token, width).unbind(1))
