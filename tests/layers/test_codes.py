"""CPU kernels on the numbers of quantized checkpoints and GGUF files: the product with the dequantized weights."""

from itertools import product

import numpy as np
import pytest
import torch
from gguf_files import gguf, random_blocks
from quantized_zoo import exact_activations, random_nvfp4, random_weight, rounded_by_32

from pagedcli.errors import BackendError, ModelError
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.layers.quantized import E2M1
from pagedcli.models.formats import padded_rows
from pagedcli.models.gguf.types import TYPES
from pagedcli.models.gguf.weights import numbers


@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize(
    "case",
    [
        {"out": 32, "columns": 64},
        {"out": 97, "columns": 352, "scales": torch.bfloat16},
        {"out": 64, "columns": 1152, "group_size": 64, "scales": torch.float32},
        {"out": 40, "columns": 1024, "group_size": 128, "ordered": False},
        {"out": 40, "columns": 480, "group_size": 160},  # a group of five blocks
        {"out": 40, "columns": 700, "group_size": 96},  # the last group and its last block are short
        {"out": 40, "columns": 700, "group_size": 700},
        {"out": 40, "columns": 62, "group_size": 62, "scales": torch.bfloat16},
        {"out": 97, "columns": 352, "bits": 8},
        {"out": 33, "columns": 1024, "bits": 8, "group_size": 128, "ordered": False, "scales": torch.bfloat16},
        {"out": 33, "columns": 500, "bits": 8, "group_size": 500},
        {"out": 33, "columns": 500, "bits": 8, "group_size": 500, "symmetric": True},  # int8, as in int8 checkpoints
        {"out": 33, "columns": 320, "scales": torch.bfloat16, "levels": E2M1},  # MXFP4
    ],
    ids=str,
)
def test_the_product_is_that_of_the_dequantized_weight(library, case, tokens):
    weight = random_weight(**case)
    x = exact_activations(tokens, case["columns"])
    expected = x.double() @ weight.dequantized(torch.float32).T.double()
    actual = NativeLinear(library, weight, dtype=torch.float32)(x)
    assert (actual - expected).abs().max() < 1e-6 * (x.abs() @ weight.dequantized(torch.float32).abs().T).max()


@pytest.mark.parametrize("tokens", [1, 7, 70])
@pytest.mark.parametrize(("out", "columns"), [(32, 256), (97, 1024), (40, 80), (64, 1856)])
def test_nvfp4_is_exact_for_every_scale_and_size(library, out, columns, tokens):
    weight, x = random_nvfp4(out, columns), exact_activations(tokens, columns)
    widened = weight.dequantized(torch.float32).T
    actual = NativeLinear(library, weight, dtype=torch.float32)(x)
    assert (actual - x.double() @ widened.double()).abs().max() < 1e-6 * (x.abs() @ widened.abs()).max()
    bias = torch.linspace(-900, 900, out)
    biased = NativeLinear(library, weight, bias, dtype=torch.float32)(x)
    torch.testing.assert_close(biased, actual + bias)


LAYERS = {
    "4 bits": lambda library: NativeLinear(library, random_weight(97, 352, group_size=64), dtype=torch.float32),
    "8 bits": lambda library: NativeLinear(library, random_weight(97, 352, bits=8, group_size=64), dtype=torch.float32),
    "nvfp4": lambda library: NativeLinear(library, random_nvfp4(97, 352), dtype=torch.float32),
    "int4": lambda library: NativeLinear(library, torch.randn(97, 352), quantization="int4"),
    "int8": lambda library: NativeLinear(library, torch.randn(97, 352), quantization="int8"),
    "float32": lambda library: NativeLinear(library, torch.randn(97, 352)),
    "bfloat16": lambda library: NativeLinear(library, torch.randn(97, 352).bfloat16()),
    "float16": lambda library: NativeLinear(library, torch.randn(97, 352).half()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_a_row_depend_on_neither_the_other_rows_nor_the_threads(library, name):
    linear = LAYERS[name](library)
    x = torch.randn(90, 352).to(getattr(torch, name) if "float" in name else torch.float32)
    whole = linear(x)
    try:
        for threads, tokens in product((1, 3), (1, 5, 6, 7, 32, 40)):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x[-tokens:].contiguous()), whole[-tokens:])
    finally:
        torch.set_num_threads(1)


def test_a_gated_layer_and_a_bias_are_those_of_the_dequantized_weight(library):
    weight, bias = random_weight(48, 96), torch.linspace(-900, 900, 48)
    gate, up = (exact_activations(9, 96) @ weight.dequantized(torch.float32).T + bias).chunk(2, -1)
    actual = NativeLinear(library, weight, bias, gated=True, dtype=torch.float32)(exact_activations(9, 96))
    torch.testing.assert_close(actual, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_two_bytes_are_rounded_once_more(library, dtype):
    weight, x = random_weight(40, 256, group_size=64), exact_activations(6, 256).to(dtype)
    expected = x.double() @ weight.dequantized(torch.float32).double().T / 2**14  # within the range of float16
    actual = NativeLinear(library, weight, dtype=dtype)(x / 2**14)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    ("weight", "more"),  # three bytes per group and row; a byte per group and a step per 256 inputs
    [
        (random_weight(64, 1024, group_size=128), 1024 // 128 * 3),
        (random_nvfp4(64, 1024), 1024 // 16 + 1024 // 256 * 4),
    ],
    ids=["4 bits", "nvfp4"],
)
def test_weights_take_their_bits_and_their_scales(library, weight, more):
    assert NativeLinear(library, weight, dtype=torch.float32).nbytes == 64 * (1024 // 2 + more)


def test_groups_of_another_size_and_scattered_groups_have_no_kernel(library):
    with pytest.raises(BackendError, match="groups of 48"):
        NativeLinear(library, random_weight(32, 96, group_size=48), dtype=torch.float32)
    weight = random_weight(32, 64, ordered=False)
    weight.groups[weight.groups == 1] = 0
    with pytest.raises(ModelError, match="groups of different sizes"):
        NativeLinear(library, weight, dtype=torch.float32)


# ---------------------------------------------------------------------- GGUF files

QUANTIZED = {kind.name: kind for kind in TYPES.values() if not kind.is_float}


def made(kind, rows, columns, seed=0):
    raw = random_blocks(gguf.GGMLQuantizationType[kind.name], rows, columns, np.random.default_rng(seed))
    return torch.from_numpy(raw).reshape(rows, columns // kind.block, kind.num_bytes)


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("gated", [False, True])
def test_products_are_those_of_the_numbers_of_a_gguf_file(kind, gated, library):
    raw = made(kind, 70, 768)
    linear = NativeLinear(library, kind.read({"weight": raw}), gated=gated, dtype=torch.float32)
    weight = numbers(raw, kind, torch.float32).double()
    for num_tokens in (1, 5, 6, 40):
        x = torch.randn(num_tokens, 768, generator=torch.Generator().manual_seed(num_tokens))
        y = rounded_by_32(x).double() @ weight.T
        if gated:
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(linear(x).double(), y, rtol=2e-4, atol=2e-4 * float(y.abs().max()))


@pytest.mark.usefixtures("own_panels")
@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
def test_rows_are_read_back_exactly(kind, library):
    raw = made(kind, 70, 512)
    for dtype in (torch.float32, torch.bfloat16):
        linear = NativeLinear(library, kind.read({"weight": raw}), dtype=dtype)
        rows = torch.tensor([0, 31, 69, 32, 5])
        assert torch.equal(linear.weight_rows(rows), numbers(raw, kind, torch.float32)[rows].to(dtype))
        assert linear.nbytes == padded_rows(70, "cpu") * 512 // 256 * kind.packed
    with pytest.raises(IndexError):
        linear.weight_rows(torch.tensor([70]))


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
def test_a_row_by_the_numbers_of_a_gguf_file_is_the_same_bits_in_any_company(kind, library):
    linear = NativeLinear(library, kind.read({"weight": made(kind, 70, 512)}), dtype=torch.float32)
    x = torch.randn(100, 512, generator=torch.Generator().manual_seed(0))
    whole = linear(x)  # few rows, two passes and many rows are read in different ways
    for first, end in ((0, 1), (98, 100), (3, 10), (40, 72), (5, 85)):
        assert torch.equal(linear(x[first:end]), whole[first:end]), (first, end)


def test_a_layer_may_have_parts_of_different_types(library):
    kinds = [QUANTIZED[name] for name in ("Q4_K", "Q6_K", "Q8_0")]
    raws = [made(kind, rows, 256, rows) for kind, rows in zip(kinds, (40, 32, 7), strict=True)]
    bias = torch.randn(79, generator=torch.Generator().manual_seed(0))
    biases = bias.split([40, 32, 7])
    parts = [
        NativeLinear(library, kind.read({"weight": raw}), own, dtype=torch.float32)
        for raw, kind, own in zip(raws, kinds, biases, strict=True)
    ]
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([part(x) for part in parts], 1)
    assert torch.equal(NativeLinear.side_by_side(parts)(x), alone)
