"""4-bit linear layers: exactly the product of rounded numbers, of which a group of 32 has at most 16."""

import pytest
import torch
from quantized_zoo import exact_activations

from pagedcli.layers.native_linear import NativeLinear


def layer_and_weight(library, out=97, columns=352, seed=0):
    """A 4-bit layer, its weight before rounding, and after: what rows with a single 1 give."""
    weight = torch.randn(out, columns, generator=torch.Generator().manual_seed(seed))
    linear = NativeLinear(library, weight, quantization="int4")
    return linear, weight, linear(torch.eye(columns)).T


def rms(x):
    return x.pow(2).mean().sqrt().item()


@pytest.mark.parametrize("tokens", [1, 4, 7, 70])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (97, 50), (64, 1100)])
def test_the_product_is_that_of_the_rounded_numbers(library, tokens, out, columns):
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
