"""An output layer that is stored counts, whatever config.json says: tied only where it equals the embedding table."""

import json

import pytest
import torch
from harness.engine import assert_same_logits, loaded, logits_of, transformers_logits
from model_zoo import tiny_model
from pretend_cuda import plain
from safetensors.torch import load_file, save_file

from pagedcli.layers.linear import OutputLinear
from pagedcli.models.reading import read_spec

TIED = ("llama", "qwen2", "qwen3-moe", "gemma", "gemma3", "phi3-longrope", "nemotron_h", "lfm2", "cohere")
TABLES = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "embed_in.weight")
HEADS = {True: ("model.embed_tokens.weight",), False: ("lm_head.weight",)}
THROUGH_TRANSFORMERS = ("vaultgemma", "gpt2", "opt", "gpt_neox")


def with_head(folder, change):
    """The tied model of a folder with an output layer of its own in its file, which `change` makes of the table."""
    tensors = load_file(folder / "model.safetensors")
    [table] = [name for name in tensors if name.endswith(TABLES)]
    head = "embed_out.weight" if any("gpt_neox" in name for name in tensors) else "lm_head.weight"
    tensors[head] = change(tensors[table])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other(table):
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(3)) * 0.2


@pytest.mark.parametrize("family", [*TIED, *THROUGH_TRANSFORMERS])
def test_an_output_layer_that_differs_from_the_embedding_is_used(family, tmp_path):
    path = with_head(tiny_model(family, tmp_path / "model", tie_word_embeddings=True), other)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"]
    expected = transformers_logits(path)
    # the native kernels serve no fallback
    backends = {"reference"} if family in THROUGH_TRANSFORMERS else {"reference", "cpu"}
    for backend in backends:
        assert_same_logits(logits_of(path, backend), expected)


@pytest.mark.parametrize("family", ["qwen2", "gemma", "gpt2"])
def test_an_equal_output_layer_is_shared(family, tmp_path):
    path = tiny_model(family, tmp_path / "model", tie_word_embeddings=True)
    plain = loaded(path, "reference")[0].weight_bytes
    with_head(path, torch.clone)
    assert read_spec(path).tie_word_embeddings
    assert loaded(path, "reference")[0].weight_bytes == plain
    with_head(path, other)
    assert not read_spec(path).tie_word_embeddings
    assert loaded(path, "reference")[0].weight_bytes > plain


def test_an_output_layer_in_another_part_of_the_checkpoint_counts(tmp_path):
    path = tiny_model("qwen2", tmp_path / "model")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    tensors = load_file(path / "model-00001-of-00002.safetensors")
    save_file(
        {"lm_head.weight": other(tensors["model.embed_tokens.weight"])}, path / "model-00002-of-00002.safetensors"
    )
    weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert not read_spec(path).tie_word_embeddings
    expected = transformers_logits(path)
    assert_same_logits(logits_of(path, "reference"), expected)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", b"\x02" + b"\0" * 7 + b"7 "])
def test_files_that_cannot_be_read_change_nothing_before_loading(content, tmp_path):
    path = tiny_model("qwen2", tmp_path / "model")
    (path / "model.safetensors").write_bytes(content)
    assert read_spec(path).tie_word_embeddings


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_bfloat16_model_are_not_rounded(tied, backend, tmp_path):
    path = tiny_model("qwen2", tmp_path / "model", tie_word_embeddings=tied)
    [weight] = [each for name, each in load_file(path / "model.safetensors").items() if name in HEADS[tied]]
    model, _ = loaded(path, backend, dtype=torch.bfloat16)
    hidden = torch.randn(3, weight.shape[1]).bfloat16()
    expected = hidden.double() @ weight.bfloat16().double().T
    logits = model.compute_logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_gpu_does_not_round_them_either(gpu):
    weight, hidden = torch.randn(1100, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    bias = torch.randn(1100).bfloat16()
    here = OutputLinear(weight, bias)(hidden)
    there = OutputLinear(weight.cuda(), bias.cuda())(hidden.cuda())
    assert there.dtype == torch.float32
    torch.testing.assert_close(plain(there), here)
