"""The decoder's tensors: stacked checkpoint tensors, or a rank's part of them. Free of torch: dtypes are names."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedcli.errors import ModelError
from pagedcli.models.formats import VECTOR, WEIGHT, Init, LayerFormat, MixedLayer, Modules, StoredTensor, WeightFormat
from pagedcli.models.recurrent_spec import GatedDelta, Mamba2, ShortConv
from pagedcli.models.spec import ExpertsSpec, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor-parallel rank's part of a checkpoint tensor: `first` ... `end`-1 along `dim`."""

    dim: int
    first: int
    end: int

    def of(self, tensor: "Tensor") -> "Tensor":
        """A view of the tensor."""
        return tensor.narrow(self.dim, self.first, self.end - self.first)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of that view."""
        return (*shape[: self.dim], self.end - self.first, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the decoder: checkpoint tensors stacked along their output features (q, k and v make one qkv)."""

    shapes: Mapping[str, tuple[int, ...]]  # name in the checkpoint -> shape there, in stacking order
    init: Init | None = None  # its content with `--load-format dummy`; None: what `stored` says
    parts: Mapping[str, Part] = field(default_factory=dict)  # name -> this rank's part; all of it if not named
    stored: StoredTensor = WEIGHT  # its feature dimensions
    dtype: str | None = None  # in memory; None: the model's, or that of `stored`
    layer_format: LayerFormat | None = None  # of the linear layer that it is part of

    @property
    def dim(self) -> int:
        """The dimension along which the tensors are stacked."""
        return self.stored.out_dim or 0

    @property
    def kept_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the checkpoint -> shape of the part that is kept."""
        return {
            name: self.parts[name].shape_of(shape) if name in self.parts else shape
            for name, shape in self.shapes.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stacked tensor."""
        shapes, dim = list(self.kept_shapes.values()), self.dim
        if len(shapes) == 1:
            return shapes[0]
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def kept(self, name: str, tensor: "Tensor") -> "Tensor":
        """The part of a checkpoint tensor that is kept."""
        return self.parts[name].of(tensor) if name in self.parts else tensor

    def kept_dtype(self, model_dtype: str) -> str | None:
        """Its dtype in memory; None: that of the checkpoint."""
        return self.dtype or self.stored.dtype or (model_dtype if self.stored.converts else None)


# norms of the branches: key -> name in the checkpoint
_NORMS = {
    "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"input_norm_after": "post_attention_layernorm", "mlp_norm_after": "post_feedforward_layernorm"},
    "around": {
        "input_norm": "input_layernorm",
        "input_norm_after": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_norm_after": "post_feedforward_layernorm",
    },
    "shared": {"input_norm": "input_layernorm"},
}
_NORMS_BESIDE_MLP = {  # of experts that stand beside an MLP, and after that MLP
    "dense_norm_after": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_norm_after": "post_feedforward_layernorm_2",
}


def decoder_parameters(
    spec: ModelSpec, weight_format: WeightFormat, *, layers: Iterable[int] | None = None, num_experts: int | None = None
) -> dict[str, Parameter]:
    """Every tensor of the decoder and the checkpoint tensors that fill it, under the names transformers gives them.
    `layers`: of these layers only, `num_experts`: of so many experts of each only, where one stands for all."""
    names, (head, *_) = spec.names, weight_format.lm_head.stored
    parameters = {
        "embedding": _table(
            f"{names.body}.{names.embedding}.weight", spec, head if spec.tie_word_embeddings else WEIGHT
        ),
        **_layer_norm(spec, "final_norm", f"{names.body}.{names.final_norm}"),
    }
    if not spec.tie_word_embeddings:
        parameters["lm_head"] = _table("lm_head.weight", spec, head)
    parameters |= _layer_inputs(spec)
    for i in range(spec.num_layers) if layers is None else layers:
        mixer, mlp = names.branches[i] if names.branches else (i, i)
        key, name, mlp_name = f"layers.{i}", f"{names.body}.layers.{mixer}", f"{names.body}.layers.{mlp}"
        norms = _NORMS[spec.layer_norms]
        if names.branch_norms is not None:
            norms = dict(zip(norms, names.branch_norms, strict=True))
        for norm, stored in norms.items():
            of_mlp = norm.startswith("mlp")
            if spec.has_mlp(i) or not of_mlp:
                parameters |= _layer_norm(spec, f"{key}.{norm}", f"{mlp_name if of_mlp else name}.{stored}")
        if spec.layer_kinds and spec.layer_kinds[i] == "recurrent":
            parameters |= _recurrent(spec, key, f"{name}.{names.recurrent}", weight_format)
        else:
            parameters |= _attention(spec, i, key, f"{name}.{names.attention}", weight_format)
        if spec.layer_inputs is not None:
            parameters |= _layer_input(spec, spec.layer_inputs, key, name)
        if spec.layer_scalars:
            parameters[f"{key}.scalar"] = _exact({f"{name}.layer_scalar": (1,)}, init=1.0)
        if mlp is None:
            continue
        if spec.experts is None or spec.experts.beside_mlp or i in spec.experts.dense_layers:
            sizes = spec.width_of(i), weight_format, names.projections, spec.mlp_bias
            parameters |= _mlp(spec, key, f"{mlp_name}.{names.mlp}", *sizes)
        if spec.experts is not None and i not in spec.experts.dense_layers:
            count = spec.experts.num_experts if num_experts is None else num_experts
            parameters |= _experts(spec, spec.experts, count, key, mlp_name, weight_format)
    return parameters


def unread_tensors(spec: ModelSpec, weight_format: WeightFormat) -> frozenset[str]:
    """Checkpoint tensors that may be there and are not needed."""
    names = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    for i in range(spec.num_layers):
        if not spec.keeps(i):
            own = f"{spec.names.body}.layers.{i}.self_attn"
            names |= {f"{own}.k_norm.weight", f"{own}.v_norm.weight"}
            for module in (f"{own}.k_proj", f"{own}.v_proj"):
                names |= {f"{module}.{stored.suffix}" for stored in weight_format.of(module).stored}
    return frozenset(names)


def _layer_inputs(spec: ModelSpec) -> dict[str, Parameter]:
    """What gives each layer its inputs: a second embedding table, and a projection of the first one's rows."""
    if spec.layer_inputs is None:
        return {}
    body, width = spec.names.body, spec.num_layers * spec.layer_inputs
    return {
        "layer_table": Parameter({f"{body}.embed_tokens_per_layer.weight": (spec.layer_vocab, width)}),
        "layer_projection": Parameter({f"{body}.per_layer_model_projection.weight": (width, spec.hidden_size)}),
        "layer_projection_norm": _norm(spec, {f"{body}.per_layer_projection_norm.weight": spec.layer_inputs}),
    }


def _layer_input(spec: ModelSpec, size: int, key: str, name: str) -> dict[str, Parameter]:
    """What adds a layer's input to the residual: as exact as a router, it is never rounded."""
    width = spec.hidden_size
    return {
        f"{key}.input_gate": Parameter({f"{name}.per_layer_input_gate.weight": (size, width)}),
        f"{key}.input_out": Parameter({f"{name}.per_layer_projection.weight": (width, size)}),
        f"{key}.layer_input_after": _norm(spec, {f"{name}.post_per_layer_input_norm.weight": width}),
    }


def _attention(spec: ModelSpec, index: int, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    (num_kv_heads, head_dim), keeps = spec.heads_of(index), spec.keeps(index)
    q_rows, kv_rows = spec.num_heads * head_dim, num_kv_heads * head_dim
    gate_rows = q_rows if spec.output_gate else 0  # of each head after those of its query
    qkv = {f"{name}.q_proj": q_rows + gate_rows}
    if keeps:
        values = () if index in spec.keys_as_values else ("v_proj",)
        qkv |= {f"{name}.{projection}": kv_rows for projection in ("k_proj", *values)}
    if spec.fused_projections:
        qkv = {f"{name}.qkv_proj": q_rows + 2 * kv_rows}
    parameters = dict(_linear(f"{key}.qkv", qkv, spec.hidden_size, spec.qkv_bias, weight_format))
    out = {f"{name}.{spec.names.attention_out}": spec.hidden_size}
    parameters |= _linear(f"{key}.out", out, q_rows, spec.attention_out_bias, weight_format)
    if spec.sinks:
        parameters[f"{key}.sinks"] = _exact({f"{name}.sinks": (spec.num_heads,)})
    if spec.qk_norm:
        norms = spec.names.head_norms if keeps else spec.names.head_norms[:1]
        sizes = {f"{name}.{norm}.weight": head_dim for norm in norms}
        parameters[f"{key}.qk_norm"] = _norm(spec, sizes)
    if spec.qk_norm_all:
        parameters[f"{key}.q_norm"] = _norm(spec, {f"{name}.q_norm.weight": q_rows})
        parameters[f"{key}.k_norm"] = _norm(spec, {f"{name}.k_norm.weight": kv_rows})
    return parameters


def _mlp(
    spec: ModelSpec,
    key: str,
    name: str,
    inner: int,
    weight_format: WeightFormat,
    projections: tuple[str, ...],
    has_bias: bool,
) -> dict[str, Parameter]:
    *gate_up_names, down = projections
    gate_up = {f"{name}.{each}": 2 * inner // len(gate_up_names) for each in gate_up_names}
    if spec.fused_projections:
        gate_up = {f"{name}.gate_up_proj": 2 * inner}
    if not spec.gated_mlp:
        gate_up = dict.fromkeys(gate_up, inner)
    parameters = dict(_linear(f"{key}.{mlp_input(spec)}", gate_up, spec.hidden_size, has_bias, weight_format))
    rows = {f"{name}.{down}": spec.hidden_size}
    return parameters | dict(_linear(f"{key}.down", rows, inner, has_bias, weight_format))


def mlp_input(spec: ModelSpec) -> str:
    """What the first linear layer of an MLP is called."""
    return "gate_up" if spec.gated_mlp else "up"


def _experts(
    spec: ModelSpec, experts: ExpertsSpec, count: int, key: str, name: str, weight_format: WeightFormat
) -> dict[str, Parameter]:
    names, width = experts.names, spec.hidden_size
    block = f"{name}.{names.block}" if names.block else name
    router = f"{block}.{names.router}"
    parameters = {f"{key}.router": Parameter({f"{router}.weight": (experts.num_experts, width)})}
    if experts.has_biases:
        parameters[f"{key}.router.bias"] = Parameter({f"{router}.bias": (experts.num_experts,)}, stored=VECTOR)
    if experts.prefers:
        preference = f"{block}.{names.preference}"
        parameters[f"{key}.preference"] = _exact({preference: (experts.num_experts,)}, init=0.0)
    if experts.beside_mlp:
        parameters[f"{key}.router_norm"] = _exact({f"{name}.router.scale": (width,)}, init=1.0)
        parameters[f"{key}.gains"] = _exact({f"{name}.router.per_expert_scale": (experts.num_experts,)}, init=1.0)
        for norm, stored in _NORMS_BESIDE_MLP.items():
            parameters[f"{key}.{norm}"] = _norm(spec, {f"{name}.{stored}.weight": width})
    for i in range(count):
        sizes = experts.intermediate_size, weight_format, names.projections, experts.has_biases
        parameters |= _mlp(spec, f"{key}.experts.{i}", f"{block}.experts.{i}", *sizes)
    if experts.shared_intermediate_size is not None:
        sizes = experts.shared_intermediate_size, weight_format, names.shared_projections, spec.mlp_bias
        parameters |= _mlp(spec, f"{key}.shared_expert", f"{name}.{names.shared}", *sizes)
        if experts.gates_shared:
            parameters[f"{key}.shared_gate"] = Parameter({f"{name}.{names.shared}_gate.weight": (1, width)})
    return parameters


def _recurrent(spec: ModelSpec, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    match spec.recurrent:
        case GatedDelta() as delta:
            return _gated_delta(delta, spec.hidden_size, key, name, weight_format)
        case Mamba2() as mamba:
            return _mamba(mamba, spec.hidden_size, key, name, weight_format)
        case ShortConv() as short:
            return _short_conv(short, spec.hidden_size, key, name, weight_format)
    raise AssertionError("a model with recurrent layers names their mechanism")


def _gated_delta(
    delta: GatedDelta, width: int, key: str, name: str, weight_format: WeightFormat
) -> dict[str, Parameter]:
    """The gates of forgetting and correcting are as exact as a router: they are never rounded."""
    heads = delta.num_value_heads
    if delta.interleaved:
        inner = {f"{name}.in_proj_qkvz": delta.channels + delta.inner}
        gates = {f"{name}.in_proj_ba.weight": (2 * heads, width)}
    else:
        inner = {f"{name}.in_proj_qkv": delta.channels, f"{name}.in_proj_z": delta.inner}
        gates = {f"{name}.in_proj_b.weight": (heads, width), f"{name}.in_proj_a.weight": (heads, width)}
    return {
        **dict(_linear(f"{key}.inner", inner, width, False, weight_format)),
        f"{key}.gates": Parameter(gates),
        f"{key}.conv": _exact({f"{name}.conv1d.weight": (delta.channels, 1, delta.kernel)}),
        f"{key}.decay": _exact({f"{name}.A_log": (heads,)}, init=1.0),
        f"{key}.step_bias": _exact({f"{name}.dt_bias": (heads,)}, init=1.0),
        f"{key}.gated_norm": Parameter({f"{name}.norm.weight": (delta.value_dim,)}, init=1.0, stored=VECTOR),
        **dict(_linear(f"{key}.out", {f"{name}.out_proj": width}, delta.inner, False, weight_format)),
    }


def _mamba(mamba: Mamba2, width: int, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    heads, inner = mamba.num_heads, {f"{name}.in_proj": mamba.inner + mamba.channels + mamba.num_heads}
    parameters = {
        **dict(_linear(f"{key}.inner", inner, width, mamba.proj_bias, weight_format)),
        f"{key}.conv": _exact({f"{name}.conv1d.weight": (mamba.channels, 1, mamba.kernel)}),
        f"{key}.decay": _exact({f"{name}.A_log": (heads,)}, init=1.0),
        f"{key}.step_bias": _exact({f"{name}.dt_bias": (heads,)}, init=1.0),
        f"{key}.skip": _exact({f"{name}.D": (heads,)}, init=1.0),
        f"{key}.gated_norm": Parameter({f"{name}.norm.weight": (mamba.inner,)}, init=1.0, stored=VECTOR),
        **dict(_linear(f"{key}.out", {f"{name}.out_proj": width}, mamba.inner, mamba.proj_bias, weight_format)),
    }
    if mamba.conv_bias:
        parameters[f"{key}.conv_bias"] = _exact({f"{name}.conv1d.bias": (mamba.channels,)})
    return parameters


def _short_conv(short: ShortConv, width: int, key: str, name: str, weight_format: WeightFormat) -> dict[str, Parameter]:
    channels = short.channels
    parameters = {
        **dict(_linear(f"{key}.inner", {f"{name}.in_proj": 3 * channels}, width, short.bias, weight_format)),
        f"{key}.conv": _exact({f"{name}.conv.weight": (channels, 1, short.kernel)}),
        **dict(_linear(f"{key}.out", {f"{name}.out_proj": width}, channels, short.bias, weight_format)),
    }
    if short.bias:
        parameters[f"{key}.conv_bias"] = _exact({f"{name}.conv.bias": (channels,)})
    return parameters


def _exact(shapes: dict[str, tuple[int, ...]], *, init: Init | None = None) -> Parameter:
    """A small tensor that is computed with in float32."""
    return Parameter(shapes, init=init, stored=VECTOR, dtype="float32")


def _layer_norm(spec: ModelSpec, key: str, name: str) -> dict[str, Parameter]:
    """A norm of the residual or of what is added to it."""
    parameters = {key: _norm(spec, {f"{name}.weight": spec.hidden_size})}
    if spec.centred_norms == "biased":
        parameters[f"{key}_bias"] = _exact({f"{name}.bias": (spec.hidden_size,)}, init=0.0)
    return parameters


def _norm(spec: ModelSpec, sizes: dict[str, int]) -> Parameter:
    return Parameter(
        {name: (size,) for name, size in sizes.items()},
        init=0.0 if spec.norm_offset else 1.0,
        stored=VECTOR,
        dtype="float32" if spec.float_norms else None,
    )


def _linear(
    key: str, rows: dict[str, int], columns: int, has_bias: bool, weight_format: WeightFormat
) -> Iterator[tuple[str, Parameter]]:
    """The tensors of a linear layer that stacks the modules in `rows`, name -> output features."""
    formats = [weight_format.of(name) for name in rows]
    layer_format = joined_format(weight_format, rows)
    if layer_format.stacks:
        weights = {f"{name}.weight": (n, columns) for name, n in rows.items()}
        yield f"{key}.weight", Parameter(weights, layer_format=layer_format)
    else:
        for i, (name, n) in enumerate(rows.items()):
            for stored in formats[i].stored:
                if stored.suffix == "bias" and has_bias:
                    continue
                shapes = {f"{name}.{stored.suffix}": stored.shape(n, columns)}
                yield f"{key}[{i}].{stored.suffix}", Parameter(shapes, stored=stored, layer_format=layer_format)
    if has_bias:
        yield f"{key}.bias", Parameter({f"{name}.bias": (n,) for name, n in rows.items()}, stored=VECTOR)


def _table(name: str, spec: ModelSpec, stored: StoredTensor) -> Parameter:
    """The embedding or the output layer."""
    return Parameter({name: stored.shape(spec.vocab_size, spec.hidden_size)}, stored=stored)


def joined_format(weight_format: WeightFormat, rows: Mapping[str, int]) -> LayerFormat:
    """The format of the layer that stacks the modules in `rows`, name -> output features.

    Raises: ModelError if theirs differ and cannot be one layer.
    """
    formats = [weight_format.of(name) for name in rows]
    if len(set(formats)) == 1:
        return formats[0]
    if weight_format.mixes:
        return MixedLayer(formats, list(rows.values()))
    raise ModelError(
        f"{', '.join(rows)} are stored in different formats, and they are one layer here",
        hint="use the unquantized version of the model",
    )


def linear_formats(parameters: Mapping[str, Parameter]) -> dict[str, LayerFormat]:
    """The format of each linear layer by its key, e.g. "layers.3.qkv"."""
    formats = {}
    for key, parameter in parameters.items():
        if parameter.layer_format is not None:
            formats[key.rpartition(".")[0].partition("[")[0]] = parameter.layer_format
    return formats


def take_linear(tensors: "MutableMapping[str, Tensor]", key: str, layer_format: LayerFormat) -> "Modules":
    """The tensors of a linear layer's modules. Changes: tensors, from which they are removed."""
    if layer_format.stacks:
        return [{"weight": tensors.pop(f"{key}.weight")}]
    modules: list[dict[str, Tensor]] = []
    while module := {
        stored.suffix: tensors.pop(name)
        for stored in layer_format.stored
        if (name := f"{key}[{len(modules)}].{stored.suffix}") in tensors
    }:
        modules.append(module)
    return modules
