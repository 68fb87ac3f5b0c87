"""Tiny seeded random models of every supported family, written by transformers in the form people download."""

from pathlib import Path
from typing import Any

import torch
import transformers

# Vocabulary, width and depth of every family. 4 query heads share 2 key/value heads.
_BASE: dict[str, Any] = {
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
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# family -> (transformers model class, what differs from _BASE)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _DEFAULT_ROPE}),
    "llama-untied": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _DEFAULT_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "gemma": ("Gemma", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 512, "sliding_window": None}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 6.0}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}
NATIVE_FAMILIES = ("llama", "llama-untied", "llama-linear", "llama3", "llama-yarn", "mistral", "qwen2", "qwen3")
FALLBACK_FAMILIES = ("gemma", "phi3", "olmo2", "granite", "smollm3")


def tiny_model(family: str, path: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a seeded random float32 model of a family to `path` (created) and return it. `overrides` go to its config.

    Norm weights and biases are random, too: at their initial ones and zeros a forgotten one would not show.
    """
    class_name, differences = _FAMILIES[family]
    config_class = getattr(transformers, f"{class_name}Config")
    model_class = getattr(transformers, f"{class_name}ForCausalLM")
    config = config_class(**{**_BASE, "initializer_range": 0.2, **differences, **overrides})
    return save_random(model_class(config), path, seed=seed, max_shard_size=max_shard_size)


def save_random(model: Any, path: Path, *, seed: int = 0, max_shard_size: str = "5GB") -> Path:
    """Fill a transformers model with seeded noise and write it to `path`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.to(torch.float32).save_pretrained(path, max_shard_size=max_shard_size)
    return path
