"""The Triton kernels of layers without a GPU: equal to their torch twins through the interpreter."""

import pytest
import torch
from interpreter import interpreted, noise

pytest.importorskip("triton")
from pagedcli.layers import basic, triton_layers

DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (1, 64), (3, 96), (2, 1024), (1, 1)])
def test_add_rms_norm_equals_its_twin(num_tokens, width, dtype):
    x, residual = noise(num_tokens, width, dtype=dtype), noise(num_tokens, width, dtype=dtype, seed=1, scale=3.0)
    weight = noise(width, dtype=dtype, seed=2)
    expected_residual, ours = residual.clone(), residual.clone()
    expected = basic.add_rms_norm(x, expected_residual, weight, 1e-6)
    result = triton_layers.add_rms_norm(x, ours, weight, 1e-6)
    tolerance = TOLERANCE[dtype] * 3
    torch.testing.assert_close(ours, expected_residual, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    alone = triton_layers.add_rms_norm(None, residual, weight, 1e-6)
    torch.testing.assert_close(alone, basic.rms_norm(residual, weight, 1e-6), atol=tolerance, rtol=tolerance)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 16), (3, 96), (2, 2500)])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped_silu"])
def test_activations_equal_their_twins(num_tokens, width, dtype, activation):
    gate_up = noise(num_tokens, 2 * width, dtype=dtype, scale=4.0)
    if num_tokens:
        gate_up[0, 0], gate_up[-1, -1] = float("nan"), float("nan")
    found, expected = triton_layers.activate_and_mul(gate_up, activation), basic.ACTIVATIONS[activation](gate_up)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    gate, up = gate_up[:, :width].contiguous(), gate_up[:, width:]  # rows of up are strided
    assert torch.equal(triton_layers.activate_and_mul(gate, activation, up).nan_to_num(7), found.nan_to_num(7))
    apart = basic.ACTIVATIONS[activation](gate, up)
    torch.testing.assert_close(apart, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("normed", "added", "multiplier", "factor"),
    [("same", "same", 1.0, 0.7), ("wide", "wide", 0.3, 1.0), (None, "wide", 1.0, 1.3), (None, None, 2.5, 1.0)],
)
def test_what_is_added_may_be_normed_and_multiplied_first_and_the_sum_after(normed, added, multiplier, factor, dtype):
    x, residual = noise(3, 96, dtype=dtype), noise(3, 96, dtype=dtype, seed=1, scale=3.0)
    dtypes = {"same": dtype, "wide": torch.float32}
    weight, norm_added = (
        None if kind is None else noise(96, dtype=dtypes[kind], seed=seed) for seed, kind in ((2, normed), (3, added))
    )
    expected_residual, ours = residual.clone(), residual.clone()
    options = {"norm_added": norm_added, "multiplier": multiplier, "factor": factor}
    expected = basic.add_rms_norm(x.clone(), expected_residual, weight, 1e-6, **options)
    result = triton_layers.add_rms_norm(x, ours, weight, 1e-6, **options)
    tolerance = TOLERANCE[dtype] * 3
    torch.testing.assert_close(ours, expected_residual, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    assert (result is ours) == (weight is None)


@interpreted
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated", "norm", "dtypes", "options"),
    [
        (4, 2, 32, 32, "heads", (torch.float32, torch.float32), {}),
        (6, 3, 96, 96, "heads", (torch.float16, torch.float16), {}),
        (14, 2, 64, 64, None, (torch.float16, torch.float16), {}),
        (1, 1, 8, 8, "heads", (torch.float32, torch.float32), {}),
        (4, 2, 32, 32, "heads", (torch.float16, torch.float32), {}),
        (4, 2, 32, 16, None, (torch.float32, torch.float32), {}),
        (6, 3, 24, 6, "heads", (torch.float32, torch.float32), {}),
        (9, 3, 32, 32, "all", (torch.float16, torch.float32), {}),
        (4, 4, 24, 0, "all", (torch.float32, torch.float32), {}),
        (6, 3, 24, 16, "heads", (torch.float32, torch.float32), {"interleaved": True}),
        (4, 1, 32, 32, None, (torch.float16, torch.float16), {"interleaved": True, "scaled": True}),
        (1, 1, 8, 8, None, (torch.float32, torch.float32), {"num_tokens": 0}),
    ],
    ids=str,
)
def test_rotate_and_store_equals_split_heads_and_write(
    num_heads, num_kv_heads, head_dim, rotated, norm, dtypes, options
):
    num_tokens, block_size, num_blocks, dtype = options.get("num_tokens", 5), 16, 3, dtypes[0]
    qkv = noise(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weight = (noise(num_heads + num_kv_heads, head_dim, dtype=dtypes[1], seed=3), 1e-6) if norm else None
    angles = noise(40, rotated // 2, seed=4) * 3
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype) if rotated else None
    scales = noise(40, dtype=dtype, seed=5) if options.get("scaled") else None
    interleaved = "interleaved" in options
    positions = torch.tensor([0, 7, 39, 7, 20])[:num_tokens]
    slots = torch.tensor([0, -1, 47, 17, 31], dtype=torch.int32)[:num_tokens]
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    q = triton_layers.rotate_and_store(
        qkv, num_heads, num_kv_heads, norm=weight, norms_all=norm == "all", table=table, positions=positions,
        slots=slots, k_cache=k_cache, v_cache=v_cache, query_scales=scales, interleaved=interleaved,
    )  # fmt: skip
    angles = None if table is None else basic.rotary_rows(table, positions)
    sizes = num_heads, num_kv_heads, head_dim
    if norm == "all":
        basic.norm_all(qkv, num_heads, num_kv_heads, *weight)
        weight = None
    expected_q, k, v = basic.split_heads(qkv, *sizes, norm=weight, angles=angles, interleaved=interleaved)
    if scales is not None:
        expected_q *= scales[positions][:, None, None]
    tolerance = {"atol": TOLERANCE[dtype] * 3, "rtol": TOLERANCE[dtype] * 3}
    torch.testing.assert_close(q, expected_q, **tolerance)
    for cache, values in ((k_cache, k), (v_cache, v)):
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                torch.testing.assert_close(by_slot[slot], values[token], **tolerance)
        untouched = [slot for slot in range(num_blocks * block_size) if slot not in slots.tolist()]
        assert by_slot[untouched].isnan().all()
