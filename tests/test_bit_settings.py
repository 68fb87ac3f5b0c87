"""The settings of `make test-matrix` change every engine, and no token."""

import pytest
from bit_settings import SETTINGS, applied
from harness.engine import make_engine, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ragged_prompts(vocab_size=100)
HAS_EFFECT = {
    "blocks-of-1": lambda engine: (engine.limits.block_size, engine.plan.num_blocks) == (1, 200 * 16),
    "preemption": lambda engine: engine.stats.num_preemptions > 2,
    "no-cache": lambda engine: engine.stats.num_cached_tokens == 0,
    "two-threads": lambda engine: SETTINGS["two-threads"].num_threads == 2,
    "checkpoints": lambda engine: engine.stats.num_cached_tokens > 0,
    "store": lambda engine: engine.close_store().num_written_blocks > 0,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_changes_the_engine_and_no_token(name, tmp_path_factory, tmp_path):
    path = cached_model("qwen3_5" if name == "checkpoints" else "qwen3", tmp_path_factory)
    expected = run(make_engine(path, num_kvcache_blocks=200), PROMPTS, GREEDY)
    with applied(SETTINGS[name], tmp_path):
        engine = make_engine(path, num_kvcache_blocks=200)
        assert run(engine, PROMPTS, GREEDY) == expected
    assert HAS_EFFECT[name](engine)


def test_an_engine_that_refuses_a_setting_runs_without_it_and_says_so(tmp_path_factory, tmp_path):
    path = cached_model("qwen3", tmp_path_factory)
    with applied(SETTINGS["store"], tmp_path), pytest.warns(UserWarning, match="attention backend reference"):
        engine = make_engine(path, num_kvcache_blocks=200, attention_backend="reference")
    assert engine.cache.store is None
    with applied(SETTINGS["checkpoints"], tmp_path), pytest.raises(pytest.skip.Exception, match="no layers with"):
        make_engine(path)
