"""The native decoder gives transformers' logits for every family, whatever the block size and the chunks."""

from dataclasses import replace

import pytest
import torch
from harness.engine import assert_same_logits, paged_logits, ragged_sequences, transformers_logits
from model_zoo import COMPOSED_FAMILIES, NATIVE_FAMILIES, SLOW_FAMILIES, cached_model, load_model, tiny_model

from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import ConfigError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models import cpu_decoder, decoder
from pagedcli.models.base import DecoderNeeds
from pagedcli.models.decoder import Decoder
from pagedcli.models.formats import FORMATS, StoredTensor
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_parameters
from pagedcli.models.tensors import Parameter, RankPart

CPU = torch.device("cpu")


def load(path, *, dtype=torch.float32, **options):
    options = {"max_model_len": 256, **options}
    return load_model(path, read_spec(path), backend=ReferenceAttention(), dtype=dtype, device=CPU, **options)


@pytest.fixture(scope="module", params=[*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *SLOW_FAMILIES])
def case(request, tmp_path_factory):
    """A loaded family, sequences for it, and what transformers makes of them."""
    path = cached_model(request.param, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    return path, load(path), sequences, num_prompt, transformers_logits(path, sequences)


@pytest.mark.parametrize(("block_size", "chunk"), [(1, None), (4, 7)])
def test_logits_equal_transformers_in_float32(case, block_size, chunk):
    _, model, sequences, num_prompt, expected = case
    actual = paged_logits(
        model, ReferenceAttention(), sequences, num_prompt=num_prompt, block_size=block_size, chunk=chunk
    )
    assert_same_logits(actual, expected)


@pytest.mark.slow_cases("gpt_oss", "deepseek_v2", "deepseek_v3")
def test_logits_in_bfloat16_are_as_close_to_float32_as_those_of_transformers(case):
    path, _, sequences, num_prompt, exact = case
    model = load(path, dtype=torch.bfloat16)
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": 7, "dtype": torch.bfloat16}
    actual = paged_logits(model, ReferenceAttention(), sequences, **options)
    theirs = transformers_logits(path, sequences, dtype=torch.bfloat16)

    def error(logits):  # the median: a token that rounding sends to another expert is far off
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).abs().median()

    assert actual[0].dtype == torch.float32
    assert 0 < error(actual) < 1.2 * error(theirs)


def test_weight_bytes_are_those_of_the_checkpoint(case):
    path, model, *_ = case
    from safetensors.torch import load_file

    assert model.weight_bytes == sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    half = load(path, dtype=torch.bfloat16).weight_bytes
    experts = model.spec.experts
    has_sinks = model.spec.attentions[0].sinks
    # norms, sinks, routing biases and the numbers of activations stay in float32
    has_numbers = model.spec.activations == ["xielu"]
    if model.spec.norm.in_float32 or has_sinks or has_numbers or (experts is not None and experts.has_router_bias):
        assert model.weight_bytes // 2 < half < 1.02 * model.weight_bytes // 2
    else:
        assert half == model.weight_bytes // 2
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


def test_longrope_past_its_original_length_is_transformers_for_sequences_that_long(tmp_path_factory, tmp_path):
    """Original length 16: transformers takes the long factors for all positions of sequences of 20 and 33 tokens."""
    options = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    path = tiny_model("phi3-longrope", tmp_path / "model", rope_parameters={**rope, **factors, **options}, **options)
    sequences = [list(range(3, 23)), list(range(40, 73))]
    model = load(path)
    actual = paged_logits(model, ReferenceAttention(), sequences, num_prompt=[20, 33], block_size=4, chunk=7)
    assert_same_logits(actual, transformers_logits(path, sequences))
    assert "over 16" in model.notes[-1]
    assert not load(path, max_model_len=16).notes


def test_a_window_that_hides_nothing_is_no_window(tmp_path):
    path = tiny_model("mistral", tmp_path, sliding_window=95)
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": None}
    assert max(map(len, sequences)) == 95
    model = load(path, max_model_len=95)
    assert not any(mixer.window for mixer in model.spec.attentions)
    actual = paged_logits(model, ReferenceAttention(), sequences, **options)
    assert_same_logits(actual, transformers_logits(path, sequences))
    assert [mixer.window for mixer in load(path, max_model_len=96).spec.attentions] == [95, 95]


def test_compute_logits_takes_any_rows_of_hidden(case):
    _, model, *_ = case
    hidden = torch.randn(5, model.spec.hidden_size)
    torch.testing.assert_close(model.compute_logits(hidden[[3, 1]]), model.compute_logits(hidden)[[3, 1]])


def test_the_first_decoder_that_can_run_a_model_does_and_each_that_cannot_says_why(tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    spec = read_spec(path)
    plain = DecoderNeeds(spec, ReferenceAttention, FORMATS[None])
    assert type(load_model(path, spec, backend=ReferenceAttention(), dtype=torch.float32, device=CPU)) is Decoder
    assert cpu_decoder.refusal(plain) == "needs the native attention kernels, and attention is 'reference'"
    assert decoder.refusal(plain) is None
    assert "int8 weights need the native CPU kernels" in decoder.refusal(replace(plain, weight_format=FORMATS["int8"]))
    assert "has no Qwen3ForCausalLM" in decoder.refusal(replace(plain, spec=replace(spec, is_fallback=True)))
    with pytest.raises(
        ConfigError, match="no decoder runs Qwen3ForCausalLM with weights int8: native in one call: needs"
    ):
        load_model(path, spec, backend=ReferenceAttention(), dtype=torch.float32, device=CPU, quantization="int8")


def test_a_rank_keeps_whole_elements_of_packed_weights(tmp_path_factory):
    """8 four-bit numbers of an int32, or a group that shares a scale, are never split."""
    packed = StoredTensor("qweight", torch.int32, out_dim=1, in_dim=0, in_per=8)
    scales = StoredTensor("scales", out_dim=1, in_dim=0, in_per=32)
    assert packed.shape(48, 64) == (8, 48)
    assert scales.shape(48, 64) == (2, 48)
    down = {stored.suffix: Parameter({"down_proj": stored.shape(48, 64)}, stored=stored) for stored in (packed, scales)}
    spec = read_spec(cached_model("qwen3", tmp_path_factory))
    parts = shard_parameters(
        {f"layers.0.down.{key}": value for key, value in down.items()}, spec, ParallelContext(1, 2)
    )
    assert [parameter.shape for parameter in parts.values()] == [(4, 48), (1, 48)]
    assert [parameter.parts["down_proj"] for parameter in parts.values()] == [RankPart(0, 4, 8), RankPart(0, 1, 2)]
    with pytest.raises(ConfigError, match="groups of 32 that 'scales' holds"):
        shard_parameters({"layers.0.down.scales": down["scales"]}, spec, ParallelContext(1, 4))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma3", {"attn_logit_softcapping": 1.5}),
        ("qwen2-moe", {"qkv_bias": False}),
        ("granite_swa", {"layer_rope_theta": [0, 0]}),
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0}}),
    ],
)
def test_fields_act_as_in_transformers(family, fields, tmp_path):
    path = tiny_model(family, tmp_path, **fields)
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": 7}
    assert_same_logits(
        paged_logits(load(path), ReferenceAttention(), sequences, **options), transformers_logits(path, sequences)
    )
