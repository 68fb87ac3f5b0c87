"""Models that only transformers knows give its logits over the paged cache, or are refused with a reason."""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from harness.engine import (
    assert_same_logits,
    loaded,
    logits_of,
    make_engine,
    ragged_prompts,
    run,
    transformers_logits,
    transformers_tokens,
)
from model_zoo import BASE, FALLBACK_FAMILIES, cached_model, nested, random_model, tiny_model
from safetensors.torch import load_file, save_file

from pagedcli.errors import ModelError
from pagedcli.models.transformers_fallback import AttentionTrace, refuse_by_config
from pagedcli.models.transformers_fallback import read_fallback_spec as read_spec
from pagedcli.sampling_params import SamplingParams

SMALL = BASE | {"head_dim": 16}


def load(path, **options):
    return loaded(path, "reference", read=read_spec, **options)[0]


def refusal_of(path, **options):
    with pytest.raises(ModelError) as caught:
        load(path, **options)
    return caught.value


@pytest.mark.slow_cases("mixtral")
@pytest.mark.parametrize("family", [*FALLBACK_FAMILIES, "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "mixtral"])
def test_logits_equal_transformers_in_float32(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    for block_size, chunk in ((1, None), (16, 7)):
        actual = logits_of(path, "reference", block_size=block_size, chunk=chunk, read=read_spec)
        assert_same_logits(actual, transformers_logits(path))


@pytest.mark.quick("granite")
@pytest.mark.parametrize("family", FALLBACK_FAMILIES)
def test_bfloat16_stays_near_float32(family, tmp_path_factory):
    path = cached_model(family, tmp_path_factory)
    actual = torch.cat(logits_of(path, "reference", dtype=torch.bfloat16, read=read_spec)).float()
    theirs = torch.cat(transformers_logits(path, dtype=torch.bfloat16)).float()
    exact = torch.cat(transformers_logits(path))
    assert 0 < (actual - exact).norm() < 1.2 * (theirs - exact).norm()


def test_spec_comes_from_the_config_and_the_way_it_runs_is_announced(tmp_path_factory):
    path = cached_model("granite", tmp_path_factory)
    spec = read_spec(path)
    assert (spec.is_fallback, spec.model_type, spec.architecture) == (True, "granite", "GraniteForCausalLM")
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2,), 1, "float32")
    model = load(path)
    assert model.spec == spec
    assert f"runs through transformers {transformers.__version__}" in model.notes[0]
    own = transformers.AutoModelForCausalLM.from_pretrained(path)
    parameters, buffers = (sum(tensor.nbytes for tensor in group()) for group in (own.parameters, own.buffers))
    assert model.weight_bytes == parameters + buffers


@pytest.mark.long
def test_layers_that_read_others_keep_nothing_and_text_is_read_from_a_multimodal_checkpoint(tmp_path):
    """Gemma 3n past its window, in a small pool: the last two of its four layers hold no blocks."""
    path, prompts = tiny_model("gemma3n", tmp_path / "text"), ragged_prompts(6)
    expected = transformers_tokens(path, prompts, 64)
    others = {"model.vision_tower.conv.weight": torch.ones(2)}
    whole = nested(path, tmp_path / "whole", "gemma3n", "Gemma3nForConditionalGeneration", others=others)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for folder, config in ((path, {"attention_backend": "reference"}), (whole, {"chunked_prefill_size": 7})):
        engine = make_engine(folder, block_size=4, max_model_len=160, num_kvcache_blocks=80, **config)
        assert [group.layers for group in engine.plan.limits.groups] == [(0,), (1,)]
        assert run(engine, prompts, params) == expected
        assert engine.stats.num_preemptions > 0
    assert "1 tensor of the checkpoint is not read, of which transformers makes no use" in engine.plan.notes


def test_rope_that_depends_on_the_longest_neighbour_runs_while_it_does_not(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    path = tiny_model("phi3", tmp_path, original_max_position_embeddings=100, rope_parameters=rope)
    actual = logits_of(path, "reference", max_model_len=100, chunk=None, read=read_spec)
    assert_same_logits(actual, transformers_logits(path))
    error = refusal_of(path, max_model_len=101)
    assert "above 100 tokens its rope type 'longrope' depends on the longest sequence of a batch" in error.message
    assert "--max-model-len 100" in error.hint


REFUSED = {
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
        r"uses attention sinks \(s_aux\)",
    ),
    "mamba": (transformers.MambaConfig, {"state_size": 8}, "not plain attention|no attention heads"),
    "jamba": (
        transformers.JambaConfig,
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
        "layers that are not plain attention",
    ),
    "bert": (transformers.BertConfig, {}, "also attends to later tokens"),
    "bloom": (transformers.BloomConfig, {"max_position_embeddings": None}, "does not specify max_position_embeddings"),
    "stablelm": (
        transformers.StableLmConfig,
        {"qk_layernorm": True},
        "does not call transformers' attention interface",
    ),
    "diffllama": (transformers.DiffLlamaConfig, {}, "attends twice in one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cache_cannot_hold_is_refused_with_the_reason(name, tmp_path):
    config_class, fields, reason = REFUSED[name]
    path = random_model(config_class(**{**SMALL, **fields}), tmp_path)
    assert re.search(reason, refusal_of(path).message)


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "novel", "architectures": ["NovelForCausalLM"]}')
    with pytest.raises(ModelError, match="model type `novel`"):
        read_spec(tmp_path)


def test_a_model_that_is_no_language_model_is_refused(tmp_path):
    transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="ViTConfig cannot run over the paged cache"):
        read_spec(tmp_path)


class TokenShiftConfig(transformers.LlamaConfig):
    model_type = "pagedcli_token_shift"
    ignores_positions = False


class TokenShiftModel(transformers.LlamaModel):
    """Either adds the embedding of the row's previous token to each, as RWKV does, or ignores the given positions."""

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        embeddings = self.embed_tokens(input_ids)
        if self.config.ignores_positions:
            position_ids = None
        else:
            embeddings[:, 1:] += 0.1 * self.embed_tokens(input_ids[:, :-1])
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


class TokenShiftForCausalLM(transformers.LlamaForCausalLM):
    config_class = TokenShiftConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TokenShiftModel(config)


@pytest.mark.parametrize("ignores_positions", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_tokens_outside_of_attention_is_found_at_load(ignores_positions, dtype, tmp_path):
    transformers.AutoConfig.register(TokenShiftConfig.model_type, TokenShiftConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(TokenShiftConfig, TokenShiftForCausalLM, exist_ok=True)
    path = random_model(TokenShiftConfig(**SMALL, ignores_positions=ignores_positions), tmp_path)
    assert "mixes tokens outside of attention or ignores position ids" in refusal_of(path, dtype=dtype).message


def test_dummy_weights_repeat_by_seed_and_leave_the_global_generator_alone(tmp_path_factory):
    path = cached_model("phi3", tmp_path_factory)
    hidden = torch.ones(1, 64)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    logits = [load(path, load_format="dummy", seed=seed).compute_logits(hidden) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_damaged_incomplete_and_unused_weights_are_named(tmp_path):
    path = tiny_model("olmo2", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file, metadata={"format": "pt"})
    assert "tensors are missing, the first is 'model.norm.weight'" in refusal_of(path).message
    save_file(tensors | {"lora_A.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    assert load(path).notes[1:] == ("1 tensor of the checkpoint is not read, of which transformers makes no use",)
    save_file(tensors | {"model.norm.weight": torch.ones(32)}, file, metadata={"format": "pt"})
    assert "'model.norm.weight' has shape [32], but config.json asks for [64]" in refusal_of(path).message
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged or cut short" in refusal_of(path).message
    file.unlink()
    assert "missing, damaged" in refusal_of(path).message


def attention_module(layer=0, **attributes):
    module = torch.nn.Module()
    module.layer_idx = layer
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def heads(num_heads=2, size=8):
    return torch.zeros(1, num_heads, 3, size)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"s_aux": torch.zeros(4)}, "uses attention sinks"),
        ({"position_bias": torch.zeros(3)}, "adds a position bias"),
        ({"attention_mask": torch.zeros(3)}, "makes an attention mask of its own"),
        ({"dropout": 0.1}, "drops attention weights at random"),
        ({"is_causal": False}, "attends to later tokens"),
    ],
)
def test_a_call_that_no_backend_computes_is_refused(arguments, reason):
    trace = AttentionTrace("NovelForCausalLM", max_model_len=100)
    harmless = {"attention_mask": None, "dropout": 0.0, "is_causal": None, "softcap": 50.0, "sliding_window": 100}
    out = trace.attend(attention_module(), heads(4), heads(), heads(), 0.5, **harmless)
    assert out.shape == (1, 3, 4, 8)
    with pytest.raises(ModelError, match=reason):
        trace.attend(attention_module(1), heads(4), heads(), heads(), 0.5, **{**harmless, **arguments})


def test_layers_whose_heads_are_not_those_of_the_config_are_refused(tmp_path_factory):
    spec = read_spec(cached_model("phi3", tmp_path_factory))  # 2 layers of 4 and 2 heads of size 16
    trace = AttentionTrace("NovelForCausalLM", max_model_len=100)
    with pytest.raises(ModelError, match="does not call transformers' attention interface"):
        trace.confirm(spec)
    trace.attend(attention_module(0), heads(4, 16), heads(2, 16), heads(2, 16), None)
    with pytest.raises(ModelError, match="attends in 1 of its 2 layers only"):
        trace.confirm(spec)
    with pytest.raises(ModelError, match="attends twice in one"):
        trace.attend(attention_module(0), heads(4, 16), heads(2, 16), heads(2, 16), None)
    with pytest.raises(ModelError, match="heads of different sizes \\(query 16, key 16, value 8\\)"):
        trace.attend(attention_module(1), heads(4, 16), heads(2, 16), heads(2, 8), None)
    trace.attend(attention_module(1), heads(4, 16), heads(1, 16), heads(1, 16), None)
    with pytest.raises(ModelError, match="4 query heads and 1 key/value heads of size 16, where its config says"):
        trace.confirm(spec)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_kv_shared_layers": 2, "num_hidden_layers": 2}, "reads keys and values of another model"),
        ({"kv_lora_rank": 8}, "multi-head latent attention"),
        ({"layer_types": ["full_attention", "conv"]}, r"not plain attention \(conv\)"),
        ({"num_attention_heads": [4, 8]}, "not the same number in every layer"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder model"),
        ({"max_position_embeddings": None}, "does not specify max_position_embeddings"),
    ],
)
def test_a_config_that_cannot_run_is_refused_before_anything_is_loaded(fields, reason):
    plain = {"is_encoder_decoder": False, "num_attention_heads": 4, "max_position_embeddings": 64}
    refuse_by_config(SimpleNamespace(**plain), SimpleNamespace(**plain), "NovelForCausalLM")
    config = SimpleNamespace(**{**plain, **fields})
    with pytest.raises(ModelError, match=reason):
        refuse_by_config(config, config, "NovelForCausalLM")
