"""Families with recurrent layers give the logits of transformers, whatever the chunks, from whatever snapshots."""

import json

import pytest
import torch
import transformers
from harness.engine import loaded, logits_of, transformers_logits
from model_zoo import RECURRENT_FAMILIES, cached_model, nested
from quick import slow_but
from safetensors.torch import load_file

from pagedcli.errors import ConfigError, ModelError
from pagedcli.layers.parallel import ParallelContext
from pagedcli.models.formats import AS_STORED
from pagedcli.models.mlps import Mlp
from pagedcli.models.parameters import decoder_parameters
from pagedcli.models.reading import read_spec
from pagedcli.models.sharding import shard_spec
from pagedcli.models.weights import open_weights

CPU = torch.device("cpu")


def largest_difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_kimi_linear_as_transformers_saves_it_is_the_published_one(tmp_path_factory, tmp_path):
    published = cached_model("kimi_linear", tmp_path_factory)
    transformers.AutoModelForCausalLM.from_pretrained(published).save_pretrained(tmp_path)
    assert any(name.endswith("block_sparse_moe.gate_proj.weight") for name in load_file(tmp_path / "model.safetensors"))
    assert largest_difference(logits_of(tmp_path, "reference"), logits_of(published, "reference")) == 0


@pytest.fixture(scope="module", params=RECURRENT_FAMILIES)
def case(request, tmp_path_factory):
    """A tiny model and what transformers makes of the sequences."""
    path = cached_model(request.param, tmp_path_factory)
    return path, transformers_logits(path)


def test_the_language_model_of_a_larger_checkpoint_is_read_and_the_rest_is_named(tmp_path, tmp_path_factory):
    path = cached_model("qwen3_5", tmp_path_factory)
    others = {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(3)}
    names = "qwen3_5", "Qwen3_5ForConditionalGeneration"
    whole = nested(path, tmp_path / "whole", *names, others=others, moved=["tie_word_embeddings"], vision_config={})
    assert largest_difference(logits_of(whole, "reference"), logits_of(path, "reference")) == 0
    model, _ = loaded(whole, "reference")
    [note] = model.notes
    assert note.startswith("2 tensors of the checkpoint are not read")
    assert note.endswith("model.visual.* and mtp.*")


def test_a_state_counts_all_layers_that_keep_one(tmp_path_factory):
    spec = read_spec(cached_model("qwen3_5", tmp_path_factory))
    conv, matrix = 3 * (2 * 2 * 16 + 4 * 24), 4 * 16 * 24
    assert spec.state_bytes(2) == 2 * (2 * conv + 4 * matrix)
    assert [layer.mixer.attends for layer in spec.layers] == [False, True, False, True]
    assert len(spec.attention_layers) == 2


def test_recurrent_layers_are_not_split(tmp_path_factory):
    with pytest.raises(ConfigError, match="is not split"):
        shard_spec(read_spec(cached_model("qwen3_5", tmp_path_factory)), ParallelContext(0, 2))


@pytest.mark.parametrize("dtype", slow_but((torch.bfloat16,), (torch.float32, torch.bfloat16, torch.float16)))
def test_no_bit_depends_on_chunks(case, dtype):
    path, _ = case
    whole, chunked = (logits_of(path, dtype=dtype, chunk=chunk) for chunk in (None, 7))
    assert largest_difference(whole, chunked) == 0


@pytest.mark.slow
def test_rounded_weights_are_as_close_as_their_steps_are_small_and_no_bit_depends_on_chunks(case):
    path, exact = case

    def error(logits):
        differences = sum(float((a.float() - b).pow(2).sum()) for a, b in zip(logits, exact, strict=True))
        return (differences / sum(float(b.pow(2).sum()) for b in exact)) ** 0.5

    bfloat16, float16 = (error(logits_of(path, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert float16 < 0.6 * bfloat16
    errors = {}
    for quantization in ("int8", "int4"):
        whole, chunked = (logits_of(path, quantization=quantization, chunk=chunk) for chunk in (None, 7))
        assert largest_difference(whole, chunked) == 0
        errors[quantization] = error(whole)
    assert errors["int8"] < 4 * bfloat16
    assert errors["int8"] < errors["int4"] < 0.9  # of noise it would be 1.4: random weights have no slack


def test_layers_of_one_branch_are_read_by_their_letters(tmp_path_factory, tmp_path):
    path = cached_model("nemotron_h", tmp_path_factory)
    spec, config = read_spec(path), json.loads((path / "config.json").read_text())
    assert [layer.mixer.attends for layer in spec.layers] == [False, False, True, False]
    assert [layer.mlp is not None for layer in spec.layers] == [True, False, True, False]

    def read(**fields):
        kept = {name: value for name, value in config.items() if name != "layers_block_type"}
        (tmp_path / "config.json").write_text(json.dumps(kept | fields))
        return read_spec(tmp_path)

    assert read(hybrid_override_pattern="M-M*-M", num_hidden_layers=6) == spec
    for pattern in ("-M*", "M*--"):
        with pytest.raises(ModelError, match="a mixture of experts comes first or follows another one"):
            read(hybrid_override_pattern=pattern)
    with pytest.raises(ModelError, match="does not list its layers"):
        read()


def test_dummy_weights_have_the_types_of_those_of_a_checkpoint(case):
    path, _ = case
    parameters = decoder_parameters(read_spec(path), AS_STORED)
    sources = (open_weights(path, form, 0, read_spec(path)) for form in ("dummy", "auto"))
    options = {"ignored": frozenset({"lm_head.weight"}), "dtype": torch.bfloat16, "device": CPU}
    dummy, stored = (source.load(parameters, **options) for source in sources)
    assert {key: (tensor.dtype, tensor.shape) for key, tensor in dummy.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()
    }


PUBLISHED_KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "head_dim": 64,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 16,
        "short_conv_kernel_size": 3,
    },
    "mla_use_nope": True,
    "model_max_length": 4096,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_hidden_layers": 8,
    "num_shared_experts": 2,
}


def test_kimi_linear_as_published_lists_its_layers_from_1_on(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_KIMI))
    spec = read_spec(tmp_path)
    assert [layer.mixer.attends for layer in spec.layers] == [False, False, False, True] * 2
    state = spec.layers[0].mixer
    assert (state.num_heads, state.key_dim, state.kernel) == (16, 64, 3)
    assert [mixer.rope for mixer in spec.attentions] == [None, None]
    experts = spec.experts
    assert (experts.num_experts, experts.num_per_token, experts.shared.width, experts.groups) == (32, 4, 2048, None)
    assert [isinstance(layer.mlp, Mlp) for layer in spec.layers] == [True] + 7 * [False]
    assert spec.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"linear_attn_config": {"head_dim": [1]}}, "head_dim of linear_attn_config is"),
        ({"linear_attn_config": {"full_attn_layers": [9]}}, "no layer attends"),
        ({"linear_attn_config": {"full_attn_layers": [4], "num_heads": 0}}, "heads"),
    ],
)
def test_kimi_linear_with_what_it_cannot_have_is_refused(fields, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_KIMI | fields))
    with pytest.raises(ModelError, match=reason):
        read_spec(tmp_path)
