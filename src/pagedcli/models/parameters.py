"""What the decoder's tensors are made of: checkpoint tensors, stacked, and the part of them that a rank keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pagedcli.models.formats import VECTOR, WEIGHT, StoredTensor, WeightFormat
from pagedcli.models.spec import ModelSpec

Init = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one tensor-parallel rank keeps of a checkpoint tensor: `first` ... `end`-1 along `dim`."""

    dim: int
    first: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the tensor."""
        return tensor.narrow(self.dim, self.first, self.end - self.first)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that view."""
        return (*shape[: self.dim], self.end - self.first, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the decoder: checkpoint tensors stacked along their output features (q, k and v make one qkv)."""

    shapes: Mapping[str, tuple[int, ...]]  # name in the checkpoint -> shape there, in stacking order
    init: Init = "normal"  # what `--load-format dummy` fills it with
    parts: Mapping[str, Part] = field(default_factory=dict)  # name -> what of it is kept; the whole if not named
    stored: StoredTensor = WEIGHT  # where features lie in each of the tensors
    dtype: torch.dtype | None = None  # that it is kept in; None: that of the model, or that of `stored`

    @property
    def dim(self) -> int:
        """The dimension along which the tensors are stacked."""
        return self.stored.out_dim or 0

    @property
    def kept_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the checkpoint -> shape of what is kept."""
        return {
            name: self.parts[name].shape_of(shape) if name in self.parts else shape
            for name, shape in self.shapes.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked tensor."""
        shapes, dim = list(self.kept_shapes.values()), self.dim
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def kept(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of a checkpoint tensor."""
        return self.parts[name].of(tensor) if name in self.parts else tensor

    def kept_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype that it is kept in."""
        return self.dtype or self.stored.dtype or model_dtype


def decoder_parameters(spec: ModelSpec, weight_format: WeightFormat) -> dict[str, Parameter]:
    """Every tensor of the decoder and the checkpoint tensors that fill it, under the names transformers gives them."""
    width = spec.hidden_size
    parameters = {
        "embedding": Parameter({"model.embed_tokens.weight": (spec.vocab_size, width)}),
        "final_norm": _norm("model.norm.weight", width),
    }
    if not spec.tie_word_embeddings:
        parameters["lm_head"] = Parameter({"lm_head.weight": (spec.vocab_size, width)})
    for i in range(spec.num_layers):
        key, name = f"layers.{i}", f"model.layers.{i}"
        parameters[f"{key}.input_norm"] = _norm(f"{name}.input_layernorm.weight", width)
        parameters[f"{key}.mlp_norm"] = _norm(f"{name}.post_attention_layernorm.weight", width)
        parameters |= _attention(spec, key, f"{name}.self_attn", weight_format)
        parameters |= _mlp(spec, key, f"{name}.mlp", weight_format)
    return parameters


def _attention(spec: ModelSpec, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {f"{name}.q_proj": q_rows, f"{name}.k_proj": kv_rows, f"{name}.v_proj": kv_rows}
    parameters = dict(_linear(f"{key}.qkv", qkv, spec.hidden_size, spec.qkv_bias, weight_format))
    out = {f"{name}.o_proj": spec.hidden_size}
    parameters |= _linear(f"{key}.out", out, q_rows, spec.attention_out_bias, weight_format)
    if spec.qk_norm:
        norms = {f"{name}.{part}_norm.weight": (spec.head_dim,) for part in ("q", "k")}
        parameters[f"{key}.qk_norm"] = Parameter(norms, init="ones", stored=VECTOR)
    return parameters


def _mlp(spec: ModelSpec, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    inner = spec.intermediate_size
    gate_up = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
    parameters = dict(_linear(f"{key}.gate_up", gate_up, spec.hidden_size, spec.mlp_bias, weight_format))
    down = {f"{name}.down_proj": spec.hidden_size}
    return parameters | dict(_linear(f"{key}.down", down, inner, spec.mlp_bias, weight_format))


def _norm(name: str, width: int) -> Parameter:
    return Parameter({name: (width,)}, init="ones", stored=VECTOR)


def _linear(
    key: str, rows: dict[str, int], columns: int, has_bias: bool, weight_format: WeightFormat
) -> Iterator[tuple[str, Parameter]]:
    """The tensors of a linear layer that stacks the modules `rows`, name -> output features."""
    for stored in weight_format.stored:
        shapes = {f"{name}.{stored.suffix}": stored.shape(n, columns) for name, n in rows.items()}
        yield f"{key}.{stored.suffix}", Parameter(shapes, stored=stored)
    if has_bias:
        yield f"{key}.bias", Parameter({f"{name}.bias": (n,) for name, n in rows.items()}, stored=VECTOR)
