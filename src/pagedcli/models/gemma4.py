"""Gemma 4 as data: how its models differ from Llama. Free of torch; models.families lists it."""

from dataclasses import replace
from typing import Any

from pagedcli.models.family import ATTENDS, Family, FamilyConfig
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.spec import LayerInputs


def _gemma4(fields: FamilyConfig) -> dict[str, Any]:
    """Heads and K = V of layers without a window, shared K and V, embeddings of layers, experts beside the MLP."""
    slides, num_layers = fields.slides(full_last=True), fields.num_hidden_layers
    num_heads, keys_as_values = fields.num_attention_heads, fields.attention_k_eq_v
    num_kv_heads, head_dim = fields.num_key_value_heads, fields.head_dim  # null: as many as query heads, of equal parts
    local = (
        num_kv_heads if isinstance(num_kv_heads, int) else num_heads,
        head_dim if isinstance(head_dim, int) else fields.hidden_size // num_heads,
    )
    overall = (keys_as_values and fields.num_global_key_value_heads) or local[0], fields.global_head_dim
    heads = [local if sliding else overall for sliding in slides]
    for layer, own in (fields.per_layer_config or {}).items():
        if layer.isdigit() and int(layer) < num_layers:
            heads[int(layer)] = own.get("num_key_value_heads", local[0]), own.get("head_dim", local[1])
    first_shared = num_layers - max(0, fields.num_kv_shared_layers)
    last_own = {sliding: i for i, sliding in enumerate(slides[:first_shared])}
    sources = [last_own.get(sliding) if i >= first_shared else None for i, sliding in enumerate(slides)]
    widths = [fields.intermediate_size * (2 if source is not None else 1) for source in sources]
    activation = fields.hidden_activation or fields.hidden_act
    beside = Mlp(width=fields.intermediate_size, activation=activation)
    experts = Experts(
        num_experts=fields.num_experts or 0,
        num_per_token=fields.num_experts_per_tok or 1,
        each=replace(beside, width=fields.moe_intermediate_size or fields.intermediate_size),
        renormalize=True,
        beside=beside,
        names=ExpertNames(block="", router="router.proj"),
    )
    return {
        "qk_norm": True,
        "value_norm": True,
        "float_norms": True,
        "layer_norms": "around",
        "query_scale": 1.0,
        "logits_soft_cap": fields.final_logit_softcapping,
        "embedding_multiplier": fields.hidden_size**0.5,
        "layer_scalars": True,
        "layer_heads": tuple(heads) if set(heads) != {local} else (),
        "kv_sources": tuple(sources) if any(source is not None for source in sources) else (),
        "keys_as_values": frozenset(i for i in range(first_shared) if keys_as_values and not slides[i]),
        "layer_widths": tuple(widths) if fields.use_double_wide_mlp and len(set(widths)) > 1 else (),
        "layer_inputs": LayerInputs(
            size=fields.hidden_size_per_layer_input,
            vocab_size=fields.vocab_size_per_layer_input or 262144,
            activation=activation,
        )
        if fields.hidden_size_per_layer_input
        else None,
        "experts": experts if fields.enable_moe_block else None,
    }


_GEMMA4 = Family(
    "Gemma4ForCausalLM",
    4,
    256,
    131072,
    (2, 1),
    "alternating",
    activations=("gelu_pytorch_tanh",),
    ropes="by window",
    layer_types=ATTENDS | {"sliding_attention"},
    full_last=True,
    bidirectional=("vision",),
    renamed={"top_k_experts": "num_experts_per_tok"},
    defaults={
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    traits=_gemma4,
)
_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    max_position_embeddings=262144,
    defaults=_GEMMA4.defaults | {"sliding_window": 1024, "hidden_size_per_layer_input": 0},
)
GEMMA4 = {
    "gemma4_text": _GEMMA4,
    "gemma4": replace(_GEMMA4, architecture="Gemma4ForConditionalGeneration", nested=True),
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "gemma4_unified": replace(_GEMMA4_UNIFIED, architecture="Gemma4UnifiedForConditionalGeneration", nested=True),
}
