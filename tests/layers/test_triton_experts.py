"""The grouped Triton product of experts: equal to its twin in the interpreter, and compiled for two GPUs."""

import pytest
import torch
from interpreter import interpreted, plain, run_interpreted

pytest.importorskip("triton")


@plain
def test_equality_through_the_interpreter():
    run_interpreted(__file__, at_least=6)


@interpreted
@pytest.mark.parametrize("tokens", [1, 7, 90])
@pytest.mark.parametrize(("num_experts", "num_picked", "width", "inner"), [(8, 3, 64, 48), (4, 4, 40, 70)])
def test_grouped_experts_give_the_weighted_sum(tokens, num_experts, num_picked, width, inner):
    from pagedcli.layers.experts import route, weighted_sum
    from pagedcli.layers.mlp import silu_and_mul
    from pagedcli.layers.triton_experts import GroupedExperts

    generator = torch.Generator().manual_seed(tokens)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    gate_up = [noise(2 * inner, width) / 8 for _ in range(num_experts)]
    down = [noise(width, inner) / 8 for _ in range(num_experts)]
    logits = noise(tokens, num_experts)
    logits[:, 1] -= 9  # an expert without tokens, unless all are picked
    weights, chosen = route(logits, num_picked, renormalize=True)
    x = noise(tokens, width)
    twins = [lambda x, i=i: silu_and_mul(x @ gate_up[i].T) @ down[i].T for i in range(num_experts)]
    expected = weighted_sum(twins, x, weights, chosen)
    grouped = GroupedExperts(gate_up.copy(), down.copy())
    torch.testing.assert_close(grouped(x, weights, chosen), expected, rtol=1e-4, atol=1e-4)
    assert grouped(x[:0], weights[:0], chosen[:0]).shape == (0, width)
    assert grouped.nbytes == 4 * 3 * num_experts * width * inner


@plain
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_t", [16, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_without_spills(dtype, block_t, gated, capability, tmp_path):
    from triton_compile import NAMES, SHARED_LIMIT, Compiled

    from pagedcli.layers.triton_experts import launch_constants
    from pagedcli.layers.triton_kernels import experts_kernel

    types = dict.fromkeys(("x_ptr", "weight_ptr", "scale_ptr", "out_ptr"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("rows_ptr", "starts_ptr", "tiles_ptr"), "*i32")
    constants = launch_constants(768, 2048, 128, block_t, gated=gated)
    kernel = Compiled(experts_kernel, types, constants, capability, 4, tmp_path)
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT[capability]
