"""The layers of a dense decoder for steps of few tokens on a GPU, in five kernels each.

Used by models.decoder where the configuration asks for fused kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedcli import layers
from pagedcli.attention.base import PagedBatch
from pagedcli.models.base import DecoderRequest
from pagedcli.models.blocks import AttentionBody, ForwardStep, Join, MlpBody, ResidualBranch
from pagedcli.models.mlps import Experts, Mlp
from pagedcli.models.spec import ModelSpec

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: AttentionBody
    qkv: "layers.triton_stream.Product"
    out: "layers.triton_stream.Product"
    gate_up: "layers.triton_stream.Product"
    down: "layers.triton_stream.Product"


class Stream:
    """All layers of a decoder."""

    def __init__(self, found: Sequence["_Found"], device: torch.device) -> None:
        """`found`: what stream_of found of each layer."""
        kernels = layers.triton_stream
        make = partial(kernels.Product, scratch=kernels.Scratch(device))
        self._layers: list[_Layer] = []
        for each in found:
            attention = each.attention
            heads: dict[str, Any] = {"H": attention.num_heads, "G": attention.num_kv_heads, "D": attention.head_dim}
            heads |= {"ROTATED": 0 if attention.table is None else attention.table.shape[1]}
            heads |= {"INTERLEAVED": attention.interleaved, "SCALED": attention.query_scales is not None}
            heads |= {"NORM_HEADS": attention.norm is not None}
            qkv, out, gate_up, down = each.weights
            before, between = each.norms
            self._layers.append(
                _Layer(
                    attention,
                    make(*qkv, finish="heads", norm=before, **heads),
                    make(*out, finish="add"),
                    make(*gate_up, finish="gated", norm=between, ACTIVATION=each.activation),
                    make(*down, finish="add"),
                )
            )

    def serves(self, batch: PagedBatch) -> bool:
        """Whether the tokens of a step are few, and run through all layers."""
        return batch.slots.shape[-1] <= layers.triton_stream.ROWS and batch.late is None

    def __call__(self, residual: Tensor, step: ForwardStep) -> None:
        """Shapes: residual [T, E]. Changes: residual, to which all layers are added; the cache."""
        num_tokens = residual.shape[0]
        for layer in self._layers:
            body, of_layer = layer.attention, step.layers[layer.attention.index]
            weight, eps = body.norm if body.norm is not None else (residual, 0.0)
            q = residual.new_empty((num_tokens, body.num_heads, body.head_dim))
            kept = layers.triton_stream.Heads(
                weight,
                residual if body.table is None else body.table,
                residual if body.query_scales is None else body.query_scales,
                step.positions,
                of_layer.slots,
                of_layer.k_cache,
                of_layer.v_cache,
                eps,
                1 / of_layer.layer.k_scale,
                1 / of_layer.layer.v_scale,
            )
            layer.qkv(residual, q, kept)
            layer.out(of_layer.attend(body.backend, q, body.sinks).flatten(1), residual)
            inner = residual.new_empty((num_tokens, layer.gate_up.width))
            layer.down(layer.gate_up(residual, inner), residual)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a layer is made of."""

    attention: AttentionBody
    norms: list[tuple[Tensor, float]]  # before attention and before the MLP
    weights: "list[tuple[layers.triton_products.KernelWeight, Tensor | None]]"  # qkv, out, gate_up, down; biases
    activation: str


def stream_of(
    branches: Sequence[ResidualBranch], last: Join, spec: ModelSpec, request: DecoderRequest
) -> tuple[Stream | None, str]:
    """The layers of a decoder, or why they have no such kernels."""
    if not request.backend.capabilities.fused_store or request.dtype == torch.float16:
        return None, "they need attention backend triton, and no float16"
    if request.parallel.size > 1 or spec.layer_inputs is not None or len(branches) != 2 * spec.num_layers:
        return None, "they need one GPU, and layers of attention and an MLP"
    if any(
        join.norm_added is not None or join.centred or join.multiplier != 1 or join.factor != 1
        for join in (*(branch.join for branch in branches), last)
    ):
        return None, "they need layers whose results are added as they are"
    pairs = zip(branches[::2], branches[1::2], spec.layers, strict=True)
    found = [_found(first, second, layer.mlp) for first, second, layer in pairs]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None, "they need norms, attention without gates, a gated MLP, and weights in the order of their inputs"
    return Stream(known, request.device), ""


def _found(first: ResidualBranch, second: ResidualBranch, mlp: Mlp | Experts | None) -> _Found | None:
    """What a layer is made of; None: of something else."""
    attention, body, norms = first.body, second.body, (first.join.norm, second.join.norm)
    if type(attention) is not AttentionBody or type(body) is not MlpBody or type(mlp) is not Mlp:
        return None
    special = attention.norms_all or attention.value_norm is not None or attention.gate is not None
    if special or not attention.fused_store or not attention.num_kv_heads or attention.head_dim % 2:
        return None
    linears = (attention.qkv, attention.out, body.gate_up, body.down)
    weights = [weight for each in linears if (weight := layers.triton_products.weight_of(each)) is not None]
    known = [(norm, first.join.eps) for norm in norms if norm is not None]
    if len(weights) < len(linears) or len(known) < len(norms) or not mlp.gated or mlp.activation not in _ACTIVATIONS:
        return None
    num_rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return (
        _Found(attention, known, weights, _ACTIVATIONS[mlp.activation]) if weights[0][0].num_out == num_rows else None
    )
