"""The Triton product with quantized weights and with the blocks of GGUF files: every number is the checkpoint's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf_files import gguf, random_blocks
from interpreter import interpreted, noise
from quantized_zoo import exact_activations, random_float8, random_weight

from pagedcli.errors import ModelError
from pagedcli.layers.quantized import E2M1, CodedWeight
from pagedcli.models.gguf.types import TYPES
from pagedcli.models.gguf.weights import numbers

pytest.importorskip("triton")
from pagedcli.layers.triton_products import (
    UNPACKED_TOKENS,
    RoundingLinear,
    TritonLinear,
    kernel_weight,
    linear_constants,
    unpacked_weight,
)

FP8 = torch.float8_e4m3fn


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        {"out": 40, "columns": 128},
        {"out": 64, "columns": 200, "bits": 8, "group_size": 200, "scales": torch.bfloat16},
        {"out": 33, "columns": 144, "group_size": 16},  # groups smaller than a block of the kernel
        {"out": 16, "columns": 128, "group_size": 64, "ordered": False},
        {"out": 70, "columns": 100, "bits": 8, "group_size": 32},
        {"out": 40, "columns": 96, "scales": torch.bfloat16, "levels": E2M1},
        {"out": 40, "columns": 96, "group_size": 16, "scales": torch.float32, "levels": E2M1},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_product_is_that_of_the_dequantized_weight(case, tokens):
    weight, bias = random_weight(**case), torch.linspace(-9, 9, case["out"])
    x = exact_activations(tokens, case["columns"]) / 127
    exact = x.double() @ weight.dequantized(torch.float32).double().T
    torch.testing.assert_close(TritonLinear(weight)(x).double(), exact, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(TritonLinear(weight, bias)(x).double(), exact + bias, rtol=1e-5, atol=1e-3)
    half = TritonLinear(weight)(x.half())
    expected = x.half().double() @ weight.dequantized(torch.float16).double().T
    torch.testing.assert_close(half.double(), expected, rtol=2e-3, atol=2e-2)


# Inputs that are cut in parts even for the one processor of the interpreter.
FORMS = {
    "4 bits": random_weight(24, 1200, group_size=80),
    "4 bits by 32": random_weight(33, 1216),
    "8 bits": random_weight(64, 1200, bits=8, group_size=1200),
    "e2m1": random_weight(24, 1216, scales=torch.bfloat16, levels=E2M1),
    "FP8": random_float8(40, 1200, 1200),
    "FP8 by 64": random_float8(17, 1216, 64),
}


@interpreted
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 20])
def test_parts_of_the_inputs_are_added(form, tokens):
    weight = FORMS[form]
    x, bias = exact_activations(tokens, weight.dequantized(torch.float32).shape[1]) / 127, torch.arange(-20.0, 80.0)
    numbers = weight.dequantized(torch.float32)
    linear = TritonLinear(weight, bias[: len(numbers)])
    constants = [linear_constants(kernel_weight([weight]), count, 1)[0] for count in (1, 17, 40, 64)]
    assert len({(each["LENGTH"], each["BLOCK_K"]) for each in constants}) == 1, "else a token depends on its company"
    assert constants[0]["LENGTH"] < numbers.shape[1]
    exact = x.double() @ numbers.double().T + bias[: len(numbers)]
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-3)
    halved = linear(x.half())
    torch.testing.assert_close(halved.double(), exact, rtol=2e-3, atol=2e-2 * float(exact.std()))


@pytest.mark.quick("4 bits by 32", "FP8")
@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_the_company_of_a_row_does_not_change_its_bits(form):
    linear = TritonLinear(FORMS[form])
    x = exact_activations(40, FORMS[form].dequantized(torch.float32).shape[1]).half() / 127
    assert torch.equal(linear(x), torch.cat([linear(x[:1]), linear(x[1:20]), linear(x[20:])]))


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_many_tokens_are_multiplied_by_the_unpacked_weight(form):
    weight = FORMS[form]
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(unpacked_weight(kernel_weight([weight]), dtype), weight.dequantized(dtype))
    numbers = weight.dequantized(torch.float32)
    x = torch.ones(UNPACKED_TOKENS, numbers.shape[1])
    assert torch.equal(TritonLinear(weight)(x), F.linear(x, numbers))


def by_hardware(linear):
    """The layer as a GPU that converts e4m3 has it."""
    weight = linear._weight
    linear._weight = replace(weight, numbers=weight.numbers.view(FP8), scales=weight.scales / 256)
    return linear


@interpreted
@pytest.mark.parametrize(("out", "columns", "group_size"), [(40, 128, 64), (33, 200, 200), (70, 96, 32), (33, 62, 62)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_product_with_fp8_weights_is_that_of_their_float32_values(out, columns, group_size, tokens):
    weight, x = random_float8(out, columns, group_size), exact_activations(tokens, columns) / 127
    for dtype, rtol, atol in ((torch.float32, 1e-5, 1e-3), (torch.float16, 1e-3, 1e-2)):
        exact = x.to(dtype).double() @ weight.dequantized(torch.float32).double().T
        for linear in (TritonLinear(weight), by_hardware(TritonLinear(weight))):
            torch.testing.assert_close(linear(x.to(dtype)).double(), exact, rtol=rtol, atol=atol)
            assert linear.nbytes == out * columns + 4 * out * -(-columns // group_size)


@interpreted
def test_tensor_cores_multiply_fp8_by_inputs_rounded_to_it():
    weight, x, bias = random_float8(48, 160, 160), noise(20, 160), noise(48, seed=1)
    linear = by_hardware(TritonLinear(weight, bias))
    assert RoundingLinear.serves(linear)
    assert not RoundingLinear.serves(by_hardware(TritonLinear(random_float8(48, 128, 64))))
    exact = x @ weight.dequantized(torch.float32).T + bias
    assert (RoundingLinear(linear)(x) - exact).norm() < 0.08 * exact.norm()  # the interpreter rounds some e4m3 by two
    assert torch.equal(RoundingLinear(linear)(x[:15]), linear(x[:15]))


@interpreted
def test_every_fp8_number_is_read_from_its_bits_and_what_is_none_is_refused():
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16)
    is_nan = numbers & 127 == 127
    weight = CodedWeight(numbers.masked_fill(is_nan, 0).view(FP8), 8, torch.ones(16, 1), 0, 16)
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(TritonLinear(weight)(torch.eye(16, dtype=dtype)), weight.codes.to(dtype).T)
    with pytest.raises(ModelError, match="not a number"):
        TritonLinear(CodedWeight(numbers.view(FP8), 8, torch.ones(16, 1), 0, 16))


@interpreted
@pytest.mark.parametrize("number", [number for number, kind in TYPES.items() if kind.in_triton])
def test_a_product_has_the_numbers_of_the_file_and_takes_the_bytes_of_the_table(number):
    kind, rows = TYPES[number], 40
    raw = random_blocks(gguf.GGMLQuantizationType(number), rows, 512, np.random.default_rng(number))
    module = {"weight": torch.from_numpy(raw).reshape(rows, -1, kind.num_bytes)}
    linear = kind.linear([module], None, torch.float32, "triton")
    assert isinstance(linear, TritonLinear)
    assert linear.nbytes == kind.kept_bytes((rows, 512), 4, "triton")
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(linear(torch.eye(512, dtype=dtype)).T, numbers(module["weight"], kind, dtype))
    x = exact_activations(3, 512) / 127
    exact = x.double() @ numbers(module["weight"], kind, torch.float32).double().T
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-3)
