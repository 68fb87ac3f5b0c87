"""Weights: shards, strict names, damage that is named, and seeded noise."""

import json

import pytest
import torch
from harness.engine import loaded
from model_zoo import cached_model, tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.errors import ModelError
from pagedcli.models.formats import AsStored
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.weights import CheckpointWeights, DummyWeights

CPU = torch.device("cpu")
Q_WEIGHT, ADAPTER = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.lora_A.weight"


def tensors_of(path, source=None, dtype=torch.float32, ignored=frozenset()):
    source = source or CheckpointWeights(path)
    return source.load(decoder_parameters(read_spec(path), AsStored()), ignored=ignored, dtype=dtype, device=CPU)


@pytest.fixture
def folder(tmp_path):
    return tiny_model("llama-untied", tmp_path / "model")


def refusal_of(path):
    with pytest.raises(ModelError) as caught:
        loaded(path, "reference")
    return caught.value


def test_what_predicts_further_tokens_is_not_read_and_named(tmp_path):
    path = tiny_model("glm4-moe", tmp_path)
    number, file = read_spec(path).num_layers, path / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.{number}.eh_proj.weight": torch.zeros(3)}
    save_file(tensors, file, metadata={"format": "pt"})
    [note] = loaded(path, "reference")[0].notes
    assert note.startswith("1 tensor of the checkpoint is not read")
    assert note.endswith(f"token by token: model.layers.{number}.*")


def test_shards_give_the_same_weights_as_one_file(tmp_path, tmp_path_factory):
    whole = cached_model("qwen3", tmp_path_factory)
    sharded = tiny_model("qwen3", tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    expected, actual = tensors_of(whole), tensors_of(sharded)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (Q_WEIGHT, None, f"tensor {Q_WEIGHT!r} is missing"),
        (ADAPTER, torch.zeros(2, 2), f"model.safetensors: tensor {ADAPTER!r} is not part of this architecture"),
        (Q_WEIGHT, torch.zeros(60, 64), f"{Q_WEIGHT!r} has shape [60, 64], but config.json asks for [64, 64]"),
        (Q_WEIGHT, torch.zeros(64, 64, dtype=torch.int8), f"{Q_WEIGHT!r} is stored as int8"),
    ],
    ids=["missing", "unexpected", "wrong shape", "integers"],
)
def test_a_tensor_that_does_not_belong_to_the_model_is_named(name, tensor, said, folder):
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name: tensor}
    save_file({key: each for key, each in tensors.items() if each is not None}, file, metadata={"format": "pt"})
    assert said in refusal_of(folder).message


@pytest.mark.parametrize("num_bytes", [4, 200, -1])
def test_a_truncated_file_is_named(folder, num_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    error = refusal_of(folder)
    assert f"{file} is damaged or cut short ({file.stat().st_size} bytes)" in error.message
    assert error.hint == "download the file again"


def test_a_git_lfs_pointer_is_recognised(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    error = refusal_of(folder)
    assert "is a Git LFS pointer" in error.message
    assert "git lfs pull" in error.hint


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_model("llama", tmp_path, max_shard_size="60KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}, which model.safetensors.index.json names" in refusal_of(folder).message
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))
    assert "has no weight_map" in refusal_of(folder).message
    (folder / "model.safetensors.index.json").unlink()
    assert "but no model.safetensors.index.json" in refusal_of(folder).message


def test_a_folder_without_weights_says_what_to_do(folder):
    (folder / "model.safetensors").unlink()
    assert "--load-format dummy" in refusal_of(folder).hint
    (folder / "pytorch_model.bin").touch()
    assert "convert the model to safetensors" in refusal_of(folder).hint


def test_copies_and_buffers_that_old_checkpoints_carry_are_ignored(tmp_path, tmp_path_factory):
    folder = tiny_model("llama", tmp_path)  # tied
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, folder / "model.safetensors")
    hidden = torch.randn(3, 64)
    expected = loaded(cached_model("llama", tmp_path_factory), "reference")[0].compute_logits(hidden)
    assert torch.equal(loaded(folder, "reference")[0].compute_logits(hidden), expected)


def test_one_safetensors_file_of_any_name_is_found(folder):
    expected = tensors_of(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    actual = tensors_of(folder)
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_dummy_weights_need_only_the_config_and_repeat_by_seed(folder):
    (folder / "model.safetensors").unlink()
    first, again, other = (tensors_of(folder, DummyWeights(seed)) for seed in (5, 5, 6))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head"], other["lm_head"])
    assert torch.equal(first["final_norm"], torch.ones(64))
    noise = torch.cat([first["lm_head"].flatten(), first["layers.1.down.weight"].flatten()])
    assert noise.mean().abs() < 1e-3
    assert noise.std() == pytest.approx(0.02, rel=0.02)
    rounded = tensors_of(folder, DummyWeights(5), dtype=torch.bfloat16)
    assert all(torch.equal(rounded[key], first[key].bfloat16()) for key in first)
    assert loaded(folder, "reference", load_format="dummy")[0].weight_bytes == sum(
        tensor.nbytes for tensor in first.values()
    )
