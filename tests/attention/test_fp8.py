"""The fp8 KV cache: right for what it holds, its error against float32 measured, refused where hardware lacks it.

Kernels run through triton's interpreter, in a process of their own. It rounds wrongly to e4m3 (a carry out of the
mantissa is lost), so what the kernels store here needs no rounding: the torch twin has rounded it before.
"""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, run
from interpreter import interpreted, plain, run_interpreted

from pagedcli.errors import ConfigError
from pagedcli.planning.decide import resolve_kv_dtype
from pagedcli.planning.machine import Gpu

pytest.importorskip("triton")
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


@plain
@pytest.mark.slow
def test_fp8_through_the_interpreter():
    run_interpreted(__file__, at_least=5)


@plain
def test_where_fp8_cannot_be_it_is_refused_with_the_reason():
    gpu = Gpu(name="A100", total_bytes=1, free_bytes=1, capability=(8, 0))
    for asked, dtype, here, reason in (
        ("fp8", torch.float32, None, "needs a CUDA GPU"),
        ("bfloat16", torch.float32, None, "computes in float32"),
        ("fp8", torch.bfloat16, gpu, r"8\.9; A100 has 8\.0"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            resolve_kv_dtype(asked, dtype, here)
        assert reason != "needs a CUDA GPU" or "int8" in caught.value.hint
    assert resolve_kv_dtype("float32", torch.float32, None) == torch.float32
    assert resolve_kv_dtype("fp8", torch.bfloat16, replace(gpu, capability=(9, 0))) == FP8


def quantized(x, scale):
    """What an fp8 cache keeps of x: the torch twin."""
    return (x.float() / scale).clamp(-448, 448).to(FP8).float() * scale


def power_of_2_scale(x):
    """A scale by which division is exact."""
    return 2.0 ** math.ceil(math.log2(float(x.abs().max()) * 2 / 448))


def attend_fp8(case, scales):
    """The Triton backend's result over a poisoned fp8 cache."""
    from pagedcli.attention.base import AttentionSpec
    from pagedcli.attention.triton_paged import TritonAttention

    case.kv_dtype, case.layer = FP8, replace(case.layer, k_scale=scales[0], v_scale=scales[1])
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    backend = TritonAttention(AttentionSpec(CPU, case.dtype, case.block_size, *heads, kv_dtype=FP8))
    return run(backend, case)


CASES = [([(1, 1), (40, 1), (270, 1)], 4, 64), ([(17, 17), (70, 9), (33, 1)], 6, 32)]


@interpreted
@pytest.mark.parametrize(("lengths", "num_heads", "head_dim"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_exact_for_what_the_cache_holds_and_close_to_float32(lengths, num_heads, head_dim, dtype):
    case = Case(lengths, 16, num_heads, 2, head_dim, dtype)
    exact = case.expected()
    scales = power_of_2_scale(case.k), power_of_2_scale(case.v)
    case.k, case.v = quantized(case.k, scales[0]).to(dtype), quantized(case.v, scales[1]).to(dtype)
    held = case.expected()
    result = attend_fp8(case, scales).double()
    assert (result - held).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3)
    error = float((result - exact).norm() / exact.norm())
    print(f"fp8 KV cache: relative error of attention {error:.4f}")
    assert 0.001 < error < 0.05, "e4m3 keeps 4 bits: at most 2^-4 per value"


@interpreted
def test_values_past_the_scale_saturate_and_stay_numbers():
    case = Case([(20, 1)], 16, 2, 1, 32, torch.float32)
    case.k = quantized(case.k, 1.0)
    case.v = torch.full_like(case.v, 1000.0)
    torch.testing.assert_close(attend_fp8(case, (1.0, 0.5)), torch.full((1, 2, 32), 224.0))
