"""LoRA adapters in peft's files, merged into weights as they are read."""

import json

import pytest
import torch
from cli_harness import pagedcli, write_rows
from harness.engine import assert_same_logits, logits_of, transformers_logits
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.errors import ModelError
from pagedcli.models.hub import resolve_model

SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def adapter_of(model, folder, *, rank=4, only="", seed=0, **settings):
    """An adapter for every projection of a model whose name has `only`, in the files that peft 0.19 writes."""
    generator, factors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if weight.ndim == 2 and "proj" in name and only in name:
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                factors[f"{module}.lora_{letter}.weight"] = torch.randn(shape, generator=generator) * 0.1
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def merged_model(model, adapter, scale_of, folder):
    """The model with an adapter's products added in float32."""
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        stored = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{stored}A.weight" in factors:
            weights[name] += scale_of(name) * factors[f"{stored}B.weight"] @ factors[f"{stored}A.weight"]
        weights[name] = factors.get(f"base_model.model.{name}", weights[name])
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "settings", "scale_of"),
    [
        ("llama", {}, lambda name: 2),
        ("gemma3", {"use_rslora": True}, lambda name: 4),
        ("phi3", {}, lambda name: 2),
        ("lfm2", {"alpha_pattern": {"q_proj": 2, "layers.1.feed_forward.*": 1}}, None),
        ("qwen3", {"alpha_pattern": {"q_proj": 2}}, lambda name: 0.5 if "q_proj" in name else 2),
    ],
)
def test_merged_weights_give_the_logits_of_transformers(tmp_path, family, settings, scale_of):
    model = tiny_model(family, tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "adapter", **settings)
    scale_of = scale_of or (lambda name: 0.5 if "q_proj" in name else 2)
    whole = merged_model(model, adapter, scale_of, tmp_path / "merged")
    assert_same_logits(logits_of(model, adapter=adapter), transformers_logits(whole))


def test_a_tensor_that_was_trained_whole_replaces_the_checkpoints(tmp_path):
    model = tiny_model("llama-untied", tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.full((320, 64), 0.1)}, file)
    whole = merged_model(model, adapter, lambda name: 2, tmp_path / "merged")
    for ours, theirs in zip(logits_of(model, adapter=adapter), logits_of(whole), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("settings", "tensor", "words"),
    [
        ({"peft_type": "IA3"}, None, "peft_type IA3"),
        ({"use_dora": True}, None, "use_dora"),
        ({"bias": "all"}, None, "bias 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, None, "pissa_niter_4"),
        ({}, "base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A"),
        ({}, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "lora_B.bias"),
        ({}, "base_model.model.lm_head.weight", "no tensor 'lm_head.weight'"),
        ({}, "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", r"\[2, 2\] and \[96, 4\]"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, settings, tensor, words):
    model = tiny_model("llama", tmp_path / "model")
    adapter = adapter_of(model, tmp_path / "adapter", **settings)
    if tensor is not None:
        file = adapter / "adapter_model.safetensors"
        save_file(load_file(file) | {tensor: torch.ones(2, 2)}, file)
    with pytest.raises(ModelError, match=words):
        logits_of(model, adapter=adapter)


def test_a_run_with_another_adapter_is_another_run(tmp_path):
    demo, prompts = (
        resolve_model("builtin"),
        write_rows(tmp_path / "in.jsonl", [{"prompt": "The fox", "max_tokens": 4}]),
    )
    adapter, other = adapter_of(demo, tmp_path / "adapter"), adapter_of(demo, tmp_path / "other", seed=1)
    run = ["generate", prompts, "-o", tmp_path / "out.jsonl"]
    pagedcli(*run, "--adapter", adapter)
    (other / "adapter_model.safetensors").replace(adapter / "adapter_model.safetensors")
    assert "model files: changed" in pagedcli(*run, "--adapter", adapter, "--resume", expect=2).stderr
    assert "no adapter folder" in pagedcli(*run, "--adapter", "./nowhere", "--overwrite", expect=2).stderr
