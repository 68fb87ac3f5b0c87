"""int8 and int4 linear layers: exactly the product of rounded numbers, close to the real one, and the demo model still
right."""

import pytest
import torch
from harness.engine import outputs_of
from quantized_zoo import exact_activations, rounded_by_32

from pagedcli.config import EngineConfig
from pagedcli.layers.native_linear import NativeLinear
from pagedcli.runner.llm_engine import LLMEngine
from pagedcli.sampling_params import SamplingParams


def rounded_to_8_bits(weight):
    """Each 32 numbers in whole steps, up to 127, of a whole multiple of a 255th of what the row's largest needs."""
    unit = weight.abs().amax(-1, keepdim=True) / 127 / 255
    groups = []
    for group in weight.split(32, dim=-1):
        step = unit * (group.abs().amax(-1, keepdim=True) / unit / 127 - 1e-5).ceil().clamp(1, 255)
        groups.append((group / step).round().clamp(-127, 127) * step)
    return torch.cat(groups, -1)


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (97, 50), (64, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_rounded_numbers(library, tokens, out, columns, dtype):
    generator = torch.Generator().manual_seed(out)
    x, weight = (torch.randn(n, columns, generator=generator).to(dtype) for n in (tokens, out))
    expected = rounded_by_32(x.double()) @ rounded_to_8_bits(weight.double()).T
    actual = NativeLinear(library, weight, quantization="int8")(x).double()
    # a number half-way between two steps may go either way: one step of one factor
    torch.testing.assert_close(actual, expected, atol=0.08 * columns**0.5 / 7, rtol=0.01)
    if dtype == torch.float32:
        assert (actual - expected).abs().mean() < 1e-3 * expected.abs().mean()


def test_rows_of_zeros_stay_zero(library):
    linear = NativeLinear(library, torch.randn(32, 64), quantization="int8")
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 32))
    assert torch.equal(
        NativeLinear(library, torch.zeros(32, 64), quantization="int8")(torch.randn(2, 64)), torch.zeros(2, 32)
    )


def test_rounded_weights_take_less_memory_and_give_nearly_the_same_tokens(library):
    params, results = SamplingParams(temperature=0, max_tokens=1, logprobs=5), []
    for quantization in (None, "int8", "int4"):
        engine = LLMEngine(EngineConfig(quantization=quantization, max_model_len=128, dtype="float32"))
        [output] = outputs_of(engine, [list(range(40, 70))], params)
        results.append((engine.plan.weight_bytes, output.samples[0].logprobs[0]))
    (wide, exact), (narrow, eight), (narrowest, four) = results
    assert narrowest < narrow < 0.6 * wide
    assert eight.token_id == exact.token_id
    assert abs(eight.logprob - exact.logprob) < 0.3
    assert four.token_id in {token for token, _ in eight.top}


# ---------------------------------------------------------------------- int4: a group of 32 has at most 16 numbers


def layer_and_weight(library, out=97, columns=352, seed=0):
    """A 4-bit layer, its weight before rounding, and after: what rows with a single 1 give."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    linear = NativeLinear(library, weight, quantization="int4")
    return linear, weight, linear(torch.eye(columns)).T


def rms(x):
    return x.pow(2).mean().sqrt().item()


@pytest.mark.parametrize("tokens", [1, 4, 7, 70])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (97, 50), (64, 1100)])
def test_the_product_of_int4_is_that_of_the_rounded_numbers(library, tokens, out, columns):
    linear, _, rounded = layer_and_weight(library, out, columns)
    x = exact_activations(tokens, columns)
    expected = x.double() @ rounded.T.double()
    assert (linear(x) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_each_group_of_32_has_16_values(library):
    _, _, rounded = layer_and_weight(library)
    assert max(len(group.unique()) for row in rounded for group in row.split(32)) <= 16


def test_rounded_weights_are_whole_steps_of_a_127th_of_the_largest(library):
    # so 4-bit layers are int8 layers with other weights, whatever kernel computes them
    _, weight, rounded = layer_and_weight(library)
    steps = rounded / (weight.abs().amax(1, keepdim=True) / 127)
    assert (steps - steps.round()).abs().max() < 1e-3
    assert steps.abs().max() < 127.001


def test_error_is_less_than_that_of_ranges_from_least_to_most(library):
    _, weight, rounded = layer_and_weight(library)
    groups = weight.unflatten(1, (-1, 32))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least) / 15
    plain = (groups - least).div(step).round() * step + least
    assert rms(rounded - weight) < 0.95 * rms(plain - groups)
    assert rms(rounded - weight) < 0.075 * rms(weight)


def test_a_row_with_outliers_keeps_its_small_groups(library):
    weight = torch.randn(32, 1024, generator=torch.Generator().manual_seed(3))
    weight[:, 5] = 12.0
    rounded = NativeLinear(library, weight, quantization="int4")(torch.eye(1024)).T
    assert rms((rounded - weight)[:, 32:]) < 0.09 * rms(weight[:, 32:])


@pytest.mark.parametrize("sign", [1, -1])
def test_groups_of_one_sign_and_of_zeros_keep_their_values(library, sign):
    weight = sign * torch.arange(1, 33).repeat(40, 2).float()
    weight[3] = 0
    rounded = NativeLinear(library, weight, quantization="int4")(torch.eye(64)).T
    assert (rounded - weight).abs().max() < 1.6
    assert torch.equal(rounded[3], torch.zeros(64))
