"""Every type of numbers in GGUF files, against the gguf package."""

import numpy as np
import pytest
import torch

from pagedcli.models.gguf.blocks import grouped, numbers
from pagedcli.models.gguf.types import REFUSED, TYPES

gguf = pytest.importorskip("gguf")


def test_every_type_of_the_package_is_read_or_refused_by_name():
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert known == {number: kind.name for number, kind in TYPES.items()} | {
        n: name for n, (name, _) in REFUSED.items()
    }
    for number, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.num_bytes)


def blocks(kind, rows, per_row, seed=0):
    """Random bytes, so every scale occurs: huge and subnormal ones, infinities and NaN."""
    return np.random.default_rng(seed).integers(0, 256, (rows, per_row, kind.num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("number", TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_equal_those_of_the_package_in_every_bit(number):
    kind, raw = TYPES[number], blocks(TYPES[number], 64, 40)
    if kind.name == "F32":
        expected = raw.reshape(64, -1).view(np.float32)
    elif kind.name == "F16":
        expected = raw.reshape(64, -1).view(np.float16).astype(np.float32)
    else:
        expected = gguf.dequantize(raw.reshape(64, -1), gguf.GGMLQuantizationType(number))
    found = numbers(torch.from_numpy(raw), kind, torch.float32).float().numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", [number for number, kind in TYPES.items() if not kind.is_float])
def test_scales_that_are_products_are_equal_to_them(number):
    weight = grouped(torch.from_numpy(blocks(TYPES[number], 16, 8)), TYPES[number])
    assert int(weight.codes.max()) < 1 << weight.bits
    if weight.steps is None:
        assert TYPES[number].block == 32
        return
    per_step = weight.factors.shape[1] // weight.steps.shape[1]
    whole = weight.steps.repeat_interleave(per_step, 1) * weight.factors
    minima = weight.scales * weight.zero if weight.minima is None else weight.minima
    torch.testing.assert_close(whole[..., 0], weight.scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(whole[..., 1], minima, rtol=0, atol=0, equal_nan=True)
