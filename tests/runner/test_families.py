"""Families that differ from Llama in their layers, and mixtures of experts, give transformers' tokens natively."""

import pytest
from bit_settings import by_default
from harness.engine import make_engine, ragged_prompts, run, transformers_tokens
from model_zoo import COMPOSED_FAMILIES, SLOW_FAMILIES, cached_model
from msgspec import structs

from pagedcli.attention.select import REGISTRY
from pagedcli.errors import BackendError
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.bits

NUM_NEW = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
# caching with eviction, preemption and chunks; then each alone
HARD = {"chunked_prefill_size": 7, "num_kvcache_blocks": 14, "max_model_len": 128}
EASY = [
    {"enable_prefix_caching": False, "block_size": 1, "num_kvcache_blocks": 200, "max_model_len": 128},
    {"block_size": 256, "max_model_len": 128},
    {"max_num_seqs": 1, "max_model_len": 128},
]
PROMPTS = ragged_prompts(5)
CPU_BACKENDS = [entry.name for entry in REGISTRY if "cpu" in entry.auto_devices]


@pytest.fixture(scope="module", params=[*COMPOSED_FAMILIES, *SLOW_FAMILIES])
def family(request, tmp_path_factory):
    """A tiny model and its expected tokens."""
    path = cached_model(request.param, tmp_path_factory)
    return path, transformers_tokens(path, PROMPTS, NUM_NEW)


@pytest.mark.quick("granite", "phi3")
def test_tokens_equal_transformers_in_a_small_pool(family):
    path, expected = family
    engine = make_engine(path, **HARD)
    assert not engine.spec.is_fallback
    assert run(engine, PROMPTS, GREEDY) == expected
    assert by_default(engine.stats.num_preemptions > 0)
    assert by_default(engine.stats.num_cached_tokens > 0)


@pytest.mark.slow
def test_three_samples_of_a_prompt_share_its_blocks_and_are_the_tokens_of_transformers(family):
    path, expected = family
    engine = make_engine(path, **{**HARD, "num_kvcache_blocks": 40})
    assert run(engine, PROMPTS, structs.replace(GREEDY, n=3)) == [3 * sample for sample in expected]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ministral3", "glm4", "exaone4", "deepseek_v3", "cohere2_moe", "minimax_m2"])
def test_samples_and_beams_do_not_depend_on_the_pool_or_the_decoder(name, tmp_path_factory):
    path = cached_model(name, tmp_path_factory)
    for params in (
        SamplingParams(n=3, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True),
        SamplingParams(beam_width=3, max_tokens=40, ignore_eos=True),
    ):
        variants = [
            {"num_kvcache_blocks": 400, "enable_prefix_caching": False},
            {"num_kvcache_blocks": 150, "chunked_prefill_size": 7},
            {"num_kvcache_blocks": 150, "attention_backend": "reference"},
        ]
        found = [
            run(make_engine(path, block_size=4, max_model_len=160, **each), PROMPTS[:3], params) for each in variants
        ]
        assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_tokens_equal_transformers_through_each_backend(family, backend):
    path, expected = family
    try:
        engine = make_engine(path, attention_backend=backend, **HARD)
    except BackendError as error:
        pytest.skip(error.message)
    assert run(engine, PROMPTS, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", EASY)
def test_tokens_equal_transformers_whatever_cache_chunk_and_block_size(family, variant):
    path, expected = family
    assert run(make_engine(path, **variant), PROMPTS, GREEDY) == expected
