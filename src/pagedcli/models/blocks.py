"""The parts of a decoder in torch: one layer's part of a step, rotary tables, and the callables of a layer, which take
the normed residual and return what is added to it.

Plain tensors in slotted classes: a layer of a small model takes a few microseconds in a decode step, and nn.Module
would double that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcli.attention.base import AttentionBackend, LateTokens, PagedBatch
from pagedcli.attention.layer import AttentionLayer, Heads
from pagedcli.layers.basic import (
    add_rms_norm,
    fused_layers,
    layer_norm,
    norm_all,
    rms_norm,
    rotary_rows,
    rotate_first,
    split_gate,
    split_heads,
)
from pagedcli.layers.parallel import ParallelContext, VocabularyEmbedding
from pagedcli.layers.recurrent import StateStep
from pagedcli.models.mixers.attention import Attention, LatentAttention
from pagedcli.models.parts import TorchParts
from pagedcli.models.spec import layer_groups


@dataclass(slots=True)
class LayerStep:
    """One layer's part of a step."""

    layer: AttentionLayer
    batch: PagedBatch  # the tokens that attend, with the block tables of the layer's group
    slots: Tensor  # [T] int32, see PagedBatch
    k_cache: Tensor  # shape: the backend's kv_shape
    v_cache: Tensor
    late: LateTokens | None = None  # the only tokens that attend, though others have K and V here

    def write(self, backend: AttentionBackend, k: Tensor, v: Tensor) -> None:
        """Store K and V [T, G, D] of the new tokens."""
        backend.write(k, v, (self.k_cache, self.v_cache), self.slots, self.layer)

    def attend(self, backend: AttentionBackend, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attention of the tokens that attend, A of T: q [T, H, D] -> [A, H, D]; sinks [H] or None."""
        q = self.attending(q)
        kv = self.k_cache, self.v_cache
        return backend.attend(q, kv, self.batch, self.layer, sinks) if q.shape[0] else q

    def attending(self, x: Tensor) -> Tensor:
        """Shapes: x [T, ...] -> [A, ...]."""
        return x if self.late is None else x.index_select(0, self.late.tokens)


def layer_steps(
    batch: PagedBatch,
    kv_cache: Tensor,
    backend: AttentionBackend,
    layers: Sequence[AttentionLayer],
    first_late: int | None = None,
) -> list[LayerStep]:
    """A step as each layer sees it, prepared for the backend. Layers from `first_late` on attend for batch.late alone;
    None: all attend for all tokens."""
    steps: dict[int, LayerStep] = {}
    for group, of_group in zip(layer_groups(layers), (batch, *batch.others), strict=True):
        prepared: dict[Heads | None, PagedBatch] = {}
        caches = backend.layer_caches(kv_cache, len(group.layers), group.heads)
        for index, (k_cache, v_cache) in zip(group.layers, caches, strict=True):
            layer = layers[index]
            if layer.heads not in prepared:
                prepared[layer.heads] = replace(of_group, window=group.window)
                backend.of(layer).prepare(prepared[layer.heads])
            steps[index] = LayerStep(layer, prepared[layer.heads], of_group.slots, k_cache, v_cache)
    for index, layer in enumerate(layers):
        if layer.source is not None:
            steps[index] = replace(steps[layer.source], layer=layer)
    if batch.late is not None and first_late is not None:
        _attend_late(steps, batch.late, backend, first_late)
    return [steps[index] for index in range(len(layers))]


def _attend_late(steps: dict[int, LayerStep], late: LateTokens, backend: AttentionBackend, first: int) -> None:
    """Changes: steps from `first` on, which have the batch of the late tokens."""
    narrowed: dict[int, PagedBatch] = {}  # id of a group's batch -> the late tokens' batch
    for index in range(first, len(steps) if late.tokens.shape[0] else first):
        step = steps[index]
        if id(step.batch) not in narrowed:
            narrowed[id(step.batch)] = of_late = step.batch.of_late()
            backend.of(step.layer).prepare(of_late)
        steps[index] = replace(step, batch=narrowed[id(step.batch)])
    if first in steps:
        steps[first].late = late


@dataclass(slots=True)
class ForwardStep:
    """The arguments of one forward that the layers share."""

    positions: Tensor  # [T] int64
    layers: list[LayerStep]  # layers that attend
    state_step: StateStep | None = None  # None: no layer keeps a state
    states: Sequence[Sequence[Tensor]] = ()  # pools of each layer that keeps a state
    layer_inputs: Tensor | None = None  # [T, L, P] of LayerEmbeddings
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # id of a rotary table -> cosines and sines

    def state(self, place: int) -> tuple[StateStep, Sequence[Tensor]]:
        """Where a layer with a state reads and writes, and its pools."""
        assert self.state_step is not None, "the batch says which slots its sequences use"
        return self.state_step, self.states[place]

    def of_late(self, late: LateTokens) -> "ForwardStep":
        """The step of the late tokens alone."""
        inputs = None if self.layer_inputs is None else self.layer_inputs.index_select(0, late.tokens)
        return replace(self, positions=self.positions.index_select(0, late.tokens), layer_inputs=inputs, angles={})

    def angles_of(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """rotary_rows of a table, once per step for all layers that use it."""
        if id(table) not in self.angles:
            self.angles[id(table)] = rotary_rows(table, self.positions)
        return self.angles[id(table)]


@dataclass(slots=True)
class Join:
    """An addition to the residual stream and a norm: between two branches, before the first and after the last."""

    norm_added: Tensor | None  # [E], of what the branch before computed
    norm: Tensor | None  # [E], of the residual
    multiplier: float  # factor of the added tensor
    factor: float  # factor of the sum
    eps: float
    added_eps: float | None  # epsilon of norm_added; None: eps
    centred: bool = False  # `norm` subtracts the mean, too, see layers.basic.layer_norm; norm_added is then None

    def __call__(self, hidden: Tensor | None, residual: Tensor) -> Tensor:
        """The norm of factor * (residual + hidden); without one that sum. Changes: residual, which becomes the sum, and
        hidden."""
        if self.centred and self.norm is not None:
            if hidden is not None:
                add_rms_norm(hidden, residual, None, self.eps, multiplier=self.multiplier, factor=self.factor)
            return layer_norm(residual, self.norm, self.eps)
        if hidden is None:
            return residual if self.norm is None else rms_norm(residual, self.norm, self.eps)
        return add_rms_norm(
            hidden,
            residual,
            self.norm,
            self.eps,
            norm_added=self.norm_added,
            added_eps=self.added_eps,
            multiplier=self.multiplier,
            factor=self.factor,
        )


Body: TypeAlias = Callable[[Tensor, ForwardStep], Tensor]  # the normed residual -> what is added to it


@dataclass(slots=True)
class ResidualBranch:
    """A body that computes what is added to the residual stream next."""

    join: Join  # the addition and the norm before it
    body: Body

    def __call__(self, hidden: Tensor | None, residual: Tensor, step: ForwardStep) -> Tensor:
        """What the next branch adds to the residual. Changes: see Join."""
        return self.body(self.join(hidden, residual), step)


class AttentionBody:
    """Projection, rotary embedding, cache, attention and projection of one layer."""

    def __init__(self, parts: TorchParts, mixer: Attention, place: int, key: str) -> None:
        """`place`: of the layer among those that attend."""
        self.index, self.backend, rope = place, parts.backend_of(place), mixer.rope
        self.num_heads, self.head_dim = mixer.num_heads, mixer.head_dim  # H, D
        self.num_kv_heads = mixer.num_kv_heads if mixer.keeps else 0  # G; 0: it has those of an earlier layer
        self.qkv = parts.linear(f"{key}.qkv")  # E -> (H + 2G) * D; (H + G) * D where K is V
        self.norm = parts.qk_norm(mixer, key)  # norm of q and k: weight [H + G, D] and eps, or None
        self.eps = parts.eps
        # norm of V, or of K as V before it is normed: weight [D] float32
        self.value_norm = torch.ones(mixer.head_dim, device=parts.device) if mixer.value_norm else None
        self.norms_all, self.norms_last = mixer.qk_norm == "all", mixer.norms_last
        self.table = None if rope is None else parts.table(rope, mixer.head_dim)  # [P, R] of rope_table
        self.interleaved = rope is not None and rope.interleaved  # see layers.basic.split_heads
        self.query_scales = None if rope is None else parts.query_scales(rope)  # [P], or None: all are 1
        self.out = parts.summed_linear(f"{key}.out")  # H * D -> E
        # whether the backend's cache is filled in one pass with the rotation
        self.fused_store = parts.fused_store and not mixer.norms_last
        self.sinks = parts.small(f"{key}.sinks")  # [H] float32, or None
        self.gate, self.num_gates = mixer.output_gate, mixer.num_gates

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [A, E] of the tokens that attend, see LayerStep. Changes: the layer's cache."""
        layer, qkv, gate = step.layers[self.index], self.qkv(x), None
        if self.gate is not None and self.gate.module is None:
            qkv, gate = split_gate(qkv, self.num_heads, self.head_dim)
        elif self.gate is not None:  # qkv lists the gates last
            qkv, gate = (part.contiguous() for part in qkv.tensor_split([qkv.shape[1] - self.num_gates], dim=1))
        q = (self._rotate_and_store if self.fused_store else self._write)(qkv, step, layer)
        out = layer.attend(self.backend, q, self.sinks).flatten(1)
        if gate is not None:
            gate, softplus = layer.attending(gate), self.gate is not None and self.gate.softplus
            shares = F.softplus(gate.float()).to(gate.dtype) if softplus else gate.sigmoid()
            out.view(*shares.shape, out.shape[1] // shares.shape[1]).mul_(shares[..., None])
        return self.out(out) if out.shape[0] else x[:0]

    def _write(self, qkv: Tensor, step: ForwardStep, layer: LayerStep) -> Tensor:
        sizes, norm = (self.num_heads, self.num_kv_heads), self.norm
        if norm is not None and self.norms_all:
            norm_all(qkv, *sizes, *norm)
            norm = None
        angles = None if self.table is None else step.angles_of(self.table)
        q, k, v = split_heads(
            qkv,
            *sizes,
            self.head_dim,
            norm=norm,
            angles=angles,
            interleaved=self.interleaved,
            norms_last=self.norms_last,
        )
        if self.query_scales is not None:
            q *= self.query_scales.index_select(0, step.positions)[:, None, None]
        if self.num_kv_heads:
            layer.write(self.backend, k, v if self.value_norm is None else rms_norm(v, self.value_norm, self.eps))
        return q

    def _rotate_and_store(self, qkv: Tensor, step: ForwardStep, layer: LayerStep) -> Tensor:
        q: Tensor = fused_layers().rotate_and_store(
            qkv,
            self.num_heads,
            self.num_kv_heads,
            slots=layer.slots,
            k_cache=layer.k_cache,
            v_cache=layer.v_cache,
            kv_scales=(layer.layer.k_scale, layer.layer.v_scale),
            norm=self.norm,
            norms_all=self.norms_all,
            norms_values=self.value_norm is not None,
            table=self.table,
            interleaved=self.interleaved,
            query_scales=self.query_scales,
            positions=step.positions,
        )
        return q


NORM_EPS = 1e-6  # norms of latents and query vectors; config.json's is for the others


class LatentAttentionBody:
    """Projections, latents, cache, attention and projection of one layer. See models.mixers.attention."""

    def __init__(self, parts: TorchParts, mixer: LatentAttention, place: int, key: str) -> None:
        """`place`: of the layer among those that attend."""
        self.index, self.backend, self.mixer, rope = place, parts.backend_of(place), mixer, mixer.rope
        self.projected = parts.linear(f"{key}.latents")  # E -> queries or what they are made of, latent, rotary key
        self.query_norm = parts.norm(f"{key}.query_norm")
        # None: `projected` has them
        self.queries = None if mixer.query_rank is None else parts.linear(f"{key}.queries")
        latent_norm = parts.norm(f"{key}.latent_norm")
        assert latent_norm is not None, "every such layer norms its latents"
        self.latent_norm = latent_norm
        self.table = None if rope is None else parts.table(rope, mixer.rope_dim)  # [P, R] of rope_table
        # [T, H, nope_dim] -> [T, H, rank], and [A, H, rank] -> [A, H, value_dim]
        self.key_up, self.value_up = map(parts.head_linear, parts.latents_up(mixer, key))
        self.out = parts.summed_linear(f"{key}.out")

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [A, E] of the tokens that attend, see LayerStep. Changes: the layer's cache."""
        mixer, layer, projected = self.mixer, step.layers[self.index], self.projected(x)
        given, latent = projected.tensor_split([projected.shape[1] - mixer.head_dim], dim=1)
        if self.queries is not None and self.query_norm is not None:
            given = self.queries(rms_norm(given, self.query_norm, NORM_EPS))
        latent, key = latent.tensor_split([mixer.rank], dim=1)
        key = self._rotated(key[:, None], step)
        kept = torch.cat((rms_norm(latent, self.latent_norm, NORM_EPS)[:, None], key), dim=-1)
        layer.write(self.backend, kept, kept)
        heads = given.view(len(given), mixer.num_heads, -1)
        nope, rope = heads.tensor_split([mixer.nope_dim], dim=2)
        absorbed = torch.cat((self.key_up(nope), self._rotated(rope, step)), dim=-1)
        out = layer.attend(self.backend, absorbed)
        return self.out(self.value_up(out).flatten(1)) if out.shape[0] else x[:0]

    def _rotated(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, heads, R]."""
        rope = self.mixer.rope
        if rope is None or self.table is None:
            return x
        return rotate_first(x, *step.angles_of(self.table), interleaved=rope.interleaved)


@dataclass(slots=True)
class LayerEmbeddings:
    """What each layer gets for a token: a row of a table, and a projection of the token's embedding."""

    table: VocabularyEmbedding  # [V, L * P]
    projection: Callable[[Tensor], Tensor]  # E -> L * P
    norm: Tensor  # [P]
    eps: float

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: input_ids [T]; embedded [T, E] -> [T, L, P]."""
        size = self.norm.shape[0]
        rows = self.table(input_ids) * torch.tensor(size**0.5, dtype=embedded.dtype)
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        projected = rms_norm(projected.view(projected.shape[0], -1, size), self.norm, self.eps)
        return (projected + rows.view(projected.shape)) * 2**-0.5


@dataclass(slots=True)
class LayerInput:
    """What a layer adds to the residual for its input, gated by the residual; the body of a branch without a norm."""

    index: int
    gate: Callable[[Tensor], Tensor]  # E -> P
    activation: Callable[[Tensor, Tensor], Tensor]  # a function of layers.basic
    out: Callable[[Tensor], Tensor]  # P -> E

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        assert step.layer_inputs is not None, "the decoder computes them first"
        return self.out(self.activation(self.gate(x), step.layer_inputs[:, self.index]))


@dataclass(slots=True)
class MlpBody:
    """down(activation(gate) * up), or down(activation(up)) of a model without gates."""

    gate_up: Callable[[Tensor], Tensor]  # E -> 2I, gate first; without gates E -> I
    activation: Callable[[Tensor], Tensor] | None  # [T, 2I or I] -> [T, I], see layers.basic; None: gate_up applies it
    down: Callable[[Tensor], Tensor]  # I -> E

    def __call__(self, x: Tensor, _step: ForwardStep | None = None) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        inner = self.gate_up(x)
        return self.down(inner if self.activation is None else self.activation(inner))


@dataclass(slots=True)
class BesideState:
    """Attention and a layer with a state of the same normed residual."""

    index: int  # its place among the layers that attend
    attention: Body
    state: Body

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [A, E], as of AttentionBody. Changes: the layer's cache, the states of the sequences."""
        mixed = step.layers[self.index].attending(self.state(x, step))
        return self.attention(x, step).add_(mixed)


@dataclass(slots=True)
class BesideMlp:
    """Attention and an MLP of the same normed residual."""

    index: int  # its place among the layers that attend
    attention: Body
    mlp: Body

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [A, E], as of AttentionBody. Changes: the layer's cache."""
        out = self.attention(x, step)
        if not out.shape[0]:
            return out
        return out.add_(self.mlp(step.layers[self.index].attending(x), step))


@dataclass(slots=True)
class ExpertsBody:
    """A mixture of gated MLPs, with or without a shared one for every token."""

    router: Callable[[Tensor], Tensor]  # E -> X
    mixture: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # see layers.basic.ExpertLoop
    shared: MlpBody | None
    shared_gate: Callable[[Tensor], Tensor] | None  # E -> 1; None: the shared one counts in full
    parallel: ParallelContext  # each rank holds a part of every expert

    def __call__(self, x: Tensor, _step: ForwardStep, *, routed: Tensor | None = None) -> Tensor:
        """Shapes: x [T, E] -> [T, E]. `routed`: what the router sees; by default x."""
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        logits = self.router(x if routed is None else routed)
        return self.parallel.all_reduce(self.mixture(x, logits, shared, gate))


@dataclass(slots=True)
class ExpertsBesideMlp:
    """An MLP and a mixture of experts, each with norms of its own around it; the body of a branch without a norm."""

    mlp: MlpBody
    mlp_norms: tuple[Tensor, Tensor]  # [E] each, before and after
    experts: ExpertsBody
    experts_norms: tuple[Tensor, Tensor]
    router_norm: Tensor  # [E]
    eps: float

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        (before, after), (experts_before, experts_after) = self.mlp_norms, self.experts_norms
        out = rms_norm(self.mlp(rms_norm(x, before, self.eps)), after, self.eps)
        routed = rms_norm(x, self.router_norm, self.eps)
        mixed = self.experts(rms_norm(x, experts_before, self.eps), step, routed=routed)
        return add_rms_norm(mixed, out, None, self.eps, norm_added=experts_after)
