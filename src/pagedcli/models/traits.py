"""What families have in common beyond Llama: the fields of ModelSpec that config.json decides. Free of torch."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec

from pagedcli.models.family import ATTENDS, FamilyConfig
from pagedcli.models.mixers.gated_delta import GatedDelta
from pagedcli.models.mixers.mamba2 import Mamba2
from pagedcli.models.mixers.short_conv import ShortConv
from pagedcli.models.mlps import ExpertNames, Experts, Mlp
from pagedcli.models.tensors import TensorNames

BIASED_NORMS = {"float_norms": True, "centred_norms": "biased"}
UNGATED = {"gated_mlp": False, "names": TensorNames(projections=("up_proj", "down_proj"))}


def granite(fields: FamilyConfig) -> dict[str, Any]:
    return {
        "query_scale": fields.attention_multiplier,
        "embedding_multiplier": fields.embedding_multiplier,
        "residual_multiplier": fields.residual_multiplier,
        "logits_divisor": fields.logits_scaling,
    }


def hyperclovax(fields: FamilyConfig) -> dict[str, Any]:
    traits = granite(fields) | {"logits_divisor": 1 / fields.logits_scaling}  # Here it is a factor.
    if not fields.use_post_norm:
        return traits
    norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return traits | {"layer_norms": "around", "names": TensorNames(branch_norms=norms)}


def gemma(fields: FamilyConfig) -> dict[str, Any]:
    return {
        "layer_norms": "around",
        "float_norms": True,
        "norm_offset": True,
        "query_scale": fields.query_pre_attn_scalar**-0.5,
        "soft_cap": fields.attn_logit_softcapping,
        "logits_soft_cap": fields.final_logit_softcapping,
        "embedding_multiplier": fields.hidden_size**0.5,
    }


def dense_layers(fields: FamilyConfig) -> frozenset[int]:
    """Layers with an ordinary MLP in place of experts."""
    step, num_layers = max(1, fields.decoder_sparse_step), fields.num_hidden_layers
    dense = fields.mlp_only_layers or []
    if fields.mlp_layer_types is not None:
        dense = [i for i, kind in enumerate(fields.mlp_layer_types) if kind == "dense"]
    return frozenset(i for i in range(num_layers) if i in dense or (i + 1) % step)


def mixture(fields: FamilyConfig, names: ExpertNames | None = None, **others: Any) -> dict[str, Any]:
    width = fields.shared_expert_intermediate_size
    activation = others.pop("activation", fields.hidden_act)
    experts: dict[str, Any] = {
        "num_experts": fields.num_local_experts or fields.num_experts or 0,
        "num_per_token": fields.num_experts_per_tok or 1,
        "each": Mlp(
            width=fields.moe_intermediate_size or fields.intermediate_size,
            activation=activation,
            bias=others.get("has_biases", False),
        ),
        "renormalize": fields.norm_topk_prob,
        "shared": None if width is None else Mlp(width=width, activation=activation),
        "names": names or ExpertNames(),
    }
    dense = others.pop("dense_layers", dense_layers(fields))
    return {"experts": Experts(**experts | others), "dense_layers": dense}


def layer_kinds(fields: FamilyConfig, attending: Collection[int]) -> tuple[str, ...]:
    """Which layers attend: those of layer_types, where it is given, or the numbers in `attending`."""
    if fields.layer_types is not None:
        return tuple("attention" if kind in ATTENDS else "recurrent" for kind in fields.layer_types)
    return tuple("attention" if i in attending else "recurrent" for i in range(fields.num_hidden_layers))


def gated_delta(fields: FamilyConfig, *, interleaved: bool = False) -> dict[str, Any]:
    """Gated delta nets, and attention with an output gate."""
    interval = max(1, fields.full_attention_interval)
    return {
        "qk_norm": True,
        "float_norms": True,
        "norm_offset": True,
        "output_gate": True,
        "layer_kinds": layer_kinds(fields, range(interval - 1, fields.num_hidden_layers, interval)),
        "recurrent": GatedDelta(
            num_key_heads=fields.linear_num_key_heads,
            num_value_heads=fields.linear_num_value_heads,
            key_dim=fields.linear_key_head_dim,
            value_dim=fields.linear_value_head_dim,
            kernel=fields.linear_conv_kernel_dim,
            interleaved=interleaved,
        ),
        "names": TensorNames(skipped=("mtp.",)),
    }


def short_conv(fields: FamilyConfig) -> dict[str, Any]:
    inner, indices = fields.intermediate_size, fields.full_attn_idxs
    if fields.block_auto_adjust_ff_dim:  # as in the first Llama: 2/3 of it, times a factor, rounded up to a multiple
        inner = int((fields.block_ffn_dim_multiplier or 1.0) * int(2 * inner / 3))
        inner = -(-inner // fields.block_multiple_of) * fields.block_multiple_of
    return {
        "qk_norm": True,
        "intermediate_size": inner,
        "layer_kinds": layer_kinds(fields, range(fields.num_hidden_layers) if indices is None else indices),
        "recurrent": ShortConv(channels=fields.hidden_size, kernel=fields.conv_L_cache, bias=fields.conv_bias),
        "names": TensorNames(
            final_norm="embedding_norm",
            branch_norms=("operator_norm", "ffn_norm"),
            attention_out="out_proj",
            head_norms=("q_layernorm", "k_layernorm"),
            recurrent="conv",
            mlp="feed_forward",
            projections=("w1", "w3", "w2"),
        ),
    }


def short_conv_experts(fields: FamilyConfig) -> dict[str, Any]:
    experts = mixture(
        fields,
        ExpertNames(block="feed_forward", projections=("w1", "w3", "w2")),
        sigmoid=True,
        least_sum=1e-6,
        prefers=fields.use_expert_bias,
        scale=fields.routed_scaling_factor,
        dense_layers=frozenset(range(fields.num_dense_layers)),
    )
    return short_conv(fields) | experts


def mamba(fields: FamilyConfig) -> dict[str, Any]:
    inner = fields.mamba_expand * fields.hidden_size
    head_dim = fields.mamba_d_head if isinstance(fields.mamba_d_head, int) else inner // max(1, fields.mamba_n_heads)
    limits = fields.time_step_limit or (0.0, math.inf)
    low, high = (float(each["__float__"]) if isinstance(each, dict) else each for each in limits)
    return {
        "layer_kinds": layer_kinds(fields, fields.attn_layer_indices or ()),
        "recurrent": Mamba2(
            num_heads=fields.mamba_n_heads,
            head_dim=head_dim,
            num_groups=fields.mamba_n_groups,
            state_size=fields.mamba_d_state,
            kernel=fields.mamba_d_conv,
            conv_bias=fields.mamba_conv_bias,
            proj_bias=fields.mamba_proj_bias,
            step_limits=(low, high),
            norm_group=fields.mamba_n_heads * head_dim // max(1, fields.mamba_n_groups),
        ),
        "names": TensorNames(
            final_norm="final_layernorm",
            branch_norms=("input_layernorm", "pre_ff_layernorm"),
            recurrent="mamba",
            mlp="feed_forward",
        ),
    }


def one_branch_layers(fields: FamilyConfig) -> dict[str, Any]:
    """Nemotron-H, whose layers have one branch each: Mamba-2 or attention and an MLP after it are one layer here."""
    kinds = fields.layer_types or []
    mixers = [i for i, kind in enumerate(kinds) if kind != "mlp"]
    traits = mamba(msgspec.structs.replace(fields, layer_types=[kinds[i] for i in mixers]))
    limits = fields.time_step_min, math.inf  # as in transformers, time_step_limit has no effect
    names = TensorNames(
        body="backbone",
        embedding="embeddings",
        final_norm="norm_f",
        branch_norms=("norm", "norm"),
        attention="mixer",
        recurrent="mixer",
        mlp="mixer",
        projections=("up_proj", "down_proj"),
        skipped=("mtp.",),
    )
    return traits | {
        "num_layers": len(mixers),
        "branches": [(i, i + 1 if kinds[i + 1 : i + 2] == ["mlp"] else None) for i in mixers],
        "recurrent": replace(traits["recurrent"], proj_bias=fields.use_bias, step_limits=limits),
        "float_norms": True,
        "gated_mlp": False,
        "names": names,
    }


def granite_experts(fields: FamilyConfig, router: str = "router.layer") -> dict[str, Any]:
    shared = ("input_linear", "output_linear")
    names = ExpertNames(block="block_sparse_moe", router=router, shared="shared_mlp", shared_projections=shared)
    width = fields.shared_intermediate_size
    experts = mixture(
        fields,
        names,
        renormalize=True,  # the softmax is over the picked ones
        shared=Mlp(width=width, activation=fields.hidden_act) if width else None,
        gates_shared=False,
    )
    return granite(fields) | experts


def granite_hybrid(fields: FamilyConfig) -> dict[str, Any]:
    """Granite with Mamba-2: its MLP is the shared expert, alone where there are no others."""
    names = TensorNames(recurrent="mamba", mlp="shared_mlp", projections=("input_linear", "output_linear"))
    if not fields.num_local_experts:
        traits = granite(fields) | {"intermediate_size": fields.shared_intermediate_size}
    else:
        traits = granite_experts(fields)
    return traits | mamba(fields) | {"names": names}


def glm_experts(fields: FamilyConfig) -> dict[str, Any]:
    """GLM-4.5's mixture, which is DeepSeek's without groups of experts."""
    names = ExpertNames(preference="gate.e_score_correction_bias", shared="mlp.shared_experts")
    experts = mixture(
        fields,
        names,
        sigmoid=True,
        least_sum=1e-20,
        prefers=True,
        scale=fields.routed_scaling_factor,
        dense_layers=frozenset(range(fields.num_dense_layers)),
        **_always(fields),
    )
    # layers after the last one only predict further tokens
    after = TensorNames(skipped=(f"model.layers.{fields.num_hidden_layers}.",))
    return {"qk_norm": fields.use_qk_norm, "names": after} | experts


def ernie_experts(fields: FamilyConfig) -> dict[str, Any]:
    names = ExpertNames(preference="moe_statics.e_score_correction_bias", shared="mlp.shared_experts")
    last = fields.moe_layer_end_index if fields.moe_layer_end_index >= 0 else fields.num_hidden_layers - 1
    sparse = [
        i
        for i in range(max(0, fields.moe_layer_start_index), last + 1)
        if not (i + 1) % max(1, fields.moe_layer_interval)
    ]
    experts = mixture(
        fields,
        names,
        renormalize=True,
        prefers=True,
        dense_layers=frozenset(range(fields.num_hidden_layers)) - set(sparse),
        **_always(fields),
    )
    return {"names": TensorNames(skipped=("model.mtp",))} | experts


def _always(fields: FamilyConfig) -> dict[str, Any]:
    """Experts that every token goes to: together one of their summed width."""
    count = fields.n_shared_experts or 0
    width = fields.moe_intermediate_size or fields.intermediate_size
    shared = Mlp(width=count * width, activation=fields.hidden_act) if count * width else None
    return {"shared": shared, "gates_shared": False}


def starcoder(fields: FamilyConfig) -> dict[str, Any]:
    biases = dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), fields.use_bias)
    names = TensorNames(projections=("c_fc", "c_proj"))
    return {**biases, **BIASED_NORMS, "hidden_act": "ungated_gelu", "gated_mlp": False, "names": names}


def cohere(fields: FamilyConfig) -> dict[str, Any]:
    scale = 1 / fields.logit_scale
    return {"float_norms": True, "centred_norms": "plain", "layer_norms": "shared", "logits_divisor": scale}
