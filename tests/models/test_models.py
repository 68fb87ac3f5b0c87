"""The native decoder gives transformers' logits for every family, whatever the block size and the chunks."""

from dataclasses import replace

import pytest
import torch
from harness.engine import assert_same_logits, loaded, logits_of, paged_logits, ragged_sequences, transformers_logits
from model_zoo import (
    COMPOSED_FAMILIES,
    DATA_FAMILIES,
    NATIVE_FAMILIES,
    RECURRENT_FAMILIES,
    SLOW_FAMILIES,
    cached_model,
    load_model,
    tiny_model,
)
from quick import slow_but
from safetensors.torch import load_file

from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import ConfigError
from pagedcli.models import cpu_decoder, decoder
from pagedcli.models.base import DecoderNeeds
from pagedcli.models.decoder import Decoder
from pagedcli.models.formats import FORMATS
from pagedcli.models.reading import read_spec

CPU = torch.device("cpu")
FAMILIES = [*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *DATA_FAMILIES, *RECURRENT_FAMILIES]
RECURRENT = [getattr(each, "values", [each])[0] for each in RECURRENT_FAMILIES]  # of a pytest.param
# transformers computes prompts of recurrent layers in chunks of 64 tokens, whose sums are rounded elsewhere
TOLERANCES = dict.fromkeys(RECURRENT, 1e-3)
BACKENDS = {"reference": [(1, None), (4, 7)], "cpu": [(1, 7), (16, None)]}
VARIANTS = [(backend, *sizes) for backend, each in BACKENDS.items() for sizes in each]
SLOW_BY_REFERENCE = (*DATA_FAMILIES, "qwen3*", "olmo_hybrid", "falcon_h1", "*-moe")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """The name and the folder of a family."""
    return request.param, cached_model(request.param, tmp_path_factory)


@pytest.mark.slow_cases("qwen3_5-moe-*", *(f"{family}-reference-*" for family in SLOW_BY_REFERENCE))
@pytest.mark.parametrize(("backend", "block_size", "chunk"), slow_but((VARIANTS[1], VARIANTS[2]), VARIANTS))
def test_logits_equal_transformers_in_float32(case, backend, block_size, chunk):
    family, path = case
    actual = logits_of(path, backend, block_size=block_size, chunk=chunk)
    assert_same_logits(actual, transformers_logits(path), TOLERANCES.get(family, 1e-4))


SLOW_IN_BFLOAT16 = (*(f"{family}-*" for family in DATA_FAMILIES), "gpt_oss-*", "deepseek_v*", "qwen3_5-moe-*")


@pytest.mark.slow_cases("*-f16", *SLOW_IN_BFLOAT16, *(f"{family}-reference-*" for family in SLOW_BY_REFERENCE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_in_short_types_are_as_close_to_float32_as_those_of_transformers(case, backend, dtype):
    family, path = case
    exact = transformers_logits(path)

    def error(logits):  # the median: a token that rounding sends to another expert is far off
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).abs().median()

    actual = logits_of(path, backend, dtype=dtype)
    assert actual[0].dtype == torch.float32
    assert 0 < error(actual) < (1.5 if family in RECURRENT else 1.2) * error(transformers_logits(path, dtype=dtype))


@pytest.mark.parametrize("family", [*NATIVE_FAMILIES, *COMPOSED_FAMILIES, *SLOW_FAMILIES])
def test_weight_bytes_are_those_of_the_checkpoint(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    model = loaded(path, "reference")[0]
    assert model.weight_bytes == sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    half = loaded(path, "reference", dtype=torch.bfloat16)[0].weight_bytes
    experts = model.spec.experts
    has_sinks = model.spec.attentions[0].sinks
    # norms, sinks, routing biases and the numbers of activations stay in float32
    has_numbers = model.spec.activations == ["xielu"]
    if model.spec.norm.in_float32 or has_sinks or has_numbers or (experts is not None and experts.has_router_bias):
        assert model.weight_bytes // 2 < half < 1.02 * model.weight_bytes // 2
    else:
        assert half == model.weight_bytes // 2
    assert model.notes == ()


def test_longrope_past_its_original_length_is_transformers_for_sequences_that_long(tmp_path_factory, tmp_path):
    """Original length 16: transformers takes the long factors for all positions of sequences of 20 and 33 tokens."""
    options = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    path = tiny_model("phi3-longrope", tmp_path / "model", rope_parameters={**rope, **factors, **options}, **options)
    sequences = [list(range(3, 23)), list(range(40, 73))]
    model, backend = loaded(path, "reference")
    actual = paged_logits(model, backend, sequences, num_prompt=[20, 33], block_size=4, chunk=7)
    assert_same_logits(actual, transformers_logits(path, sequences))
    assert "over 16" in model.notes[-1]
    assert not loaded(path, "reference", max_model_len=16)[0].notes


def test_a_window_that_hides_nothing_is_no_window(tmp_path):
    path = tiny_model("mistral", tmp_path, sliding_window=95)
    assert max(map(len, ragged_sequences()[0])) == 95
    short, long = (loaded(path, "reference", max_model_len=length)[0] for length in (95, 96))
    assert not any(mixer.window for mixer in short.spec.attentions)
    assert_same_logits(logits_of(path, "reference", max_model_len=95, chunk=None), transformers_logits(path))
    assert [mixer.window for mixer in long.spec.attentions] == [95, 95]


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
    assert_same_logits(logits_of(path, "reference"), transformers_logits(path))
