"""The parts of a decoder layer: callables that take the normed residual and return what is added to it.

Plain tensors in slotted classes: a layer of a small model takes a few microseconds in a decode step, and nn.Module
would double that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from pagedcli.attention.base import AttentionBackend
from pagedcli.layers.experts import route
from pagedcli.layers.fused import fused_layers
from pagedcli.layers.norm import add_rms_norm, rms_norm
from pagedcli.layers.parallel import ParallelContext
from pagedcli.layers.rotary import rotary_rows, split_heads
from pagedcli.models.layer_step import LayerStep


@dataclass(slots=True)
class Step:
    """The arguments of one forward that the layers share."""

    positions: Tensor  # [T] int64
    layers: list[LayerStep]
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by the id of a rotary table

    def angles_of(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """rotary_rows of a table, once per step for all layers that use it."""
        if id(table) not in self.angles:
            self.angles[id(table)] = rotary_rows(table, self.positions)
        return self.angles[id(table)]


@dataclass(slots=True)
class Branch:
    """One addition to the residual stream: a body with a norm before or after it, or both."""

    norm: Tensor | None  # [E]
    body: Callable[[Tensor, Step], Tensor]
    norm_after: Tensor | None  # [E]
    multiplier: float
    eps: float

    def __call__(self, hidden: Tensor | None, residual: Tensor, step: Step) -> Tensor:
        """What the next branch adds to the residual. Changes: residual, to which `hidden` is added."""
        out = self.body(add_and_norm(hidden, residual, self.norm, self.eps), step)
        if self.norm_after is not None:
            out = rms_norm(out, self.norm_after, self.eps)
        return out if self.multiplier == 1 else out.mul_(self.multiplier)


@dataclass(slots=True)
class DecoderLayer:
    """One layer of the model."""

    attention: Branch
    mlp: Branch


@dataclass(slots=True)
class Attention:
    """Projection, rotary embedding, cache, attention and projection of one layer."""

    index: int  # of the layer
    backend: AttentionBackend
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    qkv: Callable[[Tensor], Tensor]  # E -> (H + 2G) * D
    norm: tuple[Tensor, float] | None  # of each head of q and k: weight [H + G, D] and eps
    wide_norm: tuple[Tensor, Tensor, float] | None  # of all of q and all of k: weights [H * D], [G * D] and eps
    table: Tensor | None  # [P, R] of models.rope_table; None: no rotary embedding
    out: Callable[[Tensor], Tensor]  # H * D -> E
    fused_store: bool  # the backend's cache is filled in one pass with the rotation

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. Changes: the layer's cache."""
        layer = step.layers[self.index]
        if self.fused_store:
            q = self._rotate_and_store(self.qkv(x), step, layer)
        else:
            q, k, v = self._heads(self.qkv(x), step)
            layer.write(self.backend, k, v)
        return self.out(layer.attend(self.backend, q).flatten(1))

    def _heads(self, qkv: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        if self.wide_norm is not None:
            q_weight, k_weight, eps = self.wide_norm
            q_end, k_end = q_weight.shape[0], q_weight.shape[0] + k_weight.shape[0]
            qkv[:, :q_end] = rms_norm(qkv[:, :q_end], q_weight, eps)
            qkv[:, q_end:k_end] = rms_norm(qkv[:, q_end:k_end], k_weight, eps)
        angles = None if self.table is None else step.angles_of(self.table)
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        return split_heads(qkv, *sizes, norm=self.norm, angles=angles)

    def _rotate_and_store(self, qkv: Tensor, step: Step, layer: LayerStep) -> Tensor:
        q: Tensor = fused_layers().rotate_and_store(
            qkv,
            self.num_heads,
            self.num_kv_heads,
            norm=self.norm,
            table=self.table,
            positions=step.positions,
            slots=layer.batch.slots,
            k_cache=layer.k_cache,
            v_cache=layer.v_cache,
            kv_scales=(layer.layer.k_scale, layer.layer.v_scale),
        )
        return q


@dataclass(slots=True)
class GatedMlp:
    """down(activation(gate) * up)."""

    gate_up: Callable[[Tensor], Tensor]  # E -> 2I, gate first
    activation: Callable[[Tensor], Tensor] | None  # of layers.mlp: [T, 2I] -> [T, I]; None: gate_up applies it
    down: Callable[[Tensor], Tensor]  # I -> E

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        inner = self.gate_up(x)
        return self.down(inner if self.activation is None else self.activation(inner))


@dataclass(slots=True)
class Mlp:
    """A gated MLP as the body of a branch."""

    mlp: GatedMlp

    def __call__(self, x: Tensor, _step: Step) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.mlp(x)


@dataclass(slots=True)
class Experts:
    """A mixture of gated MLPs, with or without a shared one for every token."""

    router: Callable[[Tensor], Tensor]  # E -> X
    mixture: Callable[[Tensor, Tensor, Tensor], Tensor]  # arguments and result of layers.experts.weighted_sum
    num_per_token: int
    renormalize: bool
    shared: GatedMlp | None
    shared_gate: Callable[[Tensor], Tensor] | None  # E -> 1
    parallel: ParallelContext  # each rank holds a part of every expert

    def __call__(self, x: Tensor, _step: Step) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        weights, chosen = route(self.router(x), self.num_per_token, renormalize=self.renormalize)
        out = self.mixture(x, weights, chosen)
        if self.shared is not None and self.shared_gate is not None:
            out += self.shared_gate(x).sigmoid() * self.shared(x)
        return self.parallel.all_reduce(out)


def add_and_norm(hidden: Tensor | None, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm of residual + hidden; without a weight, the sum. Changes: residual, which becomes the sum."""
    if weight is None:
        return residual if hidden is None else residual.add_(hidden)
    return rms_norm(residual, weight, eps) if hidden is None else add_rms_norm(hidden, residual, weight, eps)
