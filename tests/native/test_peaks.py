"""The measured peaks of the processor's paths."""

import time

import pytest
import torch

from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native.paths import BF16_PATHS, INT8_PATHS, bf16_path, int8_path, measure_peaks


@pytest.mark.parametrize(
    ("paths", "path_of", "quantization"), [(BF16_PATHS, bf16_path, None), (INT8_PATHS, int8_path, "int8")]
)
@pytest.mark.machine
def test_no_product_is_much_faster_than_the_peak_of_its_path(library, paths, path_of, quantization):
    linear, used = (
        NativeLinear(library, torch.randn(512, 1024).bfloat16(), quantization=quantization),
        path_of(library.functions),
    )
    x, seconds = torch.randn(64, 1024).bfloat16(), []
    for _ in range(30):
        before = time.perf_counter()
        linear(x)
        seconds.append(time.perf_counter() - before)
    [peak] = [each.flop_per_s for each in measure_peaks(library.functions, paths, 1) if each.path is used]
    assert 2 * 64 * 512 * 1024 / min(seconds) < 1.3 * peak  # 1.0 on a quiet machine
