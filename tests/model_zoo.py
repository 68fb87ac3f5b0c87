"""Tiny seeded random models of every supported family, written by transformers in the form people download."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedcli.attention.base import AttentionBackend
from pagedcli.layers.parallel import SINGLE, ParallelContext
from pagedcli.models.base import CausalLM, DecoderNeeds, DecoderRequest
from pagedcli.models.lengths import check_length
from pagedcli.models.loading import choose_decoder, load_decoder, weight_format
from pagedcli.models.spec import ModelSpec

# Vocabulary, width and depth of every family. 4 query heads share 2 key/value heads.
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_STRETCHED = {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.9}
_LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
_LATENTS = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_KIMI = {
    **_LATENTS,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "q_lora_rank": None,
    "linear_num_heads": 3,
    "linear_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_local_experts": 8,
}
_MULTI_HEAD = {"num_key_value_heads": 4}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}

_SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 40}
_QUARTER_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_DELTA = {  # two layers of each kind, each key head serves two value heads
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": _QUARTER_ROPE,
}
_NEMOTRON_H = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 32,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 32}
_GRANITE = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 80,
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 256,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
}
_K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_WIDE = {"linear_value_head_dim": 64}  # a multiple of the vectors that a kernel takes together
_WINDOWED = {"sliding_window": 256}
_GRANITE_EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
# queries grow twice within the sequences of the tests
_GROWING = {**_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}

# family -> (transformers config class, what differs from BASE)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _DEFAULT_ROPE}),
    "llama-untied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _DEFAULT_ROPE}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 512, "sliding_window": None}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 6.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 256}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 48,
            "sliding_window": 256,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "starcoder2": ("Starcoder2Config", _WINDOWED),
    "starcoder2-plain": ("Starcoder2Config", {"use_bias": False}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": ("Cohere2Config", {**_WINDOWED, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "vaultgemma": ("VaultGemmaConfig", {**_WINDOWED, "head_dim": 32}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "head_dim": 32,
            "sliding_window": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 320,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    ),
    "arcee": ("ArceeConfig", {"rope_parameters": _YARN}),
    "apertus": ("ApertusConfig", {"num_key_value_heads": 4, "rope_parameters": _LLAMA3}),
    "nemotron": ("NemotronConfig", {"head_dim": 32}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmConfig", {"use_parallel_residual": True}),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "num_hidden_layers": 3},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **_WINDOWED,
            **{"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 2, "num_hidden_layers": 5},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80, "logit_scale": 0.5, "head_dim": 32},
        },
    ),
    "cohere2_moe-rms": (
        "Cohere2MoeConfig",
        {
            **_WINDOWED,
            **{"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "head_dim": 32},
            **{"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-5},
        },
    ),
    "solar_open": ("SolarOpenConfig", {**_EXPERTS, "n_routed_experts": 8, "head_dim": 32, "n_shared_experts": 2}),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**_EXPERTS, **_WINDOWED, "num_experts": 8, "num_hidden_layers": 4, "num_shared_experts": 2, "n_group": 2},
    ),
    "hy_v3": ("HYV3Config", {**_EXPERTS, "num_experts": 8, "head_dim": 32, "num_shared_experts": 2}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {
            **{"num_experts": 8, "moe_topk": [3, 3], "head_dim": 32},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENTS, **_EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1}),
    "deepseek_v2-direct": (
        "DeepseekV2Config",
        {**_LATENTS, **_EXPERTS, "q_lora_rank": None, "n_routed_experts": 8, "rope_parameters": _STRETCHED, **_LIMITED},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_LATENTS,
            **_EXPERTS,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _STRETCHED,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENTS, **_EXPERTS, "n_routed_experts": 8}),
    "minicpm3": ("MiniCPM3Config", {**_LATENTS, "scale_emb": 4, "dim_model_base": 32}),
    "youtu": ("YoutuConfig", {**_LATENTS, "pad_token_id": None}),
    "gpt2": ("GPT2Config", _MULTI_HEAD),
    "gpt_neox": ("GPTNeoXConfig", _MULTI_HEAD),
    "opt": ("OPTConfig", {**_MULTI_HEAD, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "phimoe": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 8, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256},
                **{"short_factor": [1.0, 1.5, 2.0, 3.0] * 2, "long_factor": [2.0, 3.0, 4.0, 5.0] * 2},
                **{"short_mscale": 1.1, "long_mscale": 1.3},
            },
        },
    ),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0, 3.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 8, "head_dim": 32, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 0],
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
        },
    ),
    "gemma4-31b": ("Gemma4TextConfig", {**_GEMMA4, **_K_IS_V}),
    "gemma4-e2b": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-26b": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            **_K_IS_V,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4-12b": ("Gemma4UnifiedTextConfig", {**_GEMMA4, **_K_IS_V, "use_bidirectional_attention": "vision"}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 256,
            "rope_parameters": _YARN,
        },
    ),
    "ministral3": ("Ministral3Config", {"head_dim": 32, "rope_parameters": _GROWING}),
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "glm4": ("Glm4Config", {"head_dim": 32, "pad_token_id": 0}),
    "exaone4": ("Exaone4Config", {**_WINDOWED, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "exaone4-global": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "granitemoe": ("GraniteMoeConfig", _GRANITE_EXPERTS),
    "granitemoeshared": ("GraniteMoeSharedConfig", {**_GRANITE_EXPERTS, "shared_intermediate_size": 40}),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {
            **_GRANITE_EXPERTS,
            **_WINDOWED,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 0],
        },
    ),
    "olmo3": ("Olmo3Config", {**_WINDOWED, "num_hidden_layers": 4, "rope_scaling": _YARN}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "cwm": ("CwmConfig", {**_WINDOWED, "head_dim": 32, "rope_parameters": _LLAMA3}),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {"logits_scaling": 0.5, "residual_multiplier": 0.5, "embedding_multiplier": 6.0, "attention_multiplier": 0.2},
    ),
    "mellum": (
        "MellumConfig",
        {
            **_EXPERTS,
            **_WINDOWED,
            "num_local_experts": 8,
            "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "laguna": (
        "LagunaConfig",
        {
            **_EXPERTS,
            **_WINDOWED,
            **_SHARED,
            **{"num_hidden_layers": 4, "head_dim": 16, "num_attention_heads_per_layer": [4, 8, 6, 8]},
            "layer_types": ["full_attention", *3 * ["sliding_attention"]],
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": _DEFAULT_ROPE,
            },
        },
    ),
    "laguna-elements": ("LagunaConfig", {**_EXPERTS, **_SHARED, "head_dim": 16, "gating": "per-element"}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 40}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5-moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_WIDE, **_EXPERTS, **_SHARED}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {"num_hidden_layers": 5, "num_key_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    ),
    "olmo_hybrid-published": (
        "OlmoHybridConfig",
        {"num_hidden_layers": 4, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "kimi_linear": ("KimiLinearConfig", {**_KIMI, **_EXPERTS, "mlp_layer_types": [*3 * ["dense"], "sparse"]}),
    "kimi_linear-wide": (
        "KimiLinearConfig",
        {**_KIMI, **_EXPERTS, "linear_head_dim": 64, "n_group": 4, "topk_group": 2},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS, **_SHARED}),
    "lfm2": ("Lfm2Config", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-bias": ("Lfm2Config", {"num_hidden_layers": 3, "full_attn_idxs": [0], "conv_bias": True}),
    "lfm3": ("Lfm3Config", {"num_hidden_layers": 5, "head_dim": 32, "sliding_window": 24}),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {**_EXPERTS, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["full_attention", "conv"]},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_MAMBA,
            **{"num_hidden_layers": 3, "mamba_d_ssm": 128, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
            **{"key_multiplier": 0.7, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8},
            **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 0.7]},
            "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.1],
        },
    ),
    "falcon_h1-norm": (
        "FalconH1Config",
        {**_MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "bamba": ("BambaConfig", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronHConfig",
        {**_NEMOTRON_H, "hybrid_override_pattern": "M-M*-M"},
    ),
    "nemotron_h-moe": (
        "NemotronHConfig",
        {
            **_EXPERTS,
            **_NEMOTRON_H,
            "hybrid_override_pattern": "MEM*EME",
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "granite-hybrid": ("GraniteMoeHybridConfig", {**_MAMBA, **_GRANITE, "num_local_experts": 0}),
    "granite-hybrid-moe": ("GraniteMoeHybridConfig", {**_MAMBA, **_GRANITE, "num_experts_per_tok": 3}),
}
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v2-direct", "glm4_moe_lite", "minicpm3", "youtu")
NATIVE_FAMILIES = ("llama", "llama-untied", "llama-linear", "llama3", "llama-yarn", "mistral", "qwen2", "qwen3")
COMPOSED_FAMILIES = (
    *("olmo2", "granite", "smollm3", "phi3", "phi3-longrope", "gemma2", "gemma3"),
    *("qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "gpt_oss", "granite_swa"),
    *("ministral3", "glm4"),
    *LATENT_FAMILIES[:2],
)
# each only data of mechanisms that those above have, so that its tests but the first are slow
DATA_FAMILIES = (
    *("glm", "exaone4", "exaone4-global", "olmo3", "granitemoe", "granitemoeshared", "granitemoe_swa", "seed_oss"),
    "ernie4_5",
    *("helium", "cwm", "hyperclovax", "mellum", "gemma", "arcee", "apertus", "ernie4_5-moe", "glm4-moe"),
    *LATENT_FAMILIES[2:],
    *("cohere2_moe", "cohere2_moe-rms", "solar_open", "exaone_moe", "hy_v3", "minimax_m2", "hunyuan_v1_moe", "phimoe"),
    *("laguna", "laguna-elements"),
    *("hunyuan", "starcoder2", "starcoder2-plain", "nemotron", "stablelm", "stablelm-parallel", "cohere", "cohere2"),
)
SLOW_FAMILIES = tuple(pytest.param(family, marks=pytest.mark.slow) for family in DATA_FAMILIES)
GEMMA4_FAMILIES = ("gemma4-e2b", "gemma4-12b", "gemma4-26b", "gemma4-31b")
RECURRENT_FAMILIES = (
    *("qwen3_5", "qwen3_5-moe", "qwen3_next", "kimi_linear"),
    *(pytest.param("kimi_linear-wide", marks=pytest.mark.slow), "olmo_hybrid", "olmo_hybrid-published", "lfm2"),
    *("lfm2-bias", "lfm2-moe", "lfm3", "bamba", "falcon_h1", "falcon_h1-norm", "nemotron_h", "nemotron_h-moe"),
    *("granite-hybrid", "granite-hybrid-moe"),
)
ALL_FAMILIES = tuple(_FAMILIES)
FALLBACK_FAMILIES = ("gemma", "phi3", "olmo2", "granite", "smollm3")


def tiny_model(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a seeded random float32 model of a family to `path` (created) and return it. `overrides` go to its config.

    Norm weights and biases are random, too: at their initial ones and zeros a forgotten one would not show.
    """
    class_name, differences = _FAMILIES[family]
    config = getattr(transformers, class_name)(**{**BASE, **differences, **overrides})
    return random_model(config, path, seed=seed, max_shard_size=max_shard_size)


def random_model(config: Any, path: Path, *, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """Write a model of a transformers config, filled with seeded noise, to `path`."""
    with torch.random.fork_rng(devices=[]):  # some families draw vectors, to which the noise is added
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + torch.rand(buffer.shape, generator=generator) * 0.4)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if config.model_type == "olmo_hybrid":
        _split_convolutions(path / "model.safetensors")
    if config.model_type == "kimi_linear":
        _rename_mlps(path / "model.safetensors")
    return path


def _rename_mlps(file: Path) -> None:
    """As published: transformers calls the MLPs of the first layers as it calls those with experts."""
    names = [f"block_sparse_moe.{part}_proj" for part in ("gate", "up", "down")]
    tensors = load_file(file)
    for name in [name for name in tensors if any(each in name for each in names)]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})


def _split_convolutions(file: Path) -> None:
    """As published, by q, k and v; transformers writes three parts of equal length."""
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        sizes = [len(tensors[each.replace("conv1d", "proj")]) for each in names]
        parts = torch.cat([tensors[each] for each in names]).split(sizes)
        tensors |= {each: part.contiguous() for each, part in zip(names, parts, strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})


def cached_model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's tiny model without overrides, written once per test session and shared by all test files."""
    path = tmp_path_factory.getbasetemp() / "model_zoo" / family
    return path if path.is_dir() else tiny_model(family, path)


def _within(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def nested(
    path: Path,
    target: Path,
    model_type: str,
    architecture: str,
    *,
    others: Mapping[str, torch.Tensor],
    rename: Callable[[str], str] = _within,
    moved: Sequence[str] = (),
    **fields: Any,
) -> Path:
    """Write the checkpoint at `path` as the language model of a larger one, with tensors of `others`; the fields that
    are `moved` are those of the whole."""
    config = json.loads((path / "config.json").read_text())
    outer = {name: config.pop(name) for name in moved} | fields
    outer |= {"model_type": model_type, "architectures": [architecture], "text_config": config}
    tensors = {rename(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(outer))
    save_file(tensors | others, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_model(
    path: Path,
    spec: ModelSpec,
    *,
    backend: AttentionBackend,
    quantization: str | None = None,
    max_model_len: int | None = None,
    parallel: ParallelContext = SINGLE,
    decoder: str | None = None,
    **options: Any,
) -> CausalLM:
    """A model without an engine. `decoder` None: the first that runs it; `max_model_len` None: as it was made for;
    `options`: further fields of DecoderRequest."""
    max_model_len = max_model_len or spec.max_position_embeddings
    check_length(spec, max_model_len)
    spec, stored = spec.within(max_model_len), weight_format(quantization, spec)
    options = {"load_format": "auto", "seed": 0, "trust_remote_code": False, "parallel": parallel} | options
    request = DecoderRequest(
        path=path, spec=spec, backend=backend, weight_format=stored, max_model_len=max_model_len, **options
    )
    if decoder is None:
        decoder = choose_decoder(DecoderNeeds(spec, backend, stored, parallel.size))
    return load_decoder(decoder, request)
