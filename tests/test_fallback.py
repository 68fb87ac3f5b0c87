"""Models that only transformers knows give its logits over the paged cache, or are refused with a reason."""

import pytest
import torch
import transformers
from model_zoo import FALLBACK_FAMILIES, cached_model, random_model, tiny_model
from paged_harness import paged_logits, ragged_sequences, transformers_logits

from pagedcli.attention.reference import ReferenceAttention
from pagedcli.errors import ModelError
from pagedcli.models.base import load_model
from pagedcli.models.fallback_refusals import shortest_window
from pagedcli.models.spec import read_spec

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def load(path, *, dtype=torch.float32, max_model_len=128, backend=None, **options):
    options = {"backend": backend or ReferenceAttention(), "dtype": dtype, "device": CPU, **options}
    return load_model(path, read_spec(path), max_model_len=max_model_len, **options)


def refusal_of(path, **options):
    with pytest.raises(ModelError) as caught:
        load(path, **options)
    return caught.value


@pytest.mark.parametrize("family", [*FALLBACK_FAMILIES, "gemma3", "gpt2", "gpt_neox", "opt", "mixtral"])
def test_logits_equal_transformers_in_float32(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    model = load(path)
    sequences, num_prompt = ragged_sequences()
    expected = transformers_logits(path, sequences)
    for block_size, chunk in ((1, None), (16, 7)):
        actual = paged_logits(
            model, ReferenceAttention(), sequences, num_prompt=num_prompt, block_size=block_size, chunk=chunk
        )
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
def test_bfloat16_stays_near_float32(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    sequences, num_prompt = ragged_sequences()
    options = {"num_prompt": num_prompt, "block_size": 4, "chunk": 7, "dtype": torch.bfloat16}
    actual = torch.cat(
        paged_logits(load(path, dtype=torch.bfloat16), ReferenceAttention(), sequences, **options)
    ).float()
    theirs = torch.cat(transformers_logits(path, sequences, dtype=torch.bfloat16)).float()
    exact = torch.cat(transformers_logits(path, sequences))
    assert 0 < (actual - exact).norm() < 1.2 * (theirs - exact).norm()


def test_spec_comes_from_the_config_and_the_way_it_runs_is_announced(tmp_path_factory):
    path = cached_model("granite", tmp_path_factory)
    spec = read_spec(path)
    assert (spec.native, spec.model_type, spec.architecture) == (False, "granite", "GraniteForCausalLM")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2,), 1, "float32")
    model = load(path)
    assert model.spec == spec
    assert f"runs through transformers {transformers.__version__}" in model.notes[0]
    own = transformers.AutoModelForCausalLM.from_pretrained(path)
    parameters, buffers = (sum(tensor.nbytes for tensor in group()) for group in (own.parameters, own.buffers))
    assert model.weight_bytes == parameters + buffers


def test_kv_heads_are_those_the_model_shows_when_its_config_hides_them(tmp_path):
    config = transformers.GPTBigCodeConfig(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    path = random_model(config, tmp_path)
    assert (read_spec(path).num_kv_heads, load(path).spec.num_kv_heads) == (4, 1)  # multi-query


def test_a_phi3_checkpoint_of_sliding_window_runs_up_to_the_window(tmp_path):
    path = tiny_model("phi3", tmp_path, sliding_window=96)
    assert load(path, max_model_len=96).spec.sliding_window == 96
    error = refusal_of(path, max_model_len=97)
    assert "see only a window of 96 tokens" in error.message
    assert "--max-model-len 96" in error.hint


def test_rope_that_depends_on_the_longest_neighbour_runs_while_it_does_not(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    path = tiny_model("phi3", tmp_path, original_max_position_embeddings=100, rope_parameters=rope)
    sequences, num_prompt = ragged_sequences()
    actual = paged_logits(
        load(path, max_model_len=100), ReferenceAttention(), sequences, num_prompt=num_prompt, block_size=4, chunk=None
    )
    torch.testing.assert_close(torch.cat(actual), torch.cat(transformers_logits(path, sequences)), atol=1e-4, rtol=0)
    error = refusal_of(path, max_model_len=101)
    assert "above 100 tokens its rope type 'longrope' depends on the longest sequence of a batch" in error.message
    assert "--max-model-len 100" in error.hint


REFUSED = {
    "gemma2": (transformers.Gemma2Config, {}, "caps its attention scores (softcap)"),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
        "uses attention sinks (s_aux)",
    ),
    "mamba": (transformers.MambaConfig, {"state_size": 8}, "has no attention heads"),
    "jamba": (
        transformers.JambaConfig,
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "layers that are not plain attention",
    ),
    "deepseek": (
        transformers.DeepseekV3Config,
        {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        "multi-head latent attention",
    ),
    "bert": (transformers.BertConfig, {}, "attends to later tokens, too"),
    "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4}, "attention interface"),
    "diffllama": (transformers.DiffLlamaConfig, {}, "attends twice in one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cache_cannot_hold_is_refused_with_the_reason(name, tmp_path):
    config_class, fields, reason = REFUSED[name]
    path = random_model(config_class(**{**SMALL, **fields}), tmp_path)
    assert reason in refusal_of(path).message


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "novel", "architectures": ["NovelForCausalLM"]}')
    with pytest.raises(ModelError, match="model type `novel`"):
        read_spec(tmp_path)


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="ViTConfig cannot run over the paged cache"):
        read_spec(tmp_path)


class TooLoud(ReferenceAttention):
    """A backend whose answers for all but a sequence's first token are 1 % too large."""

    def attend(self, q, k_cache, v_cache, batch, scale):
        out = super().attend(q, k_cache, v_cache, batch, scale)
        out[1:] *= 1.01
        return out


def test_a_difference_to_the_models_own_attention_is_found_at_load(tmp_path_factory):
    error = refusal_of(cached_model("olmo2", tmp_path_factory), backend=TooLoud())
    assert "gives other results there than by itself" in error.message


def test_dummy_weights_repeat_by_seed_and_leave_the_global_generator_alone(tmp_path_factory):
    path = cached_model("phi3", tmp_path_factory)
    hidden = torch.ones(1, 64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    logits = [load(path, load_format="dummy", seed=seed).compute_logits(hidden) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_damaged_and_incomplete_weights_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    path = tiny_model("olmo2", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file, metadata={"format": "pt"})
    assert "tensors are missing, the first is 'model.norm.weight'" in refusal_of(path).message
    save_file(tensors | {"model.norm.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    assert "'model.norm.weight' has shape [32], but config.json asks for [64]" in refusal_of(path).message
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged or cut short" in refusal_of(path).message
    file.unlink()
    assert "missing, damaged" in refusal_of(path).message


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 8}, 8),
        ({"sliding_window": None}, None),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, 8),
        ({"attention_chunk_size": 16, "layer_types": ["chunked_attention"], "sliding_window": 8}, 16),
        ({}, None),
    ],
)
def test_shortest_window_counts_only_layers_that_use_it(fields, window):
    assert shortest_window(type("Config", (), fields)) == window
