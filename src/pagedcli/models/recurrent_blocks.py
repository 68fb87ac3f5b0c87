"""The bodies of layers with a state: what stands in a decoder where other layers attend. By Triton kernels on a GPU, or
in torch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli import layers
from pagedcli.layers.basic import fused_layers
from pagedcli.layers.recurrent import (
    StateStep,
    causal_conv,
    gate_then_norm,
    l2_norm,
    norm_then_gate,
    norm_then_share,
    recurrence,
)
from pagedcli.models.blocks import ForwardStep
from pagedcli.models.mixers.recurrent import GatedDelta, KimiDelta, Mamba2, RecurrentMixer, ShortConv
from pagedcli.models.parts import TorchParts


def triton_kernels(x: Tensor) -> Any:
    """The module triton_recurrent where it serves a layer's input: on a GPU on which Triton runs. Else None."""
    if not x.is_cuda or fused_layers() is None:
        return None
    return layers.triton_recurrent


class GatedDeltaNet:
    """A gated delta net: projection, convolution, recurrence, gated norm and projection of one layer."""

    def __init__(self, parts: TorchParts, shape: GatedDelta, place: int, key: str) -> None:
        self.place, self.shape = place, shape
        self.inner = parts.linear(f"{key}.inner")  # E -> C + I: q, k, v and z
        self.gates = parts.plain_linear(f"{key}.gates")  # E -> 2H: b and a
        self.conv = parts.conv(key)  # [K, C] float32
        self.decay = parts.decay(key)  # [H] float32, -exp(A_log)
        self.step_bias = parts.needed(f"{key}.step_bias")  # [H] float32
        self.norm = parts.needed(f"{key}.gated_norm")  # [P]
        self.eps = parts.eps if shape.eps is None else shape.eps
        self.out = parts.linear(f"{key}.out")  # I -> E
        # order of the columns of inner and of gates
        self.columns = interleaved_columns(shape, parts.device) if shape.interleaved else None

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. Changes: the states of the step's sequences."""
        slots, (conv, matrix) = step.state(self.place)
        inner, gates = self.inner(x), self.gates(x)
        if (fused := triton_kernels(x)) is None:
            return self.out(self._mixed(inner, gates, conv, matrix, slots))
        mixed = fused.causal_conv(inner, self.conv, None, conv, slots, heads=self.shape)
        arguments = mixed, gates, self.decay, self.step_bias, matrix, slots, self.shape
        return self.out(fused.recurrence(*arguments, z=inner, norm=(self.norm, self.eps)))

    def _mixed(self, inner: Tensor, gates: Tensor, conv: Tensor, matrix: Tensor, slots: StateStep) -> Tensor:
        """The result [T, I] before the last projection, in torch."""
        shape = self.shape
        if self.columns is not None:
            inner, gates = (y.index_select(1, order) for y, order in zip((inner, gates), self.columns, strict=True))
        mixed = causal_conv(inner[:, : shape.channels], self.conv, None, conv, slots, silu=True)
        keys = shape.num_key_heads * shape.key_dim
        q, k, v = torch.split(mixed, [keys, keys, shape.inner], dim=1)
        q, k = (l2_norm(_heads(y, shape.key_dim)) for y in (q, k))
        repeats = shape.num_heads // shape.num_key_heads
        q *= shape.key_dim**-0.5
        if shape.tiled:
            q, k = (y.repeat(1, repeats, 1) for y in (q, k))
        else:
            q, k = (y.repeat_interleave(repeats, dim=1) for y in (q, k))
        b, a = gates.chunk(2, dim=1)
        decay = (self.decay * F.softplus(a.float() + self.step_bias)).exp()[..., None]
        values = _heads(v, shape.value_dim).float()
        o = recurrence(q, k, values, decay, b.sigmoid().float() * shape.correction, matrix, slots).to(inner.dtype)
        z = _heads(inner[:, shape.channels :], shape.value_dim)
        return norm_then_gate(o, self.norm, z, self.eps).flatten(1)


class KimiDeltaAttention:
    """Kimi delta attention: projection, convolution, recurrence, gated norm and projection of one layer."""

    def __init__(self, parts: TorchParts, shape: KimiDelta, place: int, key: str) -> None:
        self.place, self.shape, self.eps = place, shape, parts.eps
        self.inner = parts.linear(f"{key}.inner")  # E -> 3I: q, k and v
        self.gates = parts.plain_linear(f"{key}.gates")  # E -> H
        self.conv = parts.conv(key)  # [K, 3I] float32
        self.decay_down = parts.plain_linear(f"{key}.decay_down")  # E -> N
        self.decay_up = parts.plain_linear(f"{key}.decay_up")  # N -> I
        self.decay = parts.decay(key)  # [H] float32, -exp(A_log)
        self.step_bias = parts.needed(f"{key}.step_bias")  # [I] float32
        self.shares_down = parts.linear(f"{key}.shares_down")  # E -> N
        self.shares_up = parts.linear(f"{key}.shares_up")  # N -> I
        self.norm = parts.needed(f"{key}.gated_norm")  # [N]
        self.out = parts.linear(f"{key}.out")  # I -> E

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. Changes: the states of the step's sequences."""
        slots, (conv, matrix) = step.state(self.place)
        inner, gates = self.inner(x), self.gates(x)
        steps, shares = self.decay_up(self.decay_down(x)), self.shares_up(self.shares_down(x))
        if (fused := triton_kernels(x)) is None:
            return self.out(self._mixed(inner, gates, steps, shares, conv, matrix, slots))
        mixed = fused.causal_conv(inner, self.conv, None, conv, slots, heads=self.shape)
        arguments = mixed, gates, self.decay, self.step_bias, matrix, slots, self.shape
        return self.out(fused.recurrence(*arguments, z=shares, norm=(self.norm, self.eps), steps=steps))

    def _mixed(
        self,
        inner: Tensor,
        gates: Tensor,
        steps: Tensor,
        shares: Tensor,
        conv: Tensor,
        matrix: Tensor,
        slots: StateStep,
    ) -> Tensor:
        """The result [T, I] before the last projection, in torch."""
        size = self.shape.key_dim
        mixed = causal_conv(inner, self.conv, None, conv, slots, silu=True)
        q, k, v = (_heads(part, size) for part in mixed.chunk(3, dim=1))
        rates = _heads(F.softplus(steps.float() + self.step_bias), size)
        decay, beta = (self.decay[:, None] * rates).exp(), gates.sigmoid().float()
        o = recurrence(l2_norm(q) * size**-0.5, l2_norm(k), v.float(), decay, beta, matrix, slots).to(inner.dtype)
        return norm_then_share(o, self.norm, _heads(shares, size), self.eps).flatten(1)


class MambaMixer:
    """Mamba-2: projection, convolution, scan, gated norm and projection of one layer."""

    def __init__(self, parts: TorchParts, shape: Mamba2, place: int, key: str) -> None:
        self.place, self.shape, self.eps = place, shape, parts.eps
        self.inner = parts.linear(f"{key}.inner")  # E -> I + C + H: the gate, then x, B and C, then the steps
        self.conv = parts.conv(key)  # [K, C] float32
        self.conv_bias = parts.small(f"{key}.conv_bias")  # [C] float32, or None
        self.decay = parts.decay(key)  # [H] float32, -exp(A_log)
        self.step_bias = parts.needed(f"{key}.step_bias")  # [H] float32
        self.skip = parts.needed(f"{key}.skip")  # [H] float32
        self.norm = parts.small(f"{key}.gated_norm")  # [I], or None
        self.out = parts.linear(f"{key}.out")  # I -> E

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. Changes: the states of the step's sequences."""
        shape, (slots, (conv, matrix)) = self.shape, step.state(self.place)
        parts = torch.split(self.inner(x), [shape.inner, shape.channels, shape.num_heads], dim=1)
        if (fused := triton_kernels(x)) is None:
            return self.out(self._mixed(parts, conv, matrix, slots))
        gate, mixed, sizes = parts
        mixed = fused.causal_conv(mixed, self.conv, self.conv_bias, conv, slots, heads=self.shape)
        arguments = mixed, sizes, self.decay, self.step_bias, matrix, slots, self.shape
        y = fused.recurrence(*arguments, skip=self.skip)
        return self.out(fused.gate_then_norm(y, self.norm, gate, shape.gate_group, self.eps))

    def _mixed(self, parts: Sequence[Tensor], conv: Tensor, matrix: Tensor, slots: StateStep) -> Tensor:
        """The result [T, I] before the last projection, in torch."""
        shape, (gate, mixed, raw) = self.shape, parts
        mixed = causal_conv(mixed, self.conv, self.conv_bias, conv, slots, silu=True).float()
        groups = shape.num_key_heads * shape.key_dim
        values, b, c = torch.split(mixed, [shape.inner, groups, groups], dim=1)
        repeats = shape.num_heads // shape.num_key_heads
        b, c = (_heads(y, shape.key_dim).repeat_interleave(repeats, dim=1) for y in (b, c))
        size = F.softplus(raw.float() + self.step_bias).clamp(*shape.limits)
        heads = _heads(values, shape.value_dim)
        y = recurrence(c, b, heads * size[..., None], (self.decay * size).exp()[..., None], None, matrix, slots)
        y += self.skip[:, None] * heads
        return gate_then_norm(y.flatten(1), self.norm, gate, shape.gate_group, self.eps)


class ShortConvolution:
    """A convolution between two gates: out(c * conv(b * x))."""

    def __init__(self, parts: TorchParts, shape: ShortConv, place: int, key: str) -> None:
        self.place = place
        self.inner = parts.linear(f"{key}.inner")  # E -> 3E: b, c and x
        self.conv = parts.conv(key)  # [K, E] float32
        self.conv_bias = parts.small(f"{key}.conv_bias")  # [E] float32, or None
        self.out = parts.linear(f"{key}.out")  # E -> E

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. Changes: the states of the step's sequences."""
        slots, (pool,) = step.state(self.place)
        inner = self.inner(x)
        if (fused := triton_kernels(x)) is not None:
            return self.out(fused.causal_conv(inner, self.conv, self.conv_bias, pool, slots))
        b, c, values = inner.chunk(3, dim=1)
        return self.out(c * causal_conv(b * values, self.conv, self.conv_bias, pool, slots, silu=False))


def _heads(x: Tensor, size: int) -> Tensor:
    return x.reshape(x.shape[0], -1, size)


def interleaved_columns(shape: GatedDelta, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the columns of q, k, v, z and of b, a lie in projections that list them key head by key head."""
    heads, repeats = shape.num_key_heads, shape.num_heads // shape.num_key_heads

    def flat(*sizes: int) -> Tensor:
        parts = torch.split(torch.arange(heads * sum(sizes), device=device).view(heads, -1), list(sizes), dim=1)
        return torch.cat([part.flatten() for part in parts])

    values = repeats * shape.value_dim
    return flat(shape.key_dim, shape.key_dim, values, values), flat(repeats, repeats)


# The body of each kind of mixer: from the parts of its layer, the mixer, its place among those with a state, its key.
BODIES: dict[type[RecurrentMixer], Callable[[TorchParts, Any, int, str], Callable[[Tensor, ForwardStep], Tensor]]] = {
    GatedDelta: GatedDeltaNet,
    KimiDelta: KimiDeltaAttention,
    Mamba2: MambaMixer,
    ShortConv: ShortConvolution,
}
