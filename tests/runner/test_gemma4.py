"""Gemma 4: layers that differ in their heads, that read the K and V of others, and that have inputs of their own give
transformers' tokens past the window, whatever pool, cache, chunks and blocks."""

import pytest
from engine_harness import make_engine, run
from model_zoo import GEMMA4_FAMILIES, tiny_model
from paged_harness import transformers_tokens
from test_windows import PROMPTS, WINDOW

from pagedcli.sampling_params import SamplingParams

NUM_NEW = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
HARD = {"chunked_prefill_size": 7, "block_size": 4, "max_model_len": 160}
SMALL_POOLS = {2: 60, 3: 96}  # by the number of groups of layers: too small for all sequences at once
EASY = [
    {"enable_prefix_caching": False, "block_size": 1, "max_model_len": 160},
    {"chunked_prefill_size": 64, "block_size": 16, "max_model_len": 160},
    {"block_size": 256, "max_model_len": 160},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models by family, each with its expected tokens, made when they are asked for."""
    made = {}

    def model(family):
        if family not in made:
            path = tiny_model(family, tmp_path_factory.mktemp(family), sliding_window=WINDOW)
            made[family] = path, transformers_tokens(path, PROMPTS, NUM_NEW)
        return made[family]

    return model


@pytest.mark.parametrize("family", GEMMA4_FAMILIES)
def test_tokens_equal_transformers_past_the_window_in_a_small_pool(models, family):
    path, expected = models(family)
    engine = make_engine(path, **HARD)
    assert engine.plan.in_one_call
    engine = make_engine(path, **HARD, num_gpu_blocks_override=SMALL_POOLS[len(engine.plan.groups)])
    assert run(engine, PROMPTS, GREEDY) == expected
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0
