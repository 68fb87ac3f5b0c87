"""The Triton product with quantized weights: equal to its twin in the interpreter, and compiled for two GPUs."""

import pytest
import torch
from interpreter import interpreted, plain, run_interpreted
from quantized_zoo import exact_activations, random_weight

pytest.importorskip("triton")


@plain
def test_equality_through_the_interpreter():
    run_interpreted(__file__, at_least=10)


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"out": 40, "columns": 128},
        {"out": 64, "columns": 200, "bits": 8, "group_size": 200, "scales": torch.bfloat16},
        {"out": 33, "columns": 144, "group_size": 16},  # groups smaller than a block of the kernel
        {"out": 16, "columns": 128, "group_size": 64, "ordered": False},
        {"out": 70, "columns": 100, "bits": 8, "group_size": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_product_is_that_of_the_dequantized_weight(case, tokens):
    from pagedcli.layers.triton_codes import CodesLinear

    weight, bias = random_weight(**case), torch.linspace(-9, 9, case["out"])
    x = exact_activations(tokens, case["columns"]) / 127
    exact = x.double() @ weight.dequantized(torch.float32).double().T
    torch.testing.assert_close(CodesLinear(weight)(x).double(), exact, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(CodesLinear(weight, bias)(x).double(), exact + bias, rtol=1e-5, atol=1e-3)
    half = CodesLinear(weight)(x.half())
    expected = x.half().double() @ weight.dequantized(torch.float16).double().T
    torch.testing.assert_close(half.double(), expected, rtol=2e-3, atol=2e-2)


@interpreted
def test_no_tokens_and_the_layer_of_a_checkpoint():
    from quantized_zoo import FORMATS

    from pagedcli.layers.triton_codes import CodesLinear
    from pagedcli.models.packed_formats import packed_format
    from pagedcli.models.quantization import StoredQuantization

    assert CodesLinear(random_weight(32, 64))(torch.empty(0, 64)).shape == (0, 32)
    stored = packed_format(StoredQuantization(method="awq", layout="awq", bits=4, group_size=32, symmetric=False))
    quantize, _ = FORMATS["awq"]
    tensors, weight = quantize(torch.zeros(48, 64), torch.Generator().manual_seed(0))
    linear = stored.torch_linear([tensors], None, torch.float32, kernels="triton")
    assert isinstance(linear, CodesLinear)
    torch.testing.assert_close(linear(torch.eye(64)).T, weight)


@plain
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 128), (4, 32), (8, 4096)])
def test_it_compiles_without_spills(dtype, bits, group_size, capability, tmp_path):
    from triton_compile import NAMES, SHARED_LIMIT, Compiled

    from pagedcli.layers.triton_codes import launch_constants
    from pagedcli.layers.triton_kernels import codes_linear_kernel

    data, scales = f"*{NAMES[dtype]}", "*fp16"
    types = {"x_ptr": data, "words_ptr": "*i32", "scales_ptr": scales, "zeros_ptr": "*u8", "bias_ptr": data}
    types |= {"out_ptr": data, "num_tokens": "i32"}
    for num_tokens in (1, 32, 512):
        constants = {**launch_constants(num_tokens, 4096, 4096, bits, group_size), "BIAS": False}
        kernel = Compiled(codes_linear_kernel, types, constants, capability, 4, tmp_path)
        assert kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= SHARED_LIMIT[capability]
        assert "mma" in kernel.ptx


@interpreted
def test_an_engine_gives_the_tokens_of_the_dequantized_weights(tmp_path):
    from engine_harness import make_engine, ragged_prompts, run
    from model_zoo import tiny_model
    from quantized_zoo import FORMATS, quantized_twins

    from pagedcli.sampling_params import SamplingParams

    model = tiny_model("qwen3", tmp_path / "model", intermediate_size=128, num_hidden_layers=1)
    packed, plain = quantized_twins(model, tmp_path, *FORMATS["gptq-act-order"])
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * 3
    expected = run(make_engine(plain, attention_backend="reference"), ragged_prompts(3), params)
    engine = make_engine(packed, attention_backend="triton")
    assert run(engine, ragged_prompts(3), params) == expected
    [note] = [note for note in engine.model.notes if "gptq" in note]
    assert "kept so; activations are not rounded" in note
