"""A tiny model with recurrent layers in the engine: pools, slots, chunks, snapshots and company never change a token,
and prompts that branch compute what they share once."""

import pytest
from engine_harness import make_engine, ragged_prompts, run
from model_zoo import cached_model

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams
from pagedcli.trace.check import TraceChecker

GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cached_model("qwen3_5", tmp_path_factory)


@pytest.fixture(scope="module")
def expected(path):
    return run(
        make_engine(path, enable_prefix_caching=False, num_kvcache_blocks=200),
        ragged_prompts(vocab_size=100),
        GREEDY,
    )


@pytest.mark.bits
@pytest.mark.parametrize(
    "config",
    [
        {"num_kvcache_blocks": 200},
        {"num_kvcache_blocks": 200, "checkpoints": "16", "chunked_prefill_size": 7, "async_scheduling": True},
        {"num_kvcache_blocks": 14, "num_state_slots": 3, "max_num_batched_tokens": 64},
        {"num_kvcache_blocks": 200, "checkpoints": "end", "max_num_seqs": 1, "num_state_slots": 2},
    ],
)
def test_pools_slots_chunks_and_snapshots_never_change_the_tokens(path, expected, config):
    checker = TraceChecker()
    engine = LLMEngine(
        EngineConfig(model=str(path), dtype="float32", device="cpu", **{"max_num_seqs": 16, **config}),
        emit=checker.apply,
        trace_tokens=True,
    )
    assert run(engine, ragged_prompts(vocab_size=100), GREEDY) == expected
    assert checker.state.slots.num_held == 0


@pytest.mark.bits
def test_samples_continue_from_the_state_of_their_prompt(path, expected):
    params = SamplingParams(max_tokens=6, temperature=0, n=3)
    engine = make_engine(path, num_kvcache_blocks=200, max_num_seqs=7, num_state_slots=9)
    got = run(engine, ragged_prompts(vocab_size=100), params)
    assert got == [[samples[0]] * 3 for samples in expected]


def test_a_shared_beginning_is_computed_once_where_snapshots_are_made_at_branches(path):
    shared = [3 + i % 90 for i in range(50)]
    prompts = [[*shared, 10 + i, *range(5, 24)] for i in range(8)]
    computed = {}
    for policy in ("branches", "end", "none"):
        engine = make_engine(path, num_kvcache_blocks=200, max_num_seqs=8, checkpoints=policy)
        tokens = run(engine, prompts, SamplingParams(max_tokens=1, temperature=0))
        computed[policy] = engine.stats.num_computed_tokens, tokens
    assert computed["branches"][0] == 8 * 70 - 7 * 48
    assert computed["end"][0] == computed["none"][0] == 8 * 70
    assert computed["branches"][1] == computed["none"][1]


@pytest.mark.parametrize("config", [{"num_state_slots": 4}, {"checkpoints": "end"}])
def test_settings_of_state_are_refused_for_a_model_without_any(tmp_path_factory, config):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers with recurrent state"):
        make_engine(cached_model("llama", tmp_path_factory), **config)
