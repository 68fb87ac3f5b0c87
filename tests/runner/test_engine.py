"""Every token is the reference model's: equal to transformers in float32 whatever the pool, chunk, cache, backend."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
from bit_settings import by_default
from harness.engine import make_engine, ragged_prompts, run, transformers_tokens
from model_zoo import FALLBACK_FAMILIES, NATIVE_FAMILIES, tiny_model
from quick import slow_but

from pagedcli.attention.select import REGISTRY
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError, PagedcliError
from pagedcli.models.reading import read_spec
from pagedcli.planning.decide import decide
from pagedcli.planning.machine import described_gpu, described_host
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

NUM_NEW = 64

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
VARIANTS = [
    {"enable_prefix_caching": caching, "chunked_prefill_size": chunk, "num_kvcache_blocks": blocks}
    for caching, chunk, blocks in itertools.product([True, False], [None, 7], [None, 24])
]


@pytest.fixture(scope="session")
def family_model(tmp_path_factory):
    """A tiny model of a family with its expected tokens, made once."""
    made = {}

    def get(family):
        if family not in made:
            path = tiny_model(family, tmp_path_factory.mktemp(family))
            made[family] = (path, transformers_tokens(path, ragged_prompts(), NUM_NEW))
        return made[family]

    return get


@pytest.mark.quick("llama-yarn")
@pytest.mark.bits
@pytest.mark.parametrize("family", slow_but(("llama", "llama-yarn", "qwen3"), NATIVE_FAMILIES))
def test_tokens_equal_transformers_whatever_cache_chunk_and_pool(family_model, family):
    path, expected = family_model(family)
    for variant in VARIANTS:
        engine = make_engine(path, **variant)
        assert run(engine, ragged_prompts(), GREEDY) == expected, variant
        assert by_default((engine.stats.num_preemptions > 0) == (variant["num_kvcache_blocks"] is not None)), variant
        assert by_default((engine.stats.num_cached_tokens > 0) == variant["enable_prefix_caching"]), variant


@pytest.mark.quick("olmo2")
@pytest.mark.bits
@pytest.mark.parametrize("family", FALLBACK_FAMILIES[:3])
def test_tokens_equal_transformers_through_the_fallback(family_model, family):
    path, expected = family_model(family)
    for variant in (VARIANTS[0], VARIANTS[3]):
        engine = make_engine(path, **variant)
        assert run(engine, ragged_prompts(), GREEDY) == expected, variant


@pytest.mark.quick("256")
@pytest.mark.bits
@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_block_size_never_changes_the_tokens(family_model, block_size):
    path, expected = family_model("qwen3")
    engine = make_engine(path, block_size=block_size, num_kvcache_blocks=-(-1200 // block_size))
    assert run(engine, ragged_prompts(), GREEDY) == expected


@pytest.mark.parametrize(
    ("gib", "width", "expected"), [(None, 8, 512), (80, 8, 16384), (24, 8, 8192), (80, 2048, 4096), (24, 2048, 2048)]
)
def test_tokens_per_step_depend_on_the_device_and_suffice_for_all_sequences(family_model, gib, width, expected):
    """A wide model on a small card: its activations would take memory that the cache needs."""
    spec = read_spec(family_model("llama")[0])
    layers = tuple(replace(layer, mlp=replace(layer.mlp, width=64 * width)) for layer in spec.layers)
    spec = replace(spec, hidden_size=width, layers=layers)
    machine = described_host(2**36) if gib is None else described_gpu(gib * 2**30)

    def resolve(**config):
        return decide(EngineConfig(dtype="bfloat16", **config), spec, machine).plan.limits.max_num_batched_tokens

    assert resolve() == expected
    assert resolve(max_num_seqs=30000) == 30000
    assert resolve(max_num_batched_tokens=7) == 7


@pytest.mark.quick("limits2")
@pytest.mark.bits
@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 11}]
)
def test_limits_never_change_the_tokens(family_model, limits):
    path, expected = family_model("llama")
    assert run(make_engine(path, **limits), ragged_prompts(), GREEDY) == expected


@pytest.mark.quick("triton", "flash")
@pytest.mark.bits
@pytest.mark.parametrize("backend", [entry.name for entry in REGISTRY])
def test_backend_never_changes_the_tokens(family_model, backend):
    path, expected = family_model("llama3")
    try:
        engine = make_engine(path, attention_backend=backend, chunked_prefill_size=7, num_kvcache_blocks=24)
    except PagedcliError as error:
        pytest.skip(f"backend {backend} cannot run here: {error}")
    assert run(engine, ragged_prompts(), GREEDY) == expected


@pytest.mark.bits
@pytest.mark.parametrize(
    "variant", [{}, {"num_kvcache_blocks": 24}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}]
)
def test_samples_depend_on_seed_and_index_alone(family_model, variant):
    path, _ = family_model("qwen3")
    params = SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    prompts = ragged_prompts(6)
    alone = [run(make_engine(path), [prompt], params)[0] for prompt in prompts]
    assert run(make_engine(path, **variant), prompts, params) == alone
    assert len({tuple(sample) for sample in alone[0]}) == 3
    single = SamplingParams(temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    assert run(make_engine(path), prompts[:1], single)[0][0] == alone[0][0]


def test_requests_without_a_seed_differ_and_runs_repeat(family_model):
    path, _ = family_model("qwen3")
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first = run(make_engine(path), [[5, 6, 7]] * 3, params)
    assert len({tuple(samples[0]) for samples in first}) == 3
    assert run(make_engine(path), [[5, 6, 7]] * 3, params) == first
    assert run(make_engine(path, seed=1), [[5, 6, 7]] * 3, params) != first


def test_whole_prompt_in_the_cache_computes_one_token_and_gives_the_same(family_model):
    path, _ = family_model("llama")
    prompt = list(range(10, 42))  # two blocks exactly
    engine = make_engine(path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = run(engine, [prompt], params)
    engine.add_request("again", prompt, params)
    assert engine.scheduler.schedule(0).num_new_tokens == [1]
    engine = make_engine(path)
    assert run(engine, [prompt, prompt], params) == first * 2
    assert engine.stats.num_cached_tokens == 31


@pytest.mark.parametrize(
    ("config", "words"),
    [({"max_model_len": 513}, "512"), ({"device": "cuda:9"}, "cuda"), ({"kv_cache_memory": 10}, "no KV block fits")],
)
def test_impossible_configurations_name_the_limit(family_model, config, words):
    path, _ = family_model("llama")
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
