"""Every type of numbers in GGUF files, against the gguf package."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files import random_blocks

from pagedcli.errors import ModelError
from pagedcli.models.gguf.types import REFUSED, TYPES
from pagedcli.models.gguf.weights import numbers

gguf = pytest.importorskip("gguf")


def test_every_type_of_the_package_is_read_or_refused_by_name():
    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert known == {number: kind.name for number, kind in TYPES.items()} | {
        n: name for n, (name, _) in REFUSED.items()
    }
    for number, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.num_bytes)


@pytest.mark.parametrize("number", TYPES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_equal_those_of_the_package_in_every_bit(number):
    """Of random bytes, so every scale occurs: huge and subnormal ones, infinities and NaN."""
    kind = TYPES[number]
    raw = np.random.default_rng(0).integers(0, 256, (64, 40, kind.num_bytes), dtype=np.uint8)
    if kind.name == "NVFP4":
        raw[..., :4] &= 127  # scales without signs
    if kind.name == "F32":
        expected = raw.reshape(64, -1).view(np.float32)
    elif kind.name == "F16":
        expected = raw.reshape(64, -1).view(np.float16).astype(np.float32)
    else:
        expected = gguf.dequantize(raw.reshape(64, -1), gguf.GGMLQuantizationType(number))
    found = numbers(torch.from_numpy(raw), kind, torch.float32).float().numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("number", TYPES)
def test_numbers_are_made_on_the_device_of_their_bytes(number):
    raw = torch.empty((4, 3, TYPES[number].num_bytes), dtype=torch.uint8, device="meta")  # stands for a GPU
    assert numbers(raw, TYPES[number], torch.bfloat16).is_meta


@pytest.mark.usefixtures("own_panels")
def test_nvfp4_is_kept_with_the_number_of_each_module(library):
    kind = TYPES[40]
    raw = random_blocks(gguf.GGMLQuantizationType.NVFP4, 40, 320, np.random.default_rng(0)).reshape(40, 5, -1)
    halves = torch.from_numpy(raw).split([16, 24])
    modules = [
        {"weight": half, "scale": torch.tensor([[scale]])} for half, scale in zip(halves, (0.37, -1.9), strict=True)
    ]
    layer = replace(kind, scaled=True)
    packed = layer.native_linear(modules, None, torch.float32)
    expected = torch.cat([numbers(each["weight"], kind, torch.float32) * each["scale"] for each in modules])
    torch.testing.assert_close(packed.weight_rows(torch.arange(40)), expected, rtol=2e-7, atol=0)
    torch.testing.assert_close(layer.weight(modules, torch.float32, "torch"), expected, rtol=2e-7, atol=0)
    assert packed.packed_bytes == layer.kept_bytes((40, 320), 4, "cpu")
    modules[0]["scale"][:] = 300
    with pytest.raises(ModelError, match="too large"):
        layer.native_linear(modules, None, torch.float32)
