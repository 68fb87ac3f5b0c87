"""Whole models on a pretended GPU, whose kernels run in triton's interpreter: tokens equal to the CPU reference's."""

from itertools import product

import pytest
from engine_harness import run
from interpreter import interpreted
from model_zoo import tiny_model
from quantized_zoo import mxfp4_twins

from pagedcli.config import EngineConfig
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams

pytest.importorskip("triton")

PROMPTS = [[5 + i % 300 for i in range(length)] for length in (9, 14)]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def tokens(path, device, **config):
    config = {"max_num_seqs": 2, "num_gpu_blocks_override": 24, "max_model_len": 64, "dtype": "float32", **config}
    return run(LLMEngine(EngineConfig(model=str(path), device=device, **config)), PROMPTS, PARAMS)


@interpreted
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("olmo2", "sdpa"),
        *(
            pytest.param(family, backend, marks=pytest.mark.slow)
            for family, backend in product(("olmo2", "olmoe", "gemma4-31b"), ("sdpa", "reference"))
            if (family, backend) != ("olmo2", "sdpa")
        ),
    ],
)
def test_heads_normed_outside_of_a_fused_store(family, backend, tmp_path, gpu):
    """q and k are strided views of the fused projection, and triton's norm reads rows one after the other."""
    sizes = {"num_hidden_layers": 2}
    if family == "gemma4-31b":
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 1}
        sizes |= {"num_global_key_value_heads": 1}
    path = tiny_model(family, tmp_path / "model", **sizes)
    expected = tokens(path, "cpu", attention_backend="reference")
    assert tokens(path, "cuda", attention_backend=backend) == expected


@interpreted
@pytest.mark.slow
def test_mxfp4_experts(tmp_path, gpu):
    plain, packed = mxfp4_twins(tmp_path)
    assert tokens(packed, "cuda") == tokens(plain, "cpu", attention_backend="reference")
