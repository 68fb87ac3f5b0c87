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
from pagedcli.layers.triton_layers import rotate_and_store
from pagedcli.layers.triton_products import KernelWeight, TritonLinear, weight_of
from pagedcli.layers.triton_stream import Heads, Product, Scratch

CPU = torch.device("cpu")
SIZES = [(3, 34, 300), (1, 62, 33), (3, 70, 600), (8, 128, 1024), (16, 36, 1500)]  # rows, outputs, inputs
CASES = [(*sizes, kind) for sizes in SIZES for kind in ("floats", "normed", "normed with bias")]
CASES += [(5, 40, columns, form) for form, columns in (("4 bits", 600), ("FP8", 600), ("FP8 by 64", 512))]


@pytest.fixture(autouse=True)
def _as_many_parts_as_a_gpu_has(monkeypatch):
    monkeypatch.setattr(triton_stream, "processors_of", lambda _: 8)


def floats(weight):
    return KernelWeight("floats", *weight.shape, weight.shape[1], weight)


def in_any_company(call, rows):
    """The result of all rows, which is that of the last one alone."""
    whole, alone = call(slice(0, rows)), slice(rows - 1, rows)
    assert torch.equal(call(alone), whole[alone])
    return whole


@interpreted
@pytest.mark.parametrize(("rows", "out", "columns", "kind"), slow_but([CASES[2], CASES[-1]], CASES))
def test_products_with_norm_bias_residual_and_activation(rows, out, columns, kind):
    weight = noise(out, columns, seed=1, scale=columns**-0.5)
    stored, bias = floats(weight), noise(out, seed=3) if "bias" in kind else None
    if kind[0] in "4F":
        packed = random_float8(out, columns, 64 if "64" in kind else columns)
        packed = random_weight(out, columns) if kind == "4 bits" else packed
        stored, weight = weight_of(TritonLinear(packed))[0], packed.dequantized(torch.float32)
    norm = (noise(columns, seed=2), 1e-6) if "normed" in kind else None
    x, residual = noise(rows, columns, seed=4, scale=3.0), noise(rows, out, seed=5)
    add = Product(stored, bias, finish="add", norm=norm, scratch=(scratch := Scratch(CPU)))
    gated = Product(stored, bias, finish="gated", norm=norm, scratch=scratch, ACTIVATION="silu")
    y = Linear(weight, bias)(x if norm is None else basic.rms_norm(x, *norm))
    near = {"rtol": 3e-5, "atol": 3e-5 * float(y.abs().max())}
    torch.testing.assert_close(
        in_any_company(lambda part: add(x[part], residual[part].clone()), rows), residual + y, **near
    )
    found = in_any_company(lambda part: gated(x[part], residual[part, : out // 2].clone()), rows)
    torch.testing.assert_close(found, basic.ACTIVATIONS["silu"](y), rtol=1e-4, atol=1e-4 * float(found.abs().max()))
    assert not scratch.counters.any()


@interpreted
@pytest.mark.quick("heads0-*")
@pytest.mark.parametrize(
    ("heads", "rotated", "options"),
    [
        ((2, 1, 24), 16, {"norm", "bias"}),
        ((8, 1, 40), 40, {"norm"}),
        ((3, 3, 64), 64, {"interleaved", "scaled"}),
        ((14, 2, 16), 0, {"bias"}),
        ((6, 2, 96), 24, set()),
    ],
)
def test_heads_are_rotated_and_stored_as_by_their_own_kernel(heads, rotated, options):
    (num_heads, num_kv_heads, dim), rows, columns = heads, 5, 320
    weight = noise((num_heads + 2 * num_kv_heads) * dim, columns, scale=columns**-0.5)
    bias = noise(len(weight), seed=1) if "bias" in options else None
    head_norm = noise(num_heads + num_kv_heads, dim, seed=2) if "norm" in options else None
    angles = noise(40, max(2, rotated) // 2, seed=3)
    table, scales = torch.cat((angles.cos(), angles.sin()), 1), noise(40, seed=4)
    positions, slots = torch.tensor([0, 7, 39, 7, 20]), torch.tensor([0, -1, 47, 17, 31], dtype=torch.int32)
    x, norm = noise(rows, columns, seed=5, scale=2.0), (noise(columns, seed=6), 1e-5)
    caches = torch.zeros(4, 3, num_kv_heads, 16, dim)
    expected = rotate_and_store(
        Linear(weight, bias)(basic.rms_norm(x, *norm)), num_heads, num_kv_heads,
        norm=None if head_norm is None else (head_norm, 1e-6), table=table if rotated else None, positions=positions,
        interleaved="interleaved" in options, query_scales=scales if "scaled" in options else None, slots=slots,
        k_cache=caches[0], v_cache=caches[1],
    )  # fmt: skip
    flags = {name.upper(): name in options for name in ("interleaved", "scaled")}
    flags["NORM_HEADS"] = head_norm is not None
    sizes = {"H": num_heads, "G": num_kv_heads, "D": dim, "ROTATED": rotated}
    product = Product(floats(weight), bias, scratch=Scratch(CPU), finish="heads", norm=norm, **sizes, **flags)
    head_norm = x if head_norm is None else head_norm

    def q_of(part):
        to = Heads(head_norm, table, scales, positions[part], slots[part], *caches[2:], 1e-6, 1.0, 1.0)
        return product(x[part], torch.empty(len(x[part]), num_heads, dim), to)

    torch.testing.assert_close(in_any_company(q_of, rows), expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(caches[2:], caches[:2], atol=2e-5, rtol=2e-5)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (3, 3), (16, 2)])
def test_attention_that_combines_its_splits_in_one_kernel_has_the_same_bits(num_heads, num_kv_heads, window):
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 16}
    case = Case([(700, 1), (1, 1), (257, 1)], 64, *sizes.values(), torch.float32, device="cpu")
    case.layer = AttentionLayer(scale=0.25, window=window)
    options = {"device": CPU, "dtype": torch.float32, "block_size": 64, "layers": [case.layer], **sizes}
    apart, folded = (select_backend("triton", kernels=kernels, **options).backend for kernels in ("auto", "fused"))
    expected = run(apart, case)
    assert torch.equal(run(folded, case), expected)
    assert torch.equal(run(folded, case), expected)  # the counters begin at 0 again
