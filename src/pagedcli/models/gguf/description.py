"""A GGUF file -> the fields of its family, and how its tensors differ from those of that family. Free of torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from pagedcli.models.gguf.architectures import ARCHITECTURES, STILL, fields_of, rope_of
from pagedcli.models.gguf.header import Header, Metadata
from pagedcli.models.gguf.types import CODEBOOK, GgufQuantization
from pagedcli.models.mixers.attention import LatentAttention
from pagedcli.models.mixers.recurrent import GatedDelta
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.spec import LayerSpec, ModelSpec
from pagedcli.models.tensors import TensorNames

# Tokens that end an answer, whatever the file calls them: files name one, and chats end with another.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "<|return|>", "<|call|>", "<eos>", "<turn|>"),
)


def describe(header: Header) -> tuple[str, dict[str, Any]]:
    """The model_type of a file's model, and the fields of its family's class.

    Raises: ModelError for an architecture that is not read, or metadata of a wrong kind.
    """
    said = Metadata(header)
    if said.prefix not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise header.error(f"general.architecture is {said.prefix!r:.40}; from GGUF files these run: {known}")
    kind = ARCHITECTURES[said.prefix]
    if said.get("nextn_predict_layers") and not any(name.startswith("blk.0.") for name in header.tensors):
        raise header.error("it has only layers that predict further tokens", "use the file of the model itself")
    own = fields_of(said, kind)
    model_type = next((family for key, family in kind.others.items() if said.get(key)), kind.family)
    return model_type, _common(said, own) | rope_of(said) | own


@dataclass(frozen=True, slots=True)
class Orders:
    """How a file orders the rows of its tensors, by the last part of their names."""

    num_layers: int  # layers without those that only predict further tokens
    reordered: Mapping[str, int]  # heads of tensors that list the two halves of each head in turn
    halves: Mapping[str, int]  # how often the rows of two modules alternate in their tensor; others: they do not

    @classmethod
    def of(cls, header: Header) -> "Orders":
        said, reordered, halves = Metadata(header), dict[str, int](), dict[str, int]()
        if ARCHITECTURES[said.prefix].reordered:
            heads = said.number("attention.head_count")
            reordered = {"attn_q": heads, "attn_k": said.kv_heads(heads)}
        if said.get("ssm.group_count") is not None:
            halves = {"ssm_ba": said.number("ssm.group_count")}
        return cls(said.layers(), reordered, halves)


def as_stored(spec: ModelSpec, header: Header) -> ModelSpec:
    """The spec of a file's model with names and orders of tensors that lead to the file's, and only its biases."""
    tensors = header.tensors
    fused_mlp = not any(".ffn_gate." in name for name in tensors) and len(spec.names.projections) == 2
    projections = ("gate_up_proj", "down_proj") if fused_mlp else TensorNames().projections

    def has(part: str) -> bool:
        return any(name.endswith(f".{part}.bias") for name in tensors)

    is_interleaved = any(name.endswith(".ssm_in.weight") for name in tensors)
    is_tiled = ARCHITECTURES[str(header.metadata["general.architecture"])].tiled

    def stored(layer: LayerSpec) -> LayerSpec:
        mixer, mlp = layer.mixer, layer.mlp
        if layer.attention is not None:
            qkv_bias = has("attn_q") or has("attn_qkv")
            mixer = replace(layer.attention, qkv_bias=qkv_bias, out_bias=has("attn_output"))
        match mixer:
            case LatentAttention():
                mixer = replace(mixer, ups_apart=any(".attn_k_b." in name for name in tensors))
        if isinstance(mixer, GatedDelta):
            mixer = replace(mixer, interleaved=is_interleaved, tiled=is_tiled)
        if isinstance(mlp, Mlp):
            mlp = replace(mlp, bias=has("ffn_down"))
        if isinstance(mlp, Experts):
            names = ExpertNames().projections if mlp.each.gated else ("up_proj", "down_proj")
            mlp = replace(mlp, names=ExpertNames(projections=names, shared_projections=names))
        return replace(layer, mixer=mixer, mlp=mlp)

    names = TensorNames(recurrent=spec.names.recurrent, qkv=spec.names.qkv, projections=projections)
    if spec.names.recurrent == spec.names.mlp:  # layers of one branch each, all with a norm of the same name
        names = replace(names, recurrent="mamba", branch_norms=("input_layernorm", "input_layernorm"))
    return replace(
        spec,
        layers=tuple(map(stored, spec.layers)),
        names=names,
        norm=replace(spec.norm, offset=False),  # added to the stored weights
        quantization=quantization(header),
    )


def quantization(header: Header) -> GgufQuantization | None:
    """The types of the file's tensors; None if all are floating point. Raises: ModelError without what reads them."""
    if all(tensor.type.is_float for tensor in header.tensors.values()):
        return None
    kinds = {tensor.type.name for tensor in header.tensors.values() if tensor.type.codes == CODEBOOK}
    if kinds and find_spec("gguf") is None:
        raise header.error(
            f"{', '.join(sorted(kinds))} is read with the gguf package, which is not installed",
            "pip install 'pagedcli[gguf]'",
        )
    types = {name: tensor.type.name for name, tensor in header.tensors.items()}
    sizes = {name: math.prod(tensor.shape) for name, tensor in header.tensors.items()}
    return GgufQuantization(types, sizes)


def _common(fields: Metadata, own: Mapping[str, Any]) -> dict[str, Any]:
    """What all architectures call the same. `own`: what this one calls otherwise, and is not read again."""
    header = fields.header
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise header.error("it has no token_embd.weight", "use a file of a language model")
    heads = fields.number("attention.head_count")
    head_dim = fields.head_dim()
    if "kv_lora_rank" not in own and fields.number("attention.value_length", head_dim) != head_dim:
        raise header.error("its keys and values have different sizes, which is not supported")
    config: dict[str, Any] = {
        "vocab_size": table.shape[0],
        "hidden_size": fields.number("embedding_length"),
        "intermediate_size": own.get("intermediate_size")
        or fields.number("feed_forward_length", fields.get("expert_feed_forward_length")),
        "num_hidden_layers": fields.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("num_key_value_heads") or fields.kv_heads(heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": fields.number("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header),
        "dtype": _dtype(header, fields.prefix),
    }
    if num_experts := fields.number("expert_count", 0):
        config |= {
            "num_experts": num_experts,
            "num_experts_per_tok": fields.number("expert_used_count"),
            "moe_intermediate_size": fields.number("expert_feed_forward_length", config["intermediate_size"]),
        }
    return config


def _dtype(header: Header, architecture: str) -> str:
    """The dtype to compute in by default: that of most numbers, bfloat16 for quantized ones. Gemma's activations do not
    fit into float16."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + math.prod(tensor.shape)
    names = {"F32": "float32", "F16": "bfloat16" if architecture.startswith("gemma") else "float16"}
    return names.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _ends(header: Header) -> list[int]:
    """Ids of tokens that end an answer: the named ones first."""
    metadata = header.metadata
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    found: list[int] = []
    if isinstance(tokens, list) and isinstance(types, list):
        found = [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3 and token in _ENDS]
    ids = [each for each in (*named, *found) if isinstance(each, int) and not isinstance(each, bool)]
    return list(dict.fromkeys(ids))


def frequency_factors(header: Header) -> tuple[float, ...]:
    """What each rotary frequency is divided by (Llama 3.1 and later); empty if nothing. Gemma 4's say which turn."""
    factors = Metadata(header).factors("rope_freqs.weight")
    return () if any(factor >= STILL for factor in factors) else tuple(factors)
