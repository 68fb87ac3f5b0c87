"""Gemma 4 as on a GPU: Triton attention over blocks that lie apart, fused layers and grouped experts, in graphs."""

import pytest
from engine_harness import run
from interpreter import interpreted, plain, run_interpreted
from model_zoo import GEMMA4_FAMILIES, tiny_model

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")


@plain
def test_through_the_interpreter():
    run_interpreted(__file__, "-m", "not slow", at_least=1)


@plain
@pytest.mark.slow
def test_more_through_the_interpreter():
    run_interpreted(__file__, "-m", "slow", at_least=5)


@pytest.fixture
def gpu(monkeypatch):
    from pretend_cuda import PretendGpu

    with PretendGpu().install(monkeypatch) as gpu:
        yield gpu


KINDS = ["sliding_attention", "full_attention"]
SIZES = {family: {"num_hidden_layers": 2, "layer_types": KINDS} for family in GEMMA4_FAMILIES}
SIZES["gemma4-e2b"] = {"num_hidden_layers": 3, "layer_types": [*KINDS, "sliding_attention"], "num_kv_shared_layers": 1}
# the second begins as the first does; the third is past a split of the decode kernel
PROMPTS = [[5 + i % 300 for i in range(length)] for length in (15, 18)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def make_engine(path, device, **config):
    config = {"max_num_seqs": 2, "num_gpu_blocks_override": 24, "max_model_len": 64, "dtype": "float32", **config}
    config = {"max_num_batched_tokens": 16, "block_size": 16, **config}
    return LLMEngine(EngineConfig(model=str(path), device=device, **config))


@interpreted
@pytest.mark.parametrize(
    "family", [GEMMA4_FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in GEMMA4_FAMILIES[1:])]
)
def test_the_tokens_are_those_of_the_reference(family, tmp_path, gpu):
    path = tiny_model(family, tmp_path / "model", sliding_window=12, **SIZES[family])
    expected = run(make_engine(path, "cpu", attention_backend="reference"), PROMPTS, PARAMS)
    waits = len(gpu.waits)
    engine = make_engine(path, "cuda")
    del gpu.waits[waits:]
    assert engine.plan.backend == "triton"
    assert run(engine, PROMPTS, PARAMS) == expected
    assert not gpu.waits, "a step never waits for the device"
    assert gpu.replays > 0
