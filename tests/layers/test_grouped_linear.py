"""The C++ product by the numbers of GGUF files, against the same numbers in float32."""

import numpy as np
import pytest
import torch
from gguf_files import gguf, random_blocks
from linear_harness import rounded_by_32

from pagedcli.layers.native_linear import NativeLinear
from pagedcli.models.formats import padded_rows
from pagedcli.models.gguf.types import TYPES
from pagedcli.models.gguf.weights import numbers

QUANTIZED = {kind.name: kind for kind in TYPES.values() if not kind.is_float}


def made(kind, rows, columns, seed=0):
    raw = random_blocks(gguf.GGMLQuantizationType[kind.name], rows, columns, np.random.default_rng(seed))
    return torch.from_numpy(raw).reshape(rows, columns // kind.block, kind.num_bytes)


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("gated", [False, True])
def test_products_are_those_of_the_numbers_of_the_file(kind, gated, library):
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
def test_a_row_is_the_same_bits_in_any_company(kind, library):
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
