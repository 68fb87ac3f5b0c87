"""What layers with a state compute between their matrix products, in torch: any device, token by token.

The reference for native/recurrent.cpp and the Triton kernels. A sequence's state is read from one slot of a pool and
written to another or the same; slot -1 reads zeros. Everything is computed in float32 and rounded where transformers
rounds, and in an order that does not depend on how a sequence is cut into steps.

Shape letters: T new tokens, B sequences, C channels, Z slots, H value heads, N key size, P value size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli.attention.base import PagedBatch


@dataclass(slots=True)
class StateStep:
    """Where the sequences of a step read and write their states."""

    reads: Tensor  # [B] int32, -1: start from zero
    writes: Tensor  # [B] int32, each its own
    cu_q: Tensor  # [B+1] int32, first new token of each sequence
    num_tokens: Tensor  # [B] int32, tokens after the step
    max_new: int  # most new tokens of a sequence
    cu_q_host: list[int]
    num_tokens_host: list[int]
    work: Any = None  # result of the Triton kernels' preparation, once per step for all layers

    @classmethod
    def of(cls, batch: PagedBatch) -> "StateStep | None":
        """The places of a batch's states; None for a model without states."""
        if batch.state_reads is None or batch.state_writes is None:
            return None
        assert batch.state_ends is None, "only the native kernels take guesses"
        lengths = batch.cu_q, batch.num_tokens, batch.max_new, batch.cu_q_host, batch.num_tokens_host
        return cls(batch.state_reads, batch.state_writes, *lengths)

    def load(self, pool: Tensor) -> Tensor:
        """The states [B, ...] of a pool [Z, ...], a copy."""
        states = pool.index_select(0, self.reads.clamp(min=0))
        fresh = (self.reads < 0).view(-1, *[1] * (pool.dim() - 1))
        return states.masked_fill_(fresh, 0)

    def store(self, pool: Tensor, states: Tensor) -> None:
        """Changes: pool at the slots that are written."""
        pool.index_copy_(0, self.writes.long(), states.to(pool.dtype))


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: StateStep, *, silu: bool) -> Tensor:
    """Depthwise convolution over the current token and those before it: y_t = sum over j of w_j * x_(t-K+1+j).

    Shapes:  x [T, C]; weight [K, C] and bias [C] float32; pool [Z, K-1, C], the inputs before the first new token.
             Returns [T, C] like x, after a SiLU if asked.
    Changes: pool.
    Source:  Dao, causal-conv1d; Gu and Dao, Mamba, 2023.
    """
    before, num_tokens = weight.shape[0] - 1, x.shape[0]
    counts = step.cu_q.diff()
    starts = step.cu_q[:-1].long() + torch.arange(len(counts), device=x.device) * before  # first rows
    rows = x.new_empty((num_tokens + before * len(counts), x.shape[1]))  # per sequence: its last inputs, the new ones
    rows[starts[:, None] + torch.arange(before, device=x.device)] = step.load(pool)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts, output_size=num_tokens)
    places = torch.arange(num_tokens, device=x.device) + (sequence + 1) * before
    rows[places] = x
    total = x.new_zeros(x.shape, dtype=torch.float32)
    if bias is not None:
        total += bias
    for j in range(before + 1):
        total += rows[places - before + j].float() * weight[j]
    step.store(pool, rows[(starts + counts)[:, None] + torch.arange(before, device=x.device)])
    y = total.to(x.dtype)
    return F.silu(y) if silu else y


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, in float32, as q and k of a gated delta net are normed."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, pool: Tensor, step: StateStep
) -> Tensor:
    """A matrix that forgets, S = a S, and is corrected, S = S + k (beta (v - k^T S)); or with beta None only added to,
    S = S + k v. The result is o = q^T S. A selective scan is its second form, with C as q, B as k and dt x as v.

    Shapes:  q, k [T, H, N], of a gated delta rule normed and q scaled; v [T, H, P]; decay a [T, H, N] of each channel
             of k, or [T, H, 1] of all; beta [T, H], all float32; pool [Z, H, N, P] float32. Returns
             [T, H, P] float32.
    Changes: pool.
    Source:  Yang et al., Gated Delta Networks, ICLR 2025; Dao and Gu, Transformers are SSMs (Mamba-2), ICML 2024; both
             in their recurrent form.
    """
    states, out = step.load(pool), torch.empty_like(v)
    starts, counts = step.cu_q[:-1].long(), step.cu_q.diff()
    for i in range(step.max_new):
        active = slice(None) if step.max_new == 1 else (counts > i).nonzero()[:, 0]
        rows = starts[active] + i
        state = states[active] * decay[rows][..., None]
        added = v[rows]
        if beta is not None:
            added = (added - (state * k[rows][..., None]).sum(-2)) * beta[rows][..., None]
        state = state + k[rows][..., None] * added[..., None, :]
        out[rows] = (state * q[rows][..., None]).sum(-2)
        states[active] = state
    step.store(pool, states)
    return out


def norm_then_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate) over the last dimension. Shapes: x and gate alike, weight [P]."""
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    return (normed * F.silu(gate.float())).to(x.dtype)


def norm_then_share(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * sigmoid(gate) over the last dimension, rounded once. Shapes: as of norm_then_gate."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * gate.float().sigmoid()).to(x.dtype)


def gate_then_norm(x: Tensor, weight: Tensor | None, gate: Tensor, group: int, eps: float) -> Tensor:
    """rms_norm(x * silu(gate)) * weight, each `group` elements of the last dimension normed on their own; without a
    weight x * silu(gate).

    Shapes: x [T, I] float32, gate [T, I], weight [I]; returns [T, I] like gate."""
    wide = (x * F.silu(gate.float())).view(x.shape[0], -1, group)
    if weight is None:
        return wide.view(x.shape).to(gate.dtype)
    normed = wide.mul_(torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))
    return normed.view(x.shape).mul_(weight).to(gate.dtype)
