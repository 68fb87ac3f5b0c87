"""Packed linear layers, by oneDNN and by the native kernels: the product, its epilogues, and nothing else."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from conftest import native_library

from pagedcli.errors import BackendError
from pagedcli.layers.linear import Linear, unpacked_reason
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.native.structs import ADD, DTYPE_CODES, bind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(1, 2), (31, 16), (32, 64), (97, 50), (160, 1100)]  # out, in: less than a panel, ragged, several blocks of x


def tensors(tokens, out, columns, dtype):
    generator = torch.Generator().manual_seed(tokens + out)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((tokens, columns), (out, columns), (out,)))
    return x.to(dtype), (weight / columns**0.5).to(dtype), bias.to(dtype)


def native(*args, **options):
    return NativeLinear(native_library(), *args, **options)


def exact(x, weight, bias):
    return F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)


@pytest.mark.parametrize("tokens", [0, 1, 5, 7, 11, 12, 23, 65, 300])
@pytest.mark.parametrize(("out", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_linear_is_the_product(tokens, out, columns, dtype):
    x, weight, bias = tensors(tokens, out, columns, dtype)
    for b in (None, bias):
        y = native(weight, b)(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact(x, weight, b), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_to_a_residual_rounds_as_two_steps_do(dtype):
    x, weight, bias = tensors(13, 70, 64, dtype)
    linear = native(weight, bias)
    residual = torch.randn(13, 70).to(dtype)
    total = residual.clone()
    run = bind(native_library().functions).linear_run  # as the decoder in one call uses it
    run(ctypes.byref(linear.struct), DTYPE_CODES[dtype], x.data_ptr(), 13, total.data_ptr(), ADD, 1)
    assert torch.equal(total, residual + linear(x))


@pytest.mark.parametrize("inner", [16, 35])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_are_multiplied_as_in_torch(inner, dtype):
    x, weight, bias = tensors(9, 2 * inner, 64, dtype)
    gate, up = native(weight, bias)(x).chunk(2, dim=-1)
    actual = native(weight, bias, gated=True)(x)
    assert actual.shape == (9, inner)
    torch.testing.assert_close(actual, F.silu(gate) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_come_back_bit_for_bit(dtype):
    _, weight, _ = tensors(1, 97, 50, dtype)
    rows = torch.tensor([96, 0, 31, 32, 5, 5])
    assert torch.equal(native(weight).weight_rows(rows), weight[rows])


def test_wrong_shapes_are_refused_before_memory_is_touched():
    linear = native(torch.randn(32, 64))
    with pytest.raises(BackendError, match=r"not torch\.float32"):
        linear(torch.randn(3, 62))
    with pytest.raises(BackendError, match=r"not torch\.float32"):
        linear(torch.randn(3, 64).bfloat16())
    with pytest.raises(BackendError, match="no native kernel"):
        native(torch.randn(32, 63))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_onednn_linear_is_the_product_and_keeps_one_copy(tokens, dtype):
    if unpacked_reason(torch.device("cpu"), dtype) is not None:
        pytest.skip(unpacked_reason(torch.device("cpu"), dtype))
    x, weight, bias = tensors(tokens, 96, 64, dtype)
    linear = Linear(weight, bias)
    assert linear.weight is None
    torch.testing.assert_close(linear(x).double(), exact(x, weight, bias), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_where_nothing_packs_the_reason_is_given_and_the_product_is_the_same():
    x, weight, bias = tensors(3, 96, 64, torch.float16)
    assert "float16" in unpacked_reason(torch.device("cpu"), torch.float16)
    assert torch.equal(Linear(weight, bias)(x), F.linear(x, weight, bias))
