"""The families that our decoder runs: their config.json -> ModelSpec. Free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from pagedcli.errors import ModelError
from pagedcli.models.config_json import Ids, convert, stop_ids
from pagedcli.models.rope import RopeSpec, read_rope_spec
from pagedcli.models.spec import ExpertsSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class _Family:
    """How a native family differs from Llama. The defaults are those of its transformers config class, because
    config.json leaves out what equals them."""

    architecture: str
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_heads
    max_position_embeddings: int
    special_ids: tuple[int | None, int | None]  # bos, eos
    sliding: Literal["never", "all", "by layer", "alternating", "if used"]
    qkv_bias: bool | None = None  # None: attention_bias of config.json
    out_bias: bool | None = None  # None: attention_bias of config.json
    mlp_bias: bool | None = False  # None: mlp_bias of config.json
    activations: tuple[str, ...] = ("silu", "swish")  # that it may have
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of other fields of config.json
    traits: Callable[["_ConfigJson"], dict[str, Any]] = lambda _: {}  # what of its ModelSpec differs from Llama's


_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 2,
}
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", None, None, 2048, (1, 2), "never", mlp_bias=None),
    "mistral": _Family("MistralForCausalLM", 8, None, 131072, (1, 2), "all", qkv_bias=False, out_bias=False),
    "qwen2": _Family("Qwen2ForCausalLM", 32, None, 32768, (None, None), "by layer", qkv_bias=True, out_bias=False),
    "qwen3": _Family("Qwen3ForCausalLM", 32, 128, 32768, (None, None), "by layer", traits=lambda _: {"qk_norm": True}),
    "olmo2": _Family(
        "Olmo2ForCausalLM",
        None,
        None,
        2048,
        (None, 50279),
        "never",
        defaults={"rms_norm_eps": 1e-5},
        traits=lambda _: {"qk_norm_all": True, "layer_norms": "after", "float_norms": True},
    ),
    "granite": _Family(
        "GraniteForCausalLM", None, None, 2048, (1, 2), "never", mlp_bias=None, traits=lambda fields: _granite(fields)
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        4,
        None,
        32768,
        (128000, 128001),
        "by layer",
        mlp_bias=None,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "sliding_window": None},
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        None,
        None,
        4096,
        (1, 32000),
        "all",
        qkv_bias=False,
        out_bias=False,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        traits=lambda _: {"fused_projections": True},
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        4,
        256,
        8192,
        (2, 1),
        "alternating",
        activations=("gelu_pytorch_tanh",),
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        traits=lambda fields: _gemma(fields),
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        4,
        256,
        131072,
        (2, 1),
        "alternating",
        activations=("gelu_pytorch_tanh",),
        defaults={**_GEMMA, "sliding_window_pattern": 6},
        traits=lambda fields: _gemma(fields) | {"qk_norm": True},
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        4,
        None,
        32768,
        (None, None),
        "if used",
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        traits=lambda fields: {"qk_norm": True, "experts": _experts(fields)},
    ),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        16,
        None,
        32768,
        (None, None),
        "by layer",
        qkv_bias=None,
        out_bias=False,
        defaults={
            "attention_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        traits=lambda fields: {"experts": _experts(fields)},
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        8,
        None,
        131072,
        (1, 2),
        "all",
        qkv_bias=False,
        out_bias=False,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        traits=lambda fields: {"experts": _experts(fields, names="block_sparse_moe")},
    ),
    "olmoe": _Family(
        "OlmoeForCausalLM",
        None,
        None,
        4096,
        (None, 50279),
        "never",
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        traits=lambda fields: {"qk_norm_all": True, "experts": _experts(fields)},
    ),
}
NATIVE_MODEL_TYPES = frozenset(_FAMILIES)
_OptionalInt = int | msgspec.UnsetType | None  # null and absent differ


class _ConfigJson(msgspec.Struct):
    """The fields of config.json that the native families use. UNSET where the file may leave them out."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: _OptionalInt = msgspec.UNSET
    head_dim: _OptionalInt = msgspec.UNSET
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    use_sliding_window: bool = False
    sliding_window: _OptionalInt = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    eos_token_id: Ids | msgspec.UnsetType = msgspec.UNSET
    bos_token_id: _OptionalInt = msgspec.UNSET
    dtype: str | None = None
    torch_dtype: str | None = None
    hidden_activation: str | None = None
    attention_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    no_rope_layers: list[int] | None = None  # 0: the layer has no rotary embedding
    no_rope_layer_interval: int = 4
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float = 256
    sliding_window_pattern: int = 2  # each so many layers one sees everything
    qkv_bias: bool | None = None
    num_experts: int = 0
    num_local_experts: int | None = None
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []


def native_spec(path: Path, config: dict[str, Any], model_type: str) -> ModelSpec:
    """The ModelSpec of a native family.

    Raises: ModelError for a wrong type in config.json, or a value that we cannot run.
    """
    family = _FAMILIES[model_type]
    where = path / "config.json"
    config = {**family.defaults, **config}
    _refuse_unknown(config, where)
    fields = convert(config, _ConfigJson, where)
    architectures = config.get("architectures") or [family.architecture]
    if architectures[0] != family.architecture:
        raise ModelError(
            f"{where}: architecture {architectures[0]!r} is not a causal language model",
            hint=f"model_type {model_type!r} runs as {family.architecture}",
        )
    activation = fields.hidden_activation or fields.hidden_act
    if activation not in family.activations:
        allowed = repr(family.activations[0])
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported for {model_type} (only {allowed})")
    num_heads = fields.num_attention_heads
    num_kv_heads = _default(fields.num_key_value_heads, family.num_kv_heads) or num_heads
    head_dim = _default(fields.head_dim, family.head_dim) or fields.hidden_size // num_heads
    _check_sizes(fields, num_kv_heads, head_dim, where)
    max_positions = fields.max_position_embeddings or family.max_position_embeddings
    layer_ropes = _layer_ropes(config, fields, model_type, max_positions, where)
    rope = next(rope for rope in reversed(layer_ropes) if rope is not None)
    traits = {"qk_norm": False, **family.traits(fields)}
    if len(set(layer_ropes)) > 1:
        traits["layer_ropes"] = layer_ropes
    default_bos, default_eos = family.special_ids
    eos = default_eos if isinstance(fields.eos_token_id, msgspec.UnsetType) else fields.eos_token_id
    return ModelSpec(
        model_type=model_type,
        architecture=family.architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=fields.tie_word_embeddings,
        qkv_bias=fields.attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=fields.attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=fields.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        hidden_act=activation,
        max_position_embeddings=max(max_positions, rope.stretched_length),
        sliding_window=_sliding_window(fields, family),
        eos_token_ids=stop_ids(path, eos),
        bos_token_id=_default(fields.bos_token_id, default_bos),
        dtype=(fields.dtype or fields.torch_dtype or "float32").removeprefix("torch."),
        **traits,
    )


def _refuse_unknown(config: dict[str, Any], where: Path) -> None:
    """What members of these families may have and our decoder has not."""
    for name in ("clip_qkv", "use_bidirectional_attention"):
        if config.get(name):
            raise ModelError(f"{where}: {name} is {config[name]!r}, which is not supported")


def _granite(fields: _ConfigJson) -> dict[str, Any]:
    return {
        "query_scale": fields.attention_multiplier,
        "embedding_multiplier": fields.embedding_multiplier,
        "residual_multiplier": fields.residual_multiplier,
        "logits_divisor": fields.logits_scaling,
    }


def _gemma(fields: _ConfigJson) -> dict[str, Any]:
    return {
        "layer_norms": "around",
        "float_norms": True,
        "norm_offset": True,
        "query_scale": fields.query_pre_attn_scalar**-0.5,
        "soft_cap": fields.attn_logit_softcapping,
        "logits_soft_cap": fields.final_logit_softcapping,
        "embedding_multiplier": fields.hidden_size**0.5,
    }


def _experts(fields: _ConfigJson, names: Literal["mlp", "block_sparse_moe"] = "mlp") -> ExpertsSpec:
    step, num_layers = max(1, fields.decoder_sparse_step), fields.num_hidden_layers
    return ExpertsSpec(
        num_experts=fields.num_local_experts or fields.num_experts,
        num_per_token=fields.num_experts_per_tok,
        intermediate_size=fields.moe_intermediate_size or fields.intermediate_size,
        renormalize=fields.norm_topk_prob,
        shared_intermediate_size=fields.shared_expert_intermediate_size,
        dense_layers=frozenset(fields.mlp_only_layers) | {i for i in range(num_layers) if (i + 1) % step},
        names=names,
    )


def _layer_ropes(
    config: dict[str, Any], fields: _ConfigJson, model_type: str, max_positions: int, where: Path
) -> tuple[RopeSpec | None, ...]:
    """The rotary embedding of each layer."""
    layers = range(fields.num_hidden_layers)
    if model_type == "gemma3_text":
        by_kind = _gemma3_ropes(config, max_positions, where)
        return tuple(by_kind[is_sliding] for is_sliding in _sliding_layers(fields))
    rope = read_rope_spec(config, max_positions, where, may_be_partial=model_type == "phi3")
    if model_type != "smollm3":
        return (rope,) * len(layers)
    has_rope = fields.no_rope_layers or [(i + 1) % max(1, fields.no_rope_layer_interval) for i in layers]
    if len(has_rope) != len(layers) or not any(has_rope):
        raise ModelError(f"{where}: no_rope_layers does not say of each of {len(layers)} layers whether it has one")
    return tuple(rope if has else None for has in has_rope)


def _gemma3_ropes(config: dict[str, Any], max_positions: int, where: Path) -> dict[bool, RopeSpec]:
    """The rotary embeddings of layers that do not slide (False) and of those that do (True)."""
    nested = config.get("rope_parameters")
    if isinstance(nested, dict) and isinstance(nested.get("full_attention"), dict):
        forms = {False: {"rope_theta": 1e6, **nested["full_attention"]}}
        forms[True] = {"rope_theta": 1e4, **(nested.get("sliding_attention") or {})}
    else:
        forms = {False: {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}}
        forms[True] = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    return {kind: read_rope_spec({"rope_parameters": form}, max_positions, where) for kind, form in forms.items()}


def _sliding_layers(fields: _ConfigJson) -> list[bool]:
    """Of each layer of a model in which windows alternate with full attention: whether it has a window."""
    if fields.layer_types is not None:
        return [kind == "sliding_attention" for kind in fields.layer_types]
    return [bool((i + 1) % max(1, fields.sliding_window_pattern)) for i in range(fields.num_hidden_layers)]


def _sliding_window(fields: _ConfigJson, family: _Family) -> int | None:
    """The window in tokens, or None when no layer uses it (Qwen: only layers from max_window_layers on slide)."""
    window = _default(fields.sliding_window, 4096)
    if family.sliding == "never" or window is None:
        return None
    if family.sliding == "all":
        return window
    if family.sliding == "alternating":
        return window if any(_sliding_layers(fields)) else None
    if not fields.use_sliding_window:
        return None
    if family.sliding == "if used":
        return window
    if fields.layer_types is not None:
        return window if "sliding_attention" in fields.layer_types else None
    return window if fields.max_window_layers < fields.num_hidden_layers else None


def _check_sizes(fields: _ConfigJson, num_kv_heads: int, head_dim: int, where: Path) -> None:
    sizes = {
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "intermediate_size": fields.intermediate_size,
        "num_hidden_layers": fields.num_hidden_layers,
        "num_attention_heads": fields.num_attention_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ModelError(f"{where}: {name} is {value}, but must be at least 1")
    if fields.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {fields.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim {head_dim} is odd, but rotary embedding turns pairs of elements")


def _default(value: _OptionalInt, default: int | None) -> int | None:
    return default if isinstance(value, msgspec.UnsetType) else value
