"""The architectures of GGUF files: the family of each, and what metadata say of its fields. Free of torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedcli.models.gguf.header import Metadata

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are scaled by hidden_size / num_heads
STILL = 1e29  # a frequency that is divided by so much does not turn

# a family's field <- metadata key and its default, whose type is the value's. `int` instead of a default: a file must
# have the key; `float`: without it the family's own default holds.
Keys = Mapping[str, tuple[str, int | float | type]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What files of an architecture say, other than what all say alike."""

    family: str  # model_type
    others: Mapping[str, str] = field(default_factory=dict)  # metadata key -> model_type of files that say it
    keys: Keys = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)  # fields that are the same in all files
    windows: int | None = None  # a window in all but the last of each so many layers, if files do not list them
    rotates_part: bool = False  # rope.dimension_count is read
    # rotary embedding there turns neighbouring elements, so the rows of q and k are stored in another order
    reordered: bool = False
    tiled: bool = False  # a key head serves every n-th value head there, elsewhere n neighbours
    computed: Callable[[Metadata], dict[str, Any]] | None = None  # fields of several values, or of the tensors


def fields_of(said: Metadata, kind: Architecture) -> dict[str, Any]:
    """The fields that files of this architecture alone have, or call otherwise."""
    found = dict(kind.always)
    for key, (name, default) in kind.keys.items():
        read = said.real if default is float or isinstance(default, float) else said.number
        value = read(name) if isinstance(default, type) else read(name, default)  # type: ignore[arg-type]  # its type
        if value is not None:
            found[key] = value
    if kind.rotates_part:
        found["partial_rotary_factor"] = said.rotated()
    if kind.windows is not None:
        found |= _windows(said, kind.windows)
    return found | (kind.computed(said) if kind.computed is not None else {})


def _windows(fields: Metadata, default: int) -> dict[str, Any]:
    """Which layers have a sliding window: every one but the last of each `default` layers, or as listed."""
    layers, window = fields.layers(), fields.number("attention.sliding_window", 0)
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = default
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        slides = [bool(pattern) and (i + 1) % pattern != 0 for i in range(layers)]
    elif isinstance(pattern, list) and len(pattern) >= layers:
        slides = [bool(each) for each in pattern[:layers]]
    else:
        raise fields.header.error(f"{fields.prefix}.attention.sliding_window_pattern is {pattern!r:.40}")
    kinds = ["sliding_attention" if each and window else "full_attention" for each in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _gemma(fields: Metadata) -> dict[str, Any]:
    heads, width = max(1, fields.number("attention.head_count")), fields.number("embedding_length")
    is_largest = fields.layers() == _GEMMA_27B[fields.prefix]
    return {"query_pre_attn_scalar": width // heads if is_largest else fields.head_dim()}


def _phi3(fields: Metadata) -> dict[str, Any]:
    original = fields.number("rope.scaling.original_context_length", fields.number("context_length"))
    config: dict[str, Any] = {
        "sliding_window": fields.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": fields.rotated(),
        "original_max_position_embeddings": original,
    }
    return config | _longrope(fields)


def _longrope(fields: Metadata) -> dict[str, Any]:
    """Rotary factors of short and of long texts, if the file has both."""
    short, long = (fields.factors(f"rope_factors_{name}.weight") for name in ("short", "long"))
    if not short or not long:
        return {}
    factor = fields.real("rope.scaling.attn_factor")
    given = {} if factor is None else {"attention_factor": factor}
    return {"rope_scaling": {"rope_type": "longrope", "short_factor": short, "long_factor": long, **given}}


def _granite_hybrid(fields: Metadata) -> dict[str, Any]:
    heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    attends = fields.with_tensor("attn_q.weight")
    first = attends.index(False) if False in attends else 0
    return {
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "shared_intermediate_size": fields.number(
            "expert_shared_feed_forward_length", fields.get("feed_forward_length")
        ),
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else None,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(1, heads),
        "mamba_conv_bias": fields.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has(f"blk.{first}.ssm_in.bias"),
    }


def _gated_delta(fields: Metadata) -> dict[str, Any]:
    heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    attends = fields.with_tensor("attn_q.weight")
    config = {
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "linear_value_head_dim": inner // max(1, heads),
        "linear_num_value_heads": heads,
    }
    if fields.prefix != "qwen35":
        shared = fields.get("expert_feed_forward_length")
        config |= {
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length", shared),
        }
    return config


def _gemma4(fields: Metadata) -> dict[str, Any]:
    """Heads, widths and rotary embeddings that differ by layer."""
    kinds, table = _windows(fields, 6)["layer_types"], fields.header.tensors.get("per_layer_token_embd.weight")
    own = len(kinds) - fields.number("attention.shared_kv_layers", 0)
    full = [i for i, kind in enumerate(kinds[: max(0, own)]) if kind == "full_attention"]
    kv_heads = {kind: fields.of_layers("attention.head_count_kv", kinds, kind)[0] for kind in kinds}
    widths = fields.of_layers("feed_forward_length")
    turned = sum(factor < STILL for factor in fields.factors("rope_freqs.weight"))
    head_dim = fields.number("attention.key_length")
    return {
        "head_dim": fields.number("attention.key_length_swa"),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads.get("sliding_attention", kv_heads.get("full_attention")),
        "num_global_key_value_heads": kv_heads.get("full_attention"),
        "attention_k_eq_v": bool(full) and not fields.has(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": fields.number("attention.shared_kv_layers", 0),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "hidden_size_per_layer_input": fields.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": fields.number("expert_count", 0) > 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.real("rope.freq_base", 1e6),
                "partial_rotary_factor": 2 * turned / max(1, head_dim) or 1.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.real("rope.freq_base_swa", 1e4)},
        },
    }


def _olmo(fields: Metadata) -> dict[str, Any]:
    """OLMo 3 has windows, whose rotary embedding is never stretched."""
    if not fields.get("attention.sliding_window"):
        return {}
    theta = fields.real("rope.freq_base", 10000.0)
    return _windows(fields, 4) | {"rope_local_base_freq": fields.real("rope.freq_base_swa", theta)}


def _mistral3(fields: Metadata) -> dict[str, Any]:
    """Ministral 3 where queries grow with their position, otherwise Mistral."""
    growth = fields.real("attention.temperature_scale")
    rope = rope_of(fields)
    if not growth:
        return {}
    scaling = rope.get("rope_scaling")
    if scaling is None:
        raise fields.header.error("it has attention.temperature_scale, but no rope.scaling")
    mscale = fields.real("rope.scaling.yarn_log_multiplier", 1.0)
    return {"rope_scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale, "llama_4_scaling_beta": growth}}


def _gpt_oss(fields: Metadata) -> dict[str, Any]:
    """What its configuration says of YaRN's limits, files do not."""
    scaling = rope_of(fields).get("rope_scaling")
    return {"rope_scaling": scaling | {"truncate": False}} if scaling else {}


def _without_heads(fields: Metadata) -> list[bool]:
    """Whether each layer has no heads of K and V, and so keeps a state."""
    kv_heads = fields.get("attention.head_count_kv")
    counts = kv_heads if isinstance(kv_heads, list) else [kv_heads] * fields.layers()
    return [count == 0 for count in counts]


def _lfm2(fields: Metadata) -> dict[str, Any]:
    convolves = _without_heads(fields)
    first = convolves.index(True) if True in convolves else 0
    config: dict[str, Any] = {
        "layer_types": ["conv" if each else "full_attention" for each in convolves],
        "conv_bias": fields.has(f"blk.{first}.shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
    }
    if fields.prefix == "lfm2moe":
        config["use_expert_bias"] = any(name.endswith(".exp_probs_b.bias") for name in fields.header.tensors)
    return config


def _latents(fields: Metadata) -> dict[str, Any]:
    """Sizes of heads before they are absorbed, which older files call as those of other models. The files' factor of
    YaRN's mscale is a tenth of it."""
    turned = fields.number("rope.dimension_count")
    num_groups = fields.number("expert_group_count", 1)
    config: dict[str, Any] = {
        "kv_lora_rank": fields.number("attention.kv_lora_rank"),
        "q_lora_rank": fields.number("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": fields.number("attention.key_length_mla", fields.head_dim()) - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": fields.number("attention.value_length_mla", fields.number("attention.value_length", 0)),
        "n_group": num_groups,
        "topk_group": fields.number("expert_group_used_count", 1),
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
    }
    scaling, stretch = rope_of(fields).get("rope_scaling"), fields.real("rope.scaling.yarn_log_multiplier")
    if scaling is not None and stretch:
        config["rope_scaling"] = scaling | {"mscale": 10 * stretch, "mscale_all_dim": 10 * stretch}
    return config


def _minicpm3(fields: Metadata) -> dict[str, Any]:
    """Files do not say how long texts were at first, nor the size of V's heads, which is that of most models."""
    width, heads = fields.number("embedding_length"), fields.number("attention.head_count")
    original = {"original_max_position_embeddings": fields.number("context_length")}
    return _latents(fields) | {"v_head_dim": width // max(1, heads)} | original | _longrope(fields)


def _falcon_h1(fields: Metadata) -> dict[str, Any]:
    """The factors are those of the weights there."""
    return {
        "mamba_conv_bias": fields.has("blk.0.ssm_conv1d.bias"),
        "mamba_rms_norm": fields.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _kimi_linear(fields: Metadata) -> dict[str, Any]:
    """Both kinds of layers have as many heads."""
    return _latents(fields) | {
        "layer_types": ["linear_attention" if each else "full_attention" for each in _without_heads(fields)],
        "linear_num_heads": fields.number("attention.head_count"),
    }


def _nemotron_h(fields: Metadata) -> dict[str, Any]:
    """Layers by their tensors."""
    heads, inner = fields.number("ssm.time_step_rank"), fields.number("ssm.inner_size")
    kinds = {"attn_q": "full_attention", "ssm_in": "linear_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    has = {kind: fields.with_tensor(f"{part}.weight") for part, kind in kinds.items()}
    layer_types = [next((kind for kind in has if has[kind][i]), "no branch") for i in range(fields.layers())]
    first = layer_types.index("linear_attention") if "linear_attention" in layer_types else 0
    widths = fields.get("feed_forward_length")
    width = max(widths) if isinstance(widths, list) and all(type(each) is int for each in widths) else widths
    shared = fields.number("expert_feed_forward_length", 1)
    return {
        "layer_types": layer_types,
        "intermediate_size": width or shared,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(1, heads),
        "mamba_conv_bias": fields.has(f"blk.{first}.ssm_conv1d.bias"),
        "use_bias": fields.has(f"blk.{first}.ssm_in.bias"),
        "moe_shared_expert_intermediate_size": fields.number("expert_shared_feed_forward_length", shared),
    }


def rope_of(fields: Metadata) -> dict[str, Any]:
    """What most files say alike of their rotary embedding."""
    theta = fields.real("rope.freq_base", 10000.0)
    kind, factor = fields.get("rope.scaling.type"), fields.real("rope.scaling.factor")
    config: dict[str, Any] = {"rope_theta": theta}
    if kind == "linear" and factor is not None and factor != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor is not None:
        names = {
            "original_max_position_embeddings": fields.get("rope.scaling.original_context_length"),
            "attention_factor": fields.real("rope.scaling.yarn_attn_factor"),
            "beta_fast": fields.real("rope.scaling.yarn_beta_fast"),
            "beta_slow": fields.real("rope.scaling.yarn_beta_slow"),
        }
        given = {name: value for name, value in names.items() if value is not None}
        config["rope_scaling"] = {"rope_type": "yarn", "factor": factor, **given}
    elif kind not in (None, "none", "linear", "longrope"):
        raise fields.header.error(f"{fields.prefix}.rope.scaling.type is {kind!r:.40}, which is not supported")
    return config


_GRANITE: Keys = {
    "attention_multiplier": ("attention.scale", float),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
}
_LAYER_NORM: Keys = {"rms_norm_eps": ("attention.layer_norm_epsilon", 1e-5)}
_GATED_DELTA: Keys = {
    "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
    "linear_key_head_dim": ("ssm.state_size", int),
    "linear_num_key_heads": ("ssm.group_count", int),
}
_LFM2: Keys = {"conv_L_cache": ("shortconv.l_cache", int)}
_COHERE: Keys = {**_LAYER_NORM, "logit_scale": ("logit_scale", 1.0)}
_SOFT_CAP: Keys = {"final_logit_softcapping": ("final_logit_softcapping", float)}
_EXPERTS: Keys = {
    "num_dense_layers": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
}
_GROUPS: Keys = {"n_group": ("expert_group_count", 1), "topk_group": ("expert_group_used_count", 1)}
_MAMBA: Keys = {
    "mamba_n_groups": ("ssm.group_count", int),
    "mamba_d_state": ("ssm.state_size", int),
    "mamba_d_conv": ("ssm.conv_kernel", int),
}
_NEMOTRON_H = Architecture(
    family="nemotron_h",
    keys={
        **_MAMBA,
        **_GROUPS,
        "routed_scaling_factor": ("expert_weights_scale", 1.0),
        "moe_latent_size": ("moe_latent_size", 0),
    },
    computed=_nemotron_h,
)
ARCHITECTURES = {
    "llama": Architecture(family="llama", others={"expert_count": "mixtral"}, reordered=True),
    "qwen2": Architecture(family="qwen2"),
    "qwen3": Architecture(family="qwen3"),
    "qwen2vl": Architecture(family="qwen2"),
    "qwen3vl": Architecture(family="qwen3"),
    "qwen3vlmoe": Architecture(family="qwen3_moe", always={"norm_topk_prob": True}),
    "deepseek2": Architecture(
        family="deepseek_v2",
        others={"expert_weights_norm": "deepseek_v3"},
        keys={**_EXPERTS, "n_shared_experts": ("expert_shared_count", 0)},
        computed=_latents,
    ),
    # llama.cpp has these numbers, files do not
    "minicpm3": Architecture(
        family="minicpm3", always={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}, computed=_minicpm3
    ),
    "falcon-h1": Architecture(
        family="falcon_h1",
        keys={**_MAMBA, "mamba_n_heads": ("ssm.time_step_rank", int), "mamba_d_ssm": ("ssm.inner_size", int)},
        computed=_falcon_h1,
    ),
    "hunyuan-dense": Architecture(family="hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(family="hunyuan_v1_moe"),
    "kimi-linear": Architecture(
        family="kimi_linear",
        keys={
            **_EXPERTS,
            "n_shared_experts": ("expert_shared_count", 0),
            "linear_head_dim": ("kda.head_dim", int),
            "linear_conv_kernel_dim": ("ssm.conv_kernel", int),
        },
        computed=_kimi_linear,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "qwen2moe": Architecture(
        family="qwen2_moe", keys={"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int)}
    ),
    "qwen3moe": Architecture(family="qwen3_moe", always={"norm_topk_prob": True}),
    "phimoe": Architecture(
        family="phimoe", computed=lambda said: _phi3(said) | {"lm_head_bias": said.has("output.bias")}
    ),
    "gemma": Architecture(family="gemma"),
    "gemma2": Architecture(
        family="gemma2",
        keys={**_SOFT_CAP, "attn_logit_softcapping": ("attn_logit_softcapping", float)},
        windows=2,
        computed=_gemma,
    ),
    "gemma3": Architecture(
        family="gemma3_text",
        keys={**_SOFT_CAP, "rope_local_base_freq": ("rope.freq_base_swa", 10000.0)},
        windows=6,
        computed=_gemma,
    ),
    "phi3": Architecture(family="phi3", computed=_phi3),
    "granite": Architecture(family="granite", keys=_GRANITE, reordered=True),
    "granitemoe": Architecture(
        family="granitemoe",
        keys={**_GRANITE, "shared_intermediate_size": ("expert_shared_feed_forward_length", 0)},
        reordered=True,
    ),
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        keys={**_GRANITE, "num_experts": ("expert_count", 0), **_MAMBA},
        reordered=True,
        computed=_granite_hybrid,
    ),
    "olmo2": Architecture(family="olmo2", others={"attention.sliding_window": "olmo3"}, computed=_olmo),
    "olmoe": Architecture(family="olmoe"),
    "smollm3": Architecture(family="smollm3", reordered=True),
    "gpt-oss": Architecture(family="gpt_oss", windows=2, computed=_gpt_oss),
    "lfm2": Architecture(family="lfm2", keys=_LFM2, computed=_lfm2),
    "lfm2moe": Architecture(family="lfm2_moe", keys={**_LFM2, **_EXPERTS}, computed=_lfm2),
    "qwen3next": Architecture(family="qwen3_next", keys=_GATED_DELTA, rotates_part=True, computed=_gated_delta),
    "qwen35": Architecture(
        family="qwen3_5_text", keys=_GATED_DELTA, rotates_part=True, tiled=True, computed=_gated_delta
    ),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text", keys=_GATED_DELTA, rotates_part=True, tiled=True, computed=_gated_delta
    ),
    "gemma4": Architecture(family="gemma4_text", keys=_SOFT_CAP, windows=6, computed=_gemma4),
    "mistral3": Architecture(
        family="mistral",
        others={"attention.temperature_scale": "ministral3"},
        always={"sliding_window": None},
        reordered=True,
        computed=_mistral3,
    ),
    "glm4": Architecture(family="glm4", rotates_part=True),
    "exaone4": Architecture(family="exaone4", windows=4),
    "ernie4_5": Architecture(family="ernie4_5"),
    "ernie4_5-moe": Architecture(
        family="ernie4_5_moe",
        keys={
            "moe_layer_start_index": ("leading_dense_block_count", 0),
            "moe_layer_interval": ("interleave_moe_layer_step", 1),
            "n_shared_experts": ("expert_shared_count", 0),
        },
    ),
    "glm4moe": Architecture(
        family="glm4_moe",
        keys={**_EXPERTS, "n_shared_experts": ("expert_shared_count", 0)},
        rotates_part=True,
        computed=lambda said: {
            "norm_topk_prob": said.get("expert_weights_norm") is not False,
            "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
        },
    ),
    "arcee": Architecture(family="arcee", reordered=True),
    # rope_freqs.weight has what their rotary embedding is stretched by
    "apertus": Architecture(family="apertus", always={"rope_parameters": {"rope_type": "default"}}),
    "nemotron": Architecture(family="nemotron", keys=_LAYER_NORM, rotates_part=True),
    "stablelm": Architecture(
        family="stablelm",
        keys=_LAYER_NORM,
        rotates_part=True,
        computed=lambda said: {"use_parallel_residual": not said.has("blk.0.ffn_norm.weight")},
    ),
    # files do not name the window, which all published models have
    "starcoder2": Architecture(
        family="starcoder2", keys={**_LAYER_NORM, "sliding_window": ("attention.sliding_window", 4096)}
    ),
    "command-r": Architecture(family="cohere", keys=_COHERE),
    "cohere2": Architecture(family="cohere2", keys=_COHERE, windows=4),
    "seed_oss": Architecture(family="seed_oss"),
}
