"""The native families: the differences of each from Llama, as data. Free of torch."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec

from pagedcli.models.family import ATTENDS, RECURS, Family, FamilyConfig
from pagedcli.models.gemma4 import GEMMA4
from pagedcli.models.recurrent_spec import GatedDelta, Mamba2, ShortConv
from pagedcli.models.spec import ExpertNames, ExpertsSpec, LayerKind, TensorNames


def _granite(fields: FamilyConfig) -> dict[str, Any]:
    return {
        "query_scale": fields.attention_multiplier,
        "embedding_multiplier": fields.embedding_multiplier,
        "residual_multiplier": fields.residual_multiplier,
        "logits_divisor": fields.logits_scaling,
    }


def _hyperclovax(fields: FamilyConfig) -> dict[str, Any]:
    traits = _granite(fields) | {"logits_divisor": 1 / fields.logits_scaling}  # that multiplies here
    if not fields.use_post_norm:
        return traits
    norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return traits | {"layer_norms": "around", "names": TensorNames(branch_norms=norms)}


def _gemma(fields: FamilyConfig) -> dict[str, Any]:
    return {
        "layer_norms": "around",
        "float_norms": True,
        "norm_offset": True,
        "query_scale": fields.query_pre_attn_scalar**-0.5,
        "soft_cap": fields.attn_logit_softcapping,
        "logits_soft_cap": fields.final_logit_softcapping,
        "embedding_multiplier": fields.hidden_size**0.5,
    }


def _experts(fields: FamilyConfig, names: ExpertNames | None = None, **others: Any) -> ExpertsSpec:
    step, num_layers = max(1, fields.decoder_sparse_step), fields.num_hidden_layers
    dense = fields.mlp_only_layers or []
    if fields.mlp_layer_types is not None:
        dense = [i for i, kind in enumerate(fields.mlp_layer_types) if kind == "dense"]
    return ExpertsSpec(
        num_experts=fields.num_local_experts or fields.num_experts or 0,
        num_per_token=fields.num_experts_per_tok or 1,
        intermediate_size=fields.moe_intermediate_size or fields.intermediate_size,
        renormalize=fields.norm_topk_prob,
        shared_intermediate_size=fields.shared_expert_intermediate_size,
        dense_layers=frozenset(i for i in range(num_layers) if i in dense or (i + 1) % step),
        names=names or ExpertNames(),
        **others,
    )


def _kinds(fields: FamilyConfig, attending: Collection[int]) -> tuple[LayerKind, ...]:
    """Which layers attend: those of layer_types, where it is given, or the numbers in `attending`."""
    if fields.layer_types is not None:
        return tuple("attention" if kind in ATTENDS else "recurrent" for kind in fields.layer_types)
    return tuple("attention" if i in attending else "recurrent" for i in range(fields.num_hidden_layers))


def _gated_delta(fields: FamilyConfig, *, interleaved: bool = False) -> dict[str, Any]:
    """Gated delta nets, and attention with an output gate."""
    interval = max(1, fields.full_attention_interval)
    return {
        "qk_norm": True,
        "float_norms": True,
        "norm_offset": True,
        "output_gate": True,
        "layer_kinds": _kinds(fields, range(interval - 1, fields.num_hidden_layers, interval)),
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


def _short_conv(fields: FamilyConfig) -> dict[str, Any]:
    inner, indices = fields.intermediate_size, fields.full_attn_idxs
    if fields.block_auto_adjust_ff_dim:  # as in the first Llama: 2/3 of it, times a factor, rounded up to a multiple
        inner = int((fields.block_ffn_dim_multiplier or 1.0) * int(2 * inner / 3))
        inner = -(-inner // fields.block_multiple_of) * fields.block_multiple_of
    return {
        "qk_norm": True,
        "intermediate_size": inner,
        "layer_kinds": _kinds(fields, range(fields.num_hidden_layers) if indices is None else indices),
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


def _short_conv_experts(fields: FamilyConfig) -> dict[str, Any]:
    experts = replace(
        _experts(fields, ExpertNames(block="feed_forward", projections=("w1", "w3", "w2"))),
        sigmoid=True,
        prefers=fields.use_expert_bias,
        scale=fields.routed_scaling_factor,
        dense_layers=frozenset(range(fields.num_dense_layers)),
    )
    return _short_conv(fields) | {"experts": experts}


def _mamba(fields: FamilyConfig) -> dict[str, Any]:
    inner = fields.mamba_expand * fields.hidden_size
    head_dim = fields.mamba_d_head if isinstance(fields.mamba_d_head, int) else inner // max(1, fields.mamba_n_heads)
    limits = fields.time_step_limit or [0.0, math.inf]
    low, high = (float(each["__float__"]) if isinstance(each, dict) else each for each in limits)
    return {
        "layer_kinds": _kinds(fields, fields.attn_layer_indices or ()),
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


def _one_branch_layers(fields: FamilyConfig) -> dict[str, Any]:
    """Nemotron-H, whose layers have one branch each: Mamba-2 or attention and an MLP after it are one layer here."""
    kinds = fields.layer_types or []
    mixers = [i for i, kind in enumerate(kinds) if kind != "mlp"]
    traits = _mamba(msgspec.structs.replace(fields, layer_types=[kinds[i] for i in mixers]))
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
        branches=tuple((i, i + 1 if kinds[i + 1 : i + 2] == ["mlp"] else None) for i in mixers),
        skipped=("mtp.",),
    )
    return traits | {
        "num_layers": len(mixers),
        "recurrent": replace(traits["recurrent"], proj_bias=fields.use_bias, step_limits=limits),
        "float_norms": True,
        "gated_mlp": False,
        "names": names,
    }


def _granite_experts(fields: FamilyConfig, router: str = "router.layer") -> dict[str, Any]:
    shared = ("input_linear", "output_linear")
    names = ExpertNames(block="block_sparse_moe", router=router, shared="shared_mlp", shared_projections=shared)
    experts = replace(
        _experts(fields, names),
        renormalize=True,  # the softmax is over the picked ones
        shared_intermediate_size=fields.shared_intermediate_size or None,
        gates_shared=False,
    )
    return _granite(fields) | {"experts": experts}


def _granite_hybrid(fields: FamilyConfig) -> dict[str, Any]:
    """Granite with Mamba-2: its MLP is the shared expert, alone where there are no others."""
    names = TensorNames(recurrent="mamba", mlp="shared_mlp", projections=("input_linear", "output_linear"))
    if not fields.num_local_experts:
        traits = _granite(fields) | {"intermediate_size": fields.shared_intermediate_size}
    else:
        traits = _granite_experts(fields)
    return traits | _mamba(fields) | {"names": names}


_TIED = "tie_word_embeddings"
_MIXTRAL_EXPERTS = ExpertNames(block="block_sparse_moe", projections=("w1", "w3", "w2"))
_GEMMA = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 2,
}
_QWEN3_NEXT_EXPERTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    4,
    256,
    32768,
    (None, None),
    "never",
    partial_rope=True,
    layer_types=ATTENDS | RECURS,
    defaults={"partial_rotary_factor": 0.25},
    traits=_gated_delta,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    num_kv_heads=2,
    defaults=_QWEN3_5.defaults
    | _QWEN3_NEXT_EXPERTS
    | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512},  # no layer has an ordinary MLP
    traits=lambda fields: _gated_delta(fields) | {"experts": _experts(fields)},
)
_LLAMA = Family("LlamaForCausalLM", None, None, 2048, (1, 2), "never", mlp_bias=None)
_MISTRAL = Family("MistralForCausalLM", 8, None, 131072, (1, 2), "all", qkv_bias=False, out_bias=False)
_GLM = Family(
    "GlmForCausalLM",
    2,
    128,
    131072,
    (None, None),
    "never",
    out_bias=False,
    partial_rope=True,
    neighbours=True,
    defaults={
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151329, 151336, 151338],
    },
    traits=lambda _: {"names": TensorNames(projections=("gate_up_proj", "down_proj"))},
)
_GLM4_NAMES = TensorNames(
    branch_norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    projections=("gate_up_proj", "down_proj"),
)
_GEMMA3 = Family(
    "Gemma3ForCausalLM",
    4,
    256,
    131072,
    (2, 1),
    "alternating",
    activations=("gelu_pytorch_tanh",),
    ropes="by window",
    local_theta=1e4,
    defaults={**_GEMMA, "sliding_window_pattern": 6},
    # as in transformers, attn_logit_softcapping has no effect
    traits=lambda fields: _gemma(fields) | {"qk_norm": True, "soft_cap": None},
)
_GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    None,
    None,
    2048,
    (1, 2),
    "never",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    traits=_granite_experts,
)
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    None,
    None,
    2048,
    (None, 50279),
    "never",
    defaults={"rms_norm_eps": 1e-5},
    traits=lambda _: {"qk_norm_all": True, "layer_norms": "after", "float_norms": True},
)
_LFM2 = Family(
    "Lfm2ForCausalLM",
    8,
    None,
    128000,
    (1, 2),
    "never",
    qkv_bias=False,
    out_bias=False,
    layer_types=ATTENDS | RECURS,
    renamed={"norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": _TIED},
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, _TIED: True},
    traits=_short_conv,
)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mistral3": replace(_MISTRAL, architecture="Mistral3ForConditionalGeneration", nested=True),
    "ministral3": replace(
        _MISTRAL,
        architecture="Ministral3ForCausalLM",
        head_dim=128,
        max_position_embeddings=262144,
        query_growth=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        traits=lambda _: {"layer_norms": "around", "names": _GLM4_NAMES},
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        32,
        None,
        2048,
        (0, 2),
        "alternating",
        qkv_bias=False,
        out_bias=False,
        ropes="in windows",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        traits=lambda _: {"qk_norm": True, "layer_norms": "after"},
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        8,
        128,
        524288,
        (0, 2),
        "never",
        mlp_bias=None,
        defaults={"attention_bias": True},
        traits=lambda fields: {"attention_out_bias": fields.attention_out_bias},
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        2,
        128,
        131072,
        (1, 2),
        "never",
        neighbours=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        traits=lambda fields: dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), fields.use_bias),
    ),
    "helium": Family(
        "HeliumForCausalLM",
        20,
        128,
        4096,
        (1, 2),
        "never",
        out_bias=False,
        mlp_bias=None,
        neighbours=True,
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5},
        traits=lambda _: {"float_norms": True},
    ),
    "cwm": Family(
        "CwmForCausalLM",
        8,
        128,
        131072,
        (128000, None),
        "alternating, full first",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=None,
        defaults={
            "rms_norm_eps": 1e-5,
            "eos_token_id": [128001, 128008, 128009],
            "sliding_window": 8192,
            "sliding_window_pattern": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", 32, None, 32768, (None, None), "by layer", qkv_bias=True, out_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", 32, 128, 32768, (None, None), "by layer", traits=lambda _: {"qk_norm": True}),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        sliding="alternating",
        ropes="by window",
        defaults=_OLMO2.defaults | {"rope_theta": 5e5, "sliding_window_pattern": 4},
    ),
    "granite": Family("GraniteForCausalLM", None, None, 2048, (1, 2), "never", mlp_bias=None, traits=_granite),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        4,
        None,
        8192,
        (100257, 100257),
        "alternating, full first",
        mlp_bias=None,
        ropes="by theta",
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "sliding_window_pattern": 4,
        },
        traits=lambda fields: _granite(fields) | {"sinks": True},
    ),
    "hyperclovax": replace(
        _LLAMA, architecture="HyperCLOVAXForCausalLM", defaults={"attention_multiplier": None}, traits=_hyperclovax
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(_GRANITE_MOE, architecture="GraniteMoeSharedForCausalLM"),
    "granitemoe_swa": replace(
        _GRANITE_MOE,
        architecture="GraniteMoeSWAForCausalLM",
        sliding="alternating, full first",
        ropes="by theta",
        defaults=_GRANITE_MOE.defaults | {"sliding_window": 128, "sliding_window_pattern": 4},
        traits=lambda fields: _granite_experts(fields, "router") | {"sinks": True},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        4,
        None,
        32768,
        (128000, 128001),
        "as listed",
        mlp_bias=None,
        ropes="as listed",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "sliding_window": None},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        None,
        None,
        4096,
        (1, 32000),
        "all",
        qkv_bias=False,
        out_bias=False,
        partial_rope=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        traits=lambda _: {"fused_projections": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        4,
        256,
        8192,
        (2, 1),
        "alternating",
        activations=("gelu_pytorch_tanh",),
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        traits=_gemma,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, architecture="Gemma3ForConditionalGeneration", nested=True),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        4,
        None,
        32768,
        (None, None),
        "if used",
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        traits=lambda fields: {"qk_norm": True, "experts": _experts(fields)},
    ),
    "mellum": Family(
        "MellumForCausalLM",
        4,
        128,
        131072,
        (None, None),
        "alternating",
        ropes="by window",
        local_theta=1e4,
        defaults={
            "rope_theta": 5e5,
            "sliding_window": 1024,
            "sliding_window_pattern": 1,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
        },
        traits=lambda fields: {"qk_norm": True, "experts": _experts(fields), "names": TensorNames(skipped=("mtp.",))},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        16,
        None,
        32768,
        (None, None),
        "as listed",
        out_bias=False,
        defaults={
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        traits=lambda fields: {"experts": _experts(fields), "qkv_bias": fields.qkv_bias},
    ),
    "mixtral": Family(
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
        traits=lambda fields: {"experts": _experts(fields, names=_MIXTRAL_EXPERTS)},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        None,
        None,
        4096,
        (None, 50279),
        "never",
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
        traits=lambda fields: {"qk_norm_all": True, "experts": _experts(fields)},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        8,
        64,
        131072,
        (None, None),
        "alternating",
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        traits=lambda fields: {
            "sinks": True,
            "float_norms": True,
            "hidden_act": "clamped_silu",
            "experts": _experts(fields, ExpertNames(router="router"), has_biases=True, alternating=True),
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        2,
        256,
        32768,
        (None, None),
        "never",
        partial_rope=True,
        layer_types=ATTENDS | RECURS,
        defaults={"partial_rotary_factor": 0.25, **_QWEN3_NEXT_EXPERTS},
        traits=lambda fields: _gated_delta(fields, interleaved=True) | {"experts": _experts(fields)},
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        architecture="Lfm2MoeForCausalLM",
        defaults=_LFM2.defaults
        | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "norm_topk_prob": True}
        | {"block_auto_adjust_ff_dim": False},  # intermediate_size is what it says
        traits=_short_conv_experts,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        8,
        None,
        262144,
        (1, 2),
        "never",
        mlp_bias=None,
        partial_rope=True,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        traits=_mamba,
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        8,
        128,
        4096,
        (1, 2),
        "never",
        mlp_bias=None,
        activations=("relu2",),
        ropes="if named",
        layer_types=ATTENDS | RECURS | {"mlp"},
        layer_letters={"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
        renamed={
            "layers_block_type": "layer_types",
            "layer_norm_epsilon": "rms_norm_eps",
            "mlp_hidden_act": "hidden_act",
            "ssm_state_size": "mamba_d_state",
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
        },
        defaults={
            "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 8,
        },
        traits=_one_branch_layers,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        None,
        None,
        2048,
        (1, 2),
        "never",
        ropes="if named",
        layer_types=ATTENDS | RECURS,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        traits=_granite_hybrid,
    ),
    **GEMMA4,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": replace(_QWEN3_5, architecture="Qwen3_5ForConditionalGeneration", nested=True),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe": replace(_QWEN3_5_MOE, architecture="Qwen3_5MoeForConditionalGeneration", nested=True),
}
