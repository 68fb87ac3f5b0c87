"""The products of a layer in one kernel each, in triton's interpreter: equal to torch, and a row has the same bits in
any company of up to 16."""

import pytest
import torch
from attention_cases import Case, run
from interpreter import interpreted, noise
from quantized_zoo import random_float8, random_weight
from quick import slow_but

from pagedcli.attention.layer import AttentionLayer
from pagedcli.attention.select import select_backend

pytest.importorskip("triton")
from pagedcli.layers import basic, triton_stream
from pagedcli.layers.linear import Linear
from pagedcli.layers.triton_products import KernelWeight, TritonLinear, weight_of
from pagedcli.layers.triton_stream import Heads, Norm, Product, Scratch

CPU = torch.device("cpu")
FORMS = {
    "4 bits": lambda: random_weight(40, 600),
    "8 bits": lambda: random_weight(40, 512, bits=8),
    "FP8": lambda: random_float8(40, 600, 600),
    "FP8 by 64": lambda: random_float8(40, 512, 64),
}
SIZES = [(1, 62, 33), (3, 34, 300), (3, 70, 600), (8, 128, 1024), (16, 36, 1500)]


def floats(weight):
    return KernelWeight("floats", *weight.shape, weight.shape[1], weight)


@pytest.fixture(autouse=True)
def _as_many_parts_as_a_gpu_has(monkeypatch):
    monkeypatch.setattr(triton_stream, "processors_of", lambda _: 8)


def in_any_company(call, rows):
    """The result of all rows, which is that of the last one alone."""
    whole = call(slice(0, rows))
    alone = slice(rows - 1, rows)
    assert torch.equal(call(alone), whole[alone])
    return whole


@interpreted
@pytest.mark.parametrize(
    ("rows", "out", "columns", "kind"),
    slow_but(
        [(3, 34, 300, "norm and bias")],
        [(*sizes, kind) for sizes in SIZES for kind in ("plain", "norm", "norm and bias")],
    ),
)
def test_products_with_norm_bias_residual_and_activation(rows, out, columns, kind):
    weight, scratch = noise(out, columns, seed=1, scale=columns**-0.5), Scratch(CPU)
    norm = None if kind == "plain" else Norm(noise(columns, seed=2), 1e-6)
    bias = noise(out, seed=3) if "bias" in kind else None
    x, residual = noise(rows, columns, seed=4, scale=3.0), noise(rows, out, seed=5)
    make = {"scratch": scratch, "norm": norm}
    add = Product(floats(weight), bias, finish="add", **make)
    gated = Product(floats(weight), bias, finish="gated", ACTIVATION="silu", **make)
    y = torch.nn.functional.linear(x if norm is None else basic.rms_norm(x, norm.weight, norm.eps), weight, bias)
    found = in_any_company(lambda part: add(x[part], residual[part].clone()), rows)
    torch.testing.assert_close(found, residual + y, atol=2e-5, rtol=2e-5)
    found = in_any_company(lambda part: gated(x[part], residual[part, : out // 2].clone()), rows)
    torch.testing.assert_close(found, basic.ACTIVATIONS["silu"](y), atol=2e-5, rtol=2e-5)
    assert not scratch.counters.any()


@interpreted
@pytest.mark.quick("FP8 by 64")
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights(form):
    weight = FORMS[form]()
    numbers = weight.dequantized(torch.float32)
    x, residual = noise(5, numbers.shape[1]), noise(5, 40, seed=1)
    product = Product(*weight_of(TritonLinear(weight)), scratch=Scratch(CPU), finish="add")
    found = in_any_company(lambda part: product(x[part], residual[part].clone()), 5)
    exact = residual.double() + x.double() @ numbers.double().T
    torch.testing.assert_close(found.double(), exact, atol=1e-5 * float(exact.std()) + 1e-4, rtol=1e-5)


@interpreted
@pytest.mark.quick("heads1-*")
@pytest.mark.parametrize(
    ("heads", "rotated", "options"),
    [
        ((4, 2, 32), 32, {"norm"}),
        ((2, 1, 24), 16, {"norm", "bias"}),
        ((8, 1, 40), 16, {"norm", "bias"}),
        ((3, 3, 64), 64, {"interleaved", "scaled"}),
        ((14, 2, 16), 0, {"bias"}),
        ((6, 2, 96), 24, set()),
    ],
)
def test_heads_are_rotated_and_stored_as_by_their_own_kernel(heads, rotated, options):
    from pagedcli.layers.triton_layers import rotate_and_store

    (num_heads, num_kv_heads, dim), rows, columns = heads, 5, 320
    weight = noise((num_heads + 2 * num_kv_heads) * dim, columns, scale=columns**-0.5)
    bias = noise(len(weight), seed=1) if "bias" in options else None
    head_norm = noise(num_heads + num_kv_heads, dim, seed=2) if "norm" in options else None
    angles = noise(40, max(2, rotated) // 2, seed=3)
    table, scales = torch.cat((angles.cos(), angles.sin()), 1), noise(40, seed=4)
    positions, slots = torch.tensor([0, 7, 39, 7, 20]), torch.tensor([0, -1, 47, 17, 31], dtype=torch.int32)
    x, norm = noise(rows, columns, seed=5, scale=2.0), Norm(noise(columns, seed=6), 1e-5)
    caches = [torch.zeros(3, num_kv_heads, 16, dim) for _ in range(4)]
    expected = rotate_and_store(
        Linear(weight, bias)(basic.rms_norm(x, norm.weight, norm.eps)), num_heads, num_kv_heads,
        norm=None if head_norm is None else (head_norm, 1e-6), table=table if rotated else None, positions=positions,
        interleaved="interleaved" in options, query_scales=scales if "scaled" in options else None, slots=slots,
        k_cache=caches[0], v_cache=caches[1],
    )  # fmt: skip
    product = Product(
        floats(weight), bias, scratch=Scratch(CPU), finish="heads", norm=norm, H=num_heads, G=num_kv_heads, D=dim,
        NORM_HEADS=head_norm is not None, ROTATED=rotated, INTERLEAVED="interleaved" in options,
        SCALED="scaled" in options,
    )  # fmt: skip

    def q_of(part):
        to = Heads(
            x if head_norm is None else head_norm, table, scales, positions[part], slots[part], *caches[2:], 1e-6,
            1.0, 1.0,
        )  # fmt: skip
        return product(x[part], torch.empty(len(x[part]), num_heads, dim), to)

    torch.testing.assert_close(in_any_company(q_of, rows), expected, atol=2e-5, rtol=2e-5)
    for found, cache in zip(caches[2:], caches[:2], strict=True):
        torch.testing.assert_close(found, cache, atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (3, 3), (16, 2)])
def test_attention_that_combines_its_splits_in_one_kernel_has_the_same_bits(num_heads, num_kv_heads, window):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 16}
    layers = [AttentionLayer(scale=0.25, window=window)]
    case = Case([(700, 1), (1, 1), (257, 1)], 64, *sizes.values(), torch.float32, device="cpu")
    case.layer = layers[0]
    backends = (
        select_backend(
            "triton", device=CPU, dtype=torch.float32, block_size=64, layers=layers, kernels=kernels, **sizes
        )
        for kernels in ("auto", "fused")
    )
    (_, apart), (backend, folded) = ((each.backend, run(each.backend, case)) for each in backends)
    assert torch.equal(folded, apart)
    assert torch.equal(run(backend, case), apart)  # the counters begin at 0 again
