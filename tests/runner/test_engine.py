"""An engine: its limits, samples and seeds, whole hits, and the end of it (its tokens are those of transformers by
test_families)."""

import gc
import weakref
from dataclasses import replace

import pytest
from harness.engine import make_engine, outputs_of, ragged_prompts, run
from model_zoo import cached_model, tiny_model
from msgspec import structs
from safetensors.torch import load_file, save_file

from pagedcli.answers.fits import block_formula
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.events import EngineStarted
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_gpu, described_host
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.views.cache_groups import group_words


@pytest.mark.parametrize(
    ("gib", "width", "expected"), [(None, 8, 512), (80, 8, 16384), (24, 8, 8192), (80, 2048, 4096), (24, 2048, 2048)]
)
def test_tokens_per_step_depend_on_the_device_and_suffice_for_all_sequences(tmp_path_factory, gib, width, expected):
    """A wide model on a small card: its activations would take memory that the cache needs."""
    spec = read_spec(cached_model("llama", tmp_path_factory))
    layers = tuple(replace(layer, mlp=replace(layer.mlp, width=64 * width)) for layer in spec.layers)
    spec = replace(spec, hidden_size=width, layers=layers)
    machine = described_host(2**36) if gib is None else described_gpu(gib * 2**30)

    def resolve(**config):
        return decide(EngineConfig(dtype="bfloat16", **config), spec, machine).plan.limits.max_num_batched_tokens

    assert resolve() == expected
    assert resolve(max_num_seqs=30000) == 30000
    assert resolve(max_num_batched_tokens=7) == 7


SAMPLES = SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The samples of each prompt in an engine of its own."""
    path = cached_model("qwen3", tmp_path_factory)
    return path, [run(make_engine(path), [prompt], SAMPLES)[0] for prompt in ragged_prompts(6)]


@pytest.mark.bits
@pytest.mark.parametrize(
    "variant", [{}, {"num_kvcache_blocks": 24}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}]
)
def test_samples_depend_on_seed_and_index_alone(alone, variant):
    path, expected = alone
    assert run(make_engine(path, **variant), ragged_prompts(6), SAMPLES) == expected
    assert len({tuple(sample) for sample in expected[0]}) == 3
    single = structs.replace(SAMPLES, n=1)
    assert run(make_engine(path), ragged_prompts(6)[:1], single)[0][0] == expected[0][0]


def test_requests_without_a_seed_differ_and_runs_repeat(tmp_path_factory):
    path = cached_model("qwen3", tmp_path_factory)
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first = run(make_engine(path), [[5, 6, 7]] * 3, params)
    assert len({tuple(samples[0]) for samples in first}) == 3
    assert run(make_engine(path), [[5, 6, 7]] * 3, params) == first
    assert run(make_engine(path, seed=1), [[5, 6, 7]] * 3, params) != first


@pytest.mark.parametrize(
    ("config", "words"),
    [({"max_model_len": 513}, "512"), ({"device": "cuda:9"}, "cuda"), ({"kv_cache_memory": 10}, "no KV block fits")],
)
def test_impossible_configurations_name_the_limit(tmp_path_factory, config, words):
    path = cached_model("llama", tmp_path_factory)
    with pytest.raises(ConfigError, match=words):
        make_engine(path, **config) if "device" not in config else LLMEngine(EngineConfig(model=str(path), **config))


@pytest.mark.parametrize("emit", [None, lambda event: None], ids=["unobserved", "observed"])
def test_an_engine_that_is_dropped_gives_its_cache_back_at_once(emit):
    engine = LLMEngine(EngineConfig(num_kvcache_blocks=8), emit=emit)
    cache = weakref.ref(engine.runner.kv_cache)
    gc.disable()  # no cycle may hold the memory until the collector comes by
    try:
        del engine
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_token_takes_one_latent_and_one_rotary_key_per_layer(family, tmp_path_factory):
    token_bytes, events = 3 * (40 + 8) * 4, []  # 3 layers, whose latents have 40 numbers and rotary keys 8
    path = cached_model(family, tmp_path_factory)
    engine = make_engine(path, block_size=16, num_kvcache_blocks=20, emit=events.append)
    assert engine.plan.block_bytes == 16 * token_bytes
    assert engine.runner.kv_cache.nbytes == 20 * 16 * token_bytes
    [started] = [event for event in events if isinstance(event, EngineStarted)]
    [group] = started.groups
    assert "latent 48 per token and layer" in group_words(started, 0)
    expected = "3 layers x 16 tokens x 48 latent per token and layer x 4 bytes = 9,216"
    assert block_formula(group, 16, "float32") == expected


@pytest.fixture(scope="module")
def with_nan(tmp_path_factory):
    """A model with NaN in the embedding of token 7."""
    path = tiny_model("llama-untied", tmp_path_factory.mktemp("nan"))
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "logprobs": 2}], ids=str
)
def test_only_the_request_that_meets_nan_ends_with_an_error(with_nan, ahead, backend, options):
    params = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias={7: -100.0}, **options)
    prompts = [[5, 6, 8], [5, 7, 8], [9, 10]]
    config = {"async_scheduling": ahead, "attention_backend": backend, "num_kvcache_blocks": 64}
    first, bad, last = outputs_of(make_engine(with_nan, **config), prompts, params)
    assert bad.error.code == "invalid_logits"
    assert bad.samples[0].finish_reason == "error"
    for output, prompt in ((first, prompts[0]), (last, prompts[2])):
        [alone] = outputs_of(make_engine(with_nan, **config), [prompt], params)
        assert output.error is None
        assert output.samples[0].token_ids == alone.samples[0].token_ids
