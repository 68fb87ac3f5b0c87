"""Models with recurrent layers through the engine: bits do not depend on pool, slots, snapshots and company (their
tokens are those of transformers by test_families)."""

import pytest
from bit_settings import by_default
from harness.engine import make_engine, outputs_of, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.errors import ConfigError
from pagedcli.sampling_params import SamplingParams

pytestmark = pytest.mark.bits

PROMPTS = ragged_prompts(4)
# caching with eviction, preemption, chunks and few slots; then each alone
HARD = {"chunked_prefill_size": 7, "num_kvcache_blocks": 9, "num_state_slots": 5, "max_model_len": 96}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3_5", tmp_path_factory)


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3_5"])
def test_log_probabilities_are_the_same_bits_alone_cached_preempted_and_in_a_crowd(name, tmp_path_factory):
    path = cached_model(name, tmp_path_factory)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)

    def logprobs(engine, prompts):
        outputs = outputs_of(engine, prompts, params)
        return [[(each.logprob, each.top) for each in output.samples[0].logprobs] for output in outputs]

    alone = make_engine(path, max_model_len=96, max_num_seqs=1, checkpoints="none", enable_prefix_caching=False)
    expected = [logprobs(alone, [prompt])[0] for prompt in PROMPTS]
    assert len(expected[0]) == 8
    tight, wide = make_engine(path, **HARD), make_engine(path, block_size=4, max_model_len=96, checkpoints="end")
    assert logprobs(tight, PROMPTS) == expected
    for _ in range(2):
        assert logprobs(wide, PROMPTS) == expected
    assert by_default(wide.stats.num_cached_tokens > 0)


def test_beams_do_not_depend_on_slots_and_snapshots(path):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, beam_width=3)
    wide = run(make_engine(path, block_size=4, max_model_len=96), PROMPTS, params)
    tight = {"num_kvcache_blocks": 45, "num_state_slots": 8, "chunked_prefill_size": 7, "checkpoints": "end"}
    assert run(make_engine(path, block_size=4, max_model_len=96, **tight), PROMPTS, params) == wide


@pytest.mark.parametrize("config", [{"num_state_slots": 4}, {"checkpoints": "end"}])
def test_settings_of_state_are_refused_for_a_model_without_any(tmp_path_factory, config):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers with recurrent state"):
        make_engine(cached_model("llama", tmp_path_factory), **config)
