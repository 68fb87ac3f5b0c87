"""Models with sliding windows give transformers' tokens past the window, whatever pool, cache, chunks and blocks."""

import random

import pytest
from bit_settings import by_default
from harness.engine import make_engine, run, transformers_tokens
from model_zoo import tiny_model

from pagedcli.attention.select import REGISTRY
from pagedcli.errors import BackendError
from pagedcli.models.reading import read_spec
from pagedcli.models.spec import layer_groups
from pagedcli.runner.cuda_graphs import DecodeGraphs
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.bits

WINDOW, NUM_NEW = 24, 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
CPU_BACKENDS = [entry.name for entry in REGISTRY if "cpu" in entry.auto_devices]
# name -> (family, config): windows in all layers or in some, natively in one call or not, and through transformers
MODELS = {
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gpt_oss": ("gpt_oss", {"num_hidden_layers": 4}),
    "granite_swa": ("granite_swa", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "starcoder2": ("starcoder2", {}),
    "cohere2": ("cohere2", {}),
    "vaultgemma": ("vaultgemma", {"num_hidden_layers": 4}),
    "laguna": ("laguna", {}),
}
HARD = {"chunked_prefill_size": 7, "block_size": 4, "max_model_len": 160}
SMALL_POOLS = {1: 20, 2: 50, 3: 70, 4: 90}  # by the number of groups of layers: too small for all sequences at once
EASY = [
    {"enable_prefix_caching": False, "block_size": 1, "max_model_len": 160},
    {"block_size": 16, "max_model_len": 160, "chunked_prefill_size": 7},
    {"block_size": 256, "max_model_len": 160},
]


def prompts():
    """Shorter than the window, as long, and longer; two share a beginning longer than the window."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 320) for _ in range(40)]
    tails = [[rng.randrange(3, 320) for _ in range(n)] for n in (5, 24, 25, 70, 9, 31)]
    return [*tails[:4], shared + tails[4], shared + tails[5]]


PROMPTS = prompts()


def small_pool(path):
    groups = layer_groups(read_spec(path).attention_layers)
    return SMALL_POOLS[len(groups)]


# of mechanisms that those above have
MORE = {
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
    "olmo3": ("olmo3", {}),
    "granitemoe_swa": ("granitemoe_swa", {}),
    "cwm": ("cwm", {}),
    "mellum": ("mellum", {}),
    "exaone_moe": ("exaone_moe", {}),
    "cohere2_moe": ("cohere2_moe", {}),
    "cohere2_moe-rms": ("cohere2_moe-rms", {"num_hidden_layers": 4}),
}


@pytest.fixture(scope="module", params=[*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def windowed(request, tmp_path_factory):
    """A tiny model and its expected tokens."""
    family, overrides = (MODELS | MORE)[request.param]
    path = tiny_model(family, tmp_path_factory.mktemp(request.param), sliding_window=WINDOW, **overrides)
    return path, transformers_tokens(path, PROMPTS, NUM_NEW)


@pytest.mark.quick("starcoder2", "laguna")
def test_tokens_equal_transformers_past_the_window_in_a_small_pool(windowed):
    path, expected = windowed
    engine = make_engine(path, **HARD, num_kvcache_blocks=small_pool(path))
    assert any(mixer.window for mixer in engine.spec.attentions)
    assert run(engine, PROMPTS, GREEDY) == expected
    assert by_default(engine.stats.num_preemptions > 0)
    assert by_default(engine.stats.num_cached_tokens > 0)


@pytest.mark.slow_cases("gemma*", "gpt_oss-*", "cohere2-*", "vaultgemma-*")
@pytest.mark.parametrize("variant", EASY)
def test_tokens_equal_transformers_past_the_window_whatever_cache_chunk_and_block_size(windowed, variant):
    path, expected = windowed
    assert run(make_engine(path, **variant), PROMPTS, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_tokens_equal_transformers_past_the_window_through_each_backend(windowed, backend):
    path, expected = windowed
    try:
        engine = make_engine(path, attention_backend=backend, num_kvcache_blocks=small_pool(path), **HARD)
    except BackendError as error:
        pytest.skip(error.message)
    assert run(engine, PROMPTS, GREEDY) == expected


@pytest.mark.quick("mistral")
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_samples_and_steps_ahead_on_padded_batches_give_the_same_tokens(name, tmp_path):
    family, overrides = MODELS[name]
    path = tiny_model(family, tmp_path, sliding_window=WINDOW, **overrides)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)
    config = {"attention_backend": "reference", "block_size": 4, "max_model_len": 160, "num_kvcache_blocks": 80}
    expected = run(make_engine(path, **config), PROMPTS[:3], params)
    engine = make_engine(path, **config, async_scheduling=True)
    runner = engine.runner
    runner.graphs = DecodeGraphs(
        runner.model, runner.state, runner.parallel, max_model_len=runner.limits.max_model_len, capture=False
    )
    assert run(engine, PROMPTS[:3], params) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_beams_of_a_model_with_windows_do_not_depend_on_the_pool(name, tmp_path):
    family, overrides = MODELS[name]
    path = tiny_model(family, tmp_path, sliding_window=WINDOW, **overrides)
    params = SamplingParams(beam_width=3, max_tokens=40, ignore_eos=True)
    config = {"block_size": 4, "max_model_len": 160, "num_kvcache_blocks": 400}
    expected = run(make_engine(path, **config, enable_prefix_caching=False), PROMPTS[:3], params)
    config |= {"num_kvcache_blocks": 150, "chunked_prefill_size": 7}
    assert run(make_engine(path, **config), PROMPTS[:3], params) == expected
