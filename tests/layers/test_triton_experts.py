"""The grouped Triton product of experts: equal to its twin in the interpreter, and compiled for three GPUs."""

import pytest
import torch
from interpreter import interpreted, plain, run_interpreted
from quantized_zoo import random_float8, random_weight

from pagedcli.errors import ModelError

pytest.importorskip("triton")


@plain
def test_equality_through_the_interpreter():
    run_interpreted(__file__, at_least=17)


def routed(tokens, num_experts, num_picked, width):
    """Activations, weights and chosen experts, one of which no token goes to unless all are picked."""
    from pagedcli.layers.basic import Routing, route

    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, num_experts, generator=generator)
    logits[:, 1] -= 9
    return torch.randn(tokens, width, generator=generator), *route(logits, Routing(num_picked, renormalize=True))


def expected_of(gate_up, down, x, weights, chosen):
    """The twin's result for weights as numbers."""
    from pagedcli.layers.basic import silu_and_mul, weighted_sum

    def expert(up, out):
        return lambda x: silu_and_mul(x @ up.T) @ out.T

    return weighted_sum([expert(*pair) for pair in zip(gate_up, down, strict=True)], x, weights, chosen)


@interpreted
@pytest.mark.parametrize("tokens", [1, 7, 90])
@pytest.mark.parametrize(("num_experts", "num_picked", "width", "inner"), [(8, 3, 64, 48), (4, 4, 40, 70)])
def test_grouped_experts_give_the_weighted_sum(tokens, num_experts, num_picked, width, inner):
    from pagedcli.layers.triton_products import GroupedExperts

    x, weights, chosen = routed(tokens, num_experts, num_picked, width)
    generator = torch.Generator().manual_seed(3)
    gate_up = [torch.randn(2 * inner, width, generator=generator) / 8 for _ in range(num_experts)]
    down = [torch.randn(width, inner, generator=generator) / 8 for _ in range(num_experts)]
    expected = expected_of(gate_up, down, x, weights, chosen)
    grouped = GroupedExperts(gate_up.copy(), down.copy())
    torch.testing.assert_close(grouped(x, weights, chosen), expected, rtol=1e-4, atol=1e-4)
    assert grouped(x[:0], weights[:0], chosen[:0]).shape == (0, width)
    assert grouped.nbytes == 4 * 3 * num_experts * width * inner


QUANTIZED = {
    "int4": (random_weight, {"group_size": 32}),
    "int4-act-order": (random_weight, {"group_size": 32, "ordered": False}),
    "int4-small-groups": (random_weight, {"group_size": 16}),
    "int8": (random_weight, {"bits": 8, "group_size": 1000}),
    "fp8-channel": (random_float8, {"group_size": 1000}),
    "fp8-block": (random_float8, {"group_size": 32}),
}


@interpreted
@pytest.mark.parametrize("form", QUANTIZED)
def test_experts_of_quantized_weights_are_those_of_the_dequantized_ones(form):
    from pagedcli.layers.triton_products import GroupedExperts

    make, arguments = QUANTIZED[form]
    width, inner = 96, 48

    def some(out, columns):
        sizes = {**arguments, "group_size": min(arguments["group_size"], columns)}
        return [make(out, columns, **sizes, seed=seed) for seed in range(5)]

    x, weights, chosen = routed(20, 5, 2, width)
    gate_up, down = some(2 * inner, width), some(width, inner)
    wide = ([weight.dequantized(torch.float32) for weight in each] for each in (gate_up, down))
    expected = expected_of(*wide, x, weights, chosen)
    actual = GroupedExperts(gate_up, down)(x, weights, chosen)
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def experts_of(path, parallel):
    """The last layer's experts of one rank, as the decoder makes them."""
    from pagedcli.layers.triton_products import GroupedExperts
    from pagedcli.models.loading import weight_format
    from pagedcli.models.parameters import decoder_parameters, linear_formats, take_linear
    from pagedcli.models.reading import read_spec
    from pagedcli.models.sharding import shard_parameters
    from pagedcli.models.weights import CheckpointWeights

    spec = read_spec(path)
    parameters = shard_parameters(decoder_parameters(spec, weight_format(None, spec)), spec, parallel)
    formats, options = linear_formats(parameters), {"dtype": torch.float32, "device": torch.device("cpu")}
    tensors = CheckpointWeights(path).load(parameters, ignored=frozenset(), **options)

    def weights(name):
        keys = [f"layers.1.experts.{i}.{name}" for i in range(spec.experts.num_experts)]
        return [formats[key].weight(take_linear(tensors, key, formats[key]), torch.float32, "triton") for key in keys]

    return GroupedExperts(weights("gate_up"), weights("down"))


@interpreted
@pytest.mark.parametrize("form", ["pack-int4", "gptq-8bit", "fp8-block"])
def test_the_ranks_of_a_parallel_group_add_up_to_the_experts_of_a_checkpoint(form, tmp_path):
    from model_zoo import tiny_model
    from quantized_zoo import FORMATS, quantized_twins

    from pagedcli.layers.parallel import ParallelContext

    sizes = {"intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    packed, plain = quantized_twins(tiny_model("qwen3-moe", tmp_path / "model", **sizes), tmp_path, *FORMATS[form])
    x, weights, chosen = routed(3, 8, 2, 64)
    expected = experts_of(plain, ParallelContext())(x, weights, chosen)
    ranks = [experts_of(packed, ParallelContext(rank, 2))(x, weights, chosen) for rank in (0, 1)]
    torch.testing.assert_close(ranks[0] + ranks[1], expected, rtol=1e-4, atol=1e-4)


@interpreted
def test_an_engine_gives_the_tokens_of_the_dequantized_experts(tmp_path):
    from engine_harness import make_engine, ragged_prompts, run
    from model_zoo import tiny_model
    from quantized_zoo import FORMATS, quantized_twins

    from pagedcli.layers.triton_products import GroupedExperts
    from pagedcli.sampling_params import SamplingParams

    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    source = tiny_model("qwen3-moe", tmp_path / "model", **sizes)
    packed, plain = quantized_twins(source, tmp_path, *FORMATS["fp8-block"])
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)] * 2
    expected = run(make_engine(plain, attention_backend="reference"), ragged_prompts(2), params)
    engine = make_engine(packed, attention_backend="triton")
    assert run(engine, ragged_prompts(2), params) == expected
    assert isinstance(engine.model._branches[3].body.mixture, GroupedExperts)
    assert [note for note in engine.model.notes if "kept so; activations are not rounded" in note]


@interpreted
def test_experts_in_different_formats_are_refused():
    from pagedcli.layers.triton_products import GroupedExperts

    with pytest.raises(ModelError, match="in different formats"):
        GroupedExperts([random_weight(64, 32), random_weight(64, 32, bits=8)], [torch.zeros(32, 32)] * 2)


@plain
@pytest.mark.parametrize(
    ("dtype", "capability", "tile"),
    [(torch.bfloat16, 80, (64, True)), (torch.bfloat16, 90, (64, True)), (torch.bfloat16, 89, (16, False))]
    + [
        pytest.param(dtype, capability, (block_t, gated), marks=pytest.mark.slow)
        for dtype in (torch.float16, torch.bfloat16)
        for capability in (80, 89, 90)
        for block_t in (16, 32, 64)
        for gated in (False, True)
    ],
)
@pytest.mark.parametrize(
    ("form", "group_size"), [("floats", 2048), ("codes4", 128), ("codes8", 2048), ("float8", 128), ("float8", 2048)]
)
def test_it_compiles_without_spills(dtype, form, group_size, capability, tile, tmp_path):
    from triton_compile import NAMES, SHARED_LIMIT, Compiled, kernel_weight_types

    from pagedcli.layers.triton_products import KernelWeight, experts_constants, experts_kernel

    weight = KernelWeight(form, 2 * 768, 2048, group_size, torch.empty(128, 2 * 768, 2048, device="meta"))
    data = f"*{NAMES[dtype]}"
    types = dict.fromkeys(("x_ptr", "factor_ptr", "out_ptr"), data)
    types |= dict.fromkeys(("rows_ptr", "order_ptr", "starts_ptr", "tiles_ptr"), "*i32")
    types |= kernel_weight_types(form, capability, data)
    constants = experts_constants(weight, tile[0], gated=tile[1])
    kernel = Compiled(experts_kernel, types, constants, capability, 4, tmp_path)
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= SHARED_LIMIT[capability]
