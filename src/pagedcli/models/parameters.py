"""The tensors of a whole decoder: those of its layers, its tables and norms. Free of torch: dtypes are names."""

from collections.abc import Iterable
from dataclasses import replace

from pagedcli.models.formats import VECTOR, WEIGHT, WeightFormat
from pagedcli.models.spec import LayerSpec, ModelSpec
from pagedcli.models.tensors import Parameter, Tensors, exact

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


def decoder_parameters(
    spec: ModelSpec, weight_format: WeightFormat, *, layers: Iterable[int] | None = None, num_experts: int | None = None
) -> dict[str, Parameter]:
    """Every tensor of the decoder and the checkpoint tensors that fill it, under the names transformers gives them.
    `layers`: of these layers only, `num_experts`: of so many experts of each only, where one stands for all."""
    make, (head, *_) = _tensors(spec, weight_format), weight_format.lm_head.stored
    names, tied = spec.names, spec.tie_word_embeddings
    embedding = make.table(f"{names.body}.{names.embedding}.weight", spec.vocab_size, head if tied else WEIGHT)
    last = replace(make, norms=replace(spec.norm, offset=spec.norm.offset and spec.norm.offset_last))
    parameters = {"embedding": embedding, **last.layer_norm("final_norm", f"{names.body}.{names.final_norm}")}
    if not tied and weight_format.lm_head.stacks:
        parameters["lm_head"] = make.table("lm_head.weight", spec.vocab_size)
    elif not tied:
        parameters |= make.linear("lm_head", {"lm_head": spec.vocab_size}, spec.hidden_size)
    if spec.head_bias:
        parameters["lm_head.bias"] = Parameter({"lm_head.bias": (spec.vocab_size,)}, stored=VECTOR)
    parameters |= _layer_inputs(spec, make)
    for i in range(spec.num_layers) if layers is None else layers:
        parameters |= _layer(spec, spec.layers[i], make, f"layers.{i}", num_experts)
    return parameters


def unread_tensors(spec: ModelSpec, weight_format: WeightFormat) -> frozenset[str]:
    """Checkpoint tensors that may be there and are not needed."""
    make, names = _tensors(spec, weight_format), {"lm_head.weight"} if spec.tie_word_embeddings else set()
    return frozenset(names.union(*(each.mixer.unread(make, _name(spec, each.number)) for each in spec.layers)))


def _tensors(spec: ModelSpec, weight_format: WeightFormat) -> Tensors:
    return Tensors(spec.hidden_size, spec.norm, spec.names, weight_format)


def _name(spec: ModelSpec, number: int) -> str:
    """A layer in the checkpoint."""
    return f"{spec.names.body}.layers.{number}"


def _layer(spec: ModelSpec, layer: LayerSpec, make: Tensors, key: str, num_experts: int | None) -> dict[str, Parameter]:
    name = _name(spec, layer.number)
    mlp_name = name if layer.mlp_number is None else _name(spec, layer.mlp_number)
    norms, found = _NORMS[layer.norms], dict[str, Parameter]()
    if spec.names.branch_norms is not None:
        norms = dict(zip(norms, spec.names.branch_norms, strict=True))
    for norm, stored in norms.items():
        of_mlp = norm.startswith("mlp")
        if layer.mlp is not None or not of_mlp:
            found |= make.layer_norm(f"{key}.{norm}", f"{mlp_name if of_mlp else name}.{stored}")
    found |= layer.mixer.parameters(make, key, name)
    if layer.beside is not None:
        found |= layer.beside.parameters(make, f"{key}.beside", name)
    if spec.layer_inputs is not None:
        found |= _layer_input(make, spec.layer_inputs.size, key, name)
    if layer.has_scalar:
        found[f"{key}.scalar"] = exact({f"{name}.layer_scalar": (1,)}, init=1.0)
    if layer.mlp is not None:
        found |= layer.mlp.parameters(make, key, mlp_name, num_experts)
    return found


def _layer_inputs(spec: ModelSpec, make: Tensors) -> dict[str, Parameter]:
    """What gives each layer its inputs: a second embedding table, and a projection of the first one's rows."""
    if spec.layer_inputs is None:
        return {}
    body, size = spec.names.body, spec.layer_inputs.size
    width = spec.num_layers * size
    return {
        "layer_table": Parameter({f"{body}.embed_tokens_per_layer.weight": (spec.layer_inputs.vocab_size, width)}),
        "layer_projection": Parameter({f"{body}.per_layer_model_projection.weight": (width, spec.hidden_size)}),
        "layer_projection_norm": make.norm({f"{body}.per_layer_projection_norm": size}),
    }


def _layer_input(make: Tensors, size: int, key: str, name: str) -> dict[str, Parameter]:
    """What adds a layer's input to the residual: as exact as a router, it is never rounded."""
    return {
        f"{key}.input_gate": Parameter({f"{name}.per_layer_input_gate.weight": (size, make.width)}),
        f"{key}.input_out": Parameter({f"{name}.per_layer_projection.weight": (make.width, size)}),
        f"{key}.layer_input_after": make.norm({f"{name}.post_per_layer_input_norm": make.width}),
    }
