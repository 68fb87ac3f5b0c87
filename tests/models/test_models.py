"""The native decoder gives transformers' logits for every family, whatever the block size and the chunks."""

import pytest
import torch
from model_zoo import NATIVE_FAMILIES, cached_model, tiny_model
from paged_harness import paged_logits, ragged_sequences, transformers_logits

from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import ModelError
from pagedcli.models.loading import load_model
from pagedcli.models.reading import read_spec

CPU = torch.device("cpu")


def load(path, *, dtype=torch.float32, **options):
    return load_model(path, read_spec(path), backend=ReferenceAttention(), dtype=dtype, device=CPU, **options)


@pytest.fixture(scope="module", params=NATIVE_FAMILIES)
def case(request, tmp_path_factory):
    """A loaded family, sequences for it, and what transformers makes of them."""
    path = cached_model(request.param, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    return path, load(path), sequences, num_prompt, transformers_logits(path, sequences)


def assert_same_logits(actual, expected, tolerance=1e-4):
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("block_size", "chunk"), [(1, None), (4, 7), (16, None), (16, 7)])
def test_logits_equal_transformers_in_float32(case, block_size, chunk):
    _, model, sequences, num_prompt, expected = case
    actual = paged_logits(
        model, ReferenceAttention(), sequences, num_prompt=num_prompt, block_size=block_size, chunk=chunk
    )
    assert_same_logits(actual, expected)


def test_logits_in_bfloat16_are_as_close_to_float32_as_those_of_transformers(case):
    path, _, sequences, num_prompt, exact = case
    model = load(path, dtype=torch.bfloat16)
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": 7, "dtype": torch.bfloat16}
    actual = paged_logits(model, ReferenceAttention(), sequences, **options)
    theirs = transformers_logits(path, sequences, dtype=torch.bfloat16)

    def error(logits):
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).pow(2).mean().sqrt()

    assert actual[0].dtype == torch.bfloat16
    assert 0 < error(actual) < 1.2 * error(theirs)


def test_weight_bytes_are_those_of_the_checkpoint(case):
    path, model, *_ = case
    from safetensors.torch import load_file

    assert model.weight_bytes == sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert load(path, dtype=torch.bfloat16).weight_bytes == model.weight_bytes // 2
    assert model.notes == ()


def test_yarn_mscale_and_untruncated_borders_equal_transformers(tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    }
    path = tiny_model("llama", tmp_path, rope_parameters=rope)
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": None}
    actual = paged_logits(load(path), ReferenceAttention(), sequences, **options)
    assert_same_logits(actual, transformers_logits(path, sequences))


def test_sliding_window_is_exact_up_to_its_length_and_refused_beyond(tmp_path):
    path = tiny_model("mistral", tmp_path, sliding_window=95)
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": None}
    assert max(map(len, sequences)) == 95
    actual = paged_logits(load(path, max_model_len=95), ReferenceAttention(), sequences, **options)
    assert_same_logits(actual, transformers_logits(path, sequences))
    with pytest.raises(ModelError, match="window of 95 tokens") as caught:
        load(path, max_model_len=96)
    assert "--max-model-len 95" in caught.value.hint


def test_compute_logits_takes_any_rows_of_hidden(case):
    _, model, *_ = case
    hidden = torch.randn(5, model.spec.hidden_size)
    torch.testing.assert_close(model.compute_logits(hidden[[3, 1]]), model.compute_logits(hidden)[[3, 1]])
