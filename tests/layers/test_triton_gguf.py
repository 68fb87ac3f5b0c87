"""The Triton product with the blocks of GGUF files: every number is the file's."""

import numpy as np
import pytest
import torch
from gguf_files import gguf, random_blocks
from interpreter import interpreted
from quantized_zoo import exact_activations

from pagedcli.models.gguf.types import TYPES
from pagedcli.models.gguf.weights import numbers

pytest.importorskip("triton")
IN_TRITON = [number for number, kind in TYPES.items() if kind.in_triton]


@interpreted
@pytest.mark.parametrize("number", IN_TRITON)
def test_a_product_has_the_numbers_of_the_file_and_takes_the_bytes_of_the_table(number):
    from pagedcli.layers.triton_products import TritonLinear, unpacked_weight

    kind, rows = TYPES[number], 40
    raw = random_blocks(gguf.GGMLQuantizationType(number), rows, 512, np.random.default_rng(number))
    module = {"weight": torch.from_numpy(raw).reshape(rows, -1, kind.num_bytes)}
    linear = kind.linear([module], None, torch.float32, "triton")
    assert isinstance(linear, TritonLinear)
    assert linear.nbytes == kind.kept_bytes((rows, 512), 4, "triton")
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(unpacked_weight(linear._weight, dtype), numbers(module["weight"], kind, dtype))
    x = exact_activations(3, 512) / 127
    exact = x.double() @ numbers(module["weight"], kind, torch.float32).double().T
    torch.testing.assert_close(linear(x).double(), exact, rtol=1e-5, atol=1e-3)
