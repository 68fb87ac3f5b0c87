"""The grouped Triton product of experts: equal to its twin in the interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from quantized_zoo import random_float8, random_weight

from pagedcli.errors import ModelError
from pagedcli.layers.basic import ACTIVATIONS, ExpertLoop, Routing, route
from pagedcli.layers.quantized import E2M1

pytest.importorskip("triton")
from pagedcli.layers import triton_experts
from pagedcli.layers.triton_experts import GroupedExperts, expert_tile
from pagedcli.layers.triton_products import kernel_weight

ROUTINGS = {
    "renormalized": Routing(3, renormalize=True),
    "softmax": Routing(3, renormalize=False),
    "sigmoid": Routing(2, renormalize=True, sigmoid=True, scale=2.5, least_sum=0.5),
}


def logits_of(tokens, num_experts):
    """Logits of a router, many of them equal, some no numbers; one expert is picked last."""
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(tokens)).mul_(4).round_().div_(4)
    logits[:, 1] -= 9
    return logits


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("num_experts", "has_router_bias"), [(8, False), (5, True), (70, True)])
def test_routing_picks_the_same_experts_of_equal_scores_the_first(name, num_experts, has_router_bias, dtype):
    logits, routing = logits_of(9, num_experts).to(dtype), ROUTINGS[name]
    logits[0] = 0.5
    router_bias = torch.arange(num_experts).float().remainder_(3) if has_router_bias else None
    expert_scales = torch.linspace(0.5, 2, num_experts) if has_router_bias else None
    weights, chosen = route(logits, routing, router_bias, expert_scales)
    chosen, order = chosen.sort(-1)
    found, experts = triton_experts.route(logits, routing, router_bias, expert_scales)
    assert torch.equal(experts, chosen.int())
    torch.testing.assert_close(found, weights.gather(1, order), rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=0)


@pytest.mark.parametrize("nearness", [0.02, 0.6])
def test_experts_weighted_among_near_ones_are_those_of_transformers(nearness):
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    expected, chosen = sparsemixer(logits, nearness / 2, training=False)
    routing = Routing(num_per_token=2, renormalize=False, nearness=nearness)
    for weights, experts in (route(logits, routing), triton_experts.route(logits, routing)):
        for ours, theirs in ((weights, expected), (experts.long(), chosen)):
            order = experts.argsort(-1), chosen.argsort(-1)
            torch.testing.assert_close(ours.gather(1, order[0]), theirs.gather(1, order[1]))


@interpreted
@pytest.mark.parametrize(("num_experts", "groups"), [(24, (3, 2, 2)), (64, (8, 4, 2)), (20, (5, 1, 1))])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_groups_of_experts_are_routed_by_the_kernel(name, num_experts, groups, monkeypatch):
    logits, routing = logits_of(9, num_experts), replace(ROUTINGS[name], groups=groups)
    logits[0] = 0.5
    router_bias = torch.arange(num_experts).float().remainder_(3) if name == "sigmoid" else None
    weights, chosen = route(logits, routing, router_bias)
    chosen, order = chosen.sort(-1)
    monkeypatch.setattr(torch.Tensor, "sort", None)  # nothing of it in torch
    found, experts = triton_experts.route(logits, routing, router_bias)
    assert torch.equal(experts, chosen.int())
    torch.testing.assert_close(found, weights.gather(1, order), rtol=1e-5, atol=0)
    logits[:2] = float("nan")
    _, experts = triton_experts.route(logits, routing, router_bias)
    assert experts[:2].diff().gt(0).all()
    assert experts[:2].max() < num_experts


@interpreted
def test_logits_that_are_no_numbers_pick_experts_that_exist():
    logits = logits_of(4, 6)
    logits[0], logits[1, 2], logits[2] = float("nan"), float("inf"), -float("inf")
    weights, experts = triton_experts.route(logits, ROUTINGS["softmax"], None)
    assert experts[:3].tolist() == [[0, 1, 2]] * 3
    assert weights[:3].isnan().all()
    assert torch.equal(triton_experts.route(logits[3:], ROUTINGS["softmax"], None)[0], weights[3:])


def mixture_of(gate_up, down, routing, activation="silu", biases=(None, None), router_bias=None, expert_scales=None):
    """The twin for weights as numbers."""

    def expert(i):
        biases_of = [None if bias is None else bias[i] for bias in biases]
        return lambda x: F.linear(ACTIVATIONS[activation](F.linear(x, gate_up[i], biases_of[0])), down[i], biases_of[1])

    return ExpertLoop([expert(i) for i in range(len(down))], routing, router_bias, expert_scales)


@interpreted
@pytest.mark.parametrize(("tokens", "shares", "scales"), [(1, False, False), (7, True, False), (40, True, True)])
@pytest.mark.parametrize(
    ("num_experts", "routing", "activation", "width", "inner"),
    [
        (8, "renormalized", "silu", 64, 48),
        (4, "sigmoid", "gelu_pytorch_tanh", 40, 70),
        (3, "softmax", "clamped_silu", 40, 16),
    ],
)
def test_grouped_experts_give_the_weighted_sum(
    tokens, shares, scales, num_experts, routing, activation, width, inner, monkeypatch
):
    monkeypatch.setattr(triton_experts, "_CHOICES_PER_LOOP", 16)
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    gate_up = [noise(2 * inner, width) / 8 for _ in range(num_experts)]
    down = [noise(width, inner) / 8 for _ in range(num_experts)]
    options = {"activation": activation}
    if activation == "clamped_silu":
        gate_up = [4 * weight for weight in gate_up]
        options["biases"] = noise(num_experts, 2 * inner), noise(num_experts, width)
    if routing == "sigmoid":
        options |= {"router_bias": noise(num_experts), "expert_scales": noise(num_experts)}
    twin = mixture_of(gate_up, down, ROUTINGS[routing], **options)
    grouped = GroupedExperts(gate_up.copy(), down.copy(), ROUTINGS[routing], **options)
    x, logits = noise(tokens, width), logits_of(tokens, num_experts)
    shared, gate = noise(tokens, width) if shares else None, noise(tokens, 1) if scales else None
    expected = twin(x, logits, shared, gate)
    torch.testing.assert_close(grouped(x, logits, shared, gate), expected, rtol=1e-4, atol=1e-4)
    assert grouped(x[:0], logits[:0], None, None).shape == (0, width)
    assert grouped.nbytes == 4 * 3 * num_experts * width * inner


@interpreted
@pytest.mark.slow
def test_experts_of_prompts_in_large_tiles_give_the_weighted_sum():
    generator = torch.Generator().manual_seed(4)
    gate_up = [torch.randn(96, 72, generator=generator).div(8).half() for _ in range(2)]
    down = [torch.randn(72, 48, generator=generator).div(8).half() for _ in range(2)]
    routing = Routing(1, renormalize=True)
    x, logits = torch.randn(150, 72, generator=generator).half(), logits_of(150, 2).half()
    logits[:, 1] += 9
    grouped = GroupedExperts(gate_up.copy(), down.copy(), routing, activation="silu")
    wide = ([weight.float() for weight in each] for each in (gate_up, down))
    expected = mixture_of(*wide, routing)(x.float(), logits, None, None)
    found = grouped(x, logits, None, None)
    assert (found - expected).norm() < 2e-3 * expected.norm()
    assert expert_tile(kernel_weight(gate_up), 150, torch.float16, is_gated=True).rows == 128


QUANTIZED = {
    "int4": (random_weight, {"group_size": 32}),
    "int4-act-order": (random_weight, {"group_size": 32, "ordered": False}),
    "int4-small-groups": (random_weight, {"group_size": 16}),
    "int8": (random_weight, {"bits": 8, "group_size": 1000}),
    "mxfp4": (random_weight, {"group_size": 16, "levels": E2M1}),
    "fp8-channel": (random_float8, {"group_size": 1000}),
    "fp8-block": (random_float8, {"group_size": 32}),
}


def of_form(form, out, columns, num_experts):
    make, arguments = QUANTIZED[form]
    sizes = {**arguments, "group_size": min(arguments["group_size"], columns)}
    return [make(out, columns, **sizes, seed=seed) for seed in range(num_experts)]


@pytest.mark.quick("int4-act-order", "mxfp4", "fp8-block")
@interpreted
@pytest.mark.parametrize("form", QUANTIZED)
def test_experts_of_quantized_weights_are_those_of_the_dequantized_ones(form):
    width, inner = 96, 48
    routing, logits = Routing(2, renormalize=True), logits_of(20, 5)
    x = torch.randn(20, width, generator=torch.Generator().manual_seed(20))
    gate_up, down = of_form(form, 2 * inner, width, 5), of_form(form, width, inner, 5)
    wide = ([weight.dequantized(torch.float32) for weight in each] for each in (gate_up, down))
    expected = mixture_of(*wide, routing)(x, logits, None, None)
    actual = GroupedExperts(gate_up, down, routing, activation="silu")(x, logits, None, None)
    assert (actual - expected).norm() < 1e-5 * expected.norm()


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(("width", "inner"), [(1088, 32), (32, 1056)], ids=["first product", "second product"])
@pytest.mark.parametrize("form", ["floats", *QUANTIZED])
def test_parts_of_the_inputs_of_few_tokens_are_added(form, width, inner):
    generator, num_experts = torch.Generator().manual_seed(7), 8

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    def some(out, columns):
        if form == "floats":
            return [noise(out, columns) / 8 for _ in range(num_experts)]
        return of_form(form, out, columns, num_experts)

    options = {"activation": "clamped_silu" if form == "floats" else "silu"}
    if form == "floats":
        options["biases"] = noise(num_experts, 2 * inner), noise(num_experts, width)
    experts = GroupedExperts(some(2 * inner, width), some(width, inner), Routing(2, renormalize=True), **options)
    x, logits = noise(1, width), logits_of(1, num_experts)
    found, expected = experts(x, logits, None, None), experts(x.repeat(4, 1), logits.repeat(4, 1), None, None)[:1]
    assert not torch.equal(found, expected), "four tokens keep the processor busy without parts"
    assert (found - expected).norm() < 1e-5 * expected.norm()


@interpreted
def test_experts_in_different_formats_are_refused():
    gate_up = [random_weight(64, 32), random_weight(64, 32, bits=8)]
    with pytest.raises(ModelError, match="in different formats"):
        GroupedExperts(gate_up, [torch.zeros(32, 32)] * 2, Routing(1, renormalize=True), activation="silu")
