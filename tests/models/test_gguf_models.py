"""Models from GGUF files: every family, against the same numbers in a Hugging Face folder."""

import shutil

import numpy as np
import pytest
from gguf_files import gguf_twins, split
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model, tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.errors import MissingModelError, ModelError
from pagedcli.models.hub import resolve_model
from pagedcli.models.reading import read_spec
from pagedcli.sampling_params import SamplingParams

FAMILIES = (
    *("llama", "llama-untied", "llama-linear", "llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3"),
    *("phi3-longrope", "olmo2", "granite", "smollm3", "gemma2", "gemma3"),
    *("qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "gpt_oss", "lfm2", "lfm2-bias", "lfm2-moe"),
)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# What files do not say is always so: every fourth layer has no rotary embedding, and every layer has experts.
IN_FILES = {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "qwen3-moe": {"mlp_only_layers": []},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": False}},
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.slow_cases("qwen3-moe", "qwen2-moe")
@pytest.mark.bits
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_tokens_of_the_folder_it_was_made_from(family, tmp_path_factory, tmp_path):
    source = cached_model(family, tmp_path_factory)
    if family in IN_FILES:
        source = tiny_model(family, tmp_path / "source", **IN_FILES[family])
    path, plain = gguf_twins(source, tmp_path)
    prompts = ragged_prompts(4)
    assert run(make_engine(path), prompts, PARAMS) == run(make_engine(plain), prompts, PARAMS)


QUANTIZED = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"),
)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTIZED])
def test_widened_weights_give_the_tokens_of_their_numbers(kind, tmp_path):
    """Every linear layer, the embedding and the output layer in one type; in float32 without the CPU kernels."""
    path, plain = gguf_twins(tiny_model("llama", tmp_path / "source", **WIDE), tmp_path, type_of=lambda name: kind)
    prompts = ragged_prompts(3)
    engines = [make_engine(each, attention_backend="sdpa") for each in (path, plain)]
    assert run(engines[0], prompts, PARAMS) == run(engines[1], prompts, PARAMS)


def mixed(name):
    """Q4_K with some Q6_K, as in a Q4_K_M file."""
    if name.startswith(("token_embd", "output")):
        return "Q6_K"
    return "Q6_K" if "blk.1." in name and ("attn_v" in name or "ffn_down" in name) else "Q4_K"


def test_the_weights_of_a_layer_may_have_different_types(tmp_path):
    source = tiny_model("qwen3", tmp_path / "source", **WIDE, head_dim=64)
    path, plain = gguf_twins(source, tmp_path, type_of=mixed)
    prompts = ragged_prompts(3)
    engines = [make_engine(each, attention_backend="sdpa") for each in (path, plain)]
    assert run(engines[0], prompts, PARAMS) == run(engines[1], prompts, PARAMS)
    assert read_spec(path).quantization.name.startswith("GGUF: Q4_K ")


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_numbers_multiply_whole_weights_of_nvfp4(backend, tmp_path):
    """As of a converted ModelOpt checkpoint: of q but not of k and v, and one for each expert."""
    scales = {"attn_q": [0.7], "ffn_gate_exps": np.linspace(0.5, 2, 8), "ffn_up_exps": np.linspace(1, 0.4, 8)}
    scales["ffn_down_exps"] = np.linspace(0.6, 1.7, 8)

    def extra(writer):
        writer.add_tensor("output.scale", np.array([1.3], np.float32))
        for name, values in scales.items():
            writer.add_tensor(f"blk.0.{name}.scale", np.array(values, np.float32))
            writer.add_tensor(f"blk.0.{name}.input_scale", np.array([3.0], np.float32))

    sizes = {**WIDE, "mlp_only_layers": [], "head_dim": 64, "moe_intermediate_size": 64}
    source = tiny_model("qwen3-moe", tmp_path / "source", **sizes)
    path, plain = gguf_twins(source, tmp_path, type_of=lambda name: "F32" if "inp" in name else "NVFP4", extra=extra)
    prompts = ragged_prompts(3)
    unscaled = run(make_engine(plain, attention_backend=backend), prompts, PARAMS)
    tensors = load_file(plain / "model.safetensors")
    for i in range(8):
        for part in ("gate", "up", "down"):
            name = f"ffn_{part}_exps"
            tensors[f"model.layers.0.mlp.experts.{i}.{part}_proj.weight"] *= float(np.float32(scales[name][i]))
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 0.7
    tensors["lm_head.weight"] *= float(np.float32(1.3))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(path, attention_backend=backend)
    found, expected = run(engine, prompts, PARAMS), run(make_engine(plain, attention_backend=backend), prompts, PARAMS)
    assert expected != unscaled
    if backend == "sdpa":
        assert found == expected
        return
    assert any(note.endswith("the scales of activations are not used") for note in engine.model.notes)
    # activations are rounded: most tokens are the same
    same = [a == b for ours, theirs in zip(found, expected, strict=True) for a, b in zip(*ours, *theirs, strict=True)]
    assert sum(same) > len(same) / 2


def test_a_folder_and_a_file_of_any_name_are_found(tmp_path_factory, tmp_path):
    path, _ = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path / "model")
    alone = tmp_path / "alone"
    alone.mkdir()
    blob = alone / "sha256-00aa"  # as Ollama names it
    shutil.copy(path, blob)
    assert resolve_model(str(blob)) == blob
    shutil.copy(path, alone / "model.gguf")
    assert resolve_model(str(alone)) == alone / "model.gguf"
    shutil.copy(path, alone / "other.gguf")
    with pytest.raises(MissingModelError, match="several models"):
        resolve_model(str(alone))
    blob.write_text("no model")
    with pytest.raises(MissingModelError, match="is a file"):
        resolve_model(str(blob))


def test_a_split_model_is_read_as_one(tmp_path_factory, tmp_path):
    path, plain = gguf_twins(cached_model("llama", tmp_path_factory), tmp_path)
    parts = split(path, tmp_path / "parts", 3)
    assert resolve_model(str(parts[0].parent)) == parts[0]
    prompts = ragged_prompts(2)
    assert run(make_engine(parts[1]), prompts, PARAMS) == run(make_engine(plain), prompts, PARAMS)
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf is missing"):
        read_spec(parts[0])
