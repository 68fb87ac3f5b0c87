"""Models whose layers differ in their heads as on a GPU: Triton attention over blocks that lie apart, fused layers and
grouped experts, in graphs."""

import pytest
from engine_harness import run
from interpreter import interpreted
from model_zoo import GEMMA4_FAMILIES, tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")

WINDOW = 12
KINDS = ["sliding_attention", "full_attention"]
SIZES = {family: {"num_hidden_layers": 2, "layer_types": KINDS} for family in GEMMA4_FAMILIES}
SIZES["gemma4-e2b"] = {"num_hidden_layers": 3, "layer_types": [*KINDS, "full_attention"], "num_kv_shared_layers": 1}
SIZES["laguna"] = {
    "num_hidden_layers": 3,
    "layer_types": [*KINDS, KINDS[0]],
    "num_attention_heads_per_layer": [8, 4, 6],
}
# the second begins as the first does; both pass the window
PROMPTS = [[5 + i % 300 for i in range(length)] for length in (15, 18)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make_engine(path, device, **config):
    config = {"max_num_seqs": 2, "num_kvcache_blocks": 24, "max_model_len": 64, "dtype": "float32", **config}
    config = {"max_num_batched_tokens": 16, "block_size": 16, **config}
    return LLMEngine(EngineConfig(model=str(path), device=device, **config))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_the_tokens_are_those_of_the_reference(family, tmp_path, gpu):
    path = tiny_model(family, tmp_path / "model", sliding_window=WINDOW, **SIZES[family])
    expected = run(make_engine(path, "cpu", attention_backend="reference"), PROMPTS, PARAMS)
    waits = len(gpu.waits)
    engine = make_engine(path, "cuda")
    del gpu.waits[waits:]
    assert engine.plan.backend == "triton"
    assert run(engine, PROMPTS, PARAMS) == expected
    assert not gpu.waits, "a step never waits for the device"
    assert gpu.replays > 0


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False, "chunked_prefill_size": 7}], ids=str)
def test_preempted_eager_steps_give_the_tokens_of_the_reference(options, tmp_path, gpu):
    """Of the two groups of a sequence of 40 tokens one holds three blocks, the other those of the window."""
    path = tiny_model("gemma4-e2b", tmp_path / "model", sliding_window=WINDOW, **SIZES["gemma4-e2b"])
    params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    expected = run(make_engine(path, "cpu", attention_backend="reference"), PROMPTS, params)
    config = {"num_kvcache_blocks": 6, "max_model_len": 44, "enforce_eager": True, **options}
    engine = make_engine(path, "cuda", **config)
    assert run(engine, PROMPTS, params) == expected
    assert engine.stats.num_preemptions > 0
