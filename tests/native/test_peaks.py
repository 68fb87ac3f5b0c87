"""The measured peaks of the processor's paths."""

import time

import pytest
import torch

from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native.paths import BF16_PATHS, INT8_PATHS, bf16_path, int8_path, measure_peaks


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.bfloat16, None), (torch.bfloat16, "int8")])
@pytest.mark.machine
def test_no_product_is_much_faster_than_the_peak_of_its_path(library, dtype, quantization):
    paths, used = (
        (BF16_PATHS, bf16_path(library.functions))
        if quantization is None
        else (INT8_PATHS, int8_path(library.functions))
    )
    linear = NativeLinear(library, torch.randn(512, 1024).to(dtype), quantization=quantization)
    x, seconds = torch.randn(64, 1024).to(dtype), []
    for _ in range(30):
        before = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - before)
    [peak] = [each.flop_per_s for each in measure_peaks(library.functions, paths, 1) if each.path is used]
    assert 2 * 64 * 512 * 1024 / min(seconds) < 1.3 * peak  # 1.0 on a quiet machine
