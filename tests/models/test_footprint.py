"""One footprint: what is predicted from config.json alone is what a loaded model has, to the byte."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from harness.engine import planned_and_made
from model_zoo import NATIVE_FAMILIES, tiny_model

from pagedcli.errors import BackendError, ConfigError
from pagedcli.models.footprint import footprint
from pagedcli.models.formats import AS_STORED, FORMATS, padded_rows
from pagedcli.models.reading import native_spec

FAMILIES = [*NATIVE_FAMILIES, "olmo2", "gemma2", "gemma3", "qwen3-moe", "qwen2-moe"]
FAMILIES += ["qwen3_next", "lfm2", "granite-hybrid-moe", "deepseek_v3", "minicpm3"]
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]}


def check_prediction(family, tmp_path, **settings):
    path = tiny_model(family, tmp_path / family)
    try:
        decision, engine = planned_and_made(path, max_model_len=128, **settings)
    except (BackendError, ConfigError) as error:
        pytest.skip(f"not here: {error.message}")
    assert decision.terms.weights == engine.plan.weight_bytes


@pytest.mark.slow_cases("*-float32-auto")
@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES))
def test_predicted_weights_are_those_of_the_loaded_model(family, dtype, backend, tmp_path):
    check_prediction(family, tmp_path, dtype=dtype, attention_backend=backend)


@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("quantization", [name for name in FORMATS if name is not None])
@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES))
def test_predicted_weights_are_those_of_the_rounded_model(family, quantization, tmp_path):
    check_prediction(family, tmp_path, dtype="bfloat16", quantization=quantization)


def test_a_step_reads_each_expert_once_that_its_tokens_go_to():
    spec = native_spec(Path("."), {**SIZES, **HEADS, **EXPERTS}, "qwen3_moe")
    weights = footprint(spec, AS_STORED, "torch", 2)
    rest = 2 * 64 * (8 + 4) * 16 + 3 * 64 * 96 + 8 * 64  # attention, the MLP of layer 0, the router of layer 1
    expert = 3 * 64 * 48
    assert weights.active_parameters == rest + 2 * expert
    assert weights.active_bytes(1) == pytest.approx(2 * (rest + 2 * expert))
    assert weights.active_bytes(10_000) == pytest.approx(2 * (rest + 8 * expert))
    rng = random.Random(0)
    counted = [len({each for _ in range(5) for each in rng.sample(range(8), 2)}) for _ in range(2000)]
    touched = (weights.active_bytes(5) / 2 - rest) / expert
    assert touched == pytest.approx(sum(counted) / len(counted), rel=0.01)


def test_rows_are_padded_as_the_kernels_pack_them():
    assert [padded_rows(n, "cpu") for n in (1, 32, 33)] == [32, 32, 64]
    assert [padded_rows(2 * n, "cpu", gated=True) for n in (1, 16, 17)] == [32, 32, 64]
    assert padded_rows(33, "triton") == 33


def test_a_footprint_needs_no_torch():
    program = "import sys, pagedcli.models.footprint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
